#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <kvzap/core/threads.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif
#include <unistd.h>

#include "base/host_threads.hpp"
#include "linalg/host/blas_threads.hpp"
#include "parallel/cores.hpp"

namespace kvzap {
namespace {

constexpr int most_threads = 4096;

/// Returns the CPU quota of a cgroup's folder in cores; infinite without a limit.
double quota_in(const std::filesystem::path& folder) {
  double most = 0, period = 0;
  std::ifstream v2(folder / "cpu.max");  // "max 100000" without a limit
  if (v2 >> most >> period && most > 0 && period > 0) return most / period;
  return INFINITY;
}

/// Returns the CPU quota of this process's cgroups in cores.
double quota() {
  const std::filesystem::path root = "/sys/fs/cgroup";
  double least = quota_in(root);
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::/", 0) != 0) continue;
    // The limits of the enclosing groups apply, too.
    for (std::filesystem::path group = line.substr(4); !group.empty();
         group = group.parent_path()) {
      least = std::min(least, quota_in(root / group));
    }
  }
  double most = 0, period = 0;
  std::ifstream v1(root / "cpu/cpu.cfs_quota_us"), length(root / "cpu/cpu.cfs_period_us");
  if (v1 >> most && length >> period && most > 0 && period > 0)
    least = std::min(least, most / period);
  return least;
}

/// Returns OMP_NUM_THREADS, or 0 if it is not set or not a number. Of a list, the first number
/// counts.
int omp_num_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (!text) return 0;
  const std::string_view value(text);
  int threads = 0;
  std::from_chars(value.data(), value.data() + value.size(), threads);
  return std::clamp(threads, 0, most_threads);
}

// One bit for each of the first 4,096 cores.
using CoreSet = std::array<std::int64_t, 64>;

CoreSet cores_of_process() {
  CoreSet cores = {};
  const auto add = [&](long core) {
    const auto word = static_cast<std::size_t>(core) / 64;
    if (word < cores.size())
      cores[word] |= static_cast<std::int64_t>(std::uint64_t{1} << core % 64);
  };
#ifdef __linux__
  // Larger than cpu_set_t: the system refuses sets without room for all of its cores.
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

/// Counts the cores of a set; the hardware threads of a core count once.
int cores_in(const CoreSet& set) {
  const auto has = [&](long core) {
    return (static_cast<std::uint64_t>(set[static_cast<std::size_t>(core) / 64]) >> core % 64 &
            1) != 0;
  };
  int cores = 0;
  for (long core = 0; core < static_cast<long>(64 * set.size()); ++core) {
    if (!has(core)) continue;
    // "3,67" or "6-7"; a stream of some locales would read the former as one number.
    std::ifstream siblings(
        fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", core));
    std::string list;
    std::getline(siblings, list);
    long first = core;
    std::from_chars(list.data(), list.data() + list.size(), first);
    if (first < 0 || first > core || !has(first)) first = core;
    if (first == core) ++cores;
  }
  return cores;
}

/// Returns a number that is equal on all ranks of a node, and almost certainly differs between
/// nodes.
std::int64_t node_number() {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  return static_cast<std::int64_t>(std::hash<std::string_view>()(name.data()));
}

/// Returns the number of entries of a list such as "0-3,8"; 0 for a malformed list.
int count_of_list(const std::string& list) {
  int count = 0;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    const int found = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (found < 1 || (found == 2 && last < first)) return 0;
    count += found == 2 ? last - first + 1 : 1;
  }
  return count;
}

}  // namespace

int parallel::cores_of_node() {
  auto cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const std::string key = "Cpus_allowed_list:";
  std::ifstream first_process("/proc/1/status");
  for (std::string line; std::getline(first_process, line);) {
    if (line.rfind(key, 0) != 0) continue;
    if (const int allowed = count_of_list(line.substr(key.size())); allowed > 0) {
      cores = std::min(cores, allowed);
    }
  }
  return static_cast<int>(std::clamp<double>(std::round(quota()), 1, std::max(1, cores)));
}

void set_threads(int threads) {
  if (threads < 1)
    throw Error(fmt::format("the number of threads is {}; expected at least 1", threads));
  base::set_host_threads(threads);
  linalg::set_blas_threads(threads);
}

int threads() { return base::host_threads(); }

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
  double share = std::floor(static_cast<double>(cores_in(own)) / std::max(1, sharing));
  share = std::min(share, std::round(quota() / std::max(1, on_node)));
  return static_cast<int>(std::clamp<double>(share, 1, most_threads));
}

}  // namespace kvzap
