// Writes small *.safetensors files for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <kvzap/core/types.hpp>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::test {

/// One tensor as the format stores it: row-major, little-endian (as every machine the tests run
/// on).
struct StoredTensor {
  std::string dtype;  // as the format spells it: "F32", "F16", "BF16", "I64", ...
  std::vector<std::int64_t> shape;
  std::string bytes;
};

/// `values` as a tensor of type F32, F16 or BF16, each rounded to nearest even.
inline StoredTensor stored_tensor(const std::string& dtype, std::vector<std::int64_t> shape,
                                  const std::vector<float>& values) {
  std::int64_t count = 1;
  for (std::int64_t extent : shape) count *= extent;
  if (count != static_cast<std::int64_t>(values.size())) {
    throw std::invalid_argument("stored_tensor: the values do not fill the shape");
  }
  StoredTensor tensor{dtype, std::move(shape), {}};
  const auto add = [&](const auto& value) {
    tensor.bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  for (float value : values) {
    if (dtype == "F32") {
      add(value);
    } else if (dtype == "F16") {
      add(half(value).bits);
    } else if (dtype == "BF16") {
      add(bfloat16(value).bits);
    } else {
      throw std::invalid_argument("stored_tensor: values of type " + dtype);
    }
  }
  return tensor;
}

/// Writes `tensors` to `path`, replacing what was there.
inline void write_safetensors(const std::filesystem::path& path,
                              const std::map<std::string, StoredTensor>& tensors) {
  std::string header = "{";
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    if (header.size() > 1) header += ',';
    header += '"' + name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[";
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      header += (i > 0 ? "," : "") + std::to_string(tensor.shape[i]);
    }
    header += "],\"data_offsets\":[" + std::to_string(data.size()) + ',';
    data += tensor.bytes;
    header += std::to_string(data.size()) + "]}";
  }
  header += '}';
  while (header.size() % 8 != 0) header += ' ';
  const std::uint64_t length = header.size();
  char prefix[8];
  std::memcpy(prefix, &length, sizeof(length));
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(prefix, sizeof(prefix));
  stream << header << data;
  if (!stream.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace kvzap::test
