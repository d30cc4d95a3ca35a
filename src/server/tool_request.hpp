// Messages and tools of chats.
#pragma once

#include <string>
#include <vector>

#include "server/request_fields.hpp"

namespace kvzap::server {

/// Checks the name of a function.
void check_tool_name(const Json& function, const std::string& where);

/// Returns the tools that the model may call.
Json tools_of(const Json& body);

/// Whether a chat offers tools, or has calls or results of tools.
bool uses_tools(const Json& body);

/// Messages of a chat.
struct Messages {
  /// As chat templates read them: contents are texts, arguments of calls objects.
  Json list = Json::array();
  std::vector<std::vector<std::string>> parts;  // of each content
};
Messages messages_of(const Json& body);

}  // namespace kvzap::server
