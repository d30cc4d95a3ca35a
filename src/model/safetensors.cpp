#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/mapped_file.hpp"
#include "files/quote.hpp"
#include "files/web_page.hpp"
#include "model/find_model.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <kvzap/model/safetensors.hpp>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

namespace kvzap {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::uint64_t length_bytes = 8;
constexpr std::uint64_t max_header_bytes = 100'000'000;

/// Bits of one value of a stored type; empty for an unknown type.
std::optional<std::uint64_t> bits_of(std::string_view stored_dtype) {
  static const std::map<std::string_view, std::uint64_t> bits = {
      {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},    {"F64", 64},    {"I64", 64},
      {"U64", 64},        {"C64", 64}};
  const auto found = bits.find(stored_dtype);
  if (found == bits.end()) return std::nullopt;
  return found->second;
}

std::optional<DType> weight_dtype(std::string_view stored_dtype) {
  if (stored_dtype == "F32") return DType::f32;
  if (stored_dtype == "F16") return DType::f16;
  if (stored_dtype == "BF16") return DType::bf16;
  return std::nullopt;
}

/// Formats a shape as "[2, 3]".
std::string shape_text(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t most = 16;
  if (shape.size() > most) {
    return fmt::format("[{}, … {} extents]", fmt::join(shape.begin(), shape.begin() + most, ", "),
                       shape.size());
  }
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

[[noreturn]] void fail_tensor(const std::string& file, const std::string& name,
                              const std::string& problem) {
  throw Error(fmt::format("{}: tensor {}: {}", file, files::in_quotes(name, 200), problem));
}

const json& member(const std::string& file, const std::string& name, const json& entry,
                   const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail_tensor(file, name, fmt::format("{} is missing", key));
  return *found;
}

/// Byte range of one tensor, relative to the end of the header.
struct Range {
  std::uint64_t begin;
  std::uint64_t end;
  const std::string* name;
};

struct ParsedTensor {
  TensorInfo info;
  std::uint64_t begin;
  std::uint64_t end;
};

/// Checks one entry of the header by itself. `info.data` is set later, when the range is known to
/// lie in the file.
ParsedTensor parse_entry(const std::string& file, const std::string& name, const json& entry) {
  if (!entry.is_object()) {
    fail_tensor(file, name, fmt::format("expected an object, found {}", entry.type_name()));
  }
  const json& dtype = member(file, name, entry, "dtype");
  if (!dtype.is_string()) {
    fail_tensor(file, name, fmt::format("dtype: expected a string, found {}", dtype.type_name()));
  }
  const json& shape = member(file, name, entry, "shape");
  if (!shape.is_array()) {
    fail_tensor(file, name, fmt::format("shape: expected an array, found {}", shape.type_name()));
  }
  const json& offsets = member(file, name, entry, "data_offsets");
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    fail_tensor(
        file, name,
        fmt::format("data_offsets: expected an array of two non-negative integers, found {}",
                    offsets.is_array() && offsets.size() == 2
                        ? fmt::format("[{}, {}]", files::described(offsets[0]),
                                      files::described(offsets[1]))
                        : files::described(offsets)));
  }

  ParsedTensor tensor{};
  tensor.info.name = name;
  tensor.info.file = file;
  tensor.info.stored_dtype = dtype.get<std::string>();
  std::uint64_t count = 1;
  for (const json& extent : shape) {
    if (!extent.is_number_unsigned()) {
      fail_tensor(file, name,
                  fmt::format("shape[{}]: expected a non-negative integer, found {}",
                              tensor.info.shape.size(), files::described(extent)));
    }
    const auto value = extent.get<std::uint64_t>();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
        __builtin_mul_overflow(count, value, &count)) {
      fail_tensor(file, name, "shape: the number of values does not fit 64 bits");
    }
    tensor.info.shape.push_back(static_cast<std::int64_t>(value));
  }
  tensor.begin = offsets[0].get<std::uint64_t>();
  tensor.end = offsets[1].get<std::uint64_t>();
  if (tensor.begin > tensor.end) {
    fail_tensor(file, name,
                fmt::format("data_offsets: expected begin <= end, found [{}, {}]", tensor.begin,
                            tensor.end));
  }
  const std::uint64_t found_bytes = tensor.end - tensor.begin;
  if (const auto bits = bits_of(tensor.info.stored_dtype)) {
    std::uint64_t expected_bits = 0;
    if (__builtin_mul_overflow(count, *bits, &expected_bits)) {
      fail_tensor(file, name, "shape: the number of bytes does not fit 64 bits");
    }
    if (expected_bits % 8 != 0 || expected_bits / 8 != found_bytes) {
      fail_tensor(file, name,
                  fmt::format("data_offsets: expected {} bytes for {} of shape {}, found {}",
                              (expected_bits + 7) / 8, files::shown(tensor.info.stored_dtype),
                              shape_text(tensor.info.shape), found_bytes));
    }
  }
  const auto weight = weight_dtype(tensor.info.stored_dtype);
  tensor.info.is_weight = weight.has_value();
  tensor.info.dtype = weight.value_or(DType::f32);
  tensor.info.bytes = static_cast<std::size_t>(found_bytes);
  return tensor;
}

