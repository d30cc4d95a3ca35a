// Policies for long answers, against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "policy/registry.hpp"
#include "unit/policy/policy_scores.hpp"

namespace kvzap::test {
namespace {

std::vector<double> softmax(std::vector<double> x) {
  const double lse = log_sum_exp_of(x);
  for (double& value : x) value = std::exp(value - lse);
  return x;
}

struct RKvSettings {
  std::int64_t window = 8;
  std::int64_t kernel = 7;
  double lambda = 0.1;
  double similarity = 0.5;
  int retained = 1;
};

/// Rows before the window: mean over its tokens of the softmax of the group's largest logits, and
/// then the largest of the neighbours.
std::vector<double> importance_of(const LayerData& data, int head, std::int64_t first,
                                  const RKvSettings& how) {
  const std::int64_t before = rows_before(data, head, first);
  std::vector<double> mean(before, 0.0);
  for (std::int64_t token = first; token < data.tokens; ++token) {
    std::vector<double> logits(before, -INFINITY);
    for (std::int64_t r = 0; r < before; ++r) {
      for (int g = 0; g < data.group; ++g) {
        logits[r] = std::max(logits[r], data.attention_score(token, head * data.group + g, r));
      }
    }
    const std::vector<double> p = softmax(logits);
    for (std::int64_t r = 0; r < before; ++r) {
      mean[r] += p[r] / static_cast<double>(data.tokens - first);
    }
  }
  std::vector<double> pooled(before, 0.0);
  for (std::int64_t r = 0; r < before; ++r) {
    for (std::int64_t i = r - how.kernel / 2; i <= r + how.kernel / 2; ++i) {
      if (i >= 0 && i < before) pooled[r] = std::max(pooled[r], mean[i]);
    }
  }
  return pooled;
}

double cosine_of(const LayerData& data, int head, std::int64_t i, std::int64_t j) {
  double product = 0, of_i = 0, of_j = 0;
  for (int d = 0; d < data.head_dim; ++d) {
    const double a = data.key(head, i)[d], b = data.key(head, j)[d];
    product += a * b;
    of_i += a * a;
    of_j += b * b;
  }
  return product / std::sqrt(of_i * of_j);
}

/// The whole matrix of cosines: without the diagonal, and without the newest similar ones of each
/// row.
std::vector<double> redundancy_of(const LayerData& data, int head, const RKvSettings& how) {
  const std::int64_t rows = data.rows(head);
  std::vector<double> means(rows, 0.0);
  for (std::int64_t i = 0; i < rows; ++i) {
    int retained = 0;
    for (std::int64_t j = rows - 1; j >= 0; --j) {
      if (i == j) continue;
      const double cosine = cosine_of(data, head, i, j);
      if (cosine > how.similarity && retained < how.retained) {
        ++retained;
        continue;
      }
      means[j] += cosine / static_cast<double>(rows);
    }
  }
  return softmax(means);
}

Scores expected_r_kv(const LayerData& data, RKvSettings how) {
  if (data.tokens <= how.window) how.window = std::max<std::int64_t>(1, data.tokens / 2);
  const std::int64_t first = data.tokens - how.window;
  Scores scores;
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;
  for (int h = 0; h < data.kv_heads; ++h) {
    scores.emplace_back(data.rows(h), 0.0);
    const std::vector<double> importance = importance_of(data, h, first, how);
    const std::vector<double> redundancy = redundancy_of(data, h, how);
    for (std::size_t r = 0; r < importance.size(); ++r) {
      scores[h][r] = how.lambda * importance[r] - (1 - how.lambda) * redundancy[r];
    }
    kept.emplace_back(static_cast<std::int64_t>(importance.size()), data.rows(h));
  }
  protect(scores, kept);
  return scores;
}

/// Rows are taken one by one until they hold the share; each other one is compared with them.
Scores expected_adaptive_r_kv(const LayerData& data, RKvSettings how, double mass) {
  if (data.tokens <= how.window) how.window = std::max<std::int64_t>(1, data.tokens / 2);
  const std::int64_t first = data.tokens - how.window;
  Scores scores;
  std::vector<std::pair<std::int64_t, std::int64_t>> window;
  for (int h = 0; h < data.kv_heads; ++h) {
    scores.emplace_back(data.rows(h), 0.0);
    const std::vector<double> importance = importance_of(data, h, first, how);
    const auto rows = static_cast<std::int64_t>(importance.size());
    window.emplace_back(rows, data.rows(h));
    double all = 0, sum = 0;
    for (const double p : importance) all += p;
    std::vector<bool> stays(rows, false);
    std::int64_t count = 0;
    while (count < rows && (count == 0 || sum < mass * all)) {
      std::int64_t best = -1;
      for (std::int64_t r = 0; r < rows; ++r) {
        if (!stays[r] && (best < 0 || importance[r] > importance[best] + 1e-12)) best = r;
      }
      stays[best] = true;
      sum += importance[best];
      ++count;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      double mean = 0, likeness = 0;
      for (std::int64_t i = 0; i < rows; ++i) mean += i == r ? 0 : cosine_of(data, h, r, i) / rows;
      for (std::int64_t i = 0; i < rows; ++i) {
        const double cosine = cosine_of(data, h, r, i);
        if (stays[i] && cosine >= mean) likeness += cosine / count;
      }
      scores[h][r] = stays[r] ? importance[r] : -2 - likeness;
    }
  }
  protect(scores, window);
  return scores;
}

TEST(RKv, StaysForTheShareOfAttentionAndThenForDiversity) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 34);
    in_all_forms([&] {
      FakeLayer layer(data);
      for (const char* mass : {"0.5", "0.9", "1"}) {
        SCOPED_TRACE(mass);
        expect_scores(layer.run(*make(policy::r_kv(), {{"mass", mass}, {"kernel", "3"}})),
                      expected_adaptive_r_kv(data, {8, 3, 0, 0, 0}, std::stod(mass)));
      }
    });
  }
}

