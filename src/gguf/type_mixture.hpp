// The types of tensors in quantised files: the mixtures of llama.cpp's tool, by their names.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvzap::gguf {

/// A rule that gives each tensor of a model a type.
struct TypeMixture {
  /// "Q4_K_M", as llama.cpp names it.
  std::string_view name;
  /// The type of most matrices: "Q4_K".
  std::string_view main_type;
  /// The value of general.file_type.
  std::uint32_t file_type;
};

/// Returns all mixtures, from most to fewest bits.
const std::vector<TypeMixture>& type_mixtures();
/// Returns the mixture with this name in upper or lower case, or nullptr.
const TypeMixture* find_type_mixture(std::string_view name);

/// A tensor's place in its model.
struct TensorPlace {
  /// The name in GGUF files.
  std::string_view name;
  /// Layers of the model.
  std::int64_t n_layers;
  /// Extents, slowest first.
  const std::vector<std::int64_t>& shape;
  /// Whether the embedding table is also the output head.
  bool is_tied;
  /// Query heads for each KV head.
  std::int64_t heads_per_group = 1;
  /// Experts of a layer; 0 for a dense model.
  std::int64_t n_experts = 0;
};

/// Returns the name of the type that the mixture gives a tensor. Vectors, and weights of norms and
/// of routers of experts, are F32. Matrices whose rows do not hold whole blocks of the mixture's
/// type get a type that fits: Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, and F16 for rows that
/// blocks of 32 do not fit.
std::string_view tensor_type(const TypeMixture& mixture, const TensorPlace& place);

}  // namespace kvzap::gguf
