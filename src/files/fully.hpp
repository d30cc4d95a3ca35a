// Sizes of open files, and reads and writes of all bytes of a request, of which the system may
// transfer fewer per call.
#pragma once

#include <cstdint>

namespace kvzap::files {

/// Returns the bytes of an open file. Throws Error, without its name, unless it is a regular file.
std::int64_t size_of_file(int descriptor);

/// Reads exactly `bytes` bytes of an open file from offset `begin`. Throws Error, without the
/// file's name, if the file ends before or cannot be read.
void read_fully(int descriptor, void* data, std::int64_t bytes, std::int64_t begin);

/// Writes exactly `bytes` bytes to an open file from offset `begin`. Throws Error, without the
/// file's name, if they cannot be written.
void write_fully(int descriptor, const void* data, std::int64_t bytes, std::int64_t begin);

}  // namespace kvzap::files
