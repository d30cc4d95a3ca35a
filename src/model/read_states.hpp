// Weights of layers that keep a state: gated delta nets, short convolutions, state spaces.
#pragma once

#include <array>
#include <kvzap/core/head_partition.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "model/families/family.hpp"
#include "model/model_weights.hpp"
#include "model/weights.hpp"

namespace kvzap::model {

/// Reads a rank's part of such layers' tensors, whose names begin with `prefix`, such as
/// "model.layers.3.".
class StateReader {
 public:
  /// All arguments but `rank` must outlive the reader.
  StateReader(const WeightSource& source, const ModelConfig& config, const HeadPartition& partition,
              int rank, const std::string& prefix)
      : m_source(source),
        m_config(config),
        m_partition(partition),
        m_rank(rank),
        m_names(family_of(config).tensors),
        m_hidden({{0, config.hidden_size}}),
        m_prefix(prefix) {}

  void read_delta_net(std::int64_t index, Model::Weights::Layer& layer) const;
  void read_short_convolution(std::int64_t index, Model::Weights::Layer& layer) const;
  /// The last map goes to Layer::space_out.
  void read_state_space(std::int64_t index, Model::Weights::Layer& layer) const;

 private:
  std::string named(std::string_view name, std::string_view kind = "weight") const;
  /// A rank's rows of a delta net: queries, keys and values of its key heads one after the other,
  /// values, value heads and decays.
  struct DeltaRanges {
    Ranges key_heads, channels, values, value_heads, decays;
  };
  DeltaRanges delta_ranges(const DeltaNetConfig& net, std::int64_t index) const;
  void read_delta_inputs(const DeltaNetConfig& net, const DeltaRanges& own,
                         Model::Weights::Layer& layer) const;
  void read_delta_latents(const DeltaNetConfig& net, const DeltaRanges& own,
                          Model::Weights::Layer& layer) const;
  Model::Weights::Vector lightning_decays(const DeltaNetConfig& net, std::int64_t index,
                                          const Ranges& heads) const;
  std::vector<TensorRows> delta_channels(const DeltaNetConfig& net, const Ranges& heads,
                                         const std::array<std::string_view, 3>& names) const;
  void read_mamba1(const Ranges& heads, Model::Weights::Layer& layer) const;
  void read_space_heads(const Ranges& heads, Model::Weights::Layer& layer) const;
  void read_space_ends(const Ranges& own, const Ranges& rows, Model::Weights::Layer& layer,
                       std::optional<TensorSlice> slice = std::nullopt) const;
  void read_convolution(std::vector<TensorRows> parts, std::int64_t kernel,
                        Model::Weights::Layer& layer) const;

  const WeightSource& m_source;
  const ModelConfig& m_config;
  const HeadPartition& m_partition;
  int m_rank;
  const TensorNames& m_names;
  Ranges m_hidden;
  const std::string& m_prefix;
};

}  // namespace kvzap::model
