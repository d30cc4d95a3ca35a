#include "http/http_server.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <httplib.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "base/json_file.hpp"
#include "base/quote.hpp"
#include "base/stopwatch.hpp"
#include "console/console.hpp"
#include "http/serve_page.hpp"

namespace kvzap::driver {
namespace {

using detail::Clock;
using detail::seconds_since;
using nlohmann::ordered_json;
using server::ApiRequest;
using server::BadRequest;
using server::Ending;
using server::EndReason;
using server::Scheduler;
using server::ServedModel;

constexpr const char* json_type = "application/json";
// A sender gets so many seconds, and one more for each so many bytes.
constexpr double body_seconds = 30;
constexpr double body_rate = 64 << 10;
// Bodies above this are read one at a time: a document of JSON takes a multiple of its text.
constexpr std::size_t large_body = 1 << 20;
constexpr std::int64_t all_bodies = std::int64_t{512} << 20;
// Seconds between looks whether a client is still there, and between signs of life to it.
constexpr int look_milliseconds = 250;
constexpr auto look_every = std::chrono::milliseconds(look_milliseconds);
constexpr double sign_every = 15;
constexpr double keep_alive_seconds = 30;
// Of a request before its body, in all.
constexpr std::size_t longest_head = 64 << 10;
constexpr double head_seconds = 30;
constexpr int read_seconds = 30, write_seconds = 10;

enum Status {
  ok = 200,
  bad_request = 400,
  unauthorized = 401,
  forbidden = 403,
  not_found = 404,
  not_allowed = 405,
  too_slow = 408,
  too_large = 413,
  unknown_encoding = 415,
  too_many = 429,
  gone = 499,
  server_error = 500,
  unavailable = 503
};

const char* type_of(int status) {
  switch (status) {
    case unauthorized:
      return "authentication_error";
    case forbidden:
      return "permission_error";
    case not_found:
      return "not_found_error";
    case too_many:
      return "rate_limit_error";
    default:
      return status >= server_error ? "server_error" : "invalid_request_error";
  }
}

/// By what its head says of its body.
bool is_too_large(const httplib::Request& request) {
  const std::string length = request.get_header_value("Content-Length");
  // (A number that has too many digits is too large.)
  return length.size() > 18 || std::strtoull(length.c_str(), nullptr, 10) > largest_body;
}

const char* words_of(int status) {
  switch (status) {
    case not_found:
      return "there is no such path";
    case too_large:
      return "the request is too large";
    case server_error:
      return "the server has failed";
    default:
      return "the request is not HTTP that is understood here";
  }
}

void reply(httplib::Response& response, int status, const std::string& what,
           const std::string& field = {}) {
  response.status = status;
  response.set_content(server::error_body(what, type_of(status), field), json_type);
}

void reply(httplib::Response& response, const ordered_json& json) {
  response.status = ok;
  response.set_content(json.dump(-1, ' ', false, ordered_json::error_handler_t::replace),
                       json_type);
}

/// The socket of a connection.
class Socket {
 public:
  explicit Socket(int descriptor) : m_descriptor(descriptor) {}
  /// That of the connection which this thread serves.
  static Socket& current() {
    static thread_local Socket socket(-1);
    return socket;
  }

  /// Whether the client has closed it.
  bool is_closed() const {
    if (m_descriptor < 0) return false;
    pollfd look = {m_descriptor, POLLRDHUP, 0};
    return poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  }
  /// Waits until the head of a request has come; false if the connection shall close. The library
  /// limits neither the size nor the time of a head, so a long or slow head ends the connection.
  /// `idle`: the longest wait for the first byte in seconds; `ends` stops all waiting.
  bool wait_for_head(double idle, const std::atomic<bool>& ends) const;
  /// Ends the connection, and takes what the client still sends, for a while: a socket that is
  /// closed before takes the reply along.
  void end() const;

 private:
  bool refuse(const char* status) const;  // returns false
  bool wait(int milliseconds) const {
    pollfd look = {m_descriptor, POLLIN, 0};
    return poll(&look, 1, milliseconds) > 0;
  }

