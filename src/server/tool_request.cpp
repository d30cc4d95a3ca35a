#include "server/tool_request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "files/ascii.hpp"
#include "files/json_file.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::size_t most_tools = 256;
constexpr std::size_t most_calls = 256;

[[noreturn]] void refuse(const std::string& field, const std::string& expected,
                         const OrderedJson* found) {
  throw BadRequest(field, fmt::format("{} is {}; expected {}", field,
                                      found ? files::described(*found) : "missing", expected));
}

/// The member of an object, or null if it is absent or null.
const OrderedJson* member(const OrderedJson& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const std::string& text_at(const OrderedJson& object, const char* name, const std::string& where) {
  const OrderedJson* const field = member(object, name);
  if (!field || !field->is_string()) refuse(where + "." + name, "a string", field);
  return field->get_ref<const std::string&>();
}

void check_function(const OrderedJson& object, const std::string& where) {
  const OrderedJson* const type = member(object, "type");
  const OrderedJson* const function = member(object, "function");
  if (!object.is_object() || (type && *type != "function") || !function || !function->is_object()) {
    refuse(where, R"({"type": "function", "function": {…}})", &object);
  }
  const std::string& name = text_at(*function, "name", where + ".function");
  const auto is_allowed = [](char c) {
    return files::is_letter_or_digit(c) || c == '_' || c == '-' || c == '.';
  };
  if (name.empty() || name.size() > 128 || !std::all_of(name.begin(), name.end(), is_allowed)) {
    refuse(where + ".function.name", "1 to 128 letters, digits, _, - and .",
           member(*function, "name"));
  }
}

OrderedJson tools_of(const OrderedJson& body) {
  OrderedJson tools = OrderedJson::array();
  const OrderedJson* const field = member(body, "tools");
  const OrderedJson* const choice = member(body, "tool_choice");
  if (!field || (choice && *choice == "none")) return tools;
  if (!field->is_array() || field->size() > most_tools) {
    refuse("tools", fmt::format("an array of at most {} tools", most_tools), field);
  }
  std::set<std::string> names;
  for (std::size_t i = 0; i < field->size(); ++i) {
    const OrderedJson& tool = (*field)[i];
    const std::string where = fmt::format("tools[{}]", i);
    check_function(tool, where);
    const OrderedJson& function = tool.at("function");
    const OrderedJson* const parameters = member(function, "parameters");
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

/// Calls with their arguments as objects, as templates expect them.
OrderedJson calls_of(const OrderedJson& field, const std::string& where) {
  if (!field.is_array() || field.size() > most_calls) {
    refuse(where, fmt::format("an array of at most {} calls", most_calls), &field);
  }
  OrderedJson calls = field;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string name = fmt::format("{}[{}]", where, i);
    check_function(calls[i], name);
    OrderedJson& arguments = calls[i]["function"]["arguments"];
    if (arguments.is_string()) {
      const std::string text = arguments.get<std::string>();
      arguments = text.empty() ? OrderedJson::object() : OrderedJson::parse(text, nullptr, false);
    }
    if (arguments.is_null()) arguments = OrderedJson::object();
    if (!arguments.is_object()) {
      throw BadRequest(name + ".function.arguments",
                       name + ".function.arguments are no JSON object");
    }
  }
  return calls;
}

/// The text of a message; its parts joined.
std::string content_of(const OrderedJson& message, const std::string& where) {
  const OrderedJson* const content = member(message, "content");
  if (!content) {
    if (message.at("role") == "assistant") return {};
    throw BadRequest(where + ".content", where + ".content is missing");
  }
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) refuse(where + ".content", "a string or an array of parts", content);
  std::string text;
  for (const OrderedJson& part : *content) {
    const OrderedJson* const type = member(part, "type");
    const OrderedJson* const words = member(part, "text");
    if (!type || *type != "text" || !words || !words->is_string()) {
      throw BadRequest(where + ".content",
                       where +
                           ".content has a part that is not text; other types are not "
                           "supported");
    }
    text += words->get_ref<const std::string&>();
  }
  return text;
}

OrderedJson message_of(const OrderedJson& message, const std::string& where) {
  if (!message.is_object()) refuse(where, "an object", &message);
  std::string role = text_at(message, "role", where);
  if (role == "developer") role = "system";
  constexpr std::string_view roles[] = {"system", "user", "assistant", "tool"};
  if (std::find(std::begin(roles), std::end(roles), role) == std::end(roles)) {
    refuse(where + ".role", R"("system", "user", "assistant" or "tool")", member(message, "role"));
  }
  OrderedJson result;
  result["role"] = role;
  result["content"] = content_of(message, where);
  for (const char* name : {"name", "tool_call_id", "reasoning_content"}) {
    if (member(message, name)) result[name] = text_at(message, name, where);
  }
  const OrderedJson* const calls = member(message, "tool_calls");
  if (calls && role == "assistant" && !calls->empty()) {
    result["tool_calls"] = calls_of(*calls, where + ".tool_calls");
  }
  return result;
}

}  // namespace

bool uses_tools(const nlohmann::json& body) {
  const auto has = [](const nlohmann::json& object, const char* name) {
    const auto found = object.find(name);
    return found != object.end() && !found->is_null() && !found->empty();
  };
  const auto choice = body.find("tool_choice");
  if (has(body, "tools") && (choice == body.end() || *choice != "none")) return true;
  const auto messages = body.find("messages");
  if (messages == body.end() || !messages->is_array()) return false;
  return std::any_of(messages->begin(), messages->end(), [&](const nlohmann::json& message) {
    if (!message.is_object()) return false;
    const auto role = message.find("role");
    return has(message, "tool_calls") || (role != message.end() && *role == "tool");
  });
}

text::ChatInput chat_with_tools(const OrderedJson& body) {
  text::ChatInput input;
  const OrderedJson tools = tools_of(body);
  if (!tools.empty()) input.tools = tools;
  const OrderedJson* const messages = member(body, "messages");
  if (!messages || !messages->is_array() || messages->empty() || messages->size() > most_messages) {
    refuse("messages", fmt::format("1 to {} messages", most_messages), messages);
  }
  for (std::size_t i = 0; i < messages->size(); ++i) {
    input.messages.push_back(message_of((*messages)[i], fmt::format("messages[{}]", i)));
  }
  const OrderedJson& last = input.messages.back().at("role");
  if (last != "user" && last != "tool") {
    throw BadRequest("messages", "the last message is neither of the user nor of a tool");
  }
  return input;
}

}  // namespace kvzap::server
