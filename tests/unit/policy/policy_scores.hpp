// Helpers of tests that compare a policy's scores with plain loops.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/engine/policies.hpp>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/machine.hpp"
#include "unit/policy/fake_layer.hpp"

namespace kvzap::test {

using Parameters = std::map<std::string, std::string>;
/// (KV head)(row)
using Scores = std::vector<std::vector<double>>;

inline std::unique_ptr<Policy> make(const PolicyInfo& info, const Parameters& given = {},
                                    const ModelConfig& config = {}) {
  Parameters values;
  for (const auto& parameter : info.parameters) values[parameter.name] = parameter.standard;
  for (const auto& [name, value] : given) {
    EXPECT_EQ(values.count(name), 1u) << name;
    values[name] = value;
  }
  const HeadPartition partition = HeadPartition::even(1, 1, 1);
  const PolicySetup setup{config, partition, DType::f32, {}, Communicator::self()};
  return info.make(PolicyArguments(values), setup)();
}

/// Softmax probabilities of a query over the rows that it sees.
inline std::vector<double> probabilities(const LayerData& data, std::int64_t token,
                                         int query_head) {
  std::vector<double> result(data.seen(token, query_head / data.group));
  for (std::size_t r = 0; r < result.size(); ++r) {
    result[r] = data.attention_score(token, query_head, static_cast<std::int64_t>(r));
  }
  const double lse = log_sum_exp_of(result);
  for (double& p : result) p = std::exp(p - lse);
  result.resize(data.rows(query_head / data.group), 0.0);
  return result;
}

/// Rows of a head at positions below `position`.
inline std::int64_t rows_before(const LayerData& data, int head, std::int64_t position) {
  return position == 0 ? 0 : data.seen(position - 1, head);
}

/// The sum over the tokens from `first` on and the group's query heads of factor(token) * p.
template <class Factor>
std::vector<double> window_sum(const LayerData& data, int head, std::int64_t first,
                               const Factor& factor) {
  std::vector<double> sums(data.rows(head), 0.0);
  for (std::int64_t token = first; token < data.tokens; ++token) {
    for (int g = 0; g < data.group; ++g) {
      const auto p = probabilities(data, token, head * data.group + g);
      for (std::size_t r = 0; r < p.size(); ++r) sums[r] += factor(token) * p[r];
    }
  }
  return sums;
}

/// One more than the largest score of rows that are not protected, for those that are.
inline void protect(Scores& scores,
                    const std::vector<std::pair<std::int64_t, std::int64_t>>& rows) {
  double largest = -INFINITY;
  for (std::size_t h = 0; h < scores.size(); ++h) {
    for (std::int64_t r = 0; r < static_cast<std::int64_t>(scores[h].size()); ++r) {
      if (r < rows[h].first || r >= rows[h].second) largest = std::max(largest, scores[h][r]);
    }
  }
  if (largest == -INFINITY) largest = 0;
  for (std::size_t h = 0; h < scores.size(); ++h) {
    std::fill(scores[h].begin() + rows[h].first, scores[h].begin() + rows[h].second, largest + 1);
  }
}

/// `tolerance` is relative to the largest score that is not protected.
inline void expect_scores(const std::vector<std::vector<float>>& found, const Scores& expected,
                          double tolerance = 2e-5) {
  double largest = 0;
  double most = -INFINITY;
  for (const auto& head : expected) {
    for (double x : head) most = std::max(most, x);
  }
  for (const auto& head : expected) {
    for (double x : head) {
      if (x < most || most < 1) largest = std::max(largest, std::fabs(x));
    }
  }
  if (largest == 0) largest = 1;
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t h = 0; h < found.size(); ++h) {
    ASSERT_EQ(found[h].size(), expected[h].size());
    for (std::size_t r = 0; r < found[h].size(); ++r) {
      const double allowed = tolerance * (expected[h][r] == most ? std::max(1.0, most) : largest);
      ASSERT_NEAR(found[h][r], expected[h][r], allowed) << "head " << h << ", row " << r;
    }
  }
}

/// Both forms of kernels that a host has, and blocks of two sizes.
template <class Check>
void in_all_forms(const Check& check) {
  for (bool device : {false, true}) {
    SCOPED_TRACE(device ? "as on devices" : "as on hosts");
    base::machine().set_device(device);
    check();
  }
  base::machine().set_device(false);
}

/// head_dim, group, tokens, new tokens.
inline std::vector<LayerShape> shapes() {
  std::vector<LayerShape> result;
  for (const auto& [dim, group, tokens, new_tokens] :
       std::vector<std::tuple<int, int, std::int64_t, std::int64_t>>{{64, 1, 150, 150},
                                                                     {80, 7, 90, 30},
                                                                     {128, 2, 300, 300},
                                                                     {128, 16, 200, 1},
                                                                     {64, 2, 64, 64},
                                                                     {64, 2, 5, 5},
                                                                     {64, 2, 1, 1}}) {
    LayerShape shape;
    shape.head_dim = dim;
    shape.group = group;
    shape.tokens = tokens;
    shape.new_tokens = new_tokens;
    result.push_back(shape);
  }
  return result;
}

inline std::string name_of(const LayerShape& shape) {
  return "dim " + std::to_string(shape.head_dim) + " group " + std::to_string(shape.group) +
         " tokens " + std::to_string(shape.tokens) + " new " + std::to_string(shape.new_tokens);
}

}  // namespace kvzap::test
