#include "model/read_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "linalg/product_kinds.hpp"
#include "model/families/family.hpp"
#include "model/read_latent.hpp"
#include "model/read_states.hpp"
#include "model/read_streams.hpp"
#include "model/rope.hpp"

namespace kvzap::model {
namespace {

/// Appends a row, to the last range if it follows on it.
void append_row(Ranges& ranges, std::int64_t row) {
  if (!ranges.empty() && ranges.back().second == row) {
    ++ranges.back().second;
  } else {
    ranges.emplace_back(row, row + 1);
  }
}

/// Reads the layers of one rank.
class LayerReader {
 public:
  using Layer = Model::Weights::Layer;
  using FeedForward = Model::Weights::FeedForward;

  LayerReader(const WeightSource& source, const ModelConfig& config, const HeadPartition& partition,
              int rank)
      : m_source(source),
        m_config(config),
        m_partition(partition),
        m_rank(rank),
        m_names(family_of(config).tensors),
        m_hidden({{0, config.hidden_size}}),
        m_streams(source, config, partition.n_ranks(), rank) {}

  /// `before`: the layers before it, the weights of which it may share.
  Layer read(std::int64_t index, const std::vector<Layer>& before) {
    m_prefix = prefix_of(index);
    const LayerConfig own = m_config.layer(index);
    m_order = rotation_order(m_config, index);
    if (own.mixing == TokenMixing::attention_into_state_space) return read_shared(index, before);
    Layer layer;
    const bool has_two_norms = m_config.is_parallel && !m_config.shares_norm;
    const auto either = [&](std::string_view of_two, std::string_view otherwise) {
      return has_two_norms && !of_two.empty() ? of_two : otherwise;
    };
    const bool has_own_norms = !own.has_attention() && !m_names.state_in.empty();
    if (has_own_norms) {
      layer.attention_in = norm(m_names.state_in);
      layer.feed_forward_in = norm(m_names.state_feed_forward_in);
    } else if (own.mixing != TokenMixing::none) {
      const bool has_norm = index > 0 || m_names.first_has_attention_norm;
      if (has_norm) {
        layer.attention_in = norm(either(m_names.parallel_attention_in, m_names.attention_in));
      }
      if (m_config.norms_outputs) layer.attention_out = norm(m_names.attention_out);
    }
    if (!has_own_norms && own.has_feed_forward) {
      if (!m_config.is_parallel || has_two_norms) {
        layer.feed_forward_in =
            norm(either(m_names.parallel_feed_forward_in, m_names.feed_forward_in));
      }
      const bool has_experts_out = own.has_experts && !m_names.experts_out.empty();
      if (m_config.norms_outputs) {
        layer.feed_forward_out =
            norm(has_experts_out ? m_names.experts_out : m_names.feed_forward_out);
      }
    }
    read_token_mixer(index, layer);
    if (!own.has_feed_forward) return layer;
    if (own.has_experts) read_experts(*m_config.experts, layer);
    if (!own.has_experts || m_config.experts->have_dense_part()) {
      const std::int64_t width =
          own.intermediate_size == 0 ? m_config.intermediate_size : own.intermediate_size;
      layer.dense = feed_forward(m_names.feed_forward, width, m_config.mlp_bias, m_names.gate_up);
    }
    if (m_config.activation == Activation::xielu) layer.dense.xielu = xielu();
    layer.dense.limit = static_cast<float>(own.dense_limit);
    for (FeedForward& expert : layer.experts) expert.limit = static_cast<float>(own.experts_limit);
    m_streams.read(index, m_prefix, layer);
    return layer;
  }

  /// The norm `name` of the residual stream, or none if that is empty.
  Model::Weights::Norm norm(std::string_view name) const {
    return norm(name, m_config.hidden_size);
  }
  Model::Weights::Norm norm(std::string_view name, std::int64_t size) const {
    if (name.empty()) return {};
    const Ranges all = {{0, size}};
    Model::Weights::Norm norm;
    norm.weight =
        m_names.norms_have_weights ? norm_weights({{named(name), size, all}}) : m_source.ones(size);
    if (m_config.norm_bias) norm.bias = m_source.vector({{named(name, "bias"), size, all}});
    return norm;
  }

