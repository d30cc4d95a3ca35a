#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <kvzap/core/attention.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/model.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "model/cache_layers.hpp"
#include "model/step_block.hpp"

namespace kvzap {

namespace {

[[noreturn]] void fail_overflow() {
  throw Error("plan_memory: expected numbers of bytes below 2^63, found a larger one");
}

std::int64_t product(std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) fail_overflow();
  }
  return result;
}

std::int64_t sum(std::initializer_list<std::int64_t> terms) {
  std::int64_t result = 0;
  for (const std::int64_t term : terms) {
    if (__builtin_add_overflow(result, term, &result)) fail_overflow();
  }
  return result;
}

/// Returns the rows of one head that stay of `tokens`.
std::int64_t kept_rows(std::int64_t tokens, double evict_ratio, std::int64_t window) {
  const auto evicted =
      static_cast<std::int64_t>(std::floor(static_cast<double>(tokens) * evict_ratio));
  return std::max(std::min(tokens, window), tokens - std::min(evicted, tokens));
}

/// Returns a layer without what its weights do not depend on. `rows_of`: 0, the layer before it in
/// a model of one plain layer and this one.
LayerConfig kind_of(LayerConfig layer) {
  layer.has_rope = true;
  layer.window = layer.chunk = 0;
  layer.keeps_window = false;
  layer.gate_cutoff.reset();
  if (layer.rows_of > 0) layer.rows_of = 0;
  if (layer.weights_of > 0) layer.weights_of = 0;
  return layer;
}

bool is_same_kind(const LayerConfig& a, const LayerConfig& b) {
  const auto fields = [](const LayerConfig& l) {
    return std::tuple(l.has_experts, l.has_feed_forward, l.mixing, l.rows_of, l.intermediate_size,
                      l.head_dim, l.kv_heads_factor, l.values_are_keys, l.weights_of, l.query_heads,
                      l.has_sinks);
  };
  return fields(a) == fields(b);
}

/// Returns the bytes of each rank's weights if all are in `dtype`. Layers with the same kinds of
/// parts have the same number, so models of one and two layers tell it.
std::vector<std::int64_t> plain_weight_bytes(const ModelConfig& config, DType dtype, int ranks) {
  const auto bytes_of = [&](const std::vector<LayerConfig>& layers) {
    ModelConfig small = config;
    small.layers = layers;
    small.num_hidden_layers = static_cast<std::int64_t>(layers.size());
    return weight_bytes({}, small, dtype, ranks, 0, WeightStorage::unpacked);
  };
  std::vector<std::pair<LayerConfig, std::int64_t>> kinds;  // and their numbers
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const LayerConfig kind = kind_of(config.layer(l));
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& other) {
      return is_same_kind(other.first, kind);
    });
    if (found == kinds.end()) {
      kinds.emplace_back(kind, 1);
    } else {
      ++found->second;
    }
  }
  // All layers, less one plain one that each of the two-layer models has.
  const LayerConfig plain;
  const std::vector<std::int64_t> one = bytes_of({plain});
  std::vector<std::int64_t> bytes = one;
  const auto add_layers = [&](std::int64_t count, const LayerConfig& kind) {
    const std::vector<std::int64_t> with_one = bytes_of({plain, kind});
    for (std::size_t rank = 0; rank < one.size(); ++rank) {
      bytes[rank] = sum({bytes[rank], product({count, with_one[rank] - one[rank]})});
    }
  };
  for (const auto& [kind, count] : kinds) add_layers(count, kind);
  add_layers(-1, plain);
  return bytes;
}

/// Returns the bytes of a token's keys and values that a step keeps for later layers
/// (LayerConfig::rows_of).
std::int64_t kept_for_later(const ModelConfig& config, const CacheShape& shape,
                            std::int64_t value_bytes) {
  std::vector<bool> is_read(static_cast<std::size_t>(config.num_hidden_layers), false);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const std::int64_t owner = config.rows_of(l);
    if (owner != l) is_read[static_cast<std::size_t>(owner)] = true;
  }
  std::int64_t bytes = 0;
  for (std::size_t owner = 0; owner < is_read.size(); ++owner) {
    if (!is_read[owner]) continue;
    const int layer = static_cast<int>(owner);
    bytes = sum({bytes, product({2, shape.heads[owner], shape.dim(layer), value_bytes})});
  }
  return bytes;
}

