#include "model/read_states.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvzap::model {
namespace {

std::string in_block(std::string_view block, std::string_view name) {
  return fmt::format("{}.{}", block, name);
}

Model::Weights::Indices indices(const std::vector<int>& values) {
  Model::Weights::Indices result("kvzap::weights::indices", values.size());
  const auto host = Kokkos::create_mirror_view(result);
  std::copy(values.begin(), values.end(), host.data());
  Kokkos::deep_copy(result, host);
  return result;
}

Model::Weights::Vector exponentials(const Model::Weights::Vector& logs) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), logs);
  for (std::size_t i = 0; i < host.size(); ++i) host(i) = std::exp(host(i));
  Kokkos::deep_copy(logs, host);
  return logs;
}

/// Returns the columns of a matrix, one after the other.
Model::Weights::Vector columns_of(
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& matrix) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), matrix);
  Model::Weights::Vector result("kvzap::weights::columns", matrix.size());
  const auto columns = Kokkos::create_mirror_view(result);
  for (std::size_t row = 0; row < host.extent(0); ++row) {
    for (std::size_t c = 0; c < host.extent(1); ++c) {
      columns(c * host.extent(0) + row) = host(row, c);
    }
  }
  Kokkos::deep_copy(result, columns);
  return result;
}

Ranges scaled(const Ranges& ranges, std::int64_t factor) {
  Ranges result;
  for (const auto& [begin, end] : ranges) result.emplace_back(begin * factor, end * factor);
  return result;
}

/// Returns the numbers of the groups of `size` indices that ranges touch, each with its part of
/// them.
std::vector<std::pair<std::int64_t, Ranges>> by_group(const Ranges& ranges, std::int64_t size) {
  std::vector<std::pair<std::int64_t, Ranges>> groups;
  for (const auto& [begin, end] : ranges) {
    for (std::int64_t first = begin; first < end;) {
      const std::int64_t number = first / size, last = std::min(end, (number + 1) * size);
      if (groups.empty() || groups.back().first != number) groups.emplace_back(number, Ranges());
      groups.back().second.emplace_back(first, last);
      first = last;
    }
  }
  return groups;
}

/// Returns the rates of Mamba-1's channels, head by head as (state_dim, dim), from the logarithms
/// (channel, state_dim).
Model::Weights::Vector rates_of_channels(
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& logs, std::int64_t dim) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), logs);
  const auto state_dim = static_cast<std::int64_t>(host.extent(1));
  Model::Weights::Vector result("kvzap::weights::rates", logs.size());
  const auto rates = Kokkos::create_mirror_view(result);
  for (std::int64_t c = 0; c < static_cast<std::int64_t>(host.extent(0)); ++c) {
    for (std::int64_t n = 0; n < state_dim; ++n) {
      rates((c / dim * state_dim + n) * dim + c % dim) = std::exp(host(c, n));
    }
  }
  Kokkos::deep_copy(result, rates);
  return result;
}

}  // namespace

std::string StateReader::named(std::string_view name, std::string_view kind) const {
  return fmt::format("{}{}.{}", m_prefix, name, kind);
}

StateReader::DeltaRanges StateReader::delta_ranges(const DeltaNetConfig& net,
                                                   std::int64_t index) const {
  const std::int64_t key = net.key_dim, group = net.group(), values = group * net.value_dim;
  const std::int64_t keys = net.key_heads * key;  // rows of all queries, and of all keys
  DeltaRanges own;
  own.key_heads = m_partition.state_heads(static_cast<int>(index), m_rank, net.key_heads);
  for (const auto& [begin, end] : own.key_heads) {
    for (std::int64_t h = begin; h < end; ++h) {
      own.channels.emplace_back(h * key, (h + 1) * key);
      own.channels.emplace_back(keys + h * key, keys + (h + 1) * key);
      own.channels.emplace_back(2 * keys + h * values, 2 * keys + (h + 1) * values);
      own.values.emplace_back(h * values, (h + 1) * values);
      own.value_heads.emplace_back(h * group, (h + 1) * group);
      own.decays.emplace_back(h * group * net.decays(), (h + 1) * group * net.decays());
    }
  }
  return own;
}

