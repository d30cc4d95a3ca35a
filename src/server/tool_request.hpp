// Chats with tools: their fields, and their prompts.
#pragma once

#include <cstddef>
#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "text/chat_input.hpp"

namespace kvzap::server {

inline constexpr std::size_t most_messages = 4096;  // of a chat

/// Whether a chat offers tools, or has calls or results of tools.
bool uses_tools(const nlohmann::json& body);

/// Returns what the chat template makes the prompt of. `body`: of a request that uses_tools, with
/// its keys in their order, because templates write tools as JSON. Throws BadRequest.
text::ChatInput chat_with_tools(const nlohmann::ordered_json& body);

}  // namespace kvzap::server
