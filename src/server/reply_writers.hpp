// Writers of replies by endpoint, and what they have in common.
#pragma once

#include <cstdint>
#include <kvzap/server/protocol.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

namespace kvzap::server {

/// The object `kvzap` of a reply.
nlohmann::ordered_json kvzap_of(const Ending& ending);
/// An event with a name.
std::string named_event(const std::string& name, const nlohmann::ordered_json& json);

/// Of OpenAI's /v1/responses.
std::unique_ptr<ReplyWriter> make_response_writer(const ApiRequest& request,
                                                  const ServedModel& model, std::int64_t id,
                                                  std::int64_t created);
/// Of Anthropic's /v1/messages.
std::unique_ptr<ReplyWriter> make_messages_writer(const ApiRequest& request,
                                                  const ServedModel& model, std::int64_t id);
/// Of endpoints that compute vectors.
std::unique_ptr<ReplyWriter> make_embedding_writer(const ApiRequest& request,
                                                   const ServedModel& model, std::int64_t id,
                                                   std::int64_t created);

}  // namespace kvzap::server
