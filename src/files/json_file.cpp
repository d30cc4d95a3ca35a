#include "files/json_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "files/c_locale.hpp"
#include "files/parsed_json.hpp"
#include "files/quote.hpp"
#include "files/text_file.hpp"
#include "files/web_page.hpp"

namespace kvzap::files {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Memory of values, with the overhead of the C library: blocks are multiples of 16 bytes, and 8
// bytes of each are overhead.
constexpr std::size_t value_bytes = sizeof(json);
constexpr std::size_t string_bytes = 48;
constexpr std::size_t object_bytes = 64;
constexpr std::size_t list_bytes = 32;
constexpr std::size_t member_bytes = 96;  // of an object, with its key and value
static_assert(sizeof(ordered_json::object_t::value_type) <= member_bytes);

std::size_t text_bytes(std::size_t length) { return length < 16 ? 0 : length + 32; }

// The library frees arrays through arrays that grow to three times their length. No array in a
// model's files has this many values; for longer ones the limit counts that memory, too.
std::size_t elements_bytes(std::size_t capacity) {
  constexpr std::size_t very_long = 1u << 20;
  return capacity == 0 ? 0 : 16 + capacity * value_bytes * (capacity < very_long ? 1 : 4);
}

/// "line 3, column 5 (byte 70)", all counted from 1.
std::string place_of(std::string_view text, std::size_t offset) {
  offset = std::min(offset, text.size());
  const std::string_view before = text.substr(0, offset);
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const std::size_t newline = before.rfind('\n');
  const std::size_t column = offset - (newline == std::string_view::npos ? 0 : newline + 1) + 1;
  return fmt::format("line {}, column {} (byte {})", line, column, offset + 1);
}

/// Builds the value during parsing, and stops at once if it exceeds a limit of nesting, repeated
/// keys or memory.
template <class Json>
class Builder final : public nlohmann::json_sax<Json> {
  using number_integer_t = typename Json::number_integer_t;
  using number_unsigned_t = typename Json::number_unsigned_t;
  using number_float_t = typename Json::number_float_t;
  using string_t = typename Json::string_t;
  using binary_t = typename Json::binary_t;
  using Object = typename Json::object_t;

 public:
  Builder(std::string_view text, const std::string& what) : m_text(text), m_what(what) {}

  ~Builder() override { free_json(m_root); }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  Json take() { return std::move(m_root); }

  bool null() override { return put(nullptr, 0); }
  bool boolean(bool value) override { return put(value, 0); }
  bool number_integer(number_integer_t value) override { return put(value, 0); }
  bool number_unsigned(number_unsigned_t value) override { return put(value, 0); }
  bool number_float(number_float_t value, const string_t&) override { return put(value, 0); }
  bool string(string_t& value) override {
    const std::size_t bytes = string_bytes + text_bytes(value.size());
    return put(std::move(value), bytes);
  }
  bool binary(binary_t&) override { return false; }  // never in text

