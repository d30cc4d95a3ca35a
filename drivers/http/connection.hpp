// A client's connection: reads its requests one after the other and writes the replies.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/stopwatch.hpp"
#include "http/reply.hpp"
#include "http/request_parser.hpp"

namespace kvzap::driver {

class Connection;

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
  /// Judges the bytes of its body that were announced or have come so far.
  virtual std::optional<Reply> judge_size(const Request& request, std::uint64_t bytes) = 0;
  /// Counts bytes of bodies in memory. Returns false if they are too many.
  virtual bool hold(std::int64_t bytes) = 0;
  /// Answers a whole request by Connection::reply or stream, now or later.
  virtual void answer(const std::shared_ptr<Connection>& connection) = 0;
  /// Called for each reply that did not come from `answer`.
  virtual void log(const Request& request, const Reply& reply) = 0;
};

/// Bytes of a body, counted by Service::hold while they exist.
class HeldBody {
 public:
  explicit HeldBody(Service& service) : m_service(service) {}
  ~HeldBody() { m_service.hold(-static_cast<std::int64_t>(m_text.size())); }
  HeldBody(const HeldBody&) = delete;
  HeldBody& operator=(const HeldBody&) = delete;
  /// Returns false if memory for bodies is used up.
  bool append(const std::string& text) {
    m_text += text;
    return m_service.hold(static_cast<std::int64_t>(text.size()));
  }
  const std::string& text() const { return m_text; }

 private:
  Service& m_service;
  std::string m_text;
};

/// The connections of a server. Those whose client makes the server wait are in one list, the
/// longest wait first; those that the server works for are in another.
struct Connections {
  std::list<Connection*> waiting, working;
  std::size_t size() const { return waiting.size() + working.size(); }
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

  /// Seconds for which the client has made the server wait.
  double waited() const { return base::seconds_since(m_since); }
  /// Closes at once, and tells the answer in progress.
  void lose();
  /// Ends the connection after the reply in progress, or now if there is none.
  void end();

 private:
  enum class Phase { head, body, answer, ending, lingering, closed };

  template <class Work>
  void guard(const Work& work);
  void wait_for(double seconds);
  void on_time();
  void set_waits(bool waits);
  void read();
  void on_read(std::size_t bytes);
  void on_end_of_input();
  void begin_head();
  void advance();
  bool take_head();
  bool take_more_body();
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
  std::list<Connection*>::iterator m_place;
  bool m_waits = true;  // in Connections::waiting
  base::Clock::time_point m_since = base::Clock::now();

  Phase m_phase = Phase::head;
  std::vector<char> m_block;  // that a read fills
  std::string m_input;        // bytes that were not parsed yet
  bool m_is_reading = false;
  bool m_has_ended = false;  // the client sends nothing more
  bool m_has_begun = false;  // the client has sent a part of a head
  bool m_closes = false;     // after the reply in progress
  std::string m_client;
  std::optional<RequestParser> m_parser;
  std::shared_ptr<HeldBody> m_body;
  base::Clock::time_point m_body_start, m_linger_start;

  std::shared_ptr<Answer> m_answer;
  bool m_streams = false, m_is_chunked = false;
  bool m_was_probed = false;
  std::string m_output, m_next_output;
  std::size_t m_written = 0;
  bool m_is_writing = false;
};

}  // namespace kvzap::driver
