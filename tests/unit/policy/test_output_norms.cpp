#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "policy/output_norms.hpp"
#include "unit/policy/fake_layer.hpp"

namespace {

using kvzap::linalg::Matrix;
using kvzap::policy::OutputNorms;
using kvzap::test::FakeLayer;
using kvzap::test::LayerData;
using kvzap::test::LayerShape;
using kvzap::test::random_layer;

/// ||W_O v|| as it is defined, in double.
double plain_norm(const LayerData& data, int query_head, std::int64_t row) {
  const float* const value = data.value(query_head / data.group, row);
  const float* const weights = &data.output_weights[query_head * data.head_dim * data.hidden_size];
  double sum = 0;
  for (std::int64_t i = 0; i < data.hidden_size; ++i) {
    double x = 0;
    for (int d = 0; d < data.head_dim; ++d) {
      x += static_cast<double>(value[d]) * weights[d * data.hidden_size + i];
    }
    sum += x * x;
  }
  return std::sqrt(sum);
}

/// Compares norms of a range of rows of each head with the definition.
void compare(const LayerData& data, const std::vector<int>& heads, OutputNorms& norms,
             std::int64_t begin, std::int64_t count) {
  FakeLayer layer(data, heads, kvzap::Communicator::self());
  for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
    const Matrix result("kvzap::test::norms", data.group, count + 3);
    norms(layer, h, begin, count, result);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), result);
    for (int g = 0; g < data.group; ++g) {
      for (std::int64_t r = 0; r < count; ++r) {
        const double expected = plain_norm(data, heads[h] * data.group + g, begin + r);
        EXPECT_NEAR(host(g, r), expected, 2e-5 * expected)
            << "head " << heads[h] << ", query head " << g << ", row " << begin + r;
      }
      EXPECT_EQ(host(g, count), 0) << "after the rows";
    }
  }
}

struct NormShape {
  int kv_heads, group, head_dim;
  std::int64_t hidden;
};

class OutputNormsOf : public ::testing::TestWithParam<NormShape> {};

TEST_P(OutputNormsOf, AreThoseOfTheDefinition) {
  const NormShape& p = GetParam();
  LayerShape shape;
  shape.kv_heads = p.kv_heads;
  shape.group = p.group;
  shape.head_dim = p.head_dim;
  shape.hidden_size = p.hidden;
  shape.tokens = shape.new_tokens = 600;  // more than a tile
  const LayerData data = random_layer(shape, 3);
  std::vector<int> heads;
  for (int h = 0; h < p.kv_heads; ++h) heads.push_back(h);
  OutputNorms norms;
  compare(data, heads, norms, 0, 600);
  compare(data, heads, norms, 17, 40);
}

INSTANTIATE_TEST_SUITE_P(Shapes, OutputNormsOf,
                         ::testing::Values(NormShape{2, 2, 64, 48}, NormShape{2, 3, 64, 130},
                                           NormShape{1, 1, 80, 81}, NormShape{2, 1, 16, 16},
                                           NormShape{1, 7, 128, 300}),
                         [](const auto& info) {
                           const NormShape& p = info.param;
                           return "kv" + std::to_string(p.kv_heads) + "_group" +
                                  std::to_string(p.group) + "_dim" + std::to_string(p.head_dim) +
                                  "_hidden" + std::to_string(p.hidden);
                         });

TEST(OutputNorms, KeepFactorsOfEachLayerAndServeTheHeadsOfARank) {
  LayerShape shape;
  shape.kv_heads = 3;
  shape.tokens = shape.new_tokens = 20;
  OutputNorms norms;
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (int l : {1, 0, 3}) {
      shape.layer = l;
      shape.layers = 4;
      compare(random_layer(shape, 10 + l), {0, 2}, norms, 0, 20);
    }
  }
}

TEST(OutputNorms, TakeWeightsOfAnyRank) {
  LayerShape shape;
  shape.kv_heads = 1;
  shape.group = 1;
  shape.head_dim = 8;
  shape.hidden_size = 12;
  shape.tokens = shape.new_tokens = 30;
  LayerData data = random_layer(shape, 5);
  // Columns that are 0, the same, and larger by far than others.
  for (int i = 0; i < 12; ++i) {
    data.output_weights[i] = 0;
    data.output_weights[3 * 12 + i] = data.output_weights[2 * 12 + i];
    data.output_weights[5 * 12 + i] *= 1000;
  }
  OutputNorms norms;
  compare(data, {0}, norms, 0, 30);
  std::fill(data.output_weights.begin(), data.output_weights.end(), 0.0f);
  OutputNorms of_nothing;
  compare(data, {0}, of_nothing, 0, 30);
}

TEST(OutputNorms, WhatIsNoNumberStaysNone) {
  LayerShape shape;
  shape.tokens = shape.new_tokens = 4;
  LayerData data = random_layer(shape, 6);
  data.values[0][64] = std::nanf("");
  FakeLayer layer(data);
  const Matrix result("kvzap::test::norms", data.group, 4);
  OutputNorms()(layer, 0, 0, 4, result);
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), result);
  EXPECT_TRUE(std::isfinite(host(0, 0)));
  EXPECT_TRUE(std::isnan(host(0, 1)));
  EXPECT_TRUE(std::isfinite(host(0, 2)));
}

}  // namespace
