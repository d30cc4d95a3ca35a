// Handles signals that end a server: the first lets it finish, the second ends it at once.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <functional>
#include <mutex>
#include <thread>

#include "console/signals.hpp"

namespace kvzap::driver {

/// While it exists, stop_signals are recorded. Its own thread handles them, or a library's thread
/// that does not block them; SignalWatch describes the danger of handlers for oneDNN's sgemm.
/// Threads that start later do not receive these signals. A process may have one such object at a
/// time.
///
/// Before `begin`, the program must look at `signal()`. If it cannot, because a call waits for
/// another process (files::Waiting), a signal ends the process at once, and so does a second one.
class StopWatch {
 public:
  /// Without `acts`, signals are caught and ignored: rank 0 decides for all.
  explicit StopWatch(bool acts);
  ~StopWatch();
  StopWatch(const StopWatch&) = delete;
  StopWatch& operator=(const StopWatch&) = delete;

  /// Returns the first signal, or 0 if there was none yet.
  int signal() const { return m_signal; }
  /// Calls `drain` for the first signal, even one that came before. Calls `cut` for the second one,
  /// or `patience` seconds after the first. Each is called once, on a separate thread.
  void begin(std::function<void()> drain, std::function<void()> cut, double patience);
  /// Ends the calls to both functions.
  void end();
  /// Returns whether `cut` was called.
  bool has_cut() const { return m_has_cut; }

 private:
  void watch();

  bool m_acts;
  std::array<int, 2> m_pipe = {-1, -1};
  StopActions m_before = {};
  sigset_t m_mask_before = {};
  std::thread m_thread;
  std::atomic<int> m_signal{0};
  std::atomic<bool> m_has_cut{false};
  std::mutex m_mutex;  // for the members below
  std::function<void()> m_drain, m_cut;
  double m_patience = 0;
  bool m_has_begun = false;
  bool m_has_drained = false;
};

}  // namespace kvzap::driver
