#include "server/tool_bodies.hpp"

#include <algorithm>
#include <utility>

#include "files/json_file.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// A call with deeper arguments is text.
constexpr int deepest = 64;

std::string_view stripped(std::string_view text) {
  constexpr const char* blanks = " \t\n\r";
  const std::size_t first = text.find_first_not_of(blanks);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) + 1 - first);
}

/// Calls f(place, depth) at each bracket outside of strings, with the depth behind it. Ends where
/// it returns true.
template <class F>
void visit_brackets(std::string_view text, F f) {
  int depth = 0;
  bool is_quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_quoted) {
      if (c == '\\') ++i;
      if (c == '"') is_quoted = false;
      continue;
    }
    if (c == '"') is_quoted = true;
    const int change = c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    depth += change;
    if (change != 0 && f(i, depth)) return;
  }
}

/// The value of a JSON text; discarded if it is none or too deep.
OrderedJson parsed(std::string_view text) {
  bool is_deep = false;
  visit_brackets(text, [&](std::size_t, int depth) { return is_deep = depth > deepest; });
  if (is_deep) return OrderedJson::value_t::discarded;
  return OrderedJson::parse(text.begin(), text.end(), nullptr, false);
}

/// The end of the JSON object or array that begins `text`; npos if it does not end.
std::size_t json_end(std::string_view text) {
  std::size_t end = text.npos;
  visit_brackets(text, [&](std::size_t place, int depth) {
    if (depth <= 0) end = place + 1;
    return depth <= 0;
  });
  return end;
}

/// Reads a text from its beginning.
class Reader {
 public:
  explicit Reader(std::string_view text) : m_rest(text) {}

  bool is_at_end() {
    m_rest = stripped(m_rest);
    return m_rest.empty();
  }
  bool skip(std::string_view mark) {
    m_rest = stripped(m_rest);
    if (m_rest.substr(0, mark.size()) != mark) return false;
    m_rest.remove_prefix(mark.size());
    return true;
  }
  /// The text up to a mark, which is skipped.
  std::optional<std::string_view> until(std::string_view mark) {
    const std::size_t found = m_rest.find(mark);
    if (found == m_rest.npos) return std::nullopt;
    const std::string_view text = m_rest.substr(0, found);
    m_rest.remove_prefix(found + mark.size());
    return text;
  }
  /// The JSON object or array that comes next.
  std::optional<std::string_view> json() {
    m_rest = stripped(m_rest);
    const std::size_t end = json_end(m_rest);
    if (end == m_rest.npos) return std::nullopt;
    const std::string_view text = m_rest.substr(0, end);
    m_rest.remove_prefix(end);
    return text;
  }
  std::string_view rest() const { return m_rest; }

 private:
  std::string_view m_rest;
};

const OrderedJson* function_of(std::string_view name, const OrderedJson& tools) {
  for (const OrderedJson& tool : tools) {
    const OrderedJson& function = tool.at("function");
    if (function.at("name") == name) return &function;
  }
  return nullptr;
}

/// Whether a parameter is a string according to its tool.
bool is_string(const OrderedJson& function, const std::string& parameter) {
  const auto field = [](const OrderedJson& object, const std::string& name) -> const OrderedJson* {
    if (!object.is_object()) return nullptr;
    const auto found = object.find(name);
    return found == object.end() ? nullptr : &*found;
  };
  const OrderedJson* found = field(function, "parameters");
  if (found) found = field(*found, "properties");
  if (found) found = field(*found, parameter);
  if (found) found = field(*found, "type");
  return found && *found == "string";
}

/// The value of a parameter that is written without quotes if it is a string.
OrderedJson value_of(std::string_view text, const OrderedJson& function,
                     const std::string& parameter) {
  if (is_string(function, parameter)) return std::string(text);
  OrderedJson value = parsed(stripped(text));
  return value.is_discarded() ? OrderedJson(std::string(text)) : value;
}

using Calls = std::vector<ToolCall>;

/// Appends the call of an object with a name and arguments. Returns false if it is none.
bool append_object(const OrderedJson& object, const OrderedJson& tools, Calls& calls) {
  if (!object.is_object()) return false;
  const auto name = object.find("name");
  if (name == object.end() || !name->is_string()) return false;
  auto arguments = object.find("arguments");
  if (arguments == object.end()) arguments = object.find("parameters");
  std::string text = "{}";
  if (arguments != object.end()) {
    text = arguments->is_string() ? arguments->get<std::string>() : files::json_text(*arguments);
  }
  const auto call = call_of(name->get_ref<const std::string&>(), text, tools);
  if (call) calls.push_back(*call);
  return call.has_value();
}

