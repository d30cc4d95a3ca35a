#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <kvzap/threads.hpp>
#include <string_view>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif
#include <unistd.h>

#include "base/host_threads.hpp"
#include "linalg/host/blas_threads.hpp"

namespace kvzap {
namespace {

constexpr int most_threads = 4096;

/// Cores' worth of time that a container may take; infinite without a limit.
double quota() {
  const double none = INFINITY;
  double most = 0, period = 0;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  if (v2 >> most >> period) return most > 0 && period > 0 ? most / period : none;  // "max 100000"
  std::ifstream quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream length("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (quota >> most && length >> period) return most > 0 && period > 0 ? most / period : none;
  return none;
}

/// 0 if it is not set, or to no number. (It may be a list, of which the first counts.)
int omp_num_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (!text) return 0;
  const std::string_view value(text);
  int threads = 0;
  std::from_chars(value.data(), value.data() + value.size(), threads);
  return std::clamp(threads, 0, most_threads);
}

// A bit for each core, the first 4,096.
using CoreSet = std::array<std::int64_t, 64>;

CoreSet cores_of_process() {
  CoreSet cores = {};
  const auto add = [&](long core) {
    const auto word = static_cast<std::size_t>(core) / 64;
    if (word < cores.size())
      cores[word] |= static_cast<std::int64_t>(std::uint64_t{1} << core % 64);
  };
#ifdef __linux__
  // (Larger than cpu_set_t: the system refuses sets that have no room for all of its cores.)
  std::array<cpu_set_t, 8 * sizeof(CoreSet) / CPU_SETSIZE> set = {};
  if (sched_getaffinity(0, sizeof(set), set.data()) == 0) {
    for (int core = 0; core < static_cast<int>(8 * sizeof(set)); ++core) {
      if (CPU_ISSET_S(static_cast<std::size_t>(core), sizeof(set), set.data())) add(core);
    }
    return cores;
  }
#endif
  for (long core = 0; core < std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)); ++core) add(core);
  return cores;
}

/// The same on all ranks of a node, and hardly ever on others.
std::int64_t node_number() {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  return static_cast<std::int64_t>(std::hash<std::string_view>()(name.data()));
}

}  // namespace

void set_threads(int threads) {
  if (threads < 1)
    throw Error(fmt::format("{} threads are asked for; expected at least 1", threads));
  detail::set_host_threads(threads);
  detail::set_blas_threads(threads);
}

int threads() { return detail::host_threads(); }

int threads_of_rank(const Communicator& comm) {
  const CoreSet own = cores_of_process();
  std::vector<std::int64_t> told(own.begin(), own.end());
  told.push_back(node_number());
  int on_node = 0, sharing = 0;
  for (const auto& other : comm.all_gather(told)) {
    if (other.back() != told.back()) continue;
    ++on_node;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if ((own[i] & other[i]) == 0) continue;
      ++sharing;
      break;
    }
  }
  if (const int given = omp_num_threads(); given > 0) return given;
  std::int64_t cores = 0;
  for (const std::int64_t word : own)
    cores += __builtin_popcountll(static_cast<std::uint64_t>(word));
  double share = std::floor(static_cast<double>(cores) / std::max(1, sharing));
  share = std::min(share, std::round(quota() / std::max(1, on_node)));
  return static_cast<int>(std::clamp<double>(share, 1, most_threads));
}

}  // namespace kvzap