/// A call of attention for one sequence.
struct AttentionCall {
  PageFormat format;
  std::int64_t rows, tokens;
  int chosen_page_rows;
};

/// Returns the scratch space of attention in bytes: that of the layer that takes most, as they
/// share it. A layer may have its own numbers of heads and of their dimensions.
std::int64_t attention_scratch(const ModelConfig& config, const CacheShape& shape, DType dtype,
                               const AttentionCall& call) {
  std::int64_t most = 0;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    if (!shape.has_rows(l)) continue;
    AttentionExtents extents;
    extents.kv_heads = shape.heads[l];
    extents.group = static_cast<int>(config.query_group_of(l));
    extents.head_dim = static_cast<int>(shape.dim(l));
    extents.format = call.format;
    extents.chosen_page_rows = call.chosen_page_rows;
    extents.spans = 1;
    extents.tokens = call.tokens;
    extents.longest_single = call.rows;
    extents.single_rows = product({extents.kv_heads, call.rows});
    most = std::max(most, static_cast<std::int64_t>(Attention::scratch_bytes(dtype, extents)));
  }
  return most;
}

void check_demand(const MemoryDemand& demand) {
  if (!(demand.evict_ratio >= 0 && demand.evict_ratio < 1)) {
    throw Error(fmt::format("plan_memory: evict_ratio: expected a number in [0, 1), found {}",
                            demand.evict_ratio));
  }
  if (demand.ranks < 1) {
    throw Error(fmt::format("plan_memory: ranks: expected at least 1, found {}", demand.ranks));
  }
  if (demand.tokens < 0) {
    throw Error(fmt::format("plan_memory: tokens: expected 0 or more, found {}", demand.tokens));
  }
  // Above 2^53 a token count is no longer exact as a double, which evict_ratio multiplies.
  if (demand.tokens > (std::int64_t{1} << 53)) fail_overflow();
  if (demand.window < 0) {
    throw Error(fmt::format("plan_memory: window: expected 0 or more, found {}", demand.window));
  }
  if (demand.bounded_page_rows < 0) {
    throw Error(fmt::format("plan_memory: bounded_page_rows: expected 0 or more, found {}",
                            demand.bounded_page_rows));
  }
  if (demand.step_tokens < 0) {
    throw Error(
        fmt::format("plan_memory: step_tokens: expected 0 or more, found {}", demand.step_tokens));
  }
}

}  // namespace

