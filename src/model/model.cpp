#include <fmt/format.h>

#include <kvzap/model/model.hpp>
#include <set>

#include "linalg/device/float8.hpp"
#include "model/encoding_store.hpp"
#include "model/families/family.hpp"
#include "model/random_store.hpp"
#include "model/read_weights.hpp"

namespace kvzap {

std::string_view name_of(WeightStorage storage) {
  constexpr std::string_view names[] = {"stored", "unpacked", "q8", "q4"};
  return names[static_cast<int>(storage)];
}

WeightStorage weight_storage_from_name(std::string_view name) {
  for (const WeightStorage storage :
       {WeightStorage::as_stored, WeightStorage::unpacked, WeightStorage::q8, WeightStorage::q4}) {
    if (name == name_of(storage)) return storage;
  }
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
  if (const auto stored_name = model::family_of(config).stored_name) {
    store = std::make_unique<model::RenamedStore>(std::move(store), stored_name);
  }
  if (storage != WeightStorage::q8 && storage != WeightStorage::q4) return store;
  const auto* mixture = gguf::find_type_mixture(storage == WeightStorage::q8 ? "Q8_0" : "Q4_K_M");
  return std::make_unique<model::EncodingStore>(std::move(store), *mixture, config);
}

}  // namespace

Model Model::load(const std::filesystem::path& folder, const ModelConfig& config, DType dtype,
                  const HeadPartition& partition, int rank, const LoadOptions& options) {
  linalg::wants_float8();  // names a wrong KVZAP_FP8 before the first step
  const auto store = open_store(folder, config, options.random_seed, options.storage);
  const model::WeightSource source(*store, dtype, options.storage);
  return Model(config, dtype, partition, rank,
               model::read_weights(source, config, partition, rank, options.progress));
}

Model Model::without_weights(const ModelConfig& config, DType dtype,
                             const HeadPartition& partition) {
  if (config.latent) {
    throw Error(fmt::format(
        "{}: a model with latent attention runs only within the library; expected another model",
        config.architecture));
  }
  Weights weights;
  weights.layers.resize(config.num_hidden_layers);
  return Model(config, dtype, partition, 0, std::make_shared<const Weights>(std::move(weights)));
}

std::vector<std::int64_t> weight_bytes(const std::filesystem::path& model,
                                       const ModelConfig& config, DType dtype, int ranks,
                                       std::optional<std::uint64_t> random_seed,
                                       WeightStorage storage) {
  const auto store = open_store(model, config, random_seed, storage);
  const auto partition = HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                             static_cast<int>(config.num_key_value_heads), ranks);
  std::vector<std::int64_t> bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    model::WeightSource source(*store, dtype, storage);
    source.only_plan();
    model::read_weights(source, config, partition, rank, {});
    bytes.push_back(source.planned_bytes());
  }
  return bytes;
}

std::size_t Model::bytes() const {
  std::size_t bytes = 0;
  std::set<const void*> counted;  // layers may share weights
  const auto count = [&](const void* memory, std::size_t size) {
    if (size > 0 && counted.insert(memory).second) bytes += size;
  };
  const auto add = [&](const auto&... views) {
    (count(views.data(), views.size() * sizeof(typename std::decay_t<decltype(views)>::value_type)),
     ...);
  };
  const auto add_linear = [&](const auto&... weights) {
    (count(weights.quantised() == nullptr ? static_cast<const void*>(weights.memory().data())
                                          : weights.quantised(),
           weights.bytes()),
     ...);
  };
  const auto add_feed_forward = [&](const auto& part) {
    add_linear(part.gate_up, part.down);
    add(part.inner_norm);
    add(part.gate_up_bias, part.down_bias, part.rounded_bias);
  };
  const auto add_norms = [&](const auto&... norms) { (add(norms.weight, norms.bias), ...); };
  for (const auto& l : m_weights->layers) {
    add_linear(l.qkv, l.o, l.router, l.shared_gate, l.attention_gate, l.delta_in, l.delta_rates,
               l.delta_latents, l.delta_decays_out, l.delta_gates_out, l.mixer_in, l.space_out);
    add(l.q_norm_bias, l.k_norm_bias, l.q_norm_of_all, l.k_norm_of_all, l.q_norm_bias_of_all,
        l.k_norm_bias_of_all, l.inner_norm, l.space_heads, l.space_group, l.space_numbers);
    add_norms(l.attention_in, l.attention_out, l.feed_forward_in, l.feed_forward_out);
    add(l.qkv_bias, l.o_bias, l.q_norm, l.k_norm, l.sinks, l.router_bias, l.correction,
        l.attention_gate_bias, l.convolution, l.convolution_bias, l.delta_decay_rates,
        l.delta_decay_shifts, l.delta_norm, l.mixer_in_bias, l.space_out_bias, l.space_rates,
        l.space_shifts, l.space_skips, l.space_norm, l.latent_norm);
    for (const auto& group : l.space_groups) add_linear(group.latents, group.steps);
    add_norms(l.space_in);
    add_linear(l.block_out, l.qkv_adapter.in, l.gate_up_adapter.in);
    for (const auto& map : l.qkv_adapter.out) add_linear(map);
    for (const auto& map : l.gate_up_adapter.out) add_linear(map);
    add_norms(l.dense_out, l.experts_out, l.router_in, l.experts_in, l.inputs.norm,
              l.alt_up.router_norm, l.alt_up.laurel_norm);
    add(l.expert_scales, l.alt_up.scale);
    add_linear(l.inputs.table, l.inputs.projection, l.inputs.gate, l.inputs.out, l.alt_up.router,
               l.alt_up.prediction, l.alt_up.correction, l.alt_up.laurel_in, l.alt_up.laurel_out);
    add_linear(l.latent.query_in, l.latent.query, l.latent.row_in, l.latent.head_gates);
    add(l.latent.query_in_bias, l.latent.query_norm, l.latent.row_in_bias, l.latent.row_norm);
    for (const auto& map : l.latent.to_key) add_linear(map);
    for (const auto& map : l.latent.from_value) add_linear(map);
    add_feed_forward(l.dense);
    for (const auto& expert : l.experts) add_feed_forward(expert);
  }
  add_norms(m_weights->final_norm, m_weights->embedding_norm, m_weights->output_map_norm);
  add_linear(m_weights->output_map);
  add(m_weights->head_bias, m_weights->positions, m_weights->inputs_norm);
  for (const auto& map : m_weights->stream_in) add_linear(map);
  for (const auto& map : m_weights->stream_out) add_linear(map);
  add_linear(m_weights->embedding, m_weights->output_head);
  return bytes;
}

}  // namespace kvzap
