// Prompts with known answers: `kvzap make-tasks` writes them, `kvzap eval` reads them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvzap {

/// One prompt of an evaluation: a row of a JSONL file (docs/reference/tasks.md describes the
/// fields).
struct Task {
  std::string task;     // "niah_single_1"; the file's stem if the row names none
  std::string context;  // may be empty unless the question is, too
  std::string question;
  std::string answer_prefix;         // start of the answer, given to the model
  std::vector<std::string> answers;  // expected answers; at least one
  std::int64_t max_new_tokens = 0;   // 0: the default of the metric, see default_max_new_tokens
  std::string metric;                // name of the metric; empty: by the task's name, see metric_of
  std::vector<std::string> classes;  // all possible answers, for metrics of classes
  std::string id;                    // the row's id, or empty
  std::int64_t line = 0;             // in the file, from 1
};

/// The rows of a file.
struct TaskFile {
  std::filesystem::path file;
  std::vector<Task> tasks;
  /// Errors of the lines that were skipped ("FILE: line N: FIELD: …").
  std::vector<std::string> skipped;
  /// Hash of the file's bytes.
  std::uint64_t hash = 0;
};

/// Prompt templates by the task's name. A template is a text with {context} and {input} in place of
/// a row's fields, as in LongBench's config/dataset2prompt.json.
using PromptTemplates = std::map<std::string, std::string>;

/// Reads a JSON object of templates. Throws Error for any other content, and for a text without
/// {context} and {input} or with more than one {context}.
PromptTemplates read_prompt_templates(const std::filesystem::path& file);

/// Reads a JSONL file with the fields of kvpress' evaluation, RULER, LongBench or AIME. For a line
/// that is no task it throws Error, naming file, line and field; with `keep_going` it skips the
/// line and lists it in `skipped`. Throws Error if no task is left. No communication.
///
/// If `templates` is not empty, it must have a text for the task of every row with LongBench's or
/// AIME's own fields ("trec" is also used for "trec_e"). The text up to {context} is put before the
/// context; the rest becomes the question.
TaskFile read_tasks(const std::filesystem::path& file, bool keep_going,
                    const PromptTemplates& templates = {});

/// Returns a row for read_tasks, without the newline.
std::string to_json_line(const Task& task);

}  // namespace kvzap