/// Checks that the ranges tile [0, data_bytes) without overlap, gap or rest.
void check_ranges(const std::string& file, std::vector<Range> ranges, std::uint64_t header_end,
                  std::uint64_t data_bytes) {
  std::uint64_t needed = 0;
  for (const Range& range : ranges) needed = std::max(needed, range.end);
  if (needed > data_bytes) {
    std::uint64_t expected_size = 0;
    if (__builtin_add_overflow(needed, header_end, &expected_size)) {
      throw Error(fmt::format("{}: a data offset does not fit 64 bits", file));
    }
    throw Error(fmt::format(
        "{}: the file is truncated: expected {} bytes, found {}; download or copy it again", file,
        expected_size, header_end + data_bytes));
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& left, const Range& right) {
    return std::pair(left.begin, left.end) < std::pair(right.begin, right.end);
  });
  std::uint64_t covered = 0;
  for (const Range& range : ranges) {
    if (range.begin < covered) {
      fail_tensor(
          file, *range.name,
          fmt::format("data_offsets overlap another tensor: expected a begin of {}, found {}",
                      covered, range.begin));
    }
    if (range.begin > covered) {
      fail_tensor(
          file, *range.name,
          fmt::format("data_offsets leave a gap of {} bytes: expected a begin of {}, found {}",
                      range.begin - covered, covered, range.begin));
    }
    covered = range.end;
  }
  if (covered != data_bytes) {
    throw Error(fmt::format("{}: {} bytes follow the last tensor: expected {} bytes, found {}",
                            file, data_bytes - covered, header_end + covered,
                            header_end + data_bytes));
  }
}

/// All tensors of one mapped file.
std::map<std::string, TensorInfo, std::less<>> parse_file(const std::string& file,
                                                          const files::MappedFile& mapped) {
  const std::uint64_t size = mapped.size();
  if (size < length_bytes) {
    throw Error(fmt::format("{}: not a safetensors file: expected at least {} bytes, found {}",
                            file, length_bytes, size));
  }
  std::uint64_t header_bytes = 0;
  for (std::uint64_t i = length_bytes; i-- > 0;) {
    header_bytes = (header_bytes << 8) | std::to_integer<std::uint64_t>(mapped.data()[i]);
  }
  // The length may have the first bytes of other formats. So they count only in an invalid file.
  const auto content = files::content_of_download(
      {reinterpret_cast<const char*>(mapped.data()), std::min<std::size_t>(size, 512)});
  const auto fail_as_other = [&] {
    if (!content) return;
    throw Error(
        fmt::format("{}: not a safetensors file: found {}", file, files::text_of(*content, file)));
  };
  if (header_bytes > max_header_bytes) {
    fail_as_other();
    throw Error(fmt::format(
        "{}: not a safetensors file: expected a header of at most {} bytes, found a length of {}",
        file, max_header_bytes, header_bytes));
  }
  if (header_bytes > size - length_bytes) {
    fail_as_other();
    throw Error(
        fmt::format("{}: the file is truncated: expected at least {} bytes for the header, found "
                    "{}; download or "
                    "copy it again",
                    file, length_bytes + header_bytes, size));
  }
  const std::string_view text(reinterpret_cast<const char*>(mapped.data()) + length_bytes,
                              static_cast<std::size_t>(header_bytes));
  if (text.empty() || text.front() != '{') {
    fail_as_other();
    throw Error(
        fmt::format("{}: not a safetensors file: expected a header that starts with '{{'", file));
  }
  json header = files::parse_json(text, file + ": header");

  const std::uint64_t header_end = length_bytes + header_bytes;
  const std::uint64_t data_bytes = size - header_end;
  std::vector<ParsedTensor> parsed;
  // Free the parsed parts at once: a header of many small tensors takes much more memory than its
  // text.
  auto& entries = header.get_ref<json::object_t&>();
  parsed.reserve(entries.size());
  while (!entries.empty()) {
    const auto entry = entries.extract(entries.begin());
    if (entry.key() == "__metadata__") continue;
    parsed.push_back(parse_entry(file, entry.key(), entry.mapped()));
  }
  std::vector<Range> ranges;
  ranges.reserve(parsed.size());
  for (const ParsedTensor& tensor : parsed) {
    ranges.push_back({tensor.begin, tensor.end, &tensor.info.name});
  }
  check_ranges(file, std::move(ranges), header_end, data_bytes);

  std::map<std::string, TensorInfo, std::less<>> tensors;
  for (ParsedTensor& tensor : parsed) {
    tensor.info.data = mapped.data() + header_end + tensor.begin;
    const std::string name = tensor.info.name;
    tensors.emplace(name, std::move(tensor.info));
  }
  return tensors;
}

