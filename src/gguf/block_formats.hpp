// Formats of values in blocks with shared scales: those of GGUF files, by their published layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvzap::gguf {

/// A format of consecutive values. A row of a tensor holds whole blocks.
struct BlockFormat {
  /// The number of the type in GGUF files.
  std::uint32_t type;
  /// The name of the type, as in GGUF's documentation: "Q4_1".
  std::string_view name;
  /// Values in a block; 1 for F32, F16 and BF16.
  std::int64_t values;
  /// Bytes of a block.
  std::int64_t bytes;
  /// Writes the n_blocks * values values of `blocks` to `target`. Blocks need no alignment, and
  /// every bit pattern is valid.
  void (*decode)(const std::byte* blocks, std::int64_t n_blocks, float* target);
  /// Rounds n_blocks * values values to `blocks`; nullptr if this library cannot write the format.
  /// The values are finite, with magnitudes up to largest_encodable (block_encoders.hpp).
  void (*encode)(const float* values, std::int64_t n_blocks, std::byte* blocks) = nullptr;
};

/// Returns all formats that this library decodes.
const std::vector<BlockFormat>& block_formats();
/// Returns the format with this number or name, or nullptr.
const BlockFormat* find_block_format(std::uint32_t type);
const BlockFormat* find_block_format(std::string_view name);

/// Writes the values first … end - 1 of consecutive blocks to `target`. The range need not begin or
/// end with a block.
void decode_range(const BlockFormat& format, const std::byte* blocks, std::int64_t first,
                  std::int64_t end, float* target);

}  // namespace kvzap::gguf
