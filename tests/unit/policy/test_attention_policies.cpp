#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <kvzap/engine/policies.hpp>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/machine.hpp"
#include "policy/mean_attention.hpp"
#include "policy/query_statistics.hpp"
#include "policy/registry.hpp"
#include "safetensors_writer.hpp"
#include "unit/policy/policy_scores.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::Error;
using kvzap::HeadPartition;
using kvzap::ModelConfig;
using kvzap::Policy;
using kvzap::PolicyArguments;
using kvzap::PolicyInfo;
using kvzap::PolicyLayer;
using kvzap::TokenBlock;
using kvzap::test::expect_scores;
using kvzap::test::FakeLayer;
using kvzap::test::in_all_forms;
using kvzap::test::LayerData;
using kvzap::test::LayerShape;
using kvzap::test::make;
using kvzap::test::name_of;
using kvzap::test::Parameters;
using kvzap::test::probabilities;
using kvzap::test::protect;
using kvzap::test::random_layer;
using kvzap::test::rows_before;
using kvzap::test::Scores;
using kvzap::test::shapes;
using kvzap::test::window_sum;

Scores expected_snapkv(const LayerData& data, std::int64_t window, int kernel, bool is_max) {
  if (data.tokens <= window) window = std::max<std::int64_t>(1, data.tokens / 2);
  const std::int64_t first = data.tokens - window;
  Scores scores;
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;
  for (int h = 0; h < data.kv_heads; ++h) {
    auto sums = window_sum(data, h, first, [](std::int64_t) { return 1.0; });
    const std::int64_t before = rows_before(data, h, first);
    std::vector<double> of_head(data.rows(h), 0.0);
    for (std::int64_t r = 0; r < before; ++r) {
      for (std::int64_t i = r - kernel / 2; i <= r + kernel / 2; ++i) {
        if (i < 0 || i >= before) continue;
        const double mean = sums[i] / static_cast<double>(window * data.group);
        of_head[r] = is_max ? std::max(of_head[r], mean) : of_head[r] + mean / kernel;
      }
    }
    scores.push_back(of_head);
    kept.emplace_back(before, data.rows(h));
  }
  protect(scores, kept);
  return scores;
}

TEST(SnapKV, MeanOverWindowAndGroupPooled) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 1);
    in_all_forms([&] {
      FakeLayer layer(data);
      expect_scores(layer.run(*make(kvzap::policy::snapkv())), expected_snapkv(data, 64, 5, false));
      expect_scores(layer.run(*make(kvzap::policy::snapkv(),
                                    {{"window", "16"}, {"kernel", "7"}, {"pooling", "max"}})),
                    expected_snapkv(data, 16, 7, true));
      EXPECT_EQ(layer.run(*make(kvzap::policy::pyramidkv())),
                layer.run(*make(kvzap::policy::snapkv())));
    });
  }
  EXPECT_THROW(make(kvzap::policy::snapkv(), {{"kernel", "4"}}), Error);
}

// So many that logits are made twice.
TEST(SnapKV, ManyRows) {
  LayerShape shape;
  shape.kv_heads = shape.group = 1;
  shape.hidden_size = 1;
  shape.head_dim = 8;
  shape.tokens = shape.new_tokens = 70000;
  const LayerData data = random_layer(shape, 13);
  const Scores scores = expected_snapkv(data, 64, 5, false);
  in_all_forms([&] { expect_scores(FakeLayer(data).run(*make(kvzap::policy::snapkv())), scores); });
}

TEST(Tova, MeanOverAllHeads) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 2);
    std::vector<double> by_position(data.tokens, 0.0);
    for (int q = 0; q < data.query_heads(); ++q) {
      const auto p = probabilities(data, data.tokens - 1, q);
      for (std::size_t r = 0; r < p.size(); ++r) {
        by_position[data.positions[q / data.group][r]] += p[r] / data.query_heads();
      }
    }
    Scores scores;
    std::vector<std::pair<std::int64_t, std::int64_t>> newest;
    for (int h = 0; h < data.kv_heads; ++h) {
      scores.emplace_back();
      for (std::int64_t position : data.positions[h]) {
        scores.back().push_back(by_position[position]);
      }
      newest.emplace_back(data.rows(h) - 1, data.rows(h));
    }
    in_all_forms([&] {
      FakeLayer layer(data);
      expect_scores(layer.run(*make(kvzap::policy::tova(), {{"protect", "off"}})), scores);
      Scores with_newest = scores;
      protect(with_newest, newest);
      expect_scores(layer.run(*make(kvzap::policy::tova())), with_newest);
    });
  }
}

