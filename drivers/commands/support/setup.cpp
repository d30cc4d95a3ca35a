#include "commands/support/setup.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <kvzap/core/threads.hpp>
#include <sstream>

#include "base/kokkos_compat.hpp"
#include "commands/run/report.hpp"
#include "console/console.hpp"
#include "files/counted.hpp"
#include "files/temporary_file.hpp"
#include "files/waiting.hpp"
#include "parallel/cores.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Returns the number in a file of one line, or -1. "max" in a cgroup's limit counts as none.
std::int64_t number_in(const fs::path& file) {
  std::int64_t number = -1;
  std::ifstream stream(file);
  return stream >> number ? number : -1;
}

/// Returns the bytes of a line "name: N kB" of a file in /proc, or -1.
std::int64_t bytes_in(const char* file, const std::string& name) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string word;
    std::int64_t kilobytes = 0;
    if (words >> word >> kilobytes && word == name + ":") return 1024 * kilobytes;
  }
  return -1;
}

/// Returns the memory that processes on this node may still allocate, or -1 if it is unknown. In a
/// container or a batch job, the limit of its control group counts.
std::int64_t available_bytes() {
  std::int64_t available = bytes_in("/proc/meminfo", "MemAvailable");
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::/", 0) != 0) continue;  // the only hierarchy of version 2
    for (fs::path group = fs::path(line.substr(3)).relative_path();; group = group.parent_path()) {
      const fs::path folder = "/sys/fs/cgroup" / group;
      const std::int64_t limit = number_in(folder / "memory.max");
      const std::int64_t used = number_in(folder / "memory.current");
      if (limit >= 0 && used >= 0) {
        const std::int64_t left = std::max<std::int64_t>(0, limit - used);
        available = available < 0 ? left : std::min(available, left);
      }
      if (group.empty()) break;
    }
  }
  return available;
}

/// Returns whether `file` exists and is a pipe or a device, which a new file must not replace.
bool is_special(const std::string& file) {
  std::error_code ignored;
  return fs::exists(file, ignored) && !fs::is_regular_file(file, ignored);
}

/// Returns whether `file` is the target of standard output, such as /dev/stdout. A new file would
/// replace the one with the answer, and /dev/stdout may lead to a pipe without a name.
bool is_standard_output(const std::string& file) {
  if (file == "-") return true;
  struct stat named {};
  struct stat output {};
  return ::stat(file.c_str(), &named) == 0 && ::fstat(STDOUT_FILENO, &output) == 0 &&
         named.st_dev == output.st_dev && named.st_ino == output.st_ino;
}

}  // namespace

ModelSetup set_up_model(const std::string& folder, std::optional<std::int64_t> layers,
                        const std::string& placement, int ranks, const RopeOptions& rope) {
  ModelConfig config = ModelConfig::load(folder);
  apply_rope(rope, config);
  const std::int64_t all_layers = config.num_hidden_layers;
  if (layers && (*layers < 1 || *layers > all_layers)) {
    throw UsageError(fmt::format("--layers is {}; expected 1 to {}, the layers of {}", *layers,
                                 all_layers, folder));
  }
  config.num_hidden_layers = layers.value_or(all_layers);
  auto kept = placement.empty() ? std::vector<std::vector<std::int64_t>>()
                                : read_kept_rows(placement, config);
  const std::int64_t used = config.num_hidden_layers;
  config.num_hidden_layers = all_layers;
  return session::deal_model(folder, std::move(config), used, std::move(kept), ranks);
}

void print_notes(const ModelSetup& setup, bool talks) {
  for (const auto& warning : setup.config.warnings) {
    say("kvzap: warning: {}\n", warning);
  }
  if (talks && setup.is_truncated()) {
    say("kvzap: note: the run uses only the first {} of {} layers of {}\n",
        setup.config.num_hidden_layers, setup.all_layers, setup.folder);
  }
}

std::int64_t available_bytes_of_node() { return base::runs_on_host ? available_bytes() : -1; }

void check_memory(std::int64_t bytes, int ranks_on_node, const std::string& purpose) {
  if (!base::runs_on_host) return;
  const std::int64_t available = available_bytes();
  // Divides, because the product may not fit 64 bits.
  if (available < 0 || bytes <= available / ranks_on_node) return;
  throw Error(fmt::format("not enough memory: {} on this node need{} {} {}for {}, {} are available",
                          files::counted(ranks_on_node, "rank"), ranks_on_node == 1 ? "s" : "",
                          human_bytes(bytes), ranks_on_node == 1 ? "" : "each ", purpose,
                          human_bytes(available)));
}

void use_threads(std::optional<std::int64_t> asked, const Communicator& comm, bool talks) {
  const int threads = asked ? static_cast<int>(*asked) : threads_of_rank(comm);
  const int ranks = comm.ranks_on_node();
  set_threads(threads);
  if (!talks) return;
  const int cores = parallel::cores_of_node();
  if (asked && threads * ranks > cores) {
    say("kvzap: warning: --threads {}: {} with {} each, on {}: they will wait for one another\n",
        threads, files::counted(ranks, "rank"), files::counted(threads, "thread"),
        files::counted(cores, "core"));
  }
  if (!asked && !std::getenv("OMP_NUM_THREADS") && ranks > 1 && 2 * ranks * threads <= cores) {
    say("kvzap: note: {} on this node may use {} of {} cores: mpirun --bind-to none lets them "
        "use all\n",
        files::counted(ranks, "rank"), ranks * threads, cores);
  }
}

std::int64_t peak_rss_bytes() {
  // getrusage would still report peaks from before a reset.
  const std::int64_t peak = bytes_in("/proc/self/status", "VmHWM");
  if (peak >= 0) return peak;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{1024} * usage.ru_maxrss;
}

void reset_peak_rss() {
  // proc(5): 5 resets the peak resident set size.
  std::ofstream("/proc/self/clear_refs") << "5\n";
}

void check_writable(const std::string& file) {
  if (file.empty() || is_standard_output(file)) return;
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) {
    throw Error(fmt::format("--json {}: is a folder; expected a file", file));
  }
  // Opening a pipe would wait for its reader.
  if (is_special(file)) return;
  files::check_file_writable(file, "--json");
}

void write_whole(const std::string& file, const std::string& text, const std::string& flag) {
  if (is_standard_output(file)) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return;
  }
  if (!is_special(file)) {
    files::write_text(file, text, flag);
    return;
  }
  const files::Waiting waiting(file, files::Waiting::For::output);
  std::ofstream stream(file, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) throw Error(fmt::format("{} {}: writing failed (is the disk full?)", flag, file));
}

namespace {

bool is_reader_gone() {
  pollfd output = {STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&output, 1, 0) > 0 && (output.revents & POLLERR) != 0;
}

}  // namespace

void flush_stdout() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  throw Error(is_reader_gone() ? std::string(closed_pipe)
                               : "standard output: writing failed (is the disk full?)");
}

}  // namespace kvzap::driver
