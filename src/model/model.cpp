#include <fmt/format.h>

#include <kvzap/model/model.hpp>

#include "base/value_types.hpp"
#include "model/model_weights.hpp"
#include "model/weights.hpp"

namespace kvzap {

template <class Value>
Model<Value> Model<Value>::load(const std::filesystem::path& folder, const ModelConfig& config,
                                const HeadPartition& partition, int rank,
                                std::optional<std::uint64_t> random_seed,
                                const ProgressCallback& progress) {
  const auto store = random_seed ? nullptr : model::open_weights(folder);
  const model::WeightSource source =
      store ? model::WeightSource(*store) : model::WeightSource(*random_seed);

  auto weights = std::make_shared<Weights>();
  const int ranks = partition.n_ranks();
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t dim = config.head_dim;
  const std::int64_t group = config.query_group();
  const std::int64_t q_size = config.num_attention_heads * dim;
  const std::int64_t kv_size = config.num_key_value_heads * dim;
  const model::Ranges all_hidden = {{0, hidden}};
  const model::Ranges intermediate = {even_range(config.intermediate_size, ranks, rank)};
  const model::Ranges vocabulary = {even_range(config.vocab_size, ranks, rank)};
  const std::int64_t steps = config.num_hidden_layers + 1;
  const auto report = [&](std::int64_t done) {
    if (progress) progress("load", done, steps);
  };
  report(0);

  weights->first_token = vocabulary.front().first;
  const std::vector<model::TensorRows> embedding = {
      {"model.embed_tokens.weight", config.vocab_size, vocabulary}};
  const std::vector<model::TensorRows> head = {{"lm_head.weight", config.vocab_size, vocabulary}};
  weights->embedding = source.matrix<Value>(embedding, hidden, all_hidden);
  weights->output_head = config.tie_word_embeddings
                             ? linalg::LinearWeights<Value>(weights->embedding)
                             : source.linear<Value>(head, hidden, all_hidden);
  weights->final_norm = source.vector({{"model.norm.weight", hidden, all_hidden}}, 1);
  report(1);

  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    model::Ranges q_rows, kv_rows;
    for (std::int64_t kv_head : partition.heads(static_cast<int>(l), rank)) {
      q_rows.emplace_back(kv_head * group * dim, (kv_head + 1) * group * dim);
      kv_rows.emplace_back(kv_head * dim, (kv_head + 1) * dim);
    }
    const std::string prefix = fmt::format("model.layers.{}.", l);
    const std::string attention = prefix + "self_attn.";
    const std::string mlp = prefix + "mlp.";
    const std::int64_t width = config.intermediate_size;
    // The maps that form one matrix, in order; `kind` is "weight" or "bias".
    const auto qkv = [&](const char* kind) -> std::vector<model::TensorRows> {
      return {{attention + "q_proj." + kind, q_size, q_rows},
              {attention + "k_proj." + kind, kv_size, kv_rows},
              {attention + "v_proj." + kind, kv_size, kv_rows}};
    };
    const auto gate_up = [&](const char* kind) -> std::vector<model::TensorRows> {
      return {{mlp + "gate_proj." + kind, width, intermediate},
              {mlp + "up_proj." + kind, width, intermediate}};
    };
    typename Weights::Layer layer;
    layer.input_norm = source.vector({{prefix + "input_layernorm.weight", hidden, all_hidden}}, 1);
    layer.attention_norm =
        source.vector({{prefix + "post_attention_layernorm.weight", hidden, all_hidden}}, 1);
    layer.qkv = source.linear<Value>(qkv("weight"), hidden, all_hidden);
    layer.o =
        source.linear<Value>({{attention + "o_proj.weight", hidden, all_hidden}}, q_size, q_rows);
    if (config.qkv_bias) layer.qkv_bias = source.vector(qkv("bias"), 0);
    if (config.o_bias && rank == 0) {
      layer.o_bias = source.vector({{attention + "o_proj.bias", hidden, all_hidden}}, 0);
    }
    if (config.qk_norm) {
      layer.q_norm = source.vector({{attention + "q_norm.weight", dim, {{0, dim}}}}, 1);
      layer.k_norm = source.vector({{attention + "k_norm.weight", dim, {{0, dim}}}}, 1);
    }
    layer.gate_up = source.linear<Value>(gate_up("weight"), hidden, all_hidden);
    layer.down =
        source.linear<Value>({{mlp + "down_proj.weight", hidden, all_hidden}}, width, intermediate);
    if (config.mlp_bias) {
      layer.gate_up_bias = source.vector(gate_up("bias"), 0);
      if (rank == 0) {
        layer.down_bias = source.vector({{mlp + "down_proj.bias", hidden, all_hidden}}, 0);
      }
    }
    weights->layers.push_back(std::move(layer));
    report(l + 2);
  }
  return Model(config, partition, rank, std::move(weights));
}

template <class Value>
std::size_t Model<Value>::bytes() const {
  std::size_t bytes = 0;
  const auto add = [&](const auto&... views) {
    ((bytes += views.size() * sizeof(typename std::decay_t<decltype(views)>::value_type)), ...);
  };
  const auto add_linear = [&](const auto&... weights) { ((bytes += weights.bytes()), ...); };
  for (const auto& l : m_weights->layers) {
    add_linear(l.qkv, l.o, l.gate_up, l.down);
    add(l.input_norm, l.attention_norm, l.qkv_bias, l.o_bias, l.q_norm, l.k_norm, l.gate_up_bias,
        l.down_bias);
  }
  add(m_weights->final_norm, m_weights->embedding);
  if (!m_config.tie_word_embeddings) add_linear(m_weights->output_head);
  return bytes;
}

#define KVZAP_INSTANTIATE(Value) template class Model<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