TEST(Finch, QuestionTimesRowsBefore) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    LayerData data = random_layer(shape, 3);
    data.question = std::max<std::int64_t>(1, data.new_tokens / 3);
    const std::int64_t first = data.tokens - data.question;
    for (bool normalizes : {true, false}) {
      Scores scores;
      std::vector<std::pair<std::int64_t, std::int64_t>> question;
      for (int h = 0; h < data.kv_heads; ++h) {
        auto sums = window_sum(data, h, first, [&](std::int64_t token) {
          return normalizes ? static_cast<double>(data.seen(token, h) - 1) : 1.0;
        });
        for (double& x : sums) x /= static_cast<double>(data.question * data.group);
        scores.push_back(sums);
        question.emplace_back(rows_before(data, h, first), data.rows(h));
      }
      protect(scores, question);
      in_all_forms([&] {
        for (std::int64_t block : {0, 17}) {
          FakeLayer layer(data);
          const auto policy =
              make(kvzap::policy::finch(), {{"normalize", normalizes ? "on" : "off"}});
          expect_scores(layer.run(*policy, block), scores);
          // The object goes on with the next layer.
          expect_scores(layer.run(*policy, block), scores);
        }
      });
    }
    data.question = 0;
    for (const auto& head : FakeLayer(data).run(*make(kvzap::policy::finch()))) {
      for (float score : head) EXPECT_EQ(score, 0);
    }
  }
}

TEST(SimLayerKV, LazyLayersKeepFirstAndNewest) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 4);
    const std::int64_t last = 2, recent = 20, initial = 3;
    double share = 0;
    const std::int64_t tokens = std::min(last, data.tokens);
    for (int q = 0; q < data.query_heads(); ++q) {
      const std::int64_t before = std::max<std::int64_t>(0, data.rows(q / data.group) - last);
      for (std::int64_t token = data.tokens - tokens; token < data.tokens; ++token) {
        const auto p = probabilities(data, token, q);
        for (std::int64_t r = 0; r < before; ++r) {
          if (r < initial || r >= before - recent) share += p[r];
        }
      }
    }
    share /= static_cast<double>(tokens * data.query_heads());
    in_all_forms([&] {
      for (double threshold : {share - 1e-4, share + 1e-4, 1.0}) {
        if (threshold < 0) continue;
        const bool lazy = threshold < share;
        const auto found = FakeLayer(data).run(
            *make(kvzap::policy::simlayerkv(), {{"lazy-threshold", std::to_string(threshold)},
                                                {"last", "2"},
                                                {"recent", "20"},
                                                {"initial", "3"}}));
        for (int h = 0; h < data.kv_heads; ++h) {
          const std::int64_t rows = data.rows(h);
          for (std::int64_t r = 0; r < rows; ++r) {
            const bool stays = !lazy || rows <= last + recent + initial || r < initial ||
                               r >= rows - recent + last;
            EXPECT_EQ(found[h][r], stays ? 1.0f : 0.0f) << threshold << " row " << r;
          }
        }
      }
    });
  }
  EXPECT_THROW(make(kvzap::policy::simlayerkv(), {{"recent", "2"}, {"last", "2"}}), Error);
}

