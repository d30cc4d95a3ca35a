// Bytes of standard input: waiting for them, and the parts that a terminal adds to text.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::driver {

/// How a wait for input ends. signal: SignalWatch has recorded one, or the terminal is gone.
enum class InputEnd { input, end, signal };

/// Waits for bytes of a descriptor and appends them to `bytes`. Calls `on_wake` at least five times
/// a second, and after each signal. Throws Error if reading fails.
InputEnd read_more(int descriptor, std::string& bytes, const std::function<void()>& on_wake = {});

/// Throws Error if a message of so many bytes is longer than any model's context.
void check_message_size(std::size_t bytes);

/// Splits the bytes that a terminal sends into text, escape sequences (such as those of arrow keys)
/// and pasted text, which the terminal puts between two sequences (begin_paste_marks).
class InputSplitter {
 public:
  struct Part {
    enum class Kind { text, escape, paste } kind = Kind::text;
    /// text: bytes without escape sequences; ends after a newline or where the next part begins.
    /// escape: one sequence. paste: the text without marks, escape sequences and control characters
    /// except tabs; its lines end with \n, and it has no newline at its end.
    std::string bytes;
  };

  void add(std::string_view bytes);
  /// Returns the next part, or none until more bytes are added.
  std::optional<Part> next();
  /// At the end of the input: an unfinished paste becomes a part, an unfinished sequence is
  /// dropped.
  void finish() { m_is_finished = true; }
  void clear() { *this = InputSplitter(); }
  /// Returns the number of bytes that wait.
  std::size_t size() const { return m_bytes.size() - m_begin; }

 private:
  void skip(std::size_t count) { m_begin += count; }
  std::optional<Part> next_paste();

  std::string m_bytes;
  std::size_t m_begin = 0;  // bytes before it are done
  bool m_in_paste = false;
  std::size_t m_searched = 0;  // bytes of the paste that do not begin its end mark
  bool m_is_finished = false;
};

}  // namespace kvzap::driver
