#include "http/socket_server.hpp"

#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/stopwatch.hpp"

namespace kvzap::driver {
namespace {

using base::Clock;
using base::seconds_since;

// Time between two checks whether the server ends.
constexpr int look_milliseconds = 250;
constexpr double keep_alive_seconds = 30;
// Limits of a request's head.
constexpr std::size_t longest_head = 64 << 10;
constexpr double head_seconds = 30;

/// Runs one thread for each connection, because an answer may take long. The library deletes it.
class Connections final : public httplib::TaskQueue {
  // Some versions of the library return whether the queue has space.
  using Taken = decltype(std::declval<httplib::TaskQueue>().enqueue(std::function<void()>()));

 public:
  explicit Connections(std::size_t most) : m_most(most) {}
  ~Connections() override { end(); }

  Taken enqueue(std::function<void()> work) override {
    std::unique_lock<std::mutex> lock(m_mutex);
    // The library accepts no further connection until this one has a thread.
    m_room.wait(lock, [&] { return m_work.size() < m_idle || m_threads.size() < m_most; });
    m_work.push_back(std::move(work));
    try {
      if (m_work.size() > m_idle) m_threads.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      // The system refuses another thread, so the connection waits for one that exists.
    }
    m_wake.notify_one();
    return Taken(true);
  }
  void shutdown() override { end(); }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(m_mutex);
    for (;;) {
      ++m_idle;
      m_room.notify_one();
      m_wake.wait(lock, [&] { return !m_work.empty() || m_ends; });
      --m_idle;
      if (m_work.empty()) return;
      const std::function<void()> work = std::move(m_work.front());
      m_work.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }
  void end() {
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      m_ends = true;
    }
    m_wake.notify_all();
    for (std::thread& thread : m_threads) thread.join();
    m_threads.clear();
  }

  std::size_t m_most;
  std::mutex m_mutex;
  std::condition_variable m_wake, m_room;
  std::deque<std::function<void()>> m_work;
  std::vector<std::thread> m_threads;
  std::size_t m_idle = 0;
  bool m_ends = false;
};

}  // namespace

Socket& Socket::current() {
  static thread_local Socket socket(-1);
  return socket;
}

bool Socket::is_closed() const {
  if (m_descriptor < 0) return false;
  pollfd look = {m_descriptor, POLLRDHUP, 0};
  return poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

bool Socket::wait(int milliseconds) const {
  pollfd look = {m_descriptor, POLLIN, 0};
  return poll(&look, 1, milliseconds) > 0;
}

bool Socket::wait_for_head(double idle, const std::atomic<bool>& ends) const {
  if (m_descriptor < 0) return false;
  const auto is_more_than = [this](std::size_t bytes, int milliseconds) {
    const int more = static_cast<int>(bytes + 1);
    setsockopt(m_descriptor, SOL_SOCKET, SO_RCVLOWAT, &more, sizeof(more));
    return wait(milliseconds);
  };
  const auto start = Clock::now();
  while (!is_more_than(0, look_milliseconds)) {
    if (seconds_since(start) > idle || ends) return false;
  }
  const auto begin = Clock::now();
  std::vector<char> head(longest_head);
  std::size_t size = 0;
  for (;;) {
    const ssize_t seen = recv(m_descriptor, head.data(), head.size(), MSG_PEEK | MSG_DONTWAIT);
    const bool is_over = seen >= 0 && static_cast<std::size_t>(seen) <= size;
    if (is_over || (seen < 0 && errno != EAGAIN && errno != EINTR))
      break;  // the client has disconnected
    size = seen < 0 ? size : static_cast<std::size_t>(seen);
    const std::string_view text(head.data(), size);
    if (text.find("\n\r\n") != std::string_view::npos) break;
    if (size == head.size()) return refuse("431 Request Header Fields Too Large");
    while (!is_more_than(size, look_milliseconds)) {
      if (seconds_since(begin) > head_seconds) return refuse("408 Request Timeout");
      if (ends) {
        end();
        return false;
      }
    }
    if (seconds_since(begin) > head_seconds) return refuse("408 Request Timeout");
  }
  const int one = 1;
  setsockopt(m_descriptor, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
  return size > 0;
}

bool Socket::refuse(const char* status) const {
  const std::string text =
      fmt::format("HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", status);
  if (send(m_descriptor, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    // The client has disconnected.
  }
  end();
  return false;
}

void Socket::end() const {
  if (m_descriptor < 0) return;
  ::shutdown(m_descriptor, SHUT_WR);
  const auto start = Clock::now();
  constexpr double patience = 1;
  std::array<char, 16384> rest{};
  const int one = 1;
  setsockopt(m_descriptor, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
  while (seconds_since(start) < patience) {
    constexpr int milliseconds = 100;
    if (!wait(milliseconds)) continue;
    if (recv(m_descriptor, rest.data(), rest.size(), 0) <= 0) break;
  }
  ::shutdown(m_descriptor, SHUT_RDWR);
}

SocketServer::SocketServer(std::size_t max_connections) {
  new_task_queue = [max_connections] { return new Connections(max_connections); };
}

void SocketServer::stop_reading() {
  m_ends = true;
  const std::lock_guard<std::mutex> lock(m_mutex);
  for (const int descriptor : m_open) ::shutdown(descriptor, SHUT_RD);
}

/// The library calls this on the connection's thread, with the accepted socket.
bool SocketServer::process_and_close_socket(socket_t descriptor) {
  note(descriptor, true);
  Socket& socket = Socket::current();
  socket = Socket(descriptor);
  bool is_well = true, is_closed = false;
  for (std::size_t left = keep_alive_max_count_; left > 0 && is_well && !is_closed; --left) {
    if (!socket.wait_for_head(keep_alive_seconds, m_ends)) break;
    is_well = httplib::detail::process_client_socket(
        descriptor, read_timeout_sec_, read_timeout_usec_, write_timeout_sec_, write_timeout_usec_,
        [&](httplib::Stream& stream) {
          return process_request(stream, left == 1, is_closed, nullptr);
        });
  }
  socket = Socket(-1);
  // Forgets the descriptor before closing it, because the next connection may get the same number.
  note(descriptor, false);
  ::shutdown(descriptor, SHUT_RDWR);
  ::close(descriptor);
  return is_well;
}

void SocketServer::note(int descriptor, bool is_open) {
  const std::lock_guard<std::mutex> lock(m_mutex);
  if (is_open) {
    m_open.insert(descriptor);
  } else {
    m_open.erase(descriptor);
  }
}

}  // namespace kvzap::driver
