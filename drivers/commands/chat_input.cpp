#include "commands/chat_input.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <kvzap/core/types.hpp>

#include "console/signals.hpp"

namespace kvzap::driver {
namespace {

constexpr std::string_view quotes = "\"\"\"";

// Limit on a message: more than any model's context holds.
constexpr std::size_t most_bytes = std::size_t{64} << 20;

void check_length(std::size_t bytes) {
  if (bytes > most_bytes) {
    throw Error(fmt::format("standard input: a message has more than {} bytes", most_bytes));
  }
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

bool LineReader::take(std::string& line) {
  const std::size_t end = m_rest.find('\n');
  if (end == std::string::npos && (!m_ended || m_rest.empty())) return false;
  line = m_rest.substr(0, end);
  m_rest.erase(0, end == std::string::npos ? end : end + 1);
  if (ends_with(line, "\r")) line.pop_back();
  return true;
}

LineReader::Outcome LineReader::read(std::string& line) {
  while (true) {
    if (caught_signal != 0) return Outcome::signal;
    if (take(line)) return Outcome::line;
    if (m_ended) return Outcome::end;
    // poll ends at a signal, and after this time, because a signal may arrive just before it.
    constexpr int patience = 200;  // milliseconds
    pollfd input = {m_descriptor, POLLIN, 0};
    const int ready = poll(&input, 1, patience);
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    std::array<char, 1 << 16> buffer = {};
    const ssize_t count = ready < 0 ? -1 : ::read(m_descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw Error(fmt::format("standard input: cannot be read: {}", std::strerror(errno)));
    }
    if (count == 0) m_ended = true;
    m_rest.append(buffer.data(), static_cast<std::size_t>(count));
    check_length(m_rest.size());
  }
}

std::optional<std::string> MessageBuilder::add(std::string_view line) {
  if (!m_open) {
    m_text.clear();
    m_quoted = line.substr(0, quotes.size()) == quotes;
    if (m_quoted) line.remove_prefix(quotes.size());
    m_open = true;
  } else if (m_quoted) {
    m_text += '\n';
  }
  if (m_quoted) {
    m_open = !ends_with(line, quotes);
    if (!m_open) line.remove_suffix(quotes.size());
    m_text += line;
  } else {
    m_open = ends_with(line, "\\");
    if (m_open) line.remove_suffix(1);
    m_text += line;
    if (m_open) m_text += '\n';
  }
  check_length(m_text.size());
  if (m_open) return std::nullopt;
  return m_text;
}

std::string MessageBuilder::finish() {
  if (!m_open) return "";
  m_open = false;
  return m_text;
}

}  // namespace kvzap::driver
