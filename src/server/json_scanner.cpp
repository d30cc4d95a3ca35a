#include "server/json_scanner.hpp"

#include "files/json_file.hpp"

namespace kvzap::server {
namespace {

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The value of a hexadecimal digit; 16: it is none.
unsigned digit_of(char c) {
  if (is_digit(c)) return static_cast<unsigned>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
  if (c >= 'A' && c <= 'F') return static_cast<unsigned>(c - 'A') + 10;
  return 16;
}

}  // namespace

JsonScanner::Byte JsonScanner::put(char c) {
  if (is_in_number()) {
    if (take_number(c)) return Byte::part;
    if (!has_number()) m_state = State::wrong;
    if (m_state != State::wrong) end_value();
    if (is_whole()) return Byte::after;
  }
  const bool is_between = m_state <= State::after_value;
  if (is_between && is_blank(c)) return Byte::blank;
  if (take(c)) return Byte::part;
  m_state = State::wrong;
  return Byte::wrong;
}

bool JsonScanner::finish() {
  if (has_number()) end_value();
  return is_whole();
}

bool JsonScanner::can_close() const {
  return m_state == State::after_value || m_state == State::first_key ||
         m_state == State::first_value || is_whole();
}

std::string JsonScanner::closing_brackets() const {
  std::string closing;
  for (auto open = m_brackets.rbegin(); open != m_brackets.rend(); ++open) {
    closing += *open == '{' ? '}' : ']';
  }
  return closing;
}

bool JsonScanner::has_number() const {
  return m_state == State::zero || m_state == State::digits || m_state == State::fraction ||
         m_state == State::power;
}

/// Returns whether the byte is allowed. It is no blank between parts and not within a number.
bool JsonScanner::take(char c) {
  switch (m_state) {
    case State::text:
    case State::escape:
      return take_text(c);
    case State::hexadecimal:
      return take_hexadecimal(c);
    case State::word:
      if (c != m_word.front()) return false;
      m_word.remove_prefix(1);
      if (m_word.empty()) end_value();
      return true;
    case State::colon:
      m_state = State::value;
      return c == ':';
    case State::first_key:
    case State::key:
      if (c == '}' && m_state == State::first_key) break;
      m_state = State::text;
      m_is_key = true;
      m_text = c;
      return c == '"';
    case State::first_value:
      if (c == ']') break;
      return begin_value(c);
    case State::value:
      return begin_value(c);
    case State::after_value:
      if (c == ',') {
        m_state = m_brackets.back() == '{' ? State::key : State::value;
        return true;
      }
      break;
    default:
      return false;
  }
  if (c != (m_brackets.back() == '{' ? '}' : ']')) return false;
  m_brackets.pop_back();
  m_keys.pop_back();
  end_value();
  return true;
}

bool JsonScanner::begin_value(char c) {
  m_is_key = false;
  if (c == '{' || c == '[') {
    m_brackets += c;
    m_keys.emplace_back();
    m_state = c == '{' ? State::first_key : State::first_value;
    return m_brackets.size() <= static_cast<std::size_t>(files::max_json_depth);
  }
  for (const std::string_view word : {"true", "false", "null"}) {
    if (c != word.front()) continue;
    m_word = word.substr(1);
    m_state = State::word;
    return true;
  }
  m_state = c == '"'   ? State::text
            : c == '-' ? State::minus
            : c == '0' ? State::zero
                       : State::digits;
  return m_state != State::digits || is_digit(c);
}

bool JsonScanner::take_text(char c) {
  if (m_is_key) m_text += c;
  if (m_state == State::escape) {
    if (c == 'u') {
      m_state = State::hexadecimal;
      m_digits = 0;
      m_code = 0;
      return true;
    }
    m_state = State::text;
    return !m_is_second && std::string_view("\"\\/bfnrt").find(c) != std::string_view::npos;
  }
  if (c == '\\') {
    m_state = State::escape;
    return true;
  }
  if (m_is_second) return false;
  return c == '"' ? end_text() : static_cast<unsigned char>(c) >= 0x20;
}

bool JsonScanner::take_hexadecimal(char c) {
  if (m_is_key) m_text += c;
  const unsigned digit = digit_of(c);
  if (digit > 15) return false;
  m_code = m_code * 16 + digit;
  if (++m_digits < 4) return true;
  m_state = State::text;
  const bool is_first = m_code >= 0xd800 && m_code < 0xdc00;
  const bool is_second = m_code >= 0xdc00 && m_code < 0xe000;
  if (is_second != m_is_second) return false;
  m_is_second = is_first;
  return true;
}

/// Ends a string.
bool JsonScanner::end_text() {
  if (!m_is_key) {
    end_value();
    return true;
  }
  m_state = State::colon;
  const auto key = nlohmann::ordered_json::parse(m_text, nullptr, false);
  return key.is_string() && m_keys.back().insert(key.get<std::string>()).second;
}

void JsonScanner::end_value() { m_state = m_brackets.empty() ? State::whole : State::after_value; }

/// Returns whether the byte belongs to the number.
bool JsonScanner::take_number(char c) {
  const auto become = [this](State state) {
    m_state = state;
    return true;
  };
  const bool has_power = c == 'e' || c == 'E';
  switch (m_state) {
    case State::minus:
      return is_digit(c) && become(c == '0' ? State::zero : State::digits);
    case State::zero:
    case State::digits:
      if (c == '.') return become(State::point);
      if (has_power) return become(State::exponent);
      return is_digit(c) && m_state == State::digits;
    case State::point:
      return is_digit(c) && become(State::fraction);
    case State::fraction:
      return is_digit(c) || (has_power && become(State::exponent));
    case State::exponent:
      if (c == '+' || c == '-') return become(State::sign);
      return is_digit(c) && become(State::power);
    case State::sign:
      return is_digit(c) && become(State::power);
    default:
      return is_digit(c);
  }
}

std::optional<std::string> compact_json(std::string_view text) {
  JsonScanner scanner;
  std::string compact;
  for (const char c : text) {
    if (scanner.is_whole()) {
      if (!is_blank(c)) return std::nullopt;
      continue;
    }
    const JsonScanner::Byte byte = scanner.put(c);
    if (byte == JsonScanner::Byte::wrong) return std::nullopt;
    if (byte == JsonScanner::Byte::after && !is_blank(c)) return std::nullopt;
    if (byte == JsonScanner::Byte::part) compact += c;
  }
  if (!scanner.finish()) return std::nullopt;
  return compact;
}

std::string closed_json(std::string_view beginning) {
  JsonScanner scanner;
  std::string closing;
  std::size_t whole = 0;
  for (std::size_t i = 0; i < beginning.size() && !scanner.is_whole(); ++i) {
    const bool was_in_number = scanner.is_in_number();
    if (scanner.put(beginning[i]) == JsonScanner::Byte::wrong) break;
    if (scanner.can_close()) {
      whole = i + 1;
      closing = scanner.closing_brackets();
    } else if (was_in_number && !scanner.is_in_number()) {  // a comma has ended it
      whole = i;
      closing = scanner.closing_brackets();
    }
  }
  return std::string(beginning.substr(0, whole)) + closing;
}

}  // namespace kvzap::server
