// Blocks of values: those of the Python package gguf for formats with one scale, small errors for
// the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/simd.hpp"
#include "gguf/block_encoders.hpp"
#include "gguf/block_formats.hpp"
#include "golden/golden_files.hpp"

namespace {

using namespace kvzap;
using gguf::BlockFormat;

const BlockFormat& format_of(const std::string& name) { return *gguf::find_block_format(name); }

std::vector<std::byte> encoded(const BlockFormat& format, const std::vector<float>& values) {
  const auto n_blocks = static_cast<std::int64_t>(values.size()) / format.values;
  std::vector<std::byte> blocks(static_cast<std::size_t>(n_blocks * format.bytes));
  format.encode(values.data(), n_blocks, blocks.data());
  return blocks;
}

std::vector<float> rounded(const BlockFormat& format, const std::vector<float>& values) {
  const std::vector<std::byte> blocks = encoded(format, values);
  std::vector<float> result(values.size());
  format.decode(blocks.data(), static_cast<std::int64_t>(values.size()) / format.values,
                result.data());
  return result;
}

/// Calls `check` with each level that the processor has.
template <class Check>
void on_all_levels(const Check& check) {
  const auto level = base::machine().simd();
  for (const auto used :
       {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512}) {
    if (!base::processor_has(used)) continue;
    base::machine().set_simd(used);
    SCOPED_TRACE(base::name_of(used));
    check();
  }
  base::machine().set_simd(level);
}

TEST(BlockEncoders, WriteTheReferenceBlocks) {
  const auto file = SafetensorsFolder::open(golden::golden_dir / "block_encodings.safetensors");
  const auto values = golden::tensor<float>(file, "values");
  for (const char* name : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"}) {
    SCOPED_TRACE(name);
    const auto blocks = golden::tensor<std::byte>(file, std::string(name) + ".blocks");
    on_all_levels([&] { EXPECT_EQ(encoded(format_of(name), values), blocks); });
  }
}

/// The largest errors of a format.
struct Bounds {
  double normal;   // relative RMS error of normal values
  double shifted;  // of normal values plus 3
  float of_peak;   // of a value, as a share of the block's largest magnitude
};

// The first two are 1 % above the relative RMS errors of llama.cpp's quantizers for such values.
const std::map<std::string, Bounds> bounds = {
    {"Q4_0", {0.0866, 0.0579, 0.126f}},   {"Q4_1", {0.0790, 0.0250, 0.068f}},
    {"Q5_0", {0.0432, 0.0289, 0.063f}},   {"Q5_1", {0.0382, 0.0121, 0.034f}},
    {"Q8_0", {0.00541, 0.00364, 0.005f}}, {"Q4_K", {0.0720, 0.0282, 0.09f}},
    {"Q5_K", {0.0365, 0.0140, 0.05f}},    {"IQ4_NL", {0.0769, 0.0617, 0.13f}},
    {"Q6_K", {0.0179, 0.0121, 0.04f}},    {"MXFP4", {0.1162, 0.1025, 0.251f}}};

double relative_error(const std::vector<float>& values, const std::vector<float>& result) {
  double squares = 0, errors = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double error = values[i] - result[i];
    squares += static_cast<double>(values[i]) * values[i];
    errors += error * error;
  }
  return std::sqrt(errors / squares);
}

TEST(BlockEncoders, HaveSmallErrors) {
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(256 * 256);
  for (float& value : values) value = normal(engine);
  std::vector<float> shifted = values;
  for (float& value : shifted) value += 3;
  for (const auto& [name, bound] : bounds) {
    SCOPED_TRACE(name);
    on_all_levels([&, &name = name, &bound = bound] {
      EXPECT_LT(relative_error(values, rounded(format_of(name), values)), bound.normal);
      EXPECT_LT(relative_error(shifted, rounded(format_of(name), shifted)), bound.shifted);
    });
  }
}

std::vector<std::vector<float>> extreme_blocks() {
  std::mt19937 engine(6);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<std::vector<float>> blocks;
  for (const float scale : {1.0f, 1e-4f, 1e-7f, 1e-12f, 1e-30f, 1e-38f, 1e-41f, 65504.0f}) {
    std::vector<float> block(256);
    for (float& value : block) value = scale * uniform(engine);
    blocks.push_back(block);
    for (float& value : block) value = std::fabs(value);
    blocks.push_back(block);
    for (float& value : block) value = -value;
    blocks.push_back(block);
  }
  for (const float value : {0.0f, -0.0f, 0.3f, -0.3f, 65504.0f, -65504.0f, 1e-40f, 1e-20f}) {
    blocks.emplace_back(256, value);
  }
  for (const float peak : {65504.0f, -65504.0f}) {
    std::vector<float> block = blocks.front();
    block[100] = peak;
    blocks.push_back(block);
    block = std::vector<float>(256, 0.0f);
    block[100] = peak;
    blocks.push_back(block);
  }
  // A range that is small beside the values, and mixtures of magnitudes.
  for (int i = 0; i < 300; ++i) {
    const float scale = std::pow(10.0f, static_cast<float>(i % 50) / 5 - 5);
    const float shift = i % 3 == 0 ? 60000.0f : i % 3 == 1 ? -60000.0f : 0.0f;
    std::vector<float> block(256);
    for (float& value : block) {
      const float share = i % 2 == 0 || engine() % 8 > 0 ? scale : 65504.0f;
      value = std::max(-65504.0f, std::min(shift + share * uniform(engine), 65504.0f));
    }
    blocks.push_back(block);
  }
  return blocks;
}

TEST(BlockEncoders, TakeExtremeBlocks) {
  constexpr float of_subnormal_scales = 1e-5f;
  for (const std::vector<float>& block : extreme_blocks()) {
    float peak = 0;
    for (const float value : block) peak = std::max(peak, std::fabs(value));
    for (const auto& [name, bound] : bounds) {
      SCOPED_TRACE(name + " " + std::to_string(peak));
      on_all_levels([&, &name = name, &bound = bound] {
        const std::vector<float> result = rounded(format_of(name), block);
        float largest = 0;
        for (std::size_t i = 0; i < block.size(); ++i) {
          const float error = std::fabs(result[i] - block[i]);
          largest = error <= largest ? largest : error;  // NaN is larger
        }
        EXPECT_LE(largest, bound.of_peak * peak + of_subnormal_scales);
      });
    }
  }
}

TEST(BlockEncoders, ConvertPlainTypes) {
  const std::vector<float> values = {1.0f, -2.5f, 0.1f, 65504.0f, 1e-7f, 0.0f};
  EXPECT_EQ(rounded(format_of("F32"), values), values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(rounded(format_of("F16"), values)[i], static_cast<float>(kvzap::half(values[i])));
    EXPECT_EQ(rounded(format_of("BF16"), values)[i], static_cast<float>(bfloat16(values[i])));
  }
}

TEST(BlockEncoders, ExistForTheTypesOfMixtures) {
  for (const BlockFormat& format : gguf::block_formats()) {
    const bool is_known = format.values == 1 || bounds.count(std::string(format.name)) > 0;
    EXPECT_EQ(format.encode != nullptr, is_known) << format.name;
  }
}

}  // namespace
