#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "base/simd.hpp"
#include "files/crc32c.hpp"

namespace kvzap::files {
namespace {

// Bit by bit, from the polynomial in RFC 3720, section 12.1.
std::uint32_t slow(const unsigned char* data, std::size_t bytes) {
  std::uint32_t crc = ~0u;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

/// Both ways: by table, and by instruction if this processor has it.
class Crc32c : public ::testing::TestWithParam<base::SimdLevel> {
 protected:
  Crc32c() : m_before(base::machine().simd()) { base::machine().set_simd(GetParam()); }
  ~Crc32c() override { base::machine().set_simd(m_before); }

 private:
  base::SimdLevel m_before;
};

// RFC 3720, appendix B.4, whose bytes are in the order in which they are sent; and the check value
// of the catalogue of parametrised CRC algorithms (CRC-32/ISCSI).
TEST_P(Crc32c, KnownValues) {
  std::vector<unsigned char> bytes(32, 0);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x62a8ab43u);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(0));
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x46dd794eu);
  for (unsigned char i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(31 - i);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x113fdb5cu);
  const std::vector<unsigned char> read_command{
      0x01, 0xc0, 0, 0,    0, 0, 0, 0,    0,    0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 4, 0,
      0,    0,    0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 2,    0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(crc32c(read_command.data(), read_command.size()), 0xd9963a56u);
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
}

TEST_P(Crc32c, AnyAlignmentLengthAndSplit) {
  // Long enough for several rounds of three interleaved parts.
  std::vector<unsigned char> bytes(3 * 3 * 4096 + 777);
  std::uint32_t state = 1;
  for (auto& byte : bytes)
    byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
  for (std::size_t begin = 0; begin < 9; ++begin) {
    for (const std::size_t length : {0, 1, 7, 8, 9, 31, 4096, 12287, 12288, 12289, 24999, 36864}) {
      EXPECT_EQ(crc32c(bytes.data() + begin, length), slow(bytes.data() + begin, length))
          << begin << " " << length;
    }
  }
  const std::uint32_t whole = slow(bytes.data(), bytes.size());
  for (std::size_t cut = 0; cut <= bytes.size(); cut += cut < 40 ? 1 : 1013) {
    EXPECT_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, crc32c(bytes.data(), cut)), whole)
        << cut;
  }
}

std::vector<base::SimdLevel> levels() {
  std::vector<base::SimdLevel> levels{base::SimdLevel::baseline};
  if (base::simd_level_of_processor() != base::SimdLevel::baseline)
    levels.push_back(base::simd_level_of_processor());
  return levels;
}
INSTANTIATE_TEST_SUITE_P(Levels, Crc32c, ::testing::ValuesIn(levels()),
                         [](const auto& level) { return std::string(base::name_of(level.param)); });

}  // namespace
}  // namespace kvzap::files
