#include "http/listener.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <exception>
#include <kvzap/core/types.hpp>
#include <memory>
#include <utility>

#include "base/start_thread.hpp"

namespace kvzap::driver {
namespace {

using boost::asio::ip::tcp;
using boost::system::error_code;

// A client that has just connected is about to send its request. With all places taken it gets the
// shorter time, so that new clients come to their turn whatever the others do.
constexpr double short_grace = 0.25, long_grace = 2;
// Connections to accept before the server looks for requests again.
constexpr int at_once = 16;
// Descriptors of the process beside those of connections.
constexpr std::size_t other_descriptors = 128;
constexpr auto short_pause = std::chrono::milliseconds(20);

void raise_descriptor_limit(std::size_t wanted) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min<rlim_t>(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

/// Whether only this machine reaches the address.
bool is_only_here(const boost::asio::ip::address& address) {
  if (address.is_v4() || !address.to_v6().is_v4_mapped()) return address.is_loopback();
  return make_address_v4(boost::asio::ip::v4_mapped, address.to_v6()).is_loopback();
}

}  // namespace

Listener::Listener(const std::string& host, int port, std::size_t most) : m_most(most) {
  raise_descriptor_limit(most + other_descriptors);
  const std::string place = fmt::format("{}:{}", host, port);
  error_code code;
  tcp::resolver resolver(m_context);
  const auto found = resolver.resolve(
      host, std::to_string(port), tcp::resolver::passive | tcp::resolver::numeric_service, code);
  if (code) throw Error(fmt::format("{}: not an address of this machine", place));
  for (const auto& entry : found) {
    const tcp::endpoint endpoint = entry.endpoint();
    m_acceptor.open(endpoint.protocol(), code);
    if (!code) m_acceptor.set_option(tcp::acceptor::reuse_address(true), code);
    if (!code) m_acceptor.bind(endpoint, code);
    if (!code) m_acceptor.listen(tcp::acceptor::max_listen_connections, code);
    if (!code) m_acceptor.non_blocking(true, code);
    if (!code) {
      const tcp::endpoint own = m_acceptor.local_endpoint();
      m_port = own.port();
      m_is_loopback = is_only_here(own.address());
      return;
    }
    error_code ignored;
    m_acceptor.close(ignored);
  }
  throw Error(fmt::format("{}: {}", place, code.message()));
}

Listener::~Listener() { stop(0); }

void Listener::start(Service& service) {
  m_service = &service;
  m_thread = base::start_thread("answers connections", [this] { run(); });
}

void Listener::run() {
  for (;;) {
    try {
      if (!m_waits) accept();
      m_context.run();
      return;
    } catch (const std::exception&) {
      // There was no memory for a connection's next step, which has ended it, or for a new one.
      std::this_thread::sleep_for(short_pause);
    }
  }
}

/// Waits for clients. The acceptor takes a connection only once there is a place for it.
void Listener::wait() {
  m_acceptor.async_wait(Acceptor::wait_read, [this](error_code code) {
    m_waits = false;
    if (!code) accept();
  });
  m_waits = true;
}

void Listener::accept() {
  for (int i = 0; i < at_once && !m_stops; ++i) {
    // A connection ends only for a client that is there.
    pollfd look = {m_acceptor.native_handle(), POLLIN, 0};
    if (poll(&look, 1, 0) <= 0) break;
    if (m_connections.size() >= m_most && !shed(short_grace)) return pause();
    error_code code;
    tcp::socket socket = m_acceptor.accept(code);
    if (!code) {
      std::make_shared<Connection>(std::move(socket), *m_service, m_connections)->start();
    } else if (code == boost::asio::error::would_block || code == boost::asio::error::try_again) {
      break;
    } else if (code != boost::asio::error::connection_aborted) {
      // The process or the system has no descriptor or no memory left.
      if (!shed(long_grace)) return pause();
    }
  }
  if (!m_stops) wait();
}

/// Waits until the server may end a connection.
void Listener::pause() {
  m_pause.expires_after(short_pause);
  m_pause.async_wait([this](error_code code) {
    m_waits = false;
    if (!code) accept();
  });
  m_waits = true;
}

/// Ends a connection to make room. Returns false if none may end.
bool Listener::shed(double grace) {
  Connection* const next = m_connections.next_to_end(grace);
  if (next) next->lose();
  return next != nullptr;
}

void Listener::stop(double patience) {
  if (!m_thread.joinable()) return;
  boost::asio::post(m_context, [this, patience] {
    m_stops = true;
    error_code code;
    m_acceptor.close(code);
    end_by(base::Clock::now() + std::chrono::duration_cast<base::Clock::duration>(
                                    std::chrono::duration<double>(patience)));
    for (Connection* const connection : m_connections.all()) connection->end();
  });
  m_thread.join();
  for (Connection* const connection : m_connections.all()) connection->lose();
}

/// Ends the thread once there is no connection.
void Listener::end_by(base::Clock::time_point latest) {
  if (m_connections.size() == 0 || base::Clock::now() >= latest) return m_context.stop();
  m_pause.expires_after(short_pause / 4);
  m_pause.async_wait([this, latest](error_code) { end_by(latest); });
}

}  // namespace kvzap::driver
