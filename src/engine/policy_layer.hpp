// A layer of one sequence as the decoder shows it to a policy.
#pragma once

#include <kvzap/core/cache.hpp>
#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/model/model.hpp>

#include "base/scratch.hpp"
#include "cache/gather_rows.hpp"
#include "engine/latent_maps.hpp"
#include "engine/policy_step.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// How many rows of a sequence of `tokens` tokens stay. The first `sink` positions precede all
/// others, whatever their scores.
struct RowChoice {
  const Budget& budget;
  const Budget::Model& model;
  std::int64_t tokens = 0;
  std::int64_t sink = 0;
};

/// Sets `keep` of the layers by a budget. If the budget has no amount, the policy itself has
/// chosen, and rows that score above 0 stay. The `scores` of sinks are overwritten. Collective if
/// choice_communicates.
void choose_rows(const ExecutionSpace& exec, const Communicator& comm, const RowChoice& choice,
                 const std::vector<ScoredLayer>& layers, const std::vector<linalg::Matrix>& scores);

/// Returns whether choose_rows communicates.
inline bool choice_communicates(const Budget& budget) {
  return budget.has_amount() && (budget.pool != Budget::Pool::head || budget.group != 0);
}

/// Tells a policy how many rows of a layer `budget` will keep of the `tokens` that the sequence has
/// seen: all if `budget` is null or has no amount. extents.layer and extents.tokens must be set.
void set_keep(const Budget* budget, const Budget::Model& model, std::int64_t tokens,
              PolicyLayer::Extents& extents);

/// Memory that the layers of all spans share, one after the other.
struct PolicyScratch {
  explicit PolicyScratch(DType dtype) : mass(dtype) {}

  linalg::Vector keys, values;
  Kokkos::View<std::int64_t*, MemorySpace> positions;
  linalg::Vector cached_scores;  // (head, row)
  const void* cached_scores_of = nullptr;
  linalg::Vector scores;  // (head, row)
  linalg::Vector lse;     // (token, query head) of a block
  linalg::Vector output_weights;
  LatentOutputWeights latent;
  Kokkos::View<std::uint8_t*, MemorySpace> keep;  // (head, row)
  AttentionMass mass;

  /// Frees the memory that grows with the tokens.
  void release() {
    keys = {};
    values = {};
    positions = {};
    cached_scores = {};
    scores = {};
    keep = {};
  }
};

/// y(i, output) = weights(output, first + i)
void take_inputs(const ExecutionSpace& exec, const linalg::LinearWeights& weights,
                 std::int64_t first, const linalg::Matrix& y);

class DecoderLayer final : public PolicyLayer {
 public:
  using Cache = KVCache;

  DecoderLayer(const ExecutionSpace& exec, const Communicator& comm, const Model& model,
               const Budget::Model& counted, Cache& cache, PolicyScratch& scratch,
               const linalg::Vector& frequencies)
      : PolicyLayer(exec, comm),
        m_model(model),
        m_counted(counted),
        m_cache(cache),
        m_scratch(scratch),
        m_frequencies(frequencies) {
    const ModelConfig& config = model.config();
    m_extents.layers = counted.pruned.empty() ? counted.layers : counted.pruned.back() + 1;
    m_extents.kv_heads = static_cast<int>(config.num_key_value_heads);
    m_extents.group = static_cast<int>(config.query_group());
    m_extents.head_dim = static_cast<int>(config.head_dim);
    m_extents.value_dim =
        config.value_dim == 0 ? m_extents.head_dim : static_cast<int>(config.value_dim);
    m_extents.has_latents = config.latent.has_value();
    m_extents.hidden_size = config.hidden_size;
    m_extents.rope_scale = config.rope_attention_factor();
    m_extents.soft_cap = static_cast<float>(config.attention_soft_cap);
    // Reserves memory, so that `show` allocates none.
    m_extents.heads.reserve(m_extents.kv_heads);
    m_extents.rows.reserve(m_extents.kv_heads);
  }

  /// Shows a layer of `sequence`, to which `step` adds new_tokens tokens.
  void show(const PolicyStep& step, SequenceId sequence, int layer, std::int64_t new_tokens);
  /// Sets the new rows of the layer: (token of the span, head, dim).
  void set_new_rows(const ConstArrayView& keys, const ConstArrayView& values) {
    m_new_keys = keys;
    m_new_values = values;
  }

  /// Sets W_O of this rank's heads, (hidden_size, query heads * head_dim), for a model without
  /// weights and for one whose ranks share W_O.
  void set_output_weights(const ArrayView& weights) { m_output_weights = weights; }
  /// Sets the layer's sinks, for a model without weights.
  void set_sinks(const Kokkos::View<const float*, MemorySpace>& sinks) { m_extents.sinks = sinks; }

  PositionView positions(int head, std::int64_t begin, std::int64_t count) override;
  RowsView keys(int head, std::int64_t begin, std::int64_t count) override {
    return gather(head, begin, count, false, m_scratch.keys);
  }
  RowsView values(int head, std::int64_t begin, std::int64_t count) override {
    return gather(head, begin, count, true, m_scratch.values);
  }
  Kokkos::View<const float*, MemorySpace> cached_scores(int head) override;
  TokenBlock recent() override;
  void attention_mass(const TokenBlock& queries, MassReduction reduction, const MassView& mass,
                      const MassFactors& factors) override;
  RowsView output_weights(int query_head) override;
  Kokkos::View<const float*, MemorySpace> inverse_frequencies() override {
    if (m_model.config().rope_depends_on_length()) {
      throw Error("policy: inverse_frequencies without PolicyNeeds::frequencies");
    }
    return m_frequencies;
  }

 private:
  /// Rows of a head before this step; 0 if they are not shown.
  std::int64_t cached_rows(int head) const { return rows(head) - m_extents.new_tokens; }
  RowsView gather(int head, std::int64_t begin, std::int64_t count, bool values,
                  linalg::Vector& room);

  const Model& m_model;
  const Budget::Model& m_counted;
  Cache& m_cache;
  PolicyScratch& m_scratch;
  linalg::Vector m_frequencies;
  const PolicyStep* m_step = nullptr;
  SequenceId m_sequence = -1;
  std::int64_t m_first_new = 0;  // position of the first new token
  bool m_has_scores = false;     // whether this layer's cached rows have scores
  ConstArrayView m_new_keys, m_new_values;
  ArrayView m_output_weights;
};

}  // namespace kvzap::engine
