#include "gguf/gguf_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "files/json_field.hpp"
#include "files/quote.hpp"
#include "files/web_page.hpp"

namespace kvzap::gguf {

namespace fs = std::filesystem;

namespace {

constexpr std::uint32_t magic = 0x46554747;  // "GGUF"
constexpr std::uint32_t oldest_version = 2;
constexpr std::uint32_t newest_version = 3;
constexpr std::uint64_t max_metadata = 65536;
constexpr std::uint64_t max_tensors = 262144;
constexpr std::uint64_t max_key_bytes = 65535;
constexpr std::uint64_t max_name_bytes = 255;
constexpr std::uint32_t max_dimensions = 4;
constexpr std::int64_t default_alignment = 32;
constexpr std::int64_t max_alignment = 1 << 20;
constexpr std::int64_t max_parts = 99999;  // five digits

using files::throw_unexpected;

/// Reads a mapped file front to back. Every reader checks that the bytes are there.
class Reader {
 public:
  Reader(const files::MappedFile& mapped, const std::string& file)
      : m_mapped(mapped), m_file(file) {}

  std::uint64_t position() const { return m_position; }
  std::uint64_t left() const { return m_mapped.size() - m_position; }
  const std::byte* here() const { return m_mapped.data() + m_position; }

  template <class T>
  T number(const std::string& what) {
    T value;
    std::memcpy(&value, skip(sizeof(T), what), sizeof(T));
    return value;
  }

  /// Skips `bytes` and returns the first of them.
  const std::byte* skip(std::uint64_t bytes, const std::string& what) {
    if (bytes > left()) {
      throw Error(
          fmt::format("{}: the file is truncated: {} at byte {}: expected {} bytes, found {}; "
                      "download or copy it again",
                      m_file, what, m_position, bytes, left()));
    }
    const std::byte* const first = here();
    m_position += bytes;
    return first;
  }

  std::string_view string(const std::string& what, std::uint64_t most) {
    const auto length = number<std::uint64_t>(what);
    if (length > most) {
      throw_unexpected(fmt::format("{}: {}", m_file, what),
                       fmt::format("a string of at most {} bytes", most),
                       fmt::format("{}", length));
    }
    return {reinterpret_cast<const char*>(skip(length, what)), static_cast<std::size_t>(length)};
  }

  [[noreturn]] void fail_magic(std::uint32_t found) const {
    constexpr std::size_t enough = 512;
    const auto content = files::content_of_download(
        {reinterpret_cast<const char*>(m_mapped.data()), std::min(enough, m_mapped.size())});
    fail("not a GGUF file", "\"GGUF\" at its beginning",
         content ? files::text_of(*content, m_file) : fmt::format("{:#010x}", found));
  }

  [[noreturn]] void fail(const std::string& what, std::string_view expected,
                         std::string_view found) const {
    throw_unexpected(fmt::format("{}: {}", m_file, what), expected, found);
  }

