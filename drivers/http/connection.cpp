#include "http/connection.hpp"

#include <fmt/format.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <chrono>
#include <exception>

#include "http/request_log.hpp"

namespace kvzap::driver {
namespace {

using base::Clock;
using base::seconds_since;
using boost::system::error_code;

constexpr int idle_seconds = 30;  // without a request
constexpr double head_seconds = 30;
// A body may come this much later than at the minimum bytes per second.
constexpr double body_seconds = 30;
constexpr double body_rate = 64 << 10;
constexpr double write_seconds = 10;  // without progress
// Closing a socket with unread bytes would discard the reply. A client may send the whole body of a
// refused request before it reads.
constexpr double linger_seconds = 2, longest_linger = 30;
// After so long a client that has closed its side gets a sign, to find out whether it still reads.
constexpr double probe_seconds = 1;
constexpr std::size_t small_block = 4 << 10, large_block = 64 << 10;
// A client that has gone without a word is noticed after about a minute, and one that speaks
// HTTP/1.0 and has closed its socket, too.
constexpr int silent_seconds = 20, probe_every = 10, most_probes = 3;
// A head takes two times longest_head at most. So many bytes without a request in them are none.
constexpr std::size_t longest_input = 2 * longest_head;

constexpr const char* no_memory = "the server has no memory for further large requests";
constexpr const char* go_on = "HTTP/1.1 100 Continue\r\n\r\n";

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

template <int name>
using TcpOption = boost::asio::detail::socket_option::integer<IPPROTO_TCP, name>;

std::string address_of(const Connection::Socket& socket) {
  error_code code;
  const auto client = socket.remote_endpoint(code);
  return code ? std::string() : client.address().to_string();
}

}  // namespace

Connection::Connection(Socket socket, Service& service, Connections& all)
    : m_socket(std::move(socket)),
      m_timer(m_socket.get_executor()),
      m_service(service),
      m_all(all),
      m_client(address_of(m_socket)),
      m_place(all.enter(*this, m_client)) {}

Connection::~Connection() { close(); }

/// Runs a part of the work. Without memory for it, this connection alone ends.
template <class Work>
void Connection::guard(const Work& work) {
  if (is_closed()) return;
  try {
    try {
      work();
    } catch (const FramingError& error) {
      Reply reply = error_reply(error.status, error.what());
      reply.closes = true;
      refuse(std::move(reply));
    }
  } catch (const std::exception&) {
    lose();
  }
}

void Connection::start() {
  error_code code;
  m_socket.set_option(boost::asio::ip::tcp::no_delay(true), code);
  m_socket.set_option(Socket::keep_alive(true), code);
  m_socket.set_option(TcpOption<TCP_KEEPIDLE>(silent_seconds), code);
  m_socket.set_option(TcpOption<TCP_KEEPINTVL>(probe_every), code);
  m_socket.set_option(TcpOption<TCP_KEEPCNT>(most_probes), code);
  guard([&] { begin_head(); });
}

void Connection::begin_head() {
  m_phase = Phase::head;
  m_parser.emplace();
  m_parser->request().client = m_client;
  m_body.reset();
  m_has_begun = m_closes = m_streams = m_is_chunked = m_was_probed = false;
  for (std::string* const buffer : {&m_input, &m_output, &m_next_output}) {
    if (buffer->capacity() > small_block) buffer->shrink_to_fit();
  }
  set_served(false);
  wait_for(idle_seconds);
  advance();
}

/// Sets the end of the client's time for what it does now.
void Connection::wait_for(double time) {
  m_timer.expires_after(seconds(time));
  m_timer.async_wait([self = shared_from_this()](error_code code) {
    if (code || self->m_timer.expiry() > Clock::now()) return;
    self->guard([&] { self->on_time(); });
  });
}

void Connection::on_time() {
  if (m_is_writing || m_phase == Phase::lingering) return lose();
  if (m_phase == Phase::head && !m_has_begun) return lose();
  if (m_phase == Phase::head || m_phase == Phase::body) {
    const bool is_head = m_phase == Phase::head;
    Reply reply = error_reply(too_slow, is_head ? "the head of the request arrives too slowly"
                                                : "the body arrives too slowly");
    reply.closes = true;
    return refuse(std::move(reply));
  }
  // The client has closed its side and waits for a whole reply, or it is gone. The system tells
  // once it gets bytes for a socket that nobody has. Every client skips this status.
  if (m_phase == Phase::answer && m_has_ended && !m_streams && !m_was_probed &&
      request().is_http11) {
    m_was_probed = true;
    write(go_on);
  }
}

/// Notes whether the server works for the client or waits for it.
void Connection::set_served(bool served) {
  if (!m_is_known) return;
  m_since = Clock::now();
  m_all.move(m_place, served ? Connections::Kind::served : Connections::Kind::known);
}

void Connection::read() {
  if (m_is_reading || m_has_ended) return;
  if (m_input.size() >= longest_input) return watch_for_errors();
  m_block.resize(m_phase == Phase::body || m_phase == Phase::lingering ? large_block : small_block);
  m_is_reading = true;
  m_socket.async_read_some(boost::asio::buffer(m_block),
                           [self = shared_from_this()](error_code code, std::size_t size) {
                             self->m_is_reading = false;
                             self->guard([&] {
                               if (code == boost::asio::error::eof) return self->on_end_of_input();
                               if (code) return self->lose();
                               self->on_read(size);
                             });
                           });
}

void Connection::on_read(std::size_t bytes) {
  if (m_phase != Phase::lingering) m_input.append(m_block.data(), bytes);
  if (m_block.size() > small_block && m_phase != Phase::body) m_block = {};
  if (m_phase == Phase::head || m_phase == Phase::body) return advance();
  if (m_phase == Phase::lingering) {
    wait_for(std::min(linger_seconds, longest_linger - seconds_since(m_linger_start)));
  }
  if (m_phase != Phase::ending) read();
}

/// The client has closed its side of the connection. It may still read.
void Connection::on_end_of_input() {
  m_has_ended = true;
  if (m_phase == Phase::lingering) return lose();
  if (m_phase == Phase::head || m_phase == Phase::body) return advance();
  if (m_phase != Phase::answer) return;
  watch_for_errors();
  if (!m_is_writing) wait_for(probe_seconds);
}

/// Notices that the client has reset the connection while nothing reads from it.
void Connection::watch_for_errors() {
  if (m_watches) return;
  m_watches = true;
  m_socket.async_wait(Socket::wait_error, [self = shared_from_this()](error_code code) {
    self->m_watches = false;
    if (!code) self->lose();
  });
}

void Connection::advance() {
  if (m_phase == Phase::head && !take_head()) return;
  if (m_phase == Phase::body && !take_more_body()) return;
  hand_over();
}

/// Returns whether a request is to be answered or has a body to read.
bool Connection::take_head() {
  m_input.erase(0, m_parser->read(m_input));
  if (!m_has_begun && (m_parser->has_begun() || !m_input.empty())) {
    m_has_begun = true;
    wait_for(head_seconds);
  }
  if (!m_parser->has_head()) {
    if (m_has_ended) {
      lose();
    } else if (m_input.size() >= longest_input) {
      throw FramingError(bad_request, "invalid HTTP request: no line ends");
    } else {
      read();
    }
    return false;
  }
  m_parser->request().id = request_id(m_parser->request().field("x-request-id"));
  const Request& request = m_parser->request();
  auto refused = m_service.judge(request);
  if (!refused) refused = m_service.judge_size(request, request.length);
  if (refused) {
    refuse(std::move(*refused));
    return false;
  }
  m_is_known = m_is_known || m_service.is_protected(request);
  set_served(false);
  if (request.has_body && request.method == "POST") {
    m_phase = Phase::body;
    m_body_end = Clock::now() + seconds(body_seconds);
    if (request.waits_for_continue && m_input.empty()) write(go_on);
  } else {
    m_closes = request.has_body;  // nothing reads it
  }
  m_body = std::make_shared<HeldBody>(m_service);
  return true;
}

/// Returns whether the body is complete.
bool Connection::take_more_body() {
  m_input.erase(0, m_parser->read(m_input));
  const std::string more = m_parser->take_body();
  auto refused = m_service.judge_size(request(), m_body->text().size() + more.size());
  if (!refused) m_body->append(more);
  if (!refused && m_body->is_large() && !fits_memory()) {
    refused = error_reply(unavailable, no_memory);
  }
  if (!refused && m_parser->is_whole()) return true;
  if (!refused && m_has_ended) {
    refused = error_reply(bad_request, "the body is incomplete");
  } else if (!refused && m_input.size() >= longest_input) {
    refused = error_reply(bad_request, "invalid HTTP request: a chunk has too long a head");
  }
  if (refused) {
    refused->closes = true;
    refuse(std::move(*refused));
    return false;
  }
  m_body_end = std::min(m_body_end + seconds(static_cast<double>(more.size()) / body_rate),
                        Clock::now() + seconds(body_seconds));
  wait_for(-seconds_since(m_body_end));
  read();
  return false;
}

/// Refuses large bodies until the others fit into memory, the slowest first. Returns false if this
/// one is the slowest.
bool Connection::fits_memory() {
  while (!m_service.hold(0)) {
    Connection* const slowest = m_all.slowest_body();
    if (!slowest || slowest == this) return false;
    slowest->guard([&] {
      Reply reply = error_reply(unavailable, no_memory);
      reply.closes = true;
      slowest->refuse(std::move(reply));
    });
  }
  return true;
}

void Connection::hand_over() {
  m_phase = Phase::answer;
  m_timer.cancel();
  set_served(true);
  m_service.answer(shared_from_this());
  // Reads on, to notice that the client has disconnected.
  if (m_phase == Phase::answer) {
    if (m_has_ended) {
      on_end_of_input();
    } else {
      read();
    }
  }
}

/// Replies to a request that is not answered.
void Connection::refuse(Reply refusal) {
  refusal.closes = refusal.closes || request().has_body;
  m_body.reset();
  m_service.log(request(), refusal);
  reply(std::move(refusal));
}

void Connection::reply(Reply reply) {
  if (is_closed()) return;
  m_phase = Phase::ending;
  m_answer.reset();
  m_closes = m_closes || reply.closes || !request().keeps_open || (m_has_ended && m_input.empty());
  reply.closes = m_closes;
  if (reply.status == too_many || reply.status == unavailable) {
    reply.fields.try_emplace("Retry-After", std::to_string(m_service.retry_after()));
  }
  if (reply.error) reply.body = error_text(reply.status, *reply.error, request().path);
  m_service.add_fields(request(), reply);
  std::string text = head_of(reply, Framing::length, idle_seconds);
  if (request().method != "HEAD") text += reply.body;
  write(text);
}

void Connection::begin_stream(const Reply& head) {
  if (is_closed()) return;
  m_streams = true;
  m_is_chunked = request().is_http11;
  m_closes = m_closes || !m_is_chunked || !request().keeps_open;
  Reply first = head;
  first.closes = m_closes;
  m_service.add_fields(request(), first);
  write(head_of(first, m_is_chunked ? Framing::chunks : Framing::end_of_connection, idle_seconds));
}

void Connection::send(std::string_view piece) {
  if (is_closed() || piece.empty()) return;
  write(m_is_chunked ? chunk_of(piece) : std::string(piece));
}

void Connection::end_stream() {
  if (is_closed()) return;
  m_phase = Phase::ending;
  m_answer.reset();
  if (m_is_chunked) {
    write(chunk_of(""));
  } else if (!m_is_writing) {
    linger();
  }
}

void Connection::write(std::string_view text) {
  m_next_output += text;
  if (m_is_writing) return;
  m_is_writing = true;
  m_output.clear();
  m_output.swap(m_next_output);
  m_written = 0;
  set_served(false);
  write_some();
}

void Connection::write_some() {
  wait_for(write_seconds);
  m_socket.async_write_some(
      boost::asio::buffer(m_output.data() + m_written, m_output.size() - m_written),
      [self = shared_from_this()](error_code code, std::size_t size) {
        self->guard([&] {
          if (code) return self->lose();
          self->m_written += size;
          if (self->m_written < self->m_output.size()) return self->write_some();
          self->on_written();
        });
      });
}

void Connection::on_written() {
  m_is_writing = false;
  m_output.clear();
  if (!m_next_output.empty()) return write("");
  m_timer.cancel();
  if (m_phase == Phase::ending) {
    if (m_closes) return linger();
    return begin_head();
  }
  if (m_phase != Phase::answer) return advance();  // 100 Continue was sent
  set_served(true);
  // The answer may have come while 100 Continue was written.
  if (const auto answer = m_answer) answer->on_sent();
  const bool waits = m_phase == Phase::answer && !m_is_writing && !m_streams;
  if (waits && m_has_ended && !m_was_probed) wait_for(probe_seconds);
}

/// Ends the connection once the client has read the reply.
void Connection::linger() {
  error_code code;
  m_phase = Phase::lingering;
  m_socket.shutdown(Socket::shutdown_send, code);
  if (code || m_has_ended) return lose();
  m_input.clear();
  m_linger_start = Clock::now();
  set_served(false);
  wait_for(linger_seconds);
  read();
}

void Connection::end() {
  if (m_phase == Phase::answer || m_phase == Phase::ending) {
    m_closes = true;
  } else if (m_phase != Phase::lingering) {
    lose();
  }
}

void Connection::lose() {
  const auto answer = std::move(m_answer);
  m_answer.reset();
  close();
  if (answer) answer->on_gone();
}

void Connection::close() {
  if (is_closed()) return;
  m_phase = Phase::closed;
  m_all.leave(m_place);
  m_answer.reset();
  m_body.reset();
  error_code code;
  m_timer.cancel();
  m_socket.close(code);
}

}  // namespace kvzap::driver
