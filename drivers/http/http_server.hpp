// OpenAI's protocol over HTTP: what stands between sockets and the scheduler.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/protocol.hpp"
#include "server/scheduler.hpp"

namespace kvzap::driver {

struct HttpOptions {
  std::string host = "127.0.0.1";
  /// 0: one that is free.
  int port = 8080;
  /// Any of them opens every path but / and /health; none: all are open.
  std::vector<std::string> api_keys;
  /// Connections at once; those beyond wait to be taken.
  std::size_t max_connections = 1344;
  /// One line a request on standard error, and what was asked.
  bool logs = true;
  bool logs_prompts = false;
};

/// Bytes of a body at most, of a header line, and seconds that sending a body may take.
constexpr std::size_t largest_body = std::size_t{64} << 20;

/// Listens on threads of its own, one for each connection.
class HttpServer {
 public:
  /// Throws Error if the address cannot be had. Until `open`, all requests are answered by 503.
  explicit HttpServer(const HttpOptions& options);
  /// Waits for those who are in the middle of an answer, a few seconds at most, and closes.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  /// Requests are passed on from now on. `kv_memory`: bytes over all ranks; none: no limit. What is
  /// passed by reference outlives the server.
  void open(const server::ServedModel& model, server::Scheduler& scheduler,
            std::optional<std::int64_t> kv_memory);
  /// /health says from now on that the server is about to stop.
  void drain();
  /// Requests so far.
  std::int64_t requests() const;

 private:
  class Impl;
  std::unique_ptr<Impl> m_impl;
};

/// Whether two texts are equal, in a time that tells nothing about where they differ.
bool equal_in_constant_time(const std::string& secret, const std::string& given);

}  // namespace kvzap::driver