/// Returns every regular *.safetensors file of the folder, sorted by name.
std::vector<fs::path> weight_files(const fs::path& folder, bool& has_bin) {
  std::vector<fs::path> files;
  has_bin = false;
  std::error_code status;
  fs::directory_iterator entries(folder, status);
  if (status) {
    throw Error(fmt::format("{}: cannot be listed: {}", folder.string(), status.message()));
  }
  for (; entries != fs::directory_iterator(); entries.increment(status)) {
    if (status) {
      throw Error(fmt::format("{}: cannot be listed: {}", folder.string(), status.message()));
    }
    const fs::path extension = entries->path().extension();
    if (extension == ".safetensors") files.push_back(entries->path());
    if (extension == ".bin") has_bin = true;
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

SafetensorsFolder::Tensors SafetensorsFolder::map_file(const fs::path& file) {
  m_files.push_back(std::make_shared<const files::MappedFile>(file));
  return parse_file(file.string(), *m_files.back());
}

void SafetensorsFolder::open_index(const fs::path& folder, const fs::path& index) {
  const std::string index_text = index.string();
  const json content = files::read_json_object(index, max_header_bytes);
  const files::JsonField weight_map = files::JsonField(content, index_text).member("weight_map");
  std::map<std::string, Tensors> shards;
  for (const auto& [name, value] : weight_map.object().value().items()) {
    if (!value.is_string()) {
      throw Error(fmt::format("{}: weight_map: tensor {}: expected a file name, found {}",
                              index_text, files::in_quotes(name, 200), value.type_name()));
    }
    const auto& file = value.get_ref<const std::string&>();
    // A downloaded index must not point outside its folder.
    if (file.empty() || file == "." ||
        file.find_first_of(std::string_view("/\\\0", 3)) != file.npos ||
        file.find("..") != file.npos) {
      throw Error(fmt::format(
          "{}: weight_map: tensor {}: expected a plain file name in the same folder, found {}",
          index_text, files::in_quotes(name, 200), files::in_quotes(file)));
    }
    auto shard = shards.find(file);
    if (shard == shards.end()) {
      std::error_code status;
      if (!fs::is_regular_file(folder / file, status)) {
        throw Error(
            fmt::format("{}: weight_map: tensor {}: expected a file of this folder, found "
                        "none: the index names the missing file {}{}",
                        index_text, files::in_quotes(name, 200), files::in_quotes(file),
                        model::download_hint(folder)));
      }
      shard = shards.emplace(file, map_file(folder / file)).first;
    }
    const auto tensor = shard->second.find(name);
    if (tensor == shard->second.end()) {
      throw Error(
          fmt::format("{}: weight_map: the index places tensor {} in {}, which does not "
                      "hold it",
                      index_text, files::in_quotes(name, 200), files::in_quotes(file)));
    }
    m_tensors.emplace(name, std::move(tensor->second));
  }
}

SafetensorsFolder SafetensorsFolder::open(const fs::path& folder) {
  SafetensorsFolder opened;
  opened.m_path = folder.string();
  std::error_code status;
  if (fs::is_regular_file(folder, status)) {
    opened.m_tensors = opened.map_file(folder);
    return opened;
  }
  if (!fs::is_directory(folder, status)) {
    throw Error(fmt::format("{}: no such folder", folder.string()));
  }
  const fs::path index = folder / "model.safetensors.index.json";
  if (fs::exists(index, status)) {
    opened.open_index(folder, index);
    return opened;
  }
  const fs::path single = folder / "model.safetensors";
  if (fs::exists(single, status)) {
    opened.m_tensors = opened.map_file(single);
    return opened;
  }
  bool has_bin = false;
  const std::vector<fs::path> files = weight_files(folder, has_bin);
  if (files.empty()) {
    throw Error(fmt::format(
        "{}: no *.safetensors file{}", folder.string(),
        has_bin ? " (pytorch .bin files are not supported: convert them to safetensors)" : ""));
  }
  for (const fs::path& file : files) {
    for (auto& [name, info] : opened.map_file(file)) {
      const auto [known, is_new] = opened.m_tensors.try_emplace(name, std::move(info));
      if (!is_new) {
        throw Error(
            fmt::format("{}: tensor '{}' is also in {}", file.string(), name, known->second.file));
      }
    }
  }
  return opened;
}

const TensorInfo& SafetensorsFolder::at(std::string_view name,
                                        const std::vector<std::int64_t>& expected_shape) const {
  const TensorInfo* const info = find(name);
  if (info == nullptr) {
    throw Error(fmt::format("{}: tensor '{}' of shape {} is missing", m_path, name,
                            shape_text(expected_shape)));
  }
  if (!info->is_weight) {
    fail_tensor(info->file, info->name,
                fmt::format("dtype {}, expected F32, F16 or BF16", info->stored_dtype));
  }
  if (info->shape != expected_shape) {
    fail_tensor(info->file, info->name,
                fmt::format("expected shape {}, found {}", shape_text(expected_shape),
                            shape_text(info->shape)));
  }
  return *info;
}

const TensorInfo* SafetensorsFolder::find(std::string_view name) const {
  const auto found = m_tensors.find(name);
  return found == m_tensors.end() ? nullptr : &found->second;
}

void SafetensorsFolder::release(const TensorInfo& tensor) const {
  files::release_pages(tensor.data, tensor.bytes);
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> names;
  names.reserve(m_tensors.size());
  for (const auto& entry : m_tensors) names.push_back(entry.first);
  return names;
}

}  // namespace kvzap
