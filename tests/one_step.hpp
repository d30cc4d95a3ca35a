// A step of a small model with random weights, for tests of its blocks alone.
#pragma once

#include <kvzap/model/model.hpp>
#include <numeric>
#include <vector>

#include "engine/policy_layer.hpp"
#include "engine/step.hpp"
#include "model/cache_layers.hpp"

namespace kvzap::test {

using Numbers = std::vector<double>;

/// Float weights, one dense layer with grouped queries. Tests change what they need.
inline ModelConfig block_config() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 24;
  config.intermediate_size = 20;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.vocab_size = 19;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

/// A step of new sequences with these numbers of tokens. The caller reserves step and blocks.
struct OneStep {
  OneStep(const ModelConfig& config, const std::vector<int>& lengths,
          const HeadPartition& partition, const Communicator& comm, StepOutput output,
          DType dtype = DType::f32)
      : model(Model::load("", config, dtype, partition, comm.rank(), {17})),
        cache(DType::f32, model::cache_shape(config, partition, comm.rank(), 4, 16)),
        step(model, comm, cache) {
    for (const int length : lengths) {
      std::vector<TokenId> tokens(length);
      for (int i = 0; i < length; ++i)
        tokens[i] = (7 * i + 3) % static_cast<int>(config.vocab_size);
      batch.add(cache.add_sequence(), tokens, {}, output);
    }
    step.begin(batch);
    step.reserve();
    step.place_positions();
    std::vector<StepSpan> spans;
    for (const auto& span : batch.spans()) spans.push_back({span.sequence, span.count});
    cache.begin_step(step.exec, spans);
  }
  OneStep(const ModelConfig& config, const std::vector<int>& lengths,
          StepOutput output = StepOutput::none, DType dtype = DType::f32)
      : OneStep(config, lengths,
                HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                    static_cast<int>(config.num_key_value_heads), 1),
                Communicator::self(), output, dtype) {}

  Model model;
  KVCache cache;
  engine::Step step;
  StepBatch batch;
};

inline Numbers some_numbers(std::size_t count, double scale = 1) {
  Numbers numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<float>(scale * std::sin(static_cast<double>(i * i % 1009) + 1));
  }
  return numbers;
}

inline void fill(const linalg::Matrix& matrix, const Numbers& numbers) {
  const auto host = Kokkos::create_mirror_view(matrix);
  for (std::size_t i = 0; i < host.size(); ++i) host.data()[i] = static_cast<float>(numbers.at(i));
  Kokkos::deep_copy(matrix, host);
}

inline Numbers on_host(const linalg::ConstMatrix& matrix) {
  Kokkos::fence();
  linalg::Matrix contiguous("contiguous", matrix.extent(0), matrix.extent(1));
  Kokkos::deep_copy(contiguous, matrix);
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, contiguous);
  return {host.data(), host.data() + host.size()};
}

/// Returns weights in any layout as (input, output).
inline Numbers plain(const linalg::LinearWeights& weights) {
  const linalg::Matrix rows("weights", weights.inputs(), weights.outputs());
  engine::take_inputs(ExecutionSpace{}, weights, 0, rows);
  return on_host(rows);
}

/// Returns x (row, input) times plain weights: (row, output).
inline Numbers product(const Numbers& x, const linalg::LinearWeights& weights) {
  const Numbers w = plain(weights);
  const auto inputs = static_cast<std::size_t>(weights.inputs());
  const auto outputs = static_cast<std::size_t>(weights.outputs());
  Numbers y(x.size() / inputs * outputs);
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t k = 0; k < inputs; ++k) {
      y[i] += x[i / outputs * inputs + k] * w[k * outputs + i % outputs];
    }
  }
  return y;
}

}  // namespace kvzap::test