  int m_descriptor;
};

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
    if (is_over || (seen < 0 && errno != EAGAIN && errno != EINTR)) break;  // the client has gone
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
    // The client has gone.
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

/// Runs one thread for each connection, because an answer may take long.
class Connections final : public httplib::TaskQueue {
  // Some versions of the library return whether the queue has room.
  using Taken = decltype(std::declval<httplib::TaskQueue>().enqueue(std::function<void()>()));

 public:
  explicit Connections(std::size_t most) : m_most(most) {}
  ~Connections() override { end(); }

  Taken enqueue(std::function<void()> work) override {
    std::unique_lock<std::mutex> lock(m_mutex);
    // The library accepts no further connection until this one has a thread.
    m_room.wait(lock, [&] { return m_work.size() < m_idle || m_threads.size() < m_most; });
    m_work.push_back(std::move(work));
    if (m_work.size() > m_idle) m_threads.emplace_back([this] { run(); });
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

/// The library's server, with the socket of each connection known to the thread that serves it.
class SocketServer final : public httplib::Server {
 public:
  /// Stops reading from all clients; replies can still be written.
  void stop_reading() {
    m_ends = true;
    const std::lock_guard<std::mutex> lock(m_mutex);
    for (const int descriptor : m_open) ::shutdown(descriptor, SHUT_RD);
  }
  /// Connections close after their current request.
  void end_connections() { m_ends = true; }

 private:
  // The library calls this on the connection's thread, with the socket that it has accepted.
  bool process_and_close_socket(socket_t descriptor) override {
    note(descriptor, true);
    Socket& socket = Socket::current();
    socket = Socket(descriptor);
    bool is_well = true, is_closed = false;
    for (std::size_t left = keep_alive_max_count_; left > 0 && is_well && !is_closed; --left) {
      if (!socket.wait_for_head(keep_alive_seconds, m_ends)) break;
      is_well = httplib::detail::process_client_socket(
          descriptor, read_timeout_sec_, read_timeout_usec_, write_timeout_sec_,
          write_timeout_usec_, [&](httplib::Stream& stream) {
            return process_request(stream, left == 1, is_closed, nullptr);
          });
    }
    socket = Socket(-1);
    // Forget the descriptor before closing it: the next connection may get the same number.
    note(descriptor, false);
    ::shutdown(descriptor, SHUT_RDWR);
    ::close(descriptor);
    return is_well;
  }
  void note(int descriptor, bool is_open) {
    const std::lock_guard<std::mutex> lock(m_mutex);
    if (is_open) {
      m_open.insert(descriptor);
    } else {
      m_open.erase(descriptor);
    }
  }

  std::atomic<bool> m_ends{false};
  std::mutex m_mutex;
  std::set<int> m_open;
};

/// What the scheduler says of a request, for the thread of its connection.
class Exchange final : public server::Listener {
 public:
  struct Event {
    int choice = 0;
    std::string text;
    std::vector<server::TokenText> tokens;
    std::optional<Ending> ending;
  };

  Exchange(const ApiRequest& request, const ServedModel& model)
      : m_stop_ids(request.generation.stop_ids),
        m_open(request.generation.choices),
        m_texts(static_cast<std::size_t>(request.generation.choices)) {
    if (!model.tokenizer) return;
    for (auto& text : m_texts) text.emplace(*model.tokenizer, request.stop);
  }

  bool on_token(int choice, TokenId token, const server::TokenLogprobs* logprobs) override {
    if (std::find(m_stop_ids.begin(), m_stop_ids.end(), token) != m_stop_ids.end()) return true;
    auto& text = m_texts[static_cast<std::size_t>(choice)];
    Event event;
    event.choice = choice;
    event.text = text ? text->append(token) : std::to_string(token) + " ";
    if (logprobs) event.tokens.push_back({token, logprobs->logprob, logprobs->top});
    const bool goes_on = !text || !text->has_stopped();
    if (!event.text.empty() || !event.tokens.empty()) add(std::move(event));
    return goes_on;
  }
  void on_end(int choice, const Ending& ending) override {
    auto& text = m_texts[static_cast<std::size_t>(choice)];
    Event event;
    event.choice = choice;
    if (text) event.text = text->finish();
    event.ending = ending;
    add(std::move(event));
  }
  void on_error(const std::string& what, bool is_servers) override {
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      m_error = what;
      m_is_servers_error = is_servers;
    }
    m_wake.notify_one();
  }

  /// What has come since; waits for it, but not for long.
  std::vector<Event> take() {
    std::unique_lock<std::mutex> lock(m_mutex);
    m_wake.wait_for(lock, look_every, [&] { return !m_events.empty() || m_error; });
    std::vector<Event> events;
    events.swap(m_events);
    for (const Event& event : events) m_open -= event.ending ? 1 : 0;
    return events;
  }
  /// Whether all of it has been taken.
  bool is_done() const { return m_open == 0; }
  std::optional<std::string> error() const {
    const std::lock_guard<std::mutex> lock(m_mutex);
    return m_error;
  }
  bool is_servers_error() const { return m_is_servers_error; }

 private:
  void add(Event event) {
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      m_events.push_back(std::move(event));
    }
    m_wake.notify_one();
  }

