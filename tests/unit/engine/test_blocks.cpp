// The blocks of a step, each alone, against plain loops in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "engine/attention_block.hpp"
#include "engine/delta_net_block.hpp"
#include "engine/embedding_block.hpp"
#include "engine/experts_block.hpp"
#include "engine/feed_forward_block.hpp"
#include "engine/output_block.hpp"
#include "engine/short_convolution_block.hpp"
#include "engine/state_space_block.hpp"
#include "one_step.hpp"

namespace kvzap {
namespace {

using linalg::Matrix;
using test::block_config;
using test::fill;
using test::Numbers;
using test::on_host;
using test::OneStep;
using test::plain;
using test::product;
using test::some_numbers;

void expect_near(const Matrix& found, const Numbers& expected) {
  const Numbers numbers = on_host(found);
  ASSERT_EQ(numbers.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(numbers[i], expected[i], 1e-4 * (1 + std::fabs(expected[i]))) << i;
  }
}

std::vector<std::string> step_kernels;

double silu(double x) { return x / (1 + std::exp(-x)); }

/// down (silu(gate x) * up x)
Numbers feed_forward(const Numbers& x, const Model::Weights::FeedForward& weights) {
  const Numbers gate_up = product(x, weights.gate_up);
  const auto width = static_cast<std::size_t>(weights.gate_up.outputs()) / 2;
  Numbers gated(gate_up.size() / 2);
  for (std::size_t i = 0; i < gated.size(); ++i) {
    const double* const row = gate_up.data() + i / width * 2 * width;
    gated[i] = silu(row[i % width]) * row[width + i % width];
  }
  return product(gated, weights.down);
}

/// Returns room for the input of a block, with numbers in it.
Matrix input_of(engine::Step& step) {
  const Matrix x = step.matrix(engine::Step::normed, step.tokens(), step.config.hidden_size);
  fill(x, some_numbers(x.size()));
  return x;
}

TEST(Step, OutputsOfArgmaxesComeFirst) {
  StepBatch batch;
  batch.add(0, {1, 1}, {}, StepOutput::all_logits);
  batch.add(1, {1, 1, 1}, {}, StepOutput::argmax);
  batch.add(2, {1}, {}, StepOutput::none);
  batch.add(3, {1, 1}, {}, StepOutput::all_hidden);
  batch.add(4, {1, 1}, {}, StepOutput::logits);
  batch.add(5, {1, 1}, {}, StepOutput::hidden);
  engine::StepOutputs outputs;
  outputs.list(batch);
  EXPECT_EQ(outputs.rows, (std::vector<std::int64_t>{4, 0, 1, 9, 6, 7, 11}));
  EXPECT_EQ(outputs.spans, (std::vector<std::int64_t>{1, 0, 0, 4, 3, 3, 5}));
  EXPECT_EQ(outputs.n_tokens, 1);
  EXPECT_EQ(outputs.n_head(), 4);
  EXPECT_EQ(outputs.n_hidden(), 3);
  EXPECT_FALSE(outputs.are_consecutive());
}

TEST(Step, AfterAnErrorOnlyAgreementsRun) {
  OneStep one(block_config(), {2});
  one.step.locally([] { throw std::runtime_error("the first"); });
  one.step.locally([] { FAIL() << "runs after an error"; });
  one.step.note(std::make_exception_ptr(std::runtime_error("the second")));
  EXPECT_EQ(one.step.outcome(), engine::Outcome::failed);
  try {
    one.step.agree_on_failure();
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
  one.step.locally([] { throw OutOfMemory("none left", 0, 0); });
  EXPECT_THROW(one.step.agree_on_failure(), StepOutOfMemory);
  EXPECT_EQ(one.step.outcome(), engine::Outcome::done);
}

TEST(FeedForwardBlock, EqualsPlainLoops) {
  OneStep one(block_config(), {5});
  engine::FeedForwardBlock block;
  block.reserve(one.step);
  const Matrix x = input_of(one.step);
  const Numbers before = on_host(x);
  expect_near(block.run(one.step, 0, x), feed_forward(before, one.step.weights(0).dense));
}

TEST(FeedForwardBlock, NormsTheInputsOfTheLastMap) {
  ModelConfig config = block_config();
  config.architecture = "BitNetForCausalLM";
  config.has_inner_norms = true;
  OneStep one(config, {5});
  engine::FeedForwardBlock block;
  block.reserve(one.step);
  const Matrix x = input_of(one.step);
  const auto& weights = one.step.weights(0).dense;
  const auto norm = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), weights.inner_norm);
  const Numbers gate_up = product(on_host(x), weights.gate_up);
  const std::size_t width = norm.extent(0);
  ASSERT_EQ(width, 20u);
  Numbers inputs;
  for (std::size_t t = 0; t < 5; ++t) {
    const double* const row = gate_up.data() + 2 * t * width;
    double squares = 0;
    for (std::size_t i = 0; i < width; ++i) {
      inputs.push_back(silu(row[i]) * row[width + i]);
      squares += inputs.back() * inputs.back();
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + config.rms_norm_eps);
    for (std::size_t i = 0; i < width; ++i) inputs[t * width + i] *= scale * norm(i);
  }
  const Numbers expected = product(inputs, weights.down);
  expect_near(block.run(one.step, 0, x), expected);
}

// Where the product itself adds the bias and activates. Inputs of both products are bf16.
TEST(FeedForwardBlock, ActivatesInTheProduct) {
  const bool was_device = base::machine().on_device();
  base::machine().set_device(true);
  ModelConfig config = block_config();
  config.architecture = "Starcoder2ForCausalLM";
  config.gates_feed_forward = false;
  config.mlp_bias = true;
  for (const Activation activation : {Activation::gelu_tanh, Activation::relu, Activation::gelu}) {
    config.activation = activation;
    OneStep one(config, {5}, StepOutput::none, DType::bf16);
    const auto& weights = one.step.weights(0).dense;
    const bool activates = activation != Activation::gelu;
    EXPECT_EQ(weights.rounded_bias.extent(0), activates ? 20u : 0u);
    engine::FeedForwardBlock block;
    block.reserve(one.step);
    const Matrix x = input_of(one.step);
    Numbers before = on_host(x);
    for (double& number : before) number = static_cast<float>(bfloat16(number));
    const auto add = [](const auto& bias, Numbers& numbers) {
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), bias);
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] += host(i % host.extent(0));
    };
    Numbers inputs = product(before, weights.gate_up);
    add(weights.gate_up_bias, inputs);
    for (double& number : inputs) {
      const double inner = std::sqrt(2 / M_PI) * (number + 0.044715 * number * number * number);
      number = activation == Activation::relu   ? std::max(number, 0.0)
               : activation == Activation::gelu ? number / 2 * (1 + std::erf(number / std::sqrt(2)))
                                                : number / 2 * (1 + std::tanh(inner));
    }
    Numbers expected = product(inputs, weights.down);
    add(weights.down_bias, expected);
    step_kernels.clear();
    Kokkos::Tools::Experimental::set_begin_parallel_for_callback(
        [](const char* label, const std::uint32_t, std::uint64_t*) {
          step_kernels.emplace_back(label);
        });
    const Numbers found = on_host(block.run(one.step, 0, x));
    Kokkos::Tools::Experimental::set_begin_parallel_for_callback(nullptr);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], 0.02 * (1 + std::fabs(expected[i]))) << i;
    }
    const auto count = [](const char* label) {
      return std::count(step_kernels.begin(), step_kernels.end(), label);
    };
    if (base::runs_on_host) {
      EXPECT_EQ(count("kvzap::product::plain"), 2);
    }
    EXPECT_EQ(count("kvzap::step::activate"), activates ? 0 : 1);
    EXPECT_EQ(count("kvzap::linear::finish"), 0);
  }
  base::machine().set_device(was_device);
}