 private:
  std::string prefix_of(std::int64_t index) const {
    return fmt::format("{}{}.", m_names.layers, index);
  }

  /// A layer with a shared block, whose weights are those of its first layer.
  Layer read_shared(std::int64_t index, const std::vector<Layer>& before) {
    const LayerConfig own = m_config.layer(index);
    const std::int64_t owner = own.weights_of < 0 ? index : own.weights_of;
    const std::string prefix = m_prefix, in_state = prefix + std::string(m_names.state_part) + ".";
    Layer layer;
    m_prefix = fmt::format("{}{}.", prefix_of(owner), m_names.shared_block);
    if (owner == index) {
      layer.attention_in = norm(m_names.attention_in, m_config.attention_inputs());
      layer.feed_forward_in = norm(m_names.feed_forward_in);
      read_attention(index, layer);
      layer.dense = feed_forward(m_names.feed_forward, m_config.intermediate_size,
                                 m_config.mlp_bias, m_names.gate_up);
    } else {
      const Layer& block = before.at(static_cast<std::size_t>(owner));
      layer.attention_in = block.attention_in;
      layer.feed_forward_in = block.feed_forward_in;
      layer.dense = block.dense;
      const auto number = static_cast<int>(index), first = static_cast<int>(owner);
      if (m_partition.heads(number, m_rank) == m_partition.heads(first, m_rank)) {
        layer.qkv = block.qkv;
        layer.o = block.o;
      } else {
        read_attention(index, layer);  // a partition by rows may deal each layer's heads otherwise
      }
    }
    read_adapters(index, layer);
    StateReader(m_source, m_config, m_partition, m_rank, in_state).read_state_space(index, layer);
    m_prefix = in_state;
    layer.space_in = norm(m_names.attention_in);
    m_prefix = prefix;
    const std::int64_t hidden = m_config.hidden_size;
    layer.block_out =
        m_source.linear({{named(m_names.block_out), hidden, m_hidden}}, hidden, own_part(hidden));
    return layer;
  }

  void read_adapters(std::int64_t index, Layer& layer) const {
    std::int64_t number = 0;
    for (std::int64_t l = 0; l < index; ++l) {
      number += m_config.layer(l).mixing == TokenMixing::attention_into_state_space ? 1 : 0;
    }
    const SharedBlocksConfig& blocks = *m_config.shared_blocks;
    const auto named_in = [&](std::string_view name, int part) {
      return named(fmt::format(fmt::runtime(name), number), part == 0 ? "0.weight" : "1.weight");
    };
    if (const std::int64_t rank = blocks.attention_rank; rank > 0) {
      const std::int64_t dim = m_config.head_dim, inputs = m_config.attention_inputs();
      const std::int64_t q_size = m_config.num_attention_heads * dim;
      const std::int64_t kv_size = m_config.num_key_value_heads * dim;
      const std::array<Ranges, 3> rows = qkv_rows(static_cast<int>(index), dim, dim);
      std::vector<TensorRows> in;
      for (std::size_t kind = 0; kind < rows.size(); ++kind) {
        in.push_back({named_in(m_names.qkv_adapters[kind], 0), rank, {{0, rank}}});
        layer.qkv_adapter.out.push_back(m_source.linear(
            {{named_in(m_names.qkv_adapters[kind], 1), kind == 0 ? q_size : kv_size, rows[kind]}},
            rank, {{0, rank}}));
      }
      layer.qkv_adapter.in = m_source.linear(in, inputs, {{0, inputs}});
    }
    if (const std::int64_t rank = blocks.feed_forward_rank; rank > 0) {
      const std::int64_t width = m_config.intermediate_size;
      Ranges rows = own_part(width);
      append_shifted(rows, own_part(width), width);
      layer.gate_up_adapter.in =
          m_source.linear({{named_in(m_names.gate_up_adapter, 0), rank, {{0, rank}}}},
                          m_config.hidden_size, m_hidden);
      layer.gate_up_adapter.out = {m_source.linear(
          {{named_in(m_names.gate_up_adapter, 1), 2 * width, rows}}, rank, {{0, rank}})};
    }
  }

