#include "commands/run/chat_input.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <kvzap/core/types.hpp>
#include <utility>

#include "console/console.hpp"
#include "console/signals.hpp"
#include "files/plain_text.hpp"

namespace kvzap::driver {
namespace {

constexpr std::string_view quotes = "\"\"\"";
constexpr std::string_view input_name = "standard input";

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

// Moves text to the line. Returns whether the line is complete.
bool LineReader::take(std::string& line) {
  bool is_complete = false;
  while (!is_complete) {
    const auto part = m_splitter.next();
    if (!part) break;
    if (part->kind == InputSplitter::Part::Kind::escape) continue;
    m_line += part->bytes;
    is_complete = part->kind == InputSplitter::Part::Kind::text && ends_with(part->bytes, "\n");
  }
  check_message_size(m_line.size() + m_splitter.size());
  if (is_complete) {
    m_line.pop_back();
  } else if (!m_ended || m_line.empty()) {
    return false;
  }
  line = std::exchange(m_line, "");
  if (ends_with(line, "\r")) line.pop_back();
  if (!m_is_typed) check(line);
  return true;
}

void LineReader::check(std::string& line) {
  const std::string source = fmt::format("{}: line {}", input_name, ++m_lines);
  if (m_lines == 1) {
    files::require_text(line, source, "");
  } else {
    files::require_text_part(line, source, "", m_has_utf8);
  }
  m_has_utf8 = m_has_utf8 || files::has_wide_characters(line);
  files::normalize_lines(line);
}

InputEnd LineReader::read(std::string& line) {
  while (true) {
    if (caught_signal != 0) return InputEnd::signal;
    if (take(line)) return InputEnd::input;
    if (m_ended) return InputEnd::end;
    std::string bytes;
    const InputEnd end = read_more(m_descriptor, bytes);
    if (end == InputEnd::signal) return end;
    // Before m_splitter takes the escape sequences of an encoding away.
    if (!m_is_typed && m_lines == 0 && m_line.empty() && m_splitter.size() == 0) {
      files::require_no_format(bytes, std::string(input_name), "");
    }
    m_splitter.add(bytes);
    if (end == InputEnd::end) {
      m_ended = true;
      m_splitter.finish();
    }
  }
}

void LineReader::forget() {
  m_line.clear();
  m_splitter.clear();
}

ChatLines::ChatLines(bool is_typed, bool prompts, bool keeps_history)
    : m_prompts(prompts), m_reader(STDIN_FILENO, is_typed) {
  if (prompts) {
    m_editor = LineEditor::open(keeps_history ? history_file() : std::filesystem::path());
  }
}

InputEnd ChatLines::read(const std::string& prompt, std::string& line) {
  if (m_editor) return m_editor->read(prompt, line);
  if (m_prompts) say("{}", prompt);
  return m_reader.read(line);
}

void ChatLines::remember(const std::string& line) {
  if (m_editor) m_editor->remember(line);
}

void ChatLines::forget() {
  if (isatty(STDIN_FILENO) != 0) m_reader.forget();
}

std::string ChatLines::save_history() { return m_editor ? m_editor->save_history() : ""; }

std::optional<std::string> MessageBuilder::add(std::string_view line) {
  if (!m_open) {
    m_text.clear();
    m_quoted = line.substr(0, quotes.size()) == quotes;
    if (m_quoted) line.remove_prefix(quotes.size());
    m_open = true;
  } else if (m_quoted) {
    m_text += '\n';
  }
  if (m_quoted) {
    m_open = !ends_with(line, quotes);
    if (!m_open) line.remove_suffix(quotes.size());
    m_text += line;
  } else {
    m_open = ends_with(line, "\\");
    if (m_open) line.remove_suffix(1);
    m_text += line;
    if (m_open) m_text += '\n';
  }
  check_message_size(m_text.size());
  if (m_open) return std::nullopt;
  return m_text;
}

std::string MessageBuilder::finish() {
  if (!m_open) return "";
  m_open = false;
  return m_text;
}

}  // namespace kvzap::driver
