// Quantised tensors, written by their published layouts, widen to the weights that they stand for.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "base/kokkos_compat.hpp"
#include "linalg/quantised/matrix.hpp"
#include "model/quantised_checkpoint.hpp"
#include "safetensors_writer.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

using model::QuantisedConfig;
using model::QuantisedFormat;
using Shape = std::vector<std::int64_t>;

std::size_t values_of(const Shape& shape) {
  return static_cast<std::size_t>(
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
}

/// The tensors of one file.
class Tensors {
 public:
  template <class T>
  void set(const std::string& name, const std::string& dtype, const Shape& shape,
           const std::vector<T>& values) {
    ASSERT_EQ(values.size(), values_of(shape)) << name;
    const auto* const bytes = reinterpret_cast<const char*>(values.data());
    m_tensors[name] = {dtype, shape, std::string(bytes, values.size() * sizeof(T))};
  }
  void erase(const std::string& name) { m_tensors.erase(name); }

  model::QuantisedStore open(const QuantisedConfig& config) const {
    const TemporaryFolder folder;
    write_safetensors(folder.path() / "model.safetensors", m_tensors);
    return model::QuantisedStore(SafetensorsFolder::open(folder.path()), config);
  }

 private:
  std::map<std::string, StoredTensor> m_tensors;
};

class QuantisedCheckpoint : public ::testing::Test {
 protected:
  int random(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(m_generator);
  }
  std::vector<float> random_scales(std::size_t count) {
    std::vector<float> scales(count);
    for (float& scale : scales) scale = static_cast<float>(random(1, 2000)) / 1024.0f;
    return scales;
  }
  template <class Value>
  static std::vector<Value> rounded(const std::vector<float>& values) {
    std::vector<Value> narrow;
    for (const float value : values) narrow.emplace_back(value);
    return narrow;
  }

  /// Compares the whole tensor and parts of it; NaN equals NaN.
  void expect_values(const model::WeightStore& store, const std::string& name, const Shape& shape,
                     const std::vector<float>& expected) {
    ASSERT_TRUE(store.has(name));
    const auto tensor = store.at(name, shape);
    EXPECT_FALSE(tensor->plain());
    const std::int64_t columns = shape.back();
    const std::int64_t rows = static_cast<std::int64_t>(expected.size()) / columns;
    for (int trial = 0; trial < 40; ++trial) {
      const bool is_whole = trial == 0;
      const std::int64_t row = is_whole ? 0 : random(0, static_cast<int>(rows) - 1);
      const std::int64_t row_end = is_whole ? rows : random(static_cast<int>(row), rows);
      const std::int64_t begin = is_whole ? 0 : random(0, static_cast<int>(columns) - 1);
      const std::int64_t end = is_whole ? columns : random(static_cast<int>(begin), columns);
      const auto width = static_cast<std::size_t>(end - begin);
      std::vector<float> found(static_cast<std::size_t>(row_end - row) * width + 1, -77.0f);
      tensor->read(row, row_end, begin, end, found.data());
      EXPECT_EQ(found.back(), -77.0f);
      for (std::size_t i = 0; i + 1 < found.size(); ++i) {
        const std::size_t at =
            (static_cast<std::size_t>(row) + i / width) * static_cast<std::size_t>(columns) +
            static_cast<std::size_t>(begin) + i % width;
        if (std::isnan(expected[at])) {
          ASSERT_TRUE(std::isnan(found[i])) << at;
        } else {
          ASSERT_EQ(found[i], expected[at]) << at;
        }
      }
    }
    tensor->release();
    EXPECT_NE(tensor->description().find("model.safetensors: tensor layer"), std::string::npos);
  }

  Tensors m_tensors;

 private:
  std::mt19937 m_generator{33};
};

float float8(int bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 128 ? -magnitude : magnitude;
}

class Fp8 : public QuantisedCheckpoint {
 protected:
  static constexpr std::int64_t rows = 5, columns = 256;

  /// Checks with scales of this shape, in blocks of block_rows x block_columns.
  void check(const Shape& scale_shape, std::int64_t block_rows, std::int64_t block_columns,
             const QuantisedConfig& config, const std::string& ending = "_scale_inv") {
    std::vector<std::uint8_t> bits(rows * columns);
    for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint8_t>(i * 7 % 256);
    const auto scales = random_scales(values_of(scale_shape));
    m_tensors.set("layer.weight", "F8_E4M3", {rows, columns}, bits);
    m_tensors.set("layer.weight" + ending, "F32", scale_shape, scales);
    const std::int64_t across = (columns + block_columns - 1) / block_columns;
    std::vector<float> expected;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < columns; ++column) {
        const auto scale =
            static_cast<std::size_t>(row / block_rows * across + column / block_columns);
        expected.push_back(float8(bits[static_cast<std::size_t>(row * columns + column)]) *
                           scales[scale]);
      }
    }
    expect_values(m_tensors.open(config), "layer.weight", {rows, columns}, expected);
  }

  static QuantisedConfig blocks(std::int64_t rows_of_block, std::int64_t columns_of_block) {
    QuantisedConfig config;
    config.block_rows = rows_of_block;
    config.block_columns = columns_of_block;
    return config;
  }
};