void StateReader::read_delta_net(std::int64_t index, Model::Weights::Layer& layer) const {
  const DeltaNetConfig& net = *m_config.delta_net;
  const std::int64_t all_values = net.value_heads * net.value_dim;
  const DeltaRanges own = delta_ranges(net, index);
  layer.o = m_source.linear({{named(m_names.delta_output), m_config.hidden_size, m_hidden}},
                            all_values, own.values);
  read_delta_inputs(net, own, layer);
  const std::string norm = named(m_names.delta_norm);
  if (net.kind == DeltaNetConfig::Kind::lightning) {
    layer.delta_norm = m_source.vector({{norm, all_values, own.values}});
    layer.delta_decay_rates = lightning_decays(net, index, own.key_heads);
    return;
  }
  layer.delta_norm = m_source.vector({{norm, net.value_dim, {{0, net.value_dim}}}});
  const std::int64_t channels = net.key_heads * net.channels();
  read_convolution(
      m_names.delta_maps.front().empty()
          ? std::vector<TensorRows>{{named("linear_attn.conv1d"), channels, own.channels}}
          : delta_channels(net, own.key_heads, m_names.delta_convolutions),
      net.kernel, layer);
  TensorRows rates{m_prefix + std::string(m_names.delta_decay_rates), net.value_heads,
                   own.value_heads};
  rates.is_column = m_names.delta_decay_rates_are_column;
  layer.delta_decay_rates = exponentials(m_source.vector({rates}));
  layer.delta_decay_shifts = m_source.vector({{m_prefix + std::string(m_names.delta_decay_shifts),
                                               net.value_heads * net.decays(), own.decays}});
}

// The first maps.
void StateReader::read_delta_inputs(const DeltaNetConfig& net, const DeltaRanges& own,
                                    Model::Weights::Layer& layer) const {
  const bool is_lightning = net.kind == DeltaNetConfig::Kind::lightning;
  const std::int64_t group = net.group(), values = group * net.value_dim;
  const std::int64_t channels = net.key_heads * net.channels();
  // Rows in tensors that have a block for each key head.
  const std::int64_t block = net.channels() + (is_lightning ? 0 : values);
  Ranges channels_in_blocks, values_in_blocks, b_rows, a_rows;
  for (const auto& [begin, end] : own.key_heads) {
    for (std::int64_t h = begin; h < end; ++h) {
      channels_in_blocks.emplace_back(h * block, h * block + net.channels());
      values_in_blocks.emplace_back(h * block + net.channels(), (h + 1) * block);
      b_rows.emplace_back(2 * h * group, (2 * h + 1) * group);
      a_rows.emplace_back((2 * h + 1) * group, (2 * h + 2) * group);
    }
  }
  std::vector<TensorRows> in = {{named("linear_attn.in_proj_qkv"), channels, own.channels}};
  if (!m_names.delta_maps.front().empty()) {
    in = delta_channels(net, own.key_heads, m_names.delta_maps);
  }
  const TensorRows gates{named(m_names.delta_gates), net.value_heads * net.value_dim, own.values};
  std::vector<TensorRows> rates = {
      {named(m_names.delta_strengths), net.value_heads, own.value_heads}};
  if (!m_names.delta_qkvz.empty()) {
    in = {{named(m_names.delta_qkvz), net.key_heads * block, channels_in_blocks}};
  }
  if (net.gate_rank == 0) {
    const bool is_in_block = !m_names.delta_qkvz.empty() && !is_lightning;
    in.push_back(is_in_block ? TensorRows{in.front().name, in.front().extent, values_in_blocks}
                             : gates);
    rates.push_back({named(m_names.delta_decays), net.value_heads * net.decays(), own.decays});
  }
  if (!m_names.delta_ba.empty()) {
    rates = {{named(m_names.delta_ba), 2 * net.value_heads, b_rows},
             {named(m_names.delta_ba), 2 * net.value_heads, a_rows}};
  }
  layer.delta_in = m_source.linear(in, m_config.hidden_size, m_hidden);
  if (!is_lightning) layer.delta_rates = m_source.linear(rates, m_config.hidden_size, m_hidden);
  if (net.gate_rank > 0) read_delta_latents(net, own, layer);
}