  bool start_object(std::size_t) override { return open(Json::object(), object_bytes); }
  bool start_array(std::size_t) override { return open(Json::array(), list_bytes); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& key) override {
    spend(member_bytes + text_bytes(key.size()));
    auto& object = m_open.back()->template get_ref<Object&>();
    if constexpr (std::is_same_v<Json, ordered_json>) make_room(object);
    const auto [member, is_new] = object.emplace(std::move(key), nullptr);
    m_member = &member->second;
    m_keys.back() = &member->first;
    if (!is_new) {
      throw Error(fmt::format("{}: key {} is given more than once{}", m_what,
                              in_quotes(member->first), path_text()));
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while …"
    std::string_view problem = error.what();
    for (const std::string_view skipped : {"] ", ": "}) {
      const std::size_t found = problem.find(skipped);
      if (found != problem.npos) problem.remove_prefix(found + skipped.size());
    }
    throw Error(fmt::format("{}: not valid JSON: {}{}: {}", m_what,
                            place_of(m_text, position == 0 ? 0 : position - 1), path_text(),
                            shown(problem, 300)));
  }

 private:
  /// Room for one more member. The library would copy the members.
  void make_room(Object& object) {
    if (object.size() == most_ordered_members) {
      throw Error(fmt::format("{}: too many members{}: expected at most {}", m_what, path_text(),
                              most_ordered_members));
    }
    if (object.size() < object.capacity()) return;
    // Old and new members exist side by side while they move.
    const std::size_t old_capacity = object.capacity();
    const std::size_t capacity = std::max<std::size_t>(4, 2 * old_capacity);
    spend(member_bytes * capacity);
    Object grown;
    grown.reserve(capacity);
    for (auto& [key, value] : object) grown.emplace_back(key, std::move(value));
    object.swap(grown);
    m_spent -= member_bytes * old_capacity;
  }

  template <class Element>
  bool put(Element&& value, std::size_t bytes) {
    place(std::forward<Element>(value), bytes);
    return true;
  }

  /// Puts a value in its place in the document, and returns that place.
  template <class Element>
  Json* place(Element&& value, std::size_t bytes) {
    spend(bytes);
    if (m_open.empty()) {
      m_root = Json(std::forward<Element>(value));
      return &m_root;
    }
    if (m_open.back()->is_object()) {
      *m_member = Json(std::forward<Element>(value));
      return m_member;
    }
    auto& array = m_open.back()->template get_ref<typename Json::array_t&>();
    if (array.size() == array.capacity()) {
      // Old and new elements exist side by side while they move.
      const std::size_t old_capacity = array.capacity();
      const std::size_t capacity = std::max<std::size_t>(2, 2 * old_capacity);
      spend(elements_bytes(capacity));
      array.reserve(capacity);
      m_spent -= elements_bytes(old_capacity);
    }
    array.emplace_back(std::forward<Element>(value));
    return &array.back();
  }

  bool open(Json container, std::size_t bytes) {
    if (m_open.size() >= static_cast<std::size_t>(max_json_depth)) {
      constexpr std::size_t deep_path = 40;  // a path through all levels fills many lines
      throw Error(fmt::format("{}: JSON is nested too deeply{}: expected at most {} levels", m_what,
                              path_text(deep_path), max_json_depth));
    }
    m_open.push_back(place(std::move(container), bytes));
    m_keys.push_back(nullptr);
    return true;
  }

  bool close() {
    m_open.pop_back();
    m_keys.pop_back();
    return true;
  }

  void spend(std::size_t bytes) {
    m_spent += bytes;
    const std::size_t limit = json_memory_limit(m_text.size());
    if (m_spent > limit) {
      throw Error(
          fmt::format("{}: too many values{}: expected values that take at most {} MB in memory, "
                      "for {} bytes of JSON, found more",
                      m_what, path_text(), limit >> 20, m_text.size()));
    }
  }

  /// Returns " at model.merges[3]", or nothing at the top. It is cut soon after `longest` bytes.
  std::string path_text(std::size_t longest = 200) const {
    std::string path;
    for (std::size_t level = 0; level < m_open.size(); ++level) {
      if (m_open[level]->is_array()) {
        path += fmt::format("[{}]", m_open[level]->size() - (level + 1 < m_open.size() ? 1 : 0));
      } else if (m_keys[level] != nullptr) {
        if (!path.empty()) path += '.';
        path += shown(*m_keys[level], 40);
      }
      if (path.size() > longest) return " at " + path + "…";
    }
    return path.empty() ? path : " at " + path;
  }

  std::string_view m_text;
  const std::string& m_what;
  Json m_root;
  std::vector<Json*> m_open;               // open containers, outermost first
  std::vector<const std::string*> m_keys;  // the last key of each open object
  Json* m_member = nullptr;  // where the last key's value belongs, if the innermost is an object
  std::size_t m_spent = 0;
};

// Appends at least the first `longest` bytes of the value as JSON, without the memory for all of
// it.
template <class Json>
void append_dump(std::string& text, const Json& value, std::size_t longest) {
  if (!value.is_structured()) {
    text += value.is_string() ? json(shown(value.template get_ref<const std::string&>())).dump()
                              : value.dump();
    return;
  }
  text += value.is_array() ? '[' : '{';
  const char* comma = "";
  for (const auto& [key, element] : value.items()) {
    text += comma;
    if (value.is_object()) text += json(shown(key)).dump() + ":";
    append_dump(text, element, longest);
    if (text.size() > longest) return;
    comma = ",";
  }
  text += value.is_array() ? ']' : '}';
}

template <class Json>
std::string description_of(const Json& value) {
  if (value.is_string()) return in_quotes(value.template get_ref<const std::string&>());
  if (!value.is_structured()) return value.dump();
  constexpr std::size_t longest = 80;
  std::string text;
  append_dump(text, value, longest);
  return shown(text, longest);
}

// Recursion is bounded by max_json_depth. A container without elements is freed without memory.
template <class Json>
void free_values(Json& value) noexcept {
  if (value.is_array()) {
    auto& array = value.template get_ref<typename Json::array_t&>();
    for (Json& element : array) free_values(element);
    array.clear();
  } else if (value.is_object()) {
    auto& object = value.template get_ref<typename Json::object_t&>();
    for (auto& [key, member] : object) free_values(member);
    object.clear();
  }
}

template <class Json>
Json parse(std::string_view text, const std::string& what) {
  if (const auto content = content_of_download(text.substr(0, 512))) {
    throw Error(fmt::format("{}: not valid JSON: found {}", what, files::text_of(*content, "")));
  }
  // The parser takes a NUL as the end of its input.
  const std::size_t nul = text.find('\0');
  if (nul != text.npos) {
    throw Error(fmt::format("{}: not valid JSON: {}: expected text, found a NUL byte", what,
                            place_of(text, nul)));
  }
  const CLocale for_strtod;  // nlohmann's parser takes the first byte of the decimal point
  Builder<Json> builder(text, what);
  Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

}  // namespace

std::size_t json_memory_limit(std::size_t text_bytes) { return 3 * text_bytes + (38u << 20); }

void free_json(json& value) noexcept { free_values(value); }
void free_json(ordered_json& value) noexcept { free_values(value); }

json parse_json(std::string_view text, const std::string& what) { return parse<json>(text, what); }

ordered_json parse_ordered_json(std::string_view text, const std::string& what) {
  return parse<ordered_json>(text, what);
}

nlohmann::json parse_json_object(std::string_view text, const std::string& what) {
  nlohmann::json value = parse_json(text, what);
  if (!value.is_object()) {
    throw Error(fmt::format("{}: expected a JSON object, found {}", what, value.type_name()));
  }
  return value;
}

nlohmann::ordered_json parse_own_json(std::string_view text) {
  const CLocale for_strtod;
  return nlohmann::ordered_json::parse(text);
}

std::string json_text(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string json_lines(const nlohmann::ordered_json& value) {
  return value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string read_text_file(const std::filesystem::path& file, std::uintmax_t max_bytes) {
  const std::string what = file.string();
  std::error_code status;
  const auto kind = std::filesystem::status(file, status);
  if (!std::filesystem::exists(kind)) {
    const bool is_unknown = kind.type() == std::filesystem::file_type::none;
    throw Error(fmt::format("{}: {}", what, is_unknown ? status.message() : "no such file"));
  }
  if (!std::filesystem::is_regular_file(kind)) {
    throw Error(fmt::format("{}: expected a regular file, found {}", what,
                            std::filesystem::is_directory(kind) ? "a folder" : "something else"));
  }
  const std::uintmax_t bytes = std::filesystem::file_size(file, status);
  if (status) throw Error(fmt::format("{}: cannot be read: {}", what, status.message()));
  if (bytes > max_bytes) {
    throw Error(
        fmt::format("{}: too large: expected at most {} bytes, found {}", what, max_bytes, bytes));
  }
  return read_text(file, max_bytes);
}

nlohmann::json read_json_object(const std::filesystem::path& file, std::uintmax_t max_bytes) {
  const std::string text = read_text_file(file, max_bytes);
  if (const auto content = content_of(std::string_view(text).substr(0, 512))) {
    throw Error(fmt::format("{}: not valid JSON: found {}", file.string(),
                            files::text_of(*content, file.string())));
  }
  return parse_json_object(text, file.string());
}

std::string described(const json& value) { return description_of(value); }
std::string described(const ordered_json& value) { return description_of(value); }

}  // namespace kvzap::files