/// Algorithm 2 of the paper, one pair after the other; in double.
TEST(Scissorhands, CountsAttentionBelowTheMean) {
  auto all = shapes();
  LayerShape large;  // More logits than are stored.
  large.head_dim = 64;
  large.kv_heads = 1;
  large.group = 16;
  large.tokens = large.new_tokens = 700;
  all.push_back(large);
  for (const LayerShape& shape : all) {
    SCOPED_TRACE(name_of(shape));
    const LayerData data = random_layer(shape, 5);
    Scores scores;
    std::vector<std::vector<int>> close;  // pairs that rounding may put on either side
    const std::int64_t first = std::max<std::int64_t>(0, data.tokens - 400);
    for (int h = 0; h < data.kv_heads; ++h) {
      scores.emplace_back(data.rows(h), 0.0);
      close.emplace_back(data.rows(h), 0);
      for (std::int64_t token = first; token < data.tokens; ++token) {
        const std::int64_t seen = data.seen(token, h);
        for (int g = 0; g < data.group; ++g) {
          const auto p = probabilities(data, token, h * data.group + g);
          for (std::int64_t r = 0; r < seen; ++r) {
            const double of_mean = p[r] * static_cast<double>(seen);
            if (of_mean < 1) scores[h][r] -= 1.0 / data.group;
            if (std::fabs(of_mean - 1) < 1e-4) ++close[h][r];
          }
        }
      }
      for (std::int64_t r = std::max<std::int64_t>(0, data.rows(h) - 10); r < data.rows(h); ++r) {
        scores[h][r] = 1;
        close[h][r] = 0;
      }
    }
    in_all_forms([&] {
      const auto found = FakeLayer(data).run(*make(kvzap::policy::scissorhands()));
      for (int h = 0; h < data.kv_heads; ++h) {
        for (std::int64_t r = 0; r < data.rows(h); ++r) {
          ASSERT_NEAR(found[h][r], scores[h][r],
                      1e-4 + static_cast<double>(close[h][r]) / data.group)
              << "head " << h << ", row " << r;
        }
      }
    });
  }
}

/// Sums of the probabilities that queries from `first` on give each row of a head, over the group.
std::vector<double> mass(const LayerData& data, int head, std::int64_t first) {
  auto sums = window_sum(data, head, first, [](std::int64_t) { return 1.0; });
  for (double& x : sums) x /= data.group;
  return sums;
}

TEST(H2O, MeanOfAllQueriesThatSeeARow) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    LayerData data = random_layer(shape, 6);
    const std::int64_t first = data.tokens - data.new_tokens;
    // Cached rows go on from their scores; one that has none begins with this step.
    std::mt19937 random(7);
    for (int h = 0; h < data.kv_heads; ++h) {
      for (std::int64_t r = 0; r < data.cached(h); ++r) {
        data.cached_scores[h].push_back(r == 3 ? std::nanf("")
                                               : static_cast<float>(random() % 1000) / 4000.0f);
      }
    }
    Scores masses;
    for (int h = 0; h < data.kv_heads; ++h) masses.push_back(mass(data, h, first));
    for (bool normalizes : {true, false}) {
      Scores scores = masses;
      for (int h = 0; h < data.kv_heads; ++h) {
        for (std::int64_t r = 0; r < data.rows(h); ++r) {
          double& score = scores[h][r];
          const std::int64_t position = data.positions[h][r];
          if (r < data.cached(h) && !std::isnan(data.cached_scores[h][r])) {
            score += data.cached_scores[h][r] *
                     (normalizes ? static_cast<double>(first - position) : 1.0);
          }
          if (normalizes) score /= static_cast<double>(data.tokens - position);
        }
      }
      FakeLayer layer(data);
      for (std::int64_t block : {0, 13}) {
        const auto policy = make(kvzap::policy::h2o(), {{"normalize", normalizes ? "on" : "off"}});
        expect_scores(layer.run(*policy, block), scores);
        expect_scores(layer.run(*policy, block), scores);
      }
    }
  }
}

