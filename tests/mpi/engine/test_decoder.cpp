// The forward pass on shapes that the goldens lack, against a plain double-precision decoder;
// sharded against whole; step by step against all at once; and the names of what it launches.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <cmath>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <random>
#include <set>
#include <string_view>

#include "allocations.hpp"
#include "base/machine.hpp"
#include "base/simd.hpp"
#include "engine/decoder.hpp"
#include "safetensors_writer.hpp"
#include "steps.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::single_tokens;
using test::step_argmax;
using test::step_logits;
using test::stored_tensor;
using test::StoredTensor;
using test::TemporaryFolder;

struct Shape {
  const char* name;
  int head_dim, kv_heads, group;
  bool tied, qk_norm, qkv_bias, o_bias, mlp_bias;
};

// head_dim 64, 80, 128 and 256; groups of 1, 2, 3, 6 and 16; sizes that no number of ranks divides;
// fewer KV heads than ranks.
const Shape shapes[] = {{"dim64group1", 64, 5, 1, false, false, false, false, false},
                        {"dim80group16", 80, 4, 16, true, true, false, false, false},
                        {"dim128group2", 128, 4, 2, false, true, true, true, true},
                        {"dim256group3", 256, 4, 3, true, false, true, false, false},
                        {"dim64group6heads1", 64, 1, 6, false, true, true, true, false},
                        {"dim80group1heads3", 80, 3, 1, true, false, true, false, false}};

void PrintTo(const Shape& shape, std::ostream* stream) { *stream << shape.name; }

constexpr int hidden = 48;
constexpr int width = 67;
constexpr int vocabulary = 103;
constexpr int layers = 2;

ModelConfig make_config(const Shape& shape) {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = hidden;
  config.intermediate_size = width;
  config.num_hidden_layers = layers;
  config.num_attention_heads = shape.kv_heads * shape.group;
  config.num_key_value_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.vocab_size = vocabulary;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  config.tie_word_embeddings = shape.tied;
  config.qk_norm = shape.qk_norm ? QkNorm::head : QkNorm::none;
  config.qkv_bias = shape.qkv_bias;
  config.o_bias = shape.o_bias;
  config.mlp_bias = shape.mlp_bias;
  return config;
}

using Weights = std::map<std::string, std::vector<float>>;

/// A checkpoint and a linear surrogate in a folder of this rank's own (the same on every rank).
struct Checkpoint {
  TemporaryFolder folder, surrogate;
  Weights weights;

  explicit Checkpoint(const ModelConfig& config) {
    std::mt19937 random(4711);
    std::map<std::string, StoredTensor> tensors;
    const auto add = [&](std::map<std::string, StoredTensor>& target, const std::string& name,
                         std::vector<std::int64_t> shape, float scale, float offset) {
      std::int64_t count = 1;
      for (std::int64_t extent : shape) count *= extent;
      std::vector<float> values(count);
      for (float& value : values) {
        value = offset + scale * (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f);
      }
      target[name] = stored_tensor("F32", shape, values);
      weights[name] = values;
    };
    const std::int64_t dim = config.head_dim;
    const std::int64_t q = config.num_attention_heads * dim, kv = config.num_key_value_heads * dim;
    add(tensors, "model.embed_tokens.weight", {vocabulary, hidden}, 1, 0);
    if (!config.tie_word_embeddings) add(tensors, "lm_head.weight", {vocabulary, hidden}, 1, 0);
    add(tensors, "model.norm.weight", {hidden}, 0.3f, 1);
    for (int l = 0; l < config.num_hidden_layers; ++l) {
      const std::string layer = "model.layers." + std::to_string(l) + ".";
      const auto linear = [&](const std::string& name, std::int64_t rows, std::int64_t columns,
                              bool bias) {
        add(tensors, layer + name + ".weight", {rows, columns}, 2 / std::sqrt(float(columns)), 0);
        if (bias) add(tensors, layer + name + ".bias", {rows}, 0.5f, 0);
      };
      add(tensors, layer + "input_layernorm.weight", {hidden}, 0.3f, 1);
      add(tensors, layer + "post_attention_layernorm.weight", {hidden}, 0.3f, 1);
      linear("self_attn.q_proj", q, hidden, config.qkv_bias);
      linear("self_attn.k_proj", kv, hidden, config.qkv_bias);
      linear("self_attn.v_proj", kv, hidden, config.qkv_bias);
      linear("self_attn.o_proj", hidden, q, config.o_bias);
      if (config.qk_norm == QkNorm::head) {
        add(tensors, layer + "self_attn.q_norm.weight", {dim}, 0.3f, 1);
        add(tensors, layer + "self_attn.k_norm.weight", {dim}, 0.3f, 1);
      }
      linear("mlp.gate_proj", width, hidden, config.mlp_bias);
      linear("mlp.up_proj", width, hidden, config.mlp_bias);
      linear("mlp.down_proj", hidden, width, config.mlp_bias);
    }
    test::write_safetensors(folder.path() / "model.safetensors", tensors);

    std::map<std::string, StoredTensor> scores;
    for (int l = 0; l < config.num_hidden_layers; ++l) {
      const std::string name = "layers." + std::to_string(l);
      add(scores, name + ".weight", {config.num_key_value_heads, hidden}, 0.5f, 0);
      add(scores, name + ".bias", {config.num_key_value_heads}, 0.5f, 0);
    }
    test::write_safetensors(surrogate.path() / "model.safetensors", scores);
    surrogate.write("config.json",
                    "{\"input_dim\": " + std::to_string(hidden) +
                        ", \"output_dim\": " + std::to_string(config.num_key_value_heads) +
                        ", \"hidden_dim\": null, \"n_modules\": " +
                        std::to_string(config.num_hidden_layers) + "}");
  }
};

std::vector<TokenId> some_tokens(int count) {
  std::mt19937 random(99);
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(random() % vocabulary));
  return tokens;
}

// The textbook decoder, one token after the other, everything in double.
class Reference {
 public:
  Reference(const ModelConfig& config, const Weights& weights)
      : m_config(config), m_weights(weights) {}