  std::vector<TokenId> m_stop_ids;
  int m_open;
  std::vector<std::optional<server::AnswerText>> m_texts;  // of the scheduler's thread
  mutable std::mutex m_mutex;
  std::condition_variable m_wake;
  std::vector<Event> m_events;
  std::optional<std::string> m_error;
  bool m_is_servers_error = false;
};

/// A number that goes up, and down with this object.
class Counted {
 public:
  explicit Counted(std::atomic<std::int64_t>& counter) : m_counter(counter) {}
  ~Counted() { m_counter -= m_by; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  /// Returns what it is then.
  std::int64_t add(std::int64_t by) {
    m_by += by;
    return m_counter += by;
  }

 private:
  std::atomic<std::int64_t>& m_counter;
  std::int64_t m_by = 0;
};

/// What a client has sent, and that it is held.
struct Body {
  explicit Body(std::atomic<std::int64_t>& counter) : held(counter) {}
  Counted held;
  std::string text;
};

std::string time_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

}  // namespace

bool equal_in_constant_time(const std::string& secret, const std::string& given) {
  // As long as what is given is, whatever the secret.
  unsigned difference = secret.size() == given.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const char of_secret = secret.empty() ? '\0' : secret[i % secret.size()];
    difference |= static_cast<unsigned char>(of_secret ^ given[i]);
  }
  return difference == 0;
}

class HttpServer::Impl {
 public:
  explicit Impl(const HttpOptions& options);
  ~Impl();

  int port() const { return m_port; }
  std::int64_t requests() const { return m_requests; }
  void open(const ServedModel& model, Scheduler& scheduler, std::optional<std::int64_t> kv_memory) {
    m_model = &model;
    m_kv_memory = kv_memory;
    m_scheduler = &scheduler;  // last: its being there says that all is
  }
  void drain() { m_drains = true; }

 private:
  /// A server that stops asks the client to try elsewhere; it has not failed.
  int error_status(const Exchange& exchange) const {
    if (!exchange.is_servers_error()) return bad_request;
    return m_drains ? unavailable : server_error;
  }
  using Request = httplib::Request;
  using Response = httplib::Response;
  using Handling = httplib::Server::HandlerResponse;

  /// Of a completion, from its request to its last byte.
  struct Answering;

  Handling admit(const Request& request, Response& response);
  bool is_key(const Request& request) const;
  void refuse(const Request& request, Response& response, int status, const std::string& what);
  bool read_body(const Request& request, Response& response, const httplib::ContentReader& reader,
                 Body& body);
  void complete(const Request& request, Response& response, const httplib::ContentReader& reader,
                bool is_chat);
  void wait_for_all(Answering& answering, Response& response) const;
  void stream(const std::shared_ptr<Answering>& answering, Response& response) const;
  bool write_events(Answering& answering, httplib::DataSink& sink) const;
  void tokenize(const Request& request, Response& response, const httplib::ContentReader& reader,
                bool is_back);
  ordered_json models() const;
  ordered_json status() const;
  int retry_after() const;
  void log(const Request& request, int status, const std::string& more) const;
  void log_of(const Answering& answering, int status, const std::string& what) const;

