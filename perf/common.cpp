#include "common.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <kvzap/core/threads.hpp>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/simd.hpp"
#include "engine/build_info.hpp"
#include "linalg/host/onednn.hpp"
#include "parallel/mpi_session.hpp"
#include "revision.hpp"

namespace kvzap::perf {
namespace {

std::optional<Communicator> the_world;
int most_repetitions = Options().repetitions;

/// The values that were passed to add_context. Google Benchmark does not pass them to custom
/// reporters.
std::vector<std::pair<std::string, std::string>>& context() {
  static std::vector<std::pair<std::string, std::string>> entries;
  return entries;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/// Prints one line for each benchmark: the median, smallest and largest of its repetitions and the
/// medians of its counters. Silent on all ranks but the first.
class Table : public benchmark::BenchmarkReporter {
 public:
  explicit Table(bool is_silent) : m_is_silent(is_silent) {}

  bool ReportContext(const Context&) override {
    if (m_is_silent) return true;
    for (const auto& [key, value] : context()) std::printf("%s: %s\n", key.c_str(), value.c_str());
    std::printf("%-60s %12s %26s\n", "benchmark", "median", "smallest .. largest");
    return true;
  }

  void ReportRuns(const std::vector<Run>& runs) override {
    if (m_is_silent) return;
    std::vector<double> times;
    std::map<std::string, std::vector<double>> counters;
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      times.push_back(run.GetAdjustedRealTime());
      for (const auto& [name, counter] : run.counters) counters[name].push_back(counter);
    }
    if (times.empty()) return;
    const auto [smallest, largest] = std::minmax_element(times.begin(), times.end());
    std::string line =
        fmt::format("{:60} {:9.3f} ms {:9.3f} .. {:9.3f} ms", runs.front().run_name.function_name,
                    median(times), *smallest, *largest);
    for (const auto& [name, values] : counters)
      line += fmt::format("  {}={:.4g}", name, median(values));
    if (!runs.front().report_label.empty()) line += "  (" + runs.front().report_label + ")";
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

 private:
  bool m_is_silent;
};

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void add_context() {
  const auto add = [](const std::string& key, const std::string& value) {
    benchmark::AddCustomContext(key, value);
    context().emplace_back(key, value);
  };
  add("kvzap_revision", KVZAP_REVISION);
  add("compiler", KVZAP_COMPILER);
  add("compiler_flags", KVZAP_COMPILER_FLAGS);
  add("processor", processor());
#if defined(KOKKOS_ENABLE_CUDA)
  const cudaDeviceProp device = ExecutionSpace().cuda_device_prop();
  add("device", fmt::format("{}, compute capability {}.{}, {} multiprocessors, {:.1f} GB",
                            device.name, device.major, device.minor, device.multiProcessorCount,
                            1e-9 * static_cast<double>(device.totalGlobalMem)));
#endif
  add("processors", std::to_string(std::thread::hardware_concurrency()));
  add("instruction_set", base::name_of(base::machine().simd()));
  add("kokkos", fmt::format("{} {}", engine::kokkos_version(), ExecutionSpace::name()));
  add("mpi", engine::mpi_library());
  add("ranks", std::to_string(world().size()));
  add("threads_per_rank", std::to_string(threads()));
  add("onednn", linalg::onednn::is_available() ? linalg::onednn::version() : "none");
}

/// Removes this project's options from the arguments.
Options parse(int& argc, char** argv) {
  Options options;
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&](const std::string& name) -> const char* {
      return argument.rfind(name + "=", 0) == 0 ? argv[i] + name.size() + 1 : nullptr;
    };
    if (argument == "--quick") {
      options.quick = true;
    } else if (const char* count = value("--repetitions")) {
      if (std::atoi(count) < 1)
        throw Error(fmt::format("{}: expected a positive number", argument));
      options.repetitions = std::atoi(count);
    } else if (const char* text = value("--config")) {
      options.config = text;
    } else if (const char* folder = value("--configs")) {
      options.configs = folder;
    } else if (argument.rfind("--benchmark_out", 0) == 0 && !world().is_root()) {
      // Only one rank writes the file.
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  return options;
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  most_repetitions = options.repetitions;
  set_threads(threads_of_rank(world()));
  register_benchmarks(options);
  add_context();
  Table table(!world().is_root());
  benchmark::RunSpecifiedBenchmarks(&table);
  release_limits();
  benchmark::ClearRegisteredBenchmarks();  // they may hold views, which Kokkos must outlive
  return 0;
}

}  // namespace

const Communicator& world() { return *the_world; }

void world_barrier() { world().barrier(); }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double max_over_ranks(double value) {
#if KVZAP_HAVE_MPI
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, world().mpi());
#endif
  return value;
}

double sum_over_ranks(double value) {
#if KVZAP_HAVE_MPI
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_SUM, world().mpi());
#endif
  return value;
}

int repetitions_of(int repetitions) { return std::min(repetitions, most_repetitions); }

void add(const std::string& name, std::int64_t iterations, int repetitions,
         std::function<void(benchmark::State&)> body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->Iterations(iterations)
      ->Repetitions(repetitions_of(repetitions))
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

double time_iterations(benchmark::State& state, const std::function<void()>& work,
                       const std::function<void()>& before) {
  double sum = 0;
  for (auto _ : state) {
    if (before) before();
    world_barrier();
    const double begin = now();
    work();
    Kokkos::fence();
    const double seconds = max_over_ranks(now() - begin);
    state.SetIterationTime(seconds);
    sum += seconds;
  }
  return sum / static_cast<double>(state.iterations());
}

void report_bytes(benchmark::State& state, double seconds, double bytes, const Yardstick& limit) {
  const double rate = limit.rate();
  state.counters["GB/s"] = 1e-9 * bytes / seconds;
  state.counters["limit"] = 1e-9 * rate;
  state.counters["share"] = bytes / seconds / rate;
}

void report_flops(benchmark::State& state, double seconds, double flops, const Yardstick& limit) {
  const double rate = limit.rate();
  state.counters["GFLOP/s"] = 1e-9 * flops / seconds;
  state.counters["limit"] = 1e-9 * rate;
  state.counters["share"] = flops / seconds / rate;
}

std::filesystem::path model_folder(const Options& options, const std::string& name) {
  const std::filesystem::path named = options.configs / name;
  return std::filesystem::is_directory(named) ? named : std::filesystem::path(name);
}

TemporaryFolder::TemporaryFolder() {
  std::string path;
  world().agree_on_root([&] {
    path = (std::filesystem::temp_directory_path() / "kvzap-perf-XXXXXX").string();
    if (!mkdtemp(path.data())) throw Error("cannot make the folder " + path);
  });
  std::uint64_t length = path.size();
  world().broadcast(&length, sizeof(length), 0);
  path.resize(length);
  world().broadcast(path.data(), length, 0);
  m_path = path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (world().is_root()) std::filesystem::remove_all(m_path, ignored);
}

}  // namespace kvzap::perf

int main(int argc, char** argv) {
  const kvzap::parallel::MpiSession mpi(argc, argv);
  Kokkos::initialize(argc, argv);
  int status = 0;
  try {
    kvzap::perf::the_world = kvzap::Communicator::world();
    status = kvzap::perf::run(argc, argv);
  } catch (const std::exception& error) {
    // Other ranks may wait for this one.
    std::fprintf(stderr, "%s\n", error.what());
    kvzap::Communicator::world().abort(1);
  }
  Kokkos::finalize();
  return status;
}