  std::vector<double> logits(const std::vector<TokenId>& tokens) const {
    const int dim = static_cast<int>(m_config.head_dim);
    const int heads = static_cast<int>(m_config.num_attention_heads);
    const int group = static_cast<int>(m_config.query_group());
    std::vector<std::vector<Row>> keys(layers), values(layers);  // [layer][token]
    Row h;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const auto& table = m_weights.at("model.embed_tokens.weight");
      h.assign(table.begin() + tokens[t] * hidden, table.begin() + (tokens[t] + 1) * hidden);
      for (int l = 0; l < layers; ++l) {
        const std::string layer = "model.layers." + std::to_string(l) + ".";
        const Row x = norm(h, layer + "input_layernorm.weight");
        Row q = linear(x, layer + "self_attn.q_proj"), k = linear(x, layer + "self_attn.k_proj");
        rotate(q, layer + "self_attn.q_norm.weight", t);
        rotate(k, layer + "self_attn.k_norm.weight", t);
        keys[l].push_back(k);
        values[l].push_back(linear(x, layer + "self_attn.v_proj"));
        Row a(heads * dim, 0.0);
        for (int head = 0; head < heads; ++head) {
          const int kv = head / group * dim;
          std::vector<double> p;
          double sum = 0;
          for (const Row& key : keys[l]) {
            double score = 0;
            for (int d = 0; d < dim; ++d) score += q[head * dim + d] * key[kv + d];
            p.push_back(std::exp(score / std::sqrt(double(dim))));
            sum += p.back();
          }
          for (std::size_t j = 0; j < p.size(); ++j) {
            for (int d = 0; d < dim; ++d) a[head * dim + d] += p[j] / sum * values[l][j][kv + d];
          }
        }
        add(h, linear(a, layer + "self_attn.o_proj"));
        const Row y = norm(h, layer + "post_attention_layernorm.weight");
        Row gate = linear(y, layer + "mlp.gate_proj");
        const Row up = linear(y, layer + "mlp.up_proj");
        for (int i = 0; i < width; ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
        add(h, linear(gate, layer + "mlp.down_proj"));
      }
    }
    return linear(norm(h, "model.norm.weight"),
                  m_config.tie_word_embeddings ? "model.embed_tokens" : "lm_head");
  }

 private:
  using Row = std::vector<double>;

  static void add(Row& target, const Row& summand) {
    for (std::size_t i = 0; i < target.size(); ++i) target[i] += summand[i];
  }
  Row linear(const Row& x, const std::string& name) const {
    const auto& weight = m_weights.at(name + ".weight");
    Row y(weight.size() / x.size(), 0.0);
    const auto bias = m_weights.find(name + ".bias");
    for (std::size_t n = 0; n < y.size(); ++n) {
      if (bias != m_weights.end()) y[n] = bias->second[n];
      for (std::size_t k = 0; k < x.size(); ++k) y[n] += double(weight[n * x.size() + k]) * x[k];
    }
    return y;
  }
  Row norm(const Row& x, const std::string& name) const {
    double sum = 0;
    for (double value : x) sum += value * value;
    Row y;
    for (std::size_t i = 0; i < x.size(); ++i) {
      y.push_back(x[i] / std::sqrt(sum / x.size() + m_config.rms_norm_eps) * m_weights.at(name)[i]);
    }
    return y;
  }
  void rotate(Row& rows, const std::string& norm_name, std::size_t position) const {
    const int dim = static_cast<int>(m_config.head_dim);
    for (std::size_t begin = 0; begin < rows.size(); begin += dim) {
      Row head(rows.begin() + begin, rows.begin() + begin + dim);
      if (m_config.qk_norm == QkNorm::head) head = norm(head, norm_name);
      for (int d = 0; d < dim / 2; ++d) {
        const double angle = position * std::pow(m_config.rope_theta, -2.0 * d / dim);
        rows[begin + d] = head[d] * std::cos(angle) - head[d + dim / 2] * std::sin(angle);
        rows[begin + d + dim / 2] = head[d + dim / 2] * std::cos(angle) + head[d] * std::sin(angle);
      }
    }
  }

  const ModelConfig& m_config;
  const Weights& m_weights;
};

struct StepsResult {
  std::vector<std::vector<float>> logits;                         // per step, on rank 0
  std::vector<std::vector<std::vector<std::int64_t>>> positions;  // [layer][head on this rank]
  AppendCounts counts;
};

/// Runs `tokens` in steps of the given sizes and records what they give.
StepsResult run_steps(const ModelConfig& config, const Checkpoint& checkpoint,
                      const Communicator& comm, const std::vector<TokenId>& tokens,
                      const std::vector<int>& steps, bool prune, int window,
                      AttentionPath path = AttentionPath::automatic) {
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  auto surrogate = Surrogate::load(checkpoint.surrogate.path(), config, partition, comm.rank(),
                                   DType::f32, comm);
  Decoder decoder(model, &surrogate, comm, window, 4);
  decoder.set_attention_path(path);
  const SequenceId sequence = decoder.cache().add_sequence();
  StepRule rule;
  rule.score = prune;
  rule.eviction = {0.0f, 2, prune};
  StepsResult run;
  std::size_t begin = 0;
  for (int size : steps) {
    run.logits.push_back(step_logits(
        decoder, sequence, {tokens.begin() + begin, tokens.begin() + begin + size}, rule));
    begin += size;
  }
  EXPECT_EQ(begin, tokens.size());
  for (int l = 0; l < layers; ++l) {
    run.positions.emplace_back();
    for (int h = 0; h < decoder.cache().shape().heads[l]; ++h) {
      run.positions.back().push_back(decoder.cache().positions(sequence, l, h));
    }
  }
  run.counts = decoder.cache().counts(sequence);
  return run;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(a[i]));
    worst = std::max<double>(worst, std::fabs(a[i] - b.at(i)));
  }
  return worst / largest;
}

class DecoderShapes : public ::testing::TestWithParam<Shape> {};

TEST_P(DecoderShapes, MatchesATextbookDecoder) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto tokens = some_tokens(37);
  const StepsResult run = run_steps(config, checkpoint, comm, tokens, {37}, false, 8);
  if (!comm.is_root()) return;
  const auto expected = Reference(config, checkpoint.weights).logits(tokens);
  EXPECT_LT(distance({expected.begin(), expected.end()}, run.logits.back()), 2e-5);
}

// Cutting the tokens into steps changes nothing as long as nothing is evicted, whichever kernels
// run.
TEST_P(DecoderShapes, StepsDoNotMatterWithTheFullCache) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto tokens = some_tokens(45);
  const StepsResult whole = run_steps(config, checkpoint, comm, tokens, {45}, false, 8);
  for (AttentionPath path :
       {AttentionPath::automatic, AttentionPath::flash_prefill, AttentionPath::portable}) {
    const StepsResult steps =
        run_steps(config, checkpoint, comm, tokens, {20, 3, 1, 1, 9, 1, 10}, false, 8, path);
    EXPECT_EQ(steps.positions, whole.positions);
    if (comm.is_root()) {
      EXPECT_LT(distance(whole.logits.back(), steps.logits.back()), 1e-5);
    }
  }
}

// A rank's heads keep the same rows, and the logits are the same, as when one rank has all heads.
TEST_P(DecoderShapes, RanksDoNotMatterWhenPruned) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto tokens = some_tokens(60);
  const std::vector<int> steps = {30, 5, 1, 1, 1, 12, 10};
  const StepsResult sharded = run_steps(config, checkpoint, comm, tokens, steps, true, 8);
  const StepsResult whole =
      run_steps(config, checkpoint, Communicator::self(), tokens, steps, true, 8);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  for (int l = 0; l < layers; ++l) {
    const auto& heads = partition.heads(l, comm.rank());
    for (std::size_t h = 0; h < heads.size(); ++h) {
      EXPECT_EQ(sharded.positions[l][h], whole.positions[l][heads[h]]);
    }
  }
  EXPECT_EQ(comm.all_reduce_sum(sharded.counts.evicted), whole.counts.evicted);
  EXPECT_GT(whole.counts.evicted, whole.counts.judged / 5);
  EXPECT_LT(whole.counts.evicted, whole.counts.judged * 4 / 5);
  if (comm.is_root()) {
    for (std::size_t s = 0; s < steps.size(); ++s) {
      EXPECT_LT(distance(whole.logits[s], sharded.logits[s]), 1e-5) << "step " << s;
    }
  }
}