 private:
  const files::MappedFile& m_mapped;
  const std::string& m_file;
  std::uint64_t m_position = 0;
};

struct Header {
  std::uint64_t tensors;
  std::uint64_t metadata;
};

Header read_header(Reader& reader) {
  const auto found = reader.number<std::uint32_t>("the header");
  if (found != magic) reader.fail_magic(found);
  const auto version = reader.number<std::uint32_t>("the header");
  if (version != 0 && (version & 0xffffu) == 0) {
    reader.fail("byte order", "little-endian numbers", "a big-endian file; convert it first");
  }
  if (version < oldest_version || version > newest_version) {
    reader.fail("version", fmt::format("{} or {}", oldest_version, newest_version),
                fmt::format("{}", version));
  }
  const auto tensors = reader.number<std::uint64_t>("the header");
  const auto metadata = reader.number<std::uint64_t>("the header");
  if (tensors > max_tensors) {
    reader.fail("number of tensors", fmt::format("at most {}", max_tensors),
                fmt::format("{}", tensors));
  }
  if (metadata > max_metadata) {
    reader.fail("number of metadata values", fmt::format("at most {}", max_metadata),
                fmt::format("{}", metadata));
  }
  return {tensors, metadata};
}

ValueType read_type(Reader& reader, const std::string& what) {
  const auto number = reader.number<std::uint32_t>(what);
  if (number >= value_types) {
    reader.fail(what, fmt::format("a type from 0 to {}", value_types - 1),
                fmt::format("{}", number));
  }
  return static_cast<ValueType>(number);
}

void skip_values(Reader& reader, const MetadataValue& value, ValueType type,
                 const std::string& what) {
  if (type != ValueType::string) {
    const std::uint64_t bytes = bytes_of(type);
    if (value.type == ValueType::array && value.count > reader.left() / bytes) {
      reader.fail(
          what, fmt::format("at most {} values before the end of the file", reader.left() / bytes),
          fmt::format("{}", value.count));
    }
    reader.skip(value.count * bytes, what);
    return;
  }
  constexpr std::uint64_t length_bytes = 8;
  if (value.count > reader.left() / length_bytes) {
    reader.fail(
        what,
        fmt::format("at most {} strings before the end of the file", reader.left() / length_bytes),
        fmt::format("{}", value.count));
  }
  for (std::uint64_t i = 0; i < value.count; ++i) {
    reader.string(what, std::numeric_limits<std::uint64_t>::max());
  }
}

MetadataValue read_value(Reader& reader, const std::string& what) {
  MetadataValue value;
  value.type = read_type(reader, what);
  if (value.type == ValueType::array) {
    value.element = read_type(reader, what);
    if (value.element == ValueType::array) {
      reader.fail(what, "an array of numbers or strings", "an array of arrays");
    }
    value.count = reader.number<std::uint64_t>(what);
  }
  value.data = reader.here();
  skip_values(reader, value, value.type == ValueType::array ? value.element : value.type, what);
  return value;
}

Metadata read_metadata(Reader& reader, std::uint64_t count, const std::string& file) {
  Metadata metadata(file);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string_view key =
        reader.string(fmt::format("key {} of the metadata", i), max_key_bytes);
    if (key.empty() || !files::is_utf8(key)) {
      reader.fail(fmt::format("key {} of the metadata", i), "a text in UTF-8, not empty",
                  files::in_quotes(key));
    }
    const std::string what = files::shown(key, 200);
    if (!metadata.insert(key, read_value(reader, what))) {
      reader.fail(what, "each key once", "a second value");
    }
  }
  return metadata;
}

/// A tensor's entry, and its offset from the first tensor's data.
struct ReadTensor {
  TensorEntry entry;
  std::uint64_t offset;
};

void read_shape(Reader& reader, const std::string& what, TensorEntry& tensor) {
  const auto dimensions = reader.number<std::uint32_t>(what);
  if (dimensions < 1 || dimensions > max_dimensions) {
    reader.fail(what, fmt::format("1 to {} dimensions", max_dimensions),
                fmt::format("{}", dimensions));
  }
  std::int64_t count = 1;
  for (std::uint32_t i = 0; i < dimensions; ++i) {
    const auto extent = reader.number<std::uint64_t>(what);
    if (extent < 1 ||
        extent > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      reader.fail(what,
                  fmt::format("an extent from 1 to {}", std::numeric_limits<std::int64_t>::max()),
                  fmt::format("{}", extent));
    }
    if (__builtin_mul_overflow(count, static_cast<std::int64_t>(extent), &count)) {
      reader.fail(what, "a number of values that fits 64 bits", "more");
    }
    tensor.shape.push_back(static_cast<std::int64_t>(extent));
  }
  std::reverse(tensor.shape.begin(), tensor.shape.end());
}

void set_bytes(const Reader& reader, const std::string& what, TensorEntry& tensor) {
  const BlockFormat& format = *tensor.format;
  if (tensor.shape.back() % format.values != 0) {
    reader.fail(
        what,
        fmt::format("rows of whole blocks of {} values of type {}", format.values, format.name),
        fmt::format("{} values a row", tensor.shape.back()));
  }
  std::int64_t bytes = format.bytes;
  std::int64_t blocks = tensor.shape.back() / format.values;
  for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) blocks *= tensor.shape[i];
  if (__builtin_mul_overflow(bytes, blocks, &bytes)) {
    reader.fail(what, "a number of bytes that fits 64 bits", "more");
  }
  tensor.bytes = static_cast<std::size_t>(bytes);
}

