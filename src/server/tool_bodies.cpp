#include "server/tool_bodies.hpp"

#include <fmt/format.h>

#include <set>
#include <utility>

#include "files/json_file.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// Objects with a name and arguments, or lists of them, with semicolons or nothing between.
class JsonCalls final : public CallReader {
 public:
  JsonCalls(const AnswerFormat& format, bool is_silent)
      : CallReader(format, is_silent), m_end(marks_of(format.style).end) {}

 private:
  enum class At { between, key, arguments, quoted, other, after };

  Step step(Cursor& text) override {
    switch (m_at) {
      case At::between:
        return between(text);
      case At::key:
        return key(text);
      case At::arguments:
        return arguments(text);
      case At::quoted:
        return quoted(text);
      case At::other: {
        std::string skipped;
        const Step step = take_json(text, skipped);
        return is_json_whole() ? become(At::after) : step;
      }
      case At::after:
        break;
    }
    if (text.skip(",")) return become(At::key);
    return text.skip("}") ? end_object() : Step::stuck;
  }

  Step become(At at) {
    m_at = at;
    return Step::next;
  }

  Step between(Cursor& text) {
    if (has_ended(text)) return Step::done;
    const auto next = text.peek();
    if (!next) return Step::stuck;
    const bool is_separator = *next == (m_is_in_list ? ',' : ';') && has_called();
    if (*next == '{' || *next == (m_is_in_list ? ']' : '[') || is_separator) {
      text.advance(1);
      if (*next != '{') {
        m_is_in_list = *next == '[' || *next == ',';
        return Step::next;
      }
      m_name.reset();
      m_arguments.clear();
      m_has_arguments = false;
      return become(At::key);
    }
    if (m_is_in_list) return Step::stuck;
    if (!m_end.empty()) return text.skip(m_end) ? Step::done : Step::stuck;
    return has_called() ? Step::done : Step::stuck;
  }

  Step key(Cursor& text) {
    if (text.skip("}")) return end_object();
    const auto key = text.json_text();
    const auto next = key && text.skip(":") ? text.peek() : std::nullopt;
    if (!next) return Step::stuck;
    if (*key == "name" && !m_name) {
      const auto name = text.json_text();
      if (!name || !function_of(*name)) return Step::stuck;
      m_name = *name;
      if (m_has_arguments) give_whole();
      return become(At::after);
    }
    begin_json();
    if ((*key != "arguments" && *key != "parameters") || m_has_arguments) return become(At::other);
    m_has_arguments = true;
    if (*next == '"') return become(At::quoted);
    if (*next != '{') return Step::stuck;
    if (m_name) begin_call(*m_name);
    return become(At::arguments);
  }

  Step arguments(Cursor& text) {
    const Step step = take_json(text, m_arguments);
    if (m_name) give(std::exchange(m_arguments, {}));
    if (!is_json_whole()) return step;
    if (m_name) end_call(true);
    return become(At::after);
  }

  /// Arguments as a string of JSON, which come at once.
  Step quoted(Cursor& text) {
    const Step step = take_json(text, m_arguments);
    if (!is_json_whole()) return step;
    const auto value = OrderedJson::parse(m_arguments, nullptr, false);
    const auto arguments =
        value.is_string() ? compact_json(value.get_ref<const std::string&>()) : std::nullopt;
    if (!arguments || arguments->front() != '{') return Step::stuck;
    m_arguments = *arguments;
    if (m_name) give_whole();
    return become(At::after);
  }

  void give_whole() {
    begin_call(*m_name);
    give(m_arguments);
    end_call(true);
  }

  Step end_object() {
    if (!m_name) return Step::stuck;
    if (!m_has_arguments) {
      m_arguments = "{}";
      give_whole();
    }
    leave_call();
    return become(At::between);
  }

  std::string m_end;
  At m_at = At::between;
  bool m_is_in_list = false;
  std::optional<std::string> m_name;
  std::string m_arguments;  // those that are not given yet
  bool m_has_arguments = false;
};

/// The name up to a mark, and arguments in JSON.
class MarkedCalls final : public CallReader {
 public:
  struct Marks {
    std::string begin, name_end, end;  // of a call
  };
  MarkedCalls(const AnswerFormat& format, bool is_silent, Marks marks, std::string recipient = {})
      : CallReader(format, is_silent),
        m_marks(std::move(marks)),
        m_end(marks_of(format.style).end),
        m_recipient(std::move(recipient)) {}