  HttpOptions m_options;
  SocketServer m_server;
  std::thread m_listener;
  int m_port = 0;
  int m_socket = -1;
  Clock::time_point m_start = Clock::now();
  std::atomic<Scheduler*> m_scheduler{nullptr};
  const ServedModel* m_model = nullptr;
  std::optional<std::int64_t> m_kv_memory;
  std::atomic<bool> m_drains{false};
  std::atomic<std::int64_t> m_requests{0};
  std::atomic<std::int64_t> m_answering{0};  // completions
  std::atomic<std::int64_t> m_held{0};       // bytes of bodies
  std::mutex m_large;                        // one large body is read at a time
};

struct HttpServer::Impl::Answering {
  Answering(ApiRequest of, const ServedModel& model, std::atomic<std::int64_t>& counter)
      : request(std::move(of)),
        counted(counter),
        exchange(std::make_shared<Exchange>(request, model)),
        endings(static_cast<std::size_t>(request.generation.choices)) {
    counted.add(1);
  }

  bool take() {
    events = exchange->take();
    for (const Exchange::Event& event : events) {
      if (first_seconds < 0) first_seconds = seconds_since(start);
      if (!event.ending) continue;
      endings[static_cast<std::size_t>(event.choice)] = *event.ending;
      has_ended = true;
    }
    return !events.empty();
  }

