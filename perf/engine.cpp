#include "engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "model/model_weights.hpp"
#include "safetensors_writer.hpp"

namespace kvzap::perf {

ModelConfig Engine::truncated(const std::filesystem::path& folder, std::int64_t layers,
                              std::int64_t vocabulary) {
  ModelConfig config = ModelConfig::load(folder);
  if (layers > 0) config.num_hidden_layers = std::min(config.num_hidden_layers, layers);
  if (vocabulary > 0) config.vocab_size = std::min(config.vocab_size, vocabulary);
  return config;
}

Engine::Engine(const std::filesystem::path& folder, std::int64_t layers, std::int64_t vocabulary,
               WeightStorage storage)
    : m_model([&] {
        const ModelConfig config = truncated(folder, layers, vocabulary);
        return Model::load(
            folder, config, DTypeOf<Value>::value,
            HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                static_cast<int>(config.num_key_value_heads), world().size()),
            world().rank(), {0, storage});
      }()) {}

std::unique_ptr<Engine::Decoder> Engine::decoder(Scorer* scorer) const {
  return std::make_unique<Decoder>(m_model, scorer, world(), window, page_rows);
}

void write_surrogate(const std::filesystem::path& folder, const ModelConfig& config,
                     std::int64_t hidden_dim) {
  std::minstd_rand draw;
  const auto tensor = [&](std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values(count);
    for (float& value : values)
      value = 0.05f * (static_cast<float>(draw() & 0xffff) / 65536 - 0.5f);
    return test::stored_tensor("BF16", std::move(shape), values);
  };
  std::map<std::string, test::StoredTensor> tensors;
  const std::int64_t inputs = config.hidden_size;
  const std::int64_t outputs = config.num_key_value_heads;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const std::string name = fmt::format("layers.{}", l);
    if (hidden_dim == 0) {
      tensors[name + ".weight"] = tensor({outputs, inputs});
      tensors[name + ".bias"] = tensor({outputs});
    } else {
      tensors[name + ".0.weight"] = tensor({hidden_dim, inputs});
      tensors[name + ".0.bias"] = tensor({hidden_dim});
      tensors[name + ".2.weight"] = tensor({outputs, hidden_dim});
      tensors[name + ".2.bias"] = tensor({outputs});
    }
  }
  std::filesystem::create_directory(folder);
  test::write_safetensors(folder / "model.safetensors", tensors);
  std::ofstream(folder / "config.json")
      << fmt::format(R"({{"architectures": ["KVzapModel"], "input_dim": {}, "hidden_dim": {}, )"
                     R"("output_dim": {}, "n_modules": {}}})",
                     inputs, hidden_dim == 0 ? "null" : std::to_string(hidden_dim), outputs,
                     config.num_hidden_layers);
}

std::vector<TokenId> Engine::tokens(std::int64_t count) const {
  std::minstd_rand draw;
  std::vector<TokenId> tokens(count);
  for (TokenId& token : tokens) {
    token = static_cast<TokenId>(draw() % static_cast<std::uint64_t>(m_model.config().vocab_size));
  }
  return tokens;
}

double weight_bytes_of_step(const Model& model) {
  double bytes = static_cast<double>(model.bytes());
  if (!model.config().tie_word_embeddings) {
    bytes -= static_cast<double>(model.weights().embedding.bytes());
  }
  return sum_over_ranks(bytes);
}

KVBytes kv_bytes(const Engine::Decoder& decoder) {
  const CacheBytes bytes = decoder.cache().bytes();
  return {sum_over_ranks(static_cast<double>(bytes.live)),
          sum_over_ranks(static_cast<double>(bytes.allocated)),
          max_over_ranks(static_cast<double>(bytes.live))};
}

}  // namespace kvzap::perf
