// JSON as the text of a reply.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace kvzap::server {

/// Replaces bytes that are not UTF-8: answers of a model may end within a character.
inline std::string dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace kvzap::server
