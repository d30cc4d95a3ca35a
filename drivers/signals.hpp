// Signals that ask a long piece of work to end in good order.
#pragma once

#include <array>
#include <csignal>

namespace kvzap::driver {

/// The last signal that a SignalWatch has noted; 0: none.
inline volatile std::sig_atomic_t caught_signal = 0;

extern "C" inline void note_signal(int signal) { caught_signal = signal; }

/// While it lives, the signals that ask a program to end are noted and nothing more. A second one
/// of them ends the process at once, as without it.
class SignalWatch {
 public:
  SignalWatch() {
    caught_signal = 0;
    for (std::size_t i = 0; i < signals.size(); ++i) {
      struct sigaction action = {};
      action.sa_handler = note_signal;
      sigemptyset(&action.sa_mask);
      action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
      sigaction(signals[i], &action, &m_before[i]);
    }
  }
  ~SignalWatch() {
    for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &m_before[i], nullptr);
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  // mpirun ends its ranks soon after it has passed on SIGTERM or SIGINT; SIGUSR1 it only passes on.
  static constexpr std::array<int, 3> signals = {SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, signals.size()> m_before = {};
};

}  // namespace kvzap::driver
