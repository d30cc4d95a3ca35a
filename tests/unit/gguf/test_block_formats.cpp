// Values of blocks are those of the Python package gguf, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/simd.hpp"
#include "gguf/block_formats.hpp"
#include "golden/golden_files.hpp"

namespace {

using namespace kvzap;
using gguf::BlockFormat;

class BlockFormats : public ::testing::TestWithParam<BlockFormat> {
 protected:
  const BlockFormat format = GetParam();
  const SafetensorsFolder file =
      SafetensorsFolder::open(golden::golden_dir / "block_formats.safetensors");
  const std::vector<std::byte> blocks =
      golden::tensor<std::byte>(file, std::string(format.name) + ".blocks");
  const std::vector<float> values =
      golden::tensor<float>(file, std::string(format.name) + ".values");
};

TEST_P(BlockFormats, DecodeToTheReferenceValues) {
  const auto n_blocks = static_cast<std::int64_t>(blocks.size()) / format.bytes;
  ASSERT_EQ(n_blocks * format.values, static_cast<std::int64_t>(values.size()));
  const auto level = base::machine().simd();
  for (const auto used :
       {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512}) {
    if (!base::processor_has(used)) continue;
    base::machine().set_simd(used);
    std::vector<float> decoded(values.size());
    format.decode(blocks.data(), n_blocks, decoded.data());
    EXPECT_EQ(std::memcmp(decoded.data(), values.data(), values.size() * sizeof(float)), 0)
        << base::name_of(used);
  }
  base::machine().set_simd(level);
}

TEST_P(BlockFormats, DecodeAnyRange) {
  const auto end = static_cast<std::int64_t>(values.size());
  for (std::int64_t first = 0; first < end; first += 5) {
    const std::int64_t last = std::min(end, first + first % 71);
    std::vector<float> decoded(static_cast<std::size_t>(last - first) + 1, -7.0f);
    gguf::decode_range(format, blocks.data(), first, last, decoded.data());
    EXPECT_TRUE(std::equal(decoded.begin(), decoded.end() - 1, values.begin() + first));
    EXPECT_EQ(decoded.back(), -7.0f);
  }
}

TEST_P(BlockFormats, AreFoundByNumberAndName) {
  EXPECT_EQ(gguf::find_block_format(format.type)->name, format.name);
  EXPECT_EQ(gguf::find_block_format(format.name)->type, format.type);
}

INSTANTIATE_TEST_SUITE_P(All, BlockFormats, ::testing::ValuesIn(gguf::block_formats()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(BlockFormatTable, LacksOtherTypes) {
  EXPECT_EQ(gguf::block_formats().size(), 15u);
  EXPECT_EQ(gguf::find_block_format(16), nullptr);  // IQ2_XXS
  EXPECT_EQ(gguf::find_block_format("Q4_2"), nullptr);
}

}  // namespace
