// Shared by the benchmark programs: main, and timing over ranks.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/model/model_config.hpp>
#include <string>

#include "limits.hpp"

namespace kvzap::perf {

/// Options of the command line in addition to Google Benchmark's.
struct Options {
  std::filesystem::path configs = KVZAP_CONFIGS;  // --configs=DIR: where model folders are
  std::string config = "Qwen3-0.6B";              // --config=NAME: one of these folders, or a path
  int repetitions = 5;  // --repetitions=N: most repetitions of each benchmark
  bool quick = false;   // --quick: smaller sizes, fewer repetitions
};

/// Registers the benchmarks. Each program defines it. Called on every rank.
void register_benchmarks(const Options& options);

/// Returns all ranks of the program.
const Communicator& world();
void world_barrier();
/// Returns the seconds of a steady clock.
double now();
/// Collective.
double max_over_ranks(double value);
double sum_over_ranks(double value);

/// Registers `body`, which measures its own time (time_iterations). The number of iterations and
/// repetitions (or --repetitions, if that is less) is fixed, so that all ranks agree on it.
void add(const std::string& name, std::int64_t iterations, int repetitions,
         std::function<void(benchmark::State&)> body);
/// Returns the number of repetitions that `add` uses for `repetitions`.
int repetitions_of(int repetitions);

/// Runs `work` once per iteration of the benchmark. All ranks begin each iteration together, and it
/// takes as long as on the slowest. `before` runs first, untimed. Returns the mean seconds.
double time_iterations(benchmark::State& state, const std::function<void()>& work,
                       const std::function<void()>& before = {});

/// Counters with the same names in all programs: GB/s or GFLOP/s (10^9, summed over ranks), the
/// limit in the same unit, and the share of it.
void report_bytes(benchmark::State& state, double seconds, double bytes, const Yardstick& limit);
void report_flops(benchmark::State& state, double seconds, double flops, const Yardstick& limit);

/// Returns the folder of a model that Options name.
std::filesystem::path model_folder(const Options& options, const std::string& name);

/// A folder under the system's temporary folder that all ranks know. It is removed with its
/// contents.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return m_path; }

 private:
  std::filesystem::path m_path;
};

}  // namespace kvzap::perf