TEST(ExpertsBlock, EqualsPlainLoops) {
  ModelConfig config = block_config();
  config.architecture = "Qwen2MoeForCausalLM";
  config.experts.emplace();
  config.experts->count = 5;
  config.experts->per_token = 2;
  config.experts->intermediate_size = 12;
  config.experts->shared_intermediate_size = 10;
  config.experts->has_shared_gate = true;
  config.layers.resize(1);
  config.layers[0].has_experts = true;
  OneStep one(config, {7});
  engine::ExpertsBlock block;
  block.reserve(one.step);
  const Matrix x = input_of(one.step);
  const Numbers numbers = on_host(x);
  const auto& weights = one.step.weights(0);
  const Numbers logits = product(numbers, weights.router);
  const Numbers shared = product(numbers, weights.shared_gate);
  Numbers expected = feed_forward(numbers, weights.dense);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] /= 1 + std::exp(-shared[i / config.hidden_size]);
  }
  for (std::size_t t = 0; t < 7; ++t) {
    std::vector<std::pair<double, std::size_t>> scores;
    double sum = 0;
    for (std::size_t e = 0; e < 5; ++e) {
      scores.emplace_back(std::exp(logits[5 * t + e]), e);
      sum += scores.back().first;
    }
    std::sort(scores.rbegin(), scores.rend());
    const auto row = numbers.begin() + static_cast<std::ptrdiff_t>(t) * config.hidden_size;
    for (std::size_t j = 0; j < 2; ++j) {
      const Numbers y =
          feed_forward({row, row + config.hidden_size}, weights.experts[scores[j].second]);
      for (std::size_t d = 0; d < y.size(); ++d) {
        expected[t * y.size() + d] += scores[j].first / sum * y[d];
      }
    }
  }
  expect_near(block.run(one.step, 0, x), expected);
}