TEST(RKv, ImportanceLessRedundancy) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 30);
    in_all_forms([&] {
      FakeLayer layer(data);
      expect_scores(layer.run(*make(policy::r_kv())), expected_r_kv(data, {}));
      expect_scores(layer.run(*make(policy::r_kv(), {{"retained", "0"}, {"similarity", "0"}})),
                    expected_r_kv(data, {8, 7, 0.1, 0, 0}));
      // Hardly any row has so many: the search goes on to the first row.
      expect_scores(layer.run(*make(policy::r_kv(), {{"retained", "9"}, {"similarity", "0.65"}})),
                    expected_r_kv(data, {8, 7, 0.1, 0.65, 9}));
      expect_scores(layer.run(*make(policy::r_kv(), {{"window", "16"},
                                                     {"kernel", "3"},
                                                     {"lambda", "0.6"},
                                                     {"similarity", "0.55"},
                                                     {"retained", "4"}})),
                    expected_r_kv(data, {16, 3, 0.6, 0.55, 4}));
    });
  }
  EXPECT_THROW(make(policy::r_kv(), {{"kernel", "4"}}), Error);
}

// Of rows with one key, in a head whose other keys differ, the newest is the least redundant.
TEST(RKv, KeepsTheNewestOfSimilarRows) {
  LayerShape shape;
  shape.kv_heads = 1;
  shape.head_dim = 128;
  shape.tokens = shape.new_tokens = 80;
  LayerData data = random_layer(shape, 31);
  std::mt19937 random(32);
  std::normal_distribution<float> normal;
  for (float& x : data.keys[0]) x = normal(random);
  for (float& x : data.queries) x = 0;
  for (const std::int64_t r : {20, 30, 50}) {
    std::copy_n(data.key(0, 10), data.head_dim, &data.keys[0][r * data.head_dim]);
  }
  const auto scores = FakeLayer(data).run(*make(policy::r_kv()))[0];
  for (const std::int64_t r : {10, 20, 30}) EXPECT_LT(scores[r], scores[50]) << r;
  const double least = *std::min_element(scores.begin(), scores.end());
  EXPECT_LT(scores[10], scores[11]);
  EXPECT_NEAR(scores[10], least, 1e-4);
}

/// Observes the newest tokens one by one.
Scores expected_lazy_eviction(const LayerData& data, std::int64_t history, double alpha) {
  const std::int64_t first = std::max<std::int64_t>(0, data.tokens - history);
  Scores scores;
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;
  for (int h = 0; h < data.kv_heads; ++h) {
    const std::int64_t rows = data.rows(h);
    const std::int64_t before = rows - std::min<std::int64_t>(8, (rows + 1) / 2);
    std::vector<std::int64_t> last, longest(rows, 0);
    for (const std::int64_t p : data.positions[h]) last.push_back(std::max(p, first) - 1);
    for (std::int64_t token = first; token < data.tokens; ++token) {
      std::vector<double> most(rows, 0.0);
      for (int g = 0; g < data.group; ++g) {
        const auto p = probabilities(data, token, h * data.group + g);
        for (std::int64_t r = 0; r < rows; ++r) most[r] = std::max(most[r], p[r]);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        if (most[r] < alpha) continue;
        longest[r] = std::max(longest[r], token - last[r]);
        last[r] = token;
      }
    }
    scores.emplace_back(rows, 0.0);
    for (std::int64_t r = 0; r < before; ++r) {
      if (longest[r] == 0) continue;
      const auto pause = static_cast<double>(longest[r]);
      const auto since = static_cast<double>(data.tokens - 1 - last[r]);
      scores[h][r] = 2 / (1 + std::exp(since / pause)) + 2 / (1 + std::exp(pause - 1));
    }
    kept.emplace_back(before, rows);
  }
  protect(scores, kept);
  return scores;
}