// Decays and gates as maps of latents.
void StateReader::read_delta_latents(const DeltaNetConfig& net, const DeltaRanges& own,
                                     Model::Weights::Layer& layer) const {
  const Ranges rank = {{0, net.gate_rank}};
  layer.delta_latents = m_source.linear({{named(m_names.delta_decay_latents), net.gate_rank, rank},
                                         {named(m_names.delta_gate_latents), net.gate_rank, rank}},
                                        m_config.hidden_size, m_hidden);
  layer.delta_decays_out =
      m_source.linear({{named(m_names.delta_decays), net.value_heads * net.decays(), own.decays}},
                      net.gate_rank, rank);
  layer.delta_gates_out =
      m_source.linear({{named(m_names.delta_gates), net.value_heads * net.value_dim, own.values}},
                      net.gate_rank, rank);
}

// The decays of lightning attention: exp(-s) with the slope s = 2^(-8 (h + 1) / heads) of ALiBi
// (arXiv 2108.12409), times a factor that falls from the first layer to the last one.
Model::Weights::Vector StateReader::lightning_decays(const DeltaNetConfig& net, std::int64_t index,
                                                     const Ranges& heads) const {
  constexpr double least = 1e-5;
  const Model::Weights::Vector decays = m_source.ones(total(heads));
  const auto host = Kokkos::create_mirror_view(decays);
  if (host.size() == 0) return decays;
  const double of_layer = 1 - static_cast<double>(index) /
                                  (static_cast<double>(m_config.num_hidden_layers) - 1 + least);
  std::size_t i = 0;
  for (const auto& [begin, end] : heads) {
    for (std::int64_t h = begin; h < end; ++h) {
      const double slope =
          std::exp2(-8 * static_cast<double>(h + 1) / static_cast<double>(net.key_heads));
      host(i++) = static_cast<float>(std::exp(-slope * (of_layer + least)));
    }
  }
  Kokkos::deep_copy(decays, host);
  return decays;
}

// The channels of each of these key heads, from a tensor for each kind.
std::vector<TensorRows> StateReader::delta_channels(
    const DeltaNetConfig& net, const Ranges& heads,
    const std::array<std::string_view, 3>& names) const {
  std::vector<TensorRows> parts;
  const std::int64_t key = net.key_dim, values = net.group() * net.value_dim;
  for (const auto& [begin, end] : heads) {
    for (std::int64_t h = begin; h < end; ++h) {
      for (std::size_t kind = 0; kind < names.size(); ++kind) {
        const std::int64_t rows = kind < 2 ? key : values;
        parts.push_back({named(names[kind]), net.key_heads * rows, {{h * rows, (h + 1) * rows}}});
      }
    }
  }
  return parts;
}

void StateReader::read_short_convolution(std::int64_t index, Model::Weights::Layer& layer) const {
  const std::int64_t hidden = m_config.hidden_size;
  const bool has_bias = m_config.short_convolution->has_bias;
  const Ranges own = m_partition.state_heads(static_cast<int>(index), m_rank, hidden);
  Ranges rows = own;  // of b, then c, then x
  append_shifted(rows, own, hidden);
  append_shifted(rows, own, 2 * hidden);
  const auto of = [&](const char* name, const char* kind) {
    return named(in_block(m_names.short_convolution, name), kind);
  };
  layer.mixer_in = m_source.linear({{of("in_proj", "weight"), 3 * hidden, rows}}, hidden, m_hidden);
  read_convolution({{of("conv", "weight"), hidden, own}}, m_config.short_convolution->kernel,
                   layer);
  layer.o = m_source.linear({{of("out_proj", "weight"), hidden, m_hidden}}, hidden, own);
  if (!has_bias) return;
  layer.mixer_in_bias = m_source.vector({{of("in_proj", "bias"), 3 * hidden, rows}});
  layer.convolution_bias = m_source.vector({{of("conv", "bias"), hidden, own}});
  if (m_rank == 0) layer.o_bias = m_source.vector({{of("out_proj", "bias"), hidden, m_hidden}});
}

