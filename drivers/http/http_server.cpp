#include "http/http_server.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <exception>
#include <new>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "console/console.hpp"
#include "files/ascii.hpp"
#include "files/quote.hpp"
#include "http/access.hpp"
#include "http/answering.hpp"
#include "http/connection.hpp"
#include "http/listener.hpp"
#include "http/paths.hpp"
#include "http/process_metrics.hpp"
#include "http/request_log.hpp"
#include "http/serve_page.hpp"

namespace kvzap::driver {
namespace {

using server::BadRequest;
using server::Scheduler;
using server::ServedModel;

constexpr const char* stopping = "the server is shutting down";
constexpr const char* loading = "the model is still loading";
// Large bodies in memory. Small ones are read on one thread, large ones on another, one at a time:
// parsed JSON takes a multiple of its text, and a small request does not wait for a large one. Nor
// does any wait for the grammars of others, which are made on a third.
constexpr std::int64_t all_bodies = std::int64_t{512} << 20;
// For answers in progress when the server ends.
constexpr double last_seconds = 10;

/// The prompts that a request to a path may have.
std::int64_t most_prompts(const ServedModel& model, const std::string& path) {
  const Path* const found = path_of(path);
  if (!found || !found->endpoint) return 1;
  if (server::embeds(*found->endpoint)) return model.max_inputs + 1;
  return *found->endpoint == server::Endpoint::completions ? model.max_prompts : 1;
}

/// Bytes of a body that can have prompts which fit the context. In JSON a byte takes up to 6.
double longest_prompts(const ServedModel& model, std::int64_t prompts) {
  if (model.max_tokens <= 0 || model.longest_token == 0) return largest_body;
  constexpr double escaped = 6, other_fields = 1 << 20;
  return escaped * static_cast<double>(model.max_tokens) *
             static_cast<double>(model.longest_token) * static_cast<double>(prompts) +
         other_fields;
}

Reply json(std::string body) {
  Reply reply;
  reply.body = std::move(body);
  return reply;
}

std::string random_nonce() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

/// Returns the page, whose own scripts and styles alone have this nonce.
std::string page_with(const std::string& nonce) {
  constexpr std::string_view mark = "@nonce@";
  std::string page = serve_page;
  for (std::size_t place = 0; (place = page.find(mark, place)) != std::string::npos;) {
    page.replace(place, mark.size(), nonce);
  }
  return page;
}

}  // namespace

class HttpServer::Impl final : public Service {
 public:
  explicit Impl(const HttpOptions& options);
  ~Impl() override;

  int port() const { return m_listener.port(); }
  bool is_loopback() const { return m_listener.is_loopback(); }
  void open(const ServedModel& model, Scheduler& scheduler, std::optional<std::int64_t> kv_memory) {
    m_model = &model;
    m_kv_memory = kv_memory;
    m_scheduler = &scheduler;  // last, because other threads take it as the sign that all is set
  }
  void drain() { m_drains = true; }

  std::optional<Reply> judge(const Request& request) override;
  std::optional<Reply> judge_size(const Request& request, std::uint64_t bytes) override;
  bool is_protected(const Request& request) override {
    const Path* const path = path_of(request.path);
    return !path || !path->is_open;
  }
  bool hold(std::int64_t bytes) override { return (m_held += bytes) <= all_bodies; }
  int retry_after() const override;
  void answer(const std::shared_ptr<Connection>& connection) override;
  void add_fields(const Request& request, Reply& reply) const override;
  void log(const Request& request, const Reply& reply) override;

 private:
  static std::optional<Reply> judge_body(const Request& request);
  Reply get(const std::string& path);
  Reply stored(const Request& request);
  Reply health() const;
  static Reply preflight();
  /// A request on its way to the scheduler.
  struct Reading {
    std::shared_ptr<HeldBody> body;
    std::optional<server::ApiRequest> request;  // that waits for its grammar
    std::shared_ptr<Answering> answering;       // once it was submitted
  };
  void work(const std::shared_ptr<Connection>& connection, Reading reading,
            boost::asio::thread_pool& pool);
  void lose(const std::weak_ptr<Connection>& connection);
  Reply read(Reading& reading, const Request& request);
  Reply refusal(int status, const std::string& what, const std::string& field = {},
                const std::string& code = {}) const;
  void log_end(const Answering& answering, int status, const std::string& what) const;

