#include <fmt/format.h>

#include <kvzap/safetensors.hpp>
#include <kvzap/surrogate.hpp>
#include <limits>
#include <nlohmann/json.hpp>

#include "detail/gemm.hpp"
#include "detail/json_file.hpp"
#include "detail/kokkos_compat.hpp"
#include "detail/scratch.hpp"
#include "detail/weights.hpp"

namespace kvzap {
namespace {

std::int64_t positive_integer(const nlohmann::json& json, const char* field,
                              const std::filesystem::path& file) {
  const auto found = json.find(field);
  if (found == json.end()) {
    throw Error(
        fmt::format("{}: field {} is missing; expected a positive integer", file.string(), field));
  }
  if (!found->is_number_integer() || found->get<std::int64_t>() < 1 ||
      found->get<std::int64_t>() > std::numeric_limits<std::int32_t>::max()) {
    throw Error(fmt::format("{}: field {} is {}; expected a positive integer", file.string(), field,
                            found->dump()));
  }
  return found->get<std::int64_t>();
}

}  // namespace

Surrogate Surrogate::load(const std::filesystem::path& folder, const ModelConfig& model,
                          const HeadPartition& partition, int rank) {
  const auto file = folder / "config.json";
  const auto json = detail::read_json_object(file);
  const auto expect = [&](const char* field, std::int64_t wanted, const char* of_model) {
    const std::int64_t found = positive_integer(json, field, file);
    if (found != wanted) {
      throw Error(
          fmt::format("{}: field {} is {}, but the model's {} is {}: the surrogate was made "
                      "for another model",
                      file.string(), field, found, of_model, wanted));
    }
  };
  expect("input_dim", model.hidden_size, "hidden_size");
  expect("output_dim", model.num_key_value_heads, "num_key_value_heads");
  expect("n_modules", model.num_hidden_layers, "num_hidden_layers");

  Surrogate surrogate;
  const auto hidden = json.find("hidden_dim");
  if (hidden != json.end() && !hidden->is_null()) {
    surrogate.m_hidden_dim = positive_integer(json, "hidden_dim", file);
  }
  const auto files = SafetensorsFolder::open(folder);
  const detail::WeightSource source(files);
  const std::int64_t hidden_dim = surrogate.m_hidden_dim;
  const detail::Ranges all_inputs = {{0, model.hidden_size}};
  const detail::Ranges all_hidden = {{0, hidden_dim}};
  for (int l = 0; l < model.num_hidden_layers; ++l) {
    detail::Ranges heads;
    for (int head : partition.heads(l, rank)) heads.emplace_back(head, head + 1);
    Layer layer;
    const std::string name = fmt::format("layers.{}", l);
    const std::int64_t outputs = model.num_key_value_heads;
    if (hidden_dim == 0) {
      layer.weight =
          source.matrix<float>(name + ".weight", outputs, model.hidden_size, heads, all_inputs);
      layer.bias = source.vector(name + ".bias", outputs, heads, 0);
    } else {
      layer.hidden_weight = source.matrix<float>(name + ".0.weight", hidden_dim, model.hidden_size,
                                                 all_hidden, all_inputs);
      layer.hidden_bias = source.vector(name + ".0.bias", hidden_dim, all_hidden, 0);
      layer.weight =
          source.matrix<float>(name + ".2.weight", outputs, hidden_dim, heads, all_hidden);
      layer.bias = source.vector(name + ".2.bias", outputs, heads, 0);
    }
    surrogate.m_layers.push_back(std::move(layer));
  }
  return surrogate;
}

void Surrogate::score(const ExecutionSpace& exec, int layer_index, std::int64_t /*first*/,
                      const InputView& hidden, const ScoreView& scores) {
  const Layer& layer = m_layers.at(layer_index);
  const std::int64_t tokens = hidden.extent(0);
  const std::int64_t heads = layer.weight.extent(0);
  if (static_cast<std::int64_t>(scores.extent(0)) != heads ||
      static_cast<std::int64_t>(scores.extent(1)) != tokens) {
    throw Error(fmt::format("surrogate: scores are ({}, {}); expected ({}, {}) = (head, token)",
                            scores.extent(0), scores.extent(1), heads, tokens));
  }
  if (tokens == 0 || heads == 0) return;
  using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  detail::LinearMap linear;
  InputView input = hidden;
  if (m_hidden_dim > 0) {
    detail::reserve_scratch(m_hidden, tokens * m_hidden_dim, "kvzap::surrogate::hidden");
    const Matrix activation(m_hidden.data(), tokens, m_hidden_dim);
    linear(exec, hidden, detail::WeightMatrix<float>(layer.hidden_weight), layer.hidden_bias,
           activation);
    // GELU in its exact form, x * Phi(x), as torch.nn.GELU computes it by default.
    Kokkos::parallel_for(
        "kvzap::surrogate::gelu", Range(exec, 0, tokens * m_hidden_dim),
        KOKKOS_LAMBDA(std::int64_t i) {
          float& x = activation.data()[i];
          x = 0.5f * x * (1.0f + detail::math::erf(x * 0.70710678f));
        });
    input = activation;
  }
  detail::reserve_scratch(m_output, tokens * heads, "kvzap::surrogate::output");
  const Matrix output(m_output.data(), tokens, heads);
  linear(exec, input, detail::WeightMatrix<float>(layer.weight), layer.bias, output);
  Kokkos::parallel_for(
      "kvzap::surrogate::transpose", Range(exec, 0, tokens * heads), KOKKOS_LAMBDA(std::int64_t i) {
        scores(i % heads, i / heads) = output(i / heads, i % heads);
      });
}

}  // namespace kvzap
