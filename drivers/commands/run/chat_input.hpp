// Input of `kvzap chat` from a terminal or a file: lines, messages of several lines, commands.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "console/line_editor.hpp"
#include "console/typed_input.hpp"

namespace kvzap::driver {

/// Reads lines of a descriptor. Unless a person types them, they must be UTF-8 text, as a file of
/// files::require_text, and a byte order mark is dropped. While it waits for input, it notices
/// signals that SignalWatch has recorded. Pasted text that a terminal marks does not end a line.
/// Escape sequences are dropped.
class LineReader {
 public:
  LineReader(int descriptor, bool is_typed) : m_descriptor(descriptor), m_is_typed(is_typed) {}
  /// Reads the next line without its end ("\n" or "\r\n"). The last line may lack an end. Throws
  /// Error if reading fails, for a line of more than 64 MiB, and for other bytes than text.
  InputEnd read(std::string& line);
  /// Discards a line that was read in part.
  void forget();

 private:
  bool take(std::string& line);
  void check(std::string& line);

  int m_descriptor;
  bool m_is_typed;
  std::int64_t m_lines = 0;
  bool m_has_utf8 = false;  // characters of several bytes in earlier lines
  InputSplitter m_splitter;
  std::string m_line;  // its beginning
  bool m_ended = false;
};

/// The lines of standard input: from a line editor if a person types at this process's terminal.
class ChatLines {
 public:
  /// `is_typed`: a person types the lines. Without `prompts` there is neither a prompt nor an
  /// editor. With `keeps_history` the editor has the lines of earlier conversations.
  ChatLines(bool is_typed, bool prompts, bool keeps_history);
  /// Reads the next line, as LineReader and LineEditor do, after a prompt.
  InputEnd read(const std::string& prompt, std::string& line);
  /// Adds a line to the editor's history.
  void remember(const std::string& line);
  /// After Ctrl-C at a terminal: discards a line that was read in part.
  void forget();
  /// See LineEditor::save_history.
  std::string save_history();

 private:
  bool m_prompts;
  LineReader m_reader;
  std::unique_ptr<LineEditor> m_editor;  // or absent
};

/// Combines lines into messages. A line is a message, with two exceptions. If it ends with a
/// backslash, the message continues in the next line. If it begins with """, all text up to the
/// next """ at a line's end is one message.
class MessageBuilder {
 public:
  /// Returns a message, if the line completes one. A pasted line may have newlines.
  std::optional<std::string> add(std::string_view line);
  /// Returns the incomplete message at the input's end; empty if there is none.
  std::string finish();
  bool is_open() const { return m_open; }
  /// Returns whether the last message was between """, so that it is no command.
  bool is_quoted() const { return m_quoted; }
  void forget() { *this = MessageBuilder(); }

 private:
  std::string m_text;
  bool m_open = false;
  bool m_quoted = false;
};

}  // namespace kvzap::driver
