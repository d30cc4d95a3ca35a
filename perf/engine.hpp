// A model of random weights with its cache, as the benchmarks of whole steps use it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/engine/decoder.hpp>
#include <kvzap/engine/synthetic.hpp>
#include <kvzap/model/model.hpp>
#include <memory>
#include <vector>

#include "common.hpp"

namespace kvzap::perf {

/// bf16 weights and cache, token-major pages of 64 rows, a window of 128.
class Engine {
 public:
  using Value = bfloat16;
  using Decoder = kvzap::Decoder<Value>;
  static constexpr int window = 128;
  static constexpr int page_rows = 64;

  /// Of the model's layers the first `layers` (0: all); vocabulary of `vocabulary` tokens (0: the
  /// model's own).
  Engine(const std::filesystem::path& folder, std::int64_t layers, std::int64_t vocabulary = 0);

  const Model<Value>& model() const { return m_model; }
  const HeadPartition& partition() const { return m_model.partition(); }

  /// A decoder without any sequence. `scorer` outlives it.
  std::unique_ptr<Decoder> decoder(Scorer* scorer = nullptr) const;
  /// The same tokens on all ranks.
  std::vector<TokenId> tokens(std::int64_t count) const;

 private:
  static ModelConfig truncated(const std::filesystem::path& folder, std::int64_t layers,
                               std::int64_t vocabulary);

  Model<Value> m_model;
};

/// Writes a surrogate of small random weights as published: hidden_dim 0 for a linear one.
void write_surrogate(const std::filesystem::path& folder, const ModelConfig& config,
                     std::int64_t hidden_dim);

/// Bytes of all ranks' weights that a step of few tokens reads: everything but an embedding table
/// of its own, of which it reads a row. Collective.
double weight_bytes_of_step(const Model<Engine::Value>& model);

/// Bytes of keys and values of all ranks, and of the rank that has most of them.
struct KVBytes {
  double live;
  double allocated;
  double live_of_largest_rank;
};
/// Collective.
KVBytes kv_bytes(const Engine::Decoder& decoder);

}  // namespace kvzap::perf