MemoryPlan plan_memory(const ModelConfig& config, const MemoryDemand& demand) {
  const DType dtype = demand.dtype;
  const std::int64_t tokens = demand.tokens;
  const double evict_ratio = demand.evict_ratio;
  const int ranks = demand.ranks;
  const int window = demand.window;
  const std::int64_t step_tokens = demand.step_tokens;
  const PageFormat format = model::stored_format(config, demand.format);
  check_demand(demand);
  const std::int64_t step = step_tokens == 0 ? tokens : std::min(tokens, step_tokens);

  const auto value_bytes = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t kept = kept_rows(tokens, evict_ratio, window);
  const std::int64_t full = model::full_layers(config);
  const auto partition = HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                             static_cast<int>(config.num_key_value_heads), ranks);
  const std::vector<std::int64_t> weights =
      demand.weights.empty() ? plain_weight_bytes(config, dtype, ranks) : demand.weights;
  MemoryPlan plan{};
  for (int rank = 0; rank < ranks; ++rank) {
    const auto kv_heads = static_cast<std::int64_t>(partition.heads(0, rank).size());
    const std::int64_t row_bytes =
        product({config.row_vectors(), kv_heads, config.head_dim, value_bytes});
    std::int64_t dense_row = row_bytes;
    MemoryPlan::Rank bytes{};
    bytes.weights = weights.at(rank);
    const CacheShape shape = model::cache_shape(config, partition, rank, 1, 1);
    for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
      if (shape.has_pages(l) || !shape.keeps_rows(l)) continue;
      const std::int64_t own_row = product({2, shape.heads[l], shape.dim(l), value_bytes});
      bytes.kv_rings = sum({bytes.kv_rings, product({shape.own_ring(l).rows, own_row})});
      dense_row = std::max(dense_row, own_row);
    }
    for (const StateShape& state : model::states(config, partition, rank)) {
      const auto value_bytes_of_states = static_cast<std::int64_t>(2 * sizeof(float));
      bytes.states =
          sum({bytes.states, product({state.heads, state.values, value_bytes_of_states})});
    }
    const auto quantised_bytes = static_cast<std::int64_t>(page_row_values(
        static_cast<int>(config.head_dim), static_cast<std::size_t>(value_bytes), format));
    const auto bounds_of_page = static_cast<std::int64_t>(page_bounds_bytes(
        static_cast<int>(config.head_dim), static_cast<std::size_t>(value_bytes), format));
    const auto bounds = [&](std::int64_t rows) {
      const std::int64_t page_rows = demand.bounded_page_rows;
      return page_rows > 0 ? product({full, kv_heads, rows / page_rows, bounds_of_page}) : 0;
    };
    bytes.kv_full =
        sum({bytes.kv_rings, bytes.states, bounds(tokens), product({full, tokens, row_bytes})});
    const auto stored = [&](std::int64_t rows) {
      const std::int64_t wide = format.quantised() ? std::min<std::int64_t>(rows, window) : rows;
      return sum({bytes.kv_rings, bytes.states, bounds(rows), product({full, wide, row_bytes}),
                  product({full, rows - wide, kv_heads, quantised_bytes})});
    };
    bytes.kv_unpruned = stored(tokens);
    bytes.kv_kept = stored(kept);
    bytes.dense_layer =
        product({step, sum({dense_row, kept_for_later(config, shape, value_bytes)})});
    // Residual streams, the embedding that layers read, experts' output for the next layer, angles.
    const std::int64_t streams = sum({1, config.layer_inputs || config.shared_blocks ? 1 : 0,
                                      config.experts && config.experts->joins_next ? 1 : 0,
                                      config.alt_up ? config.alt_up->streams : std::int64_t{0}});
    bytes.activations =
        product({step, sum({product({streams, config.hidden_size}), config.head_dim}),
                 static_cast<std::int64_t>(size_of(DType::f32))});
    bytes.attention = attention_scratch(
        config, shape, dtype,
        {format, kept, std::min(step, model::block_tokens(config)), demand.bounded_page_rows});
    plan.weights = sum({plan.weights, bytes.weights});
    plan.kv_rings = sum({plan.kv_rings, bytes.kv_rings});
    plan.states = sum({plan.states, bytes.states});
    plan.kv_full = sum({plan.kv_full, bytes.kv_full});
    plan.kv_unpruned = sum({plan.kv_unpruned, bytes.kv_unpruned});
    plan.kv_kept = sum({plan.kv_kept, bytes.kv_kept});
    plan.dense_layer = sum({plan.dense_layer, bytes.dense_layer});
    plan.activations = sum({plan.activations, bytes.activations});
    plan.attention = sum({plan.attention, bytes.attention});
    plan.ranks.push_back(bytes);
  }
  return plan;
}

PageFormat choose_page_format(const ModelConfig& config, DType dtype, std::int64_t kv_bytes,
                              std::int64_t tokens) {
  const double rows = static_cast<double>(model::full_layers(config)) *
                      static_cast<double>(config.num_key_value_heads) * static_cast<double>(tokens);
  for (const PageFormat format :
       {PageFormat{}, PageFormat{RowType::q8, RowType::q8}, PageFormat{RowType::q8, RowType::q4}}) {
    if (config.row_vectors() == 1 && format.keys != format.values) continue;
    const auto row_bytes = static_cast<double>(page_row_values(
        static_cast<int>(config.head_dim), size_of(dtype), model::stored_format(config, format)));
    if (static_cast<double>(kv_bytes) >= rows * row_bytes) return format;
  }
  return {RowType::q4, RowType::q4};
}

}  // namespace kvzap
