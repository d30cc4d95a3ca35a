// JSON that comes byte by byte.
#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::server {

/// Checks one JSON value (RFC 8259), byte by byte. A key may not be repeated in an object,
/// surrogates come in pairs, and the depth is at most files::max_json_depth.
class JsonScanner {
 public:
  enum class Byte {
    part,   // of the value
    blank,  // between its parts
    after,  // the value, a number, has ended before
    wrong   // and so is every byte after it
  };
  /// Takes the next byte of a value that is not whole.
  Byte put(char c);
  /// Whether the value has ended. A number ends with the byte after it, or with `finish`.
  bool is_whole() const { return m_state == State::whole; }
  /// Takes the end of the text. Returns whether the value is whole.
  bool finish();
  /// Whether closing_brackets() would make JSON of the text so far, up to a number at its end.
  bool can_close() const;
  /// The brackets that close those that are open.
  std::string closing_brackets() const;
  bool is_in_number() const { return m_state >= State::minus && m_state <= State::power; }

 private:
  enum class State {
    // Between parts.
    value,
    first_value,  // or the end of an array
    key,
    first_key,  // or the end of an object
    colon,
    after_value,
    // In parts.
    text,
    escape,
    hexadecimal,
    word,
    // In numbers.
    minus,
    zero,
    digits,
    point,
    fraction,
    exponent,
    sign,
    power,
    // At the end.
    whole,
    wrong
  };

  bool has_number() const;
  bool take(char c);
  bool take_text(char c);
  bool take_hexadecimal(char c);
  bool take_number(char c);
  bool begin_value(char c);
  bool end_text();
  void end_value();

  State m_state = State::value;
  std::string m_brackets;                     // those that are open
  std::vector<std::set<std::string>> m_keys;  // of each open bracket
  std::string m_text;                         // of a key, in quotes
  bool m_is_key = false;
  bool m_is_second = false;  // of a pair of surrogates
  int m_digits = 0;
  unsigned m_code = 0;
  std::string_view m_word;  // the rest of true, false or null
};

/// Returns a JSON value without blanks between its parts; nothing if the text is none.
std::optional<std::string> compact_json(std::string_view text);

/// Returns JSON of the beginning of an object or array: what is whole in it, with its brackets
/// closed.
std::string closed_json(std::string_view beginning);

}  // namespace kvzap::server
