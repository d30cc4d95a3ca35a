// Prompts with known answers: what `kvzap eval` reads and `kvzap make-tasks` writes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvzap {

/// One prompt of an evaluation, a row of a JSONL file (docs/reference/tasks.md has the fields).
struct Task {
  std::string task;     // "niah_single_1"; the file's stem if the row names none
  std::string context;  // may be empty if the question is not
  std::string question;
  std::string answer_prefix;         // what the model's answer begins with, already written
  std::vector<std::string> answers;  // expected; at least one
  std::int64_t max_new_tokens = 0;   // 0: the row gives none, which the reader fills in by metric
  std::string metric;                // by name; empty: by the task's name, see metric_of
  std::vector<std::string> classes;  // all answers that there are, for metrics that choose
  std::string id;                    // the row's own, or empty
  std::int64_t line = 0;             // in the file, from 1
};

/// The rows of a file.
struct TaskFile {
  std::filesystem::path file;
  std::vector<Task> tasks;
  /// What was wrong with the lines that were left out ("FILE: line N: FIELD: …").
  std::vector<std::string> skipped;
  /// Of the file's bytes.
  std::uint64_t hash = 0;
};

/// How a task's prompts are put together from their parts, by the task's name: texts in which
/// {context} and {input} stand for a row's fields, as in LongBench's config/dataset2prompt.json.
using PromptTemplates = std::map<std::string, std::string>;

/// Reads a JSON object of such texts. Throws Error for anything else, and for a text without
/// {context} and {input} or with more than one {context}.
PromptTemplates read_prompt_templates(const std::filesystem::path& file);

/// Reads a JSONL file; the fields of kvpress' evaluation, RULER, LongBench and AIME are recognised.
/// A line that is no task is an Error naming file, line and field, or, with `keep_going`, left out
/// and told of. Throws Error also if no line is left. Reads on this process alone.
///
/// Rows with LongBench's and AIME's own fields are put together by `templates`, if there are any:
/// what stands up to {context} goes before the context, the rest becomes the question. Then every
/// such row needs one for its task ("trec" also serves "trec_e").
TaskFile read_tasks(const std::filesystem::path& file, bool keep_going,
                    const PromptTemplates& templates = {});

/// A row as read_tasks takes it, without the newline.
std::string to_json_line(const Task& task);

}  // namespace kvzap