/// Objects, or arrays of them, with semicolons or nothing between.
Calls json_calls(std::string_view body, const OrderedJson& tools) {
  Calls calls;
  Reader reader(body);
  while (!reader.is_at_end()) {
    const auto text = reader.json();
    if (!text) return {};
    const OrderedJson value = parsed(*text);
    const OrderedJson list = value.is_array() ? value : OrderedJson::array({value});
    for (const OrderedJson& one : list) {
      if (!append_object(one, tools, calls)) return {};
    }
    reader.skip(";");
  }
  return calls;
}

Calls mistral_calls(std::string_view body, const OrderedJson& tools) {
  const std::string_view text = stripped(body);
  if (!text.empty() && text.front() == '[') return json_calls(text, tools);
  Calls calls;
  Reader reader(body);
  while (!reader.is_at_end()) {
    reader.skip("[TOOL_CALLS]");
    const auto name = reader.until("[ARGS]");
    const auto arguments = name ? reader.json() : std::nullopt;
    if (!arguments) return {};
    const auto call =
        call_of(stripped(name->substr(0, name->find("[CALL_ID]"))), *arguments, tools);
    if (!call) return {};
    calls.push_back(*call);
  }
  return calls;
}

Calls coder_calls(std::string_view body, const OrderedJson& tools) {
  Calls calls;
  Reader reader(body);
  while (!reader.is_at_end()) {
    if (!reader.skip("<function=")) return {};
    const auto name = reader.until(">");
    const OrderedJson* const function = name ? function_of(*name, tools) : nullptr;
    if (!function) return {};
    OrderedJson arguments = OrderedJson::object();
    while (reader.skip("<parameter=")) {
      const auto key = reader.until(">");
      auto value = key ? reader.until("</parameter>") : std::nullopt;
      if (!value) return {};
      // A line of its own.
      if (!value->empty() && value->front() == '\n') value->remove_prefix(1);
      if (!value->empty() && value->back() == '\n') value->remove_suffix(1);
      arguments[std::string(*key)] = value_of(*value, *function, std::string(*key));
    }
    if (!reader.skip("</function>")) return {};
    calls.push_back({std::string(*name), files::json_text(arguments)});
  }
  return calls;
}

Calls glm_calls(std::string_view body, const OrderedJson& tools) {
  constexpr std::string_view key_mark = "<arg_key>";
  const std::size_t keys = std::min(body.find(key_mark), body.size());
  const std::string name(stripped(body.substr(0, keys)));
  const OrderedJson* const function = function_of(name, tools);
  if (!function) return {};
  OrderedJson arguments = OrderedJson::object();
  Reader reader(body.substr(keys));
  while (!reader.is_at_end()) {
    const auto key = reader.skip(key_mark) ? reader.until("</arg_key>") : std::nullopt;
    const auto value =
        key && reader.skip("<arg_value>") ? reader.until("</arg_value>") : std::nullopt;
    if (!value) return {};
    arguments[std::string(*key)] = value_of(*value, *function, std::string(*key));
  }
  return {{name, files::json_text(arguments)}};
}

Calls deepseek_calls(std::string_view body, const OrderedJson& tools) {
  Calls calls;
  Reader reader(body);
  while (!reader.is_at_end()) {
    if (!reader.skip("<｜tool▁call▁begin｜>")) return {};
    const auto call = reader.until("<｜tool▁call▁end｜>");
    if (!call) return {};
    Reader parts(*call);
    auto name = parts.until("<｜tool▁sep｜>");
    if (!name) return {};
    std::string_view arguments = stripped(parts.rest());
    if (stripped(*name) == "function") {  // up to V3 and R1: NAME, and a block of code
      name = parts.until("```json");
      if (!name) return {};
      const auto block = parts.until("```");
      if (!block) return {};
      arguments = *block;
    }
    const auto one = call_of(stripped(*name), stripped(arguments), tools);
    if (!one) return {};
    calls.push_back(*one);
  }
  return calls;
}

/// Names are functions.NAME:NUMBER.
Calls kimi_calls(std::string_view body, const OrderedJson& tools) {
  Calls calls;
  Reader reader(body);
  while (!reader.is_at_end()) {
    if (!reader.skip("<|tool_call_begin|>")) return {};
    const auto id = reader.until("<|tool_call_argument_begin|>");
    const auto arguments = id ? reader.until("<|tool_call_end|>") : std::nullopt;
    if (!arguments) return {};
    std::string_view name = stripped(*id);
    name = name.substr(0, name.rfind(':'));
    constexpr std::string_view space = "functions.";
    if (name.substr(0, space.size()) == space) name.remove_prefix(space.size());
    const auto call = call_of(name, stripped(*arguments), tools);
    if (!call) return {};
    calls.push_back(*call);
  }
  return calls;
}

