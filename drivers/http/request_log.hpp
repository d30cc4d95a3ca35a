// Lines of the log, one for each request.
#pragma once

#include <cstdint>
#include <kvzap/server/protocol.hpp>
#include <optional>
#include <string>

#include "http/request_parser.hpp"

namespace kvzap::driver {

/// What the log has of a completion.
struct AnswerFacts {
  std::int64_t request = 0;
  /// Of the prompts and answers; absent: no answer has ended.
  std::optional<server::TokenCounts> tokens;
  double evict_ratio = 0;
  double first_seconds = 0;
  double total_seconds = 0;
};

/// Returns the line of a request, with its end. `status`: of the reply; `note`: a message, or "".
/// `as_json`: an object in place of a text.
std::string log_line(const Request& request, int status, const std::string& note,
                     const AnswerFacts* facts, bool as_json);
/// Returns the line that shows the body of a request.
std::string prompt_line(const Request& request, const std::string& body, bool as_json);

/// Returns the identity of a request: `given`, the value of its X-Request-Id, if that has 1 to 128
/// letters, digits and characters of -_.:+/=, otherwise a random one.
std::string request_id(const std::string& given);

}  // namespace kvzap::driver