TEST_F(Fp8, HasAScaleForEachBlock) {
  check({3, 3}, 2, 100, blocks(2, 100));
  check({1, 2}, 128, 128, blocks(128, 128));
}

TEST_F(Fp8, HasAScaleForEachRow) {
  check({rows, 1}, 1, columns, {}, "_scale");
  check({rows}, 1, columns, {}, "_scale");
}

TEST_F(Fp8, HasOneScale) {
  check({}, rows, columns, {});
  check({1}, rows, columns, {});
}

// All experts of a layer in one tensor. A matrix ends within a block.
TEST_F(Fp8, HasBlocksOfEachMatrix) {
  constexpr std::int64_t count = 3, down = 3, across = 3;
  std::vector<std::uint8_t> bits(count * rows * columns);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint8_t>(i * 7 % 256);
  const auto scales = random_scales(count * down * across);
  m_tensors.set("layer.weight", "F8_E4M3", {count, rows, columns}, bits);
  m_tensors.set("layer.weight_scale_inv", "F32", {count, down, across}, scales);
  std::vector<float> expected;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / columns % rows;
    const auto column = static_cast<std::int64_t>(i) % columns;
    const auto matrix = static_cast<std::int64_t>(i) / (rows * columns);
    const std::int64_t scale = (matrix * down + row / 2) * across + column / 100;
    expected.push_back(float8(bits[i]) * scales[static_cast<std::size_t>(scale)]);
  }
  const auto store = m_tensors.open(blocks(2, 100));
  expect_values(store, "layer.weight", {count, rows, columns}, expected);
  kvzap::model::TensorSlice slice{1, count};
  slice.rows_first = true;
  std::vector<float> found(rows * 50);
  store.slice("layer.weight", slice, rows, columns)->read(0, rows, 150, 200, found.data());
  for (std::int64_t i = 0; i < rows * 50; ++i) {
    const auto at = static_cast<std::size_t>((rows + i / 50) * columns + 150 + i % 50);
    if (std::isnan(expected[at])) continue;
    EXPECT_EQ(found[i], expected[at]) << i;
  }
  const auto wrong = m_tensors.open(blocks(4, 100));
  expect_error(
      [&] {
        wrong.at("layer.weight", {count, rows, columns});
      },
      {"tensor layer.weight_scale_inv", "expected shape [3, 2, 3]"});
  const auto by_row = m_tensors.open({});
  expect_error(
      [&] {
        by_row.at("layer.weight", {count, rows, columns});
      },
      {"expected plain values of shape [3, 5, 256]"});
}

