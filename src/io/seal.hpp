// The last bytes of a snapshot, behind what HDF5 knows of the file: a checksum of everything but
// rows, which is checked before HDF5 looks at the file (it may crash on what is damaged).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace kvzap::detail {

/// A run of bytes of the file that holds rows: contents of a contiguous data set, or of a chunk.
struct SealedExtent {
  std::int64_t begin = 0;
  std::int64_t bytes = 0;
  /// Of these bytes, where rows have no checksum of their own as they lie there (compressed
  /// chunks).
  std::optional<std::uint32_t> crc;
};

/// The seal. Little-endian: "KVZAP-SEAL-2\\0\\0\\0\\0" (16 bytes); u64 bytes before the seal; u64
/// number of extents; u32 CRC32C of all bytes before the seal but for the extents, one behind the
/// other; u32 0; then for each extent u64 begin, u64 bytes, u32 has a CRC, u32 CRC32C; then u32
/// CRC32C of the seal up to here; u32 bytes of the whole seal (a multiple of 8 up to 2^32);
/// "KVZAPEND" (8 bytes).
struct Seal {
  std::int64_t sealed_bytes = 0;
  std::uint32_t crc = 0;
  std::vector<SealedExtent> extents;  // ascending, disjoint, within the sealed bytes
};

/// As bytes. Throws Error if they are more than 2^32.
std::vector<char> seal_bytes(const Seal& seal);

/// Reads `bytes` bytes from `begin` on of an open file, all of them. Throws Error, without the
/// file's name, if it ends before or cannot be read.
void read_fully(int descriptor, void* data, std::int64_t bytes, std::int64_t begin);

/// CRC32C of the first `bytes` bytes of an open file but for `extents` (ascending, disjoint).
/// Throws Error if they cannot be read.
std::uint32_t crc_beside(int descriptor, std::int64_t bytes,
                         const std::vector<SealedExtent>& extents);

/// Reads the seal at the end of an open file and checks it, and the bytes that it covers (not the
/// extents). Nothing if the file does not end with one (version 1, another program's, truncated).
/// Throws Error, without the file's name, if there is one and it or what it covers is damaged.
std::optional<Seal> read_seal(int descriptor);

}  // namespace kvzap::detail
