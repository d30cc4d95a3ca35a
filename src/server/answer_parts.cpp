#include "server/answer_parts.hpp"

#include <algorithm>
#include <utility>

#include "server/tool_bodies.hpp"
#include "text/marks.hpp"

namespace kvzap::server {
namespace {

constexpr std::string_view thoughts_begin = "<think>", thoughts_end = "</think>";
constexpr std::string_view blanks = " \t\n\r";

// Messages of harmony: <|start|>ROLE<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>
constexpr std::string_view message_begin = "<|message|>";
const std::vector<std::string>& message_ends() {
  static const std::vector<std::string> marks = {"<|end|>", "<|call|>", "<|return|>", "<|start|>"};
  return marks;
}

/// Whether a text may become one that begins with `mark`.
bool may_begin_with(std::string_view text, std::string_view mark) {
  return mark.substr(0, text.size()) == text.substr(0, mark.size());
}

using text::first_mark;
using text::FoundMark;
using text::length_of_beginning;

}  // namespace

AnswerFormat format_of(std::string_view chat_template) {
  const auto has = [&](std::string_view mark) { return chat_template.find(mark) != mark.npos; };
  AnswerFormat format;
  const auto style_of = [&] {
    if (has("<|channel|>")) return ToolStyle::harmony;
    if (has("<|tool_calls_section_begin|>")) return ToolStyle::kimi;
    if (has("<｜tool▁calls▁begin｜>")) return ToolStyle::deepseek;
    if (has("<|tool_call_start|>")) return ToolStyle::lfm;
    if (has("<tool_call>") && has("<arg_key>")) return ToolStyle::glm;
    if (has("<tool_call>") && has("<function=")) return ToolStyle::coder;
    if (has("<tool_call>")) return ToolStyle::hermes;
    if (has("[TOOL_CALLS]")) return ToolStyle::mistral;
    if (has("<|tool_call|>")) return ToolStyle::granite;
    return ToolStyle::json;
  };
  format.style = style_of();
  format.has_thoughts = has(thoughts_begin) || has(thoughts_end);
  return format;
}

AnswerParser::AnswerParser(std::shared_ptr<const AnswerFormat> format)
    : m_format(std::move(format)) {
  if (!m_format) {
    m_state = State::text;
  } else if (m_format->style == ToolStyle::harmony) {
    m_state = State::header;
  } else if (m_format->begins_in_thoughts) {
    m_state = State::thoughts;
  }
}

AnswerParts AnswerParser::append(std::string_view text) {
  m_held += text;
  AnswerParts parts;
  run(false, parts);
  return parts;
}

AnswerParts AnswerParser::finish() {
  AnswerParts parts;
  run(true, parts);
  return parts;
}

void AnswerParser::run(bool at_end, AnswerParts& parts) {
  if (!m_format) {
    parts.text = std::exchange(m_held, {});
    return;
  }
  while (step(at_end, parts)) {
  }
  if (at_end && !m_has_called) parts.text += std::exchange(m_blanks, {});
}

/// Returns whether the state has changed.
bool AnswerParser::step(bool at_end, AnswerParts& parts) {
  const bool is_harmony = m_format->style == ToolStyle::harmony;
  switch (m_state) {
    case State::start:
      return step_start(at_end);
    case State::header:
      return step_header(at_end);
    case State::call:
      return step_call(at_end, parts);
    case State::thoughts: {
      const std::vector<std::string> marks =
          is_harmony ? message_ends() : std::vector<std::string>{std::string(thoughts_end)};
      m_has_thoughts = true;
      if (!give_until(marks, at_end, parts.thoughts)) return false;
      m_state = is_harmony ? State::header : State::start;
      return true;
    }
    case State::text:
      break;
  }
  std::vector<std::string> marks;
  if (is_harmony) {
    marks = message_ends();
  } else if (!m_format->tools.empty()) {
    marks = {marks_of(m_format->style).begin};
  }
  std::string text;
  const bool has_found = give_until(marks, at_end, text);
  add_text(std::move(text), parts);
  if (has_found) m_state = is_harmony ? State::header : State::call;
  return has_found;
}

/// The beginning of an answer, or of what follows its thoughts.
bool AnswerParser::step_start(bool at_end) {
  const std::size_t first = m_held.find_first_not_of(blanks);
  if (first == std::string::npos) {
    if (at_end) m_state = State::text;
    return at_end && !m_held.empty();
  }
  const std::string_view text = std::string_view(m_held).substr(first);
  if (m_format->has_thoughts && may_begin_with(text, thoughts_begin)) {
    if (text.size() < thoughts_begin.size()) {
      if (at_end) m_state = State::text;
      return at_end;
    }
    m_held.erase(0, first + thoughts_begin.size());
    m_state = State::thoughts;
    return true;
  }
  const bool is_object = m_format->style == ToolStyle::json && !m_format->tools.empty() &&
                         (text.front() == '{' || text.front() == '[');
  m_found.clear();
  m_state = is_object ? State::call : State::text;
  if (m_has_thoughts) m_held.erase(0, first);  // blanks behind thoughts are no text
  return true;
}

bool AnswerParser::step_header(bool at_end) {
  const std::size_t found = m_held.find(message_begin);
  if (found == std::string::npos) {
    // Without a message the answer is as it is.
    const bool is_header =
        may_begin_with(m_held, "<|start|>") || may_begin_with(m_held, "<|channel|>");
    if (is_header && !at_end) return false;
    if (m_held.empty()) return false;
    m_state = State::text;
    return true;
  }
  const std::string header = m_held.substr(0, found);
  m_held.erase(0, found + message_begin.size());
  constexpr std::string_view recipient = " to=functions.";
  m_recipient.clear();
  if (const std::size_t to = header.find(recipient); to != std::string::npos) {
    const std::size_t begin = to + recipient.size();
    m_recipient = header.substr(begin, header.find_first_of(" <", begin) - begin);
  }
  const bool is_thought = header.find("<|channel|>analysis") != std::string::npos;
  m_state = !m_recipient.empty() ? State::call : is_thought ? State::thoughts : State::text;
  return true;
}

bool AnswerParser::step_call(bool at_end, AnswerParts& parts) {
  const bool is_harmony = m_format->style == ToolStyle::harmony;
  const CallMarks marks = marks_of(m_format->style);
  const std::vector<std::string> ends = is_harmony          ? message_ends()
                                        : marks.end.empty() ? std::vector<std::string>()
                                                            : std::vector{marks.end};
  const FoundMark end = first_mark(m_held, ends);
  if (end.mark.empty() && !at_end) return false;
  const std::string body = m_held.substr(0, end.place);
  const std::string raw = m_found + body + end.mark;
  m_held.erase(0, body.size() + end.mark.size());
  take_calls(body, is_harmony ? body : raw, parts);
  m_state = is_harmony ? State::header : State::text;
  return true;
}

void AnswerParser::take_calls(const std::string& body, const std::string& raw, AnswerParts& parts) {
  std::vector<ToolCall> calls;
  if (m_format->style == ToolStyle::harmony) {
    if (const auto call = call_of(m_recipient, body, m_format->tools)) calls.push_back(*call);
  } else {
    calls = calls_of(m_format->style, body, m_format->tools);
  }
  if (calls.empty()) return add_text(raw, parts);
  m_blanks.clear();
  for (ToolCall& call : calls) {
    if (m_has_called && m_format->calls_once) return;
    m_has_called = true;
    parts.calls.push_back(std::move(call));
  }
}

/// Adds text, but blanks before and between calls only if other text follows.
void AnswerParser::add_text(std::string text, AnswerParts& parts) {
  if (m_format->tools.empty()) {
    parts.text += text;
    return;
  }
  m_blanks += text;
  const std::size_t last = m_blanks.find_last_not_of(blanks);
  if (last == std::string::npos) return;
  const std::size_t first = m_has_called ? m_blanks.find_first_not_of(blanks) : 0;
  parts.text += m_blanks.substr(first, last + 1 - first);
  m_blanks.erase(0, last + 1);
}

/// Moves text up to the first mark to `target`, and keeps the mark in m_found. Holds back what may
/// begin one. Returns whether there was one.
bool AnswerParser::give_until(const std::vector<std::string>& marks, bool at_end,
                              std::string& target) {
  const FoundMark first = first_mark(m_held, marks);
  const bool has_found = !first.mark.empty();
  const std::size_t held = has_found || at_end ? 0 : length_of_beginning(m_held, marks);
  const std::size_t given = std::min(first.place, m_held.size() - held);
  target.append(m_held, 0, given);
  m_held.erase(0, given + first.mark.size());
  if (has_found) m_found = first.mark;
  return has_found;
}

}  // namespace kvzap::server
