// The seal: the last bytes of a snapshot, after the bytes that HDF5 uses. It has a checksum of
// everything but rows. It is checked before HDF5 opens the file, since HDF5 may crash on damage.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace kvzap::io {

/// A run of bytes that holds rows: the content of a contiguous data set, or of a chunk.
struct SealedExtent {
  std::int64_t begin = 0;
  std::int64_t bytes = 0;
  /// Checksum of these bytes. Only compressed chunks have one: `crc32c` covers no compressed rows.
  std::optional<std::uint32_t> crc;
};

/// Throws Error if the extent has another checksum than `found`.
void expect_crc(const SealedExtent& extent, std::uint32_t found);

/// The seal. Little-endian:
/// - "KVZAP-SEAL-2\\0\\0\\0\\0" (16 bytes); u64 bytes before the seal; u64 number of extents
/// - u32 CRC32C of all bytes before the seal without the extents; u32 0
/// - for each extent: u64 begin, u64 bytes, u32 has a CRC, u32 CRC32C
/// - u32 CRC32C of the seal up to here; u32 bytes of the whole seal (a multiple of 8 up to 2^32)
/// - "KVZAPEND" (8 bytes)
struct Seal {
  std::int64_t sealed_bytes = 0;
  std::uint32_t crc = 0;
  std::vector<SealedExtent> extents;  // ascending, disjoint, within the sealed bytes
};

/// Returns the bytes of the seal. Throws Error if it would need more than 2^32.
std::vector<char> seal_bytes(const Seal& seal);

/// CRC32C of the first `bytes` bytes of an open file without `extents` (ascending, disjoint).
/// Throws Error if they cannot be read.
std::uint32_t crc_beside(int descriptor, std::int64_t bytes,
                         const std::vector<SealedExtent>& extents);

/// Reads the seal at the end of an open file. Checks the seal and the bytes that it covers, but not
/// the extents. Returns nothing if the file does not end with a seal, because another program wrote
/// it or it is truncated. Throws Error, without the file's name, if the seal or a byte that it
/// covers is damaged.
std::optional<Seal> read_seal(int descriptor);

/// Throws Error if the bytes of an extent differ from its checksum.
void check_extent(int descriptor, const SealedExtent& extent);

}  // namespace kvzap::io