  /// This rank's rows of q, k and v. Queries and keys are in the engine's order of dimensions,
  /// values in the file's. A head's query is followed by others up to q_rows_of_head.
  std::array<Ranges, 3> qkv_rows(int index, std::int64_t q_rows_of_head,
                                 std::int64_t kv_dim) const {
    const std::int64_t dim = m_config.head_dim_of(index);
    const std::int64_t heads = m_config.query_heads_of(index);
    const std::int64_t group = heads / m_config.num_key_value_heads, q_size = heads * dim;
    const std::int64_t kv_size = m_config.num_key_value_heads * kv_dim;
    std::array<Ranges, 3> rows;
    for (const auto& [begin, end] : m_partition.projected(index, m_rank, group, dim, kv_dim)) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t turned = m_order[static_cast<std::size_t>(i % dim)];
        if (i < q_size) {
          append_row(rows[0], i / dim * q_rows_of_head + turned);
        } else if (i < q_size + kv_size) {
          append_row(rows[1], (i - q_size) / dim * dim + turned);
        } else {
          append_row(rows[2], i - q_size - kv_size);
        }
      }
    }
    return rows;
  }

  std::string named(std::string_view name, std::string_view kind = "weight") const {
    return fmt::format("{}{}.{}", m_prefix, name, kind);
  }

  static std::string in_block(std::string_view block, std::string_view name) {
    return fmt::format("{}{}{}", block, block.empty() ? "" : ".", name);
  }

  Model::Weights::Vector norm_weights(const std::vector<TensorRows>& parts) const {
    return m_source.vector(parts, m_names.norms_add_one ? 1.0f : 0.0f);
  }

  /// Reads a map of attention or of a feed-forward part.
  Model::Weights::Linear linear(std::vector<TensorRows> parts, std::int64_t columns,
                                const Ranges& own) const {
    for (TensorRows& part : parts) {
      if (m_names.maps_are_transposed) part.slice = TensorSlice{0, 0};
    }
    return m_source.linear(parts, columns, own);
  }

  void read_token_mixer(std::int64_t index, Layer& layer) const {
    const StateReader states(m_source, m_config, m_partition, m_rank, m_prefix);
    switch (m_config.layer(index).mixing) {
      case TokenMixing::attention:
        return m_config.latent ? read_latent_attention(layer) : read_attention(index, layer);
      case TokenMixing::delta_net:
        return states.read_delta_net(index, layer);
      case TokenMixing::short_convolution:
        return states.read_short_convolution(index, layer);
      case TokenMixing::state_space:
        states.read_state_space(index, layer);
        std::swap(layer.o, layer.space_out);
        std::swap(layer.o_bias, layer.space_out_bias);
        return;
      case TokenMixing::attention_and_state_space:
        read_attention(index, layer);
        return states.read_state_space(index, layer);
      case TokenMixing::attention_into_state_space:  // read_shared
      case TokenMixing::none:
        return;
    }
  }