ReadTensor read_tensor(Reader& reader, std::uint64_t index, std::int64_t alignment) {
  ReadTensor tensor{};
  const std::string place = fmt::format("name of tensor {}", index);
  const std::string_view name = reader.string(place, max_name_bytes);
  if (name.empty() || !files::is_utf8(name)) {
    reader.fail(place, "a text in UTF-8, not empty", files::in_quotes(name));
  }
  const std::string what = "tensor " + files::in_quotes(name, max_name_bytes);
  tensor.entry.name = name;
  read_shape(reader, what, tensor.entry);
  tensor.entry.type = reader.number<std::uint32_t>(what);
  tensor.entry.format = find_block_format(tensor.entry.type);
  if (tensor.entry.format != nullptr) set_bytes(reader, what, tensor.entry);
  tensor.offset = reader.number<std::uint64_t>(what);
  if (tensor.offset % static_cast<std::uint64_t>(alignment) != 0) {
    reader.fail(what, fmt::format("an offset that is a multiple of {}", alignment),
                fmt::format("{}", tensor.offset));
  }
  return tensor;
}

/// Checks that the tensors lie in the `bytes` of the data, apart from one another.
void check_ranges(const Reader& reader, const std::vector<ReadTensor>& tensors,
                  std::uint64_t bytes) {
  std::vector<const ReadTensor*> order;
  order.reserve(tensors.size());
  for (const ReadTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const ReadTensor* a, const ReadTensor* b) {
    return std::pair(a->offset, a->entry.bytes) < std::pair(b->offset, b->entry.bytes);
  });
  std::uint64_t covered = 0;
  for (const ReadTensor* tensor : order) {
    const std::string what = "tensor " + files::in_quotes(tensor->entry.name, max_name_bytes);
    if (tensor->offset > bytes || tensor->entry.bytes > bytes - tensor->offset) {
      reader.fail(
          what,
          fmt::format("{} bytes at offset {} of the data", tensor->entry.bytes, tensor->offset),
          fmt::format("a file that ends after {} bytes of data: download or copy it again", bytes));
    }
    if (tensor->offset < covered) {
      reader.fail(what,
                  fmt::format("an offset of at least {}, where the tensor before it ends", covered),
                  fmt::format("{}", tensor->offset));
    }
    covered = tensor->offset + tensor->entry.bytes;
  }
}

struct PartName {
  std::string stem;  // with the folder, up to "-00001-of-00003.gguf"
  std::int64_t index = 0;
  std::int64_t count = 0;
};

/// Returns the parts of STEM-00001-of-00003.gguf; nothing for other names.
std::optional<PartName> part_name(const fs::path& file) {
  constexpr std::string_view shape = "-00000-of-00000.gguf";
  const std::string text = file.string();
  if (text.size() < shape.size()) return std::nullopt;
  const std::string end = text.substr(text.size() - shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const bool matches = shape[i] == '0' ? end[i] >= '0' && end[i] <= '9' : end[i] == shape[i];
    if (!matches) return std::nullopt;
  }
  const auto number = [&](std::size_t begin) { return std::stoll(end.substr(begin, 5)); };
  const PartName name{text.substr(0, text.size() - shape.size()), number(1), number(10)};
  const bool is_part = name.index >= 1 && name.index <= name.count;
  return is_part ? std::optional(name) : std::nullopt;
}

fs::path path_of_part(const PartName& name, std::int64_t index) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", name.stem, index, name.count);
}

constexpr const char* split_count_key = "split.count";

}  // namespace

std::string type_name(const TensorEntry& tensor) {
  return tensor.format != nullptr ? std::string(tensor.format->name)
                                  : fmt::format("number {}", tensor.type);
}

