#include "console/signal_watch.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <utility>

#include "base/start_thread.hpp"

namespace kvzap::driver {
namespace {

std::atomic<int> told = -1;        // descriptor that the handler writes to
std::atomic<int> first_signal{0};  // that asks this process to end

extern "C" void tell_stop_watch(int signal) {
  const int error = errno;
  const auto number = static_cast<unsigned char>(signal);
  if (write(told, &number, 1) < 0) {
    // the pipe is full of signals
  }
  errno = error;
}

/// For files::before_input: a signal that came shortly before the wait ends the process.
void end_if_told() {
  if (first_signal != 0) end_by_signal(first_signal);
}

}  // namespace

StopWatch::StopWatch(bool acts) : m_acts(acts) {
  if (pipe2(m_pipe.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    throw Error(fmt::format("a pipe for signals cannot be made: {}", std::strerror(errno)));
  }
  told = m_pipe[1];
  first_signal = 0;
  files::before_input = end_if_told;
  struct sigaction action = {};
  action.sa_handler = tell_stop_watch;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  handle_stop_signals(action, m_before);
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : stop_signals) sigaddset(&mask, signal);
  // Only one thread of this program handles signals.
  m_thread = base::start_thread("watches for signals", [this] { watch(); });
  pthread_sigmask(SIG_BLOCK, &mask, &m_mask_before);
}

StopWatch::~StopWatch() {
  const unsigned char none = 0;
  while (write(m_pipe[1], &none, 1) < 0 && errno == EAGAIN) std::this_thread::yield();
  m_thread.join();
  restore_stop_signals(m_before);
  files::before_input = nullptr;
  pthread_sigmask(SIG_SETMASK, &m_mask_before, nullptr);
  told = -1;
  for (const int end : m_pipe) close(end);
}

void StopWatch::begin(std::function<void()> drain, std::function<void()> cut, double patience) {
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_has_begun = true;
  m_drain = std::move(drain);
  m_cut = std::move(cut);
  m_patience = patience;
}

void StopWatch::end() {
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_drain = m_cut = nullptr;
}

void StopWatch::watch() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point first;
  for (;;) {
    pollfd look = {m_pipe[0], POLLIN, 0};
    constexpr int every = 50;  // milliseconds
    poll(&look, 1, m_signal == 0 ? -1 : every);
    unsigned char number = 0;
    bool cuts = false;
    while (read(m_pipe[0], &number, 1) == 1) {
      if (number == 0) return;
      if (!m_acts) continue;
      if (m_signal == 0) {
        m_signal = first_signal = number;
        first = Clock::now();
        if (files::waiting_calls > 0) end_by_signal(number);
        continue;
      }
      // A signal that follows at once is not a second request: see SignalWatch.
      cuts =
          cuts || Clock::now() - first > std::chrono::milliseconds(number == SIGINT ? 200 : 1000);
    }
    if (m_signal == 0) continue;
    const std::lock_guard<std::mutex> lock(m_mutex);
    if (m_drain && !m_has_drained) {
      m_has_drained = true;
      first = Clock::now();
      m_drain();
    }
    if (!m_has_begun && cuts) end_by_signal(m_signal);
    if (!m_cut || m_has_cut) continue;
    const std::chrono::duration<double> since = Clock::now() - first;
    if (!cuts && since.count() < m_patience) continue;
    m_has_cut = true;
    m_cut();
  }
}

}  // namespace kvzap::driver
