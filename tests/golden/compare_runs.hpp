// Comparison of runs with the reference implementation's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <kvzap/engine/generate.hpp>
#include <string>
#include <vector>

#include "golden/golden_files.hpp"

namespace kvzap::golden {

/// Of the largest logit of a step.
inline constexpr double logit_tolerance = 1e-3;

/// A tensor (layer, KV head, token) of the reference.
template <class T>
struct Reference {
  std::vector<T> values;
  int heads = 1;
  std::int64_t tokens = 0;

  Reference(const SafetensorsFolder& file, const std::string& name, int layers, int n_heads)
      : values(tensor<T>(file, name)), heads(n_heads) {
    tokens = static_cast<std::int64_t>(values.size()) / (layers * heads);
  }
  const T* row(int layer, int head) const {
    return values.data() + (static_cast<std::int64_t>(layer) * heads + head) * tokens;
  }
};

/// A pair that we keep and the reference does not, or the other way round.
struct Difference {
  int layer = 0;
  int head = 0;
  std::int64_t position = 0;
  bool kept = false;  // by us
};

/// Differences of this rank's heads from a tensor that is 1 where a pair is kept.
inline std::vector<Difference> differences(Generator& generator, const HeadPartition& partition,
                                           int rank, const Reference<std::uint8_t>& expected,
                                           int layers) {
  std::vector<Difference> found;
  generator.gather_pages();
  for (int l = 0; l < layers; ++l) {
    const auto& heads = partition.heads(l, rank);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      std::vector<bool> kept(expected.tokens, false);
      for (std::int64_t p : generator.positions(l, static_cast<int>(h))) {
        // What came after the tokens that the reference judges stays.
        if (p < expected.tokens) kept[p] = true;
      }
      for (std::int64_t p = 0; p < expected.tokens; ++p) {
        if (kept[p] != (expected.row(l, heads[h])[p] != 0)) {
          found.push_back({l, heads[h], p, kept[p]});
        }
      }
    }
  }
  return found;
}

/// Logits row by row, as long as ours generated what the reference did; ids up to a step at which
/// ours is another one and the reference's best two logits lie closer than the tolerance: `tied` is
/// set where that ends the comparison.
inline void compare_generation(const std::vector<TokenId>& expected_ids,
                               const std::vector<float>& expected_logits,
                               const std::vector<TokenId>& ids,
                               const std::vector<std::vector<float>>& logits, bool is_root,
                               const std::string& what, bool& tied) {
  const std::size_t vocabulary = expected_logits.size() / expected_ids.size();
  for (std::size_t step = 0; step < expected_ids.size(); ++step) {
    ASSERT_LT(step, ids.size()) << what << ": stopped early";
    const float* row = expected_logits.data() + step * vocabulary;
    float largest = 0;
    for (std::size_t v = 0; v < vocabulary; ++v) largest = std::max(largest, std::fabs(row[v]));
    if (is_root) {
      double worst = 0;
      for (std::size_t v = 0; v < vocabulary; ++v) {
        worst = std::max<double>(worst, std::fabs(row[v] - logits[step][v]));
      }
      ASSERT_LT(worst, logit_tolerance * largest) << what << ": logits of step " << step;
    }
    std::vector<float> sorted(row, row + vocabulary);
    std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
    tied = ids[step] != expected_ids[step] && sorted[0] - sorted[1] < logit_tolerance * largest;
    if (tied) return;
    ASSERT_EQ(ids[step], expected_ids[step]) << what << ": step " << step;
  }
  EXPECT_EQ(ids.size(), expected_ids.size()) << what;
}

}  // namespace kvzap::golden