 private:
  enum class At { header, arguments, end };

  Step step(Cursor& text) override {
    if (m_at == At::header) return header(text);
    if (m_at == At::end) return end(text);
    std::string arguments;
    const Step step = take_json(text, arguments);
    give(arguments);
    if (!is_json_whole()) return step;
    end_call(true);
    m_at = At::end;
    return Step::next;
  }

  Step header(Cursor& text) {
    if (has_ended(text)) return Step::done;
    if (has_called() && text.skip(m_end)) return Step::done;
    const auto name = name_in(text);
    const auto next = name && function_of(*name) ? text.peek() : std::nullopt;
    if (!next || *next != '{') return Step::stuck;
    begin_call(*name);
    begin_json();
    m_at = At::arguments;
    return Step::next;
  }

  std::optional<std::string> name_in(Cursor& text) {
    if (!m_recipient.empty()) return m_recipient;
    auto found = text.skip(m_marks.begin) ? text.until(m_marks.name_end) : std::nullopt;
    // Up to DeepSeek-V3 and R1: "function", NAME, and a block of code.
    m_is_block =
        found && format().style == ToolStyle::deepseek && without_blanks(*found) == "function";
    if (m_is_block) found = text.until("```json");
    if (!found) return std::nullopt;
    std::string_view name = without_blanks(*found);
    if (format().style == ToolStyle::mistral) name = name.substr(0, name.find("[CALL_ID]"));
    if (format().style == ToolStyle::kimi) {  // functions.NAME:NUMBER
      name = name.substr(0, name.rfind(':'));
      constexpr std::string_view space = "functions.";
      if (name.substr(0, space.size()) == space) name.remove_prefix(space.size());
    }
    return std::string(without_blanks(name));
  }

  Step end(Cursor& text) {
    if (m_is_block && !text.skip("```")) return Step::stuck;
    if (!text.skip(m_marks.end)) return Step::stuck;
    leave_call();
    m_at = At::header;
    return m_end.empty() ? Step::done : Step::next;
  }

  Marks m_marks;
  std::string m_end, m_recipient;
  At m_at = At::header;
  bool m_is_block = false;
};

/// Calls that give each argument by its key.
class KeyedCalls : public CallReader {
 public:
  using CallReader::CallReader;

 protected:
  void begin_keyed_call(std::string_view name) {
    m_keys.clear();
    begin_call(name);
    give("{");
  }

  /// Returns false for a key that was there before.
  bool give_key(std::string_view key) {
    const bool is_first = m_keys.empty();
    if (!m_keys.emplace(key).second) return false;
    give((is_first ? "" : ",") + files::json_text(std::string(key)) + ":");
    return true;
  }

  void end_keyed_call() {
    give("}");
    end_call(true);
    leave_call();
  }

 private:
  std::set<std::string> m_keys;
};

/// Calls that write strings without quotes: <parameter=KEY>VALUE</parameter>,
/// <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
class RawCalls : public KeyedCalls {
 public:
  RawCalls(const AnswerFormat& format, bool is_silent, std::string value_end, bool has_lines)
      : KeyedCalls(format, is_silent), m_value_end(std::move(value_end)), m_has_lines(has_lines) {}

 protected:
  virtual Step step_outside(Cursor& text) = 0;
  bool is_in_call() const { return m_function != nullptr; }

  bool begin_raw_call(std::string_view name) {
    m_function = function_of(name);
    if (m_function) begin_keyed_call(name);
    return m_function;
  }

  Step end_raw_call(Step step) {
    m_function = nullptr;
    end_keyed_call();
    return step;
  }

  Step begin_value(std::string_view key) {
    if (!give_key(key)) return Step::stuck;
    m_is_in_value = true;
    m_is_text = is_text(*m_function, std::string(key));
    m_value.clear();
    m_has_begun = !m_has_lines;
    if (m_is_text) give("\"");
    return Step::next;
  }

 private:
  Step step(Cursor& text) override {
    if (!m_is_in_value) return step_outside(text);
    const std::size_t begin = text.place();
    m_is_in_value = !text.give_until(m_value_end, m_value);
    // A value may be lines of its own.
    if (!m_has_begun && !m_value.empty()) {
      m_has_begun = true;
      if (m_value.front() == '\n') m_value.erase(0, 1);
    }
    const bool has_line_end = m_has_lines && !m_value.empty() && m_value.back() == '\n';
    if (has_line_end) m_value.pop_back();
    if (m_is_text) {
      std::string quoted = files::json_text(std::exchange(m_value, {}));
      give(std::string_view(quoted).substr(1, quoted.size() - 2));
    }
    if (!m_is_in_value) {
      give(m_is_text ? "\"" : compact_json(m_value).value_or(files::json_text(m_value)));
    } else if (has_line_end) {
      m_value += '\n';
    }
    return text.place() > begin ? Step::next : Step::stuck;
  }

