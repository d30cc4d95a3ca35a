#include "files/crc32c.hpp"

#include <array>
#include <cstring>

#include "base/simd.hpp"

// Inline assembly: CUDA's compiler accepts it, but does not know the intrinsics.
#if defined(__x86_64__) && defined(__GNUC__)
#define KVZAP_CRC_INSTRUCTION 1
#else
#define KVZAP_CRC_INSTRUCTION 0
#endif

namespace kvzap::files {
namespace {

// Bits are reflected: the lowest bit of a byte, and of a checksum, is the highest power of x.
constexpr std::uint32_t polynomial = 0x82f63b78u;

using Table = std::array<std::uint32_t, 256>;

// Table i: the contribution of a byte that i zero bytes follow.
constexpr std::array<Table, 8> byte_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? polynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t i = 1; i < tables.size(); ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[i - 1][byte];
      tables[i][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> by_byte = byte_tables();

// Processes eight bytes at a time (Kounavis and Berry, "A systematic approach to building high
// performance software-based CRC generators", 2005), without the inversions at both ends.
std::uint32_t run_table(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, data += 8) {
    for (int i = 0; i < 4; ++i) crc ^= std::uint32_t{data[i]} << (8 * i);
    std::uint32_t next = 0;
    for (int i = 0; i < 4; ++i) next ^= by_byte[7 - i][(crc >> (8 * i)) & 0xff];
    for (int i = 4; i < 8; ++i) next ^= by_byte[7 - i][data[i]];
    crc = next;
  }
  for (; bytes > 0; --bytes, ++data) crc = (crc >> 8) ^ by_byte[0][(crc ^ *data) & 0xff];
  return crc;
}

#if KVZAP_CRC_INSTRUCTION
bool has_instruction() {
#if KVZAP_X86
  // Every processor of this level has SSE 4.2.
  return base::machine().has(base::SimdLevel::avx2);
#else
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
  }();
  return has;
#endif
}

KVZAP_BODY std::uint64_t step(std::uint64_t crc, std::uint64_t word) {
  asm("crc32q %1, %0" : "+r"(crc) : "rm"(word));  // NOLINT(hicpp-no-assembler)
  return crc;
}
KVZAP_BODY std::uint32_t step_byte(std::uint32_t crc, unsigned char byte) {
  asm("crc32b %1, %0" : "+r"(crc) : "qm"(byte));  // NOLINT(hicpp-no-assembler)
  return crc;
}

// The instruction has a latency of three cycles and a throughput of one per cycle. So three parts
// of the data are processed in parallel and then combined.
constexpr std::size_t part_bytes = 4096;

// Table i: the contribution of byte i of a checksum that `part_bytes` zero bytes follow.
const std::array<Table, 4>& shift_tables() {
  static const std::array<Table, 4> tables = [] {
    std::array<Table, 4> made{};
    const std::array<unsigned char, part_bytes> zeros{};
    std::array<std::uint32_t, 32> of_bit{};
    for (int bit = 0; bit < 32; ++bit) {
      of_bit[bit] = run_table(std::uint32_t{1} << bit, zeros.data(), zeros.size());
    }
    for (int i = 0; i < 4; ++i) {
      for (std::uint32_t byte = 0; byte < 256; ++byte) {
        for (int bit = 0; bit < 8; ++bit) {
          if ((byte >> bit & 1) != 0) made[i][byte] ^= of_bit[8 * i + bit];
        }
      }
    }
    return made;
  }();
  return tables;
}

std::uint32_t shifted(const std::array<Table, 4>& tables, std::uint64_t crc) {
  std::uint32_t sum = 0;
  for (int i = 0; i < 4; ++i) sum ^= tables[i][(crc >> (8 * i)) & 0xff];
  return sum;
}

std::uint32_t run_instruction(std::uint32_t begin, const unsigned char* data, std::size_t bytes) {
  const auto word = [](const unsigned char* at) {
    std::uint64_t value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  std::uint64_t crc = begin;
  if (bytes >= 3 * part_bytes) {
    const std::array<Table, 4>& tables = shift_tables();
    for (; bytes >= 3 * part_bytes; bytes -= 3 * part_bytes, data += 3 * part_bytes) {
      std::uint64_t second = 0;
      std::uint64_t third = 0;
      for (std::size_t i = 0; i < part_bytes; i += 8) {
        crc = step(crc, word(data + i));
        second = step(second, word(data + part_bytes + i));
        third = step(third, word(data + 2 * part_bytes + i));
      }
      crc = shifted(tables, crc) ^ second;
      crc = shifted(tables, crc) ^ third;
    }
  }
  for (; bytes >= 8; bytes -= 8, data += 8) crc = step(crc, word(data));
  auto narrow = static_cast<std::uint32_t>(crc);
  for (; bytes > 0; --bytes, ++data) narrow = step_byte(narrow, *data);
  return narrow;
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) {
  const auto* const from = static_cast<const unsigned char*>(data);
#if KVZAP_CRC_INSTRUCTION
  if (has_instruction()) return ~run_instruction(~crc, from, bytes);
#endif
  return ~run_table(~crc, from, bytes);
}

}  // namespace kvzap::files
