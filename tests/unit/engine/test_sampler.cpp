#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <kvzap/engine/sampler.hpp>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

std::map<TokenId, double> frequencies(const SamplingOptions& options,
                                      const std::vector<float>& logits, int draws) {
  Sampler sampler(options);
  std::map<TokenId, double> result;
  for (int i = 0; i < draws; ++i) result[sampler(logits)] += 1.0 / draws;
  return result;
}

TEST(Sampler, GreedyTakesTheSmallerOfEqualIds) {
  Sampler sampler({});
  EXPECT_EQ(sampler({0, 3, 1, 3}), 1);
  EXPECT_EQ(sampler({-std::numeric_limits<float>::infinity(), -2}), 1);
}

TEST(Sampler, RefusesLogitsThatAreNoNumbers) {
  Sampler sampler({});
  EXPECT_EQ(sampler({0, std::nanf(""), 9}), -1);
  EXPECT_EQ(sampler({-std::numeric_limits<float>::infinity()}), -1);
  EXPECT_EQ(sampler({}), -1);
}

// Frequencies over many draws against the softmax that the options describe: 20000 draws put the
// standard error below 0.0036.
TEST(Sampler, DrawsFromTheSoftmaxThatIsLeft) {
  const std::vector<float> logits = {1.0f, 2.0f, 0.5f, 3.0f, -1.0f};
  const auto expect = [&](const SamplingOptions& options, const std::vector<TokenId>& kept) {
    double sum = 0;
    for (TokenId id : kept) sum += std::exp(logits[id] / options.temperature);
    const auto found = frequencies(options, logits, 20000);
    EXPECT_EQ(found.size(), kept.size());
    for (TokenId id : kept) {
      ASSERT_TRUE(found.count(id)) << id;
      EXPECT_NEAR(found.at(id), std::exp(logits[id] / options.temperature) / sum, 0.015) << id;
    }
  };
  expect({1.0, 0, 1.0, 1}, {0, 1, 2, 3, 4});
  expect({2.0, 3, 1.0, 2}, {3, 1, 0});
  // Probabilities at temperature 1: 3 has 0.62, 1 has 0.23, 0 has 0.084, 2 has 0.051, 4 has 0.011.
  expect({1.0, 0, 0.8, 3}, {3, 1});
  expect({1.0, 0, 0.6, 4}, {3});
  expect({1.0, 2, 0.99, 5}, {3, 1});
}

/// What Sampler says, by sorting the whole vocabulary.
TokenId draw_by_sorting(const SamplingOptions& options, const std::vector<float>& logits,
                        std::mt19937_64& random) {
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  if (options.top_k > 0 && options.top_k < static_cast<std::int64_t>(order.size())) {
    order.resize(options.top_k);
  }
  std::vector<double> cumulative;
  double sum = 0;
  for (TokenId id : order) {
    sum +=
        std::exp((static_cast<double>(logits[id]) - logits[order.front()]) / options.temperature);
    cumulative.push_back(sum);
  }
  std::size_t kept = 0;
  while (kept < order.size() && (kept == 0 || cumulative[kept - 1] < options.top_p * sum)) ++kept;
  const double target = static_cast<double>(random() >> 11) * 0x1p-53 * cumulative[kept - 1];
  std::size_t drawn = 0;
  while (drawn + 1 < kept && cumulative[drawn] <= target) ++drawn;
  return order[drawn];
}

std::vector<float> random_logits(std::size_t count, bool with_ties, std::mt19937_64& random) {
  std::vector<float> logits(count);
  std::normal_distribution<float> normal(0, 3);
  for (float& logit : logits) {
    logit = normal(random);
    if (with_ties) logit = std::round(logit);
  }
  return logits;
}

TEST(Sampler, DrawsAsIfTheWholeVocabularyWereSorted) {
  std::mt19937_64 numbers(1);
  for (const std::size_t vocabulary : {1, 3, 256, 257, 2048, 2049, 151936}) {
    for (const bool with_ties : {false, true}) {
      const std::vector<float> logits = random_logits(vocabulary, with_ties, numbers);
      for (const SamplingOptions& options :
           {SamplingOptions{1, 0, 1, 3}, SamplingOptions{1, 0, 0.9, 4},
            SamplingOptions{0.5, 0, 0.5, 5}, SamplingOptions{30, 0, 1, 6},
            SamplingOptions{30, 0, 0.99, 7}, SamplingOptions{1, 50, 1, 8},
            SamplingOptions{1, 2000, 0.8, 9}, SamplingOptions{2, 1, 0.8, 10}}) {
        Sampler sampler(options);
        std::mt19937_64 random(options.seed);
        for (int draw = 0; draw < (vocabulary > 10000 ? 1 : 4); ++draw) {
          ASSERT_EQ(sampler(logits), draw_by_sorting(options, logits, random))
              << vocabulary << " tokens, ties " << with_ties << ", temperature "
              << options.temperature << ", top-k " << options.top_k << ", top-p " << options.top_p;
        }
      }
    }
  }
}

