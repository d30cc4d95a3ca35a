#include "http/http_server.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/quote.hpp"
#include "base/start_thread.hpp"
#include "base/stopwatch.hpp"
#include "console/console.hpp"
#include "http/answering.hpp"
#include "http/exchange.hpp"
#include "http/serve_page.hpp"
#include "http/socket_server.hpp"

namespace kvzap::driver {
namespace {

using base::Clock;
using base::seconds_since;
using server::ApiRequest;
using server::BadRequest;
using server::Ending;
using server::Scheduler;
using server::ServedModel;

constexpr const char* json_type = "application/json";
constexpr const char* stopping = "the server is shutting down";
constexpr const char* loading = "the model is still loading";
// Time to send a body: a base, and the minimum bytes per second beyond it.
constexpr double body_seconds = 30;
constexpr double body_rate = 64 << 10;
// Larger bodies are parsed one at a time: parsed JSON takes a multiple of its text.
constexpr std::size_t large_body = 1 << 20;
constexpr std::int64_t all_bodies = std::int64_t{512} << 20;
// Seconds between comments in a silent stream, so that proxies keep it open.
constexpr double sign_every = 15;
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

/// Whether the head announces a body that is too large.
bool is_too_large(const httplib::Request& request) {
  const std::string length = request.get_header_value("Content-Length");
  // A number with more digits might overflow.
  return length.size() > 18 || std::strtoull(length.c_str(), nullptr, 10) > largest_body;
}

const char* words_of(int status) {
  switch (status) {
    case not_found:
      return "unknown path";
    case too_large:
      return "the request is too large";
    case server_error:
      return "internal server error";
    default:
      return "invalid HTTP request";
  }
}

void reply(httplib::Response& response, int status, const std::string& what,
           const std::string& field = {}) {
  response.status = status;
  response.set_content(server::error_body(what, type_of(status), field), json_type);
}

void reply(httplib::Response& response, const std::string& json) {
  response.status = ok;
  response.set_content(json, json_type);
}

/// The body of a request. `held` counts its bytes among those of all bodies.
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
  // The time depends on the length of the given text alone.
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
    m_scheduler = &scheduler;  // last, because other threads take it as the sign that all is set
  }
  void drain() { m_drains = true; }

 private:
  /// 503 asks the client to try elsewhere: a server that shuts down has not failed.
  int error_status(const Exchange& exchange) const {
    if (!exchange.is_servers_error()) return bad_request;
    return m_drains ? unavailable : server_error;
  }
  using Request = httplib::Request;
  using Response = httplib::Response;
  using Handling = httplib::Server::HandlerResponse;

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
  int retry_after() const;
  void log(const Request& request, int status, const std::string& more) const;
  void log_of(const Answering& answering, int status, const std::string& what) const;

  HttpOptions m_options;
  SocketServer m_server{m_options.max_connections};
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

HttpServer::Impl::Impl(const HttpOptions& options) : m_options(options) {
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
  // Called after a reply was written.
  m_server.set_logger([](const Request&, const Response& response) {
    if (response.get_header_value("Connection") != "close") return;
    Socket::current().end();
    Socket::current() = Socket(-1);  // do not take an unread body for the next request
  });
  m_server.Get("/", [](const Request&, Response& response) {
    response.set_header("Content-Security-Policy",
                        "default-src 'none'; connect-src 'self'; img-src data:; style-src "
                        "'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'");
    response.set_content(serve_page, "text/html; charset=utf-8");
  });
  m_server.Get("/health", [this](const Request&, Response& response) {
    if (m_scheduler == nullptr || m_drains) {
      return reply(response, unavailable, m_drains ? stopping : loading);
    }
    reply(response, R"({"status":"ok"})");
  });
  m_server.Get("/metrics", [this](const Request&, Response& response) {
    response.set_content(server::metrics_text(m_scheduler.load()->counts(), *m_model),
                         "text/plain; version=0.0.4; charset=utf-8");
  });
  m_server.Get("/v1/models", [this](const Request&, Response& response) {
    reply(response, server::models_body(*m_model));
  });
  m_server.Get("/v1/models/(.+)", [this](const Request&, Response& response) {
    reply(response, server::model_body(*m_model));
  });
  m_server.Get("/kvzap/status", [this](const Request&, Response& response) {
    reply(response, server::status_body(*m_model, *m_scheduler.load(), m_kv_memory));
  });
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
  errno = 0;
  if (options.port == 0) m_port = m_server.bind_to_any_port(options.host);
  if (options.port == 0 ? m_port <= 0 : !m_server.bind_to_port(options.host, options.port)) {
    // A failed look-up of the name leaves some other number, or none.
    const bool is_refused = errno == EADDRINUSE || errno == EACCES || errno == EADDRNOTAVAIL;
    throw Error(fmt::format("{}: {}", place,
                            is_refused ? std::strerror(errno) : "not an address of this machine"));
  }
  // By default five connections wait to be accepted, and further clients retry after a second.
  if (m_socket >= 0) ::listen(m_socket, SOMAXCONN);
  m_listener = base::start_thread("accepts connections", [this] { m_server.listen_after_bind(); });
}

HttpServer::Impl::~Impl() {
  m_server.end_connections();
  // Waits for the streams, because the library's `stop` cuts them off.
  const auto start = Clock::now();
  while (m_answering > 0 && seconds_since(start) < write_seconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  while (!m_server.is_running() && seconds_since(start) < write_seconds) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1));  // `stop` before the start has no effect
  }
  m_server.stop_reading();
  m_server.stop();
  m_listener.join();
}