void StateReader::read_convolution(std::vector<TensorRows> parts, std::int64_t kernel,
                                   Model::Weights::Layer& layer) const {
  for (TensorRows& part : parts) part.is_convolution = true;
  layer.convolution = columns_of(m_source.matrix(parts, kernel, {{0, kernel}}));
}

// Sets the groups of this rank's heads.
void StateReader::read_space_heads(const Ranges& heads, Model::Weights::Layer& layer) const {
  if (m_source.only_plans()) return;  // the number of heads may be any
  std::vector<int> first_heads, group_of_head, numbers;
  for (const auto& [number, of_group] : by_group(heads, m_config.state_space->heads_of_group())) {
    first_heads.push_back(static_cast<int>(group_of_head.size()));
    numbers.push_back(static_cast<int>(number));
    group_of_head.resize(group_of_head.size() + static_cast<std::size_t>(total(of_group)),
                         static_cast<int>(numbers.size()) - 1);
  }
  first_heads.push_back(static_cast<int>(group_of_head.size()));
  layer.space_heads = indices(first_heads);
  layer.space_group = indices(group_of_head);
  layer.space_numbers = indices(numbers);
}

void StateReader::read_state_space(std::int64_t index, Model::Weights::Layer& layer) const {
  const StateSpaceConfig& space = *m_config.state_space;
  const std::int64_t dim = space.head_dim, inner = space.inner_size();
  const std::int64_t of_groups = space.groups * space.state_dim;  // rows of all B, and of all C
  const Ranges heads = m_partition.state_heads(static_cast<int>(index), m_rank, space.heads);
  const Ranges own = scaled(heads, dim);  // channels of this rank's heads
  read_space_heads(heads, layer);
  if (space.is_mamba1()) return read_mamba1(heads, layer);
  Ranges channels = own;  // of the convolution: x, then B and C of each group
  for (const auto& [number, of_group] : by_group(heads, space.heads_of_group())) {
    const std::int64_t b = inner + number * space.state_dim, c = b + of_groups;
    channels.emplace_back(b, b + space.state_dim);
    channels.emplace_back(c, c + space.state_dim);
  }
  Ranges rows;  // of the first map: those channels, then z and d
  append_shifted(rows, channels, inner);
  append_shifted(rows, own, 0);
  append_shifted(rows, heads, 2 * inner + 2 * of_groups);
  const auto of = [&](const char* name, const char* kind) {
    return named(in_block(m_names.state_space, name), kind);
  };
  const auto of_heads = [&](const char* name) {
    return m_source.vector(
        {{fmt::format("{}{}.{}", m_prefix, m_names.state_space, name), space.heads, heads}});
  };
  const std::int64_t all_channels = inner + 2 * of_groups;
  read_convolution({{of("conv1d", "weight"), all_channels, channels}}, space.kernel, layer);
  if (space.has_convolution_bias) {
    layer.convolution_bias = m_source.vector({{of("conv1d", "bias"), all_channels, channels}});
  }
  layer.space_rates = exponentials(of_heads("A_log"));
  layer.space_skips = of_heads("D");
  layer.space_shifts = of_heads("dt_bias");
  if (space.gating != StateSpaceConfig::Gating::gate) {
    layer.space_norm = m_source.vector({{of("norm", "weight"), inner, own}});
  }
  read_space_ends(own, rows, layer);
}