  void read_attention(std::int64_t index, Layer& layer) const {
    const LayerConfig own = m_config.layer(index);
    const bool shares = own.rows_of >= 0;
    // The partition's KV heads, each with its queries, and keys and values of all KV heads that the
    // layer has for it.
    const std::int64_t dim = m_config.head_dim_of(index),
                       all_heads = m_config.query_heads_of(index);
    const std::int64_t group = all_heads / m_config.num_key_value_heads;
    const std::int64_t kv_dim = shares ? 0 : dim * own.kv_heads_factor;
    const std::int64_t q_size = all_heads * dim;
    const std::int64_t kv_size = m_config.num_key_value_heads * kv_dim;
    // With gates, those of a head follow its query.
    const bool has_own_gates = !m_names.attention_gate.empty();
    const std::int64_t q_rows_of_head = m_config.gates_attention && !has_own_gates ? 2 * dim : dim;
    const std::int64_t q_extent = all_heads * q_rows_of_head;
    Ranges gate_rows, q_heads;
    const auto layer_index = static_cast<int>(index);
    check_partition(layer_index);
    const std::array<Ranges, 3> own_rows = qkv_rows(layer_index, q_rows_of_head, kv_dim);
    const Ranges &q_rows = own_rows[0], &k_rows = own_rows[1], &v_rows = own_rows[2];
    const Ranges o_columns = m_partition.attended(layer_index, m_rank, group, dim);
    const bool gates_dimensions = m_config.gates_attention && !m_config.gates_heads;
    for (const auto& [begin, end] : o_columns) {
      for (std::int64_t i = begin; gates_dimensions && i < end; ++i) {
        append_row(gate_rows, has_own_gates ? i : i / dim * q_rows_of_head + dim + i % dim);
      }
      if (!m_config.gates_heads) continue;
      gate_rows.emplace_back(begin / dim, (end + dim - 1) / dim);
      if (m_partition.deals_projections()) layer.attention_gate_skip = begin % dim;
    }
    for (const std::int64_t head : m_partition.heads(layer_index, m_rank)) {
      q_heads.emplace_back(head * group, (head + 1) * group);
    }
    const auto qkv = [&](const char* kind) -> std::vector<TensorRows> {
      if (m_names.qkv.empty()) {
        const std::string_view v = own.values_are_keys ? m_names.key : m_names.value;
        std::vector<TensorRows> parts = {{named(m_names.query, kind), q_extent, q_rows}};
        if (shares) return parts;
        parts.push_back({named(m_names.key, kind), kv_size, k_rows});
        parts.push_back({named(v, kind), kv_size, v_rows});
        parts.back().padding = value_padding(dim, false);
        return parts;
      }
      Ranges rows;
      if (m_names.qkv_by_head) {
        append_heads(rows, q_rows, group, 0);
        append_heads(rows, k_rows, 1, group);
        append_heads(rows, v_rows, 1, group + 1);
      } else if (m_names.qkv_shards > 0) {
        const std::int64_t shard = q_size / m_names.qkv_shards;
        append_shards(rows, q_rows, shard, 0);
        append_shards(rows, k_rows, shard, 2);
        append_shards(rows, v_rows, shard, 1);
      } else {
        rows = q_rows;
        append_shifted(rows, k_rows, q_size);
        append_shifted(rows, v_rows, q_size + kv_size);
      }
      return {{named(m_names.qkv, kind), q_size + 2 * kv_size, rows}};
    };
    const std::int64_t inputs = m_config.attention_inputs();
    layer.qkv = linear(qkv("weight"), inputs, {{0, inputs}});
    const auto gate = [&](const char* kind) -> std::vector<TensorRows> {
      return {{named(has_own_gates ? m_names.attention_gate : m_names.query, kind),
               m_config.gates_heads ? all_heads : q_extent, gate_rows}};
    };
    if (m_config.gates_attention) {
      layer.attention_gate = m_source.linear(gate("weight"), m_config.hidden_size, m_hidden);
    }
    if (m_config.qkv_bias) layer.qkv_bias = m_source.vector(qkv("bias"));
    if (m_config.qkv_bias && m_config.gates_attention && !has_own_gates) {
      layer.attention_gate_bias = m_source.vector(gate("bias"));
    }
    if (m_config.has_sinks && own.has_sinks) {
      layer.sinks = m_source.vector({{m_prefix + std::string(m_names.sinks), all_heads, q_heads}});
    }
    read_head_norms(layer_index, layer);
    read_attention_output(index, o_columns, layer);
  }

  /// Reads what follows attention; `columns`: this rank's inputs of o.
  void read_attention_output(std::int64_t index, const Ranges& columns, Layer& layer) const {
    const std::int64_t dim = m_config.head_dim_of(index);
    const std::int64_t inputs = m_config.query_heads_of(index) * dim;
    TensorRows o{named(m_names.output), m_config.hidden_size, m_hidden};
    o.padding = value_padding(dim, true);
    layer.o = linear({o}, inputs, columns);
    if (m_config.has_inner_norms) {
      layer.inner_norm = norm_weights({{named(m_names.attention_inner), inputs, columns}});
    }
    if (m_config.o_bias && m_rank == 0) {
      layer.o_bias =
          m_source.vector({{named(m_names.output, "bias"), m_config.hidden_size, m_hidden}});
    }
    const bool is_last = index + 1 == m_config.num_hidden_layers;
    if (is_last && !m_names.last_output_bias.empty() && m_rank == 0) {
      layer.o_bias = m_source.vector(
          {{m_prefix + std::string(m_names.last_output_bias), m_config.hidden_size, m_hidden}});
    }
  }