/// Causal attention of one sequence: the projections are (token, (query heads + 2 KV heads) * dim).
Numbers dense_attention(const ModelConfig& config, const Numbers& qkv) {
  const std::size_t dim = config.head_dim, q_heads = config.num_attention_heads;
  const std::size_t kv_heads = config.num_key_value_heads, columns = (q_heads + 2 * kv_heads) * dim;
  const std::size_t tokens = qkv.size() / columns;
  const auto turned = [&](std::size_t token, std::size_t head) {
    const double* const x = qkv.data() + token * columns + head * dim;
    Numbers y(dim);
    for (std::size_t i = 0; i < dim / 2; ++i) {
      const double angle = static_cast<double>(token) *
                           std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / dim);
      y[i] = x[i] * std::cos(angle) - x[i + dim / 2] * std::sin(angle);
      y[i + dim / 2] = x[i + dim / 2] * std::cos(angle) + x[i] * std::sin(angle);
    }
    return y;
  };
  Numbers attended(tokens * q_heads * dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t h = 0; h < q_heads; ++h) {
      const std::size_t kv_head = h / config.query_group();
      const Numbers query = turned(t, h);
      double sum = 0;
      double* const out = attended.data() + (t * q_heads + h) * dim;
      for (std::size_t s = 0; s <= t; ++s) {
        const Numbers key = turned(s, q_heads + kv_head);
        const double* const value = qkv.data() + s * columns + (q_heads + kv_heads + kv_head) * dim;
        double score = 0;
        for (std::size_t d = 0; d < dim; ++d) score += query[d] * key[d];
        const double weight = std::exp(score / std::sqrt(static_cast<double>(dim)));
        sum += weight;
        for (std::size_t d = 0; d < dim; ++d) out[d] += weight * value[d];
      }
      for (std::size_t d = 0; d < dim; ++d) out[d] /= sum;
    }
  }
  return attended;
}

TEST(AttentionBlock, EqualsDenseAttentionOfEachSequence) {
  const ModelConfig config = block_config();
  // Rows that nobody reads have no attention.
  for (const StepOutput output : {StepOutput::all_logits, StepOutput::none}) {
    OneStep one(config, {5, 1, 4}, output);
    const Budget::Model counted;
    engine::PolicyBlock policies(DType::f32, counted);
    policies.reserve(one.step, {});
    engine::AttentionBlock block(one.model, policies, nullptr);
    block.reserve(one.step);
    block.begin(one.step);
    const Matrix x = input_of(one.step);
    const Numbers qkv = product(on_host(x), one.step.weights(0).qkv);
    const Matrix found = block.run(one.step, 0, {0, one.step.tokens()}, x);
    one.step.agree_on_failure();
    if (output == StepOutput::none) {
      EXPECT_EQ(found.extent(0), 0U);
      continue;
    }
    Numbers expected;
    const std::size_t columns = qkv.size() / 10;
    for (const auto& span : one.batch.spans()) {
      const Numbers own = dense_attention(
          config,
          {qkv.begin() + span.first * columns, qkv.begin() + (span.first + span.count) * columns});
      expected.insert(expected.end(), own.begin(), own.end());
    }
    expect_near(found, expected);
  }
}

/// Causal attention of one sequence over keys and values of each query head, which are expanded
/// from latents. x: (token, hidden_size).
Numbers expanded_attention(const ModelConfig& config, const Model::Weights::Latent& weights,
                           const Numbers& x) {
  const LatentConfig& latent = *config.latent;
  const std::size_t dim = config.head_dim, nope = latent.nope_dim, turning = latent.rope_dim / 2,
                    rank = latent.rank, value_dim = latent.value_dim,
                    query_dim = latent.query_dim(), heads = weights.to_key.size();
  const auto normed = [&](Numbers rows, std::size_t columns, std::size_t count) {
    for (std::size_t first = 0; first < rows.size(); first += columns) {
      double sum = 0;
      for (std::size_t i = 0; i < count; ++i) sum += rows[first + i] * rows[first + i];
      for (std::size_t i = 0; i < count; ++i) {
        rows[first + i] /= std::sqrt(sum / static_cast<double>(count) + latent.norm_eps);
      }
    }
    return rows;
  };
  const Numbers of_queries =
      normed(product(x, weights.query_in), latent.query_rank, latent.query_rank);
  const Numbers queries = product(of_queries, weights.query);
  const Numbers rows = normed(product(x, weights.row_in), rank + 2 * turning, rank);
  const std::size_t tokens = rows.size() / (rank + 2 * turning);
  const auto turned = [&](const double* pairs, std::size_t token) {
    Numbers y(2 * turning);
    for (std::size_t i = 0; i < turning; ++i) {
      const double angle = static_cast<double>(token) *
                           std::pow(config.rope_theta, -1.0 * static_cast<double>(i) / turning);
      y[i] = pairs[i] * std::cos(angle) - pairs[turning + i] * std::sin(angle);
      y[turning + i] = pairs[turning + i] * std::cos(angle) + pairs[i] * std::sin(angle);
    }
    return y;
  };
  const Numbers gates = latent.gates_heads ? product(x, weights.head_gates) : Numbers();
  Numbers attended(tokens * heads * value_dim);
  for (std::size_t h = 0; h < heads; ++h) {
    // (input, output)
    const Numbers to_key = plain(weights.to_key[h]), from_value = plain(weights.from_value[h]);
    // A latent in the order of a row's dimensions; those of RoPE are not read.
    const auto placed = [&](std::size_t token) {
      Numbers row(dim);
      const double* const from = rows.data() + token * (rank + 2 * turning);
      for (std::size_t i = 0; i < rank; ++i) {
        row[i < rank / 2 ? turning + i : 2 * turning + i] = from[i];
      }
      return row;
    };
    for (std::size_t t = 0; t < tokens; ++t) {
      const double* const query = queries.data() + (t * heads + h) * query_dim;
      const Numbers turned_query = turned(query + nope, t);
      double sum = 0;
      double* const out = attended.data() + (t * heads + h) * value_dim;
      for (std::size_t s = 0; s <= t; ++s) {
        const Numbers row = placed(s);
        const Numbers turned_key = turned(rows.data() + s * (rank + 2 * turning) + rank, s);
        double score = 0;
        for (std::size_t n = 0; n < nope; ++n) {
          double key = 0;
          for (std::size_t d = 0; d < dim; ++d) key += to_key[n * dim + d] * row[d];
          score += query[n] * key;
        }
        for (std::size_t d = 0; d < 2 * turning; ++d) score += turned_query[d] * turned_key[d];
        const double weight = std::exp(score * *config.attention_multiplier);
        sum += weight;
        for (std::size_t v = 0; v < value_dim; ++v) {
          for (std::size_t d = 0; d < dim; ++d)
            out[v] += weight * from_value[d * value_dim + v] * row[d];
        }
      }
      if (latent.gates_heads) sum *= 1 + std::exp(-gates[t * heads + h]);
      for (std::size_t v = 0; v < value_dim; ++v) out[v] /= sum;
    }
  }
  return attended;
}

