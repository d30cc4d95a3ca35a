#include "files/line_reader.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "files/json_file.hpp"
#include "files/plain_text.hpp"
#include "files/waiting.hpp"

namespace kvzap::files {

LineReader::LineReader(std::filesystem::path file, std::string_view expected,
                       std::size_t most_bytes)
    : m_file(std::move(file)),
      m_descriptor(m_file, O_RDONLY | O_CLOEXEC),
      m_most_bytes(most_bytes),
      m_block(std::size_t{1} << 16) {
  std::error_code ignored;
  if (m_descriptor.get() < 0 || std::filesystem::is_directory(m_file, ignored)) {
    throw Error(fmt::format("{}: cannot be read; expected {}", m_file.string(), expected));
  }
}

bool LineReader::fill() {
  ssize_t count = 0;
  const Waiting waiting(m_descriptor.get(), Waiting::For::input);
  do {
    count = ::read(m_descriptor.get(), m_block.data(), m_block.size());
  } while (count < 0 && errno == EINTR);
  if (count < 0) throw system_error(fmt::format("{}: reading failed", m_file.string()), errno);
  m_unread = {m_block.data(), static_cast<std::size_t>(count)};
  return count > 0;
}

bool LineReader::next() {
  if (m_unread.empty() && !fill()) return false;
  if (m_number == 0) {
    if (const auto content = content_of(m_unread)) {
      const std::string file = m_file.string();
      throw Error(
          fmt::format("{}: expected lines of UTF-8 text, found {}", file, text_of(*content, file)));
    }
  }
  m_line.clear();
  do {
    const std::size_t end = m_unread.find('\n');
    m_has_end = end != std::string_view::npos;
    m_line.append(m_unread.substr(0, end));
    if (m_line.size() > m_most_bytes) {
      throw Error(fmt::format("{}: line {}: expected at most {} bytes, found more", m_file.string(),
                              m_number + 1, m_most_bytes));
    }
    const std::size_t taken = m_has_end ? end + 1 : m_unread.size();
    m_hash = fnv1a(m_unread.substr(0, taken), m_hash);
    m_unread.remove_prefix(taken);
  } while (!m_has_end && fill());
  ++m_number;
  if (m_number == 1) drop_byte_order_mark(m_line);
  return true;
}

bool LineReader::next_text() {
  while (next()) {
    if (m_line.find_first_not_of(" \t\r\n\v\f") != std::string::npos) return true;
  }
  return false;
}

void LineReader::require_text() const {
  require_text_part(m_line, where(), m_file.string(), m_has_utf8);
  m_has_utf8 = m_has_utf8 || has_wide_characters(m_line);
}

std::string LineReader::where() const {
  return fmt::format("{}: line {}", m_file.string(), m_number);
}

nlohmann::json LineReader::object(std::string_view hint) const {
  require_text();
  try {
    return parse_json_object(m_line, where());
  } catch (const Error& error) {
    throw Error(fmt::format("{}; {}", error.what(), hint));
  }
}

}  // namespace kvzap::files