// In two steps as in one, the newest half of the budget above all others, and nothing lost of what
// protected rows had.
TEST(H2O, RunningSums) {
  LayerShape shape;
  shape.tokens = shape.new_tokens = 60;
  const LayerData whole = random_layer(shape, 8);
  for (const char* local : {"off", "on"}) {
    LayerData begin = whole;
    begin.tokens = begin.new_tokens = 40;
    begin.keep = 20;
    LayerData end = whole;
    end.new_tokens = 20;
    end.keep = 30;
    for (int h = 0; h < whole.kv_heads; ++h) begin.positions[h].resize(40);
    const auto policy = make(kvzap::policy::h2o(), {{"local", local}});
    end.cached_scores = FakeLayer(begin).run(*policy);
    const auto found = FakeLayer(end).run(*policy);
    const auto expected = FakeLayer(whole).run(*make(kvzap::policy::h2o()));
    for (int h = 0; h < whole.kv_heads; ++h) {
      for (std::int64_t r = 0; r < 60; ++r) {
        const bool is_local = *local == 'o' && local[1] == 'n' && r >= 60 - 15;
        const float score = is_local ? std::ldexp(found[h][r], -64) : found[h][r];
        EXPECT_NEAR(score, expected[h][r], 1e-6) << "row " << r;
        if (is_local) {
          EXPECT_GT(found[h][r], 1e6f);
        }
      }
    }
  }
}

struct Moments {
  std::vector<double> mean;        // (head_dim)
  std::vector<double> covariance;  // (head_dim, head_dim)
};

/// Of a query head's queries of the tokens from `first` on, turned back.
Moments moments_of(const LayerData& data, int query_head, std::int64_t first) {
  const int dim = data.head_dim, half = dim / 2;
  std::vector<std::vector<double>> queries;
  for (std::int64_t token = first; token < data.tokens; ++token) {
    std::vector<double> query(dim);
    for (int i = 0; i < half; ++i) {
      const std::complex<double> turned(data.query(token, query_head)[i],
                                        data.query(token, query_head)[i + half]);
      const std::complex<double> x =
          turned * std::polar(1.0, -static_cast<double>(token) * data.inverse_frequencies[i]);
      query[i] = x.real();
      query[i + half] = x.imag();
    }
    queries.push_back(query);
  }
  Moments moments{std::vector<double>(dim, 0.0), std::vector<double>(dim * dim, 0.0)};
  const auto count = static_cast<double>(queries.size());
  for (const auto& query : queries) {
    for (int i = 0; i < dim; ++i) moments.mean[i] += query[i] / count;
  }
  double* const covariance = moments.covariance.data();
  for (auto& query : queries) {
    double* const centred = query.data();
    for (int i = 0; i < dim; ++i) centred[i] -= moments.mean[i];
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) {
        covariance[i * dim + j] += centred[i] * centred[j] / count;
      }
    }
  }
  return moments;
}

/// The rotation averaged over positions, as a matrix.
std::vector<double> average_rope(const LayerData& data, std::int64_t begin, int count) {
  const int dim = data.head_dim, half = dim / 2;
  std::vector<double> result(dim * dim, 0.0);
  for (int i = 0; i < half; ++i) {
    std::complex<double> mean = 0;
    for (int t = 0; t < count; ++t) {
      mean += std::polar(1.0 / count, static_cast<double>(begin + t) * data.inverse_frequencies[i]);
    }
    result[i * dim + i] = result[(i + half) * dim + i + half] = mean.real();
    result[i * dim + i + half] = -mean.imag();
    result[(i + half) * dim + i] = mean.imag();
  }
  return result;
}

std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b, int dim,
                            bool transposed) {
  const int columns = static_cast<int>(b.size()) / dim;
  std::vector<double> result(dim * columns, 0.0);
  for (int i = 0; i < dim; ++i) {
    for (int k = 0; k < dim; ++k) {
      for (int j = 0; j < columns; ++j) {
        result[i * columns + j] +=
            a[i * dim + k] * (transposed ? b[j * dim + k] : b[k * columns + j]);
      }
    }
  }
  return result;
}

void turn(const LayerData& data, int future, Moments& moments) {
  const auto rope = average_rope(data, data.tokens, future);
  moments.mean = product(rope, moments.mean, data.head_dim, false);
  moments.covariance =
      product(product(rope, moments.covariance, data.head_dim, false), rope, data.head_dim, true);
}

struct Expected {
  int future = 512;
  std::int64_t sink = 4;
  bool covariance = true;
  bool vnorm = true;
  double epsilon = 0;
};

