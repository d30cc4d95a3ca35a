// Reads and writes all bytes of a request, of which the system may transfer fewer per call.
#pragma once

#include <cstdint>

namespace kvzap::files {

/// Reads exactly `bytes` bytes of an open file from offset `begin`. Throws Error, without the
/// file's name, if the file ends before or cannot be read.
void read_fully(int descriptor, void* data, std::int64_t bytes, std::int64_t begin);

/// Writes exactly `bytes` bytes to an open file from offset `begin`. Throws Error, without the
/// file's name, if they cannot be written.
void write_fully(int descriptor, const void* data, std::int64_t bytes, std::int64_t begin);

}  // namespace kvzap::files
