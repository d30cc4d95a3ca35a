#include <fmt/format.h>

#include <kvzap/model/model.hpp>

#include "base/value_types.hpp"
#include "model/encoding_store.hpp"
#include "model/model_weights.hpp"
#include "model/random_store.hpp"
#include "model/weights.hpp"

namespace kvzap {

WeightStorage weight_storage_from_name(std::string_view name) {
  if (name == "stored") return WeightStorage::as_stored;
  if (name == "unpacked") return WeightStorage::unpacked;
  if (name == "q8") return WeightStorage::q8;
  if (name == "q4") return WeightStorage::q4;
  throw Error(fmt::format("weights: expected stored, unpacked, q8 or q4, found \"{}\"", name));
}

namespace {

std::unique_ptr<model::WeightStore> open_store(const std::filesystem::path& folder,
                                               const ModelConfig& config,
                                               std::optional<std::uint64_t> random_seed,
                                               WeightStorage storage) {
  std::unique_ptr<model::WeightStore> store;
  if (random_seed) {
    store = std::make_unique<model::RandomStore>(*random_seed);
  } else {
    store = model::open_weights(folder);
  }
  if (storage != WeightStorage::q8 && storage != WeightStorage::q4) return store;
  const auto* mixture = gguf::find_type_mixture(storage == WeightStorage::q8 ? "Q8_0" : "Q4_K_M");
  return std::make_unique<model::EncodingStore>(std::move(store), *mixture, config);
}

template <class Value>
std::shared_ptr<typename Model<Value>::Weights> read_weights(const model::WeightSource& source,
                                                             const ModelConfig& config,
                                                             const HeadPartition& partition,
                                                             int rank,
                                                             const ProgressCallback& progress) {
  auto weights = std::make_shared<typename Model<Value>::Weights>();
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
  weights->embedding = source.table<Value>(embedding, hidden, all_hidden);
  weights->output_head = config.tie_word_embeddings
                             ? weights->embedding
                             : source.linear<Value>(head, hidden, all_hidden);
  weights->final_norm = source.vector({{"model.norm.weight", hidden, all_hidden}});
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
    typename Model<Value>::Weights::Layer layer;
    layer.input_norm = source.vector({{prefix + "input_layernorm.weight", hidden, all_hidden}});
    layer.attention_norm =
        source.vector({{prefix + "post_attention_layernorm.weight", hidden, all_hidden}});
    layer.qkv = source.linear<Value>(qkv("weight"), hidden, all_hidden);
    layer.o =
        source.linear<Value>({{attention + "o_proj.weight", hidden, all_hidden}}, q_size, q_rows);
    if (config.qkv_bias) layer.qkv_bias = source.vector(qkv("bias"));
    if (config.o_bias && rank == 0) {
      layer.o_bias = source.vector({{attention + "o_proj.bias", hidden, all_hidden}});
    }
    if (config.qk_norm) {
      layer.q_norm = source.vector({{attention + "q_norm.weight", dim, {{0, dim}}}});
      layer.k_norm = source.vector({{attention + "k_norm.weight", dim, {{0, dim}}}});
    }
    layer.gate_up = source.linear<Value>(gate_up("weight"), hidden, all_hidden);
    layer.down =
        source.linear<Value>({{mlp + "down_proj.weight", hidden, all_hidden}}, width, intermediate);
    if (config.mlp_bias) {
      layer.gate_up_bias = source.vector(gate_up("bias"));
      if (rank == 0) {
        layer.down_bias = source.vector({{mlp + "down_proj.bias", hidden, all_hidden}});
      }
    }
    weights->layers.push_back(std::move(layer));
    report(l + 2);
  }
  return weights;
}

template <class Value>
std::vector<std::int64_t> planned_bytes(const model::WeightStore& store, const ModelConfig& config,
                                        int ranks, WeightStorage storage) {
  const auto partition = HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                             static_cast<int>(config.num_key_value_heads), ranks);
  std::vector<std::int64_t> bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    model::WeightSource source(store, storage);
    source.only_plan();
    read_weights<Value>(source, config, partition, rank, {});
    bytes.push_back(source.planned_bytes());
  }
  return bytes;
}

}  // namespace

template <class Value>
Model<Value> Model<Value>::load(const std::filesystem::path& folder, const ModelConfig& config,
                                const HeadPartition& partition, int rank,
                                std::optional<std::uint64_t> random_seed, WeightStorage storage,
                                const ProgressCallback& progress) {
  const auto store = open_store(folder, config, random_seed, storage);
  const model::WeightSource source(*store, storage);
  return Model(config, partition, rank,
               read_weights<Value>(source, config, partition, rank, progress));
}

template <class Value>
Model<Value> Model<Value>::without_weights(const ModelConfig& config,
                                           const HeadPartition& partition) {
  Weights weights;
  weights.layers.resize(config.num_hidden_layers);
  return Model(config, partition, 0, std::make_shared<const Weights>(std::move(weights)));
}

std::vector<std::int64_t> weight_bytes(const std::filesystem::path& model,
                                       const ModelConfig& config, DType dtype, int ranks,
                                       std::optional<std::uint64_t> random_seed,
                                       WeightStorage storage) {
  const auto store = open_store(model, config, random_seed, storage);
  switch (dtype) {
    case DType::f32:
      return planned_bytes<float>(*store, config, ranks, storage);
    case DType::f16:
      return planned_bytes<half>(*store, config, ranks, storage);
    case DType::bf16:
      break;
  }
  return planned_bytes<bfloat16>(*store, config, ranks, storage);
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
  add(m_weights->final_norm);
  add_linear(m_weights->embedding);
  if (!m_config.tie_word_embeddings) add_linear(m_weights->output_head);
  return bytes;
}

#define KVZAP_INSTANTIATE(Value) template class Model<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
