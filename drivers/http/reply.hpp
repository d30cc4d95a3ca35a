// A reply of HTTP/1.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// Status codes of replies. `gone` appears in the log alone: the client has disconnected.
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
  expectation_failed = 417,
  too_many = 429,
  head_too_large = 431,
  gone = 499,
  server_error = 500,
  not_implemented = 501,
  unavailable = 503,
  unknown_version = 505
};

/// An error, whose body depends on the protocol of the path.
struct ReplyError {
  std::string what;
  std::string field;  // the wrong field of the request, or ""
  std::string code;   // OpenAI's name of the error, or ""
};

struct Reply {
  int status = ok;
  std::string type = "application/json";
  std::string body;
  std::map<std::string, std::string> fields = {};
  /// Whether the connection ends after the reply.
  bool closes = false;
  /// What the log adds to the status.
  std::string note = {};
  /// The connection makes the body of it.
  std::optional<ReplyError> error = {};
};

/// How the end of a reply's body is marked.
enum class Framing { length, chunks, end_of_connection };

/// Returns status line and fields. `idle_seconds`: how long the connection stays open without a
/// request, which the client is told.
std::string head_of(const Reply& reply, Framing framing, int idle_seconds);

/// Returns one chunk of a body; an empty text ends the body.
std::string chunk_of(std::string_view text);

/// Returns the reply to an error; the log has the message, too. `field`: the wrong field of the
/// request, or ""; `code`: OpenAI's name of the error, or "".
Reply error_reply(int status, const std::string& what, const std::string& field = {},
                  const std::string& code = {});

/// Returns the body of an error at a path, in the form of the path's protocol.
std::string error_text(int status, const ReplyError& error, const std::string& path);

}  // namespace kvzap::driver