  void read_latent_attention(Layer& layer) const {
    const std::int64_t heads = m_config.num_attention_heads, dim = m_config.latent->value_dim;
    const auto own = m_partition.latent_heads(m_rank, heads);
    layer.latent =
        read_latent(m_source, m_config, fmt::format("{}{}.", m_prefix, m_names.latent), own);
    layer.o = linear({{named(m_names.output), m_config.hidden_size, m_hidden}}, heads * dim,
                     {{own.first * dim, own.second * dim}});
    if (m_config.o_bias && m_rank == 0) {
      layer.o_bias =
          m_source.vector({{named(m_names.output, "bias"), m_config.hidden_size, m_hidden}});
    }
  }

  /// The padding of values, or of the columns of o, to heads of `dim` dimensions.
  std::optional<HeadPadding> value_padding(std::int64_t dim, bool of_columns) const {
    if (m_config.value_dim == 0 || m_config.value_dim == dim) return std::nullopt;
    return HeadPadding{m_config.value_dim, dim, of_columns};
  }

  /// Appends the rows of a map with `heads` heads for each KV head, which follow `first` others in
  /// the part of the KV head in one tensor of q, k and v (TensorNames::qkv_by_head).
  void append_heads(Ranges& rows, const Ranges& of_map, std::int64_t heads,
                    std::int64_t first) const {
    const std::int64_t dim = m_config.head_dim, block = m_config.query_group() + 2;
    for (const auto& [begin, end] : of_map) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t head = row / dim;
        append_row(rows, (head / heads * block + first + head % heads) * dim + row % dim);
      }
    }
  }

  /// Appends the rows of a map of which each shard of the tensor has `shard` rows, after those of
  /// `before` other maps (TensorNames::qkv_shards).
  static void append_shards(Ranges& rows, const Ranges& of_map, std::int64_t shard,
                            std::int64_t before) {
    for (const auto& [begin, end] : of_map) {
      for (std::int64_t row = begin; row < end; ++row) {
        append_row(rows, (row / shard * 3 + before) * shard + row % shard);
      }
    }
  }

  /// Throws Error if ranks would have a layer's queries without the rows that these see, or have to
  /// share heads that are several of the layer's.
  void check_partition(int index) const {
    const auto owner = static_cast<int>(m_config.rows_of(index));
    if (m_partition.heads(index, m_rank) != m_partition.heads(owner, m_rank)) {
      throw Error(
          fmt::format("layer {} reads the keys and values of layer {}; expected a partition "
                      "that gives both the same KV heads",
                      index, owner));
    }
    if (m_partition.deals_projections() && m_config.layer(index).kv_heads_factor > 1) {
      throw Error(fmt::format("{} ranks; expected at most {}, the KV heads of full layers",
                              m_partition.n_ranks(), m_partition.n_kv_heads()));
    }
  }

  void read_head_norms(int index, Layer& layer) const {
    if (m_config.qk_norm == QkNorm::none || m_config.qk_norm == QkNorm::unit) return;
    const std::int64_t dim = m_config.head_dim_of(index), all = m_config.query_heads_of(index);
    const std::int64_t group = all / m_config.num_key_value_heads;
    const bool of_rows = m_config.qk_norm == QkNorm::row;
    const bool of_layers = m_config.qk_norm == QkNorm::layer_of_head;
    const auto norm_of = [&](std::string_view name, std::int64_t heads, const Ranges& own) {
      if (of_layers) return norm_weights(layer_norms(name, "weight", heads, own));
      Ranges rows;
      for (const auto& [begin, end] : of_rows ? own : Ranges{{0, 1}}) {
        for (std::int64_t i = begin * dim; i < end * dim; ++i) {
          append_row(rows, i / dim * dim + m_order[static_cast<std::size_t>(i % dim)]);
        }
      }
      return norm_weights({{named(name), of_rows ? heads * dim : dim, rows}});
    };
    Ranges q_heads, kv_heads;
    for (const std::int64_t head : m_partition.heads(index, m_rank)) {
      q_heads.emplace_back(head * group, (head + 1) * group);
      kv_heads.emplace_back(head, head + 1);
    }
    layer.q_norm = norm_of(m_names.q_norm, all, q_heads);
    if (m_config.rows_of(index) != index) return;
    layer.k_norm = norm_of(m_names.k_norm, m_config.num_key_value_heads, kv_heads);
    const std::int64_t all_keys = m_config.num_key_value_heads;
    const bool needs_all = (of_rows || of_layers) && m_partition.n_ranks() > 1;
    if (needs_all) {
      layer.q_norm_of_all = norm_of(m_names.q_norm, all, {{0, all}});
      layer.k_norm_of_all = norm_of(m_names.k_norm, all_keys, {{0, all_keys}});
    }
    if (!of_layers || !m_names.head_norms_have_biases) return;
    const auto bias_of = [&](std::string_view name, std::int64_t heads, const Ranges& own) {
      return m_source.vector(layer_norms(name, "bias", heads, own));
    };
    layer.q_norm_bias = bias_of(m_names.q_norm, all, q_heads);
    layer.k_norm_bias = bias_of(m_names.k_norm, all_keys, kv_heads);
    if (!needs_all) return;
    layer.q_norm_bias_of_all = bias_of(m_names.q_norm, all, {{0, all}});
    layer.k_norm_bias_of_all = bias_of(m_names.k_norm, all_keys, {{0, all_keys}});
  }

  /// The weights or biases of LayerNorms of the heads `own`, head after head.
  std::vector<TensorRows> layer_norms(std::string_view name, const char* kind, std::int64_t heads,
                                      const Ranges& own) const {
    Ranges rows;
    for (const std::int64_t dimension : m_order) append_row(rows, dimension);
    std::vector<TensorRows> parts;
    for (const auto& [begin, end] : own) {
      for (std::int64_t head = begin; head < end; ++head) {
        TensorRows part{named(fmt::format(fmt::runtime(name), head), kind), m_config.head_dim,
                        rows};
        if (m_names.head_norms_are_matrix) part.slice = TensorSlice{head, heads};
        parts.push_back(std::move(part));
      }
    }
    return parts;
  }

  /// This rank's part of `width` rows.
  Ranges own_part(std::int64_t width) const {
    return {even_range(width, m_partition.n_ranks(), m_rank)};
  }

  /// The parameters of this layer's activation, as transformers derives them.
  linalg::Xielu xielu() const {
    const auto value = [&](const char* name, bool is_scalar) {
      TensorRows part{fmt::format("{}{}.{}", m_prefix, m_names.activation, name), 1, {{0, 1}}};
      part.is_scalar = is_scalar;
      return m_source.value(part);
    };
    const auto softplus = [](float x) { return std::log1p(std::exp(x)); };
    linalg::Xielu result;
    result.positive = softplus(value("alpha_p", false));
    result.negative = softplus(value("alpha_n", false));
    result.slope = value("beta", true);
    result.limit = value("eps", true);
    result.negative += result.slope;
    return result;
  }

  /// The maps `gate`, `up` and `down`; `gate_up`: their name if gate and up are one tensor.
  FeedForward feed_forward(std::string_view gate, std::string_view up, std::string_view down,
                           std::int64_t width, bool has_bias, std::string_view gate_up = "") const {
    const Ranges own = own_part(width);
    const auto gate_and_up = [&](const char* kind) -> std::vector<TensorRows> {
      if (!m_config.gates_feed_forward) return {{named(up, kind), width, own}};
      if (gate_up.empty()) return {{named(gate, kind), width, own}, {named(up, kind), width, own}};
      Ranges rows = own;
      append_shifted(rows, own, width);
      return {{named(gate_up, kind), 2 * width, rows}};
    };
    FeedForward result;
    result.gate_up = linear(gate_and_up("weight"), m_config.hidden_size, m_hidden);
    result.down = linear({{named(down), m_config.hidden_size, m_hidden}}, width, own);
    if (m_config.has_inner_norms) {
      result.inner_norm = norm_weights({{named(m_names.feed_forward_inner), width, own}});
    }
    if (!has_bias) return result;
    result.gate_up_bias = m_source.vector(gate_and_up("bias"));
    result.rounded_bias = rounded_bias(result);
    if (m_rank == 0) {
      result.down_bias = m_source.vector({{named(down, "bias"), m_config.hidden_size, m_hidden}});
    }
    return result;
  }
  /// The bias of a part whose first product may apply the activation.
  Kokkos::View<bfloat16*, MemorySpace> rounded_bias(const FeedForward& part) const {
    if (!linalg::keeps_type() || !epilogue_of(m_config)) return {};
    if (part.gate_up.dtype() != DType::bf16 || part.gate_up.quantised() != nullptr) return {};
    return rounded(part.gate_up_bias);
  }
  FeedForward feed_forward(std::string_view block, std::int64_t width, bool has_bias,
                           std::string_view gate_up = "") const {
    return feed_forward(in_block(block, m_names.gate), in_block(block, m_names.up),
                        in_block(block, m_names.down), width, has_bias, gate_up);
  }

  /// An expert of tensors that hold all experts.
  FeedForward fused_expert(std::int64_t expert, const ExpertsConfig& experts) const {
    const std::int64_t width = experts.intermediate_size;
    const Ranges own = own_part(width);
    Ranges rows = own;
    append_shifted(rows, own, width);
    const bool has_own = !m_names.experts_up.empty();  // tensors for gate and up
    const bool is_flat = has_own && !m_names.rows_first;
    const auto gate_and_up = [&](const char* ending) -> std::vector<TensorRows> {
      if (has_own) {
        const TensorSlice slice{expert, experts.count, false, true, is_flat};
        return {{m_prefix + std::string(m_names.experts_gate), width, own, slice},
                {m_prefix + std::string(m_names.experts_up), width, own, slice}};
      }
      return {{fmt::format("{}{}{}", m_prefix, m_names.experts_gate_up, ending), 2 * width, rows,
               TensorSlice{expert, experts.count, m_names.alternates, m_names.rows_first}}};
    };
    const auto down = [&](const char* ending) -> std::vector<TensorRows> {
      return {{fmt::format("{}{}{}", m_prefix, m_names.experts_down, ending), m_config.hidden_size,
               m_hidden, TensorSlice{expert, experts.count, false, m_names.rows_first, is_flat}}};
    };
    FeedForward result;
    result.gate_up = m_source.linear(gate_and_up(""), m_config.hidden_size, m_hidden);
    result.down = m_source.linear(down(""), width, own);
    if (!experts.has_biases) return result;
    result.gate_up_bias = m_source.vector(gate_and_up("_bias"));
    if (m_rank == 0) result.down_bias = m_source.vector(down("_bias"));
    return result;
  }

  void read_experts(const ExpertsConfig& experts, Layer& layer) const {
    const Ranges all = {{0, experts.routes()}};
    layer.router = m_source.linear({{named(m_names.router), experts.routes(), all}},
                                   m_config.hidden_size, m_hidden);
    if (experts.has_router_bias) {
      layer.router_bias = m_source.vector({{named(m_names.router, "bias"), experts.routes(), all}});
    }
    if (experts.has_correction) {
      TensorRows rows{m_prefix + std::string(m_names.correction), experts.routes(), all};
      if (m_names.correction_is_matrix) rows.slice = TensorSlice{};
      layer.correction = m_source.vector({rows});
    }
    for (std::int64_t e = 0; e < experts.count; ++e) {
      if (!m_names.experts_down.empty()) {
        layer.experts.push_back(fused_expert(e, experts));
        continue;
      }
      const auto of = [&](std::string_view name) { return fmt::format(fmt::runtime(name), e); };
      layer.experts.push_back(feed_forward(of(m_names.expert_gate), of(m_names.expert_up),
                                           of(m_names.expert_down), experts.intermediate_size,
                                           experts.has_biases));
    }
    if (experts.shared_intermediate_size == 0) return;
    layer.dense = m_names.shared_gate_up.empty()
                      ? feed_forward(m_names.shared, experts.shared_intermediate_size, false)
                      : feed_forward("", "", m_names.shared_down, experts.shared_intermediate_size,
                                     false, m_names.shared_gate_up);
    if (!experts.has_shared_gate) return;
    layer.shared_gate = m_source.linear({{named(m_names.shared_gate), 1, {{0, 1}}}},
                                        m_config.hidden_size, m_hidden);
  }

  const WeightSource& m_source;
  const ModelConfig& m_config;
  const HeadPartition& m_partition;
  int m_rank;
  const TensorNames& m_names;
  std::vector<std::int64_t> m_order;  // of this layer's heads
  Ranges m_hidden;
  StreamReader m_streams;
  std::string m_prefix;
};

