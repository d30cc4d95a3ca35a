// Input of `kvzap chat` from a terminal or a file: lines, messages of several lines, commands.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// Reads lines of a descriptor. While it waits for input, it notices signals that SignalWatch has
/// recorded.
class LineReader {
 public:
  enum class Outcome { line, end, signal };

  explicit LineReader(int descriptor) : m_descriptor(descriptor) {}
  /// Reads the next line without its end ("\n" or "\r\n"). The last line may lack an end. Throws
  /// Error if reading fails, and for a line of more than 64 MiB.
  Outcome read(std::string& line);
  /// Discards a line that was read in part.
  void forget() { m_rest.clear(); }

 private:
  bool take(std::string& line);

  int m_descriptor;
  std::string m_rest;
  bool m_ended = false;
};

/// Combines lines into messages. A line is a message, with two exceptions. If it ends with a
/// backslash, the message continues in the next line. If it begins with """, all text up to the
/// next """ at a line's end is one message.
class MessageBuilder {
 public:
  /// Returns a message, if the line completes one.
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
