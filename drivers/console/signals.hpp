// Signals that ask a long run to end in good order.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "console/console.hpp"
#include "files/waiting.hpp"

namespace kvzap::driver {

/// The last signal that a SignalWatch has recorded; 0: none.
inline volatile std::sig_atomic_t caught_signal = 0;
/// Time of the first signal, in nanoseconds.
inline std::atomic<std::int64_t> caught_at{0};
/// The terminal with a progress bar that must be erased before the process ends; -1: none.
inline volatile std::sig_atomic_t terminal_with_bar = -1;
/// The terminal that marks pasted text for a line editor, which must end with the process; -1:
/// none.
inline volatile std::sig_atomic_t terminal_with_paste_marks = -1;
/// Moves the cursor to the first column and erases the line.
inline constexpr std::string_view erase_line = "\r\033[K";
/// Asks a terminal to mark pasted text, or no longer to do so.
inline constexpr std::string_view begin_paste_marks = "\033[?2004h";
inline constexpr std::string_view end_paste_marks = "\033[?2004l";

/// May be called in a signal handler.
inline void take_bar_away() {
  if (terminal_with_bar < 0) return;
  const auto written = write(terminal_with_bar, erase_line.data(), erase_line.size());
  if (written < 0) terminal_with_bar = -1;  // after a failure the bar stays
}

/// Restores the terminal and ends the process by the signal, also within a handler.
extern "C" inline void end_by_signal(int signal) {
  take_bar_away();
  if (terminal_with_paste_marks >= 0 &&
      write(terminal_with_paste_marks, end_paste_marks.data(), end_paste_marks.size()) < 0) {
    terminal_with_paste_marks = -1;  // nothing can be done in a handler
  }
  std::signal(signal, SIG_DFL);
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, signal);
  pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
  std::raise(signal);
}

/// Signals that ask a program to end. mpirun ends its ranks soon after it has forwarded SIGTERM or
/// SIGINT. It forwards SIGUSR1 and does nothing else. SIGHUP: the terminal was closed.
inline constexpr std::array<int, 4> stop_signals = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
using StopActions = std::array<struct sigaction, stop_signals.size()>;

/// Handles all stop_signals by `action` and sets `before` to the actions until now. SIGHUP stays
/// ignored if it is (nohup).
inline void handle_stop_signals(const struct sigaction& action, StopActions& before) {
  for (std::size_t i = 0; i < stop_signals.size(); ++i) {
    sigaction(stop_signals[i], nullptr, &before[i]);
    if (stop_signals[i] == SIGHUP && before[i].sa_handler == SIG_IGN) continue;
    sigaction(stop_signals[i], &action, nullptr);
  }
}
inline void restore_stop_signals(const StopActions& before) {
  for (std::size_t i = 0; i < stop_signals.size(); ++i) {
    sigaction(stop_signals[i], &before[i], nullptr);
  }
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
  const bool is_second = caught_signal != 0 && at - caught_at >= pause;
  if (caught_signal == 0) caught_at = at;
  caught_signal = signal;
  // A call that waits for another process may never return to see the record.
  if (is_second || files::waiting_calls > 0) end_by_signal(signal);
}

/// For files::before_input: a signal that came shortly before the wait ends the process.
inline void end_if_caught() {
  if (caught_signal != 0) end_by_signal(caught_signal);
}

/// Returns whether the process may be killed before it can erase a bar that is drawn now.
inline bool may_be_killed_soon() {
  constexpr std::int64_t grace = 3'000'000'000;  // Open MPI's second, on a busy machine
  return caught_signal != 0 && monotonic_nanoseconds() - caught_at < grace;
}

/// While it exists, signals that ask a program to end are only recorded. While a call waits for
/// another process or a person (files::Waiting), such as the opening of a pipe without a writer, a
/// signal ends the process at once, as without this object. So does a signal that arrives a second
/// or more after the first. For SIGINT, which a person sends, a fifth of a second suffices. A
/// signal that arrives sooner is not a second request. For example, timeout(1) sends its signal to
/// the process and then to its process group, and launchers send it to a step and to its ranks.
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
    struct sigaction action = {};
    action.sa_handler = note_signal;
    sigemptyset(&action.sa_mask);
    for (const int signal : stop_signals) sigaddset(&action.sa_mask, signal);
    action.sa_flags = static_cast<int>(SA_RESTART | SA_ONSTACK);
    files::before_input = end_if_caught;
    handle_stop_signals(action, m_before);
  }
  ~SignalWatch() {
    restore_stop_signals(m_before);
    files::before_input = nullptr;
    sigaltstack(&m_stack_before, nullptr);
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  // Room for the registers of any processor (AVX-512 and AMX: 11 KiB).
  std::vector<char> m_stack = std::vector<char>(std::size_t{64} << 10);
  StopActions m_before = {};
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

/// Runs `work` on rank 0, which writes `output` and calls stop_here_if_asked. A signal then ends
/// it, and the file is not written. Returns the exit status: 0, or 128 + the signal's number.
/// Collective. Throws AgreedError.
inline int write_unless_stopped(const std::string& output, const Communicator& comm,
                                const std::function<void()>& work) {
  const SignalWatch watch;
  try {
    comm.agree_on_root(work);
    return 0;
  } catch (const Error&) {
    const int signal = static_cast<int>(comm.all_reduce_max(std::int64_t{caught_signal}));
    if (signal == 0) throw;
    if (comm.is_root()) say("kvzap: stopped by signal {}; {} was not written\n", signal, output);
    constexpr int by_signal = 128;
    return by_signal + signal;
  }
}

}  // namespace kvzap::driver
