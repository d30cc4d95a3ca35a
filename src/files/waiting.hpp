// Calls that wait for another process or for a person, so that a signal can end the wait.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <filesystem>

namespace kvzap::files {

/// Number of calls that wait at the moment. A signal handler may read it.
inline std::atomic<int> waiting_calls{0};
/// Called before each wait for input. A program that records signals sets it to a function that
/// ends the process if there was one: nobody would look at the record while the call waits.
inline std::atomic<void (*)()> before_input{nullptr};

/// Exists while a call may wait for another process or a person: while a pipe, a terminal or a
/// device is opened, read or written. Regular files and folders do not count.
class Waiting {
 public:
  enum class For { input, output };

  Waiting(const std::filesystem::path& file, For what) {
    struct stat status = {};
    begin(::stat(file.c_str(), &status) == 0 && is_slow(status), what);
  }
  Waiting(int descriptor, For what) {
    struct stat status = {};
    begin(::fstat(descriptor, &status) == 0 && is_slow(status), what);
  }
  ~Waiting() {
    if (m_counts) --waiting_calls;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  static bool is_slow(const struct stat& status) {
    return !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
  }
  void begin(bool counts, For what) {
    m_counts = counts;
    if (!m_counts) return;
    ++waiting_calls;  // first: a signal that comes now finds it
    const auto before = before_input.load();
    if (what == For::input && before != nullptr) before();
  }

  bool m_counts = false;
};

}  // namespace kvzap::files