TEST_F(Fp8, StaysInBlocksOfOneScale) {
  constexpr std::int64_t few = 200;  // a block and a part
  std::vector<std::uint8_t> bits(rows * few);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    bits[i] = static_cast<std::uint8_t>(i * 7 % 256);
    if ((bits[i] & 127) == 127) bits[i] = 128;  // no NaN, but -0
  }
  bits[3 * few + 150] = 0xff;  // NaN
  m_tensors.set("layer.weight", "F8_E4M3", {rows, few}, bits);
  const auto tensor = [&](const Shape& scale_shape, const QuantisedConfig& config) {
    m_tensors.set("layer.weight_scale", "F32", scale_shape, random_scales(values_of(scale_shape)));
    return m_tensors.open(config);
  };
  EXPECT_EQ(tensor({3, 2}, blocks(2, 100)).at("layer.weight", {rows, few})->block_format(), "");
  namespace quantised = linalg::quantised;
  for (const auto& [shape, config] :
       {std::make_pair(Shape{1, 2}, blocks(128, 128)), std::make_pair(Shape{1, 1}, blocks(5, 256)),
        std::make_pair(Shape{rows}, QuantisedConfig{}),
        std::make_pair(Shape{}, QuantisedConfig{})}) {
    const auto store = tensor(shape, config);
    const auto stored = store.at("layer.weight", {rows, few});
    ASSERT_EQ(stored->block_format(), "F8_E4M3");
    quantised::Matrix matrix({{quantised::find_format("F8_E4M3"), rows}}, {{0, few}});
    const quantised::Matrix::Data data("data", matrix.bytes());
    const auto host = Kokkos::create_mirror_view(data);
    std::vector<std::vector<std::byte>> buffers(rows);
    std::vector<const std::byte*> in_blocks;
    for (std::int64_t row = 0; row < rows; ++row) {
      in_blocks.push_back(stored->row_blocks(row, buffers[static_cast<std::size_t>(row)]));
    }
    matrix.pack(0, in_blocks.data(), host.data());
    Kokkos::deep_copy(data, host);
    matrix.place(data);
    if (!base::runs_on_host) continue;
    std::vector<float> expected(rows * few), found(few);
    stored->read(0, rows, 0, few, expected.data());
    for (std::int64_t row = 0; row < rows; ++row) {
      matrix.decode(row, 0, few, found.data());
      for (std::int64_t i = 0; i < few; ++i) {
        // A NaN spreads over its block.
        if (row == 3 && i >= 128) {
          ASSERT_TRUE(std::isnan(found[static_cast<std::size_t>(i)]));
        } else {
          ASSERT_EQ(found[static_cast<std::size_t>(i)],
                    expected[static_cast<std::size_t>(row * few + i)]);
        }
      }
    }
  }
}

TEST_F(Fp8, NamesTheDamagedPart) {
  check({3, 3}, 2, 100, blocks(2, 100));
  const auto expect = [&](const QuantisedConfig& config, const Shape& shape,
                          std::initializer_list<std::string_view> parts) {
    const auto store = m_tensors.open(config);
    expect_error([&] { store.at("layer.weight", shape); }, parts);
  };
  expect(blocks(2, 128), {rows, columns},
         {"tensor layer.weight_scale_inv", "expected shape [3, 2]", "found shape [3, 3]"});
  expect({}, {rows, columns},
         {"tensor layer.weight_scale_inv", "expected shape [], [1], [5] or [5, 1]", "[3, 3]"});
  expect(blocks(2, 100), {columns, rows},
         {"tensor layer.weight:", "expected shape [256, 5]", "found shape [5, 256]"});
  expect(blocks(2, 100), {rows * columns}, {"expected plain values of shape [1280]"});
  m_tensors.set("layer.weight_scale_inv", "I32", {3, 3}, std::vector<std::int32_t>(9));
  expect(blocks(2, 100), {rows, columns}, {"expected dtype F32, F16 or BF16", "found dtype I32"});
  m_tensors.erase("layer.weight_scale_inv");
  expect(blocks(2, 100), {rows, columns},
         {"tensor layer.weight:", "expected a tensor layer.weight_scale beside it", "found none"});
  m_tensors.set("layer.weight", "F8_E5M2", {5}, std::vector<std::uint8_t>(5));
  expect({}, {5}, {"dtype F8_E5M2"});
}

TEST_F(QuantisedCheckpoint, PlainTensorsStayPlain) {
  m_tensors.set("layer.weight", "BF16", {2, 3}, rounded<bfloat16>({1, 2, 3, 4, 5, 6}));
  for (const auto format : {QuantisedFormat::fp8, QuantisedFormat::mxfp4, QuantisedFormat::awq,
                            QuantisedFormat::gptq}) {
    QuantisedConfig config;
    config.format = format;
    const auto store = m_tensors.open(config);
    EXPECT_TRUE(store.at("layer.weight", {2, 3})->plain());
    EXPECT_FALSE(store.has("layer.bias"));
    expect_error([&] { store.at("layer.bias", {3}); }, {"tensor 'layer.bias'", "is missing"});
  }
}