  ApiRequest request;
  Counted counted;
  std::shared_ptr<Exchange> exchange;
  std::shared_ptr<Scheduler::Ticket> ticket;
  std::optional<server::ReplyWriter> writer;
  Socket socket = Socket(-1);
  std::vector<Exchange::Event> events;
  std::vector<Ending> endings;
  bool has_ended = false;  // one of them
  std::vector<bool> has_begun;
  std::string method_and_path, client;
  Clock::time_point start = Clock::now();
  Clock::time_point last_sign = Clock::now();
  double first_seconds = -1;
};

HttpServer::Impl::Impl(const HttpOptions& options) : m_options(options) {
  // The library deletes the queue when it stops listening.
  m_server.new_task_queue = [this] { return new Connections(m_options.max_connections); };
  m_server.set_tcp_nodelay(true);
  m_server.set_read_timeout(read_seconds);
  m_server.set_write_timeout(write_seconds);
  m_server.set_keep_alive_max_count(1 << 20);
  m_server.set_payload_max_length(largest_body);
  m_server.set_socket_options([this](auto socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    m_socket = static_cast<int>(socket);
  });
  m_server.set_pre_routing_handler(
      [this](const Request& request, Response& response) { return admit(request, response); });
  m_server.set_error_handler(
      httplib::Server::HandlerWithResponse([](const Request&, Response& response) {
        if (!response.body.empty()) return Handling::Unhandled;
        reply(response, response.status, words_of(response.status));
        return Handling::Handled;
      }));
  m_server.set_expect_100_continue_handler([](const Request& request, Response& response) {
    constexpr int go_on = 100;
    if (!is_too_large(request)) return go_on;
    reply(response, too_large, words_of(too_large));
    response.set_header("Connection", "close");
    return static_cast<int>(too_large);
  });
  m_server.set_exception_handler([](const Request&, Response& response, const auto&...) {
    reply(response, server_error, words_of(server_error));
  });
  // Called when a reply has been written.
  m_server.set_logger([](const Request&, const Response& response) {
    if (response.get_header_value("Connection") != "close") return;
    Socket::current().end();
    Socket::current() = Socket(-1);  // bytes of an unread body are no next request
  });
  m_server.Get("/", [](const Request&, Response& response) {
    response.set_header("Content-Security-Policy",
                        "default-src 'none'; connect-src 'self'; img-src data:; style-src "
                        "'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'");
    response.set_content(serve_page, "text/html; charset=utf-8");
  });
  m_server.Get("/health", [this](const Request&, Response& response) {
    if (m_scheduler == nullptr || m_drains) {
      return reply(response, unavailable,
                   m_drains ? "the server is about to stop" : "the model is being loaded");
    }
    reply(response, {{"status", "ok"}});
  });
  m_server.Get("/metrics", [this](const Request&, Response& response) {
    response.set_content(server::metrics_text(m_scheduler.load()->counts(), *m_model),
                         "text/plain; version=0.0.4; charset=utf-8");
  });
  m_server.Get("/v1/models",
               [this](const Request&, Response& response) { reply(response, models()); });
  m_server.Get("/kvzap/status",
               [this](const Request&, Response& response) { reply(response, status()); });
  m_server.Post("/v1/chat/completions", [this](const Request& request, Response& response,
                                               const httplib::ContentReader& reader) {
    complete(request, response, reader, true);
  });
  m_server.Post("/v1/completions", [this](const Request& request, Response& response,
                                          const httplib::ContentReader& reader) {
    complete(request, response, reader, false);
  });
  m_server.Post("/tokenize", [this](const Request& request, Response& response,
                                    const httplib::ContentReader& reader) {
    tokenize(request, response, reader, false);
  });
  m_server.Post("/detokenize", [this](const Request& request, Response& response,
                                      const httplib::ContentReader& reader) {
    tokenize(request, response, reader, true);
  });
  const std::string place = fmt::format("{}:{}", options.host, options.port);
  m_port = options.port;
  if (options.port == 0) {
    m_port = m_server.bind_to_any_port(options.host);
    if (m_port <= 0) throw Error(fmt::format("--host {}: {}", options.host, std::strerror(errno)));
  } else if (!m_server.bind_to_port(options.host, options.port)) {
    throw Error(fmt::format(
        "{}: {}", place, errno != 0 ? std::strerror(errno) : "it is no address of this machine"));
  }
  // The library lets five connections wait to be accepted; those beyond would try again in a
  // second.
  if (m_socket >= 0) ::listen(m_socket, SOMAXCONN);
  m_listener = std::thread([this] { m_server.listen_after_bind(); });
}

HttpServer::Impl::~Impl() {
  m_server.end_connections();
  // Streams end with the library's stop, wherever they are.
  const auto start = Clock::now();
  while (m_answering > 0 && seconds_since(start) < write_seconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  while (!m_server.is_running() && seconds_since(start) < write_seconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it has hardly begun
  }
  m_server.stop_reading();
  m_server.stop();
  m_listener.join();
}

/// What needs neither body nor handler. (The library would read a body of any length before it
/// looks for the path.)
HttpServer::Impl::Handling HttpServer::Impl::admit(const Request& request, Response& response) {
  ++m_requests;
  // The library would cut any reply by it.
  const_cast<Request&>(request).ranges.clear();
  static const std::map<std::string, bool> paths = {{"/", false},
                                                    {"/health", false},
                                                    {"/metrics", false},
                                                    {"/v1/models", false},
                                                    {"/kvzap/status", false},
                                                    {"/v1/chat/completions", true},
                                                    {"/v1/completions", true},
                                                    {"/tokenize", true},
                                                    {"/detokenize", true}};
  const auto found = paths.find(request.path);
  const auto stop = [&](int status, const std::string& what) {
    refuse(request, response, status, what);
    return Handling::Handled;
  };
  const bool is_open = request.path == "/" || request.path == "/health";
  if (!is_open && !is_key(request)) {
    response.set_header("WWW-Authenticate", "Bearer");
    return stop(unauthorized, "there is no valid key: expected Authorization: Bearer KEY");
  }
  if (found == paths.end()) return stop(not_found, words_of(not_found));
  const bool posts = found->second;
  const bool fits =
      posts ? request.method == "POST" : request.method == "GET" || request.method == "HEAD";
  if (!fits) {
    response.set_header("Allow", posts ? "POST" : "GET, HEAD");
    return stop(not_allowed,
                fmt::format("the method is {}; expected {}", detail::shown_message(request.method),
                            posts ? "POST" : "GET"));
  }
  // Pages of other servers are not to use this one by way of their reader's browser.
  const std::string origin = request.get_header_value("Origin");
  const std::size_t host = origin.find("://");
  if (!origin.empty() &&
      (host == std::string::npos || origin.substr(host + 3) != request.get_header_value("Host"))) {
    return stop(forbidden, "the request comes from a page of another server");
  }
  if (is_too_large(request)) {
    return stop(too_large, fmt::format("the body is larger than {} bytes", largest_body));
  }
  if (!posts && request.has_header("Transfer-Encoding")) {
    return stop(bad_request, "a GET has no body");
  }
  if (m_scheduler == nullptr && !is_open) {
    response.set_header("Retry-After", "5");
    return stop(unavailable, "the model is being loaded");
  }
  return Handling::Unhandled;
}

bool HttpServer::Impl::is_key(const Request& request) const {
  if (m_options.api_keys.empty()) return true;
  std::string given = request.get_header_value("Authorization");
  const std::string scheme = "Bearer ";
  if (given.rfind(scheme, 0) != 0) return false;
  given.erase(0, scheme.size());
  bool is_one = false;
  for (const std::string& key : m_options.api_keys) {
    is_one = equal_in_constant_time(key, given) || is_one;
  }
  return is_one;
}

/// A body that nobody has read is no next request.
void HttpServer::Impl::refuse(const Request& request, Response& response, int status,
                              const std::string& what) {
  reply(response, status, what);
  log(request, status, "");
  const std::string length = request.get_header_value("Content-Length");
  const bool has_body =
      request.has_header("Transfer-Encoding") || (!length.empty() && length != "0");
  if (has_body) response.set_header("Connection", "close");
}

/// False: the reply says why.
bool HttpServer::Impl::read_body(const Request& request, Response& response,
                                 const httplib::ContentReader& reader, Body& body) {
  const auto start = Clock::now();
  int status = bad_request;
  std::string what = "the body has not come whole";
  if (request.is_multipart_form_data()) {
    refuse(request, response, unknown_encoding, "the body is a form; expected JSON");
    return false;
  }
  std::size_t taken = 0;
  const bool has_come = reader([&](const char* data, std::size_t size) {
    taken += size;
    if (seconds_since(start) > body_seconds + static_cast<double>(taken) / body_rate) {
      status = too_slow;
      what = "the body comes too slowly";
      return false;
    }
    if (status != bad_request) return taken <= 2 * largest_body;  // it has been refused already
    if (taken > largest_body) {
      status = too_large;
      what = fmt::format("the body is larger than {} bytes", largest_body);
    } else if (body.held.add(static_cast<std::int64_t>(size)) > all_bodies) {
      status = unavailable;
      what = "the server holds as many large requests as it may";
    } else {
      body.text.append(data, size);
    }
    return true;
  });
  if (has_come && status == bad_request) return true;
  // The library has its own words for what is too large by its header, or in an unknown encoding.
  if (status == bad_request && response.status >= bad_request) {
    status = response.status;
    if (status != bad_request) what = words_of(status);
  }
  refuse(request, response, status, what);
  return false;
}

void HttpServer::Impl::complete(const Request& request, Response& response,
                                const httplib::ContentReader& reader, bool is_chat) {
  Body sent(m_held);
  if (!read_body(request, response, reader, sent)) return;
  const std::string& body = sent.text;
  const auto fail = [&](int status, const std::string& what, const std::string& field = {}) {
    if (status == too_many || status == unavailable) {
      response.set_header("Retry-After", std::to_string(retry_after()));
    }
    reply(response, status, what, field);
    // What is wrong with a request is told in its own words, which are nobody else's business.
    const bool may_quote = status == bad_request && !m_options.logs_prompts;
    log(request, status, may_quote ? field : detail::shown_message(what));
  };
  if (m_drains) return fail(unavailable, "the server is about to stop");
  std::shared_ptr<Answering> answering;
  try {
    std::unique_lock<std::mutex> alone(m_large, std::defer_lock);
    if (body.size() > large_body) alone.lock();
    answering = std::make_shared<Answering>(server::parse_request(body, is_chat, *m_model),
                                            *m_model, m_answering);
  } catch (const BadRequest& error) {
    return fail(bad_request, error.what(), error.field);
  }
  if (m_options.logs && m_options.logs_prompts) {
    say("{} prompt {}\n", time_text(), detail::shown(body, body.size()));
  }
  ApiRequest& asked = answering->request;
  try {
    const int choices = asked.generation.choices;
    answering->ticket =
        m_scheduler.load()->submit(std::move(asked.generation), answering->exchange);
    asked.generation = {};
    asked.generation.choices = choices;
  } catch (const server::QueueFull& error) {
    return fail(m_drains ? unavailable : too_many, error.what());
  } catch (const Error& error) {
    return fail(bad_request, error.what());
  }
  const auto seconds = std::chrono::system_clock::now().time_since_epoch();
  answering->writer.emplace(asked, *m_model, answering->ticket->id(),
                            std::chrono::duration_cast<std::chrono::seconds>(seconds).count());
  answering->socket = Socket::current();
  answering->has_begun.resize(static_cast<std::size_t>(asked.generation.choices));
  answering->method_and_path = fmt::format("{} {}", request.method, request.path);
  answering->client = request.remote_addr;
  if (!asked.streams) return wait_for_all(*answering, response);
  // What fails before anything is said has a status of its own.
  while (!answering->take() && seconds_since(answering->start) < sign_every) {
    if (const auto error = answering->exchange->error()) {
      return fail(error_status(*answering->exchange), *error);
    }
    if (answering->socket.is_closed()) {
      answering->ticket->cancel();
      return fail(gone, "the client has gone");
    }
  }
  stream(answering, response);
}

void HttpServer::Impl::wait_for_all(Answering& answering, Response& response) const {
  std::vector<server::ReplyWriter::Whole> answers(answering.endings.size());
  const auto end = [&](int status, const std::string& what) {
    reply(response, status, what);
    log_of(answering, status, what);
  };
  while (!answering.exchange->is_done()) {
    answering.take();
    for (Exchange::Event& event : answering.events) {
      auto& answer = answers[static_cast<std::size_t>(event.choice)];
      answer.text += event.text;
      std::move(event.tokens.begin(), event.tokens.end(), std::back_inserter(answer.tokens));
      if (event.ending) answer.ending = *event.ending;
    }
    if (const auto error = answering.exchange->error()) {
      return end(error_status(*answering.exchange), *error);
    }
    if (answering.socket.is_closed()) {
      answering.ticket->cancel();
      return end(gone, "the client has gone");
    }
  }
  response.set_content(answering.writer->body(answers), json_type);
  log_of(answering, ok, "");
}

void HttpServer::Impl::stream(const std::shared_ptr<Answering>& answering,
                              Response& response) const {
  response.set_header("Cache-Control", "no-cache");
  response.set_header("X-Accel-Buffering", "no");
  const auto write = [this, answering](std::size_t, httplib::DataSink& sink) {
    return write_events(*answering, sink);
  };
  response.set_chunked_content_provider("text/event-stream", write,
                                        [answering](bool) { answering->ticket->cancel(); });
}

/// Those that have been taken, or what comes next.
bool HttpServer::Impl::write_events(Answering& answering, httplib::DataSink& sink) const {
  if (answering.events.empty()) answering.take();
  std::string text;
  for (const Exchange::Event& event : answering.events) {
    const auto choice = static_cast<std::size_t>(event.choice);
    if (!answering.has_begun[choice]) {
      answering.has_begun[choice] = true;
      text += answering.writer->begin(event.choice);
    }
    if (!event.text.empty() || !event.tokens.empty()) {
      text += answering.writer->piece(event.choice, event.text, event.tokens);
    }
    if (event.ending) text += answering.writer->end(event.choice, *event.ending);
  }
  answering.events.clear();
  const auto error = answering.exchange->error();
  const bool is_done = answering.exchange->is_done();
  if (error) {
    text += "data: " + server::error_body(*error, type_of(server_error)) + "\n\n";
  } else if (is_done && answering.request.includes_usage) {
    text += answering.writer->usage(answering.endings);
  }
  if (error || is_done) text += server::ReplyWriter::done();
  const bool is_silent = seconds_since(answering.last_sign) > sign_every;
  if (text.empty() && is_silent) text = ": still at it\n\n";  // for proxies that lose patience
  if (!text.empty()) answering.last_sign = Clock::now();
  if (answering.socket.is_closed() || (!text.empty() && !sink.write(text.data(), text.size()))) {
    answering.ticket->cancel();
    log_of(answering, gone, "the client has gone");
    return false;
  }
  if (error || is_done) {
    sink.done();
    log_of(answering, error ? error_status(*answering.exchange) : ok, error.value_or(""));
  }
  return true;
}

void HttpServer::Impl::tokenize(const Request& request, Response& response,
                                const httplib::ContentReader& reader, bool is_back) {
  Body sent(m_held);
  if (!read_body(request, response, reader, sent)) return;
  const std::string& body = sent.text;
  try {
    std::unique_lock<std::mutex> alone(m_large, std::defer_lock);
    if (body.size() > large_body) alone.lock();
    reply(response,
          is_back ? server::detokenize(body, *m_model) : server::tokenize(body, *m_model));
    log(request, ok, "");
  } catch (const BadRequest& error) {
    reply(response, bad_request, error.what(), error.field);
    log(request, bad_request,
        m_options.logs_prompts ? detail::shown_message(error.what()) : error.field);
  }
}

ordered_json HttpServer::Impl::models() const {
  ordered_json model;
  model["id"] = m_model->name;
  model["object"] = "model";
  model["created"] = m_model->created;
  model["owned_by"] = "kvzap";
  model["max_model_len"] = m_model->max_tokens > 0 ? ordered_json(m_model->max_tokens) : nullptr;
  return {{"object", "list"}, {"data", ordered_json::array({model})}};
}

ordered_json HttpServer::Impl::status() const {
  const server::SchedulerCounts counts = m_scheduler.load()->counts();
  ordered_json json;
  json["model"] = m_model->name;
  json["max_tokens"] = m_model->max_tokens > 0 ? ordered_json(m_model->max_tokens) : nullptr;
  json["kv_memory"] = m_kv_memory ? ordered_json(*m_kv_memory) : nullptr;
  json["kv_allocated"] = counts.kv_allocated;
  json["kv_free"] = counts.kv_free;
  json["keep_ratio"] = counts.keep_ratio;
  json["running"] = counts.running;
  json["waiting"] = counts.waiting;
  json["prefixes"] = counts.prefixes;
  json["sequences"] = ordered_json::array();
  for (const server::SequenceStatus& sequence : m_scheduler.load()->sequences()) {
    ordered_json one;
    one["request"] = sequence.request;
    one["choice"] = sequence.choice;
    one["phase"] = sequence.phase;
    one["tokens"] = sequence.tokens;
    one["new_tokens"] = sequence.new_tokens;
    one["evict_ratio"] = sequence.evict_ratio;
    one["kv_bytes"] = sequence.kv_bytes;
    one["full_kv_bytes"] = sequence.full_kv_bytes;
    json["sequences"].push_back(std::move(one));
  }
  return json;
}

/// Seconds in which, as it has gone so far, there is room again.
int HttpServer::Impl::retry_after() const {
  const Scheduler* const scheduler = m_scheduler;
  if (!scheduler) return 1;
  const server::SchedulerCounts counts = scheduler->counts();
  if (counts.finished == 0) return 5;
  constexpr double most = 60;
  const double each = seconds_since(m_start) / static_cast<double>(counts.finished);
  return static_cast<int>(std::clamp(each, 1.0, most));
}

void HttpServer::Impl::log(const Request& request, int status, const std::string& more) const {
  if (!m_options.logs) return;
  say("{} {} {} {} {}{}{}\n", time_text(), request.remote_addr,
      detail::shown_message(request.method), detail::shown_message(request.path), status,
      more.empty() ? "" : " ", more);
}

void HttpServer::Impl::log_of(const Answering& answering, int status,
                              const std::string& what) const {
  if (!m_options.logs) return;
  std::string text =
      fmt::format("{} {} {} {}", time_text(), answering.client, answering.method_and_path, status);
  text += fmt::format(" request {}", answering.ticket->id());
  if (answering.has_ended) {
    std::int64_t tokens = 0;
    for (const Ending& ending : answering.endings) tokens += ending.new_tokens;
    const Ending& first = answering.endings.front();
    text += fmt::format(" prompt {} cached {} new {} evicted {:.3f} first {:.3f} s",
                        first.prompt_tokens, first.cached_tokens, tokens, first.evict_ratio,
                        answering.first_seconds);
  }
  text += fmt::format(" total {:.3f} s", seconds_since(answering.start));
  if (!what.empty()) text += " " + detail::shown_message(what);
  say("{}\n", text);
}

HttpServer::HttpServer(const HttpOptions& options) : m_impl(std::make_unique<Impl>(options)) {}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return m_impl->port(); }
void HttpServer::open(const ServedModel& model, Scheduler& scheduler,
                      std::optional<std::int64_t> kv_memory) {
  m_impl->open(model, scheduler, kv_memory);
}
void HttpServer::drain() { m_impl->drain(); }
std::int64_t HttpServer::requests() const { return m_impl->requests(); }

}  // namespace kvzap::driver
