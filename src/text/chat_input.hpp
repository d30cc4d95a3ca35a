// A conversation as JSON, with everything that a chat template may read.
#pragma once

#include <nlohmann/json.hpp>

namespace kvzap::text {

/// Input of ChatTemplate::render, in the form of transformers' apply_chat_template. The order of
/// keys counts, because templates write tools as JSON.
struct ChatInput {
  /// Objects with a role and a content (a string, or a list of parts), and where they have them
  /// tool_calls, name, tool_call_id, reasoning_content and others.
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  /// A list of tools; null: none.
  nlohmann::ordered_json tools;
  /// A list of documents; null: none.
  nlohmann::ordered_json documents;
  /// Further variables of the template: an object. They replace those of the special tokens.
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
  bool add_generation_prompt = true;
  /// Value of the variables enable_thinking and thinking, unless `variables` has them.
  bool thinking = false;
};

}  // namespace kvzap::text