TEST_F(QuantisedCheckpoint, Mxfp4) {
  constexpr std::array<float, 8> magnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const Shape shape = {2, 3, 64};
  std::vector<std::uint8_t> nibbles, scales;
  std::vector<float> expected;
  for (int block = 0; block < 2 * 3 * 2; ++block) {
    const int exponent = block == 0 ? 0 : block == 1 ? 255 : random(100, 140);
    scales.push_back(static_cast<std::uint8_t>(exponent));
    for (int i = 0; i < 16; ++i) {
      const int both = random(0, 255);
      nibbles.push_back(static_cast<std::uint8_t>(both));
      for (const int bits : {both & 15, both >> 4}) {
        const float value =
            std::ldexp(magnitudes[static_cast<std::size_t>(bits & 7)], exponent - 127);
        const float found = exponent == 255 ? std::numeric_limits<float>::quiet_NaN() : value;
        expected.push_back(bits & 8 ? -found : found);
      }
    }
  }
  m_tensors.set("layer.experts_blocks", "U8", {2, 3, 2, 16}, nibbles);
  m_tensors.set("layer.experts_scales", "U8", {2, 3, 2}, scales);
  QuantisedConfig config;
  config.format = QuantisedFormat::mxfp4;
  const auto store = m_tensors.open(config);
  expect_values(store, "layer.experts", shape, expected);
  expect_error(
      [&] {
        store.at("layer.experts", {2, 3, 48});
      },
      {"tensor layer.experts_blocks", "whole blocks of 32 values", "found 48 columns"});
  expect_error(
      [&] {
        store.at("layer.experts", {2, 3, 96});
      },
      {"tensor layer.experts_scales", "expected shape [2, 3, 3]", "found shape [2, 3, 2]"});
  m_tensors.set("layer.experts_blocks", "I8", {2, 3, 2, 16}, nibbles);
  expect_error([&] { m_tensors.open(config).at("layer.experts", shape); },
               {"expected dtype U8", "found dtype I8"});
}

/// Integers of 4 bits with groups.
class Grouped : public QuantisedCheckpoint {
 protected:
  static constexpr int outputs = 72, inputs = 64;

  static std::size_t index(int row, int columns, int column) {
    return static_cast<std::size_t>(row * columns + column);
  }
  /// words[i / 8] with nibble place(i % 8) = value(i), for `count` values.
  template <class Value, class Place>
  static void pack(std::vector<std::uint32_t>& words, int count, const Value& value,
                   const Place& place) {
    for (int begin = 0; begin < count; begin += 8) {
      std::uint32_t word = 0;
      for (int i = 0; i < 8; ++i) {
        word |= static_cast<std::uint32_t>(value(begin + i)) << (4 * place(i));
      }
      words.push_back(word);
    }
  }
  static int in_order(int i) { return i; }
  // AutoAWQ: the nibbles of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7.
  static int interleaved(int i) {
    constexpr std::array<int, 8> output_of = {0, 2, 4, 6, 1, 3, 5, 7};
    return static_cast<int>(std::find(output_of.begin(), output_of.end(), i) - output_of.begin());
  }

  void draw(int group_size) {
    m_groups = (inputs + group_size - 1) / group_size;
    m_integers.resize(outputs * inputs);
    m_zeros.resize(static_cast<std::size_t>(m_groups * outputs));
    for (int& value : m_integers) value = random(0, 15);
    for (int& value : m_zeros) value = random(0, 15);
    m_scales = rounded<half>(random_scales(m_zeros.size()));
    m_group_of.clear();
    for (int i = 0; i < inputs; ++i) m_group_of.push_back(i / group_size);
  }

  std::vector<float> expected() const {
    std::vector<float> values;
    for (int output = 0; output < outputs; ++output) {
      for (int input = 0; input < inputs; ++input) {
        const int group = m_group_of[static_cast<std::size_t>(input)];
        const std::size_t at = index(group, outputs, output);
        values.push_back(
            static_cast<float>(m_integers[index(output, inputs, input)] - m_zeros[at]) *
            static_cast<float>(m_scales[at]));
      }
    }
    return values;
  }

  void write_awq() {
    std::vector<std::uint32_t> words, zeros;
    for (int input = 0; input < inputs; ++input) {
      const auto value = [&](int output) { return m_integers[index(output, inputs, input)]; };
      pack(words, outputs, value, interleaved);
    }
    for (int group = 0; group < m_groups; ++group) {
      const auto zero = [&](int output) { return m_zeros[index(group, outputs, output)]; };
      pack(zeros, outputs, zero, interleaved);
    }
    m_tensors.set("layer.qweight", "I32", {inputs, outputs / 8}, words);
    m_tensors.set("layer.qzeros", "I32", {m_groups, outputs / 8}, zeros);
    m_tensors.set("layer.scales", "F16", {m_groups, outputs}, m_scales);
  }

