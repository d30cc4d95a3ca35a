// What the readers of calls have in common.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "server/answer_parts.hpp"
#include "server/json_scanner.hpp"

namespace kvzap::server {

std::string_view without_blanks(std::string_view text);

/// Reads a text that may go on, from its beginning.
class Cursor {
 public:
  /// `is_last`: the text does not go on.
  Cursor(std::string_view text, bool is_last) : m_text(text), m_is_last(is_last) {}

  std::size_t place() const { return m_place; }
  std::string_view rest() const { return m_text.substr(m_place); }
  bool is_last() const { return m_is_last; }
  /// Whether a longer text could have given another result.
  bool wants_more() const { return m_wants_more; }
  void want_more() { m_wants_more = true; }
  void advance(std::size_t count) { m_place += count; }

  /// The next character that is no blank, if there is one. Skips blanks.
  std::optional<char> peek();
  /// Skips blanks and a mark, if it is there.
  bool skip(std::string_view mark);
  /// The text up to a mark, which is skipped. It must come within `longest_name` bytes.
  std::optional<std::string_view> until(std::string_view mark);
  /// The text up to one of some characters, which stays, within the same bytes.
  std::optional<std::string_view> before(std::string_view characters);
  /// The value of a string of JSON, within the same bytes.
  std::optional<std::string> json_text();
  /// Moves text up to a mark to `target`, and skips the mark. Holds back what may begin it. Returns
  /// whether the mark was there.
  bool give_until(const std::string& mark, std::string& target);

 private:
  std::optional<std::string_view> name_before(std::size_t found);

  static constexpr std::size_t longest_name = 1024;

  std::string_view m_text;
  bool m_is_last;
  std::size_t m_place = 0;
  bool m_wants_more = false;
};

/// Reads the calls between the marks of a style, in pieces of any size. A call begins when its name
/// is known to be that of a tool and its arguments begin. It gives arguments as they come, always
/// the beginning of a JSON object.
class CallReader {
 public:
  /// `is_silent`: calls are read, but not given. So are those after the first one if
  /// `format.calls_once`. `format` must outlive the reader.
  CallReader(const AnswerFormat& format, bool is_silent)
      : m_format(format), m_is_silent(is_silent) {}
  CallReader(const CallReader&) = delete;
  CallReader& operator=(const CallReader&) = delete;
  virtual ~CallReader() = default;

  enum class Status {
    more,  // text is needed
    done,
    failed,  // the text goes on as no call
    cut      // the answer has ended in what may have become a call
  };
  /// Takes from the beginning of `held` what it can read. `is_last`: the answer ends behind it.
  Status read(std::string& held, bool is_last, AnswerParts& parts);
  /// Whether a call has begun.
  bool has_called() const { return m_has_called; }
  /// The text that was taken for no call, after `failed` and `cut`.
  const std::string& raw() const { return m_raw; }

 protected:
  enum class Step {
    next,   // the text up to the cursor is read
    stuck,  // it is no call, unless the cursor wants more
    done
  };
  virtual Step step(Cursor& text) = 0;

  const AnswerFormat& format() const { return m_format; }
  /// The function of a tool; null: there is none.
  const nlohmann::ordered_json* function_of(std::string_view name) const;
  /// Whether the text has ended behind a call.
  bool has_ended(Cursor& text) const { return m_has_called && !text.peek() && text.is_last(); }

  void begin_call(std::string_view name);
  /// Gives a piece of the arguments of the call.
  void give(std::string_view arguments);
  void end_call(bool is_whole);
  /// Marks the end of all that belongs to the call.
  void leave_call();
  /// Begins to read a JSON value by `take_json`.
  void begin_json() { m_json = {}; }
  /// Appends what comes of the value, without blanks, to `target`.
  Step take_json(Cursor& text, std::string& target);
  bool is_json_whole() const { return m_json.is_whole(); }

 private:
  void add(AnswerPart part);

  const AnswerFormat& m_format;
  bool m_is_silent;
  AnswerParts* m_parts = nullptr;
  JsonScanner m_json;
  std::string m_raw;
  bool m_has_called = false;
  bool m_is_in_call = false;
  bool m_has_ended = false;   // the arguments of the call
  bool m_is_settled = false;  // the text of this step is that of a call
};

}  // namespace kvzap::server
