#include "console/typed_input.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <system_error>

#include "console/signals.hpp"

namespace kvzap::driver {
namespace {

constexpr char escape = '\x1b';
constexpr std::string_view paste_begin = "\x1b[200~", paste_end = "\x1b[201~";

bool is_between(char c, char low, char high) { return c >= low && c <= high; }
bool is_control(char c) { return is_between(c, '\0', '\x1f') || c == '\x7f'; }

/// Returns the length of the escape sequence at the beginning of `text` (ECMA-35 and ECMA-48), or 0
/// if more bytes are needed. A control character ends an incomplete sequence, of which it is no
/// part: otherwise a single Esc key could hide a line's end.
std::size_t escape_length(std::string_view text) {
  std::size_t end = 1;
  const auto is_cut = [&] { return end < text.size() && is_control(text[end]); };
  const auto skip = [&](char low, char high) {
    while (end < text.size() && is_between(text[end], low, high)) ++end;
  };
  const auto with_last = [&]() -> std::size_t {
    if (end >= text.size()) return 0;
    return is_cut() ? end : end + 1;
  };
  if (end >= text.size()) return 0;
  const char kind = text[end];
  if (is_control(kind)) return end;
  if (kind == '[') {  // control sequence: parameters, intermediates, a final character
    ++end;
    // The console of Linux sends "[A" to "[E" after it for the keys F1 to F5.
    if (end < text.size() && text[end] == '[') {
      ++end;
      return with_last();
    }
    skip('\x30', '\x3f');
    skip('\x20', '\x2f');
    return with_last();
  }
  if (kind == 'O' || kind == 'N') {  // single shift
    ++end;
    skip('0', '9');  // some terminals put a modifier here
    return with_last();
  }
  if (std::string_view("]P_^X").find(kind) != std::string_view::npos) {  // string of a reply
    for (++end; end < text.size(); ++end) {
      if (text[end] == '\a') return end + 1;
      if (text[end] == escape)
        return end + 1 < text.size() && text[end + 1] == '\\' ? end + 2 : end;
      if (is_cut()) return end;
    }
    return 0;
  }
  skip('\x20', '\x2f');
  return with_last();
}

/// Returns pasted text as a message can have it: see InputSplitter::Part.
std::string clean_paste(std::string_view pasted) {
  std::string text;
  while (!pasted.empty()) {
    const char c = pasted.front();
    std::size_t length = 1;
    if (c == escape) {
      length = std::max<std::size_t>(1, escape_length(pasted));
    } else if (c == '\r') {  // terminals send it for a line's end
      text += '\n';
      if (pasted.size() > 1 && pasted[1] == '\n') length = 2;
    } else if (!is_control(c) || c == '\n' || c == '\t') {
      text += c;
    }
    pasted.remove_prefix(length);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// Limit on a message: more than any model's context holds.
constexpr std::size_t most_message_bytes = std::size_t{64} << 20;

/// Whether a read that ended, or failed with `error`, shows that the terminal was closed.
bool has_hung_up(int descriptor, int error) {
  if (isatty(descriptor) != 0) return error == EIO;
  return errno == EIO;  // of a terminal that is gone; other files are no terminals
}

}  // namespace

void check_message_size(std::size_t bytes) {
  if (bytes <= most_message_bytes) return;
  throw Error(fmt::format("standard input: a message has more than {} bytes", most_message_bytes));
}

InputEnd read_more(int descriptor, std::string& bytes, const std::function<void()>& on_wake) {
  while (true) {
    if (caught_signal != 0) return InputEnd::signal;
    if (on_wake) on_wake();
    // poll ends at a signal, and after this time, because a signal may arrive just before it.
    constexpr int patience = 200;  // milliseconds
    pollfd input = {descriptor, POLLIN, 0};
    const int ready = poll(&input, 1, patience);
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    std::array<char, 1 << 16> buffer = {};
    const ssize_t count = ready < 0 ? -1 : ::read(descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    const int error = count < 0 ? errno : 0;
    // A closed terminal may be noticed before its signal arrives, which must find its handler.
    if (count <= 0 && has_hung_up(descriptor, error)) {
      constexpr int most_waits = 1000;  // milliseconds
      for (int i = 0; i < most_waits && caught_signal == 0; ++i) poll(nullptr, 0, 1);
      if (caught_signal == 0) caught_signal = SIGHUP;
      return InputEnd::signal;
    }
    if (count < 0) {
      throw Error(fmt::format("standard input: cannot be read: {}",
                              std::generic_category().message(error)));
    }
    bytes.append(buffer.data(), static_cast<std::size_t>(count));
    return count == 0 ? InputEnd::end : InputEnd::input;
  }
}

void InputSplitter::add(std::string_view bytes) {
  m_bytes.erase(0, std::exchange(m_begin, 0));
  m_bytes += bytes;
}

std::optional<InputSplitter::Part> InputSplitter::next_paste() {
  const std::string_view rest = std::string_view(m_bytes).substr(m_begin);
  const std::size_t end = rest.find(paste_end, m_searched);
  if (end == std::string_view::npos && !m_is_finished) {
    m_searched = rest.size() - std::min(rest.size(), paste_end.size() - 1);
    return std::nullopt;
  }
  Part part{Part::Kind::paste, clean_paste(rest.substr(0, end))};
  skip(end == std::string_view::npos ? rest.size() : end + paste_end.size());
  m_in_paste = false;
  return part;
}

std::optional<InputSplitter::Part> InputSplitter::next() {
  while (true) {
    if (m_in_paste) return next_paste();
    const std::string_view rest = std::string_view(m_bytes).substr(m_begin);
    if (rest.empty()) return std::nullopt;
    if (rest.front() != escape) {
      const std::size_t stop = rest.find_first_of("\n\x1b");
      const bool has_newline = stop != std::string_view::npos && rest[stop] == '\n';
      Part part{Part::Kind::text, std::string(rest.substr(0, has_newline ? stop + 1 : stop))};
      skip(part.bytes.size());
      return part;
    }
    const std::size_t length = escape_length(rest);
    if (length == 0) {
      if (m_is_finished) skip(rest.size());
      return std::nullopt;
    }
    Part part{Part::Kind::escape, std::string(rest.substr(0, length))};
    skip(length);
    if (part.bytes == paste_end) continue;
    if (part.bytes != paste_begin) return part;
    m_in_paste = true;
    m_searched = 0;
  }
}

}  // namespace kvzap::driver
