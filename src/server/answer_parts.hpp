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

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON
};

/// New parts of an answer.
struct AnswerParts {
  std::string thoughts;
  std::string text;
  std::vector<ToolCall> calls;
};

/// Takes the text of an answer in pieces and returns its parts. Text that may begin a mark is held
/// back until more is known; a call is complete at its end. What is no call of one of the tools
/// remains text.
class AnswerParser {
 public:
  /// `format`: null for an answer that is text alone.
  explicit AnswerParser(std::shared_ptr<const AnswerFormat> format);

  AnswerParts append(std::string_view text);
  /// Returns the rest.
  AnswerParts finish();

 private:
  enum class State { start, thoughts, text, call, header };

  void run(bool at_end, AnswerParts& parts);
  bool step(bool at_end, AnswerParts& parts);
  bool step_start(bool at_end);
  bool step_header(bool at_end);
  bool step_call(bool at_end, AnswerParts& parts);
  bool give_until(const std::vector<std::string>& marks, bool at_end, std::string& target);
  void add_text(std::string text, AnswerParts& parts);
  void take_calls(const std::string& body, const std::string& raw, AnswerParts& parts);

  std::shared_ptr<const AnswerFormat> m_format;
  State m_state = State::start;
  std::string m_held;
  std::string m_found;      // the mark that ended the last part
  std::string m_recipient;  // of a message of harmony
  std::string m_blanks;     // after the text so far
  bool m_has_thoughts = false;
  bool m_has_called = false;
};

}  // namespace kvzap::server