// Sequences of unlike lengths decoded together give what each gives alone: logits, kept rows.
TEST_P(DecoderShapes, ManySequencesDoNotMatter) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  auto surrogate = Surrogate::load(checkpoint.surrogate.path(), config, partition, comm.rank(),
                                   DType::f32, comm);
  using TestDecoder = Decoder;
  TestDecoder alone(model, &surrogate, comm, 8, 4);
  TestDecoder together(model, &surrogate, comm, 8, 4);
  StepRule rule;
  rule.score = true;
  rule.eviction = {0.0f, 2, true};
  const auto tokens = some_tokens(60);
  std::vector<SequenceId> alone_ids, together_ids;
  for (int length : {1, 5, 30, 8}) {
    const std::vector<TokenId> context(tokens.begin(), tokens.begin() + length);
    for (auto* decoder : {&alone, &together}) {
      auto& ids = decoder == &alone ? alone_ids : together_ids;
      ids.push_back(decoder->cache().add_sequence());
      step_argmax(*decoder, ids.back(), context, rule);
    }
  }
  for (int step = 0; step < 15; ++step) {
    const std::vector<TokenId> next(tokens.begin() + 30 + step, tokens.begin() + 34 + step);
    const auto results = together.step(single_tokens(together_ids, next, rule, StepOutput::logits));
    ASSERT_EQ(results.size(), alone_ids.size());
    for (std::size_t i = 0; i < alone_ids.size(); ++i) {
      const auto expected = step_logits(alone, alone_ids[i], {next[i]}, rule);
      if (comm.is_root()) {
        EXPECT_LT(distance(expected, results[i].logits), 1e-5);
      }
    }
  }
  for (std::size_t i = 0; i < alone_ids.size(); ++i) {
    for (int l = 0; l < layers; ++l) {
      for (int h = 0; h < alone.cache().shape().heads[l]; ++h) {
        EXPECT_EQ(together.cache().positions(together_ids[i], l, h),
                  alone.cache().positions(alone_ids[i], l, h));
      }
    }
  }
  for (std::size_t i = 0; i < alone_ids.size(); ++i) {
    EXPECT_EQ(together.cache().counts(together_ids[i]).evicted,
              alone.cache().counts(alone_ids[i]).evicted);
  }
  StepBatch twice(together_ids[0], {1}, rule, StepOutput::argmax);
  EXPECT_THROW(twice.add(together_ids[0], {2}, rule, StepOutput::argmax), Error);
  EXPECT_THROW(twice.add(together_ids[1], {}, rule, StepOutput::argmax), Error);
}

/// Lets steps run without recorded launches while it exists.
class WithoutGraph {
 public:
  WithoutGraph() { setenv("KVZAP_GRAPH", "off", 1); }
  ~WithoutGraph() { unsetenv("KVZAP_GRAPH"); }
  WithoutGraph(const WithoutGraph&) = delete;
  WithoutGraph& operator=(const WithoutGraph&) = delete;
};

/// A decoder and the sequences that a test has given it.
struct Sequences {
  Decoder decoder;
  std::vector<SequenceId> ids;

  Sequences(const Model& model, Scorer& scorer, const Communicator& comm, const PageFormat& format,
            const ReadPages& read = {})
      : decoder(model, &scorer, comm, 8, 4, nullptr, {format, read}) {}
  void add(const std::vector<TokenId>& context, const StepRule& rule) {
    ids.push_back(decoder.cache().add_sequence());
    step_argmax(decoder, ids.back(), context, rule);
  }
};

// Decode steps whose launches were recorded give what steps give that launch anew, bit for bit,
// while heads grow by pages and parts, sequences come and go, and memory moves. Returns how many
// were repeated: of the last third of each run, and before.
std::vector<std::int64_t> compare_repeated(const Shape& shape, const Communicator& comm) {
  const bool before = base::machine().on_device();
  base::machine().set_device(true);
  ModelConfig config = make_config(shape);
  config.num_hidden_layers = 3;  // the first two read all pages
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(3, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto tokens = some_tokens(900);
  std::vector<std::int64_t> of_runs;
  const auto some = [&](int begin, int count) {
    return std::vector<TokenId>(tokens.begin() + begin, tokens.begin() + begin + count);
  };
  struct Run {
    DType dtype;
    RowType rows;
    ReadPages read;
  };
  const ReadPages all_pages, half{0, 0.5}, three{3, 1};
  for (const auto& [dtype, rows, read] :
       {Run{DType::f32, RowType::wide, all_pages}, Run{DType::bf16, RowType::q8, all_pages},
        Run{DType::f32, RowType::wide, half}, Run{DType::bf16, RowType::q8, three}}) {
    SCOPED_TRACE(read.all() ? "all pages" : "some pages");
    if (rows != RowType::wide && config.head_dim % 64 != 0) continue;
    const auto model = Model::load(checkpoint.folder.path(), config, dtype, partition, comm.rank());
    auto surrogate =
        Surrogate::load(checkpoint.surrogate.path(), config, partition, comm.rank(), dtype, comm);
    const PageFormat format{rows, rows};
    Sequences repeated(model, surrogate, comm, format, read);
    Sequences anew(model, surrogate, comm, format, read);
    StepRule rule;
    rule.score = true;
    rule.eviction = {0.0f, 2, true};
    const auto in_both = [&](const auto& work) {
      work(repeated);
      const WithoutGraph off;
      work(anew);
    };
    for (const int length : {3, 300, 30}) {
      in_both([&](Sequences& all) { all.add(some(length, length), rule); });
    }
    std::int64_t repeated_before = 0;
    for (int step = 0; step < 90; ++step) {
      if (step == 15) in_both([&](Sequences& all) { all.add(some(7, 11), rule); });
      if (step == 30) {
        in_both([&](Sequences& all) {
          all.decoder.cache().free_sequence(all.ids.front());
          all.ids.erase(all.ids.begin());
        });
      }
      // More than a block of tokens: afterwards the step's memory is freed.
      if (step == 45) in_both([&](Sequences& all) { all.add(some(1, 850), rule); });
      // At last a sequence takes turns: batches of two sizes.
      if (step == 60) repeated_before = repeated.decoder.repeated_steps();
      std::vector<StepResult> results[2];
      in_both([&](Sequences& all) {
        auto ids = all.ids;
        if (step >= 60 && step % 2 == 1) ids.pop_back();
        const auto next = some(100 + step, static_cast<int>(ids.size()));
        results[&all == &anew ? 1 : 0] =
            all.decoder.step(single_tokens(ids, next, rule, StepOutput::logits));
      });
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_EQ(results[0][i].logits, results[1][i].logits) << "step " << step << ", " << i;
      }
    }
    for (std::size_t i = 0; i < anew.ids.size(); ++i) {
      for (int l = 0; l < 3; ++l) {
        for (int h = 0; h < anew.decoder.cache().shape().heads[l]; ++h) {
          EXPECT_EQ(repeated.decoder.cache().positions(repeated.ids[i], l, h),
                    anew.decoder.cache().positions(anew.ids[i], l, h));
        }
      }
      EXPECT_EQ(repeated.decoder.cache().counts(repeated.ids[i]).evicted,
                anew.decoder.cache().counts(anew.ids[i]).evicted);
    }
    EXPECT_EQ(anew.decoder.repeated_steps(), 0);
    of_runs.push_back(repeated.decoder.repeated_steps() - repeated_before);
    of_runs.push_back(repeated_before);
  }
  base::machine().set_device(before);
  return of_runs;
}