/// moments: (query head), before RoPE.
Scores expected_attention(const LayerData& data, std::vector<Moments> moments,
                          const Expected& options) {
  const int dim = data.head_dim;
  Scores scores;
  std::vector<std::pair<std::int64_t, std::int64_t>> sinks;
  for (auto& of_head : moments) turn(data, options.future, of_head);
  for (int h = 0; h < data.kv_heads; ++h) {
    const std::int64_t first = rows_before(data, h, options.sink);
    scores.emplace_back(data.rows(h), 0.0);
    for (int g = 0; g < data.group; ++g) {
      const Moments& of_head = moments[h * data.group + g];
      std::vector<double> logits;
      for (std::int64_t r = first; r < data.rows(h); ++r) {
        const float* const key = data.key(h, r);
        double logit = 0;
        for (int i = 0; i < dim; ++i) {
          logit += of_head.mean[i] * key[i] / std::sqrt(static_cast<double>(dim));
          if (!options.covariance) continue;
          for (int j = 0; j < dim; ++j) {
            logit += key[i] * of_head.covariance[i * dim + j] * key[j] / (2 * dim);
          }
        }
        logits.push_back(logit);
      }
      double largest = -INFINITY, sum = 0;
      for (double x : logits) largest = std::max(largest, x);
      for (double x : logits) sum += std::exp(x - largest);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        scores[h][first + i] += std::exp(logits[i] - largest) / sum / data.group;
      }
    }
    for (std::int64_t r = first; r < data.rows(h); ++r) {
      double norm = 0;
      for (int d = 0; d < dim; ++d) norm += std::pow(data.value(h, r)[d], 2);
      if (options.vnorm) scores[h][r] = (scores[h][r] + options.epsilon) * std::sqrt(norm);
    }
    sinks.emplace_back(0, first);
  }
  protect(scores, sinks);
  return scores;
}

/// The first token whose query counts.
std::int64_t first_counted(const LayerData& data, std::int64_t sink, std::int64_t history) {
  const bool newest = data.new_tokens < std::min(history, data.tokens);
  const std::int64_t first =
      newest ? data.tokens - std::min(history, data.tokens) : data.tokens - data.new_tokens;
  return std::max(first, sink);
}

std::vector<Moments> all_moments(const LayerData& data, std::int64_t first) {
  std::vector<Moments> moments;
  for (int q = 0; q < data.query_heads(); ++q) moments.push_back(moments_of(data, q, first));
  return moments;
}

// Queries as real ones are: not around 0, and with RoPE.
void shift_queries(LayerData& data) {
  const int half = data.head_dim / 2;
  for (std::int64_t token = 0; token < data.tokens; ++token) {
    for (int q = 0; q < data.query_heads(); ++q) {
      float* const query = &data.queries[(token * data.query_heads() + q) * data.head_dim];
      for (int i = 0; i < half; ++i) {
        const std::complex<double> mean(std::sin(q + i), std::cos(2 * q + i));
        const auto turned =
            mean * std::polar(1.5, static_cast<double>(token) * data.inverse_frequencies[i]);
        query[i] += static_cast<float>(turned.real());
        query[i + half] += static_cast<float>(turned.imag());
      }
    }
  }
}

TEST(ExpectedAttention, OfNormalQueriesToCome) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    LayerData data = random_layer(shape, 9);
    shift_queries(data);
    Expected options;
    const auto moments = all_moments(data, first_counted(data, options.sink, 256));
    const Scores scores = expected_attention(data, moments, options);
    in_all_forms([&] {
      for (std::int64_t block : {0, 37}) {
        FakeLayer layer(data);
        const auto policy = make(kvzap::policy::expected_attention());
        expect_scores(layer.run(*policy, block), scores, 1e-4);
        expect_scores(layer.run(*policy, block), scores, 1e-4);
      }
    });
    options.future = 3;
    options.sink = 2;
    options.covariance = false;
    options.vnorm = false;
    expect_scores(
        FakeLayer(data).run(*make(
            kvzap::policy::expected_attention(),
            {{"future-positions", "3"}, {"sink", "2"}, {"covariance", "off"}, {"vnorm", "off"}})),
        expected_attention(data, all_moments(data, first_counted(data, 2, 256)), options), 1e-4);
    options.vnorm = true;
    options.epsilon = 0.01;
    expect_scores(
        FakeLayer(data).run(*make(kvzap::policy::expected_attention(), {{"future-positions", "3"},
                                                                        {"sink", "2"},
                                                                        {"covariance", "off"},
                                                                        {"epsilon", "0.01"},
                                                                        {"history", "20"}})),
        expected_attention(data, all_moments(data, first_counted(data, 2, 20)), options), 1e-4);
  }
}

