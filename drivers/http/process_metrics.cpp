#include "http/process_metrics.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "files/decimal.hpp"

namespace kvzap::driver {
namespace {

/// Returns a field of /proc/self/stat by its number in proc(5), or nothing. The second field, a
/// name in parentheses, may have blanks.
std::optional<double> stat_field(int number) {
  std::ifstream file("/proc/self/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  const std::size_t end = line.rfind(')');
  if (end == std::string::npos) return {};
  std::istringstream fields(line.substr(end + 1));
  std::string field;
  constexpr int first = 3;
  for (int n = first; n <= number; ++n) fields >> field;
  double value = 0;
  if (!fields || files::read_real(field, value) != files::DecimalFault::none) return {};
  return value;
}

/// Returns the time of the system's start in seconds since 1970, or nothing.
std::optional<double> boot_time() {
  std::ifstream file("/proc/stat");
  for (std::string name; file >> name;) {
    double value = 0;
    if (name == "btime" && file >> value) return value;
    std::getline(file, name);
  }
  return {};
}

std::optional<double> open_descriptors() {
  std::error_code code;
  std::filesystem::directory_iterator entries("/proc/self/fd", code);
  double count = -1;  // without the one that reads the folder
  for (; !code && entries != std::filesystem::directory_iterator(); entries.increment(code))
    ++count;
  if (code) return {};
  return count;
}

double seconds_of(const timeval& time) {
  constexpr double micro = 1e-6;
  return static_cast<double>(time.tv_sec) + micro * static_cast<double>(time.tv_usec);
}

}  // namespace

std::string process_metrics(const std::string& version, const std::string& revision) {
  std::string text;
  const auto add = [&](const char* name, const char* type, const char* help,
                       std::optional<double> value, const std::string& labels = {}) {
    if (!value) return;
    text += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{0}{3} {4}\n", name, help, type, labels,
                        *value);
  };
  constexpr int virtual_size = 23, resident_pages = 24, start_ticks = 22;
  rusage usage = {};
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    add("process_cpu_seconds_total", "counter", "Processor time of the server's process, rank 0.",
        seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime));
  }
  add("process_virtual_memory_bytes", "gauge", "Virtual memory.", stat_field(virtual_size));
  std::optional<double> resident = stat_field(resident_pages);
  if (resident) *resident *= static_cast<double>(sysconf(_SC_PAGESIZE));
  add("process_resident_memory_bytes", "gauge", "Resident memory.", resident);
  const std::optional<double> ticks = stat_field(start_ticks), boot = boot_time();
  if (ticks && boot) {
    add("process_start_time_seconds", "gauge", "Start of the process in seconds since 1970.",
        *boot + *ticks / static_cast<double>(sysconf(_SC_CLK_TCK)));
  }
  add("process_open_fds", "gauge", "Open file descriptors.", open_descriptors());
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    add("process_max_fds", "gauge", "Limit on open file descriptors.",
        static_cast<double>(limit.rlim_cur));
  }
  add("kvzap_build_info", "gauge", "Always 1; the labels name the build.", 1,
      fmt::format("{{version=\"{}\",revision=\"{}\"}}", version, revision));
  return text;
}

}  // namespace kvzap::driver
