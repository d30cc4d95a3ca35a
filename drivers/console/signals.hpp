// Signals that ask a long run to end in good order.
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

/// The last signal that a SignalWatch has recorded; 0: none.
inline volatile std::sig_atomic_t caught_signal = 0;
/// Time of the first signal, in nanoseconds.
inline std::atomic<std::int64_t> caught_at{0};
/// The terminal with a progress bar that must be erased before the process ends; -1: none.
inline volatile std::sig_atomic_t terminal_with_bar = -1;
/// Moves the cursor to the first column and erases the line.
inline constexpr std::string_view erase_line = "\r\033[K";

/// May be called in a signal handler.
inline void take_bar_away() {
  if (terminal_with_bar < 0) return;
  const auto written = write(terminal_with_bar, erase_line.data(), erase_line.size());
  if (written < 0) terminal_with_bar = -1;  // after a failure the bar stays
}

/// Erases the bar and ends the process by the signal.
extern "C" inline void end_by_signal(int signal) {
  take_bar_away();
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // takes effect when the handler returns
}

/// For commands without a SignalWatch, which a signal ends at once.
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
  // mpirun kills its ranks about a second after it has forwarded the signal, whatever they do then.
  take_bar_away();
  constexpr std::int64_t second = 1'000'000'000;
  const std::int64_t at = monotonic_nanoseconds();
  // A person is slower than a program that sends SIGINT twice.
  const std::int64_t pause = signal == SIGINT ? second / 5 : second;
  if (caught_signal == 0) {
    caught_at = at;
  } else if (at - caught_at >= pause) {
    end_by_signal(signal);
  }
  caught_signal = signal;
}

/// Returns whether the process may be killed before it can erase a bar that is drawn now.
inline bool may_be_killed_soon() {
  constexpr std::int64_t grace = 3'000'000'000;  // Open MPI's second, on a busy machine
  return caught_signal != 0 && monotonic_nanoseconds() - caught_at < grace;
}

/// While it exists, signals that ask a program to end are only recorded. A signal that arrives a
/// second or more after the first ends the process at once, as without this object. For SIGINT,
/// which a person sends, a fifth of a second suffices. A signal that arrives sooner is not a second
/// request. For example, timeout(1) sends its signal to the process and then to its process group,
/// and launchers send it to a step and to its ranks.
///
/// Handlers run on their own stack. oneDNN's sgemm temporarily points the stack pointer into a heap
/// buffer, and a handler on that stack would overwrite other memory. (Another thread of this
/// process that receives a signal has no such stack. Linux delivers signals to the first thread
/// unless it blocks them.)
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
  // mpirun ends its ranks soon after it has forwarded SIGTERM or SIGINT. It forwards SIGUSR1 and
  // does nothing else.
  static constexpr std::array<int, 3> signals = {SIGTERM, SIGINT, SIGUSR1};
  // Room for the registers of any processor (AVX-512 and AMX: 11 KiB).
  std::vector<char> m_stack = std::vector<char>(std::size_t{64} << 10);
  std::array<struct sigaction, signals.size()> m_before = {};
  stack_t m_stack_before = {};
};

/// Thrown to end a run in good order, on every rank.
struct Interrupted {
  int signal = 0;
};

/// Throws Interrupted on every rank if any rank has received a signal. Collective: one reduction of
/// a number.
inline void stop_if_asked(const Communicator& comm) {
  const int signal = static_cast<int>(comm.all_reduce_max(std::int64_t{caught_signal}));
  if (signal != 0) throw Interrupted{signal};
}

inline constexpr const char* stop_words = "stopped by a signal";
/// Does the same for this rank alone. Use it where an exception of one rank reaches all of them as
/// an error with the same text: inside a step, or inside Communicator::agree. Throws Error.
inline void stop_here_if_asked() {
  if (caught_signal != 0) throw Error(stop_words);
}
/// Returns whether the error is the one that stop_here_if_asked throws.
inline bool is_stop(const Error& error) {
  return std::string(error.what()).rfind(stop_words, 0) == 0;
}

}  // namespace kvzap::driver