/// The layer as RoPE with an attention factor gives it.
LayerData with_rope_scale(LayerData data, float scale) {
  data.rope_scale = scale;
  for (float& x : data.queries) x *= scale;
  for (auto& keys : data.keys) {
    for (float& x : keys) x *= scale;
  }
  return data;
}

TEST(ExpectedAttention, StatisticsFromAFile) {
  LayerShape shape;
  shape.head_dim = 8;
  shape.tokens = 50;
  shape.new_tokens = 20;
  shape.layer = 1;
  shape.layers = 2;
  const LayerData data = random_layer(shape, 10);
  const int heads = data.query_heads(), dim = data.head_dim;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> means(2 * heads * dim), covariances(2 * heads * dim * dim);
  for (float& x : means) x = normal(random);
  for (float& x : covariances) x = normal(random);
  // The scores of a covariance that is not symmetric are those of its symmetric part.
  std::vector<Moments> moments;
  for (int q = 0; q < heads; ++q) {
    const auto* const mean = &means[(heads + q) * dim];
    const auto* const covariance = &covariances[(heads + q) * dim * dim];
    moments.push_back({{mean, mean + dim}, {covariance, covariance + dim * dim}});
  }
  const kvzap::test::TemporaryFolder folder;
  const std::string file = (folder.path() / "statistics.safetensors").string();
  kvzap::test::write_safetensors(
      file, {{"query_mean", kvzap::test::stored_tensor("F32", {2, heads, dim}, means)},
             {"query_cov", kvzap::test::stored_tensor("F32", {2, heads, dim, dim}, covariances)}});
  ModelConfig config{};
  config.num_hidden_layers = 2;
  config.num_attention_heads = heads;
  config.num_key_value_heads = data.kv_heads;
  config.head_dim = dim;
  const auto policy = make(kvzap::policy::expected_attention(), {{"statistics", file}}, config);
  EXPECT_FALSE(policy->needs().blocks);
  const Scores scores = expected_attention(data, moments, {});
  expect_scores(FakeLayer(data).run(*policy), scores, 1e-4);
  expect_scores(FakeLayer(data).run(*policy), scores, 1e-4);
  auto with_factor = moments;
  for (Moments& of_head : with_factor) {
    for (double& x : of_head.mean) x *= 1.25;
    for (double& x : of_head.covariance) x *= 1.25 * 1.25;
  }
  const LayerData scaled = with_rope_scale(data, 1.25f);
  expect_scores(FakeLayer(scaled).run(
                    *make(kvzap::policy::expected_attention(), {{"statistics", file}}, config)),
                expected_attention(scaled, with_factor, {}), 1e-4);
  // A rank with the second head alone: what it has to do with the other is its scores' maximum.
  const auto second = FakeLayer(data, {1}, kvzap::Communicator::self()).run(*policy);
  const std::int64_t sinks = rows_before(data, 1, 4);
  for (std::int64_t r = sinks; r < data.rows(1); ++r) {
    EXPECT_NEAR(second[0][r], scores[1][r],
                1e-4 * *std::max_element(second[0].begin() + sinks, second[0].end()));
  }

  config.head_dim = dim + 2;
  EXPECT_THROW(make(kvzap::policy::expected_attention(), {{"statistics", file}}, config), Error);
}

/// Statistics of the queries of a step, for no scores.
struct StatisticsOnly final : Policy {
  kvzap::policy::QueryStatistics statistics{true, 4, 0};
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    statistics.observe(layer, block);
  }
  void score(PolicyLayer& layer, const ScoreView& /*scores*/) override { statistics.finish(layer); }
};

