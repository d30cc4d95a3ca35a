// The results of `kvzap bench` as a Markdown table, CSV or JSON.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "console/machine.hpp"
#include "options/bench_options.hpp"

namespace kvzap::driver {

/// Properties that all tests of one call share.
struct BenchSystem {
  std::string version;
  std::string revision;
  std::string model;  // the folder's name
  std::int64_t layers = 0;
  std::int64_t all_layers = 0;
  std::int64_t parameters = 0;
  std::int64_t weight_bytes = 0;  // summed over ranks
  std::string surrogate_kind;     // empty: none
  Machine machine;
  int ranks = 1;
};

struct BenchResult {
  BenchTest test;
  /// Seconds of each repetition, on the slowest rank.
  std::vector<double> seconds;
  // Values after the last repetition, summed over ranks.
  std::int64_t kept_rows = 0;
  std::int64_t full_rows = 0;  // without eviction
  std::int64_t kv_live_bytes = 0;
  std::int64_t kv_allocated_bytes = 0;
  /// Peak over the repetitions. If the system does not provide it, the peak of the whole process.
  std::int64_t peak_rss_bytes = 0;
  // Communication of a step, of a decoded token of all sequences or of a prompt, in the last
  // repetition: collective calls, bytes that a rank gives to them (mean of the ranks), and seconds
  // in them, on the rank that waits least.
  double calls = 0;
  double call_bytes = 0;
  double call_seconds = 0;

  double evicted() const;
  /// Returns the new tokens per second of all sequences together, for each repetition.
  std::vector<double> tokens_per_second() const;
  /// Returns the mean time between two tokens of one sequence.
  double ms_per_token() const;
};

/// A table that prints its rows one by one.
class BenchTable {
 public:
  virtual ~BenchTable() = default;
  /// Returns the text before the first row, for a row, and after the last one.
  virtual std::string header() = 0;
  virtual std::string row(const BenchResult& result) = 0;
  virtual std::string footer() { return ""; }

  /// `tests`: all tests of the call; they set the width of the columns. The arguments must outlive
  /// the table.
  static std::unique_ptr<BenchTable> create(const BenchOptions& options, const BenchSystem& system,
                                            const std::vector<BenchTest>& tests);
};

}  // namespace kvzap::driver
