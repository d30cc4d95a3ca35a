#include "server/tool_request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

#include "files/ascii.hpp"
#include "files/json_file.hpp"

namespace kvzap::server {
namespace {

void check_function(const Json& object, const std::string& where) {
  const Json* const type = field_of(object, "type");
  const Json* const function = field_of(object, "function");
  if (!object.is_object() || (type && *type != "function") || !function || !function->is_object()) {
    refuse(where, R"({"type": "function", "function": {…}})", &object);
  }
  check_tool_name(*function, where + ".function");
}

Json arguments_of(const std::string& text, const std::string& name) {
  try {
    Json arguments = text.empty() ? Json::object() : files::parse_ordered_json(text, name);
    if (arguments.is_object()) return arguments;
  } catch (const Error&) {
  }
  throw BadRequest(name, name + " are no JSON object");
}

/// Calls with their arguments as objects, as templates expect them.
Json calls_of(const Json& field, const std::string& where) {
  if (!field.is_array() || field.size() > limits::calls) {
    refuse(where, fmt::format("an array of at most {} calls", limits::calls), field);
  }
  Json calls = field;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string name = fmt::format("{}[{}]", where, i);
    check_function(calls[i], name);
    Json& arguments = calls[i]["function"]["arguments"];
    if (arguments.is_string()) {
      arguments = arguments_of(arguments.get<std::string>(), name + ".function.arguments");
    }
    if (arguments.is_null()) arguments = Json::object();
    if (!arguments.is_object()) {
      refuse(name + ".function.arguments", "a JSON object", &arguments);
    }
  }
  return calls;
}

std::vector<std::string> parts_of(const Json& message, const std::string& where) {
  const std::string name = where + ".content";
  const Json* const content = member_of(message, "content");
  const bool is_answer = is_text(field_of(message, "role"), "assistant");
  // Clients send back an answer without text as they received it.
  if (!content ? is_answer && message.contains("tool_calls") : is_answer && content->is_null()) {
    return {""};
  }
  if (!content) throw BadRequest(name, name + " is missing");
  return texts_of(*content, name);
}

Json message_of(const Json& message, const std::string& where, std::vector<std::string>& parts) {
  if (!message.is_object()) refuse(where, "an object", &message);
  std::string role = text_at(message, "role", where);
  if (role == "developer") role = "system";
  constexpr std::string_view roles[] = {"system", "user", "assistant", "tool"};
  if (std::find(std::begin(roles), std::end(roles), role) == std::end(roles)) {
    refuse(where + ".role", R"("system", "user", "assistant" or "tool")",
           field_of(message, "role"));
  }
  parts = parts_of(message, where);
  Json result;
  result["role"] = role;
  result["content"] = joined(parts);
  for (const char* name : {"name", "tool_call_id", "reasoning_content"}) {
    if (field_of(message, name)) result[name] = text_at(message, name, where);
  }
  const Json* const calls = field_of(message, "tool_calls");
  if (calls && role == "assistant" && !calls->empty()) {
    result["tool_calls"] = calls_of(*calls, where + ".tool_calls");
  }
  return result;
}

}  // namespace

void check_tool_name(const Json& function, const std::string& where) {
  const std::string& name = text_at(function, "name", where);
  const auto is_allowed = [](char c) {
    return files::is_letter_or_digit(c) || c == '_' || c == '-' || c == '.';
  };
  if (name.empty() || name.size() > limits::tool_name ||
      !std::all_of(name.begin(), name.end(), is_allowed)) {
    refuse(where + ".name", fmt::format("1 to {} letters, digits, _, - and .", limits::tool_name),
           field_of(function, "name"));
  }
}

Json tools_of(const Json& body) {
  Json tools = Json::array();
  const Json* const field = field_of(body, "tools");
  const Json* const choice = field_of(body, "tool_choice");
  if (!field || (choice && *choice == "none")) return tools;
  if (!field->is_array() || field->size() > limits::tools) {
    refuse("tools", fmt::format("an array of at most {} tools", limits::tools), field);
  }
  std::set<std::string> names;
  for (std::size_t i = 0; i < field->size(); ++i) {
    const Json& tool = (*field)[i];
    const std::string where = fmt::format("tools[{}]", i);
    check_function(tool, where);
    const Json& function = tool.at("function");
    const Json* const parameters = field_of(function, "parameters");
    if (parameters && !parameters->is_object()) {
      refuse(where + ".function.parameters", "an object", parameters);
    }
    const std::string& name = function.at("name").get_ref<const std::string&>();
    if (!names.insert(name).second) {
      throw BadRequest(where + ".function.name",
                       fmt::format("{}.function.name is that of another tool", where));
    }
    tools.push_back(tool);
    if (!tool.contains("type")) tools.back()["type"] = "function";
  }
  return tools;
}

bool uses_tools(const Json& body) {
  const auto has = [](const Json& object, const char* name) {
    const Json* const field = field_of(object, name);
    return field && !field->empty();
  };
  if (has(body, "tools") && !is_text(field_of(body, "tool_choice"), "none")) return true;
  const Json* const messages = field_of(body, "messages");
  if (!messages || !messages->is_array()) return false;
  return std::any_of(messages->begin(), messages->end(), [&](const Json& message) {
    return has(message, "tool_calls") || is_text(field_of(message, "role"), "tool");
  });
}

Messages messages_of(const Json& body) {
  const Json* const messages = field_of(body, "messages");
  if (!messages) throw BadRequest("messages", "messages are missing");
  if (!messages->is_array() || messages->empty() || messages->size() > limits::messages) {
    refuse("messages", fmt::format("1 to {} messages", limits::messages), messages);
  }
  Messages result;
  for (std::size_t i = 0; i < messages->size(); ++i) {
    const std::string name = fmt::format("messages[{}]", i);
    result.list.push_back(message_of((*messages)[i], name, result.parts.emplace_back()));
  }
  return result;
}

}  // namespace kvzap::server