TEST_P(DecoderShapes, RepeatedLaunchesDoNotMatter) {
  const auto repeated = compare_repeated(GetParam(), Communicator::self());
  for (const std::int64_t steps : repeated) EXPECT_GT(steps, 15);
}

// (By NCCL alone: MPI waits.)
TEST_P(DecoderShapes, RepeatedLaunchesOfRanksDoNotMatter) {
  const Communicator comm = Communicator::world();
  parallel::RankExchange::prepare(ExecutionSpace(), comm);
  if (!parallel::RankExchange::enqueues(ExecutionSpace(), comm)) GTEST_SKIP() << "needs NCCL";
  const auto repeated = compare_repeated(GetParam(), comm);
  // Ranks without a head of their own help with those of others, by plans of the host.
  const bool can_repeat = GetParam().kv_heads >= comm.size();
  for (const std::int64_t steps : repeated) {
    EXPECT_EQ(comm.all_reduce_max(steps), steps);
    EXPECT_TRUE(can_repeat ? steps > 5 : steps == 0) << steps;
  }
}

/// How tokens of some sequences are chosen: one greedily.
std::vector<Sampler> some_samplers() {
  std::vector<SamplingOptions> options(4);
  options[0].temperature = 0.8;
  options[0].top_p = 0.9;
  options[2].temperature = 30;
  options[2].top_k = 70;
  options[3].temperature = 1.5;
  options[3].min_p = 0.01;
  std::vector<Sampler> samplers;
  for (SamplingOptions& one : options) {
    one.seed = samplers.size();
    samplers.emplace_back(one);
  }
  return samplers;
}

// Steps that draw tokens, beside greedy ones and drafts, give those that samplers draw of the
// logits. On devices their launches are recorded and repeated.
TEST_P(DecoderShapes, DrawnTokensAreThoseOfTheLogits) {
  const Communicator self = Communicator::self();
  const bool before = base::machine().on_device();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), 1);
  constexpr std::size_t greedy = 1;
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    SCOPED_TRACE(base::machine().on_device() ? "device" : "host");
    const auto model = Model::load(checkpoint.folder.path(), config, DType::f32, partition, 0);
    auto surrogate =
        Surrogate::load(checkpoint.surrogate.path(), config, partition, 0, DType::f32, self);
    Sequences drawn(model, surrogate, self, {}), by_logits(model, surrogate, self, {});
    std::vector<Sampler> samplers = some_samplers(), of_draws = some_samplers();
    std::vector<TokenId> next = some_tokens(static_cast<int>(samplers.size()));
    for (std::size_t i = 0; i < samplers.size(); ++i) {
      for (Sequences* const all : {&drawn, &by_logits}) {
        all->add(some_tokens(5 + 20 * static_cast<int>(i)), {});
      }
    }
    for (int step = 0; step < 30; ++step) {
      StepBatch tokens;
      for (std::size_t i = 0; i < samplers.size(); ++i) {
        const StepOutput output = i == greedy ? StepOutput::argmax : StepOutput::drawn;
        const auto draws = of_draws[i].next_draws(i == greedy ? 0 : 1);
        tokens.add(drawn.ids[i], {next[i]}, {}, output, draws);
      }
      const auto found = drawn.decoder.step(tokens);
      const auto expected =
          by_logits.decoder.step(single_tokens(by_logits.ids, next, {}, StepOutput::logits));
      for (std::size_t i = 0; i < samplers.size(); ++i) {
        next[i] = samplers[i](expected[i].logits);
        if (i != greedy) of_draws[i].use_draw();
        ASSERT_EQ(i == greedy ? found[i].argmax : found[i].drawn, next[i]) << step << ", " << i;
        EXPECT_EQ(i == greedy ? found[i].drawn : found[i].argmax, -1);
        EXPECT_TRUE(found[i].logits.empty());
      }
    }
    if (base::machine().on_device()) {
      EXPECT_GT(drawn.decoder.repeated_steps(), 20);
    }
    // A draft between others, whose rows are not consecutive.
    const std::vector<TokenId> draft = some_tokens(3);
    const auto some = [](SequenceId id, const std::vector<TokenId>& ids, StepOutput output,
                         const std::vector<TokenDraw>& draws = {}) {
      return StepBatch(id, ids, {}, output, draws);
    };
    StepBatch mixed = some(drawn.ids[1], {1, 2}, StepOutput::argmax);
    mixed.add(drawn.ids[0], draft, {}, StepOutput::all_drawn, samplers[0].next_draws(3));
    mixed.add(drawn.ids[2], {next[2]}, {}, StepOutput::logits);
    mixed.add(drawn.ids[3], {3, 1}, {}, StepOutput::drawn, samplers[3].next_draws(1));
    const auto found = drawn.decoder.step(mixed);
    StepBatch all = some(by_logits.ids[1], {1, 2}, StepOutput::argmax);
    all.add(by_logits.ids[0], draft, {}, StepOutput::all_logits);
    all.add(by_logits.ids[2], {next[2]}, {}, StepOutput::logits);
    all.add(by_logits.ids[3], {3, 1}, {}, StepOutput::logits);
    const auto expected = by_logits.decoder.step(all);
    EXPECT_EQ(found[0].argmax, expected[0].argmax);
    ASSERT_EQ(found[1].all_drawn.size(), 3u);
    for (std::size_t t = 0; t < 3; ++t) {
      EXPECT_EQ(found[1].after(t, 3).drawn, samplers[0](expected[1].after(t, 3).logits));
    }
    EXPECT_EQ(found[2].logits, expected[2].logits);
    EXPECT_EQ(found[3].drawn, samplers[3](expected[3].logits));
  }
  base::machine().set_device(before);
}

