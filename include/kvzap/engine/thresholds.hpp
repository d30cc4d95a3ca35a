// Thresholds of a surrogate for given windows and evict ratios, which `kvzap calibrate` stores in
// the surrogate's folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/engine/pruning.hpp>
#include <optional>
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
    double mean = 0;  // mean over texts; the nearest mean to evict_ratio that a threshold reaches
    double deviation = 0;  // standard deviation over texts; 0 for one text
    double least = 0;      // smallest value of a text
    double most = 0;
  };
  /// The thresholds of one window.
  struct Window {
    int window = 128;
    std::vector<Row> rows;  // by ascending evict_ratio, thresholds not descending

    /// Returns whether the evict ratio lies between the first and the last row.
    bool covers(double evict_ratio) const;
    /// Returns the threshold for an evict ratio, linearly interpolated between two rows. Throws
    /// Error that shows the rows if the ratio is outside of them.
    double threshold(double evict_ratio) const;
  };
  /// The threshold and window that evicted most of an evaluation's pairs while the confidence
  /// interval of their accuracy contained the full cache's accuracy.
  struct Recommendation {
    double threshold = 0;
    int window = 128;
    double evict_ratio = 0;  // mean over the prompts
    double accuracy = 0, accuracy_low = 0, accuracy_high = 0;
    double full_accuracy = 0;
    std::int64_t prompts = 0;
    std::string evaluation;  // folder of kvzap eval
  };
  std::string model;
  DType dtype = DType::bf16;
  bool chat_template = true;
  std::int64_t texts = 0;
  std::int64_t tokens = 0;
  std::int64_t sink = 0;
  std::vector<Window> windows;  // by descending window, at least one
  std::optional<Recommendation> recommended;

  /// Returns the path of the table in a surrogate's folder.
  static std::filesystem::path file_in(const std::filesystem::path& surrogate);
  /// Reads the table. Throws Error that names the file and the field if it is missing or malformed.
  static ThresholdTable load(const std::filesystem::path& file);
  /// Replaces the file in one step. Throws Error that names the file.
  void write(const std::filesystem::path& file) const;

  /// Returns the thresholds of the calibrated window that is nearest to `window`. Throws Error if
  /// there are none.
  const Window& nearest(int window) const;
  /// Returns the largest calibrated window that takes at most a quarter of the rows that stay at
  /// this evict ratio of a text of mean length, or the smallest window if none does. Throws Error
  /// if there are none.
  int window_for(double evict_ratio) const;
  /// Returns a readable table: a heading and one line for each row of each window.
  std::string text() const;
};

/// A threshold from a table.
struct LookedUpThreshold {
  double evict_ratio = 0;  // requested, or the recommendation's mean
  double threshold = 0;
  std::string file;
  /// On rank 0: one line for each setting that differs from the table's.
  std::vector<std::string> warnings;
};

/// Looks up the threshold of a pruning that looks_up_threshold: that of its evict ratio at its
/// window, or the recommended one. `chat_template`: whether prompts are wrapped in one; absent:
/// unknown. Reads a file; does not communicate. Throws Error for a ratio outside the table, and if
/// there is no table or no recommendation.
LookedUpThreshold look_up_threshold(const Pruning& pruning, std::optional<bool> chat_template = {},
                                    const PruningNames& names = plain_names());
/// Replaces an auto_window by a number: the largest calibrated window with PruneMode::always,
/// ThresholdTable::window_for an evict ratio that a threshold reaches, else the recommended window.
/// A pruning that evicts nothing gets the standard window. Rank 0 alone reads the table.
/// Collective. Throws AgreedError if there is no table or no recommendation.
void resolve_window(Pruning& pruning, const Communicator& comm,
                    const PruningNames& names = plain_names());
/// Calls resolve_window, then replaces the amount of a pruning that looks_up_threshold by the
/// threshold. For any other pruning it returns nothing and keeps the amount. Rank 0 alone reads the
/// table, so all ranks get the same threshold even if another process replaces the file.
/// Collective. Throws AgreedError where look_up_threshold throws.
std::optional<LookedUpThreshold> resolve_threshold(Pruning& pruning, const Communicator& comm,
                                                   std::optional<bool> chat_template = {},
                                                   const PruningNames& names = plain_names());

}  // namespace kvzap
