#include "http/listener.hpp"

#include <fmt/format.h>

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

// A client that has just connected is about to send its request.
constexpr double grace_seconds = 2;
constexpr auto short_pause = std::chrono::milliseconds(20);

}  // namespace

Listener::Listener(const std::string& host, int port, std::size_t most) : m_most(most) {
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
      m_is_loopback = own.address().is_loopback();
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
  while (!m_stops) {
    error_code code;
    if (m_connections.size() < m_most || shed()) {
      tcp::socket socket = m_acceptor.accept(code);
      if (!code) {
        std::make_shared<Connection>(std::move(socket), *m_service, m_connections)->start();
        continue;
      }
      if (code == boost::asio::error::would_block || code == boost::asio::error::try_again) {
        return wait();
      }
      if (code == boost::asio::error::connection_aborted) continue;
      // The process or the system has no descriptor or no memory left.
      if (shed()) continue;
    }
    // All clients are being answered or have just come.
    m_pause.expires_after(short_pause);
    m_pause.async_wait([this](error_code ended) {
      m_waits = false;
      if (!ended) accept();
    });
    m_waits = true;
    return;
  }
}

/// Ends the connection whose client makes the server wait longest. Returns false if none waits
/// long.
bool Listener::shed() {
  if (m_connections.waiting.empty()) return false;
  Connection* const longest = m_connections.waiting.front();
  if (longest->waited() < grace_seconds) return false;
  longest->lose();
  return true;
}

void Listener::stop(double patience) {
  if (!m_thread.joinable()) return;
  boost::asio::post(m_context, [this, patience] {
    m_stops = true;
    error_code code;
    m_acceptor.close(code);
    for (auto* const list : {&m_connections.waiting, &m_connections.working}) {
      for (auto place = list->begin(); place != list->end();) (*place++)->end();
    }
    end_by(base::Clock::now() + std::chrono::duration_cast<base::Clock::duration>(
                                    std::chrono::duration<double>(patience)));
  });
  m_thread.join();
  for (auto* const list : {&m_connections.waiting, &m_connections.working}) {
    while (!list->empty()) list->front()->lose();
  }
}

/// Ends the thread once there is no connection.
void Listener::end_by(base::Clock::time_point latest) {
  if (m_connections.size() == 0 || base::Clock::now() >= latest) return m_context.stop();
  m_pause.expires_after(short_pause / 4);
  m_pause.async_wait([this, latest](error_code) { end_by(latest); });
}

}  // namespace kvzap::driver