// Ranks have parts of the logits.
TEST(DrawnTokens, NeedOneRank) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(shapes[0]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  Decoder decoder(model, nullptr, comm, 8, 4);
  EXPECT_EQ(decoder.draws_tokens(), comm.size() == 1);
  const SequenceId id = decoder.cache().add_sequence();
  EXPECT_THROW(StepBatch(id, {1}, {}, StepOutput::drawn), Error);
  EXPECT_THROW(StepBatch(id, {1, 2}, {}, StepOutput::all_drawn, {{}}), Error);
  EXPECT_THROW(StepBatch(id, {1}, {}, StepOutput::argmax, {{}}), Error);
  const StepBatch batch(id, {1}, {}, StepOutput::drawn, {{}});
  if (comm.size() > 1) {
    EXPECT_THROW(decoder.step(batch), Error);
  } else {
    EXPECT_GE(decoder.step(batch).front().drawn, 0);
  }
}

/// What each span of a step asks of it, and its sequence in two decoders.
struct MixedSpan {
  int begin, count;  // of the test's tokens
  bool judged;
  StepOutput output;
  SequenceId alone = -1, together = -1;
};

// Chunks of prompts beside single tokens, scored or not, that want logits, those of each token, a
// token or nothing: each gets what it gets in a step of its own. More rows than go through a layer
// at once, so that a span is cut.
TEST_P(DecoderShapes, MixesOfSpansDoNotMatter) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  auto surrogate = Surrogate::load(checkpoint.surrogate.path(), config, partition, comm.rank(),
                                   DType::f32, comm);
  using TestDecoder = Decoder;
  TestDecoder alone(model, &surrogate, comm, 8, 4);
  TestDecoder together(model, &surrogate, comm, 8, 4);
  const auto tokens = some_tokens(900);
  const auto of = [&](int begin, int count) {
    return std::vector<TokenId>(tokens.begin() + begin, tokens.begin() + begin + count);
  };
  const auto rule_of = [](bool judged) {
    StepRule rule;
    rule.score = judged;
    rule.eviction = {0.0f, 2, judged};
    return rule;
  };
  constexpr auto none = StepOutput::none;
  constexpr auto argmax = StepOutput::argmax;
  constexpr auto logits = StepOutput::logits;
  constexpr auto each = StepOutput::all_logits;
  const std::vector<std::vector<MixedSpan>> steps = {
      {{0, 30, true, logits}, {5, 1, false, argmax}, {40, 17, true, none}, {60, 3, false, argmax}},
      {{30, 1, true, argmax},
       {6, 1, true, logits},
       {57, 540, true, logits},
       {63, 1, false, argmax}},
      {{31, 1, true, each}, {7, 9, false, each}, {597, 1, true, argmax}, {64, 2, true, logits}},
      {{32, 1, true, argmax},
       {16, 1, true, argmax},
       {598, 1, true, argmax},
       {66, 1, true, argmax}}};
  std::vector<SequenceId> alone_ids, together_ids;
  for (std::size_t i = 0; i < steps[0].size(); ++i) {
    alone_ids.push_back(alone.cache().add_sequence());
    together_ids.push_back(together.cache().add_sequence());
  }
  Sampler sampler({});
  for (const auto& spans : steps) {
    StepBatch batch;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      batch.add(together_ids[i], of(spans[i].begin, spans[i].count), rule_of(spans[i].judged),
                spans[i].output);
    }
    const auto results = together.step(batch);
    ASSERT_EQ(results.size(), spans.size());
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const bool is_each = spans[i].output == each;
      std::vector<float> expected;
      for (int t = 0; t < spans[i].count; t += is_each ? 1 : spans[i].count) {
        const auto next =
            step_logits(alone, alone_ids[i], of(spans[i].begin + t, is_each ? 1 : spans[i].count),
                        rule_of(spans[i].judged));
        expected.insert(expected.end(), next.begin(), next.end());
      }
      if (comm.is_root() && (spans[i].output == logits || is_each)) {
        ASSERT_EQ(results[i].logits.size(), expected.size());
        EXPECT_LT(distance(expected, results[i].logits), 1e-5);
      } else {
        EXPECT_TRUE(results[i].logits.empty());
      }
      if (comm.is_root() && spans[i].output == argmax) {
        EXPECT_EQ(results[i].argmax, sampler(expected));
      }
      EXPECT_EQ(comm.all_reduce_max(results[i].argmax), results[i].argmax);
    }
  }
  for (std::size_t i = 0; i < alone_ids.size(); ++i) {
    for (int l = 0; l < layers; ++l) {
      for (int h = 0; h < alone.cache().shape().heads[l]; ++h) {
        EXPECT_EQ(together.cache().positions(together_ids[i], l, h),
                  alone.cache().positions(alone_ids[i], l, h));
      }
    }
    const AppendCounts& counts = together.cache().counts(together_ids[i]);
    EXPECT_EQ(counts.judged, alone.cache().counts(alone_ids[i]).judged);
    EXPECT_EQ(counts.evicted, alone.cache().counts(alone_ids[i]).evicted);
  }
}

/// Where the rows that a step shows stand in their sequences.
class PositionRecorder final : public StepObserver {
 public:
  struct Rows {
    SequenceId sequence;
    std::int64_t first, count;
    bool operator==(const Rows& other) const {
      return sequence == other.sequence && first == other.first && count == other.count;
    }
  };
  void attention_input(SequenceId sequence, int layer, std::int64_t first,
                       const HiddenView& hidden) override {
    if (layer == 1) inputs.push_back({sequence, first, std::int64_t(hidden.extent(0))});
  }
  void scores(SequenceId sequence, int layer, std::int64_t first,
              const ScoresView& scores) override {
    if (layer == 1) scored.push_back({sequence, first, std::int64_t(scores.extent(1))});
  }
  std::vector<Rows> inputs, scored;
};

// An observer gets the rows of each sequence apart, at that sequence's positions.
TEST(Observer, SeesEachSequenceAtItsOwnPositions) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(shapes[0]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  auto surrogate = Surrogate::load(checkpoint.surrogate.path(), config, partition, comm.rank(),
                                   DType::f32, comm);
  Decoder decoder(model, &surrogate, comm, 8, 4);
  const auto tokens = some_tokens(600);
  const SequenceId a = decoder.cache().add_sequence(), b = decoder.cache().add_sequence();
  StepRule scored;
  scored.score = true;
  step_argmax(decoder, b, {tokens.begin(), tokens.begin() + 20});
  PositionRecorder recorder;
  decoder.set_observer(&recorder);
  StepBatch batch(a, {tokens.begin(), tokens.begin() + 510}, scored, StepOutput::none);
  batch.add(b, {tokens.begin(), tokens.begin() + 5}, scored, StepOutput::none);
  decoder.step(batch);
  decoder.step(single_tokens({b, a}, {1, 2}, {}, StepOutput::argmax));
  // Blocks of 512 rows.
  const std::vector<PositionRecorder::Rows> inputs = {
      {a, 0, 510}, {b, 20, 2}, {b, 22, 3}, {b, 25, 1}, {a, 510, 1}};
  const std::vector<PositionRecorder::Rows> scores = {{a, 0, 510}, {b, 20, 5}};
  EXPECT_EQ(recorder.inputs, inputs);
  EXPECT_EQ(recorder.scored, scores);
}

