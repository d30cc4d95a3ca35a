// CRC32C (Castagnoli), as in iSCSI (RFC 3720, appendix B.4): the checksum of snapshots' rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvzap::files {

/// Continues the checksum `crc` (0 at the beginning) with `bytes` bytes: crc32c(b, crc32c(a)) is
/// that of a and b together. Uses the processor's instruction from base::SimdLevel avx2 on.
/// Thread-safe.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);

}  // namespace kvzap::files