  void write_gptq(int zero_offset) {
    std::vector<std::uint32_t> words(outputs * inputs / 8), zeros;
    for (int output = 0; output < outputs; ++output) {
      std::vector<std::uint32_t> column;
      const auto value = [&](int input) { return m_integers[index(output, inputs, input)]; };
      pack(column, inputs, value, in_order);
      for (int i = 0; i < inputs / 8; ++i) {
        words[index(i, outputs, output)] = column[static_cast<std::size_t>(i)];
      }
    }
    for (int group = 0; group < m_groups; ++group) {
      const auto zero = [&](int output) {
        return (m_zeros[index(group, outputs, output)] - zero_offset) & 15;
      };
      pack(zeros, outputs, zero, in_order);
    }
    m_tensors.set("layer.qweight", "I32", {inputs / 8, outputs}, words);
    m_tensors.set("layer.qzeros", "I32", {m_groups, outputs / 8}, zeros);
    m_tensors.set("layer.scales", "F16", {m_groups, outputs}, m_scales);
    m_tensors.set("layer.g_idx", "I32", {inputs}, m_group_of);
  }

  static QuantisedConfig config_of(QuantisedFormat format, int group_size) {
    QuantisedConfig config;
    config.format = format;
    config.group_size = group_size == inputs ? 0 : group_size;
    return config;
  }

  int m_groups = 0;
  std::vector<int> m_integers;  // (outputs, inputs)
  std::vector<int> m_zeros;     // (groups, outputs)
  std::vector<half> m_scales;   // (groups, outputs)
  std::vector<std::int32_t> m_group_of;
};

TEST_F(Grouped, Awq) {
  for (const int group_size : {16, 32, inputs}) {
    draw(group_size);
    write_awq();
    expect_values(m_tensors.open(config_of(QuantisedFormat::awq, group_size)), "layer.weight",
                  {outputs, inputs}, expected());
  }
}

TEST_F(Grouped, GptqOfBothVersionsAndInAnyOrder) {
  for (const int group_size : {16, 32, inputs}) {
    for (const bool is_shuffled : {false, true}) {
      for (const int zero_offset : {0, 1}) {
        draw(group_size);
        if (is_shuffled) std::reverse(m_group_of.begin() + 3, m_group_of.end());
        if (is_shuffled) std::swap(m_group_of[0], m_group_of[20]);
        write_gptq(zero_offset);
        if (!is_shuffled && zero_offset == 0) m_tensors.erase("layer.g_idx");
        auto config = config_of(QuantisedFormat::gptq, group_size);
        config.zeros_less_one = zero_offset == 1;
        expect_values(m_tensors.open(config), "layer.weight", {outputs, inputs}, expected());
      }
    }
  }
}

TEST_F(Grouped, ShuffledGroupsHaveBlocksInAnyOrder) {
  draw(32);
  std::reverse(m_group_of.begin() + 3, m_group_of.end());
  write_gptq(0);
  const auto store = m_tensors.open(config_of(QuantisedFormat::gptq, 32));
  const auto tensor = store.at("layer.weight", {outputs, inputs});
  ASSERT_EQ(tensor->block_format(), "INT4");
  ASSERT_NE(tensor->input_groups(), nullptr);
  EXPECT_EQ(*tensor->input_groups(), m_group_of);
  model::InputOrder order;
  for (int group = 0; group < m_groups; ++group) {
    for (int i = inputs - 1; i >= 5; --i) {  // without the first ones
      if (m_group_of[static_cast<std::size_t>(i)] == group) order.push_back(i);
    }
    order.resize((order.size() + 31) / 32 * 32, -1);
  }
  const std::vector<float> values = expected();
  std::vector<std::byte> buffer;
  for (int output = 0; output < outputs; ++output) {
    const std::byte* const blocks = tensor->ordered_blocks(output, order, buffer);
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (order[i] < 0) continue;
      const std::byte* const block = blocks + i / 32 * 19;
      half scale{};
      std::memcpy(&scale, block, sizeof(scale));
      const int both = std::to_integer<int>(block[3 + i % 16]);
      const int code = (i % 32 < 16 ? both : both >> 4) & 15;
      ASSERT_EQ(
          static_cast<float>(code - std::to_integer<int>(block[2])) * static_cast<float>(scale),
          values[index(output, inputs, order[i])]);
    }
  }
}

