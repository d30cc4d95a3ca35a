// Thresholds of a surrogate for given evict ratios, which `kvzap calibrate` stores in the
// surrogate's folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

namespace kvzap {

/// The contents of thresholds.json in a surrogate's folder (docs/guide/train.md describes the
/// fields).
struct ThresholdTable {
  /// A threshold, and the evict ratios of texts pruned with it. The evict ratio of a text is
  /// measured after its context: evicted pairs / (KV heads * tokens), mean over layers.
  struct Row {
    double evict_ratio = 0;  // requested
    double threshold = 0;    // log score below which a pair is evicted
    double mean = 0;         // over texts; the closest to evict_ratio that a threshold reaches
    double deviation = 0;    // standard deviation over texts; 0 for one text
    double least = 0;        // smallest of a text
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

  /// Returns the path of the table in a surrogate's folder.
  static std::filesystem::path file_in(const std::filesystem::path& surrogate);
  /// Reads the table. Throws Error that names the file and the field if it is missing or malformed.
  static ThresholdTable load(const std::filesystem::path& file);
  /// Replaces the file in one step. Throws Error that names the file.
  void write(const std::filesystem::path& file) const;

  /// Returns the threshold for an evict ratio, linearly interpolated between two rows. Throws Error
  /// that shows the table if the ratio is outside of it.
  double threshold(double evict_ratio) const;
  /// Returns a readable table: a heading and one line for each row.
  std::string text() const;
};

}  // namespace kvzap
