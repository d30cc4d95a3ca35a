// Options of `kvzap bench`, from flags or a deck.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/pruning.hpp>
#include <optional>
#include <string>
#include <vector>

#include "console/progress.hpp"
#include "options/rope_options.hpp"

namespace kvzap::driver {

/// Options as given; lists are texts of numbers separated by commas.
struct BenchOptions {
  std::string model;
  std::string surrogate;
  std::optional<double> threshold;
  std::string dtype = "bf16";
  std::string kv_type;  // empty: as dtype
  std::string read_pages = "all";
  std::string weights = "stored";
  std::optional<std::uint64_t> random_weights;
  std::optional<std::int64_t> threads;
  RopeOptions rope;
  std::optional<std::int64_t> layers;

  std::vector<std::string> prompt_tokens;
  std::vector<std::string> new_tokens;
  std::vector<std::string> depths;
  std::vector<std::string> batches;
  std::vector<std::string> evict_ratios;
  std::vector<std::string> skews;

  std::string prune = "prefill";
  std::string prefill;  // empty: sparse if pairs are evicted, otherwise dense
  std::int64_t chunk = 2048;
  int window = 128;
  bool auto_window = false;  // the surrogate's, see Pruning::auto_window
  int page_rows = 64;
  double balance = default_balance;

  std::int64_t repetitions = 5;
  bool warmup = true;
  std::uint64_t seed = 0;
  std::string output = "md";
  std::vector<std::string> columns;
  bool quiet = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// One row of the result.
struct BenchTest {
  enum class Kind { prefill, decode };
  Kind kind = Kind::prefill;
  /// Tokens of the prompt, or tokens generated for each sequence.
  std::int64_t tokens = 0;
  /// Tokens that each sequence has before the test.
  std::int64_t depth = 0;
  /// Sequences that decode together.
  int batch = 1;
  /// Evict ratio that random scores aim at; absent with a surrogate.
  std::optional<double> evict_ratio;
  double skew = 1;
  /// Whether a prompt runs chunk by chunk (sparse prefill) instead of as a whole.
  bool is_sparse = false;
  std::int64_t step_tokens = 0;

  bool is_pruned() const { return !evict_ratio || *evict_ratio > 0; }
  /// "pp512" or "tg128", as in llama-bench.
  std::string name() const;
};

/// Returns the numbers of a list, given in one or several parts and separated by commas; those of
/// `usual` if there are none. Throws Error that names the flag for an entry that is not a finite
/// number or not in range.
std::vector<double> real_numbers(const std::vector<std::string>& parts, const char* flag,
                                 const char* usual, const char* expected,
                                 const std::function<bool(double)>& is_good);

/// The same for whole numbers in [least, most].
std::vector<std::int64_t> whole_numbers(const std::vector<std::string>& parts, const char* flag,
                                        const char* usual, std::int64_t least, std::int64_t most);

/// Returns the columns that the Markdown table can have, by the names of --columns, in their
/// default order.
const std::vector<std::string>& bench_column_names();

/// Returns the columns that --columns names, in its order, or the most useful ones if it is empty.
/// Throws Error for an unknown name, and for --columns without a Markdown table.
std::vector<std::string> columns_of(const BenchOptions& options);

/// Declares every option of `kvzap bench` on `app`; parsing fills `options`.
void declare(CLI::App& app, BenchOptions& options);

/// Returns the pruning by the options' surrogate.
Pruning pruning_of(const BenchOptions& options);

/// Returns the tests that the options select, in the order in which they run. Throws Error that
/// names the flag for options that are out of range or contradict one another.
std::vector<BenchTest> tests_of(const BenchOptions& options);

}  // namespace kvzap::driver
