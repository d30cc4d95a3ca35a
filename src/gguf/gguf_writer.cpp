#include "gguf/gguf_writer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <kvzap/core/types.hpp>
#include <ostream>

#include "files/temporary_file.hpp"

namespace kvzap::gguf {
namespace {

constexpr std::uint64_t alignment = 32;  // of readers if the file states none
constexpr std::uint32_t version = 3;

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void append_string(std::string& bytes, std::string_view text) {
  append(bytes, std::uint64_t{text.size()});
  bytes.append(text);
}

void append_type(std::string& bytes, ValueType type) {
  append(bytes, static_cast<std::uint32_t>(type));
}

void append_key(std::string& bytes, std::string_view key, ValueType type) {
  append_string(bytes, key);
  append_type(bytes, type);
}

void append_array_key(std::string& bytes, std::string_view key, ValueType element,
                      std::uint64_t count) {
  append_key(bytes, key, ValueType::array);
  append_type(bytes, element);
  append(bytes, count);
}

std::uint64_t padding_after(std::uint64_t bytes) {
  return (alignment - bytes % alignment) % alignment;
}

}  // namespace

void GgufWriter::add_u32(std::string_view key, std::uint32_t value) {
  append_key(m_metadata, key, ValueType::u32);
  append(m_metadata, value);
  ++m_values;
}

void GgufWriter::add_f32(std::string_view key, float value) {
  append_key(m_metadata, key, ValueType::f32);
  append(m_metadata, value);
  ++m_values;
}

void GgufWriter::add_flag(std::string_view key, bool value) {
  append_key(m_metadata, key, ValueType::boolean);
  append(m_metadata, static_cast<std::uint8_t>(value));
  ++m_values;
}

void GgufWriter::add_string(std::string_view key, std::string_view text) {
  append_key(m_metadata, key, ValueType::string);
  append_string(m_metadata, text);
  ++m_values;
}

void GgufWriter::add_strings(std::string_view key, const std::vector<std::string>& texts) {
  append_array_key(m_metadata, key, ValueType::string, texts.size());
  for (const std::string& text : texts) append_string(m_metadata, text);
  ++m_values;
}

void GgufWriter::add_flags(std::string_view key, const std::vector<bool>& values) {
  append_array_key(m_metadata, key, ValueType::boolean, values.size());
  for (const bool value : values) append(m_metadata, static_cast<std::uint8_t>(value));
  ++m_values;
}

void GgufWriter::add_i32s(std::string_view key, const std::vector<std::int32_t>& values) {
  append_array_key(m_metadata, key, ValueType::i32, values.size());
  for (const std::int32_t value : values) append(m_metadata, value);
  ++m_values;
}

void GgufWriter::add_f32s(std::string_view key, const std::vector<float>& values) {
  append_array_key(m_metadata, key, ValueType::f32, values.size());
  for (const float value : values) append(m_metadata, value);
  ++m_values;
}

void GgufWriter::add_copy(std::string_view key, const MetadataValue& value) {
  const bool is_array = value.type == ValueType::array;
  if (is_array) {
    append_array_key(m_metadata, key, value.element, value.count);
  } else {
    append_key(m_metadata, key, value.type);
  }
  const std::size_t bytes = bytes_of(is_array ? value.element : value.type);
  if (bytes > 0) {
    m_metadata.append(reinterpret_cast<const char*>(value.data),
                      static_cast<std::size_t>(value.count) * bytes);
  } else {
    for (StringCursor texts(value); texts.left() > 0;) append_string(m_metadata, texts.next());
  }
  ++m_values;
}

void GgufWriter::add_tensor(std::string_view name, const std::vector<std::int64_t>& shape,
                            const BlockFormat& format) {
  std::int64_t bytes = format.bytes;
  bool fits = !shape.empty() && shape.back() % format.values == 0;
  for (const std::int64_t extent : shape) {
    fits = fits && extent > 0 && !__builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (!fits) {
    throw Error(
        fmt::format("tensor {}: expected rows of whole blocks of {} values, found shape "
                    "[{}]",
                    name, format.values, fmt::join(shape, ", ")));
  }
  bytes /= format.values;
  append_string(m_infos, name);
  append(m_infos, static_cast<std::uint32_t>(shape.size()));
  for (auto extent = shape.rbegin(); extent != shape.rend(); ++extent) append(m_infos, *extent);
  append(m_infos, format.type);
  append(m_infos, m_data_bytes);
  m_tensors.push_back({std::string(name), static_cast<std::uint64_t>(bytes)});
  m_data_bytes += m_tensors.back().bytes + padding_after(m_tensors.back().bytes);
}

void GgufWriter::write(const std::filesystem::path& file, const Fill& fill) const {
  std::string header = "GGUF";
  append(header, version);
  append(header, std::uint64_t{m_tensors.size()});
  append(header, m_values);
  header += m_metadata;
  header += m_infos;
  header.resize(header.size() + padding_after(header.size()));
  files::write_file(file, "GGUF file", [&](std::ostream& stream) {
    stream.write(header.data(), static_cast<std::streamsize>(header.size()));
    for (std::size_t i = 0; i < m_tensors.size(); ++i) {
      const Tensor& tensor = m_tensors[i];
      std::uint64_t written = 0;
      fill(i, [&](const void* blocks, std::size_t bytes) {
        stream.write(static_cast<const char*>(blocks), static_cast<std::streamsize>(bytes));
        written += bytes;
      });
      if (written != tensor.bytes) {
        throw Error(fmt::format("tensor {}: expected {} bytes, found {}", tensor.name, tensor.bytes,
                                written));
      }
      const char zeros[alignment] = {};
      stream.write(zeros, static_cast<std::streamsize>(padding_after(tensor.bytes)));
    }
  });
}

}  // namespace kvzap::gguf
