// The parts of a chat's answer: thoughts, text, and calls of tools. Families write them in their
// own ways, which their chat templates show.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::server {

/// How a family writes calls of tools.
enum class ToolStyle {
  hermes,    // <tool_call>{"name": …, "arguments": {…}}</tool_call> (Qwen, Hermes, Granite 4)
  coder,     // <tool_call><function=NAME><parameter=KEY>VALUE… (Qwen3-Coder)
  glm,       // <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>
  mistral,   // [TOOL_CALLS][{…}, …], or [TOOL_CALLS]NAME[ARGS]{…}
  deepseek,  // <｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>
  kimi,      // <|tool_calls_section_begin|>…<|tool_calls_section_end|>
  lfm,       // <|tool_call_start|>[name(key="value")]<|tool_call_end|>
  granite,   // <|tool_call|>[{…}, …]
  harmony,   // channels, as in gpt-oss
  json       // an answer that is one object with "name" and "arguments" or "parameters" (Llama 3)
};

/// What the answers to a request may have beside text.
struct AnswerFormat {
  ToolStyle style = ToolStyle::json;
  /// The tools of the request, as OpenAI's API has them; none: an empty array.
  nlohmann::ordered_json tools = nlohmann::ordered_json::array();
  /// Answers may have thoughts between <think> and </think>.
  bool has_thoughts = false;
  /// The prompt has begun them.
  bool begins_in_thoughts = false;
  /// Not more than one call counts.
  bool calls_once = false;

  /// Whether the marks of the format may be special tokens, which are part of the text then.
  bool needs_special_tokens() const { return style == ToolStyle::harmony || !tools.empty(); }
};

/// Returns the format of a chat template, without tools.
AnswerFormat format_of(std::string_view chat_template);

/// A new part of an answer, or of its last part.
struct AnswerPart {
  enum class Kind { thoughts, text, call, arguments, call_end };
  Kind kind;
  /// Text in UTF-8. Of a call: the name of its tool. Of arguments: a piece of a JSON object without
  /// blanks between its parts.
  std::string text;
  /// Of a call_end: false for arguments that are only the beginning of an object, because the
  /// answer ended or went on wrong.
  bool is_whole = true;
};

/// New parts of an answer, in their order.
class AnswerParts {
 public:
  /// Joins pieces of the same part.
  void add(AnswerPart part);
  auto begin() const { return m_parts.begin(); }
  auto end() const { return m_parts.end(); }

 private:
  std::vector<AnswerPart> m_parts;
};

class CallReader;

/// Takes the text of an answer in pieces and returns its parts, which do not depend on the pieces.
/// Text that may begin a mark is held back until more is known. A call begins when its name is that
/// of a tool and its arguments begin; they come as the model writes them. What is no call of one of
/// the tools remains text; so does the rest of a call from the byte on at which it is none.
class AnswerParser {
 public:
  /// `format`: null for an answer that is text alone.
  explicit AnswerParser(std::shared_ptr<const AnswerFormat> format);
  AnswerParser(AnswerParser&&) noexcept;
  AnswerParser& operator=(AnswerParser&&) noexcept;
  ~AnswerParser();

  AnswerParts append(std::string_view text);
  /// Returns the rest.
  AnswerParts finish();

 private:
  enum class State { start, thoughts, text, call, header };

  AnswerParts run(bool at_end);
  bool step(bool at_end, AnswerParts& parts);
  bool step_start(bool at_end);
  bool step_header(bool at_end);
  bool step_call(bool at_end, AnswerParts& parts);
  bool give_until(const std::vector<std::string>& marks, bool at_end, std::string& target);
  void add_text(std::string text, AnswerParts& parts);

  std::shared_ptr<const AnswerFormat> m_format;
  State m_state = State::start;
  std::string m_bytes;  // of a character that is not whole
  std::string m_held;
  std::string m_found;      // the mark that ended the last part
  std::string m_recipient;  // of a message of harmony
  std::string m_blanks;     // after the text so far
  std::unique_ptr<CallReader> m_reader;
  bool m_has_thoughts = false;
  bool m_has_called = false;
  bool m_is_after_call = false;  // no text came after the last one
};

}  // namespace kvzap::server
