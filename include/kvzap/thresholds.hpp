// Thresholds of a surrogate that reach given evict ratios, as `kvzap calibrate` stores them beside
// it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace kvzap {

/// thresholds.json in a surrogate's folder.
struct ThresholdTable {
  struct Row {
    double evict_ratio = 0;  // mean over texts
    double threshold = 0;    // log score
    double deviation = 0;    // standard deviation of the evict ratio over texts
    double least = 0;        // smallest and largest evict ratio of a text
    double most = 0;
  };
  std::string model;
  std::int64_t texts = 0;
  std::int64_t tokens = 0;
  int window = 128;
  std::int64_t sink = 0;
  std::vector<Row> rows;  // by ascending evict ratio

  static std::filesystem::path file_in(const std::filesystem::path& surrogate);
  /// Throws Error, naming the file and the field, if it is missing or malformed.
  static ThresholdTable load(const std::filesystem::path& surrogate);
  /// Replaces the file in one step.
  void write(const std::filesystem::path& surrogate) const;

  /// Between two rows by linear interpolation. Throws Error, with the table in its text, for a
  /// ratio outside of it.
  double threshold(double evict_ratio) const;
  /// For a person: one line per row.
  std::string text() const;
};

}  // namespace kvzap
