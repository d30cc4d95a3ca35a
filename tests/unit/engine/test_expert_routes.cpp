// Which experts serve which tokens, in both forms of the kernels, against a plain choice in double
// (transformers' routers of Mixtral, Qwen3-MoE, GLM-4.5 and MiniMax M2).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "base/machine.hpp"
#include "engine/expert_routes.hpp"

namespace {

using kvzap::ExecutionSpace;
using kvzap::ExpertsConfig;
using kvzap::engine::ExpertRoutes;
using kvzap::linalg::Matrix;
using kvzap::linalg::Vector;
namespace base = kvzap::base;

using Weights = std::map<std::int64_t, double>;  // of the experts of one token

Weights plain_choice(const ExpertsConfig& config, const std::vector<float>& logits,
                     const std::vector<float>& correction) {
  const std::size_t count = logits.size();
  std::vector<double> scores(count);
  double sum = 0;
  for (std::size_t e = 0; e < count; ++e) {
    const double value = std::exp(static_cast<double>(logits[e]));
    scores[e] = config.scores == ExpertsConfig::Scores::softmax ? value : value / (1 + value);
    sum += value;
  }
  if (config.scores == ExpertsConfig::Scores::softmax) {
    for (double& score : scores) score /= sum;
  }
  std::vector<double> ranking = scores;
  for (std::size_t e = 0; e < correction.size(); ++e) ranking[e] += correction[e];
  const std::size_t size = count / config.groups;
  std::vector<std::pair<double, std::size_t>> groups;
  for (std::size_t g = 0; g < static_cast<std::size_t>(config.groups); ++g) {
    std::vector<double> own(ranking.begin() + g * size, ranking.begin() + (g + 1) * size);
    std::sort(own.rbegin(), own.rend());
    groups.emplace_back(own[0] + (size > 1 ? own[1] : 0), g);
  }
  std::sort(groups.rbegin(), groups.rend());
  for (std::size_t i = config.groups_per_token; i < groups.size(); ++i) {
    std::fill_n(ranking.begin() + groups[i].second * size, size,
                -std::numeric_limits<double>::infinity());
  }
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return ranking[a] > ranking[b]; });
  double total = 0;
  for (std::int64_t j = 0; j < config.per_token; ++j) total += scores[order[j]];
  Weights weights;
  for (std::int64_t j = 0; j < config.per_token; ++j) {
    weights[order[j]] = scores[order[j]] * config.scale / (config.normalises ? total : 1);
  }
  return weights;
}

/// Sets the form of the kernels, and puts the one before back.
class Form {
 public:
  explicit Form(bool device) : m_before(base::machine().on_device()) {
    base::machine().set_device(device);
  }
  ~Form() { base::machine().set_device(m_before); }
  Form(const Form&) = delete;
  Form& operator=(const Form&) = delete;

 private:
  bool m_before;
};

template <class View, class Values>
void fill(const View& view, const Values& values) {
  const auto host = Kokkos::create_mirror_view(view);
  std::copy(values.begin(), values.end(), host.data());
  Kokkos::deep_copy(view, host);
}

/// The experts and weights of each token, from the lists of the experts.
std::vector<Weights> found_choice(const ExpertRoutes& routes, std::int64_t experts,
                                  std::int64_t tokens) {
  std::vector<Weights> found(tokens);
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto own = routes.tokens_of(e);
    const auto rows = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, own.rows);
    const auto weights = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, own.weights);
    for (std::size_t i = 0; i < rows.extent(0); ++i) {
      EXPECT_TRUE(i == 0 || rows(i - 1) < rows(i));
      found.at(rows(i))[e] = weights(i);
    }
  }
  return found;
}

std::vector<ExpertsConfig> configs() {
  ExpertsConfig mixtral, qwen, glm, minimax, single;
  mixtral.count = 8;
  mixtral.per_token = 2;
  mixtral.normalises = true;
  qwen.count = 60;
  qwen.per_token = 4;
  glm.count = 16;
  glm.per_token = 3;
  glm.scores = ExpertsConfig::Scores::sigmoid;
  glm.has_correction = glm.normalises = true;
  glm.groups = 4;
  glm.groups_per_token = 2;
  glm.scale = 2.5;
  minimax.count = 12;
  minimax.per_token = 12;  // all of them
  minimax.scores = ExpertsConfig::Scores::sigmoid;
  minimax.has_correction = minimax.normalises = true;
  single.count = single.per_token = 1;
  ExpertsConfig gpt = mixtral, llama = mixtral;
  gpt.has_router_bias = true;
  llama.normalises = false;
  llama.scores = ExpertsConfig::Scores::sigmoid;
  llama.scales_input = true;
  return {mixtral, qwen, glm, minimax, single, gpt, llama};
}