  /// Whether a parameter is a string according to its tool.
  static bool is_text(const OrderedJson& function, const std::string& parameter) {
    const OrderedJson* found = &function;
    for (const std::string& name :
         {std::string("parameters"), std::string("properties"), parameter, std::string("type")}) {
      const auto field = found->find(name);
      if (!found->is_object() || field == found->end()) return false;
      found = &*field;
    }
    return *found == "string";
  }

  std::string m_value_end;
  bool m_has_lines;
  const OrderedJson* m_function = nullptr;  // of the call
  bool m_is_in_value = false;
  bool m_is_text = false;    // the value is a string
  bool m_has_begun = false;  // the value, behind its first line end
  std::string m_value;       // the part that is not given yet
};

class CoderCalls final : public RawCalls {
 public:
  CoderCalls(const AnswerFormat& format, bool is_silent)
      : RawCalls(format, is_silent, "</parameter>", true) {}

 private:
  Step step_outside(Cursor& text) override {
    if (is_in_call()) {
      if (text.skip("</function>")) return end_raw_call(Step::next);
      const auto key = text.skip("<parameter=") ? text.until(">") : std::nullopt;
      return key ? begin_value(*key) : Step::stuck;
    }
    if (has_ended(text)) return Step::done;
    if (has_called() && text.skip("</tool_call>")) return Step::done;
    const auto name = text.skip("<function=") ? text.until(">") : std::nullopt;
    return name && begin_raw_call(*name) ? Step::next : Step::stuck;
  }
};

class GlmCalls final : public RawCalls {
 public:
  GlmCalls(const AnswerFormat& format, bool is_silent)
      : RawCalls(format, is_silent, "</arg_value>", false) {}

 private:
  Step step_outside(Cursor& text) override {
    if (!is_in_call()) {
      const auto name = text.before("<");
      return name && begin_raw_call(without_blanks(*name)) ? Step::next : Step::stuck;
    }
    if (text.skip("</tool_call>")) return end_raw_call(Step::done);
    const auto key = text.skip("<arg_key>") ? text.until("</arg_key>") : std::nullopt;
    return key && text.skip("<arg_value>") ? begin_value(*key) : Step::stuck;
  }
};

/// [name(key=value, …), …] with values of Python.
class PythonCalls final : public KeyedCalls {
 public:
  using KeyedCalls::KeyedCalls;

 private:
  enum class At { begin, name, key, json, text, after_value, after_call, end };

  Step step(Cursor& text) override {
    switch (m_at) {
      case At::begin:
        return text.skip("[") ? become(At::name) : Step::stuck;
      case At::name: {
        const auto found = text.until("(");
        const std::string_view name = without_blanks(found.value_or(""));
        if (!function_of(name)) return Step::stuck;
        begin_keyed_call(name);
        return become(At::key);
      }
      case At::key:
        return text.skip(")") ? close() : key(text);
      case At::json: {
        std::string value;
        const Step step = take_json(text, value);
        give(value);
        return is_json_whole() ? become(At::after_value) : step;
      }
      case At::text:
        return take_text(text);
      case At::after_value:
        if (text.skip(",")) return become(At::key);
        return text.skip(")") ? close() : Step::stuck;
      case At::after_call:
        if (has_ended(text)) return Step::done;
        if (text.skip(",")) return become(At::name);
        return text.skip("]") ? become(At::end) : Step::stuck;
      case At::end:
        break;
    }
    return has_ended(text) || text.skip("<|tool_call_end|>") ? Step::done : Step::stuck;
  }

  Step become(At at) {
    m_at = at;
    return Step::next;
  }

  Step close() {
    end_keyed_call();
    return become(At::after_call);
  }

