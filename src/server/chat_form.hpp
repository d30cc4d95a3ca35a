// Requests of other endpoints in the form of /v1/chat/completions, which has the one reader of
// fields.
#pragma once

#include <kvzap/server/protocol.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/request_fields.hpp"

namespace kvzap::server {

/// What a reply of /v1/responses repeats of its request, and the conversation that it continues.
struct ResponseRequest {
  Json fields;  // of the reply
  bool is_stored = true;
  std::string messages;  // of the conversation without instructions: JSON, an array
};

/// Fields that a request calls otherwise than a chat, and with them their members: the chat's name,
/// the request's name. Longer names come first.
using FieldNames = std::vector<std::pair<std::string, std::string>>;

/// A body in the form of a chat.
struct ChatForm {
  files::ParsedJson body;
  FieldNames names;
  std::shared_ptr<const ResponseRequest> response;
};

/// Returns an error about a chat as one about the request.
BadRequest renamed(const BadRequest& error, const FieldNames& names);

/// Fields of chats that /v1/messages and /v1/responses do not have.
inline constexpr const char* not_in_messages[] = {
    "n",    "best_of",         "logprobs",       "top_logprobs",       "max_completion_tokens",
    "stop", "response_format", "stream_options", "parallel_tool_calls"};
inline constexpr const char* not_in_responses[] = {"n",
                                                   "best_of",
                                                   "logprobs",
                                                   "top_logprobs",
                                                   "max_tokens",
                                                   "max_completion_tokens",
                                                   "response_format",
                                                   "stream_options",
                                                   "messages"};

/// The form of a body of /v1/messages.
ChatForm chat_of_messages(Json body);
/// The form of a body of /v1/responses.
ChatForm chat_of_response(Json body, const ServedModel& model);

/// Removes a field and returns its value; null if it is absent.
Json take_field(Json& object, const char* name);
/// Refuses a field unless it is absent, empty, or one of the values.
void refuse_field(const Json& object, const char* name, const Json& neutral = Json::array());
/// Sets whether the model thinks before it answers.
void set_thinks(bool thinks, Json& chat);
/// Returns a function as chats have tools and choices of tools.
Json function_json(Json function);

}  // namespace kvzap::server
