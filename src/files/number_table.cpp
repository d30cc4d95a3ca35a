#include "files/number_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <string_view>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "files/text_file.hpp"

namespace kvzap::files {
namespace {

constexpr std::uintmax_t most_table_bytes = 64u << 20;
constexpr std::size_t most_table_dimensions = 3;
constexpr std::string_view npy_magic = "\x93NUMPY";

template <class Value>
double read_as(const char* data) {
  Value value;
  std::memcpy(&value, data, sizeof(value));
  return static_cast<double>(value);
}

/// A type of values in .npy files.
struct NpyType {
  std::string_view descr;
  std::size_t bytes;
  double (*read)(const char* data);
};
constexpr NpyType npy_types[] = {
    {"'<f2'", 2, read_as<half>},          {"'<f4'", 4, read_as<float>},
    {"'<f8'", 8, read_as<double>},        {"'|i1'", 1, read_as<std::int8_t>},
    {"'<i2'", 2, read_as<std::int16_t>},  {"'<i4'", 4, read_as<std::int32_t>},
    {"'<i8'", 8, read_as<std::int64_t>},  {"'|u1'", 1, read_as<std::uint8_t>},
    {"'<u2'", 2, read_as<std::uint16_t>}, {"'<u4'", 4, read_as<std::uint32_t>},
    {"'<u8'", 8, read_as<std::uint64_t>}, {"'|b1'", 1, read_as<std::uint8_t>}};

/// The first bytes of a .npy file: a Python dict of its type, order and shape.
struct NpyHeader {
  std::string where;  // for messages
  std::string_view dict;

  /// Returns the text after 'key':.
  std::string_view value(std::string_view key) const {
    const std::string quoted = fmt::format("'{}':", key);
    const std::size_t at = dict.find(quoted);
    if (at == std::string_view::npos) {
      throw_unexpected(where, fmt::format("the field '{}' in the header", key), shown(dict));
    }
    std::string_view rest = dict.substr(at + quoted.size());
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    return rest;
  }

  const NpyType& type() const {
    const std::string_view descr = value("descr");
    for (const NpyType& type : npy_types) {
      if (descr.substr(0, type.descr.size()) == type.descr) return type;
    }
    throw_unexpected(where + ": descr", "little-endian floats or whole numbers, such as '<f4'",
                     shown(descr.substr(0, descr.find(','))));
  }

  bool is_fortran_order() const {
    const std::string_view order = value("fortran_order");
    const bool is_true = order.substr(0, 4) == "True";
    if (!is_true && order.substr(0, 5) != "False") {
      throw_unexpected(where + ": fortran_order", "True or False",
                       shown(order.substr(0, order.find(','))));
    }
    return is_true;
  }

  std::vector<std::int64_t> shape() const {
    const std::string_view text = value("shape");
    const std::size_t close = text.find(')');
    const std::string_view found = text.substr(0, close == text.npos ? close : close + 1);
    const auto fail = [&] {
      throw_unexpected(where + ": shape", "1 to 3 positive whole numbers in parentheses",
                       shown(found));
    };
    if (close == text.npos || text.front() != '(') fail();
    std::vector<std::int64_t> result;
    const char* at = text.data() + 1;
    const char* const end = text.data() + close;
    while (at != end) {
      if (*at == ' ' || (*at == ',' && !result.empty())) {
        ++at;
        continue;
      }
      std::int64_t size = 0;
      const auto [used, error] = std::from_chars(at, end, size);
      if (error != std::errc() || size < 1 || result.size() == most_table_dimensions ||
          size > static_cast<std::int64_t>(most_table_bytes)) {
        fail();
      }
      result.push_back(size);
      at = used;
    }
    if (result.empty()) fail();
    return result;
  }
};

/// Returns the place of the C-ordered index `index` in an array in Fortran's order.
std::size_t fortran_place(std::size_t index, const std::vector<std::int64_t>& shape) {
  std::size_t place = 0;
  for (std::size_t d = shape.size(); d-- > 0;) {
    const auto size = static_cast<std::size_t>(shape[d]);
    std::size_t stride = 1;
    for (std::size_t before = 0; before < d; ++before) {
      stride *= static_cast<std::size_t>(shape[before]);
    }
    place += index % size * stride;
    index /= size;
  }
  return place;
}

NumberTable read_npy(std::string_view content, const std::string& where) {
  constexpr std::size_t version_at = npy_magic.size();
  constexpr std::size_t length_at = version_at + 2;
  const std::size_t length_bytes =
      content.size() > version_at && content[version_at] == 1 ? 2 : 4;  // 4 since version 2
  if (content.size() < length_at + length_bytes || content[version_at] < 1 ||
      content[version_at] > 3) {
    throw_unexpected(where, "a .npy file of version 1 to 3", "another version, or its end");
  }
  std::size_t length = 0;
  for (std::size_t i = length_bytes; i-- > 0;) {
    length = length * 256 + static_cast<unsigned char>(content[length_at + i]);
  }
  const std::size_t data_at = length_at + length_bytes + length;
  if (data_at > content.size()) {
    throw_unexpected(where, fmt::format("a header of {} bytes", length), "the end of the file");
  }
  const NpyHeader header{where, content.substr(length_at + length_bytes, length)};
  const NpyType& type = header.type();
  const bool is_fortran = header.is_fortran_order();
  NumberTable table;
  table.shape = header.shape();
  std::size_t count = 1;
  for (const std::int64_t size : table.shape) {
    count *= static_cast<std::size_t>(size);  // each is at most 2^26, so no two overflow
    if (count > most_table_bytes) break;
  }
  const std::string_view data = content.substr(data_at);
  if (data.size() != count * type.bytes) {
    throw_unexpected(where + ": data",
                     fmt::format("the bytes of {} values of {} bytes each",
                                 text_of_shape(table.shape), type.bytes),
                     fmt::format("{} bytes", data.size()));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t place = is_fortran ? fortran_place(i, table.shape) : i;
    table.values.push_back(type.read(data.data() + place * type.bytes));
  }
  return table;
}

/// Appends the numbers of `field`, which is `depth` lists deep.
void append_numbers(const JsonField& field, std::size_t depth, NumberTable& table) {
  if (!field.value().is_array()) {
    if (depth != table.shape.size() || depth == 0) field.fail("a list");
    table.values.push_back(field.number());
    return;
  }
  const auto size = static_cast<std::int64_t>(field.array_size());
  const bool is_first = table.values.empty() && depth == table.shape.size();
  if (depth == most_table_dimensions) field.fail("a number: lists are nested up to 3 deep");
  if (is_first) table.shape.push_back(size);
  if (depth == table.shape.size()) field.fail("a number");
  if (size == 0 || size != table.shape[depth]) {
    throw_unexpected(
        field.where(),
        size == 0 ? "1 or more elements" : fmt::format("{} elements", table.shape[depth]),
        fmt::format("{}", size));
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(size); ++i) {
    append_numbers(field.element(i), depth + 1, table);
  }
}

}  // namespace

std::string text_of_shape(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += fmt::format("{}{}", text.empty() ? "" : ", ", size);
  return fmt::format("({}{})", text, shape.size() == 1 ? "," : "");
}

NumberTable read_number_table(const std::filesystem::path& file) {
  const std::string content = read_text(file, most_table_bytes);
  const std::string where = file.string();
  if (content.compare(0, npy_magic.size(), npy_magic) == 0) return read_npy(content, where);
  const nlohmann::json value = parse_json(content, where);
  NumberTable table;
  append_numbers(JsonField(value, where), 0, table);
  return table;
}

}  // namespace kvzap::files
