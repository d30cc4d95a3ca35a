#include "io/seal.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <limits>
#include <string>
#include <string_view>

#include "files/crc32c.hpp"
#include "files/fully.hpp"

namespace kvzap::io {
namespace {

constexpr std::string_view seal_begin("KVZAP-SEAL-2\0\0\0\0", 16);
constexpr std::string_view seal_end("KVZAPEND", 8);
constexpr std::size_t head_bytes = 16 + 8 + 8 + 4 + 4;
constexpr std::size_t extent_bytes = 8 + 8 + 4 + 4;
constexpr std::size_t tail_bytes = 4 + 4 + 8;

// Little-endian on every machine.
template <class Unsigned>
void put(std::vector<char>& bytes, Unsigned value) {
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    bytes.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
  }
}

template <class Unsigned>
Unsigned get(const char* bytes) {
  Unsigned value = 0;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    value |= static_cast<Unsigned>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return value;
}

// Returns the checksum of bytes begin … end - 1, after bytes with the checksum `crc`.
std::uint32_t crc_of_bytes(int descriptor, std::int64_t begin, std::int64_t end,
                           std::uint32_t crc = 0) {
  constexpr std::int64_t piece = std::int64_t{1} << 18;
  std::vector<char> buffer(
      static_cast<std::size_t>(std::clamp<std::int64_t>(end - begin, 0, piece)));
  while (begin < end) {
    const std::int64_t now = std::min(piece, end - begin);
    files::read_fully(descriptor, buffer.data(), now, begin);
    crc = files::crc32c(buffer.data(), static_cast<std::size_t>(now), crc);
    begin += now;
  }
  return crc;
}

// Converts a number of an extent. Throws Error if no file offset is as large.
std::int64_t signed_number(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    throw Error(fmt::format("its seal has {}, which is no file offset", value));
  }
  return static_cast<std::int64_t>(value);
}

}  // namespace

void expect_crc(const SealedExtent& extent, std::uint32_t found) {
  if (!extent.crc || found == *extent.crc) return;
  throw Error(
      fmt::format("the compressed chunk at byte {} is damaged: checksum {:08x}; expected {:08x}",
                  extent.begin, found, *extent.crc));
}

std::vector<char> seal_bytes(const Seal& seal) {
  std::vector<char> bytes(seal_begin.begin(), seal_begin.end());
  bytes.reserve(head_bytes + seal.extents.size() * extent_bytes + tail_bytes);
  put(bytes, static_cast<std::uint64_t>(seal.sealed_bytes));
  put(bytes, static_cast<std::uint64_t>(seal.extents.size()));
  put(bytes, seal.crc);
  put(bytes, std::uint32_t{0});
  for (const SealedExtent& extent : seal.extents) {
    put(bytes, static_cast<std::uint64_t>(extent.begin));
    put(bytes, static_cast<std::uint64_t>(extent.bytes));
    put(bytes, std::uint32_t{extent.crc ? 1U : 0U});
    put(bytes, extent.crc.value_or(0));
  }
  const std::size_t whole = bytes.size() + tail_bytes;
  if (whole > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(fmt::format("{} runs of rows are too many for one seal", seal.extents.size()));
  }
  put(bytes, files::crc32c(bytes.data(), bytes.size()));
  put(bytes, static_cast<std::uint32_t>(whole));
  bytes.insert(bytes.end(), seal_end.begin(), seal_end.end());
  return bytes;
}

std::uint32_t crc_beside(int descriptor, std::int64_t bytes,
                         const std::vector<SealedExtent>& extents) {
  std::uint32_t crc = 0;
  std::int64_t at = 0;
  for (const SealedExtent& extent : extents) {
    crc = crc_of_bytes(descriptor, at, extent.begin, crc);
    at = extent.begin + extent.bytes;
  }
  return crc_of_bytes(descriptor, at, bytes, crc);
}

void check_extent(int descriptor, const SealedExtent& extent) {
  if (!extent.crc) return;
  expect_crc(extent, crc_of_bytes(descriptor, extent.begin, extent.begin + extent.bytes));
}

std::optional<Seal> read_seal(int descriptor) {
  const std::int64_t file_bytes = files::size_of_file(descriptor);
  constexpr std::size_t least = head_bytes + tail_bytes;
  if (file_bytes < static_cast<std::int64_t>(least)) return {};
  char tail[tail_bytes];
  files::read_fully(descriptor, tail, tail_bytes,
                    file_bytes - static_cast<std::int64_t>(tail_bytes));
  if (std::string_view(tail + 8, seal_end.size()) != seal_end) return {};

  const std::size_t whole = get<std::uint32_t>(tail + 4);
  if (whole < least || (whole - least) % extent_bytes != 0 ||
      static_cast<std::int64_t>(whole) > file_bytes) {
    throw Error(fmt::format("its seal is damaged: its length is {} bytes, and the file has {}",
                            whole, file_bytes));
  }
  std::vector<char> bytes(whole);
  const std::int64_t sealed = file_bytes - static_cast<std::int64_t>(whole);
  files::read_fully(descriptor, bytes.data(), static_cast<std::int64_t>(whole), sealed);
  const std::uint32_t expected = get<std::uint32_t>(bytes.data() + whole - tail_bytes);
  const std::uint32_t found = files::crc32c(bytes.data(), whole - tail_bytes);
  if (std::string_view(bytes.data(), seal_begin.size()) != seal_begin || expected != found) {
    throw Error(
        fmt::format("its seal is damaged: checksum {:08x}; expected {:08x}", found, expected));
  }

  Seal seal;
  const char* at = bytes.data() + seal_begin.size();
  seal.sealed_bytes = signed_number(get<std::uint64_t>(at));
  const auto n_extents = get<std::uint64_t>(at + 8);
  seal.crc = get<std::uint32_t>(at + 16);
  if (seal.sealed_bytes != sealed || n_extents != (whole - least) / extent_bytes) {
    throw Error(fmt::format(
        "its seal is for {} bytes and {} runs of rows; found {} bytes before the seal, {} runs",
        seal.sealed_bytes, n_extents, sealed, (whole - least) / extent_bytes));
  }
  seal.extents.reserve(n_extents);
  at = bytes.data() + head_bytes;
  std::int64_t end = 0;
  for (std::uint64_t i = 0; i < n_extents; ++i, at += extent_bytes) {
    SealedExtent extent;
    extent.begin = signed_number(get<std::uint64_t>(at));
    extent.bytes = signed_number(get<std::uint64_t>(at + 8));
    const auto has_crc = get<std::uint32_t>(at + 16);
    if (has_crc > 0) extent.crc = get<std::uint32_t>(at + 20);
    if (extent.begin < end || extent.begin > sealed || extent.bytes > sealed - extent.begin ||
        has_crc > 1) {
      throw Error(fmt::format(
          "run {} of rows in its seal has {} bytes from byte {}; expected within {} and {}", i,
          extent.bytes, extent.begin, end, sealed));
    }
    end = extent.begin + extent.bytes;
    seal.extents.push_back(extent);
  }
  const std::uint32_t content = crc_beside(descriptor, sealed, seal.extents);
  if (content != seal.crc) {
    throw Error(fmt::format("bytes outside the rows are damaged: checksum {:08x}; expected {:08x}",
                            content, seal.crc));
  }
  return seal;
}

}  // namespace kvzap::io
