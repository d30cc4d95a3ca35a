// Writes *.safetensors files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace kvzap::model {

/// A tensor to write. `data` holds the values in file order: row-major, little-endian (as on every
/// machine that runs kvzap).
struct SafetensorsEntry {
  std::string name;
  std::string dtype;                // as the format names it: "F32", "I32", "U8", ...
  std::vector<std::int64_t> shape;  // slowest first; an extent may be 0
  const void* data = nullptr;
  /// Appends values to the tensor that is written.
  using Sink = std::function<void(const void* values, std::size_t bytes)>;
  /// Instead of `data`: writes all values to the sink, in pieces.
  std::function<void(const Sink& sink)> write = nullptr;
};

/// Writes one file with `tensors` in this order, each aligned at least to the size of its values.
/// For one process only. The new file replaces an existing one in one step, once it is complete and
/// on disk; until then the old file stays whole. `metadata` becomes __metadata__; messages call the
/// file a `kind`. Throws Error that names the file if it cannot be written, and for duplicate
/// names, unknown value types, negative extents, and a `write` of another number of bytes.
void write_safetensors(const std::filesystem::path& file,
                       const std::vector<SafetensorsEntry>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::string& kind = "safetensors");

}  // namespace kvzap::model
