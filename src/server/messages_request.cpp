// Requests of Anthropic's /v1/messages.
#include <fmt/format.h>

#include <utility>

#include "server/chat_form.hpp"
#include "server/tool_request.hpp"

namespace kvzap::server {
namespace {

std::string type_at(const Json& block, const std::string& where) {
  if (!block.is_object()) refuse(where, "an object with a type", block);
  return text_at(block, "type", where);
}

[[noreturn]] void refuse_block(const std::string& type, const std::string& where,
                               const char* expected) {
  throw BadRequest(where, fmt::format("{} has the type {}, which is not supported; expected {}",
                                      where, files::described(Json(type)), expected));
}

Json result_message(const Json& block, const std::string& where) {
  Json message = {{"role", "tool"}, {"tool_call_id", text_at(block, "tool_use_id", where)}};
  const Json* const content = field_of(block, "content");
  message["content"] = content ? joined(texts_of(*content, where + ".content")) : "";
  return message;
}

/// Adds a message of the user, and before it the results of tools in it.
void add_user(Json content, const std::string& where, Json& list) {
  if (content.is_string()) {
    list.push_back({{"role", "user"}, {"content", std::move(content)}});
    return;
  }
  Json parts = Json::array();
  for (std::size_t i = 0; i < content.size(); ++i) {
    Json& block = content[i];
    const std::string name = fmt::format("{}[{}]", where, i);
    const std::string type = type_at(block, name);
    if (type == "text") {
      parts.push_back({{"type", "text"}, {"text", text_at(block, "text", name)}});
    } else if (type == "tool_result") {
      list.push_back(result_message(block, name));
    } else {
      refuse_block(type, name, "text or tool_result");
    }
  }
  if (!parts.empty()) list.push_back({{"role", "user"}, {"content", std::move(parts)}});
}

Json call_json(Json& block, const std::string& where) {
  check_tool_name(block, where);
  Json input = take_field(block, "input");
  if (!input.is_object()) refuse(where + ".input", "an object", input);
  Json call = function_json({{"name", block.at("name")}, {"arguments", std::move(input)}});
  call["id"] = text_at(block, "id", where);
  return call;
}

void add_assistant(Json content, const std::string& where, Json& list) {
  Json message = {{"role", "assistant"}};
  std::string text, thoughts;
  if (content.is_string()) text = content.get<std::string>();
  for (std::size_t i = 0; content.is_array() && i < content.size(); ++i) {
    Json& block = content[i];
    const std::string name = fmt::format("{}[{}]", where, i);
    const std::string type = type_at(block, name);
    if (type == "text") {
      text += text_at(block, "text", name);
    } else if (type == "thinking") {
      thoughts += text_at(block, "thinking", name);
    } else if (type == "tool_use") {
      message["tool_calls"].push_back(call_json(block, name));
    } else {
      refuse_block(type, name, "text, thinking or tool_use");
    }
  }
  message["content"] = std::move(text);
  if (!thoughts.empty()) message["reasoning_content"] = std::move(thoughts);
  list.push_back(std::move(message));
}

Json chat_messages(Json messages, const Json& system) {
  if (messages.is_null()) throw BadRequest("messages", "messages are missing");
  if (!messages.is_array() || messages.empty() || messages.size() > limits::messages) {
    refuse("messages", fmt::format("1 to {} messages", limits::messages), messages);
  }
  Json list = Json::array();
  if (!system.is_null()) {
    list.push_back({{"role", "system"}, {"content", joined(texts_of(system, "system"))}});
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string where = fmt::format("messages[{}]", i);
    if (!messages[i].is_object()) refuse(where, "an object", messages[i]);
    const std::string role = text_at(messages[i], "role", where);
    Json content = take_field(messages[i], "content");
    if (!content.is_string() && !content.is_array()) {
      refuse(where + ".content", "a string or an array of blocks", content);
    }
    if (role == "user") {
      add_user(std::move(content), where + ".content", list);
    } else if (role == "assistant") {
      add_assistant(std::move(content), where + ".content", list);
    } else {
      refuse(where + ".role", R"("user" or "assistant")", Json(role));
    }
  }
  return list;
}

Json chat_tools(Json tools) {
  Json list = Json::array();
  if (tools.is_null()) return list;
  if (!tools.is_array()) refuse("tools", "an array of tools", tools);
  for (std::size_t i = 0; i < tools.size(); ++i) {
    Json& tool = tools[i];
    const std::string where = fmt::format("tools[{}]", i);
    if (!tool.is_object()) refuse(where, "an object", tool);
    const Json* const type = field_of(tool, "type");
    if (type && !is_text(type, "custom")) {
      refuse_as_unsupported(where + ".type " + files::described(*type));
    }
    check_tool_name(tool, where);
    Json function = {{"name", tool.at("name")}};
    for (const char* const name : {"description", "strict"}) {
      if (field_of(tool, name)) function[name] = take_field(tool, name);
    }
    function["parameters"] = take_field(tool, "input_schema");
    if (!function["parameters"].is_object()) {
      refuse(where + ".input_schema", "an object", function["parameters"]);
    }
    list.push_back(function_json(std::move(function)));
  }
  return list;
}

/// Sets the choice of tools. The reader of chats decides which of them are supported.
void set_tool_choice(const Json& choice, Json& chat) {
  if (choice.is_null()) return;
  const std::string type = type_at(choice, "tool_choice");
  if (const Json* const name = field_of(choice, "name")) text_of(*name, "tool_choice.name");
  if (type == "tool") {
    chat["tool_choice"] = function_json({{"name", text_at(choice, "name", "tool_choice")}});
  } else if (type == "any") {
    chat["tool_choice"] = "required";
  } else if (type == "auto" || type == "none") {
    chat["tool_choice"] = type;
  } else {
    refuse("tool_choice.type", R"("auto", "none", "any" or "tool")", choice.at("type"));
  }
  if (bool_of(choice, "disable_parallel_tool_use", false)) chat["parallel_tool_calls"] = false;
}

void set_thinking(const Json& thinking, Json& chat) {
  if (thinking.is_null()) return;
  const std::string type = type_at(thinking, "thinking");
  if (type != "enabled" && type != "disabled" && type != "adaptive") {
    refuse("thinking.type", R"("enabled", "disabled" or "adaptive")", thinking.at("type"));
  }
  set_thinks(type != "disabled", chat);
}

/// Sets the format of the answer. The reader of chats decides which of them are supported.
void set_output_format(Json config, Json format, Json& chat) {
  if (config.is_object() && format.is_null()) format = take_field(config, "format");
  if (format.is_null()) return;
  if (!is_text(field_of(format, "type"), "json_schema")) {
    refuse("output_config.format", R"({"type": "json_schema", "schema": {…}})", format);
  }
  chat["response_format"] = {{"type", "json_schema"},
                             {"json_schema", {{"schema", take_field(format, "schema")}}}};
}

}  // namespace

ChatForm chat_of_messages(Json body) {
  for (const char* const name : not_in_messages) take_field(body, name);
  for (const char* const name : {"mcp_servers", "container", "context_management"}) {
    refuse_field(body, name);
  }
  const Json system = take_field(body, "system");
  const Json choice = take_field(body, "tool_choice");
  body["messages"] = chat_messages(take_field(body, "messages"), system);
  body["tools"] = chat_tools(take_field(body, "tools"));
  set_tool_choice(choice, body);
  set_thinking(take_field(body, "thinking"), body);
  set_output_format(take_field(body, "output_config"), take_field(body, "output_format"), body);
  body["stop"] = take_field(body, "stop_sequences");
  return {files::ParsedJson(std::move(body)),
          {{"stop", "stop_sequences"},
           {"response_format.json_schema", "output_config.format"},
           {"response_format", "output_config.format"},
           {"tool_choice.function", "tool_choice"}},
          nullptr};
}

}  // namespace kvzap::server
