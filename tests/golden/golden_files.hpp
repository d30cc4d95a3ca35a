// Where the reference vectors are, and how to read them.
#pragma once

#include <cstring>
#include <filesystem>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/model/safetensors.hpp>
#include <string>
#include <vector>

#include "source_dir.hpp"

namespace kvzap::golden {

inline const std::filesystem::path source_dir = test::source_dir();
inline const std::filesystem::path golden_dir = source_dir / "tests/golden";

/// Folder of a model, shipped or beside the reference vectors.
inline std::filesystem::path model_dir(const std::string& name) {
  const auto shipped = source_dir / "inputs/models" / name;
  return std::filesystem::exists(shipped) ? shipped : golden_dir / "models" / name;
}

template <class T>
std::vector<T> tensor(const SafetensorsFolder& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  if (!info) throw Error("golden tensor missing: " + name);
  std::vector<T> values(info->bytes / sizeof(T));
  std::memcpy(values.data(), info->data, info->bytes);
  return values;
}

inline std::vector<TokenId> ids(const SafetensorsFolder& file, const std::string& name) {
  return tensor<TokenId>(file, name);
}

/// Kept rows (layer, KV head) of an imagined run, by which HeadPartition::balanced makes an uneven
/// placement: ranks own different numbers of heads layer by layer.
inline std::vector<std::vector<std::int64_t>> uneven_rows(int layers, int heads) {
  std::vector<std::vector<std::int64_t>> kept(layers, std::vector<std::int64_t>(heads));
  for (int l = 0; l < layers; ++l) {
    for (int h = 0; h < heads; ++h) {
      kept[l][h] = (l % 2 == 0 && h == 1) ? 1000 : 10 + 7 * ((l + h) % 3);
    }
  }
  return kept;
}

}  // namespace kvzap::golden