TEST(LazyEviction, KeepsRowsThatAreAttendedToAgain) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 33);
    for (const auto& [history, alpha] : {std::pair<std::int64_t, double>{40, 0.02}, {256, 0.1}}) {
      // Rounding may move a probability over the threshold; such rows are left out.
      const Scores above = expected_lazy_eviction(data, history, alpha * (1 + 1e-4));
      const Scores expected = expected_lazy_eviction(data, history, alpha * (1 - 1e-4));
      in_all_forms([&, history = history, alpha = alpha] {
        const auto found = FakeLayer(data).run(
            *make(policy::lazy_eviction(), {{"history", std::to_string(history)},
                                            {"window", "8"},
                                            {"alpha", std::to_string(alpha)}}));
        std::int64_t compared = 0, all = 0;
        for (int h = 0; h < data.kv_heads; ++h) {
          for (std::int64_t r = 0; r < data.rows(h); ++r, ++all) {
            if (above[h][r] != expected[h][r]) continue;
            ++compared;
            ASSERT_NEAR(found[h][r], expected[h][r], 1e-5) << "head " << h << ", row " << r;
          }
        }
        EXPECT_GE(compared, all * 9 / 10);
      });
    }
  }
}

/// Keys rotated back one by one, and cosines of their distances, as the paper has them.
Scores expected_tri_attention(const LayerData& data, std::int64_t history, std::int64_t distance) {
  using Complex = std::complex<double>;
  const int pairs = data.head_dim / 2;
  const auto turned_back = [&](const float* x, std::int64_t position, int f) {
    const double angle = -static_cast<double>(position) * data.inverse_frequencies[f];
    return Complex(x[f], x[f + pairs]) * std::polar(1.0, angle) / Complex(data.rope_scale);
  };
  const std::int64_t first = std::max<std::int64_t>(0, data.tokens - history);
  const double factor = static_cast<double>(data.rope_scale) * data.rope_scale;
  Scores scores;
  for (int h = 0; h < data.kv_heads; ++h) {
    const std::int64_t rows = data.rows(h);
    scores.emplace_back(rows, -INFINITY);
    for (int head = h * data.group; head < (h + 1) * data.group; ++head) {
      std::vector<double> values(rows, 0.0);
      for (int f = 0; f < pairs; ++f) {
        Complex centre = 0;
        double length = 0;
        for (std::int64_t t = first; t < data.tokens; ++t) {
          const Complex q = turned_back(data.query(t, head), t, f);
          centre += q / static_cast<double>(data.tokens - first);
          length += std::abs(q) / static_cast<double>(data.tokens - first);
        }
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t position = data.positions[h][r];
          const Complex k = turned_back(data.key(h, r), position, f);
          double sum = 0;
          int count = 0;
          for (std::int64_t d = 1; d <= distance; d *= 2, ++count) {
            const auto away = static_cast<double>(data.tokens - 1 + d - position);
            sum += std::cos(away * data.inverse_frequencies[f] + std::arg(centre * std::conj(k)));
          }
          values[r] += factor * (std::abs(centre) * std::abs(k) * sum / count +
                                 (length - std::abs(centre)) * std::abs(k));
        }
      }
      double mean = 0, squares = 0;
      for (const double x : values) mean += x / static_cast<double>(rows);
      for (const double x : values) squares += (x - mean) * (x - mean) / static_cast<double>(rows);
      const double deviation = std::max(1e-6, std::sqrt(squares));
      for (std::int64_t r = 0; r < rows; ++r) {
        scores[h][r] = std::max(scores[h][r], (values[r] - mean) / deviation);
      }
    }
  }
  return scores;
}