template <class View>
std::vector<float> numbers_of(const View& view) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
  return {host.data(), host.data() + host.size()};
}

// YaRN's attention factor is in queries and keys. Before RoPE they do not have it, and queries to
// come will.
TEST(RopeScale, IsTakenOutOfWhatIsTurnedBack) {
  LayerShape shape;
  shape.head_dim = 8;
  shape.tokens = shape.new_tokens = 60;
  LayerData plain = random_layer(shape, 13);
  shift_queries(plain);
  const LayerData scaled = with_rope_scale(plain, 1.5f);

  StatisticsOnly of_plain, of_scaled;
  FakeLayer(plain).run(of_plain);
  FakeLayer(scaled).run(of_scaled);
  const auto expect_same = [](const std::vector<float>& found, const std::vector<float>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-5) << i;
  };
  expect_same(numbers_of(of_scaled.statistics.means()), numbers_of(of_plain.statistics.means()));
  expect_same(numbers_of(of_scaled.statistics.covariances()),
              numbers_of(of_plain.statistics.covariances()));

  const Scores scores = expected_attention(scaled, all_moments(scaled, 4), {});
  expect_scores(FakeLayer(scaled).run(*make(kvzap::policy::expected_attention())), scores, 1e-4);

  // With the standardized leverage of keys before RoPE nothing changes at all.
  const auto leverage = FakeLayer(scaled).run(*make(kvzap::policy::leverage()));
  const auto of_plain_keys = FakeLayer(plain).run(*make(kvzap::policy::leverage()));
  for (std::size_t h = 0; h < leverage.size(); ++h) expect_same(leverage[h], of_plain_keys[h]);

  // Mean queries and keys get it again, for logits 1.5^2 as large: those of keys so much larger.
  LayerData larger = plain;
  for (auto& keys : larger.keys) {
    for (float& x : keys) x *= 1.5f * 1.5f;
  }
  const auto mean_attention = [](const LayerData& data) {
    kvzap::policy::MeanAttention calibration("texts", 100);
    calibration.begin();
    FakeLayer(data).run(*calibration.watch());
    calibration.finish(kvzap::Communicator::self());
    return calibration.scores();
  };
  const auto found = mean_attention(scaled), expected = mean_attention(larger);
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t h = 0; h < found[0].size(); ++h) {
    EXPECT_NEAR(found[0][h], expected[0][h], 1e-5);
    EXPECT_GT(std::fabs(found[0][h] - mean_attention(plain)[0][h]), 1e-4);
  }
}