TEST(ExpertRoutes, EqualAPlainChoice) {
  std::mt19937 random(31);
  const auto numbers = [&](std::int64_t count, float scale) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = scale * (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f);
    }
    return values;
  };
  for (const bool device : {false, true}) {
    const Form form(device);
    ExpertRoutes routes;
    for (const ExpertsConfig& config : configs()) {
      for (const std::int64_t tokens : {1, 37}) {
        const auto logits = numbers(tokens * config.count, 3);
        const auto correction = numbers(config.has_correction ? config.count : 0, 0.5f);
        const auto bias = numbers(config.has_router_bias ? config.count : 0, 2);
        const Vector corrections("corrections", correction.size()), biases("biases", bias.size());
        fill(corrections, correction);
        fill(biases, bias);
        routes.reserve(config, tokens);
        fill(routes.logits(tokens), logits);
        routes.choose(ExecutionSpace{}, config, tokens, {corrections, biases});
        routes.sort(ExecutionSpace{}, tokens, config.per_token);
        const auto found = found_choice(routes, config.count, tokens);
        for (std::int64_t t = 0; t < tokens; ++t) {
          const auto first = logits.begin() + t * config.count;
          std::vector<float> own(first, first + config.count);
          for (std::size_t e = 0; e < bias.size(); ++e) own[e] += bias[e];
          const Weights expected = plain_choice(config, own, correction);
          ASSERT_EQ(found[t].size(), expected.size());
          for (const auto& [expert, weight] : expected) {
            ASSERT_TRUE(found[t].count(expert) == 1) << "token " << t << " expert " << expert;
            EXPECT_NEAR(found[t].at(expert), weight, 1e-5 * config.scale);
          }
        }
      }
    }
  }
}

// Sigmoids of large logits round to 1; the logits still tell which expert is best.
TEST(ExpertRoutes, LargeLogitsKeepTheirOrder) {
  ExpertsConfig config;
  config.count = 3;
  config.per_token = 1;
  config.scores = ExpertsConfig::Scores::sigmoid;
  config.scales_input = true;
  ExpertRoutes routes;
  routes.reserve(config, 1);
  fill(routes.logits(1), std::vector<float>{40, 50, 45});
  routes.choose(ExecutionSpace{}, config, 1, {});
  routes.sort(ExecutionSpace{}, 1, config.per_token);
  const auto found = found_choice(routes, 3, 1);
  EXPECT_EQ(found[0], (Weights{{1, 1.0}}));
}

// A model whose activations overflow must end in an error about its logits, not in a crash.
TEST(ExpertRoutes, LogitsThatAreNotNumbersChooseSomeExperts) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const ExpertsConfig& config : configs()) {
    ExpertRoutes routes;
    routes.reserve(config, 3);
    const Matrix logits = routes.logits(3);
    const auto host = Kokkos::create_mirror_view(logits);
    for (std::int64_t e = 0; e < config.count; ++e) {
      host(0, e) = nan;
      host(1, e) = e % 2 == 0 ? infinity : -infinity;
      host(2, e) = e == 0 ? nan : 1.0f;
    }
    Kokkos::deep_copy(logits, host);
    routes.choose(ExecutionSpace{}, config, 3, {});
    routes.sort(ExecutionSpace{}, 3, config.per_token);
    for (const Weights& weights : found_choice(routes, config.count, 3)) {
      EXPECT_EQ(weights.size(), static_cast<std::size_t>(config.per_token));
    }
  }
}

/// The experts of one token, by both forms of the kernel, which must agree.
Weights choice_of(const ExpertsConfig& config, const std::vector<float>& logits,
                  const std::vector<float>& correction = {}) {
  std::vector<Weights> results;
  for (const bool device : {false, true}) {
    const Form form(device);
    const Vector corrections("corrections", correction.size());
    fill(corrections, correction);
    ExpertRoutes routes;
    routes.reserve(config, 1);
    fill(routes.logits(1), logits);
    routes.choose(ExecutionSpace{}, config, 1, {corrections});
    routes.sort(ExecutionSpace{}, 1, config.per_token);
    results.push_back(found_choice(routes, config.count, 1).front());
  }
  EXPECT_EQ(results[0], results[1]);
  return results[0];
}

ExpertsConfig experts_of(std::int64_t count, std::int64_t per_token) {
  ExpertsConfig config;
  config.count = count;
  config.per_token = per_token;
  return config;
}

