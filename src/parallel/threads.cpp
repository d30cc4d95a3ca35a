#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <kvzap/threads.hpp>
#include <string_view>

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

}  // namespace

void set_threads(int threads) {
  if (threads < 1)
    throw Error(fmt::format("{} threads are asked for; expected at least 1", threads));
  detail::set_host_threads(threads);
  detail::set_blas_threads(threads);
}

int threads() { return detail::host_threads(); }

int threads_of_rank(int ranks_on_node) {
  if (const int told = omp_num_threads(); told > 0) return told;
  const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  int cores = std::max(1, online);
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
#endif
  // Ranks that are bound to some have them for their own.
  if (cores >= online) cores /= std::max(1, ranks_on_node);
  const double share = quota() / std::max(1, ranks_on_node);
  if (share < cores) cores = static_cast<int>(std::lround(share));
  return std::clamp(cores, 1, most_threads);
}

int threads_of_rank(const Communicator& comm) { return threads_of_rank(comm.ranks_on_node()); }

}  // namespace kvzap
