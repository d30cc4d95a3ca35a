// Stands in for http_server.cpp in a program that is built without cpp-httplib.
#include "http/http_server.hpp"

namespace kvzap::driver {

class HttpServer::Impl {};

HttpServer::HttpServer(const HttpOptions&) {
  throw Error("this kvzap was built without cpp-httplib, which kvzap serve needs");
}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return 0; }
void HttpServer::open(const server::ServedModel&, server::Scheduler&, std::optional<std::int64_t>) {
}
void HttpServer::drain() {}
std::int64_t HttpServer::requests() const { return 0; }

}  // namespace kvzap::driver