/// Remembers the tensors that are asked for, and has none.
class RecordingStore final : public WeightStore {
 public:
  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override {
    // Slices of one tensor are asked for one by one.
    if (m_names.insert(std::string(name)).second) m_tensors.push_back({std::string(name), shape});
    return std::make_unique<NoTensor>();
  }
  bool has(std::string_view /*name*/) const override { return false; }
  std::vector<NamedTensor> take() const { return std::move(m_tensors); }

 private:
  class NoTensor final : public StoredTensor {
    void read(std::int64_t, std::int64_t, std::int64_t, std::int64_t, float*) const override {}
    std::string description() const override { return {}; }
    void release() const override {}
  };
  mutable std::vector<NamedTensor> m_tensors;
  mutable std::set<std::string> m_names;
};

}  // namespace

std::shared_ptr<Model::Weights> read_weights(const WeightSource& source, const ModelConfig& config,
                                             const HeadPartition& partition, int rank,
                                             const ProgressCallback& progress) {
  auto weights = std::make_shared<Model::Weights>();
  const Ranges all_hidden = {{0, config.hidden_size}};
  const Ranges vocabulary = {even_range(config.vocab_size, partition.n_ranks(), rank)};
  const auto report = [&](std::int64_t done) {
    if (progress) progress("load", done, config.num_hidden_layers + 1);
  };
  report(0);
  weights->first_token = vocabulary.front().first;
  const TensorNames& names = family_of(config).tensors;
  const auto rows_of = [&](std::string_view name, const char* kind) -> std::vector<TensorRows> {
    return {{fmt::format("{}.{}", name, kind), config.vocab_size, vocabulary}};
  };
  const auto table = rows_of(names.embedding, "weight");
  if (config.tie_word_embeddings) {
    weights->embedding = source.linear(table, config.hidden_size, all_hidden);
    weights->output_head = weights->embedding;
  } else {
    weights->embedding = source.table(table, config.hidden_size, all_hidden);
    weights->output_head =
        source.linear(rows_of(names.head, "weight"), config.hidden_size, all_hidden);
  }
  const std::int64_t positions = config.max_position_embeddings;
  if (config.embeds_positions && rank == 0) {
    const std::int64_t first = names.first_position, end = first + positions;
    weights->positions =
        names.has_sinusoids
            ? source.sinusoids(first, end, config.hidden_size)
            : source.matrix({{fmt::format("{}.weight", names.positions), end, {{first, end}}}},
                            config.hidden_size, all_hidden);
  }
  if (config.head_bias) weights->head_bias = source.vector(rows_of(names.head, "bias"));
  StreamReader(source, config, partition.n_ranks(), rank).read(*weights);
  LayerReader reader(source, config, partition, rank);
  weights->embedding_norm = reader.norm(names.embedding_norm);
  weights->final_norm = reader.norm(names.final_norm);
  if (!names.output_map.empty()) {
    weights->output_map = source.linear(
        {{fmt::format("{}.weight", names.output_map), config.hidden_size, all_hidden}},
        config.hidden_size, all_hidden);
    weights->output_map_norm = reader.norm(names.output_map_norm);
  }
  report(1);
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    weights->layers.push_back(reader.read(l, weights->layers));
    report(l + 2);
  }
  return weights;
}

std::vector<NamedTensor> tensors_of(const ModelConfig& config) {
  const RecordingStore store;
  WeightSource source(store, DType::f32, WeightStorage::as_stored);
  source.only_plan();
  const auto whole = HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                         static_cast<int>(config.num_key_value_heads), 1);
  read_weights(source, config, whole, 0, {});
  std::vector<NamedTensor> tensors = store.take();
  if (const auto stored_name = family_of(config).stored_name) {
    for (NamedTensor& tensor : tensors) tensor.name = stored_name(tensor.name);
  }
  return tensors;
}

}  // namespace kvzap::model
