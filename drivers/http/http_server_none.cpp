// Stands in for the other sources of this folder in a program that is built without Boost.
#include "http/http_server.hpp"

namespace kvzap::driver {

class HttpServer::Impl {};

std::string server_name(const std::string& text) { return text; }
bool is_origin(const std::string&) { return true; }

HttpServer::HttpServer(const HttpOptions&) {
  throw Error("this kvzap was built without Boost (Asio and Beast), which kvzap serve needs");
}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return 0; }
bool HttpServer::is_loopback() const { return true; }
void HttpServer::open(const server::ServedModel&, server::Scheduler&, std::optional<std::int64_t>) {
}
void HttpServer::drain() {}

}  // namespace kvzap::driver
