// OpenAI's protocol over HTTP, between connections and the scheduler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/scheduler.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::driver {

struct HttpOptions {
  std::string host = "127.0.0.1";
  /// 0: any free port.
  int port = 8080;
  /// Each key gives access to all paths; / and /health need none. Without keys all paths are open.
  std::vector<std::string> api_keys;
  /// Names of the server beside `host`, localhost and loopback addresses: see Access.
  std::vector<std::string> allowed_hosts;
  /// Limit on simultaneous connections: see Connections::next_to_end.
  std::size_t max_connections = 2304;
  /// Whether standard error gets one line for each request, and whether the line includes the
  /// prompt.
  bool logs = true;
  bool logs_prompts = false;
  /// Lines are JSON objects.
  bool logs_json = false;
  /// Origins of other servers' pages that may use this one, or "*" for all: see Access.
  std::vector<std::string> allowed_origins;
  /// Of kvzap, for the metrics.
  std::string version, revision;
};

/// Maximum bytes of a body.
constexpr std::size_t largest_body = std::size_t{64} << 20;

/// Returns the name or address that clients of a server with this --host or --allowed-hosts name,
/// or
/// "" if the text is none.
std::string server_name(const std::string& text);
/// Returns whether a text is an origin, as https://chat.example.org:8443, or "*".
bool is_origin(const std::string& text);

/// Listens on threads of its own: one for all connections, two that read bodies.
class HttpServer {
 public:
  /// Throws Error if it cannot listen on the address. Answers all requests with 503 until `open`.
  explicit HttpServer(const HttpOptions& options);
  /// Waits a few seconds at most for answers in progress, then closes all connections.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  /// Whether only this machine reaches the server.
  bool is_loopback() const;
  /// Passes requests to the scheduler from now on. `kv_memory`: bytes over all ranks; none: no
  /// limit. The model and the scheduler must outlive the server.
  void open(const server::ServedModel& model, server::Scheduler& scheduler,
            std::optional<std::int64_t> kv_memory);
  /// From now on /health reports that the server is shutting down.
  void drain();

 private:
  class Impl;
  std::unique_ptr<Impl> m_impl;
};

}  // namespace kvzap::driver