  Step key(Cursor& text) {
    text.peek();
    const auto key = text.until("=");
    const auto first = key ? text.peek() : std::nullopt;
    if (!first) return Step::stuck;
    begin_json();
    const bool is_text = *first == '"' || *first == '\'';
    const bool is_json = *first == '{' || *first == '[';
    const auto word = is_text || is_json ? std::string_view() : text.before(",)] \n");
    if (!word) return Step::stuck;
    const auto value = json_word(*word);
    if (!is_text && !is_json && !value) return Step::stuck;
    if (!give_key(without_blanks(*key))) return Step::stuck;
    if (is_json) return become(At::json);
    if (!is_text) {
      give(*value);
      return become(At::after_value);
    }
    m_quote = *first;
    m_scanner = {};
    m_scanner.put('"');
    text.advance(1);
    give("\"");
    return become(At::text);
  }

  /// A number, true, false or null.
  static std::optional<std::string> json_word(std::string_view word) {
    if (word == "True") return "true";
    if (word == "False") return "false";
    if (word == "None") return "null";
    return compact_json(word);
  }

  Step take_text(Cursor& text) {
    const std::string_view rest = text.rest();
    std::string given;
    std::size_t count = 0;
    bool is_right = true;
    while (m_at == At::text && is_right) {
      const std::string_view one = next_of(rest.substr(count));
      if (one.empty()) {
        text.want_more();
        break;
      }
      const bool is_end = one.size() == 1 && one.front() == m_quote;
      const std::string json = is_end ? "\"" : json_of(one);
      for (const char c : json) is_right = is_right && m_scanner.put(c) == JsonScanner::Byte::part;
      if (!is_right) break;
      given += json;
      count += one.size();
      if (is_end) m_at = At::after_value;
    }
    give(given);
    text.advance(count);
    return count > 0 ? Step::next : Step::stuck;
  }

  /// The next byte or escape of a string; empty if it is not all there.
  static std::string_view next_of(std::string_view rest) {
    if (rest.empty() || rest.front() != '\\') return rest.substr(0, 1);
    const char kind = rest.substr(1, 1) == "u" ? 'u' : rest.substr(1, 1) == "x" ? 'x' : ' ';
    const std::size_t length = kind == 'u' ? 6 : kind == 'x' ? 4 : 2;
    return rest.size() < length ? std::string_view() : rest.substr(0, length);
  }

  /// The same in a string of JSON.
  static std::string json_of(std::string_view one) {
    const bool is_ascii = static_cast<unsigned char>(one.front()) < 0x80;
    if (one.size() == 1 && !is_ascii) return std::string(one);
    if (one.size() == 1) {
      const std::string quoted = files::json_text(std::string(one));
      return quoted.substr(1, quoted.size() - 2);
    }
    const char kind = one[1];
    if (kind == 'x') return "\\u00" + std::string(one.substr(2));
    if (kind == '\'') return "'";
    const bool is_json = std::string_view("\"\\/bfnrtu").find(kind) != std::string_view::npos;
    return (is_json ? "" : "\\") + std::string(one);  // Python takes the backslash for itself
  }

  At m_at = At::begin;
  char m_quote = '"';
  JsonScanner m_scanner;  // of the string in JSON
};

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

std::unique_ptr<CallReader> make_call_reader(const AnswerFormat& format,
                                             const std::string& recipient, bool is_silent,
                                             Cursor text) {
  const auto marked = [&](const MarkedCalls::Marks& marks) {
    return std::make_unique<MarkedCalls>(format, is_silent, marks, recipient);
  };
  // Whether the calls are objects.
  const auto next_is = [&](char c) {
    const auto next = text.peek();
    return next && *next == c;
  };
  switch (format.style) {
    case ToolStyle::coder:
      return std::make_unique<CoderCalls>(format, is_silent);
    case ToolStyle::glm:
      return std::make_unique<GlmCalls>(format, is_silent);
    case ToolStyle::deepseek:
      return marked({"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"});
    case ToolStyle::kimi:
      return marked({"<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"});
    case ToolStyle::harmony:
      return marked({});
    case ToolStyle::mistral:
      if (next_is('[')) break;
      if (text.wants_more() && !text.is_last()) return nullptr;
      return marked({"", "[ARGS]", ""});
    case ToolStyle::lfm:
      if (text.skip("[") && next_is('{')) break;
      if (text.wants_more() && !text.is_last()) return nullptr;
      return std::make_unique<PythonCalls>(format, is_silent);
    case ToolStyle::hermes:
    case ToolStyle::granite:
    case ToolStyle::json:
      break;
  }
  return std::make_unique<JsonCalls>(format, is_silent);
}

}  // namespace kvzap::server
