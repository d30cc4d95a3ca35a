// What a person types, or a file has: lines, messages of several lines, commands.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// Lines of a descriptor, read as they come: a signal that SignalWatch has noted is seen while
/// nothing comes.
class LineReader {
 public:
  enum class Outcome { line, end, signal };

  explicit LineReader(int descriptor) : m_descriptor(descriptor) {}
  /// The next line without its end ("\n" or "\r\n"); one that the input ends in without an end
  /// counts. Throws Error if reading fails, and for a line of
  /// more than 64 MiB.
  Outcome read(std::string& line);
  /// Gives up what has been read of a line.
  void forget() { m_rest.clear(); }

 private:
  bool take(std::string& line);

  int m_descriptor;
  std::string m_rest;
  bool m_ended = false;
};

/// Puts messages together: a line is one, unless it ends with a backslash, which stands for a line
/// break (the next line follows), or begins with """: then all up to the next """ at a line's end
/// is one.
class MessageBuilder {
 public:
  /// A message, if the line completes one.
  std::optional<std::string> add(std::string_view line);
  /// What there is so far, at the input's end; empty: nothing.
  std::string finish();
  bool is_open() const { return m_open; }
  /// Whether the last message was between """, so that no command is looked for in it.
  bool is_quoted() const { return m_quoted; }
  void forget() { *this = MessageBuilder(); }

 private:
  std::string m_text;
  bool m_open = false;
  bool m_quoted = false;
};

}  // namespace kvzap::driver