TEST(AttentionBlock, LatentRowsEqualExpandedKeysAndValues) {
  ModelConfig config = block_config();
  config.architecture = "DeepseekV3ForCausalLM";
  config.num_attention_heads = 5;
  config.num_key_value_heads = 1;
  config.latent = LatentConfig{10, 7, 3, 4, 6};
  config.head_dim = 14;
  config.rotary_dim = 4;
  config.attention_multiplier = 0.7;
  for (const bool gates_heads : {false, true}) {
    config.latent->gates_heads = gates_heads;
    OneStep one(config, {5, 1, 4}, StepOutput::all_logits);
    const Budget::Model counted;
    engine::PolicyBlock policies(DType::f32, counted);
    policies.reserve(one.step, {});
    engine::AttentionBlock block(one.model, policies, nullptr);
    block.reserve(one.step);
    block.begin(one.step);
    const Matrix x = input_of(one.step);
    const Numbers input = on_host(x);
    const Matrix found = block.run(one.step, 0, {0, one.step.tokens()}, x);
    one.step.agree_on_failure();
    Numbers expected;
    for (const auto& span : one.batch.spans()) {
      const auto begin = input.begin() + span.first * config.hidden_size;
      const Numbers own = expanded_attention(config, one.step.weights(0).latent,
                                             {begin, begin + span.count * config.hidden_size});
      expected.insert(expected.end(), own.begin(), own.end());
    }
    expect_near(found, expected);
  }
}

/// Notes the blocks that it sees. A head's row scores its value's first dimension.
class FirstDimension final : public Policy {
 public:
  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    firsts.push_back(block.first);
    Matrix rows("rows", block.count, layer.extents().hidden_size);
    Kokkos::deep_copy(rows, block.hidden);
    const Numbers numbers = on_host(rows);
    hidden.insert(hidden.end(), numbers.begin(), numbers.end());
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    for (int h = 0; h < layer.heads(); ++h) {
      const auto values = layer.values(h);
      Kokkos::deep_copy(layer.exec(), Kokkos::subview(scores, h, engine::range(0, layer.rows(h))),
                        Kokkos::subview(values, Kokkos::ALL, 0));
      layer.exec().fence();
    }
  }

  std::vector<std::int64_t> firsts;
  Numbers hidden;
};

