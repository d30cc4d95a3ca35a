#include "http/reply.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <boost/beast/http/status.hpp>
#include <ctime>
#include <kvzap/server/protocol.hpp>

#include "files/quote.hpp"
#include "http/paths.hpp"

namespace kvzap::driver {
namespace {

/// The `type` that OpenAI's protocol gives to errors of this status.
const char* error_type_of(int status) {
  switch (status) {
    case unauthorized:
      return "authentication_error";
    case forbidden:
      return "permission_error";
    case not_found:
      return "not_found_error";
    case unknown_version:
      return "invalid_request_error";
    case too_many:
      return "rate_limit_error";
    default:
      return status >= server_error ? "server_error" : "invalid_request_error";
  }
}

/// The `type` that Anthropic's protocol gives to errors of this status.
const char* messages_error_type_of(int status) {
  switch (status) {
    case too_large:
      return "request_too_large";
    case unavailable:
      return "overloaded_error";
    case server_error:
    case not_implemented:
      return "api_error";
    default:
      return error_type_of(status);
  }
}

}  // namespace

std::string head_of(const Reply& reply, Framing framing, int idle_seconds) {
  const auto reason =
      boost::beast::http::obsolete_reason(static_cast<boost::beast::http::status>(reply.status));
  std::string head = fmt::format("HTTP/1.1 {} {}\r\n", reply.status,
                                 std::string_view(reason.data(), reason.size()));
  const auto add = [&](std::string_view name, std::string_view value) {
    head += fmt::format("{}: {}\r\n", name, value);
  };
  add("Date", fmt::format("{:%a, %d %b %Y %H:%M:%S} GMT", fmt::gmtime(std::time(nullptr))));
  add("Content-Type", reply.type);
  if (framing == Framing::length) add("Content-Length", std::to_string(reply.body.size()));
  if (framing == Framing::chunks) add("Transfer-Encoding", "chunked");
  for (const auto& [name, value] : reply.fields) add(name, value);
  if (reply.closes || framing == Framing::end_of_connection) {
    add("Connection", "close");
  } else {
    add("Connection", "keep-alive");
    add("Keep-Alive", fmt::format("timeout={}", idle_seconds));
  }
  return head + "\r\n";
}

std::string chunk_of(std::string_view text) {
  return fmt::format("{:x}\r\n{}\r\n", text.size(), text);
}

Reply error_reply(int status, const std::string& what, const std::string& field,
                  const std::string& code) {
  Reply reply;
  reply.status = status;
  reply.error = ReplyError{what, field, code};
  reply.note = files::shown_message(what);
  return reply;
}

std::string error_text(int status, const ReplyError& error, const std::string& path) {
  if (is_messages_path(path)) {
    return server::messages_error_body(error.what, messages_error_type_of(status));
  }
  return server::error_body(error.what, error_type_of(status), error.field, error.code);
}

}  // namespace kvzap::driver
