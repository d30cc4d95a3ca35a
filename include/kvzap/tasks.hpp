// Prompts with known answers: what `kvzap eval` reads and `kvzap make-tasks` writes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvzap {

/// One prompt of an evaluation, a row of a JSONL file (docs/evaluation.md has the fields).
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
  /// What was wrong with the lines that were left out ("FILE:LINE: …").
  std::vector<std::string> skipped;
  /// Of the file's bytes.
  std::uint64_t hash = 0;
};

/// Reads a JSONL file; the fields of kvpress' evaluation, RULER and LongBench are recognised. A
/// line that is no task is an Error naming file, line and field, or, with `keep_going`, left out
/// and told of. Throws Error also if no line is left. Reads on this process alone.
TaskFile read_tasks(const std::filesystem::path& file, bool keep_going);

/// A row as read_tasks takes it, without the newline.
std::string to_json_line(const Task& task);

}  // namespace kvzap