// Two sequences, of which the second has a policy that chooses three rows of each head.
TEST(PolicyBlock, KeepsTheBestRowsOfItsSequence) {
  OneStep one(block_config(), {4, 9});
  FirstDimension policy;
  Budget budget;
  budget.amount = Budget::Amount::keep_tokens;
  budget.keep_tokens = 3;
  engine::PolicyStep policy_step;
  policy_step.policy = &policy;
  policy_step.budget = &budget;
  policy_step.chooses = true;
  StepRule rule;
  rule.policy = &policy_step;
  StepBatch batch;
  const auto ids = one.batch.tokens();
  batch.add(0, {ids.begin(), ids.begin() + 4}, {}, StepOutput::none);
  batch.add(1, {ids.begin() + 4, ids.end()}, rule, StepOutput::none);
  one.step.begin(batch);
  one.step.reserve();
  const Budget::Model counted{1, 2, 64};
  engine::PolicyBlock policies(DType::f32, counted);
  policies.reserve(one.step, {});
  engine::AttentionBlock attention(one.model, policies, nullptr);
  attention.reserve(one.step);
  attention.begin(one.step);
  ASSERT_TRUE(policies.see(one.step, 0));
  policies.show_layer(one.step, 0, {});
  const Matrix x = input_of(one.step);
  const Numbers hidden = on_host(x);
  const std::size_t dim = one.step.config.head_dim, columns = (6 + 2 * 2) * dim;
  const Numbers qkv = product(hidden, one.step.weights(0).qkv);
  for (const engine::RowRange rows : {engine::RowRange{0, 6}, engine::RowRange{6, 13}}) {
    attention.run(one.step, 0, rows,
                  Kokkos::subview(x, engine::range(rows.begin, rows.end), Kokkos::ALL));
  }
  policies.apply(one.step, 0);
  one.step.agree_on_failure();
  policies.end();

  EXPECT_EQ(policy.firsts, (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(policy.hidden, Numbers(hidden.begin() + 4 * one.step.config.hidden_size, hidden.end()));
  EXPECT_EQ(one.cache.rows(0, 0, 0), 0);  // the decoder appends what no policy chooses
  for (std::size_t h = 0; h < 2; ++h) {
    std::vector<std::pair<double, std::int64_t>> scores;
    for (std::size_t t = 0; t < 9; ++t) {
      scores.emplace_back(qkv[(4 + t) * columns + (6 + 2 + h) * dim], t);
    }
    std::sort(scores.rbegin(), scores.rend());
    std::vector<std::int64_t> expected;
    for (std::size_t i = 0; i < 3; ++i) expected.push_back(scores[i].second);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(one.cache.positions(1, 0, static_cast<int>(h)), expected) << h;
  }
}

/// A delta net of two key heads, as one of `architecture`.
ModelConfig delta_config(const char* architecture, DeltaNetConfig::Kind kind) {
  ModelConfig config = block_config();
  config.architecture = architecture;
  config.delta_net.emplace();
  config.delta_net->kind = kind;
  config.delta_net->key_heads = config.delta_net->value_heads = 2;
  config.delta_net->key_dim = config.delta_net->value_dim = 8;
  config.layers.resize(1);
  config.layers[0].mixing = TokenMixing::delta_net;
  return config;
}

/// Copies the columns of `from` (row, its columns) to those of `to` from `first` on.
void fill_columns(const Matrix& to, std::size_t first, const Numbers& from) {
  Numbers all = on_host(to);
  const std::size_t rows = to.extent(0), columns = to.extent(1), own = from.size() / rows;
  for (std::size_t i = 0; i < from.size(); ++i) all[i / own * columns + first + i % own] = from[i];
  fill(to, all);
}

/// Compares the block with pass_delta_net of rows and rates that `project` makes of the input.
void expect_delta_net(
    const ModelConfig& config,
    const std::function<void(const Numbers&, const Model::Weights::Layer&, const engine::DeltaNet&,
                             const engine::DeltaTokens&)>& project) {
  OneStep one(config, {6, 3});
  engine::DeltaNetBlock block;
  block.reserve(one.step);
  const Matrix x = input_of(one.step);
  const auto& weights = one.step.weights(0);
  const engine::DeltaNet net{*config.delta_net, 2};
  const engine::DeltaTokens tokens{Matrix("rows", 9, net.columns()),
                                   Matrix("rates", 9, net.rates()),
                                   Matrix("outputs", 9, net.values())};
  project(on_host(x), weights, net, tokens);
  const Numbers projected = on_host(tokens.rows);
  const engine::DeltaWeights own{weights.convolution, weights.delta_decay_rates,
                                 weights.delta_decay_shifts, weights.delta_norm,
                                 static_cast<float>(config.rms_norm_eps)};
  for (const auto& span : one.batch.spans()) {
    const engine::DeltaState state("state", 2, config.delta_net->state_values());
    engine::pass_delta_net(one.step.exec, net, own,
                           tokens.part(span.first, span.first + span.count), state, state);
  }
  Numbers expected = on_host(tokens.outputs);
  if (config.delta_net->kind == DeltaNetConfig::Kind::lightning) {
    const std::size_t values = net.values(), columns = net.columns(), gates = net.gates();
    for (std::size_t first = 0; first < expected.size(); first += values) {
      double squares = 0;
      for (std::size_t c = 0; c < values; ++c) squares += std::pow(expected[first + c], 2);
      const double mean = squares / static_cast<double>(values);
      for (std::size_t c = 0; c < values; ++c) {
        const double gate = projected[first / values * columns + gates + c];
        expected[first + c] /= std::sqrt(mean + config.rms_norm_eps) * (1 + std::exp(-gate));
      }
    }
  }
  const Matrix found = block.run(one.step, 0, {0, 9}, x);
  one.step.agree_on_failure();
  expect_near(found, expected);
}

TEST(DeltaNetBlock, PassesTheProductsOfEachSequence) {
  ModelConfig config = delta_config("Qwen3NextForCausalLM", DeltaNetConfig::Kind::gated);
  config.delta_net->value_heads = 4;
  config.delta_net->value_dim = 4;
  expect_delta_net(config, [](const Numbers& x, const auto& weights, const auto&,
                              const engine::DeltaTokens& tokens) {
    fill(tokens.rows, product(x, weights.delta_in));
    fill(tokens.rates, product(x, weights.delta_rates));
  });
}

TEST(DeltaNetBlock, DecaysAndGatesOfKimiAreMapsOfLatents) {
  ModelConfig config = delta_config("KimiLinearForCausalLM", DeltaNetConfig::Kind::kimi);
  config.delta_net->gate_rank = 5;
  expect_delta_net(config, [](const Numbers& x, const auto& weights, const auto& net,
                              const engine::DeltaTokens& tokens) {
    const Numbers both = product(x, weights.delta_latents);
    Numbers latents[2];
    for (std::size_t i = 0; i < both.size(); ++i) latents[i % 10 / 5].push_back(both[i]);
    fill_columns(tokens.rows, 0, product(x, weights.delta_in));
    fill_columns(tokens.rows, net.gates(), product(latents[1], weights.delta_gates_out));
    fill_columns(tokens.rates, 0, product(x, weights.delta_rates));
    fill_columns(tokens.rates, net.value_heads(), product(latents[0], weights.delta_decays_out));
  });
}

TEST(DeltaNetBlock, LightningAttentionHasOneNorm) {
  expect_delta_net(
      delta_config("MiniMaxForCausalLM", DeltaNetConfig::Kind::lightning),
      [](const Numbers& x, const auto& weights, const auto&, const engine::DeltaTokens& tokens) {
        fill(tokens.rows, product(x, weights.delta_in));
      });
}

/// Sets weights, and returns them.
Numbers set(const Model::Weights::Vector& weights, double scale) {
  const Numbers numbers = some_numbers(weights.size(), scale);
  fill(Matrix(weights.data(), 1, weights.size()), numbers);
  return numbers;
}

// As the decoder does: later rows go on from the state that earlier ones leave.
void count_tokens(OneStep& one, const engine::RowRange& rows) {
  one.step.for_each_span(rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    one.cache.count_tokens(one.step.spans()[s].sequence, 0, end - begin);
  });
}

TEST(ShortConvolutionBlock, ConvolvesTheProductsOfEachSequence) {
  ModelConfig config = block_config();
  config.architecture = "Lfm2ForCausalLM";
  config.qk_norm = QkNorm::none;
  config.short_convolution.emplace();
  config.short_convolution->kernel = 5;
  config.short_convolution->has_bias = true;
  config.layers.resize(1);
  config.layers[0].mixing = TokenMixing::short_convolution;
  OneStep one(config, {6, 3});
  engine::ShortConvolutionBlock block;
  block.reserve(one.step);
  const Matrix x = input_of(one.step);
  const auto& weights = one.step.weights(0);
  const Numbers projected = product(on_host(x), weights.mixer_in);
  const Numbers taps = set(weights.convolution, 30), bias = set(weights.convolution_bias, 0.5);
  const std::size_t n = config.hidden_size;
  Numbers expected;
  for (const auto& span : one.batch.spans()) {
    const auto end = static_cast<std::size_t>(span.first + span.count);
    for (auto t = static_cast<std::size_t>(span.first); t < end; ++t) {
      for (std::size_t c = 0; c < n; ++c) {
        double sum = bias[c];
        for (std::size_t k = 0; k < 5; ++k) {
          const std::int64_t from = static_cast<std::int64_t>(t + k) - 4;
          if (from < span.first) continue;
          const double* const row = projected.data() + from * 3 * n;
          sum += taps[k * n + c] * row[c] * row[2 * n + c];
        }
        expected.push_back(sum * projected[t * 3 * n + n + c]);
      }
    }
  }
  // In two blocks, so that the second begins from the state that the first leaves.
  for (const engine::RowRange rows : {engine::RowRange{0, 4}, engine::RowRange{4, 9}}) {
    const auto own = engine::range(rows.begin, rows.end);
    const Matrix found = block.run(one.step, 0, rows, Kokkos::subview(x, own, Kokkos::ALL));
    one.step.agree_on_failure();
    count_tokens(one, rows);
    expect_near(found, {expected.begin() + rows.begin * n, expected.begin() + rows.end * n});
  }
}

TEST(StateSpaceBlock, PassesTheProductsOfEachSequence) {
  using Gating = StateSpaceConfig::Gating;
  for (const Gating gating : {Gating::gate, Gating::gate_before_norm, Gating::norm_before_gate}) {
    ModelConfig config = block_config();
    config.architecture = "BambaForCausalLM";
    StateSpaceConfig space;
    space.heads = 6;
    space.head_dim = 5;
    space.groups = 2;
    space.state_dim = 7;
    space.kernel = 1;
    space.gating = gating;
    space.in_multipliers = {0.5, 2, 1.5, 3, 0.25};
    config.state_space = space;
    config.layers.resize(1);
    config.layers[0].mixing = TokenMixing::state_space;
    OneStep one(config, {6, 3});
    engine::StateSpaceBlock block;
    block.reserve(one.step);
    const Matrix x = input_of(one.step);
    const auto& weights = one.step.weights(0);
    const Numbers rows = product(on_host(x), weights.mixer_in);
    const Numbers taps = set(weights.convolution, 30), skips = set(weights.space_skips, 1);
    const Numbers rates = set(weights.space_rates, 1), norm = set(weights.space_norm, 2);
    // Columns: x of 6 heads, B and C of 2 groups, z and d of the heads.
    const std::size_t columns = 30 + 28 + 30 + 6;
    Numbers expected(9 * 30);
    for (const auto& span : one.batch.spans()) {
      Numbers state(6 * 7 * 5);
      for (std::int64_t t = span.first; t < span.first + span.count; ++t) {
        const double* const row = rows.data() + t * columns;
        double* const out = expected.data() + t * 30;
        double squares[2] = {};
        for (std::size_t h = 0; h < 6; ++h) {
          const std::size_t b = 30 + h / 3 * 14, c = b + 7;
          const double step = std::log1p(std::exp(0.25 * row[88 + h]));  // dt_bias is 0
          for (std::size_t p = 0; p < 5; ++p) {
            const double input = silu(2 * taps[h * 5 + p] * row[h * 5 + p]);
            double sum = skips[h] * input;
            for (std::size_t n = 0; n < 7; ++n) {
              double& cell = state[(h * 7 + n) * 5 + p];
              cell = std::exp(-rates[h] * step) * cell +
                     step * input * silu(1.5 * taps[b + n] * row[b + n]);
              sum += cell * silu(3 * taps[c + n] * row[c + n]);
            }
            if (gating != Gating::norm_before_gate) sum *= silu(0.5 * row[58 + h * 5 + p]);
            out[h * 5 + p] = sum;
            squares[h / 3] += sum * sum;
          }
        }
        for (std::size_t i = 0; i < 30 && gating != Gating::gate; ++i) {
          out[i] *= norm[i] / std::sqrt(squares[i / 15] / 15 + config.rms_norm_eps);
          if (gating == Gating::norm_before_gate) out[i] *= silu(0.5 * row[58 + i]);
        }
      }
    }
    for (const engine::RowRange part : {engine::RowRange{0, 4}, engine::RowRange{4, 9}}) {
      const auto own = engine::range(part.begin, part.end);
      const Matrix found = block.run(one.step, 0, part, Kokkos::subview(x, own, Kokkos::ALL));
      one.step.agree_on_failure();
      count_tokens(one, part);
      expect_near(found, {expected.begin() + part.begin * 30, expected.begin() + part.end * 30});
    }
  }
}

TEST(StateSpaceBlock, DerivesTheStepsOfMamba1) {
  for (const bool norms : {false, true}) {
    ModelConfig config = block_config();
    config.architecture = "JambaForCausalLM";
    StateSpaceConfig space;
    space.heads = 6;
    space.head_dim = 5;
    space.state_dim = 7;
    space.kernel = 1;
    space.gating = StateSpaceConfig::Gating::gate;
    space.step_rank = 4;
    space.norms_latents = norms;
    config.state_space = space;
    config.layers.resize(1);
    config.layers[0].mixing = TokenMixing::state_space;
    OneStep one(config, {6, 3});
    engine::StateSpaceBlock block;
    block.reserve(one.step);
    const Matrix x = input_of(one.step);
    const auto& weights = one.step.weights(0);
    Numbers rows = product(on_host(x), weights.mixer_in);  // (token, x and z of 30 channels)
    const Numbers taps = set(weights.convolution, 30), skips = set(weights.space_skips, 30);
    Numbers rates = some_numbers(weights.space_rates.size());
    for (double& rate : rates) rate = std::fabs(rate);
    fill(Matrix(weights.space_rates.data(), 1, rates.size()), rates);
    const Numbers norm = norms ? set(weights.latent_norm, 4) : Numbers(18, 1);
    Numbers inputs(9 * 30);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = silu(taps[i % 30] * rows[i / 30 * 60 + i % 30]);
    }
    ASSERT_EQ(weights.space_groups.size(), 1u);
    Numbers latents = product(inputs, weights.space_groups[0].latents);  // (token, 4 + 2 * 7)
    const std::size_t ends[] = {4, 11, 18};
    for (std::size_t t = 0; norms && t < 9; ++t) {
      for (std::size_t first = 0, part = 0; part < 3; first = ends[part++]) {
        double squares = 0;
        for (std::size_t i = first; i < ends[part]; ++i)
          squares += std::pow(latents[t * 18 + i], 2);
        const double root =
            std::sqrt(squares / static_cast<double>(ends[part] - first) + config.rms_norm_eps);
        for (std::size_t i = first; i < ends[part]; ++i) latents[t * 18 + i] *= norm[i] / root;
      }
    }
    Numbers of_steps;
    for (std::size_t i = 0; i < 9 * 4; ++i) of_steps.push_back(latents[i / 4 * 18 + i % 4]);
    const Numbers steps = product(of_steps, weights.space_groups[0].steps);
    Numbers expected(9 * 30);
    for (const auto& span : one.batch.spans()) {
      Numbers state(6 * 7 * 5);
      for (std::int64_t t = span.first; t < span.first + span.count; ++t) {
        for (std::size_t c = 0; c < 30; ++c) {
          const std::size_t at = t * 30 + c;
          const double step = std::log1p(std::exp(steps[at]));  // dt_proj.bias is 0
          double sum = skips[c] * inputs[at];
          for (std::size_t n = 0; n < 7; ++n) {
            const std::size_t cell = (c / 5 * 7 + n) * 5 + c % 5;
            state[cell] = std::exp(-rates[cell] * step) * state[cell] +
                          latents[t * 18 + 4 + n] * step * inputs[at];
            sum += latents[t * 18 + 11 + n] * state[cell];
          }
          expected[at] = sum * silu(rows[t * 60 + 30 + c]);
        }
      }
    }
    for (const engine::RowRange part : {engine::RowRange{0, 4}, engine::RowRange{4, 9}}) {
      const auto own = engine::range(part.begin, part.end);
      const Matrix found = block.run(one.step, 0, part, Kokkos::subview(x, own, Kokkos::ALL));
      one.step.agree_on_failure();
      count_tokens(one, part);
      expect_near(found, {expected.begin() + part.begin * 30, expected.begin() + part.end * 30});
    }
  }
}

