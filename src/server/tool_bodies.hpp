// Calls of tools as families write them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/answer_parts.hpp"

namespace kvzap::server {

/// The marks around calls. `end` is empty if calls end with the answer.
struct CallMarks {
  std::string begin, end;
};
CallMarks marks_of(ToolStyle style);

/// Returns the calls in the text between the marks; none if it is not all calls of `tools`.
std::vector<ToolCall> calls_of(ToolStyle style, std::string_view body,
                               const nlohmann::ordered_json& tools);

/// Returns the call of a tool with arguments in JSON; nothing if there is no such tool or they are
/// no object.
std::optional<ToolCall> call_of(std::string_view name, std::string_view arguments,
                                const nlohmann::ordered_json& tools);

}  // namespace kvzap::server