// The first and the last map of a state space. own: this rank's channels, rows: those of the first,
// whose place in its tensor `slice` gives.
void StateReader::read_space_ends(const Ranges& own, const Ranges& rows,
                                  Model::Weights::Layer& layer,
                                  std::optional<TensorSlice> slice) const {
  const StateSpaceConfig& space = *m_config.state_space;
  const auto of = [&](const char* name, const char* kind) {
    return named(in_block(m_names.state_space, name), kind);
  };
  layer.mixer_in = m_source.linear({{of("in_proj", "weight"), space.projections(), rows, slice}},
                                   m_config.hidden_size, m_hidden);
  layer.space_out = m_source.linear({{of("out_proj", "weight"), m_config.hidden_size, m_hidden}},
                                    space.inner_size(), own);
  if (!space.has_projection_bias) return;
  layer.mixer_in_bias =
      m_source.vector({{of("in_proj", "bias"), space.projections(), rows, slice}});
  if (m_rank == 0) {
    layer.space_out_bias =
        m_source.vector({{of("out_proj", "bias"), m_config.hidden_size, m_hidden}});
  }
}

void StateReader::read_mamba1(const Ranges& heads, Model::Weights::Layer& layer) const {
  const StateSpaceConfig& space = *m_config.state_space;
  const std::int64_t inner = space.inner_size(), of_group = inner / space.groups;
  const Ranges own = scaled(heads, space.head_dim);
  const std::string block = m_prefix + std::string(m_names.state_space) + ".";
  const auto named_in_block = [&](std::string_view name) { return block + std::string(name); };
  const bool is_by_group = m_names.space_by_group;

  Ranges rows = own;  // of the first map: channels, then gates
  append_shifted(rows, own, inner);
  const auto groups = by_group(own, of_group);  // this rank's channels
  // The channels of a group as rows or columns of a tensor, and the tensor's part that has them.
  const std::int64_t extent = is_by_group ? of_group : inner;
  const auto within = [&](std::int64_t number, const Ranges& channels) {
    Ranges result;
    append_shifted(result, channels, is_by_group ? -number * of_group : 0);
    return result;
  };
  const auto slice_of = [&](std::int64_t number) {
    return is_by_group ? std::optional(TensorSlice{number, space.groups, false, true})
                       : std::nullopt;
  };
  const auto of_channels = [&](std::string_view name) {
    std::vector<TensorRows> parts;
    for (const auto& [number, channels] : groups) {
      parts.push_back({named_in_block(name), extent, within(number, channels), slice_of(number)});
    }
    return parts;
  };
  for (const auto& [number, channels] : groups) {
    const std::int64_t rank = space.step_rank, latents = space.latents();
    Model::Weights::SpaceGroup group;
    group.number = number;
    group.latents = m_source.linear(
        {{named_in_block(m_names.space_latents), latents, {{0, latents}}, slice_of(number)}},
        extent, within(number, channels));
    group.steps = m_source.linear(
        {{named_in_block(m_names.space_steps), extent, within(number, channels), slice_of(number)}},
        rank, {{0, rank}});
    layer.space_groups.push_back(std::move(group));
  }
  const std::int64_t state_dim = space.state_dim;
  layer.space_rates = rates_of_channels(
      m_source.matrix(of_channels("A_log"), state_dim, {{0, state_dim}}), space.head_dim);
  layer.space_skips = m_source.vector(of_channels("D"));
  layer.space_shifts = m_source.vector(of_channels(m_names.space_shifts));
  read_convolution({{named_in_block("conv1d.weight"), inner, own}}, space.kernel, layer);
  if (space.has_convolution_bias) {
    layer.convolution_bias = m_source.vector({{named_in_block("conv1d.bias"), inner, own}});
  }
  if (space.norms_latents) {
    const auto norm = [&](const char* name, std::int64_t size) {
      return TensorRows{named_in_block(name), size, {{0, size}}};
    };
    layer.latent_norm = m_source.vector({norm("dt_layernorm.weight", space.step_rank),
                                         norm("b_layernorm.weight", state_dim),
                                         norm("c_layernorm.weight", state_dim)});
  }
  // With groups, the row of a channel and that of its gate follow one another.
  const TensorSlice alternating{0, 0, true, true};
  read_space_ends(own, rows, layer, is_by_group ? std::optional(alternating) : std::nullopt);
}

}  // namespace kvzap::model