TEST(EmbeddingBlock, TakesTheRowsOfTheTokens) {
  ModelConfig config = block_config();
  config.embedding_multiplier = 3;
  OneStep one(config, {4, 2});
  engine::EmbeddingBlock block;
  block.reserve(one.step);
  block.begin(one.step);
  block.run(one.step);
  const Numbers table = test::plain(one.model.weights().embedding);  // (dimension, token)
  Numbers expected;
  for (const TokenId token : one.batch.tokens()) {
    for (std::int64_t d = 0; d < config.hidden_size; ++d) {
      expected.push_back(3 * table[d * config.vocab_size + token]);
    }
  }
  expect_near(one.step.h, expected);
}

TEST(EmbeddingBlock, AddsLearnedPositions) {
  ModelConfig config = block_config();
  config.embeds_positions = true;
  OneStep one(config, {4, 2});
  one.step.place_positions();
  engine::EmbeddingBlock block;
  block.reserve(one.step);
  block.begin(one.step);
  block.run(one.step);
  const Numbers table = test::plain(one.model.weights().embedding);  // (dimension, token)
  const Numbers positions = on_host(one.model.weights().positions);
  Numbers expected;
  const std::int64_t of_token[] = {0, 1, 2, 3, 0, 1};
  for (std::size_t t = 0; t < 6; ++t) {
    for (std::int64_t d = 0; d < config.hidden_size; ++d) {
      expected.push_back(table[d * config.vocab_size + one.batch.tokens()[t]] +
                         positions[of_token[t] * config.hidden_size + d]);
    }
  }
  expect_near(one.step.h, expected);
}

