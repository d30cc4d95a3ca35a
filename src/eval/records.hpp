// The folder of an evaluation: its description (evaluation.json), and a record of every prompt
// under every setting (records.jsonl), from which an interrupted run continues.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::eval {

/// Result of a prompt under a setting: a line of records.jsonl.
struct EvalRecord {
  // The prompt.
  std::string task_file;
  std::int64_t line = 0;
  std::string id;
  std::string task;
  std::string metric;
  // The setting.
  std::string setting;  // label of the setting
  std::string policy;

  std::optional<double> score;       // mean of `scores`; absent for a perplexity
  std::vector<std::string> answers;  // one per try
  std::vector<double> scores;
  std::vector<std::string> expected;

  std::int64_t context_tokens = 0;
  std::int64_t question_tokens = 0;
  std::int64_t generated_tokens = 0;                 // of all tries, or of the continuation
  double evict_ratio = 0;                            // before the first generated token
  std::vector<std::vector<std::int64_t>> kept_rows;  // [layer][KV head]
  std::int64_t cache_tokens = 0;  // tokens that the cache had seen then, kept or evicted
  std::int64_t kv_bytes = 0;
  std::int64_t full_kv_bytes = 0;  // without evictions
  // The same values after the last token of the first try.
  std::int64_t kv_bytes_at_end = 0;
  std::int64_t full_kv_bytes_at_end = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;
  std::optional<double> perplexity;
  std::optional<double> nll;  // sum over the continuation's tokens, in nats

  /// Returns the line, without the newline.
  std::string to_json_line() const;
  /// Parses a line. Throws Error, naming the field, for anything but a record.
  static EvalRecord parse(const std::string& line);
};

/// Returns the names of the fields in which two descriptions of evaluations differ, with both
/// values. Ignores the version and the model's folder, which affect no result.
std::vector<std::string> evaluation_differences(const nlohmann::json& there,
                                                const nlohmann::json& here);

/// The folder while it is being written. Only one process can have a folder open.
class EvaluationFolder {
 public:
  /// Creates the folder if needed, and locks it. Throws Error, naming the file, if that fails or
  /// another process has it open.
  explicit EvaluationFolder(std::filesystem::path folder);
  ~EvaluationFolder();
  EvaluationFolder(const EvaluationFolder&) = delete;
  EvaluationFolder& operator=(const EvaluationFolder&) = delete;

  /// Writes evaluation.json, or compares with an existing one. Throws Error, naming the
  /// differences, if the existing file describes another evaluation.
  void begin(const nlohmann::ordered_json& description);

  /// Passes the existing records to `take`, prompt by prompt. Each prompt needs records of all
  /// settings, in their order. If those of the last prompt are incomplete, because a run was
  /// killed, they are cut off. Returns the number of bytes cut off. Throws Error, naming the line,
  /// for anything else.
  std::int64_t read(const std::vector<std::string>& labels,
                    const std::function<void(EvalRecord&&)>& take);

  /// Appends lines and waits until they are on the disk. On failure the file has none of them, and
  /// this throws Error, naming the file.
  void append(const std::vector<std::string>& lines);

  std::filesystem::path records_file() const { return m_folder / "records.jsonl"; }
  std::filesystem::path description_file() const { return m_folder / "evaluation.json"; }
  const std::filesystem::path& folder() const { return m_folder; }

 private:
  void cut(std::int64_t size) const;

  std::filesystem::path m_folder;
  int m_descriptor = -1;
  std::int64_t m_size = 0;  // bytes of the complete records
};

}  // namespace kvzap::eval
