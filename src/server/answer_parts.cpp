#include "server/answer_parts.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/tool_bodies.hpp"
#include "text/marks.hpp"
#include "text/utf8.hpp"

namespace kvzap::server {
namespace {

constexpr std::string_view thoughts_begin = "<think>", thoughts_end = "</think>";
constexpr std::string_view blanks = " \t\n\r";

// Messages of harmony: <|start|>ROLE<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>
constexpr std::string_view message_begin = "<|message|>";
constexpr std::size_t longest_header = 1024;
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

void AnswerParts::add(AnswerPart part) {
  using Kind = AnswerPart::Kind;
  const bool is_new = part.kind == Kind::call || part.kind == Kind::call_end;
  if (!is_new && part.text.empty()) return;
  if (!is_new && !m_parts.empty() && m_parts.back().kind == part.kind) {
    m_parts.back().text += part.text;
  } else {
    m_parts.push_back(std::move(part));
  }
}

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

AnswerParser::AnswerParser(AnswerParser&&) noexcept = default;
AnswerParser& AnswerParser::operator=(AnswerParser&&) noexcept = default;
AnswerParser::~AnswerParser() = default;

AnswerParts AnswerParser::append(std::string_view text) {
  m_bytes += text;
  m_bytes.erase(0, text::append_lossy(m_held, m_bytes, false));
  return run(false);
}

AnswerParts AnswerParser::finish() {
  text::append_lossy(m_held, std::exchange(m_bytes, {}), true);
  return run(true);
}

AnswerParts AnswerParser::run(bool at_end) {
  AnswerParts parts;
  if (!m_format) {
    parts.add({AnswerPart::Kind::text, std::exchange(m_held, {})});
    return parts;
  }
  while (step(at_end, parts)) {
  }
  if (at_end && !m_has_called) parts.add({AnswerPart::Kind::text, std::exchange(m_blanks, {})});
  return parts;
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
      std::string thoughts;
      const bool has_ended = give_until(marks, at_end, thoughts);
      parts.add({AnswerPart::Kind::thoughts, std::move(thoughts)});
      if (!has_ended) return false;
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
  if (m_held.empty()) return false;
  const std::string_view begins[] = {"<|start|>", "<|channel|>", " to="};
  const bool is_header = m_found == "<|start|>" ||
                         std::any_of(std::begin(begins), std::end(begins),
                                     [&](auto begin) { return may_begin_with(m_held, begin); });
  const std::size_t found = m_held.find(message_begin);
  const bool is_long = std::min(found, m_held.size()) > longest_header;
  if (!is_header || is_long || (found == std::string::npos && at_end)) {
    // Without a message the answer is as it is.
    m_state = State::text;
    return true;
  }
  if (found == std::string::npos) return false;
  const std::string header = m_held.substr(0, found);
  m_held.erase(0, found + message_begin.size());
  constexpr std::string_view recipient = " to=functions.";
  m_recipient.clear();
  if (const std::size_t to = header.find(recipient); to != std::string::npos) {
    const std::size_t begin = to + recipient.size();
    m_recipient = header.substr(begin, header.find_first_of(" <", begin) - begin);
  }
  const bool is_thought = header.find("<|channel|>analysis") != std::string::npos;
  m_found.clear();
  m_state = !m_recipient.empty() ? State::call : is_thought ? State::thoughts : State::text;
  return true;
}

bool AnswerParser::step_call(bool at_end, AnswerParts& parts) {
  if (!m_reader) {
    m_reader = make_call_reader(*m_format, m_recipient, m_has_called && m_format->calls_once,
                                Cursor(m_held, at_end));
    if (!m_reader) return false;
  }
  const CallReader::Status status = m_reader->read(m_held, at_end, parts);
  if (m_reader->has_called()) {
    m_has_called = m_is_after_call = true;
    m_blanks.clear();
    m_found.clear();
  }
  if (status == CallReader::Status::more) return false;
  const bool is_cut = status == CallReader::Status::cut && m_has_called;
  if (is_cut) m_held.clear();  // a part of the last call or of a further one
  if (status != CallReader::Status::done && !is_cut) add_text(m_found + m_reader->raw(), parts);
  m_reader.reset();
  m_state = State::text;
  return true;
}

/// Adds text, but blanks before and between calls only if other text follows.
void AnswerParser::add_text(std::string text, AnswerParts& parts) {
  if (m_format->tools.empty()) {
    parts.add({AnswerPart::Kind::text, std::move(text)});
    return;
  }
  m_blanks += text;
  const std::size_t last = m_blanks.find_last_not_of(blanks);
  if (last == std::string::npos) return;
  const bool is_after_call = std::exchange(m_is_after_call, false);
  const std::size_t first = is_after_call ? m_blanks.find_first_not_of(blanks) : 0;
  parts.add({AnswerPart::Kind::text, m_blanks.substr(first, last + 1 - first)});
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
