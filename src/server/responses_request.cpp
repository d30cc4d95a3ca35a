// Requests of OpenAI's /v1/responses.
#include <fmt/format.h>

#include <utility>

#include "files/json_file.hpp"
#include "server/chat_form.hpp"
#include "server/tool_request.hpp"

namespace kvzap::server {
namespace {

/// The message of the assistant at the end, to which an item is added.
Json& last_answer(Json& list) {
  if (list.empty() || list.back().at("role") != "assistant") {
    list.push_back({{"role", "assistant"}, {"content", ""}});
  }
  return list.back();
}

/// Whether a text of the assistant goes on with its last message: after its thoughts.
bool continues_answer(const Json& list) {
  if (list.empty() || list.back().at("role") != "assistant") return false;
  return list.back().at("content") == "" && !list.back().contains("tool_calls");
}

void add_message(const Json& item, const std::string& where, Json& list) {
  const std::string role = text_at(item, "role", where);
  const Json* const content = field_of(item, "content");
  if (!content) refuse(where + ".content", "a string or an array of parts", nullptr);
  std::vector<std::string> texts =
      texts_of(*content, where + ".content", {"input_text", "output_text", "text"});
  if (role == "assistant" && continues_answer(list)) {
    list.back()["content"] = joined(texts);
    return;
  }
  Json message = {{"role", role}};
  if (texts.size() == 1 || role == "assistant") {
    message["content"] = joined(texts);
  } else {
    message["content"] = Json::array();
    for (std::string& text : texts) {
      message["content"].push_back({{"type", "text"}, {"text", std::move(text)}});
    }
  }
  list.push_back(std::move(message));
}

void add_call(const Json& item, const std::string& where, Json& list) {
  check_tool_name(item, where);
  Json call =
      function_json({{"name", item.at("name")}, {"arguments", text_at(item, "arguments", where)}});
  call["id"] = text_at(item, "call_id", where);
  last_answer(list)["tool_calls"].push_back(std::move(call));
}

void add_result(const Json& item, const std::string& where, Json& list) {
  const Json* const output = field_of(item, "output");
  if (!output) refuse(where + ".output", "a string or an array of parts", nullptr);
  list.push_back({{"role", "tool"},
                  {"tool_call_id", text_at(item, "call_id", where)},
                  {"content", joined(texts_of(*output, where + ".output",
                                              {"input_text", "output_text", "text"}))}});
}

void add_thoughts(const Json& item, const std::string& where, Json& list) {
  const Json* const content = field_of(item, "content");
  if (!content || content->empty()) return;  // encrypted or summarised by another server
  const std::string thoughts =
      joined(texts_of(*content, where + ".content", {"reasoning_text", "text"}));
  list.push_back({{"role", "assistant"}, {"content", ""}, {"reasoning_content", thoughts}});
}

void add_item(const Json& item, const std::string& where, Json& list) {
  if (!item.is_object()) refuse(where, "an object", item);
  const Json* const field = field_of(item, "type");
  const std::string type = field ? text_of(*field, where + ".type") : "message";
  if (type == "message") return add_message(item, where, list);
  if (type == "function_call") return add_call(item, where, list);
  if (type == "function_call_output") return add_result(item, where, list);
  if (type == "reasoning") return add_thoughts(item, where, list);
  throw BadRequest(where, fmt::format("{} has the type {}, which is not supported; expected "
                                      "message, function_call, function_call_output or reasoning",
                                      where, files::described(Json(type))));
}

void add_input(const Json& input, Json& list) {
  if (input.is_string()) {
    list.push_back({{"role", "user"}, {"content", input}});
    return;
  }
  if (!input.is_array() || input.size() > limits::messages) {
    refuse("input", fmt::format("a string or an array of at most {} items", limits::messages),
           input.is_null() ? nullptr : &input);
  }
  for (std::size_t i = 0; i < input.size(); ++i) {
    add_item(input[i], fmt::format("input[{}]", i), list);
  }
}

Json earlier_messages(const Json& id, const ServedModel& model) {
  if (id.is_null()) return Json::array();
  const std::string& wanted = text_of(id, "previous_response_id");
  const auto found = model.responses ? model.responses->find(wanted) : std::nullopt;
  if (found) return files::parse_own_json(found->messages);
  throw BadRequest("previous_response_id",
                   fmt::format("previous_response_id is {}; expected the id of a stored response",
                               files::described(id)),
                   "previous_response_not_found");
}

Json tools_in_chat(const Json& tools) {
  Json list = Json::array();
  if (tools.is_null()) return list;
  if (!tools.is_array()) refuse("tools", "an array of tools", tools);
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const std::string where = fmt::format("tools[{}]", i);
    if (!tools[i].is_object()) refuse(where, "an object", tools[i]);
    const std::string& type = text_at(tools[i], "type", where);
    if (type != "function") refuse_as_unsupported(where + ".type " + files::described(Json(type)));
    check_tool_name(tools[i], where);
    Json function;
    for (const char* const name : {"name", "description", "parameters", "strict"}) {
      if (const Json* const field = field_of(tools[i], name)) function[name] = *field;
    }
    list.push_back(function_json(std::move(function)));
  }
  return list;
}

/// Sets the choice of tools. The reader of chats decides which of them are supported.
void set_choice(const Json& choice, Json& chat) {
  if (choice.is_null()) return;
  if (choice.is_object() && is_text(field_of(choice, "type"), "function")) {
    chat["tool_choice"] = function_json({{"name", text_at(choice, "name", "tool_choice")}});
  } else {
    chat["tool_choice"] = choice;
  }
}

/// Sets the format of the answer. The reader of chats decides which of them are supported.
void set_format(const Json& text, Json& chat) {
  const Json* const format = field_of(text, "format");
  if (!format) return;
  Json schema = *format;
  if (is_text(field_of(schema, "type"), "json_schema")) {
    take_field(schema, "type");
    chat["response_format"] = {{"type", "json_schema"}, {"json_schema", std::move(schema)}};
  } else {
    chat["response_format"] = std::move(schema);
  }
}

/// The fields of a reply that repeat those of the request.
Json repeated_fields(const Json& body, const ServedModel& model) {
  const auto value = [&](const char* name, Json otherwise = {}) {
    const Json* const field = field_of(body, name);
    return field ? *field : std::move(otherwise);
  };
  Json fields;
  for (const char* const name : {"instructions", "max_output_tokens", "previous_response_id"}) {
    fields[name] = value(name);
  }
  fields["metadata"] = value("metadata", Json::object());
  fields["parallel_tool_calls"] = value("parallel_tool_calls", true);
  fields["reasoning"] = value("reasoning", {{"effort", nullptr}, {"summary", nullptr}});
  fields["store"] = value("store", true);
  fields["temperature"] = value("temperature", model.sampling.temperature);
  fields["text"] = value("text", {{"format", {{"type", "text"}}}});
  fields["tool_choice"] = value("tool_choice", "auto");
  fields["tools"] = value("tools", Json::array());
  fields["top_p"] = value("top_p", model.sampling.top_p);
  fields["truncation"] = "disabled";
  return fields;
}

void refuse_foreign(const Json& body) {
  refuse_field(body, "background", Json::array({false}));
  refuse_field(body, "truncation", Json::array({"disabled"}));
  for (const char* const name : {"conversation", "prompt", "context_management"}) {
    refuse_field(body, name);
  }
  const Json* const include = field_of(body, "include");
  if (!include || !include->is_array()) return;
  for (const Json& one : *include) {
    if (is_text(&one, "message.output_text.logprobs")) {
      refuse_as_unsupported("include", " with message.output_text.logprobs");
    }
  }
}

}  // namespace