/// Greedy steps beside steps with logits, in one and the same form of the kernels.
template <class Value>
void compare_greedy_steps(const ModelConfig& config, const Checkpoint& checkpoint) {
  const Communicator comm = Communicator::world();
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DTypeOf<Value>::value, partition, comm.rank());
  Decoder decoder(model, nullptr, comm, 8, 4);
  Sampler sampler({});
  const auto tokens = some_tokens(60);
  std::vector<SequenceId> with_logits, greedy;
  for (int length : {3, 20, 9}) {
    const std::vector<TokenId> context(tokens.begin(), tokens.begin() + length);
    with_logits.push_back(decoder.cache().add_sequence());
    greedy.push_back(decoder.cache().add_sequence());
    const auto logits = step_logits(decoder, with_logits.back(), context);
    const TokenId token = step_argmax(decoder, greedy.back(), context);
    if (comm.is_root()) {
      EXPECT_EQ(token, sampler(logits));
    }
    EXPECT_EQ(comm.all_reduce_max(token), token);
  }
  for (int step = 0; step < 10; ++step) {
    const std::vector<TokenId> next(tokens.begin() + 30 + step, tokens.begin() + 33 + step);
    const auto logits = decoder.step(single_tokens(with_logits, next, {}, StepOutput::logits));
    const auto argmax = decoder.step(single_tokens(greedy, next, {}, StepOutput::argmax));
    ASSERT_EQ(argmax.size(), greedy.size());
    for (std::size_t i = 0; comm.is_root() && i < greedy.size(); ++i) {
      EXPECT_EQ(argmax[i].argmax, sampler(logits[i].logits));
    }
  }
}

// The token that a greedy step names is what the sampler makes of the logits, on every rank.
TEST_P(DecoderShapes, GreedyStepsNameTheArgmax) {
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    SCOPED_TRACE(base::machine().on_device() ? "device" : "host");
    compare_greedy_steps<float>(config, checkpoint);
    compare_greedy_steps<half>(config, checkpoint);
    compare_greedy_steps<bfloat16>(config, checkpoint);
  }
  base::machine().set_device(before);
}

// More sequences than go through a layer at once.
TEST(ManySequences, MoreThanABlock) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(shapes[0]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  Decoder decoder(model, nullptr, comm, 2, 4);
  constexpr int count = 515;
  const auto tokens = some_tokens(2 * count);
  std::vector<SequenceId> ids, twins;
  for (int i = 0; i < count; ++i) {
    for (auto* list : {&ids, &twins}) {
      if (list == &twins && i % 57 != 0 && i < 510) continue;
      list->push_back(decoder.cache().add_sequence());
      step_argmax(decoder, list->back(), {tokens[i]});
    }
  }
  const auto results = decoder.step(
      single_tokens(ids, {tokens.begin() + count, tokens.end()}, {}, StepOutput::logits));
  std::size_t twin = 0;
  for (int i = 0; i < count; ++i) {
    if (i % 57 != 0 && i < 510) continue;
    const auto expected = step_logits(decoder, twins[twin++], {tokens[count + i]});
    if (!comm.is_root()) continue;
    EXPECT_LT(distance(expected, results[i].logits), 1e-5) << i;
  }
}

// In bf16 every instruction set and layout of weights gives the same up to the rounding of
// activations, which a sum's last bit may tip.
TEST_P(DecoderShapes, PathsOfBf16Agree) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(GetParam());
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto tokens = some_tokens(45);
  const auto logits_of = [&] {
    const auto model =
        Model::load(checkpoint.folder.path(), config, DType::bf16, partition, comm.rank());
    Decoder decoder(model, nullptr, comm, 8, 4);
    const SequenceId sequence = decoder.cache().add_sequence();
    step_argmax(decoder, sequence, {tokens.begin(), tokens.begin() + 40});
    std::vector<float> logits;
    for (int i = 40; i < 45; ++i) logits = step_logits(decoder, sequence, {tokens[i]});
    return logits;
  };
  const auto widest = base::machine().simd();
  const auto expected = logits_of();
  const auto expect_close = [&](const std::string& what) {
    const auto logits = logits_of();
    if (!comm.is_root()) return;
    EXPECT_LT(distance(expected, logits), 2e-2) << what;
  };
  setenv("KVZAP_PACK", "off", 1);
  expect_close("rows");
  unsetenv("KVZAP_PACK");
  for (auto level : {base::SimdLevel::baseline, base::SimdLevel::avx2, base::SimdLevel::avx512}) {
    if (level > widest) break;
    base::machine().set_simd(level);
    expect_close(base::name_of(level));
  }
  base::machine().set_simd(widest);
}

/// All that a step can change.
struct State {
  std::vector<std::vector<std::vector<std::int64_t>>> positions;  // [sequence][layer and head]
  std::vector<std::int64_t> tokens, evicted;
  std::int64_t pages = 0;
  bool operator==(const State& other) const {
    return positions == other.positions && tokens == other.tokens && evicted == other.evicted &&
           pages == other.pages;
  }
};

template <class Decoder>
State state_of(Decoder& decoder, const std::vector<SequenceId>& sequences) {
  auto& cache = decoder.cache();
  State state;
  for (const SequenceId sequence : sequences) {
    state.positions.emplace_back();
    for (int l = 0; l < layers; ++l) {
      for (int h = 0; h < cache.shape().heads[l]; ++h) {
        state.positions.back().push_back(cache.positions(sequence, l, h));
      }
      state.tokens.push_back(cache.tokens(sequence, l));
    }
    state.evicted.push_back(cache.counts(sequence).evicted);
  }
  state.pages = cache.pool().pages_in_use();
  return state;
}

/// Whether `step` comes to its end with the n-th allocation of this rank failing. If not, it is to
/// say that memory is exhausted.
template <class Step>
bool survives(const Step& step, std::int64_t n) {
  try {
    const test::FailingAllocation failing(n);
    step();
  } catch (const StepOutOfMemory&) {
    return false;
  }
  return true;
}