TEST(OutputBlock, GivesTokensLogitsAndHiddenStates) {
  const ModelConfig config = block_config();
  OneStep one(config, {4, 2, 3, 2}, StepOutput::argmax);
  StepBatch batch;
  const auto ids = one.batch.tokens();
  batch.add(0, {ids.begin(), ids.begin() + 4}, {}, StepOutput::argmax);
  batch.add(1, {ids.begin() + 4, ids.begin() + 6}, {}, StepOutput::all_logits);
  batch.add(2, {ids.begin() + 6, ids.begin() + 9}, {}, StepOutput::none);
  batch.add(3, {ids.begin() + 9, ids.end()}, {}, StepOutput::all_hidden);
  for (const bool adds : {false, true}) {
    one.step.begin(batch);
    engine::OutputBlock block;
    block.reserve(one.step);
    fill(one.step.h, some_numbers(one.step.h.size()));
    const Numbers h = on_host(one.step.h);
    one.step.pending = adds ? input_of(one.step) : Matrix();
    const Numbers added = adds ? on_host(one.step.pending) : Numbers(h.size());
    const auto norm = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{},
                                                          one.model.weights().final_norm.weight);
    const auto normed = [&](std::int64_t row) {
      Numbers x(config.hidden_size);
      double squares = 0;
      for (std::size_t d = 0; d < x.size(); ++d) {
        x[d] = h[row * x.size() + d] + added[row * x.size() + d];
        squares += x[d] * x[d];
      }
      for (std::size_t d = 0; d < x.size(); ++d) {
        x[d] *= norm(d) / std::sqrt(squares / static_cast<double>(x.size()) + config.rms_norm_eps);
      }
      return x;
    };
    const auto logits = [&](std::int64_t row) {
      return product(normed(row), one.model.weights().output_head);
    };
    block.compute(one.step);
    const std::vector<StepResult> results = block.run(one.step);
    ASSERT_EQ(results.size(), 4U);
    const Numbers last = logits(3);
    EXPECT_EQ(results[0].argmax, std::max_element(last.begin(), last.end()) - last.begin());
    EXPECT_TRUE(results[0].logits.empty());
    Numbers both = logits(4);
    const Numbers second = logits(5);
    both.insert(both.end(), second.begin(), second.end());
    ASSERT_EQ(results[1].logits.size(), both.size());
    for (std::size_t i = 0; i < both.size(); ++i) {
      EXPECT_NEAR(results[1].logits[i], both[i], 1e-4 * (1 + std::fabs(both[i]))) << i;
    }
    EXPECT_EQ(results[2].argmax, -1);
    Numbers states = normed(9);
    const Numbers other = normed(10);
    states.insert(states.end(), other.begin(), other.end());
    ASSERT_EQ(results[3].hidden.size(), states.size());
    for (std::size_t i = 0; i < states.size(); ++i) {
      EXPECT_NEAR(results[3].hidden[i], states[i], 1e-5 * (1 + std::fabs(states[i]))) << i;
    }
    EXPECT_TRUE(results[3].logits.empty());
    EXPECT_TRUE(results[1].hidden.empty());
  }
}

TEST(OutputBlock, GivesHiddenStatesWithoutAHead) {
  OneStep one(block_config(), {3}, StepOutput::hidden);
  engine::OutputBlock block;
  block.reserve(one.step);
  fill(one.step.h, some_numbers(one.step.h.size()));
  block.compute(one.step);
  const std::vector<StepResult> results = block.run(one.step);
  EXPECT_EQ(results.front().hidden.size(), static_cast<std::size_t>(one.step.config.hidden_size));
  EXPECT_EQ(results.front().argmax, -1);
}

}  // namespace
}  // namespace kvzap
