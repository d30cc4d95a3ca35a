// Writing of *.safetensors files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvzap::detail {

/// A tensor to write. `data` has the values as the file will: row-major, little-endian (as on every
/// machine that kvzap runs on).
struct SafetensorsEntry {
  std::string name;
  std::string dtype;                // as the format spells it: "F32", "I32", "U8", ...
  std::vector<std::int64_t> shape;  // slowest first; an extent may be 0
  const void* data = nullptr;
};

/// Writes one file, in the order of `tensors`, each aligned to its own value size at least; one
/// process alone. A file of that name is replaced in one step once the new one is complete and on
/// the disk, else it stays whole. `metadata` becomes __metadata__; `kind` is what messages call the
/// file. Throws Error, naming the file, if it cannot be written, and for names that are not
/// distinct, a value type that is not known or negative extents.
void write_safetensors(const std::filesystem::path& file,
                       const std::vector<SafetensorsEntry>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::string& kind = "safetensors");

/// Tries whether a file can be created at `file`, as write_safetensors does, and leaves nothing
/// behind. Removes what killed runs left there, and returns a sentence for each. Throws Error,
/// naming the file.
std::vector<std::string> check_safetensors_writable(const std::filesystem::path& file,
                                                    const std::string& kind = "safetensors");

}  // namespace kvzap::detail