TEST_F(Grouped, GroupsBesideBlocksHaveAnOrder) {
  draw(48);
  write_awq();
  const auto store = m_tensors.open(config_of(QuantisedFormat::awq, 48));
  const auto tensor = store.at("layer.weight", {outputs, inputs});
  EXPECT_EQ(tensor->block_format(), "INT4");
  ASSERT_NE(tensor->input_groups(), nullptr);
  EXPECT_EQ(*tensor->input_groups(), m_group_of);
  std::vector<std::byte> buffer;
  EXPECT_EQ(tensor->row_blocks(0, buffer), nullptr);
}

TEST_F(Grouped, SmallShuffledGroupsHaveNoBlocks) {
  draw(16);
  std::swap(m_group_of[0], m_group_of[20]);
  write_gptq(0);
  const auto store = m_tensors.open(config_of(QuantisedFormat::gptq, 16));
  EXPECT_EQ(store.at("layer.weight", {outputs, inputs})->block_format(), "");
}

TEST_F(Grouped, SymmetricIntegersNeedNoZeroPoints) {
  for (const auto format : {QuantisedFormat::awq, QuantisedFormat::gptq}) {
    draw(32);
    std::fill(m_zeros.begin(), m_zeros.end(), 8);
    if (format == QuantisedFormat::awq) {
      write_awq();
    } else {
      write_gptq(1);
    }
    m_tensors.erase("layer.qzeros");
    auto config = config_of(format, 32);
    expect_error(
        [&] {
          m_tensors.open(config).at("layer.weight", {outputs, inputs});
        },
        {"expected a tensor layer.qzeros beside it", "found none"});
    config.may_lack_zeros = true;
    expect_values(m_tensors.open(config), "layer.weight", {outputs, inputs}, expected());
  }
}

TEST_F(Grouped, NameTheDamagedPart) {
  const auto config = config_of(QuantisedFormat::gptq, 32);
  const auto expect = [&](const std::function<void()>& damage, const Shape& shape,
                          std::initializer_list<std::string_view> parts) {
    draw(32);
    write_gptq(0);
    damage();
    const auto store = m_tensors.open(config);
    expect_error([&] { store.at("layer.weight", shape); }, parts);
  };
  const Shape shape = {outputs, inputs};
  const auto group = [&](std::int32_t value) {
    m_group_of[5] = value;
    m_tensors.set("layer.g_idx", "I32", {inputs}, m_group_of);
  };
  expect([&] { group(2); }, shape,
         {"tensor layer.g_idx", "expected groups from 0 to 1", "found 2 for input 5"});
  expect([&] { group(-1); }, shape, {"tensor layer.g_idx", "found -1 for input 5"});
  expect([&] { m_tensors.erase("layer.scales"); }, shape,
         {"tensor layer.qweight", "expected a tensor layer.scales beside it"});
  expect([] {}, {outputs, inputs * 2},
         {"tensor layer.qweight", "expected shape [16, 72]", "found shape [8, 72]"});
  expect([] {}, {outputs, inputs + 1},
         {"tensor layer.qweight", "expected a multiple of 8 inputs", "found 65"});
  expect(
      [&] {
        m_tensors.set("layer.scales", "F16", {2, 3}, std::vector<half>(6));
      },
      shape, {"tensor layer.scales", "expected shape [2, 72]", "found shape [2, 3]"});
  expect(
      [&] {
        m_tensors.set("layer.qzeros", "I32", {2, 3}, std::vector<int>(6));
      },
      shape, {"tensor layer.qzeros", "expected shape [2, 9]", "found shape [2, 3]"});
  expect(
      [&] {
        m_tensors.set("layer.qweight", "I32", {3, 3}, std::vector<int>(9));
      },
      shape, {"tensor layer.qweight", "expected shape [8, 72]", "found shape [3, 3]"});
  expect(
      [&] {
        m_tensors.set("layer.qweight", "F32", {3, 3}, std::vector<float>(9));
      },
      shape, {"tensor layer.qweight", "expected dtype I32", "found dtype F32"});
}

}  // namespace
}  // namespace kvzap::test
