// Signals that ask a long piece of work to end in good order.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::driver {

/// The last signal that a SignalWatch has noted; 0: none.
inline volatile std::sig_atomic_t caught_signal = 0;
/// When it noted the first one, in nanoseconds.
inline std::atomic<std::int64_t> caught_at{0};
/// The terminal on which there is a progress bar to be taken away before the process ends; -1:
/// none.
inline volatile std::sig_atomic_t terminal_with_bar = -1;
/// Takes the cursor to the line's first column and erases the line.
inline constexpr std::string_view erase_line = "\r\033[K";

/// May be called where a signal is handled.
inline void take_bar_away() {
  if (terminal_with_bar < 0) return;
  const auto written = write(terminal_with_bar, erase_line.data(), erase_line.size());
  if (written < 0) terminal_with_bar = -1;  // what a failure leaves is a bar
}

/// Ends the process by the signal, and takes the bar away first.
extern "C" inline void end_by_signal(int signal) {
  take_bar_away();
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // takes effect when the handler returns
}

/// For commands without a SignalWatch, which signals end at once.
inline void erase_bar_at_the_end() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = end_by_signal;
    sigaction(signal, &action, nullptr);
  }
}

inline std::int64_t monotonic_nanoseconds() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

extern "C" inline void note_signal(int signal) {
  // mpirun kills its ranks about a second after it has told them, wherever they are then.
  take_bar_away();
  constexpr std::int64_t second = 1'000'000'000;
  const std::int64_t at = monotonic_nanoseconds();
  // Nobody's finger is as fast as a program that sends SIGINT twice.
  const std::int64_t pause = signal == SIGINT ? second / 5 : second;
  if (caught_signal == 0) {
    caught_at = at;
  } else if (at - caught_at >= pause) {
    end_by_signal(signal);
  }
  caught_signal = signal;
}

/// Whether the process may be killed before it can take a bar away that is drawn now.
inline bool may_be_killed_soon() {
  constexpr std::int64_t grace = 3'000'000'000;  // Open MPI's second, on a busy machine
  return caught_signal != 0 && monotonic_nanoseconds() - caught_at < grace;
}

/// While it lives, the signals that ask a program to end are noted and nothing more. One that
/// comes a second or more after the first (SIGINT, which a person sends: a fifth of one) ends the
/// process at once, as without this. What comes sooner is no second wish: timeout(1) sends its
/// signal to the process and then to the process's group, launchers to a step and to its ranks.
///
/// They are noted on a stack of their own: oneDNN's sgemm makes the stack pointer point into a
/// buffer on the heap for a while, and what a handler puts below it there overwrites other memory.
/// (A thread of this process that is told of a signal in place of the one that makes this object
/// has no such stack; Linux tells the first thread unless it blocks signals.)
class SignalWatch {
 public:
  SignalWatch() {
    caught_signal = 0;
    stack_t stack = {};
    stack.ss_sp = m_stack.data();
    stack.ss_size = m_stack.size();
    sigaltstack(&stack, &m_stack_before);
    for (std::size_t i = 0; i < signals.size(); ++i) {
      struct sigaction action = {};
      action.sa_handler = note_signal;
      sigemptyset(&action.sa_mask);
      for (const int other : signals) sigaddset(&action.sa_mask, other);
      action.sa_flags = static_cast<int>(SA_RESTART | SA_ONSTACK);
      sigaction(signals[i], &action, &m_before[i]);
    }
  }
  ~SignalWatch() {
    for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &m_before[i], nullptr);
    sigaltstack(&m_stack_before, nullptr);
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  // mpirun ends its ranks soon after it has passed on SIGTERM or SIGINT; SIGUSR1 it only passes on.
  static constexpr std::array<int, 3> signals = {SIGTERM, SIGINT, SIGUSR1};
  // Room for the registers of any processor (AVX-512 and AMX: 11 KiB).
  std::vector<char> m_stack = std::vector<char>(std::size_t{64} << 10);
  std::array<struct sigaction, signals.size()> m_before = {};
  stack_t m_stack_before = {};
};

/// What ends a run in good order, on every rank.
struct Interrupted {
  int signal = 0;
};

/// Throws Interrupted on every rank if a signal has asked one of them for the end. Collective: one
/// reduction of a number.
inline void stop_if_asked(const Communicator& comm) {
  const int signal = static_cast<int>(comm.all_reduce_max(std::int64_t{caught_signal}));
  if (signal != 0) throw Interrupted{signal};
}

inline constexpr const char* stop_words = "stopped by a signal";
/// The same for this rank alone, where whatever one rank throws reaches all of them as an error of
/// the same text: inside a step, or inside Communicator::agree. Throws Error.
inline void stop_here_if_asked() {
  if (caught_signal != 0) throw Error(stop_words);
}
/// Whether an error is that one.
inline bool is_stop(const Error& error) {
  return std::string(error.what()).rfind(stop_words, 0) == 0;
}

}  // namespace kvzap::driver
