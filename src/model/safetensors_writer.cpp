#include "model/safetensors_writer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "files/temporary_file.hpp"

namespace kvzap::model {
namespace {

namespace fs = std::filesystem;

std::size_t value_bytes(const std::string& dtype) {
  static const std::map<std::string, std::size_t> sizes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F16", 2}, {"BF16", 2}, {"I16", 2}, {"U16", 2},
      {"F32", 4},  {"I32", 4}, {"U32", 4}, {"F64", 8}, {"I64", 8},  {"U64", 8}};
  const auto size = sizes.find(dtype);
  if (size == sizes.end()) throw Error(fmt::format("value type '{}' is not known", dtype));
  return size->second;
}

std::size_t bytes_of(const SafetensorsEntry& tensor) {
  std::size_t bytes = value_bytes(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0)
      throw Error(fmt::format("tensor {}: extent {} is negative", tensor.name, extent));
    bytes *= static_cast<std::size_t>(extent);
  }
  return bytes;
}

/// In descending order of value size, every tensor is aligned if the first one is.
std::vector<const SafetensorsEntry*> by_value_size(const std::vector<SafetensorsEntry>& tensors) {
  std::vector<const SafetensorsEntry*> order;
  order.reserve(tensors.size());
  for (const SafetensorsEntry& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return value_bytes(a->dtype) > value_bytes(b->dtype);
  });
  return order;
}

std::string header_of(const std::vector<const SafetensorsEntry*>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const SafetensorsEntry* tensor : tensors) {
    if (header.contains(tensor->name)) {
      throw Error(fmt::format("tensor {} is there twice", tensor->name));
    }
    const std::size_t end = offset + bytes_of(*tensor);
    header[tensor->name] = {
        {"dtype", tensor->dtype}, {"shape", tensor->shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that values begin at a multiple of 8
  return text;
}

}  // namespace

void write_safetensors(const fs::path& file, const std::vector<SafetensorsEntry>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::string& kind) {
  files::write_file(file, kind, [&](std::ostream& stream) {
    const std::vector<const SafetensorsEntry*> order = by_value_size(tensors);
    const std::string header = header_of(order, metadata);
    const auto write = [&](const void* data, std::size_t bytes) {
      stream.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    };
    const std::uint64_t length = header.size();
    write(&length, sizeof(length));
    write(header.data(), header.size());
    for (const SafetensorsEntry* tensor : order) {
      const std::size_t bytes = bytes_of(*tensor);
      if (!tensor->write) {
        if (bytes > 0) write(tensor->data, bytes);
        continue;
      }
      std::size_t written = 0;
      tensor->write([&](const void* values, std::size_t more) {
        write(values, more);
        written += more;
      });
      if (written != bytes) {
        throw Error(
            fmt::format("tensor {}: expected {} bytes, found {}", tensor->name, bytes, written));
      }
    }
  });
}

}  // namespace kvzap::model