/// Answers requests that need neither body nor handler. (The library reads a body of any length
/// before it looks for the path.)
HttpServer::Impl::Handling HttpServer::Impl::admit(const Request& request, Response& response) {
  ++m_requests;
  // The library would apply a Range header to any reply.
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
  // The name of a model may have slashes.
  const std::string one_model = "/v1/models/";
  const bool names_model = request.path.rfind(one_model, 0) == 0;
  const auto found = paths.find(names_model ? "/v1/models" : request.path);
  const auto stop = [&](int status, const std::string& what) {
    refuse(request, response, status, what);
    return Handling::Handled;
  };
  const bool is_open = request.path == "/" || request.path == "/health";
  if (!is_open && !is_key(request)) {
    response.set_header("WWW-Authenticate", "Bearer");
    return stop(unauthorized, "missing or invalid API key; expected Authorization: Bearer KEY");
  }
  if (found == paths.end()) return stop(not_found, words_of(not_found));
  const bool posts = found->second;
  const bool fits =
      posts ? request.method == "POST" : request.method == "GET" || request.method == "HEAD";
  if (!fits) {
    response.set_header("Allow", posts ? "POST" : "GET, HEAD");
    return stop(not_allowed,
                fmt::format("the method is {}; expected {}", base::shown_message(request.method),
                            posts ? "POST" : "GET"));
  }
  // Pages of other servers must not use this one through their reader's browser.
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
    return stop(bad_request, "the GET request has a body");
  }
  if (m_scheduler == nullptr && !is_open) {
    response.set_header("Retry-After", "5");
    return stop(unavailable, loading);
  }
  if (names_model && request.path.substr(one_model.size()) != m_model->name) {
    return stop(not_found, fmt::format("the model is {}; expected {}",
                                       base::in_quotes(request.path.substr(one_model.size())),
                                       base::in_quotes(m_model->name)));
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

/// Refuses the request and closes the connection, so that its unread body is not taken for the next
/// request.
void HttpServer::Impl::refuse(const Request& request, Response& response, int status,
                              const std::string& what) {
  reply(response, status, what);
  log(request, status, "");
  const std::string length = request.get_header_value("Content-Length");
  const bool has_body =
      request.has_header("Transfer-Encoding") || (!length.empty() && length != "0");
  if (has_body) response.set_header("Connection", "close");
}

/// Reads a body. Returns false if it refuses the request.
bool HttpServer::Impl::read_body(const Request& request, Response& response,
                                 const httplib::ContentReader& reader, Body& body) {
  const auto start = Clock::now();
  int status = bad_request;
  std::string what = "the body is incomplete";
  if (request.is_multipart_form_data()) {
    refuse(request, response, unknown_encoding, "the body is a form; expected JSON");
    return false;
  }
  std::size_t taken = 0;
  const bool has_come = reader([&](const char* data, std::size_t size) {
    taken += size;
    if (seconds_since(start) > body_seconds + static_cast<double>(taken) / body_rate) {
      status = too_slow;
      what = "the body arrives too slowly";
      return false;
    }
    if (status != bad_request) return taken <= 2 * largest_body;  // already refused
    if (taken > largest_body) {
      status = too_large;
      what = fmt::format("the body is larger than {} bytes", largest_body);
    } else if (body.held.add(static_cast<std::int64_t>(size)) > all_bodies) {
      status = unavailable;
      what = "the server has no memory for further large requests";
    } else {
      body.text.append(data, size);
    }
    return true;
  });
  if (has_come && status == bad_request) return true;
  // The library has set a status if the header announces too many bytes or an unknown encoding.
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
    // Such a message quotes the request, which is private.
    const bool may_quote = status == bad_request && !m_options.logs_prompts;
    log(request, status, may_quote ? field : base::shown_message(what));
  };
  if (m_drains) return fail(unavailable, stopping);
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
    say("{} prompt {}\n", time_text(), base::shown(body, body.size()));
  }
  try {
    answering->submit(*m_scheduler.load());
  } catch (const server::QueueFull& error) {
    return fail(m_drains ? unavailable : too_many, error.what());
  } catch (const Error& error) {
    return fail(bad_request, error.what());
  }
  const auto seconds = std::chrono::system_clock::now().time_since_epoch();
  answering->writer.emplace(answering->request, *m_model, answering->tickets.front()->id(),
                            std::chrono::duration_cast<std::chrono::seconds>(seconds).count());
  answering->socket = Socket::current();
  answering->method_and_path = fmt::format("{} {}", request.method, request.path);
  answering->client = request.remote_addr;
  if (!answering->request.streams) return wait_for_all(*answering, response);
  // If a request fails before its first event, the reply has an error status.
  while (!answering->take() && seconds_since(answering->start) < sign_every) {
    if (const auto error = answering->error()) {
      return fail(error_status(*answering->exchange), *error);
    }
    if (answering->socket.is_closed()) {
      answering->cancel();
      return fail(gone, "the client has disconnected");
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
    if (const auto error = answering.error()) {
      return end(error_status(*answering.exchange), *error);
    }
    if (answering.socket.is_closed()) {
      answering.cancel();
      return end(gone, "the client has disconnected");
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
                                        [answering](bool) { answering->cancel(); });
}

/// Writes the events that were taken already, or the next ones.
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
  const auto error = answering.error();
  const bool is_done = answering.exchange->is_done();
  if (error) {
    text += "data: " + server::error_body(*error, type_of(server_error)) + "\n\n";
  } else if (is_done && answering.request.includes_usage) {
    text += answering.writer->usage(answering.endings);
  }
  if (error || is_done) text += server::ReplyWriter::done();
  const bool is_silent = seconds_since(answering.last_sign) > sign_every;
  if (text.empty() && is_silent) text = ": in progress\n\n";
  if (!text.empty()) answering.last_sign = Clock::now();
  if (answering.socket.is_closed() || (!text.empty() && !sink.write(text.data(), text.size()))) {
    answering.cancel();
    log_of(answering, gone, "the client has disconnected");
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
        m_options.logs_prompts ? base::shown_message(error.what()) : error.field);
  }
}

/// Returns the seconds until a slot is free, estimated from the mean time of a request.
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
  say("{} {} {} {} {}{}{}\n", time_text(), request.remote_addr, base::shown_message(request.method),
      base::shown_message(request.path), status, more.empty() ? "" : " ", more);
}

void HttpServer::Impl::log_of(const Answering& answering, int status,
                              const std::string& what) const {
  if (!m_options.logs) return;
  std::string text =
      fmt::format("{} {} {} {}", time_text(), answering.client, answering.method_and_path, status);
  text += fmt::format(" request {}", answering.tickets.front()->id());
  if (answering.has_ended) {
    const server::TokenCounts counts = answering.writer->count(answering.endings);
    text += fmt::format(" prompt {} cached {} new {} evicted {:.3f} first {:.3f} s", counts.prompt,
                        counts.cached, counts.generated, answering.endings.front().evict_ratio,
                        answering.first_seconds);
  }
  text += fmt::format(" total {:.3f} s", seconds_since(answering.start));
  if (!what.empty()) text += " " + base::shown_message(what);
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