ChatForm chat_of_response(Json body, const ServedModel& model) {
  for (const char* const name : not_in_responses) take_field(body, name);
  refuse_foreign(body);
  ResponseRequest response;
  response.is_stored = bool_of(body, "store", true) && model.responses;
  response.fields = repeated_fields(body, model);
  Json list = earlier_messages(take_field(body, "previous_response_id"), model);
  add_input(take_field(body, "input"), list);
  if (response.is_stored) response.messages = files::json_text(list);
  const Json instructions = take_field(body, "instructions");
  if (!instructions.is_null()) {
    Json system = {{"role", "system"}, {"content", text_of(instructions, "instructions")}};
    list.insert(list.begin(), std::move(system));
  }
  body["messages"] = std::move(list);
  body["tools"] = tools_in_chat(take_field(body, "tools"));
  set_choice(take_field(body, "tool_choice"), body);
  set_format(take_field(body, "text"), body);
  body["max_tokens"] = take_field(body, "max_output_tokens");
  const Json reasoning = take_field(body, "reasoning");
  if (const Json* const effort = field_of(reasoning, "effort")) {
    set_thinks(text_of(*effort, "reasoning.effort") != "none", body);
  }
  return {files::ParsedJson(std::move(body)),
          {{"messages", "input"},
           {"max_tokens", "max_output_tokens"},
           {"response_format.json_schema", "text.format"},
           {"response_format", "text.format"},
           {"tool_choice.function", "tool_choice"}},
          std::make_shared<const ResponseRequest>(std::move(response))};
}

}  // namespace kvzap::server