// Whichever allocation of a step fails, on whichever rank: every rank is told, nothing has changed,
// and the step can be done again.
TEST(StepOutOfMemory, LeavesAllSequencesAsTheyWere) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(shapes[2]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto tokens = some_tokens(100);
  const auto of = [&](int begin, int count) {
    return std::vector<TokenId>(tokens.begin() + begin, tokens.begin() + begin + count);
  };
  StepRule rule;
  rule.score = true;
  rule.eviction = {0.0f, 0, true};
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    const auto model =
        Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
    for (int failing_rank = 0; failing_rank < std::min(comm.size(), 2); ++failing_rank) {
      auto surrogate = Surrogate::load(checkpoint.surrogate.path(), config, partition, comm.rank(),
                                       DType::f32, comm);
      using TestDecoder = Decoder;
      TestDecoder decoder(model, &surrogate, comm, 8, 4),
          undisturbed(model, &surrogate, comm, 8, 4);
      std::vector<SequenceId> ids, twins;
      for (int i = 0; i < 3; ++i) {
        ids.push_back(decoder.cache().add_sequence());
        twins.push_back(undisturbed.cache().add_sequence());
      }
      std::int64_t failures = 0;
      // A context longer than the window, whose pages are taken layer by layer; a chunk beside a
      // short prompt; single tokens; chunks and tokens mixed, after rows have left every ring.
      using Spans = std::vector<std::tuple<int, int, int>>;  // sequence, first token, count
      for (const Spans& spans :
           {Spans{{0, 0, 40}}, Spans{{1, 0, 13}, {2, 0, 3}}, Spans{{0, 40, 1}, {1, 13, 1}},
            Spans{{0, 41, 1}, {1, 14, 21}, {2, 3, 1}}, Spans{{2, 4, 1}, {0, 42, 1}, {1, 35, 1}}}) {
        const auto batch_of = [&](const std::vector<SequenceId>& sequences) {
          StepBatch batch;
          for (const auto& [i, begin, count] : spans) {
            batch.add(sequences[i], of(begin, count), rule,
                      i == 1 ? StepOutput::logits : StepOutput::argmax);
          }
          return batch;
        };
        const StepBatch batch = batch_of(ids);
        const auto expected = undisturbed.step(batch_of(twins));
        std::vector<StepResult> results;
        const auto step = [&] { results = decoder.step(batch); };
        const State state = state_of(decoder, ids);
        for (std::int64_t n = 0;; ++n) {
          if (survives(step, comm.rank() == failing_rank ? n : -1)) break;
          ++failures;
          ASSERT_EQ(state_of(decoder, ids), state) << "allocation " << n;
          ASSERT_LT(n, 2000);
        }
        ASSERT_EQ(results.size(), expected.size());
        for (std::size_t i = 0; i < results.size(); ++i) {
          EXPECT_EQ(results[i].argmax, expected[i].argmax);
          EXPECT_EQ(results[i].logits, expected[i].logits);
        }
      }
      EXPECT_GT(failures, 50);
      for (int i = 0; i < 3; ++i) {
        for (int l = 0; l < layers; ++l) {
          for (int h = 0; h < decoder.cache().shape().heads[l]; ++h) {
            EXPECT_EQ(decoder.cache().positions(ids[i], l, h),
                      undisturbed.cache().positions(twins[i], l, h));
          }
        }
      }
    }
  }
  base::machine().set_device(before);
}

// A limit on one rank's cache ends the step on all; freeing a sequence makes room for it.
TEST(StepOutOfMemory, GoesAwayWhenASequenceIsFreed) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = make_config(shapes[2]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model =
      Model::load(checkpoint.folder.path(), config, DType::f32, partition, comm.rank());
  Decoder decoder(model, nullptr, comm, 8, 4);
  auto& cache = decoder.cache();
  const auto tokens = some_tokens(60);
  const SequenceId first = cache.add_sequence();
  step_argmax(decoder, first, {tokens.begin(), tokens.begin() + 50});
  const SequenceId second = cache.add_sequence();
  if (comm.rank() == comm.size() - 1) cache.set_limit(cache.bytes().allocated + 3000);
  for (const int count : {50, 12}) {  // taken layer by layer, reserved at once
    const StepBatch batch(second, {tokens.begin(), tokens.begin() + count}, {}, StepOutput::argmax);
    EXPECT_THROW(decoder.step(batch), StepOutOfMemory);
    EXPECT_EQ(cache.tokens(second, 0), 0);
    EXPECT_EQ(cache.tokens(second, layers - 1), 0);
  }
  cache.free_sequence(first);
  step_argmax(decoder, second, {tokens.begin(), tokens.begin() + 50});
  EXPECT_EQ(cache.tokens(second, layers - 1), 50);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecoderShapes, ::testing::ValuesIn(shapes),
                         [](const auto& info) { return std::string(info.param.name); });

// Everything that is launched or allocated says which operation it belongs to.
std::set<std::string> unnamed;
int named = 0;

void check_label(const char* label) {
  const std::string name = label;
  // Kokkos' and Kokkos Kernels' own work (copies, fills, products) carries their names.
  for (const char* prefix : {"kvzap::", "Kokkos::", "KokkosBlas::"}) {
    if (name.rfind(prefix, 0) != 0) continue;
    ++named;
    return;
  }
  unnamed.insert(name);
}

TEST(Labels, EveryKernelAndViewIsNamed) {
  namespace tools = Kokkos::Tools::Experimental;
  unnamed.clear();
  named = 0;
  const auto on_kernel = [](const char* label, const std::uint32_t, std::uint64_t*) {
    check_label(label);
  };
  tools::set_begin_parallel_for_callback(on_kernel);
  tools::set_begin_parallel_reduce_callback(on_kernel);
  tools::set_begin_parallel_scan_callback(on_kernel);
  tools::set_allocate_data_callback([](const Kokkos_Profiling_SpaceHandle, const char* label,
                                       const void*, const std::uint64_t) { check_label(label); });
  const Communicator self = Communicator::self();
  const ModelConfig config = make_config(shapes[2]);
  const Checkpoint checkpoint(config);
  run_steps(config, checkpoint, self, some_tokens(30), {20, 9, 1}, true, 4);
  tools::set_begin_parallel_for_callback(nullptr);
  tools::set_begin_parallel_reduce_callback(nullptr);
  tools::set_begin_parallel_scan_callback(nullptr);
  tools::set_allocate_data_callback(nullptr);
  EXPECT_GT(named, 100);  // the callbacks were called
  for (const std::string& name : unnamed) ADD_FAILURE() << "not named: '" << name << "'";
}

// What a decode step needs it has from the steps before, but for pages and their tables.
std::set<std::string> allocated;

TEST(DecodeStep, AllocatesNothingButPages) {
  namespace tools = Kokkos::Tools::Experimental;
  const Communicator self = Communicator::self();
  const ModelConfig config = make_config(shapes[2]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), 1);
  const auto model = Model::load(checkpoint.folder.path(), config, DType::bf16, partition, 0);
  auto surrogate =
      Surrogate::load(checkpoint.surrogate.path(), config, partition, 0, DType::bf16, self);
  Decoder decoder(model, &surrogate, self, 4, 4);
  const SequenceId sequence = decoder.cache().add_sequence();
  StepRule rule;
  rule.score = true;
  rule.eviction = {0.0f, 0, true};
  const auto tokens = some_tokens(60);
  step_logits(decoder, sequence, {tokens.begin(), tokens.begin() + 20}, rule);
  step_logits(decoder, sequence, {tokens[20]}, rule);
  allocated.clear();
  tools::set_allocate_data_callback([](const Kokkos_Profiling_SpaceHandle, const char* label,
                                       const void*,
                                       const std::uint64_t) { allocated.insert(label); });
  for (int i = 21; i < 60; ++i) step_logits(decoder, sequence, {tokens[i]}, rule);
  tools::set_allocate_data_callback(nullptr);
  for (const char* pages : {"kvzap::page_pool::slab", "kvzap::page_pool::addresses",
                            "kvzap::page_pool::metadata_addresses", "kvzap::cache::page_table"}) {
    allocated.erase(pages);
  }
  for (const std::string& label : allocated) ADD_FAILURE() << "allocated: " << label;
}

