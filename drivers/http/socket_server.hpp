// cpp-httplib's server with a thread for each connection. The thread knows its socket.
#pragma once

#include <httplib.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>

namespace kvzap::driver {

/// The socket of a connection. A copy refers to the same socket. The destructor does not close it.
class Socket {
 public:
  /// `descriptor`: -1 for none.
  explicit Socket(int descriptor) : m_descriptor(descriptor) {}
  /// Returns the socket of the connection that this thread serves.
  static Socket& current();

  /// Returns whether the client has closed the connection.
  bool is_closed() const;
  /// Waits until the head of a request has arrived. Returns false if the connection should close.
  /// The library limits neither the size nor the time of a head, so a long or slow head ends the
  /// connection. `idle`: seconds to wait for the first byte; `ends`: stops all waiting.
  bool wait_for_head(double idle, const std::atomic<bool>& ends) const;
  /// Ends the connection after reading the client's remaining bytes for up to a second. Closing a
  /// socket with unread bytes would discard the reply.
  void end() const;

 private:
  bool refuse(const char* status) const;  // returns false
  bool wait(int milliseconds) const;

  int m_descriptor;
};

/// cpp-httplib's server. Each connection's thread finds its socket in Socket::current().
class SocketServer final : public httplib::Server {
 public:
  /// Serves at most `max_connections` at once. Other connections wait to be accepted.
  explicit SocketServer(std::size_t max_connections);

  /// Stops reading from all clients. Replies can still be written.
  void stop_reading();
  /// Closes connections after their current request.
  void end_connections() { m_ends = true; }

 private:
  bool process_and_close_socket(socket_t descriptor) override;
  void note(int descriptor, bool is_open);

  std::atomic<bool> m_ends{false};
  std::mutex m_mutex;
  std::set<int> m_open;
};

}  // namespace kvzap::driver
