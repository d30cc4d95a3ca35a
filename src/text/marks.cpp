#include "text/marks.hpp"

#include <algorithm>

namespace kvzap::text {

FoundMark first_mark(std::string_view text, const std::vector<std::string>& marks) {
  FoundMark first;
  for (const std::string& mark : marks) {
    const std::size_t place = text.find(mark);
    if (place < first.place) first = {place, mark};
  }
  return first;
}

std::size_t length_of_beginning(std::string_view text, const std::vector<std::string>& marks) {
  std::size_t longest = 0;
  for (const std::string& mark : marks) {
    for (std::size_t count = std::min(mark.size() - 1, text.size()); count > longest; --count) {
      if (text.substr(text.size() - count) == mark.substr(0, count)) longest = count;
    }
  }
  return longest;
}

std::string TextUntilMark::append(std::string_view text) {
  if (has_found()) return {};
  m_held += text;
  return release(false);
}

std::string TextUntilMark::finish() { return has_found() ? std::string() : release(true); }

std::string TextUntilMark::release(bool all) {
  const FoundMark end = first_mark(m_held, m_marks);
  m_found = end.mark;
  if (has_found()) return m_held.substr(0, end.place);
  const std::size_t kept = all ? 0 : length_of_beginning(m_held, m_marks);
  std::string given = m_held.substr(0, m_held.size() - kept);
  m_held.erase(0, given.size());
  return given;
}

}  // namespace kvzap::text
