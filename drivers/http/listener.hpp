// Accepts connections and drives them on a thread of its own.
#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <string>
#include <thread>

#include "http/connection.hpp"

namespace kvzap::driver {

/// The thread of connections. A connection takes no thread while it waits.
class Listener {
 public:
  using Executor = boost::asio::io_context::executor_type;

  /// Listens on an address; accepts connections from `start` on. `port` 0: any free port. At most
  /// `most` connections exist at once: a further one ends another (Connections::next_to_end).
  /// Raises the process's limit on descriptors to that if it may. Throws Error if it cannot listen.
  Listener(const std::string& host, int port, std::size_t most);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const { return m_port; }
  /// Whether only this machine reaches the address.
  bool is_loopback() const { return m_is_loopback; }
  /// Whether requests that are being answered take nearly all places. The server can end all other
  /// connections.
  bool is_nearly_full() const { return m_connections.served() + spare_places > m_most; }
  Executor executor() { return m_context.get_executor(); }
  void start(Service& service);
  /// Accepts no more connections, ends them after the reply in progress, at the latest after
  /// `patience` seconds, and then the thread.
  void stop(double patience);

 private:
  using Acceptor = boost::asio::ip::tcp::acceptor;

  static constexpr std::size_t spare_places = 16;

  void run();
  void wait();
  void accept();
  void pause();
  bool shed(double grace);
  void end_by(base::Clock::time_point latest);

  std::size_t m_most;
  int m_port = 0;
  bool m_is_loopback = false;
  Service* m_service = nullptr;
  Connections m_connections;  // outlives the connections that m_context still holds
  boost::asio::io_context m_context{1};
  boost::asio::executor_work_guard<Executor> m_work{m_context.get_executor()};
  Acceptor m_acceptor{m_context};
  boost::asio::steady_timer m_pause{m_context};
  bool m_waits = false;  // for a client, or for a place for one
  bool m_stops = false;
  std::thread m_thread;
};

}  // namespace kvzap::driver