  HttpOptions m_options;
  std::atomic<Scheduler*> m_scheduler{nullptr};
  const ServedModel* m_model = nullptr;
  std::optional<std::int64_t> m_kv_memory;
  std::atomic<bool> m_drains{false};
  std::atomic<std::int64_t> m_held{0};  // bytes of large bodies
  Listener m_listener;
  Access m_access;
  boost::asio::thread_pool m_small{1}, m_large{1}, m_grammars{1};
};

HttpServer::Impl::Impl(const HttpOptions& options)
    : m_options(options),
      m_listener(options.host, options.port, options.max_connections),
      m_access(options.api_keys, options.host, m_listener.is_loopback(), options.allowed_hosts,
               options.allowed_origins) {
  m_listener.start(*this);
}

HttpServer::Impl::~Impl() {
  m_drains = true;
  m_small.join();
  m_large.join();
  m_grammars.join();  // has requests of the other two
  m_listener.stop(last_seconds);
}

/// Refuses what needs no body. Names come before keys, and keys before all that a path tells.
std::optional<Reply> HttpServer::Impl::judge(const Request& request) {
  const Path* const path = path_of(request.path);
  const bool is_open = path && path->is_open;
  if (auto refused = m_access.judge_names(request)) return refused;
  if (request.method == "OPTIONS" && m_access.is_allowed_origin(request.field("origin"))) {
    return preflight();  // a browser sends no key with it
  }
  if (!is_open) {
    if (auto refused = m_access.judge_key(request)) return refused;
  }
  if (!path) {
    return error_reply(not_found, unknown_path(request.path));
  }
  if (!path->takes(request.method)) {
    Reply reply = error_reply(not_allowed, fmt::format("the method is {}; expected {}",
                                                       files::shown_message(request.method),
                                                       path->posts() ? "POST" : "GET"));
    reply.fields["Allow"] = path->allowed();
    return reply;
  }
  if (path->posts()) {
    if (auto refused = judge_body(request)) return refused;
  }
  if (m_scheduler == nullptr && !is_open) return error_reply(unavailable, loading);
  if (m_drains && path->posts()) return error_reply(unavailable, stopping);
  if (path->name != one_model || path->name_in(request.path) == m_model->name) return {};
  return error_reply(
      not_found,
      fmt::format("the model is {}; expected {}", files::in_quotes(path->name_in(request.path)),
                  files::in_quotes(m_model->name)),
      "", server::model_not_found);
}

/// Refuses bodies of other types by their head.
std::optional<Reply> HttpServer::Impl::judge_body(const Request& request) {
  const std::string& encoding = request.field("content-encoding");
  if (!encoding.empty() && files::lower_case(encoding) != "identity") {
    return error_reply(unknown_encoding, fmt::format("Content-Encoding is {}; expected none",
                                                     files::in_quotes(encoding)));
  }
  if (files::lower_case(request.field("content-type")).rfind("multipart/", 0) == 0) {
    return error_reply(unknown_encoding, "the body is a form; expected JSON");
  }
  return {};
}

std::optional<Reply> HttpServer::Impl::judge_size(const Request& request, std::uint64_t bytes) {
  if (bytes > largest_body) {
    return error_reply(too_large, fmt::format("the body is larger than {} bytes", largest_body));
  }
  if (m_scheduler == nullptr) return {};
  const double most = longest_prompts(*m_model, most_prompts(*m_model, request.path));
  if (static_cast<double>(bytes) <= most) return {};
  return refusal(bad_request,
                 fmt::format("the body has more than {:.0f} bytes; the context of {} tokens cannot "
                             "hold such a prompt",
                             most, m_model->max_tokens),
                 "", "context_length_exceeded");
}

void HttpServer::Impl::answer(const std::shared_ptr<Connection>& connection) {
  const Request& request = connection->request();
  const bool posts = request.method == "POST";
  if (posts && (m_drains || m_listener.is_nearly_full())) {
    Reply reply = error_reply(unavailable, m_drains ? stopping : "the server is busy");
    log(request, reply);
    return connection->reply(std::move(reply));
  }
  if (posts) {
    Reading reading;
    reading.body = connection->take_body();
    const bool is_large = reading.body->text().size() > small_body;
    return work(connection, std::move(reading), is_large ? m_large : m_small);
  }
  Reply reply = path_of(request.path)->name == one_response ? stored(request) : get(request.path);
  // The page and monitors ask for the other paths all the time.
  if (request.path.rfind("/v1/", 0) == 0) log(request, reply);
  connection->reply(std::move(reply));
}

Reply HttpServer::Impl::health() const {
  if (m_scheduler == nullptr || m_drains) {
    return error_reply(unavailable, m_drains ? stopping : loading);
  }
  return json(R"({"status":"ok"})");
}

Reply HttpServer::Impl::get(const std::string& path) {
  if (path == "/health") return health();
  if (path == "/v1/models") return json(server::models_body(*m_model));
  if (path == "/openapi.json") {
    return json(server::openapi_document(*m_model, described_paths(!m_options.api_keys.empty()),
                                         m_options.version));
  }
  if (path == "/kvzap/status") {
    return json(server::status_body(*m_model, *m_scheduler.load(), m_kv_memory));
  }
  Reply reply;
  if (path == "/metrics") {
    reply.type = "text/plain; version=0.0.4; charset=utf-8";
    reply.body = server::metrics_text(m_scheduler.load()->counts(), *m_model) +
                 process_metrics(m_options.version, m_options.revision);
  } else if (path == "/") {
    reply.type = "text/html; charset=utf-8";
    const std::string nonce = random_nonce();
    reply.body = page_with(nonce);
    reply.fields["Content-Security-Policy"] = fmt::format(
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'nonce-{0}'; script-src "
        "'nonce-{0}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        nonce);
  } else {
    reply.body = server::model_body(*m_model);
  }
  return reply;
}

/// Returns or deletes a stored response.
Reply HttpServer::Impl::stored(const Request& request) {
  const std::string id = path_of(request.path)->name_in(request.path);
  if (const auto& responses = m_model->responses) {
    if (request.method == "DELETE") {
      if (responses->erase(id)) return json(server::deleted_body(id));
    } else if (auto found = responses->find(id)) {
      return json(std::move(found->body));
    }
  }
  return error_reply(not_found, fmt::format("no response {} is stored", files::in_quotes(id)));
}

/// Ends a connection from a worker's thread, once there is memory for it.
void HttpServer::Impl::lose(const std::weak_ptr<Connection>& connection) {
  constexpr auto pause = std::chrono::milliseconds(50);
  for (int tries = 0; tries < 1000; ++tries) {
    try {
      return boost::asio::post(m_listener.executor(), [connection] {
        if (const auto open = connection.lock()) open->lose();
      });
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(pause);
    }
  }
}

/// Reads a request on a worker's thread, and then on that of grammars if its grammar is not kept.
void HttpServer::Impl::work(const std::shared_ptr<Connection>& connection, Reading reading,
                            boost::asio::thread_pool& pool) {
  boost::asio::post(pool, [this, connection, reading = std::move(reading)]() mutable {
    // Connections end on their own thread, so this one does not keep it.
    const std::weak_ptr<Connection> seen = connection;
    try {
      Reply reply = read(reading, connection->request());
      if (reading.request) return work(connection, std::move(reading), m_grammars);
      reading.body.reset();  // freed by the worker
      boost::asio::post(m_listener.executor(), [this, connection = std::move(connection),
                                                answering = std::move(reading.answering),
                                                reply = std::move(reply)]() mutable {
        if (answering) return answering->begin(connection);
        log(connection->request(), reply);
        connection->reply(std::move(reply));
      });
    } catch (const std::exception&) {
      reading.body.reset();
      lose(seen);  // there is no memory even for a refusal
    }
  });
}

/// Returns the reply, or sets a member of `reading`.
Reply HttpServer::Impl::read(Reading& reading, const Request& request) {
  const std::string& body = reading.body->text();
  std::optional<server::ApiRequest> begun = std::exchange(reading.request, std::nullopt);
  try {
    if (m_drains) return error_reply(unavailable, stopping);
    if (request.path == "/tokenize") return json(server::tokenize(body, *m_model));
    if (request.path == "/detokenize") return json(server::detokenize(body, *m_model));
    const auto endpoint = path_of(request.path)->endpoint;
    if (!endpoint) return json(server::count_tokens(body, *m_model));
    if (!begun) {
      begun = server::parse_request(body, *endpoint, *m_model);
      if (begun->make_grammar) {
        reading.request = std::move(begun);
        return {};
      }
    }
    server::ApiRequest parsed = std::move(*begun);
    server::complete(parsed);
    for (auto& generation : parsed.generations) generation.client = m_access.client_of(request);
    auto made = std::make_shared<Answering>(
        std::move(parsed), *m_model, m_listener.executor(), m_drains,
        [this](const Answering& ended, int status, const std::string& what) {
          log_end(ended, status, what);
        });
    if (m_options.logs && m_options.logs_prompts) {
      say_without_waiting(prompt_line(request, body, m_options.logs_json));
    }
    made->submit(*m_scheduler.load());
    reading.answering = std::move(made);
    return {};
  } catch (const BadRequest& error) {
    const bool is_missing = error.code == server::model_not_found;
    return refusal(is_missing ? not_found : bad_request, error.what(), error.field, error.code);
  } catch (const server::QueueFull& error) {
    return refusal(m_drains ? unavailable : too_many, error.what());
  } catch (const Error& error) {
    return refusal(bad_request, error.what());
  } catch (const std::bad_alloc&) {
    return refusal(unavailable, "the server has no memory for the request");
  } catch (const std::exception& error) {
    return refusal(server_error, error.what());
  }
}

Reply HttpServer::Impl::refusal(int status, const std::string& what, const std::string& field,
                                const std::string& code) const {
  Reply reply = error_reply(status, what, field, code);
  // Messages about a field quote the request, which is private.
  const bool may_quote = status == bad_request || status == not_found;
  if (may_quote && !m_options.logs_prompts) reply.note = field;
  return reply;
}

/// Returns the seconds until a slot is free, estimated from the busy time for each request so far.
int HttpServer::Impl::retry_after() const {
  constexpr int standard = 5;
  const Scheduler* const scheduler = m_scheduler;
  if (!scheduler || m_drains) return standard;
  const server::SchedulerCounts counts = scheduler->counts();
  if (counts.finished == 0) return standard;
  constexpr double most = 60;
  const double each =
      (counts.step_seconds + counts.own_seconds) / static_cast<double>(counts.finished);
  return static_cast<int>(std::clamp(each, 1.0, most));
}

void HttpServer::Impl::add_fields(const Request& request, Reply& reply) const {
  if (!request.id.empty()) reply.fields["X-Request-Id"] = request.id;
  const std::string& origin = request.field("origin");
  if (origin.empty() || !m_access.is_allowed_origin(origin)) return;
  reply.fields["Access-Control-Allow-Origin"] = origin;
  reply.fields["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After";
  reply.fields["Vary"] = "Origin";
}

/// Tells a browser what pages of an allowed origin may send.
Reply HttpServer::Impl::preflight() {
  Reply reply;
  reply.type = "text/plain";
  reply.fields["Access-Control-Allow-Methods"] = "GET, HEAD, POST, DELETE";
  // Browsers take * for all fields but this one.
  reply.fields["Access-Control-Allow-Headers"] = "Authorization, *";
  reply.fields["Access-Control-Max-Age"] = "600";
  return reply;
}

void HttpServer::Impl::log(const Request& request, const Reply& reply) {
  if (!m_options.logs || request.method == "OPTIONS") return;
  say_without_waiting(log_line(request, reply.status, reply.note, nullptr, m_options.logs_json));
}

void HttpServer::Impl::log_end(const Answering& answering, int status,
                               const std::string& what) const {
  if (!m_options.logs) return;
  const AnswerFacts facts = answering.facts();
  say_without_waiting(log_line(answering.request(), status, files::shown_message(what), &facts,
                               m_options.logs_json));
}

HttpServer::HttpServer(const HttpOptions& options) : m_impl(std::make_unique<Impl>(options)) {}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return m_impl->port(); }
bool HttpServer::is_loopback() const { return m_impl->is_loopback(); }
void HttpServer::open(const ServedModel& model, Scheduler& scheduler,
                      std::optional<std::int64_t> kv_memory) {
  m_impl->open(model, scheduler, kv_memory);
}
void HttpServer::drain() { m_impl->drain(); }

}  // namespace kvzap::driver
