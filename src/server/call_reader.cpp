#include "server/call_reader.hpp"

#include <algorithm>
#include <utility>

#include "text/marks.hpp"

namespace kvzap::server {
namespace {

constexpr const char* white_space = " \t\n\r";

}  // namespace

std::string_view without_blanks(std::string_view text) {
  const std::size_t first = text.find_first_not_of(white_space);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(white_space) + 1 - first);
}

std::optional<char> Cursor::peek() {
  m_place = std::min(m_text.find_first_not_of(white_space, m_place), m_text.size());
  if (m_place < m_text.size()) return m_text[m_place];
  m_wants_more = true;
  return std::nullopt;
}

bool Cursor::skip(std::string_view mark) {
  peek();
  const std::string_view found = rest().substr(0, mark.size());
  if (found == mark) {
    advance(mark.size());
    return true;
  }
  if (found == mark.substr(0, found.size())) m_wants_more = true;
  return false;
}

std::optional<std::string_view> Cursor::until(std::string_view mark) {
  const auto name = name_before(rest().substr(0, longest_name).find(mark));
  if (name) advance(mark.size());
  return name;
}

std::optional<std::string_view> Cursor::before(std::string_view characters) {
  return name_before(rest().substr(0, longest_name).find_first_of(characters));
}

/// Takes the next `found` bytes; npos: what ends a name was not found.
std::optional<std::string_view> Cursor::name_before(std::size_t found) {
  const std::string_view text = rest();
  if (found == text.npos) {
    if (text.size() < longest_name) m_wants_more = true;
    return std::nullopt;
  }
  advance(found);
  return text.substr(0, found);
}

std::optional<std::string> Cursor::json_text() {
  const auto first = peek();
  if (!first || *first != '"') return std::nullopt;
  const std::string_view text = rest().substr(0, longest_name);
  JsonScanner scanner;
  std::size_t count = 0;
  while (!scanner.is_whole()) {
    if (count == text.size()) {
      if (count < longest_name) m_wants_more = true;
      return std::nullopt;
    }
    if (scanner.put(text[count++]) == JsonScanner::Byte::wrong) return std::nullopt;
  }
  advance(count);
  const auto value = nlohmann::ordered_json::parse(text.substr(0, count), nullptr, false);
  if (!value.is_string()) return std::nullopt;
  return value.get<std::string>();
}

bool Cursor::give_until(const std::string& mark, std::string& target) {
  const std::vector<std::string> marks = {mark};
  const text::FoundMark found = text::first_mark(rest(), marks);
  const bool has_found = !found.mark.empty();
  const std::size_t held = has_found ? 0 : text::length_of_beginning(rest(), marks);
  const std::string_view given = rest().substr(0, std::min(found.place, rest().size() - held));
  target += given;
  advance(given.size() + found.mark.size());
  if (!has_found) m_wants_more = true;
  return has_found;
}

CallReader::Status CallReader::read(std::string& held, bool is_last, AnswerParts& parts) {
  m_parts = &parts;
  while (true) {
    Cursor text(held, is_last);
    m_is_settled = false;
    const Step result = step(text);
    if (result == Step::stuck) {
      if (text.wants_more() && !is_last) return Status::more;
      if (m_is_in_call && !m_has_ended) end_call(false);
      return text.wants_more() ? Status::cut : Status::failed;
    }
    m_raw.append(held, 0, text.place());
    held.erase(0, text.place());
    if (m_is_settled) m_raw.clear();
    if (result == Step::done) return m_has_called ? Status::done : Status::failed;
  }
}

const nlohmann::ordered_json* CallReader::function_of(std::string_view name) const {
  for (const nlohmann::ordered_json& tool : m_format.tools) {
    const nlohmann::ordered_json& function = tool.at("function");
    if (function.at("name") == name) return &function;
  }
  return nullptr;
}

void CallReader::add(AnswerPart part) {
  m_is_settled = true;
  if (!m_is_silent) m_parts->add(std::move(part));
}

void CallReader::begin_call(std::string_view name) {
  m_is_silent = m_is_silent || (m_has_called && m_format.calls_once);
  m_has_called = true;
  m_is_in_call = true;
  m_has_ended = false;
  add({AnswerPart::Kind::call, std::string(name)});
}

void CallReader::give(std::string_view arguments) {
  if (!arguments.empty()) add({AnswerPart::Kind::arguments, std::string(arguments)});
}

void CallReader::end_call(bool is_whole) {
  m_has_ended = true;
  add({AnswerPart::Kind::call_end, {}, is_whole});
}

void CallReader::leave_call() {
  m_is_in_call = false;
  m_is_settled = true;
}

CallReader::Step CallReader::take_json(Cursor& text, std::string& target) {
  const std::string_view rest = text.rest();
  std::size_t count = 0;
  bool is_wrong = false;
  while (count < rest.size() && !m_json.is_whole()) {
    const JsonScanner::Byte byte = m_json.put(rest[count]);
    is_wrong = byte == JsonScanner::Byte::wrong;
    if (is_wrong || byte == JsonScanner::Byte::after) break;
    if (byte == JsonScanner::Byte::part) target += rest[count];
    ++count;
  }
  text.advance(count);
  if (count > 0 || m_json.is_whole()) return Step::next;
  if (!is_wrong) text.want_more();
  return Step::stuck;
}

}  // namespace kvzap::server