std::vector<fs::path> parts_of(const fs::path& file) {
  const auto name = part_name(file);
  if (!name) return {file};
  std::vector<fs::path> parts;
  for (std::int64_t i = 1; i <= name->count; ++i) parts.push_back(path_of_part(*name, i));
  return parts;
}

Metadata GgufFile::read_part(const fs::path& file) {
  m_names.push_back(std::make_unique<std::string>(file.string()));
  const std::string& name = *m_names.back();
  const files::MappedFile& mapped = m_files.emplace_back(file);
  Reader reader(mapped, name);
  const Header header = read_header(reader);
  Metadata metadata = read_metadata(reader, header.metadata, name);
  const std::int64_t alignment =
      metadata.find_integer("general.alignment", 8, max_alignment).value_or(default_alignment);
  if ((alignment & (alignment - 1)) != 0) {
    metadata.fail("general.alignment", "a power of two", fmt::format("{}", alignment));
  }
  std::vector<ReadTensor> tensors;
  for (std::uint64_t i = 0; i < header.tensors; ++i) {
    tensors.push_back(read_tensor(reader, i, alignment));
  }
  if (tensors.empty()) return metadata;
  // The data begins at the next multiple of the alignment.
  const auto step = static_cast<std::uint64_t>(alignment);
  reader.skip((step - reader.position() % step) % step, "the padding before the tensors");
  check_ranges(reader, tensors, reader.left());
  for (ReadTensor& tensor : tensors) {
    tensor.entry.file = &name;
    tensor.entry.data = reader.here() + tensor.offset;
    const auto [known, is_new] = m_tensors.emplace(tensor.entry.name, std::move(tensor.entry));
    if (is_new) continue;
    reader.fail("tensor " + files::in_quotes(known->first, max_name_bytes), "each name once",
                known->second.file == &name ? std::string("a second tensor")
                                            : "one in " + *known->second.file);
  }
  return metadata;
}

void GgufFile::read_other_parts(const fs::path& file) {
  const auto name = part_name(file);
  const std::int64_t named = name ? name->count : 1;
  const auto found = m_metadata.find_integer(split_count_key, 0, max_parts);
  const std::int64_t count = std::max<std::int64_t>(found.value_or(1), 1);
  if (count != named) {
    m_metadata.fail(split_count_key, fmt::format("{}, by the file's name", named),
                    found ? fmt::format("{}", *found) : "none");
  }
  if (count == 1) return;
  const auto check = [&](const Metadata& part, std::int64_t index) {
    const std::int64_t parts = part.integer(split_count_key, 0, max_parts);
    if (parts != count) {
      part.fail(split_count_key, fmt::format("{}, as in the first part", count),
                fmt::format("{}", parts));
    }
    const std::int64_t number = part.integer("split.no", 0, max_parts);
    if (number != index - 1) {
      part.fail("split.no", fmt::format("{}, by the file's name", index - 1),
                fmt::format("{}", number));
    }
  };
  check(m_metadata, 1);
  for (std::int64_t i = 2; i <= count; ++i) check(read_part(path_of_part(*name, i)), i);
  const auto tensors =
      m_metadata.find_integer("split.tensors.count", 0, std::numeric_limits<std::int64_t>::max());
  if (tensors && *tensors != static_cast<std::int64_t>(m_tensors.size())) {
    m_metadata.fail("split.tensors.count",
                    fmt::format("{}, the tensors of all parts", m_tensors.size()),
                    fmt::format("{}", *tensors));
  }
}

GgufFile GgufFile::open(const fs::path& file) {
  GgufFile opened;
  const fs::path first = parts_of(file).front();
  opened.m_metadata = opened.read_part(first);
  opened.read_other_parts(first);
  return opened;
}

const TensorEntry* GgufFile::find(std::string_view name) const {
  const auto found = m_tensors.find(name);
  return found == m_tensors.end() ? nullptr : &found->second;
}

}  // namespace kvzap::gguf
