// A client's connection: reads its requests one after the other and writes the replies.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/stopwatch.hpp"
#include "http/connections.hpp"
#include "http/reply.hpp"
#include "http/request_parser.hpp"

namespace kvzap::driver {

/// Bodies up to this size take no part of the memory for bodies.
constexpr std::size_t small_body = std::size_t{64} << 10;

/// An answer in progress, as its connection sees it. All calls come from the thread of connections.
class Answer {
 public:
  virtual ~Answer() = default;
  /// The client has disconnected.
  virtual void on_gone() = 0;
  /// All text of the stream so far was sent.
  virtual void on_sent() = 0;
};

/// What a server does with requests. All calls come from the thread of connections, which must not
/// wait.
class Service {
 public:
  virtual ~Service() = default;
  /// Judges a request by its head. Returns the reply to a refused one, whose body is not read.
  virtual std::optional<Reply> judge(const Request& request) = 0;
  /// Whether the path of an accepted request needs a key, if the server has keys.
  virtual bool is_protected(const Request& request) = 0;
  /// Judges the bytes of its body that were announced or have come so far.
  virtual std::optional<Reply> judge_size(const Request& request, std::uint64_t bytes) = 0;
  /// Counts bytes of large bodies in memory. Returns false if they are too many.
  virtual bool hold(std::int64_t bytes) = 0;
  /// Answers a whole request by Connection::reply or stream, now or later.
  virtual void answer(const std::shared_ptr<Connection>& connection) = 0;
  /// Adds the fields that all replies have.
  virtual void add_fields(const Request& request, Reply& reply) const = 0;
  /// Returns the seconds after which a client may try again.
  virtual int retry_after() const = 0;
  /// Called for each reply that did not come from `answer`.
  virtual void log(const Request& request, const Reply& reply) = 0;
};

/// Bytes of a body. If it is large, Service::hold counts them while they exist.
class HeldBody {
 public:
  explicit HeldBody(Service& service) : m_service(service) {}
  ~HeldBody() { m_service.hold(-counted()); }
  HeldBody(const HeldBody&) = delete;
  HeldBody& operator=(const HeldBody&) = delete;
  void append(const std::string& text) {
    const std::int64_t before = counted();
    m_text += text;
    m_service.hold(counted() - before);
  }
  bool is_large() const { return m_text.size() > small_body; }
  const std::string& text() const { return m_text; }

 private:
  std::int64_t counted() const { return is_large() ? static_cast<std::int64_t>(m_text.size()) : 0; }

  Service& m_service;
  std::string m_text;
};

/// Lives as long as one of its operations or its answer is in progress. Not thread-safe: all calls
/// come from the thread of connections.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::ip::tcp::socket;

  Connection(Socket socket, Service& service, Connections& all);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start();
  const Request& request() const { return m_parser->request(); }
  /// Hands over the body of a whole request.
  std::shared_ptr<HeldBody> take_body() { return std::move(m_body); }

  /// Sets the answer that hears of the client until the reply is complete.
  void set_answer(std::shared_ptr<Answer> answer) { m_answer = std::move(answer); }
  /// Sends a whole reply.
  void reply(Reply reply);
  /// Begins a reply whose body follows in pieces. Its `body` is not used.
  void begin_stream(const Reply& head);
  void send(std::string_view piece);
  void end_stream();
  /// Whether earlier pieces have been sent.
  bool has_sent() const { return !m_is_writing; }
  bool is_closed() const { return m_phase == Phase::closed; }

  /// Seconds since the server waits for the client: since the connection began, or, if it is known
  /// (see Connections), since the latest request's head, body or part of a reply. Bytes that the
  /// client has sent or read since then do not count.
  double waited() const { return base::seconds_since(m_since); }
  /// Whether a large body is arriving, and when the time for it ends at the latest.
  bool has_large_body() const { return m_phase == Phase::body && m_body && m_body->is_large(); }
  base::Clock::time_point body_end() const { return m_body_end; }
  /// Closes at once, and tells the answer in progress.
  void lose();
  /// Ends the connection after the reply in progress, or now if there is none.
  void end();

 private:
  enum class Phase { head, body, answer, ending, lingering, closed };

  template <class Work>
  void guard(const Work& work);
  void wait_for(double time);
  void on_time();
  void set_served(bool served);
  void read();
  void watch_for_errors();
  void on_read(std::size_t bytes);
  void on_end_of_input();
  void begin_head();
  void advance();
  bool take_head();
  bool take_more_body();
  bool fits_memory();
  void hand_over();
  void refuse(Reply reply);
  void write(std::string_view text);
  void write_some();
  void on_written();
  void linger();
  void close();

  Socket m_socket;
  boost::asio::steady_timer m_timer;
  Service& m_service;
  Connections& m_all;
  std::string m_client;
  Connections::Place m_place;
  bool m_is_known = false;  // see Connections
  base::Clock::time_point m_since = base::Clock::now();

  Phase m_phase = Phase::head;
  std::vector<char> m_block;  // that a read fills
  std::string m_input;        // bytes that were not parsed yet
  bool m_is_reading = false;
  bool m_has_ended = false;  // the client sends nothing more
  bool m_has_begun = false;  // the client has sent a part of a head
  bool m_watches = false;    // for errors of the connection
  bool m_closes = false;     // after the reply in progress
  std::optional<RequestParser> m_parser;
  std::shared_ptr<HeldBody> m_body;
  base::Clock::time_point m_body_end, m_linger_start;

  std::shared_ptr<Answer> m_answer;
  bool m_streams = false, m_is_chunked = false;
  bool m_was_probed = false;
  std::string m_output, m_next_output;
  std::size_t m_written = 0;
  bool m_is_writing = false;
};

}  // namespace kvzap::driver
