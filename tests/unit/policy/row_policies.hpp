// Makes policies for tests, by what describes them, without a registry.
#pragma once

#include <kvzap/engine/policies.hpp>
#include <map>
#include <memory>
#include <string>

#include "unit/policy/fake_layer.hpp"

namespace kvzap::test {

using Arguments = std::map<std::string, std::string>;

/// A policy for layers like `data`, with the given parameters and the standard values of others.
inline std::unique_ptr<Policy> make_policy(const PolicyInfo& info, const LayerData& data,
                                           const Arguments& given = {}) {
  Arguments values;
  for (const PolicyParameter& parameter : info.parameters) {
    values[parameter.name] = parameter.standard;
  }
  for (const auto& [name, value] : given) values.at(name) = value;
  ModelConfig config;
  config.num_hidden_layers = data.layers;
  config.num_key_value_heads = data.kv_heads;
  config.num_attention_heads = data.query_heads();
  config.head_dim = data.head_dim;
  config.hidden_size = data.hidden_size;
  const auto partition = HeadPartition::even(data.layers, data.kv_heads, 1);
  const PolicySetup setup{config, partition, DType::f32, {}, Communicator::self()};
  return info.make(PolicyArguments(values), setup)();
}

}  // namespace kvzap::test
