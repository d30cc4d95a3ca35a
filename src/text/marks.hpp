// Marks in a text that comes in pieces.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::text {

/// The first of several marks in a text.
struct FoundMark {
  std::size_t place = std::string::npos;
  std::string mark;  // empty: there is none
};
FoundMark first_mark(std::string_view text, const std::vector<std::string>& marks);

/// Returns the length of the longest end of a text that may begin one of the marks, none of which
/// is empty.
std::size_t length_of_beginning(std::string_view text, const std::vector<std::string>& marks);

/// Gives the text up to the first of some marks. Holds back what may begin one.
class TextUntilMark {
 public:
  explicit TextUntilMark(std::vector<std::string> marks) : m_marks(std::move(marks)) {}

  /// Returns new text.
  std::string append(std::string_view text);
  /// Returns the text held back.
  std::string finish();
  bool has_found() const { return !m_found.empty(); }
  /// The mark that was found; empty: none.
  const std::string& found() const { return m_found; }

 private:
  std::string release(bool all);

  std::vector<std::string> m_marks;
  std::string m_held, m_found;
};

}  // namespace kvzap::text