/// Reads a value of Python: those of JSON, strings in either quotes, True, False and None.
std::optional<OrderedJson> python_value(Reader& reader) {
  for (const auto& [name, value] : {std::pair<const char*, OrderedJson>{"True", true},
                                    {"False", false},
                                    {"None", nullptr},
                                    {"true", true},
                                    {"false", false},
                                    {"null", nullptr}}) {
    if (reader.skip(name)) return value;
  }
  if (reader.is_at_end()) return std::nullopt;
  const char first = reader.rest().front();
  if (first == '{' || first == '[') {
    const auto text = reader.json();
    OrderedJson value = text ? parsed(*text) : OrderedJson(OrderedJson::value_t::discarded);
    return value.is_discarded() ? std::nullopt : std::optional(std::move(value));
  }
  if (first == '"' || first == '\'') {
    std::string text;
    const std::string_view rest = reader.rest();
    for (std::size_t i = 1; i < rest.size(); ++i) {
      if (rest[i] == first) {
        reader.skip(rest.substr(0, i + 1));
        return OrderedJson(text);
      }
      if (rest[i] == '\\' && i + 1 < rest.size()) {
        ++i;
        text += rest[i] == 'n' ? '\n' : rest[i] == 't' ? '\t' : rest[i];
      } else {
        text += rest[i];
      }
    }
    return std::nullopt;
  }
  const std::size_t end = reader.rest().find_first_of(",)] \n");
  OrderedJson number = parsed(reader.rest().substr(0, end));
  if (!number.is_number()) return std::nullopt;
  reader.skip(reader.rest().substr(0, end));
  return number;
}

/// [name(key=value, …), …]
Calls lfm_calls(std::string_view body, const OrderedJson& tools) {
  Calls calls;
  Reader reader(body);
  if (!reader.skip("[")) return {};
  while (!reader.skip("]")) {
    const auto name = reader.until("(");
    if (!name || !function_of(stripped(*name), tools)) return {};
    OrderedJson arguments = OrderedJson::object();
    while (!reader.skip(")")) {
      const auto key = reader.until("=");
      const auto value = key ? python_value(reader) : std::nullopt;
      if (!value) return {};
      arguments[std::string(stripped(*key))] = *value;
      reader.skip(",");
    }
    calls.push_back({std::string(stripped(*name)), files::json_text(arguments)});
    reader.skip(",");
  }
  return reader.is_at_end() ? calls : Calls();
}

}  // namespace

CallMarks marks_of(ToolStyle style) {
  switch (style) {
    case ToolStyle::hermes:
    case ToolStyle::coder:
    case ToolStyle::glm:
      return {"<tool_call>", "</tool_call>"};
    case ToolStyle::mistral:
      return {"[TOOL_CALLS]", ""};
    case ToolStyle::deepseek:
      return {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"};
    case ToolStyle::kimi:
      return {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"};
    case ToolStyle::lfm:
      return {"<|tool_call_start|>", "<|tool_call_end|>"};
    case ToolStyle::granite:
      return {"<|tool_call|>", ""};
    case ToolStyle::json:
      return {"<|python_tag|>", ""};
    case ToolStyle::harmony:
      break;
  }
  return {};
}

std::optional<ToolCall> call_of(std::string_view name, std::string_view arguments,
                                const OrderedJson& tools) {
  const OrderedJson value = parsed(arguments);
  if (!function_of(name, tools) || !value.is_object()) return std::nullopt;
  return ToolCall{std::string(name), files::json_text(value)};
}

std::vector<ToolCall> calls_of(ToolStyle style, std::string_view body, const OrderedJson& tools) {
  switch (style) {
    case ToolStyle::coder:
      return coder_calls(body, tools);
    case ToolStyle::glm:
      return glm_calls(body, tools);
    case ToolStyle::mistral:
      return mistral_calls(body, tools);
    case ToolStyle::deepseek:
      return deepseek_calls(body, tools);
    case ToolStyle::kimi:
      return kimi_calls(body, tools);
    case ToolStyle::lfm:
      return lfm_calls(body, tools);
    case ToolStyle::hermes:
    case ToolStyle::granite:
    case ToolStyle::json:
    case ToolStyle::harmony:
      break;
  }
  return json_calls(body, tools);
}

}  // namespace kvzap::server