// A correction may make all scores of the chosen group negative. An expert of another group must
// not take their place.
TEST(ExpertRoutes, TakeNoExpertOfGroupsThatAreLeftOut) {
  ExpertsConfig config = experts_of(4, 2);
  config.scores = ExpertsConfig::Scores::sigmoid;
  config.has_correction = true;
  config.groups = 2;
  config.groups_per_token = 1;
  const Weights found = choice_of(config, {2, -1, -3, -3}, {-2, -2, -2, -2});
  ASSERT_EQ(found.size(), 2u);
  ASSERT_TRUE(found.count(0) == 1 && found.count(1) == 1);
  EXPECT_NEAR(found.at(0), 1 / (1 + std::exp(-2.0)), 1e-6);
  EXPECT_NEAR(found.at(1), 1 / (1 + std::exp(1.0)), 1e-6);
}

TEST(ExpertRoutes, AddTheCorrectionToLogitsIfTheyRankLogits) {
  ExpertsConfig config = experts_of(3, 1);
  config.scores = ExpertsConfig::Scores::sigmoid;
  config.has_correction = true;
  // Sigmoids 0.9999 and 0.9933, logits 9 and 5.
  EXPECT_EQ(choice_of(config, {9, 5, 0}, {0, 1, 0}).count(1), 1u);
  config.ranks_logits = true;
  const Weights found = choice_of(config, {9, 5, 0}, {0, 1, 0});
  ASSERT_EQ(found.count(0), 1u);
  EXPECT_NEAR(found.at(0), 1 / (1 + std::exp(-9.0)), 1e-6);
}

TEST(ExpertRoutes, MixByTheSoftmaxOfNearLogits) {
  ExpertsConfig config = experts_of(4, 2);
  config.mixer_margin = 0.2;
  // Relative distances from 2: 0.05 and 0.15 are near, 0.5 is far; then from 1.9: 0.105 and 0.47.
  const Weights found = choice_of(config, {1.7f, 2, 1, 1.9f});
  ASSERT_TRUE(found.size() == 2 && found.count(1) == 1 && found.count(3) == 1);
  EXPECT_NEAR(found.at(1), 1 / (1 + std::exp(-0.1) + std::exp(-0.3)), 1e-6);
  EXPECT_NEAR(found.at(3), 1 / (1 + std::exp(-0.2)), 1e-6);
  // Of negative logits, distances are relative to each expert's own.
  const Weights negative = choice_of(config, {-1, -1.1f, -3, -9});
  ASSERT_TRUE(negative.size() == 2 && negative.count(0) == 1 && negative.count(1) == 1);
  EXPECT_NEAR(negative.at(0), 1 / (1 + std::exp(-0.1)), 1e-6);
  EXPECT_NEAR(negative.at(1), 1, 1e-6);
}

TEST(ExpertRoutes, AddsAndGatesRows) {
  for (const bool device : {false, true}) {
    const Form form(device);
    const Matrix x("x", 2, 3), y("y", 4, 3), logits("logits", 4, 1);
    fill(x, std::vector<float>{1, 2, 3, 4, 5, 6});
    kvzap::engine::clear(ExecutionSpace{}, y);
    const Kokkos::View<std::int64_t*, kvzap::MemorySpace> rows("rows", 2);
    fill(rows, std::vector<std::int64_t>{1, 3});
    const Vector weights("weights", 2);
    fill(weights, std::vector<float>{2, 0.5f});
    kvzap::engine::add_weighted_rows(ExecutionSpace{}, x, {rows, weights}, y);
    kvzap::engine::add_weighted_rows(ExecutionSpace{}, x, {rows, weights}, y);
    fill(logits, std::vector<float>{0, 0, 0, std::log(3.0f)});
    kvzap::engine::gate_rows(ExecutionSpace{}, logits, y);
    const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, y);
    for (int d = 0; d < 3; ++d) {
      EXPECT_EQ(found(0, d), 0);
      EXPECT_FLOAT_EQ(found(1, d), 2.0f * static_cast<float>(1 + d));
      EXPECT_FLOAT_EQ(found(3, d), 0.75f * static_cast<float>(4 + d));
    }
    kvzap::engine::scale_rows(ExecutionSpace{}, weights, x);
    kvzap::engine::add_weighted_rows(ExecutionSpace{}, x, {rows, {}}, y);
    const auto more = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, y);
    for (int d = 0; d < 3; ++d) {
      EXPECT_FLOAT_EQ(more(1, d), 4.0f * static_cast<float>(1 + d));
      EXPECT_FLOAT_EQ(more(3, d), 1.25f * static_cast<float>(4 + d));
    }
  }
}

}  // namespace
