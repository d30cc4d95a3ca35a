#include "options/toml_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
// toml++'s assertions can fail on invalid input ("[a" and a control character) that it reports as
// an error a few lines later. Where toml++ is compiled here, as a header-only library, a deck must
// not end the program. (NDEBUG would turn its assertions into assumptions.)
#define TOML_ASSERT(expr) static_assert(true)
#include <toml++/toml.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "files/plain_text.hpp"
#include "files/quote.hpp"

namespace kvzap::driver {
namespace {

std::optional<std::string> text_of(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  if (const auto* integer = node.as_integer()) return fmt::format("{}", integer->get());
  if (const auto* number = node.as_floating_point()) {
    // A whole number keeps its point: --read-pages 1.0 is not 1.
    const std::string text = fmt::format("{}", number->get());
    return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
  }
  return std::nullopt;
}

/// Larger than any prompt in a deck. The limit on values is low, because toml++ makes large objects
/// of them.
constexpr std::size_t most_bytes = std::size_t{16} << 20;
constexpr int most_values = 100'000;

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw std::runtime_error(file + ": " + what);
}

/// Returns all bytes of a regular file or a pipe.
std::string read_bytes(const std::string& file) {
  const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    fail(file, "cannot be opened: " + std::generic_category().message(errno));
  }
  struct Closes {
    int descriptor;
    ~Closes() { close(descriptor); }
  } const closes{descriptor};
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !(S_ISREG(status.st_mode) || S_ISFIFO(status.st_mode))) {
    fail(file,
         S_ISDIR(status.st_mode) ? "is a folder; expected a file" : "is neither a file nor a pipe");
  }
  std::string text;
  std::vector<char> block(std::size_t{64} << 10);
  for (;;) {
    const ssize_t count = read(descriptor, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(file, "reading failed: " + std::generic_category().message(errno));
    if (count == 0) return text;
    text.append(block.data(), count);
    if (text.size() > most_bytes) {
      fail(file, fmt::format("is too large for a deck; expected at most {} bytes", most_bytes));
    }
  }
}

/// Throws std::runtime_error if brackets or dotted names are nested deeper than in any deck. toml++
/// makes a table for each level and frees them by recursion, which could exhaust the stack. Skips
/// strings and comments by TOML's rules.
void check_nesting(std::string_view text, const std::string& file) {
  constexpr int most_levels = 16;
  int line = 1, brackets = 0, dots = 0, values = 0;
  const auto enter = [&](int& levels) {
    if (++levels <= most_levels) return;
    throw std::runtime_error(fmt::format("{}:{}: nested too deeply; expected at most {} levels",
                                         file, line, most_levels));
  };
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '\n') ++line;
    if (c == '[' || c == '{' || c == ',' || c == '=') {
      if (++values > most_values) {
        fail(file, fmt::format("is too large for a deck; expected at most {} values", most_values));
      }
    }
    switch (c) {
      case '#':
        at = std::min(text.find('\n', at), text.size()) - 1;
        break;
      case '"':
      case '\'': {
        const bool is_long = text.substr(at, 3) == std::string(3, c);
        for (at += is_long ? 3 : 1; at < text.size(); ++at) {
          if (text[at] == '\n') ++line;
          if (text[at] == '\n' && !is_long) break;  // toml++ reports the error
          if (text[at] == '\\' && c == '"') {
            ++at;
            if (at < text.size() && text[at] == '\n') ++line;
          } else if (text[at] == c && (!is_long || text.substr(at, 3) == std::string(3, c))) {
            if (is_long) at += 2;
            // Up to two more quotes belong to the text.
            for (int more = 0; is_long && more < 2 && at + 1 < text.size() && text[at + 1] == c;
                 ++more)
              ++at;
            break;
          }
        }
        break;
      }
      case '[':
      case '{':
        enter(brackets);
        dots = 0;
        break;
      case ']':
      case '}':
        brackets = std::max(0, brackets - 1);
        break;
      case '.':
        enter(dots);
        break;
      case '=':
      case ',':
      case '\n':
        dots = 0;
        break;
      default:
        break;
    }
  }
}

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& file) {
  check_nesting(text, file);
  toml::table table;
  try {
    table = toml::parse(text, file);
  } catch (const toml::parse_error& error) {
    throw std::runtime_error(fmt::format("{}:{}: {}", file, error.source().begin.line,
                                         kvzap::files::shown(error.description(), 300)));
  }
  std::vector<TomlEntry> entries;
  for (const auto& [key, node] : table) {
    TomlEntry entry;
    entry.key = key.str();
    entry.line = node.source().begin.line;
    entry.is_flag = node.is_boolean();
    if (const auto* list = node.as_array()) {
      entry.is_list = true;
      for (const auto& item : *list) entry.values.push_back(text_of(item));
    } else {
      entry.values.push_back(text_of(node));
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::vector<TomlEntry> read_toml(const std::string& file) {
  const std::string text = read_bytes(file);
  kvzap::files::require_text(text, file, file);
  return parse_toml(text, file);
}

}  // namespace kvzap::driver
