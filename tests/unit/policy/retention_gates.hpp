// Gates of TRIM-KV for tests, and their scores by plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "safetensors_writer.hpp"
#include "unit/policy/fake_layer.hpp"

namespace kvzap::test {

inline constexpr std::int64_t retention_units = 5;

/// Value i of a tensor of the gates.
inline double gate_value(double phase, std::size_t i) {
  return static_cast<double>(static_cast<float>(std::sin(0.7 * static_cast<double>(i) + phase)));
}

inline StoredTensor gate_tensor(const std::vector<std::int64_t>& shape, double phase,
                                float base = 0) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(base + static_cast<float>(gate_value(phase, static_cast<std::size_t>(i))));
  }
  return stored_tensor("F32", shape, values);
}

inline std::string retention_gate(int layer) {
  return "model.layers." + std::to_string(layer) + ".self_attn.retention_gate.";
}

/// The tensors of gates of TRIM-KV, or of DBTrimKV with a second hidden layer.
inline std::map<std::string, StoredTensor> retention_gates(bool is_deep, int layers,
                                                           std::int64_t kv_heads,
                                                           std::int64_t hidden_size) {
  const std::int64_t units = retention_units;
  std::map<std::string, StoredTensor> tensors;
  for (int l = 0; l < layers; ++l) {
    const std::string name = retention_gate(l);
    tensors[name + "linear1.weight"] = gate_tensor({units, hidden_size}, 1 + l);
    tensors[name + "linear1.bias"] = gate_tensor({units}, 2);
    if (is_deep) {
      tensors[name + "linear2.weight"] = gate_tensor({units, units}, 3);
      tensors[name + "linear2.bias"] = gate_tensor({units}, 4);
    }
    tensors[name + (is_deep ? "linear3.weight" : "linear2.weight")] =
        gate_tensor({kv_heads, units}, 5);
    tensors[name + "bias"] = gate_tensor({kv_heads}, 6, 2);
  }
  return tensors;
}

/// The log of the share of a row's worth that remains after each further token.
inline double log_retention(const LayerData& data, bool is_deep, int head, std::int64_t token) {
  constexpr std::size_t units = retention_units;
  const auto size = static_cast<std::size_t>(data.hidden_size);
  const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
  std::vector<double> hidden(units);
  for (std::size_t u = 0; u < units; ++u) {
    double sum = gate_value(2, u);
    for (std::size_t i = 0; i < size; ++i) {
      sum += gate_value(1 + data.layer, u * size + i) *
             static_cast<double>(data.hidden[static_cast<std::size_t>(token) * size + i]);
    }
    hidden[u] = silu(sum);
  }
  if (is_deep) {
    std::vector<double> second(units);
    for (std::size_t u = 0; u < units; ++u) {
      double sum = gate_value(4, u);
      for (std::size_t i = 0; i < units; ++i) sum += gate_value(3, u * units + i) * hidden[i];
      second[u] = silu(sum);
    }
    hidden = second;
  }
  const auto h = static_cast<std::size_t>(head);
  double sum = 2 + gate_value(6, h);
  for (std::size_t i = 0; i < units; ++i) sum += gate_value(5, h * units + i) * hidden[i];
  return -std::log1p(std::exp(-sum));
}

/// (head, row): age times log retention.
inline std::vector<std::vector<double>> retentions(const LayerData& data, bool is_deep) {
  std::vector<std::vector<double>> scores;
  for (int h = 0; h < data.kv_heads; ++h) {
    scores.emplace_back();
    for (const std::int64_t position : data.positions[h]) {
      scores.back().push_back(static_cast<double>(data.tokens + 1 - position) *
                              log_retention(data, is_deep, h, position));
    }
  }
  return scores;
}

}  // namespace kvzap::test
