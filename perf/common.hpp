// What the benchmark programs share: their main, and timing over ranks.
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

/// Options of the command line beside Google Benchmark's.
struct Options {
  std::filesystem::path configs = KVZAP_CONFIGS;  // --configs=DIR: where model folders are
  std::string config = "Qwen3-0.6B";              // --config=NAME: one of them, or a path
  int repetitions = 5;                            // --repetitions=N: of each benchmark, at most
  bool quick = false;                             // --quick: smaller sizes, fewer repetitions
};

/// Each program defines this; it registers the benchmarks. Called on every rank.
void register_benchmarks(const Options& options);

/// All ranks of the program.
const Communicator& world();
void world_barrier();
/// Seconds of a steady clock.
double now();
/// Collective.
double max_over_ranks(double value);
double sum_over_ranks(double value);

/// Registers `body` with times measured by itself (time_iterations) and a fixed number of
/// iterations and repetitions (or --repetitions, if that is less), so that all ranks agree on them.
void add(const std::string& name, std::int64_t iterations, int repetitions,
         std::function<void(benchmark::State&)> body);
/// What add makes of `repetitions`.
int repetitions_of(int repetitions);

/// Runs `work` as many times as the benchmark has iterations. All ranks begin each together, and it
/// takes as long as on the slowest; `before` runs ahead of it, untimed. Returns the mean seconds.
double time_iterations(benchmark::State& state, const std::function<void()>& work,
                       const std::function<void()>& before = {});

/// Counters of one name in all programs: GB/s or GFLOP/s (10^9, summed over ranks), the limit in
/// the same unit, and the share of it.
void report_bytes(benchmark::State& state, double seconds, double bytes, const Yardstick& limit);
void report_flops(benchmark::State& state, double seconds, double flops, const Yardstick& limit);

/// The folder of a model that is named as Options has it.
std::filesystem::path model_folder(const Options& options, const std::string& name);

/// A folder under the system's temporary one that all ranks know; removed with what is in it.
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