TEST(TriAttention, AttentionOfCentresByDistance) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    LayerData data = random_layer(shape, 34);
    // Queries before RoPE have a mean of their own in each head, as those of models do.
    for (std::int64_t t = 0; t < data.tokens; ++t) {
      for (int head = 0; head < data.query_heads(); ++head) {
        float* const q = &data.queries[(t * data.query_heads() + head) * data.head_dim];
        for (int f = 0; f < data.head_dim / 2; ++f) {
          const double angle = static_cast<double>(t) * data.inverse_frequencies[f] + head + f;
          q[f] += static_cast<float>(2 * std::cos(angle));
          q[f + data.head_dim / 2] += static_cast<float>(2 * std::sin(angle));
        }
      }
    }
    for (const float rope_scale : {1.0f, 1.5f}) {
      data.rope_scale = rope_scale;
      in_all_forms([&] {
        expect_scores(FakeLayer(data).run(*make(policy::tri_attention())),
                      expected_tri_attention(data, 256, 65536), 1e-4);
        expect_scores(FakeLayer(data).run(
                          *make(policy::tri_attention(), {{"history", "20"}, {"distance", "100"}})),
                      expected_tri_attention(data, 20, 100), 1e-4);
      });
    }
  }
}

/// Leaves out each row in turn, and compares the outputs.
Scores expected_dropkv(const LayerData& data, std::int64_t window, std::int64_t kernel) {
  if (data.tokens <= window) window = std::max<std::int64_t>(1, data.tokens / 2);
  const std::int64_t first = data.tokens - window;
  Scores scores;
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;
  for (int h = 0; h < data.kv_heads; ++h) {
    const std::int64_t rows = data.rows(h), before = rows_before(data, h, first);
    std::vector<double> changes(rows, 0.0);
    const auto output_without = [&](const std::vector<double>& p, std::int64_t left_out) {
      std::vector<double> output(data.head_dim, 0.0);
      double sum = 0;
      for (std::int64_t r = 0; r < rows; ++r) sum += r == left_out ? 0 : p[r];
      for (std::int64_t r = 0; r < rows; ++r) {
        for (int d = 0; d < data.head_dim && r != left_out; ++d) {
          output[d] += p[r] / sum * static_cast<double>(data.value(h, r)[d]);
        }
      }
      return output;
    };
    for (std::int64_t token = first; token < data.tokens && before > 0; ++token) {
      for (int g = 0; g < data.group; ++g) {
        const auto p = probabilities(data, token, h * data.group + g);
        const auto whole = output_without(p, -1);
        for (std::int64_t r = 0; r < data.seen(token, h); ++r) {
          const auto without = output_without(p, r);
          for (int d = 0; d < data.head_dim; ++d) {
            changes[r] += (without[d] - whole[d]) * (without[d] - whole[d]) / data.group;
          }
        }
      }
    }
    scores.emplace_back(rows, 0.0);
    for (std::int64_t r = 0; r < before; ++r) {
      for (std::int64_t i = r - kernel / 2; i <= r + kernel / 2; ++i) {
        if (i >= 0 && i < rows) scores[h][r] += changes[i] / static_cast<double>(kernel);
      }
    }
    kept.emplace_back(before, rows);
  }
  protect(scores, kept);
  return scores;
}

TEST(DropKv, KeepsRowsThatChangeTheOutput) {
  LayerShape small;
  small.head_dim = 16;
  small.group = 3;
  small.tokens = 60;
  small.new_tokens = 20;
  LayerShape longer = small;
  longer.group = 1;
  longer.tokens = longer.new_tokens = 120;
  LayerShape few = small;
  few.tokens = few.new_tokens = 7;
  LayerShape one = small;
  one.tokens = one.new_tokens = 1;
  for (const LayerShape& shape : {small, longer, few, one}) {
    SCOPED_TRACE(name_of(shape));
    LayerData data = random_layer(shape, 36);
    for (float& x : data.queries) x /= 2;  // no row gets all of the attention
    in_all_forms([&] {
      expect_scores(FakeLayer(data).run(*make(policy::dropkv())), expected_dropkv(data, 8, 11),
                    1e-4);
      expect_scores(
          FakeLayer(data).run(*make(policy::dropkv(), {{"window", "3"}, {"kernel", "1"}})),
          expected_dropkv(data, 3, 1), 1e-4);
    });
  }
  EXPECT_THROW(make(policy::dropkv(), {{"kernel", "4"}}), Error);
}

// More rows than one product takes.
TEST(DecodingPolicies, ManyRows) {
  LayerShape shape;
  shape.kv_heads = 1;
  shape.head_dim = 32;
  shape.tokens = shape.new_tokens = 1500;
  const LayerData data = random_layer(shape, 35);
  in_all_forms([&] {
    FakeLayer layer(data);
    expect_scores(layer.run(*make(policy::tri_attention(), {{"history", "20"}})),
                  expected_tri_attention(data, 20, 65536), 1e-4);
    // Some rows have no similar one among the newest.
    expect_scores(layer.run(*make(policy::r_kv(), {{"similarity", "0.8"}})),
                  expected_r_kv(data, {8, 7, 0.1, 0.8, 1}));
  });
}

}  // namespace
}  // namespace kvzap::test
