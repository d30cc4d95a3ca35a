// Signals that end a server: the first lets it finish, the second does not.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <functional>
#include <mutex>
#include <thread>

namespace kvzap::driver {

/// While it lives, SIGTERM, SIGINT and SIGUSR1 are noted. (They are handled on a thread of their
/// own, or on one of a library that does not block them: SignalWatch says what a handler can do to
/// oneDNN's sgemm. Threads that begin later do not see them.) One of a process at a time.
class StopWatch {
 public:
  /// Without `acts` signals are caught and forgotten: rank 0 speaks for all.
  explicit StopWatch(bool acts);
  ~StopWatch();
  StopWatch(const StopWatch&) = delete;
  StopWatch& operator=(const StopWatch&) = delete;

  /// The first signal; 0: none yet.
  int signal() const { return m_signal; }
  /// Calls `drain` for the first signal, also one that has come before, and `cut` for the second
  /// one, or when the first is `patience` seconds ago. Both by a thread of their own, once.
  void begin(std::function<void()> drain, std::function<void()> cut, double patience);
  /// Neither is called any more.
  void end();
  /// Whether `cut` was called.
  bool has_cut() const { return m_has_cut; }

 private:
  void watch();

  static constexpr std::array<int, 3> signals = {SIGTERM, SIGINT, SIGUSR1};
  bool m_acts;
  std::array<int, 2> m_pipe = {-1, -1};
  std::array<struct sigaction, signals.size()> m_before = {};
  sigset_t m_mask_before = {};
  std::thread m_thread;
  std::atomic<int> m_signal{0};
  std::atomic<bool> m_has_cut{false};
  std::mutex m_mutex;  // of what follows
  std::function<void()> m_drain, m_cut;
  double m_patience = 0;
  bool m_has_drained = false;
};

}  // namespace kvzap::driver
