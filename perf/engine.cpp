#include "engine.hpp"

#include <algorithm>
#include <random>

namespace kvzap::perf {

ModelConfig Engine::truncated(const std::filesystem::path& folder, std::int64_t layers,
                              std::int64_t vocabulary) {
  ModelConfig config = ModelConfig::load(folder);
  if (layers > 0) config.num_hidden_layers = std::min(config.num_hidden_layers, layers);
  if (vocabulary > 0) config.vocab_size = std::min(config.vocab_size, vocabulary);
  return config;
}

Engine::Engine(const std::filesystem::path& folder, std::int64_t layers, std::int64_t vocabulary)
    : m_model([&] {
        const ModelConfig config = truncated(folder, layers, vocabulary);
        return Model<Value>::load(
            folder, config,
            HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                static_cast<int>(config.num_key_value_heads), world().size()),
            world().rank(), 0);
      }()) {}

std::unique_ptr<Engine::Decoder> Engine::decoder(Scorer* scorer) const {
  return std::make_unique<Decoder>(m_model, scorer, world(), window, page_rows);
}

std::vector<TokenId> Engine::tokens(std::int64_t count) const {
  std::minstd_rand draw;
  std::vector<TokenId> tokens(count);
  for (TokenId& token : tokens) {
    token = static_cast<TokenId>(draw() % static_cast<std::uint64_t>(m_model.config().vocab_size));
  }
  return tokens;
}

double weight_bytes_of_step(const Model<Engine::Value>& model) {
  double bytes = static_cast<double>(model.bytes());
  if (!model.config().tie_word_embeddings) {
    bytes -= static_cast<double>(model.embedding().size() * sizeof(Engine::Value));
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