// More likely tokens than are sorted at first, and fewer than in a later try.
TEST(Sampler, KeepsManyEqualTokensByMinP) {
  std::vector<float> logits(32000, -1);
  std::fill_n(logits.begin(), 19200, 0.0f);
  SamplingOptions options;
  options.temperature = 1;
  options.min_p = 0.5;
  Sampler sampler(options);
  TokenId largest = 0;
  for (int i = 0; i < 50; ++i) {
    const TokenId token = sampler(logits);
    EXPECT_LT(token, 19200);
    largest = std::max(largest, token);
  }
  EXPECT_GT(largest, 12000);
}

TEST(Sampler, ErrorsNameTheFieldOrTheCallersOption) {
  const auto error_of = [](const SamplingNames& names) -> std::string {
    SamplingOptions options;
    options.top_k = -1;
    try {
      check(options, names);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error_of({}), "top_k is -1; expected 0 or more");
  EXPECT_EQ(error_of([](std::string_view field) { return "--" + std::string(field); }),
            "--top_k is -1; expected 0 or more");
}

TEST(Sampler, SeedsDecide) {
  const std::vector<float> logits(1000, 0.0f);
  const auto draws = [&](std::uint64_t seed) {
    Sampler sampler({1.0, 0, 1.0, seed});
    std::vector<TokenId> ids;
    for (int i = 0; i < 50; ++i) ids.push_back(sampler(logits));
    return ids;
  };
  EXPECT_EQ(draws(7), draws(7));
  EXPECT_NE(draws(7), draws(8));
}

TEST(Sampler, RefusesOptionsOutOfRange) {
  const double nan = std::nan("");
  test::expect_error([] { Sampler({-1.0, 0, 1.0, 0}); }, {"temperature", "-1"});
  test::expect_error([&] { Sampler({nan, 0, 1.0, 0}); }, {"temperature", "nan"});
  test::expect_error([] { Sampler({1.0, -2, 1.0, 0}); }, {"top_k", "-2"});
  test::expect_error([] { Sampler({1.0, 0, 0.0, 0}); }, {"top_p", "0"});
  test::expect_error([] { Sampler({1.0, 0, 1.5, 0}); }, {"top_p", "1.5"});
  test::expect_error([&] { Sampler({1.0, 0, nan, 0}); }, {"top_p", "nan"});
}

// Another sampler, with other options too, goes on with the same random numbers.
TEST(Sampler, GoesOnFromAState) {
  SamplingOptions options;
  options.temperature = 1;
  options.seed = 3;
  const std::vector<float> logits = {0.5F, 1, 0, 0.7F, -1, 0.2F, 0.1F};
  Sampler sampler(options);
  for (int i = 0; i < 400; ++i) sampler(logits);  // past the generator's first block
  const std::string state = sampler.state();
  options.seed = 4;
  Sampler other(options);
  other(logits);
  other.set_state(state);
  for (int i = 0; i < 400; ++i) EXPECT_EQ(other(logits), sampler(logits));
  EXPECT_EQ(other.state(), sampler.state());
}

TEST(Sampler, RefusesWhatIsNoState) {
  Sampler sampler({});
  const std::string state = sampler.state();
  for (const std::string& text : {std::string(), std::string("1 2 3"), state + " 7", "x" + state,
                                  state.substr(0, state.rfind(' '))}) {
    test::expect_error([&] { sampler.set_state(text); }, {"mt19937_64"});
    EXPECT_EQ(sampler.state(), state);
  }
}

/// Fields of a GenerationConfig of transformers as options.
SamplingOptions options_of(const nlohmann::json& fields) {
  SamplingOptions options;
  if (fields.value("do_sample", false)) options.temperature = fields.at("temperature");
  options.top_k = fields.value("top_k", std::int64_t{0});
  options.top_p = fields.value("top_p", 1.0);
  options.min_p = fields.value("min_p", 0.0);
  options.repetition_penalty = fields.value("repetition_penalty", 1.0);
  options.suppress_tokens = fields.value("suppress_tokens", options.suppress_tokens);
  options.bad_words = fields.value("bad_words_ids", options.bad_words);
  // GenerationConfig::load leaves them out.
  if (fields.contains("eos_token_id")) options.bad_words.erase(options.bad_words.begin());
  return options;
}

// tests/golden/make_sampling_goldens.py
TEST(Sampler, ChangesLogitsAsTransformers) {
  std::ifstream file(test::source_dir().string() + "/tests/golden/sampling.json");
  const auto goldens = nlohmann::json::parse(file);
  int sampled = 0;
  for (const auto& golden : goldens.at("processors")) {
    SCOPED_TRACE(golden.at("fields").dump());
    const auto logits = golden.at("logits").get<std::vector<float>>();
    Sampler sampler(options_of(golden.at("fields")));
    sampler.append_prompt(golden.at("prompt"));
    for (const TokenId token : golden.at("answer")) sampler.append(token);
    if (golden.contains("processed")) {
      std::vector<float> changed = logits;
      sampler.change(changed);
      for (std::size_t i = 0; i < changed.size(); ++i) {
        const auto& expected = golden.at("processed")[i];
        EXPECT_EQ(changed[i], expected.is_null() ? -std::numeric_limits<float>::infinity()
                                                 : expected.get<float>())
            << i;
      }
      continue;
    }
    ++sampled;
    std::map<TokenId, double> found;
    for (int i = 0; i < 20000; ++i) found[sampler(logits)] += 1.0 / 20000;
    EXPECT_EQ(found.size(), golden.at("probabilities").size());
    for (const auto& [token, probability] : golden.at("probabilities").items()) {
      EXPECT_NEAR(found[std::stoi(token)], probability.get<double>(), 0.015) << token;
    }
  }
  EXPECT_EQ(sampled, 3);
}

// What vLLM and OpenAI document: presence once, frequency for each time, of the answer alone.
TEST(Sampler, PenaltiesOfTheAnswer) {
  SamplingOptions options;
  options.presence_penalty = 0.5;
  options.frequency_penalty = 0.25;
  Sampler sampler(options);
  sampler.append_prompt({0, 1});
  for (const TokenId token : {1, 2, 2, 1, 1}) sampler.append(token);
  std::vector<float> logits = {1, 1, 1, 1};
  sampler.change(logits);
  EXPECT_EQ(logits, (std::vector<float>{1, -0.25f, 0, 1}));
  EXPECT_EQ(sampler({1, 1.2f, 0.9f, 0.5f}), 0);
}

TEST(Sampler, PenaltiesLookAtTheLastTokensAlone) {
  SamplingOptions options;
  options.repetition_penalty = 2;
  options.frequency_penalty = 1;
  options.repeat_last_n = 3;
  Sampler sampler(options);
  sampler.append_prompt({0, 3});
  for (const TokenId token : {1, 2, 1}) sampler.append(token);
  std::vector<float> logits = {4, 4, 4, -4};
  sampler.change(logits);
  EXPECT_EQ(logits, (std::vector<float>{4, 0, 1, -4}));
  sampler.append(2);
  sampler.append(2);
  logits = {4, 4, 4, -4};
  sampler.change(logits);
  EXPECT_EQ(logits, (std::vector<float>{4, 1, 0, -4}));
  options.repeat_last_n = 0;
  EXPECT_TRUE(options.is_plain());
}

TEST(Sampler, BiasesAndTheLeastLength) {
  SamplingOptions options;
  options.logit_bias = {{1, 2.5F}, {2, -100.0F}, {9, 1.0F}};
  options.min_new_tokens = 2;
  options.end_tokens = {0};
  EXPECT_FALSE(options.is_plain());
  Sampler sampler(options);
  sampler.append_prompt({3, 3, 3});
  EXPECT_EQ(sampler({9, 1, 4, 3}), 1);  // 3.5
  sampler.append(1);
  EXPECT_EQ(sampler({9, 0, 4, 3}), 3);
  sampler.append(3);
  EXPECT_EQ(sampler({9, 1, 4, 3}), 0);
  options.logit_bias.clear();
  options.min_new_tokens = 0;
  EXPECT_TRUE(options.is_plain());
}

TEST(Sampler, NoTokenIsLeft) {
  SamplingOptions options;
  options.suppress_tokens = {0, 1, 7};
  Sampler sampler(options);
  EXPECT_EQ(sampler({2, 1}), -1);
  EXPECT_EQ(sampler({2, 1, 0}), 2);
}

TEST(Sampler, RefusesPenaltiesOutOfRange) {
  const auto refuse = [](auto change, const char* flag) {
    SamplingOptions options;
    change(options);
    test::expect_error([&] { Sampler{options}; }, {flag, "expected"});
  };
  const double nan = std::nan("");
  for (const double value : {0.0, -1.0, 1e7, nan}) {
    refuse([&](SamplingOptions& o) { o.repetition_penalty = value; }, "repetition_penalty");
  }
  for (const double value : {1e7, -1e7, nan}) {
    refuse([&](SamplingOptions& o) { o.presence_penalty = value; }, "presence_penalty");
    refuse([&](SamplingOptions& o) { o.frequency_penalty = value; }, "frequency_penalty");
  }
  for (const double value : {-0.1, 1.1, nan}) {
    refuse([&](SamplingOptions& o) { o.min_p = value; }, "min_p");
  }
  refuse([](SamplingOptions& o) { o.repeat_last_n = -2; }, "repeat_last_n");
  refuse([](SamplingOptions& o) { o.bad_words = {{1}, {}}; }, "bad_words_ids");
  refuse([](SamplingOptions& o) { o.suppress_tokens = {-1}; }, "suppress_tokens");
  refuse([](SamplingOptions& o) { o.end_tokens = {-1}; }, "end_tokens");
  refuse([](SamplingOptions& o) { o.logit_bias = {{-1, 0.0F}}; }, "logit_bias");
}

}  // namespace
}  // namespace kvzap