TEST(Cap, WeightedLeverage) {
  for (const LayerShape& shape : shapes()) {
    SCOPED_TRACE(name_of(shape));
    LayerData data = random_layer(shape, 12);
    shift_queries(data);
    const int dim = data.head_dim;
    auto moments = all_moments(data, first_counted(data, 4, 256));
    for (auto& of_head : moments) turn(data, 512, of_head);
    for (bool normalizes : {true, false}) {
      const double tau = normalizes ? 5 : 0.3;
      Scores scores;
      std::vector<std::pair<std::int64_t, std::int64_t>> sinks;
      for (int h = 0; h < data.kv_heads; ++h) {
        const std::int64_t first = rows_before(data, h, 4);
        const std::int64_t rows = data.rows(h) - first;
        scores.emplace_back(data.rows(h), 0.0);
        sinks.emplace_back(0, first);
        for (int g = 0; rows > 0 && g < data.group; ++g) {
          const auto& mean = moments[h * data.group + g].mean;
          std::vector<double> weights;
          for (std::int64_t r = first; r < data.rows(h); ++r) {
            double dot = 0, of_key = 0, of_mean = 0;
            for (int d = 0; d < dim; ++d) {
              dot += mean[d] * data.key(h, r)[d];
              of_key += std::pow(data.key(h, r)[d], 2);
              of_mean += mean[d] * mean[d];
            }
            weights.push_back(tau * (normalizes ? dot / std::sqrt(of_key * of_mean) : dot));
          }
          const double largest = *std::max_element(weights.begin(), weights.end());
          // (By pointers: without optimization, operators of vectors would take most of the time.)
          std::vector<double> a_elements(dim * dim, 0.0);
          double* const a = a_elements.data();
          for (int i = 0; i < dim; ++i) a[i * dim + i] = 1;
          for (std::int64_t r = 0; r < rows; ++r) {
            const double weight = weights[r] = std::exp(weights[r] - largest);
            const float* const v = data.value(h, first + r);
            for (int i = 0; i < dim; ++i) {
              for (int j = 0; j < dim; ++j) a[i * dim + j] += (weight + 1e-6) * v[i] * v[j];
            }
          }
          // Gauss and Jordan: the matrix needs no pivots.
          std::vector<double> inverse_elements(dim * dim, 0.0);
          double* const inverse = inverse_elements.data();
          for (int i = 0; i < dim; ++i) inverse[i * dim + i] = 1;
          for (int k = 0; k < dim; ++k) {
            const double pivot = a[k * dim + k];
            for (int j = 0; j < dim; ++j) {
              a[k * dim + j] /= pivot;
              inverse[k * dim + j] /= pivot;
            }
            for (int i = 0; i < dim; ++i) {
              const double by = a[i * dim + k];
              if (i == k || by == 0) continue;
              for (int j = 0; j < dim; ++j) {
                a[i * dim + j] -= by * a[k * dim + j];
                inverse[i * dim + j] -= by * inverse[k * dim + j];
              }
            }
          }
          for (std::int64_t r = 0; r < rows; ++r) {
            const float* const v = data.value(h, first + r);
            double leverage = 0;
            for (int i = 0; i < dim; ++i) {
              for (int j = 0; j < dim; ++j) leverage += v[i] * inverse[i * dim + j] * v[j];
            }
            scores[h][first + r] += weights[r] * leverage / data.group;
          }
        }
      }
      protect(scores, sinks);
      in_all_forms([&] {
        expect_scores(FakeLayer(data).run(
                          *make(kvzap::policy::cap(), {{"tau", normalizes ? "5" : "0.3"},
                                                       {"normalize", normalizes ? "on" : "off"}})),
                      scores, 1e-4);
      });
    }
  }
}

// An object goes on after a step that failed: nothing of that step is in the next one's scores, and
// what it has room for is that of the next one.
TEST(AttentionPolicies, ForgetAStepThatFailed) {
  LayerShape shape;
  shape.tokens = 90;
  shape.new_tokens = 60;
  LayerData failed = random_layer(shape, 20);
  failed.question = 20;
  shape.tokens = 700;
  shape.new_tokens = 600;
  LayerData data = random_layer(shape, 21);
  data.question = 50;
  for (const PolicyInfo& info : {kvzap::policy::h2o(), kvzap::policy::finch(), kvzap::policy::cap(),
                                 kvzap::policy::expected_attention()}) {
    SCOPED_TRACE(info.name);
    const auto expected = FakeLayer(data).run(*make(info), 256);
    for (std::int64_t shown : {25, 60}) {
      const auto policy = make(info);
      FakeLayer(failed).fail(*policy, shown);
      EXPECT_EQ(FakeLayer(data).run(*policy, 256), expected);
    }
  }
}

// Rows that are NaN are kept; protected ones are not to go in their place.
TEST(AttentionPolicies, ProtectedRowsBesideNothingButNaN) {
  LayerShape shape;
  shape.kv_heads = 1;
  shape.tokens = shape.new_tokens = 40;
  LayerData data = random_layer(shape, 22);
  for (float& x : data.queries) x = std::nanf("");
  const auto scores =
      FakeLayer(data).run(*make(kvzap::policy::snapkv(), {{"window", "8"}, {"kernel", "1"}}));
  EXPECT_TRUE(std::isnan(scores[0][0]));
  for (std::int64_t r = 32; r < 40; ++r) EXPECT_EQ(scores[0][r], 1.0f);
}

TEST(Finch, NeedsAQuestion) {
  EXPECT_TRUE(kvzap::policy::finch().needs_question);
  EXPECT_FALSE(kvzap::policy::finch().scores_again);
}

}  // namespace
