// The folder of an evaluation: what is evaluated (evaluation.json), and a record of every prompt
// under every setting (records.jsonl), from which a run that was interrupted goes on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::detail {

/// What became of a prompt under a setting: a line of records.jsonl.
struct EvalRecord {
  // Which prompt.
  std::string task_file;
  std::int64_t line = 0;
  std::string id;
  std::string task;
  std::string metric;
  // Which setting.
  std::string setting;  // its label
  std::string policy;

  std::optional<double> score;       // mean of `scores`; none for a perplexity
  std::vector<std::string> answers;  // of every try
  std::vector<double> scores;
  std::vector<std::string> expected;

  std::int64_t context_tokens = 0;
  std::int64_t question_tokens = 0;
  std::int64_t generated_tokens = 0;                 // of all tries, or of the continuation
  double evict_ratio = 0;                            // reached, before the first generated token
  std::vector<std::vector<std::int64_t>> kept_rows;  // [layer][KV head]
  std::int64_t cache_tokens = 0;                     // that the cache had seen then, kept or not
  std::int64_t kv_bytes = 0;
  std::int64_t full_kv_bytes = 0;  // had none been evicted
  // The same behind the last token of the first try.
  std::int64_t kv_bytes_at_end = 0;
  std::int64_t full_kv_bytes_at_end = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  std::optional<double> perplexity;
  std::optional<double> nll;  // sum over the continuation's tokens, in nats

  /// Without the newline.
  std::string to_json_line() const;
  /// Throws Error, naming the field, for what is no record.
  static EvalRecord parse(const std::string& line);
};

/// Names of the fields in which two descriptions of evaluations differ, with both values. Where a
/// prompt's result cannot depend on them, they may differ: the version, the model's folder.
std::vector<std::string> evaluation_differences(const nlohmann::json& there,
                                                const nlohmann::json& here);

/// The folder while it is written to. One process alone; two of them cannot have the same folder.
class EvaluationFolder {
 public:
  /// Makes the folder if it is not there, and takes it for this process. Throws Error, naming the
  /// file, if that fails or another process has it.
  explicit EvaluationFolder(std::filesystem::path folder);
  ~EvaluationFolder();
  EvaluationFolder(const EvaluationFolder&) = delete;
  EvaluationFolder& operator=(const EvaluationFolder&) = delete;

  /// Writes evaluation.json, or compares with the one that is there. Throws Error, naming what
  /// differs, if that is of another evaluation.
  void begin(const nlohmann::ordered_json& description);

  /// Gives the records that are there to `take`, prompt by prompt. Of a prompt there have to be
  /// records of all settings, in their order; one whose records end early is the last, torn when a
  /// run was ended, and cut off. Returns the bytes that were. Throws Error, naming the line, for
  /// anything else.
  std::int64_t read(const std::vector<std::string>& labels,
                    const std::function<void(EvalRecord&&)>& take);

  /// Appends lines so that they are on the disk when this returns. If that fails, none of them is
  /// in the file; throws Error, naming it.
  void append(const std::vector<std::string>& lines);

  std::filesystem::path records_file() const { return m_folder / "records.jsonl"; }
  std::filesystem::path description_file() const { return m_folder / "evaluation.json"; }
  const std::filesystem::path& folder() const { return m_folder; }

 private:
  void cut(std::int64_t size) const;

  std::filesystem::path m_folder;
  int m_descriptor = -1;
  std::int64_t m_size = 0;  // of the records that are whole
};

}  // namespace kvzap::detail