// On devices a step waits, and copies between host and device, as often whatever the number of
// layers.
struct Waits {
  int fences = 0;
  int copies = 0;
  int kernels = 0;
};
Waits waits;

void on_fence(const char*, const std::uint32_t, std::uint64_t*) { ++waits.fences; }

/// Whether every kernel waits by itself, as those of Kokkos' Threads do.
bool kernels_wait() {
  waits = {};
  Kokkos::Tools::Experimental::set_begin_fence_callback(on_fence);
  Kokkos::parallel_for("kernels_wait", Kokkos::RangePolicy<ExecutionSpace>(0, 1),
                       KOKKOS_LAMBDA(int){});
  Kokkos::Tools::Experimental::set_begin_fence_callback(nullptr);
  return waits.fences > 0;
}

TEST(DecodeStep, WaitsAsOftenForManyLayersAsForFew) {
  namespace tools = Kokkos::Tools::Experimental;
  if (kernels_wait()) GTEST_SKIP() << "every kernel of this backend waits";
  const Communicator self = Communicator::self();
  const bool before = base::machine().on_device();
  base::machine().set_device(true);
  std::vector<Waits> of_steps;
  std::vector<int> kernels_of;
  for (const int n_layers : {2, 9}) {
    ModelConfig config = make_config(shapes[2]);
    config.num_hidden_layers = n_layers;
    const Checkpoint checkpoint(config);
    const auto partition =
        HeadPartition::even(n_layers, static_cast<int>(config.num_key_value_heads), 1);
    const auto model = Model::load(checkpoint.folder.path(), config, DType::bf16, partition, 0);
    auto surrogate =
        Surrogate::load(checkpoint.surrogate.path(), config, partition, 0, DType::bf16, self);
    Decoder decoder(model, &surrogate, self, 4, 16);
    const SequenceId sequence = decoder.cache().add_sequence();
    StepRule rule;
    rule.score = true;
    rule.eviction = {0.0f, 0, true};
    const auto tokens = some_tokens(120);
    step_argmax(decoder, sequence, {tokens.begin(), tokens.begin() + 60}, rule);
    const auto on_kernel = [](const char* label, const std::uint32_t, std::uint64_t*) {
      // Not those for pages that heads happen to need.
      const std::string_view name = label;
      if (name != "kvzap::append::link" && name != "kvzap::page_pool::addresses") ++waits.kernels;
    };
    for (int i = 60; i < 119; ++i) {
      const std::size_t slabs = decoder.cache().pool().allocated_bytes();
      waits = {};
      tools::set_begin_fence_callback(on_fence);
      tools::set_begin_deep_copy_callback([](Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                             Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                             std::uint64_t) { ++waits.copies; });
      step_argmax(decoder, sequence, {tokens[i]}, rule);
      tools::set_begin_fence_callback(nullptr);
      tools::set_begin_deep_copy_callback(nullptr);
      // Not where the pool has got memory, and kernels are told of it.
      if (decoder.cache().pool().allocated_bytes() == slabs) of_steps.push_back(waits);
    }
    // Counted apart: Kokkos fences every kernel that it tells a tool of.
    waits = {};
    tools::set_begin_parallel_for_callback(on_kernel);
    tools::set_begin_parallel_reduce_callback(on_kernel);
    tools::set_begin_parallel_scan_callback(on_kernel);
    step_argmax(decoder, sequence, {tokens[119]}, rule);
    tools::set_begin_parallel_for_callback(nullptr);
    tools::set_begin_parallel_reduce_callback(nullptr);
    tools::set_begin_parallel_scan_callback(nullptr);
    kernels_of.push_back(waits.kernels);
  }
  base::machine().set_device(before);
  // A launch takes longer than many of these kernels. Per layer: two norms, each with the sum
  // before it; rounding, product and selection of the score; a product for q, k and v, and a kernel
  // that finishes them; two for attention; rounding and product of its output; gate and up, what
  // joins them, down; the cache's own. This model's four biases belong to the products.
  EXPECT_EQ(kernels_of[1] - kernels_of[0], 15 * 7);
  ASSERT_GT(of_steps.size(), 60u);
  for (const Waits& step : of_steps) {
    EXPECT_EQ(step.copies, of_steps.front().copies);
    EXPECT_LE(step.fences, of_steps.front().fences);
    EXPECT_LE(step.fences, 16);
  }
}

// Beside a greedy step, one that draws copies the settings of its draws, and launches two kernels
// instead of the two of argmaxes if all sequences draw.
TEST(DecodeStep, DrawsBringNoLogits) {
  namespace tools = Kokkos::Tools::Experimental;
  if (kernels_wait()) GTEST_SKIP() << "every kernel of this backend waits";
  const bool before = base::machine().on_device();
  base::machine().set_device(true);
  const ModelConfig config = make_config(shapes[2]);
  const Checkpoint checkpoint(config);
  const auto partition =
      HeadPartition::even(layers, static_cast<int>(config.num_key_value_heads), 1);
  const auto model = Model::load(checkpoint.folder.path(), config, DType::bf16, partition, 0);
  Decoder decoder(model, nullptr, Communicator::self(), 4, 64);
  std::vector<SequenceId> ids;
  for (int i = 0; i < 3; ++i) {
    ids.push_back(decoder.cache().add_sequence());
    step_argmax(decoder, ids.back(), some_tokens(9));
  }
  const auto on_kernel = [](const char*, const std::uint32_t, std::uint64_t*) { ++waits.kernels; };
  const auto step_of = [&](const std::vector<StepOutput>& outputs) {
    StepBatch batch;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::vector<TokenDraw> draws(outputs[i] == StepOutput::drawn ? 1 : 0,
                                         {0.8, 0, 0.9, 0, 0.3});
      batch.add(ids[i], {1}, {}, outputs[i], draws);
    }
    for (int i = 0; i < 3; ++i) decoder.step(batch);
    waits = {};
    tools::set_begin_deep_copy_callback([](Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                           Kokkos_Profiling_SpaceHandle, const char*, const void*,
                                           std::uint64_t) { ++waits.copies; });
    tools::set_begin_parallel_for_callback(on_kernel);
    decoder.step(batch);
    tools::set_begin_deep_copy_callback(nullptr);
    tools::set_begin_parallel_for_callback(nullptr);
    return waits;
  };
  constexpr auto argmax = StepOutput::argmax, drawn = StepOutput::drawn;
  const Waits greedy = step_of({argmax, argmax, argmax}), mixed = step_of({drawn, argmax, drawn});
  const Waits all = step_of({drawn, drawn, drawn});
  base::machine().set_device(before);
  EXPECT_EQ(mixed.copies, greedy.copies + 1);
  EXPECT_EQ(mixed.kernels, greedy.kernels + 2);
  EXPECT_EQ(all.copies, greedy.copies);  // instead of filling keys of argmaxes
  EXPECT_EQ(all.kernels, greedy.kernels);
}

}  // namespace
}  // namespace kvzap
