// The memory that a model and its KV cache take on each rank, computed before anything is loaded.
#pragma once

#include <cstdint>
#include <kvzap/core/quantised_rows.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>
#include <vector>

namespace kvzap {

/// Bytes by purpose, for each rank and in total. A replicated weight counts once per rank.
struct MemoryPlan {
  /// Bytes of one rank.
  struct Rank {
    /// Weights: matrices in the chosen value type, norms and biases in f32.
    std::int64_t weights = 0;
    /// Keys and values of layers with windows or chunks: whole rings, however short the sequence.
    std::int64_t kv_rings = 0;
    /// States of layers that keep one (StateShape), in f32: those of the sequence, and those that a
    /// step makes of them.
    std::int64_t states = 0;
    /// Keys and values of every token in every other layer, as wide rows; kv_rings and states.
    std::int64_t kv_full = 0;
    /// The same as the cache stores them: kv_full, or less with quantised rows.
    std::int64_t kv_unpruned = 0;
    /// Keys and values that stay after pruning, kv_rings and states among them, without the slack
    /// of partly filled pages.
    std::int64_t kv_kept = 0;
    /// Keys and values of a step's tokens in one layer. They exist beside kv_kept during prefill.
    std::int64_t dense_layer = 0;
    /// Residual stream and RoPE angles of a step's tokens, in f32. Each rank holds all of them.
    /// Other activations are not counted: their size does not grow with the context.
    std::int64_t activations = 0;
    /// Scratch space of attention: parts of a decode step's softmax and tiles of a prefill.
    std::int64_t attention = 0;
  };
  std::vector<Rank> ranks;
  std::int64_t weights = 0;
  std::int64_t kv_rings = 0;
  std::int64_t states = 0;
  std::int64_t kv_full = 0;
  std::int64_t kv_unpruned = 0;
  std::int64_t kv_kept = 0;
  std::int64_t dense_layer = 0;
  std::int64_t activations = 0;
  std::int64_t attention = 0;
};

/// What plan_memory plans for: weights and cache in `dtype`, and a sequence.
struct MemoryDemand {
  DType dtype = DType::f32;
  std::int64_t tokens = 0;
  /// Of each head's `tokens` rows, the fraction that is evicted, rounded down to whole rows, in
  /// layers whose attention sees all tokens. At least min(tokens, window) rows stay.
  double evict_ratio = 0;
  int ranks = 1;
  int window = 0;
  /// Tokens of the largest step. In sparse prefill this is the chunk; 0, or more than `tokens`,
  /// means all tokens, as in dense prefill.
  std::int64_t step_tokens = 0;
  /// Bytes of each rank's weights, as weight_bytes() returns for a model whose weights are
  /// quantised; empty means that all are in `dtype`.
  std::vector<std::int64_t> weights = {};
  /// How pages store rows; the newest `window` rows count as wide ones.
  PageFormat format = {};
  /// Rows of a page whose keys have bounds (CacheOptions::read_pages), which count in kv_full,
  /// kv_unpruned and kv_kept; 0: they have none.
  int bounded_page_rows = 0;
};

/// Returns the plan for `config` and the demand.
///
/// KV heads, with their query groups, are split evenly in contiguous ranges; the first ranks get
/// one more head if the number does not divide evenly. With more ranks than KV heads, q, k, v and o
/// are split evenly over all ranks. Rows count where they arrive, on the rank that owns their head
/// (HeadPartition::even); balancing moves some of them to other ranks later. The MLP's intermediate
/// dimensions and the vocabulary rows of embedding and output head (one copy if tied) are split in
/// the same way. Every rank has the norms. Rank 0 has the biases of o and down.
///
/// The scratch space of attention is that of this machine's kernels, for one sequence. Kokkos must
/// be initialized.
///
/// Throws Error if evict_ratio is not in [0, 1), if ranks < 1, or if tokens, window or step_tokens
/// is negative. A number of bytes that does not fit 64 bits is an error, too.
MemoryPlan plan_memory(const ModelConfig& config, const MemoryDemand& demand);

/// Returns the type of rows with which `kv_bytes` of keys and values lose least of a context of
/// `tokens`: the widest of `dtype`, 8 bits, and 8-bit keys with 4-bit values that holds all rows;
/// otherwise 4 bits, so that as many rows as possible stay. At equal bytes, evicting rows loses
/// more than narrowing them (docs/guide/kv-types.md).
PageFormat choose_page_format(const ModelConfig& config, DType dtype, std::int64_t kv_bytes,
                              std::int64_t tokens);

}  // namespace kvzap
