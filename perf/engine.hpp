// A model of random weights with its cache, for benchmarks of whole steps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/engine/synthetic.hpp>
#include <kvzap/model/model.hpp>
#include <memory>
#include <vector>

#include "common.hpp"
#include "engine/decoder.hpp"

namespace kvzap::perf {

/// bf16 weights, unless they are quantised at load, and cache, pages of 64 rows, a window of 128.
class Engine {
 public:
  using Value = bfloat16;
  using Decoder = kvzap::Decoder;
  static constexpr int window = 128;
  static constexpr int page_rows = 64;

  /// Uses the first `layers` layers of the model (0: all), and a vocabulary of `vocabulary` tokens
  /// (0: the model's own).
  Engine(const std::filesystem::path& folder, std::int64_t layers, std::int64_t vocabulary = 0,
         WeightStorage storage = WeightStorage::as_stored);

  const Model& model() const { return m_model; }
  const HeadPartition& partition() const { return m_model.partition(); }

  /// Returns a decoder without sequences. `scorer` must outlive it.
  std::unique_ptr<Decoder> decoder(Scorer* scorer = nullptr) const;
  /// Returns the same tokens on all ranks.
  std::vector<TokenId> tokens(std::int64_t count) const;

 private:
  static ModelConfig truncated(const std::filesystem::path& folder, std::int64_t layers,
                               std::int64_t vocabulary);

  Model m_model;
};

/// Writes a surrogate of small random weights in the published form; hidden_dim 0 for a linear one.
void write_surrogate(const std::filesystem::path& folder, const ModelConfig& config,
                     std::int64_t hidden_dim);

/// Returns the bytes of all ranks' weights that a step of few tokens reads. Excludes a separate
/// embedding table, of which it reads one row. Collective.
double weight_bytes_of_step(const Model& model);

/// Bytes of keys and values of all ranks, and of the rank with most of them.
struct KVBytes {
  double live;
  double allocated;
  double live_of_largest_rank;
};
/// Collective.
KVBytes kv_bytes(const Engine::Decoder& decoder);

}  // namespace kvzap::perf
