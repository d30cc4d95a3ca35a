// Thresholds of a surrogate that reach given evict ratios, as `kvzap calibrate` stores them beside
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

namespace kvzap {

/// thresholds.json in a surrogate's folder (docs/guide/train.md has its fields).
struct ThresholdTable {
  /// A threshold, and the evict ratios of texts that were pruned by it. A text's evict ratio is
  /// that of a run after its context: evicted pairs / (KV heads * tokens), mean over layers.
  struct Row {
    double evict_ratio = 0;  // that was asked for
    double threshold = 0;    // log score below which a pair is evicted
    double mean = 0;         // over texts; as near to evict_ratio as a threshold can bring it
    double deviation = 0;    // standard deviation over texts; 0 of one text
    double least = 0;        // of a text
    double most = 0;
  };
  std::string model;
  DType dtype = DType::bf16;
  bool chat_template = true;
  std::int64_t texts = 0;
  std::int64_t tokens = 0;
  int window = 128;
  std::int64_t sink = 0;
  std::vector<Row> rows;  // by ascending evict_ratio, thresholds not descending

  static std::filesystem::path file_in(const std::filesystem::path& surrogate);
  /// Throws Error, naming the file and the field, if it is missing or malformed.
  static ThresholdTable load(const std::filesystem::path& file);
  /// Replaces the file in one step. Throws Error, naming it.
  void write(const std::filesystem::path& file) const;

  /// Between two rows by linear interpolation. Throws Error, with the table in its text, for a
  /// ratio outside of it.
  double threshold(double evict_ratio) const;
  /// For a person: a heading, and a line for each row.
  std::string text() const;
};

}  // namespace kvzap
