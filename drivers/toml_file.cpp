#include "toml_file.hpp"

#include <fmt/format.h>
// What toml++ asserts does not always hold ("[a" and a control character), and is then an error a
// few lines on: where it is compiled here, from headers alone, a deck must not end the program.
// (NDEBUG would make its assertions assumptions instead.)
#define TOML_ASSERT(expr) static_assert(true)
#include <toml++/toml.h>

#include <stdexcept>

#include "base/quote.hpp"

namespace kvzap::driver {
namespace {

std::optional<std::string> text_of(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  if (const auto* integer = node.as_integer()) return fmt::format("{}", integer->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  return std::nullopt;
}

}  // namespace

std::vector<TomlEntry> read_toml(const std::string& file) {
  toml::table table;
  try {
    table = toml::parse_file(file);
  } catch (const toml::parse_error& error) {
    const auto line = error.source().begin.line;  // 0 if the file could not even be read
    throw std::runtime_error(fmt::format("{}{}: {}", file, line > 0 ? fmt::format(":{}", line) : "",
                                         kvzap::detail::shown(error.description(), 300)));
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

}  // namespace kvzap::driver
