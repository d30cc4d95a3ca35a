#include "gguf/type_mixture.hpp"

#include <algorithm>

#include "files/ascii.hpp"
#include "gguf/block_formats.hpp"
#include "gguf/tensor_names.hpp"

namespace kvzap::gguf {
namespace {

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

/// A matrix of a model, by its name in GGUF files.
struct Matrix {
  std::string_view name;   // without "blk.3."
  std::int64_t layer = 0;  // 0 outside of layers
};

Matrix matrix_named(std::string_view name) {
  const auto parts = parse_name_in_layer(name);
  if (!parts) return {name};
  return {name.substr(static_cast<std::size_t>(parts->tensor.data() - name.data())), parts->layer};
}

/// Returns whether the mixtures "M" give sensitive matrices of this layer more bits: in the first
/// and last eighth of the layers, and in every third of the others.
bool has_more_bits(std::int64_t layer, std::int64_t n_layers) {
  const std::int64_t eighth = n_layers / 8;
  return layer < eighth || layer >= 7 * n_layers / 8 || (layer - eighth) % 3 == 2;
}

std::string_view type_of_values(const TypeMixture& mixture, const Matrix& matrix,
                                const TensorPlace& place) {
  const bool has_medium = mixture.name == "Q4_K_M" || mixture.name == "Q5_K_M";
  const bool has_more = has_medium && has_more_bits(matrix.layer, place.n_layers);
  if (has_more) return "Q6_K";
  constexpr std::int64_t layers_of_70b = 80;
  // Its keys and values have an eighth of the heads: more bits for them cost little.
  if (place.n_layers == layers_of_70b && place.heads_per_group > 1 && mixture.main_type == "Q4_K") {
    return "Q5_K";
  }
  if (mixture.name == "IQ4_NL" && place.heads_per_group >= 4) return "Q5_K";
  return mixture.name == "Q4_K_S" && matrix.layer < 4 ? "Q5_K" : mixture.main_type;
}

std::string_view type_of_down(const TypeMixture& mixture, std::int64_t layer,
                              std::int64_t n_layers) {
  const bool begins_larger = mixture.name == "Q4_K_S" || mixture.name == "IQ4_NL";
  if (begins_larger && layer < n_layers / 8) return "Q5_K";
  const bool has_medium = mixture.name == "Q4_K_M" || mixture.name == "Q5_K_M";
  return has_medium && has_more_bits(layer, n_layers) ? "Q6_K" : mixture.main_type;
}

constexpr std::int64_t experts_of_mixtral = 8;

std::string_view type_of_output(const TypeMixture& mixture) {
  const bool has_four_bits = mixture.main_type == "Q4_K" || mixture.main_type == "IQ4_NL";
  return has_four_bits ? "Q5_K" : mixture.main_type;
}

std::string_view wanted_type(const TypeMixture& mixture, const TensorPlace& place,
                             std::string_view name) {
  constexpr std::size_t extents_of_experts = 3;
  if (mixture.name == "MXFP4_MOE") {
    return place.shape.size() == extents_of_experts ? mixture.main_type : "Q8_0";
  }
  const Matrix matrix = matrix_named(name);
  const bool has_blocks = find_block_format(mixture.main_type)->values > 1;
  const bool is_head =
      matrix.name == "output.weight" || (place.is_tied && matrix.name == "token_embd.weight");
  if (is_head && has_blocks) return mixture.main_type == "Q8_0" ? "Q8_0" : "Q6_K";
  const bool makes_values = matrix.name == "attn_v.weight" || matrix.name == "attn_qkv.weight";
  if (has_blocks && place.n_experts == experts_of_mixtral) {
    // Most of such a model is experts: more bits for attention cost little.
    if (makes_values || matrix.name == "attn_k.weight") return "Q8_0";
    if (matrix.name == "attn_output.weight") return type_of_output(mixture);
  }
  if (makes_values) return type_of_values(mixture, matrix, place);
  if (matrix.name.substr(0, 8) == "ffn_down") {
    return type_of_down(mixture, matrix.layer, place.n_layers);
  }
  return mixture.main_type;
}

bool fits(std::string_view type, const TensorPlace& place) {
  return place.shape.back() % find_block_format(type)->values == 0;
}

}  // namespace

const std::vector<TypeMixture>& type_mixtures() {
  static const std::vector<TypeMixture> mixtures = {
      {"BF16", "BF16", 32},   {"F16", "F16", 1},         {"Q8_0", "Q8_0", 7},
      {"Q6_K", "Q6_K", 18},   {"Q5_K_M", "Q5_K", 17},    {"Q5_K_S", "Q5_K", 16},
      {"Q5_1", "Q5_1", 9},    {"Q5_0", "Q5_0", 8},       {"Q4_K_M", "Q4_K", 15},
      {"Q4_K_S", "Q4_K", 14}, {"Q4_1", "Q4_1", 3},       {"IQ4_NL", "IQ4_NL", 25},
      {"Q4_0", "Q4_0", 2},    {"MXFP4_MOE", "MXFP4", 38}};
  return mixtures;
}

const TypeMixture* find_type_mixture(std::string_view name) {
  const auto& mixtures = type_mixtures();
  const auto found =
      std::find_if(mixtures.begin(), mixtures.end(), [&](const TypeMixture& mixture) {
        return std::equal(name.begin(), name.end(), mixture.name.begin(), mixture.name.end(),
                          [](char a, char b) { return files::upper(a) == b; });
      });
  return found == mixtures.end() ? nullptr : &*found;
}

std::string_view tensor_type(const TypeMixture& mixture, const TensorPlace& place) {
  if (place.shape.size() < 2 || !ends_with(place.name, ".weight")) return "F32";
  for (const char* end : {"_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight",
                          "ssm_conv1d.weight", "shortconv.conv.weight", "position_embd.weight"}) {
    if (ends_with(place.name, end)) return "F32";
  }
  for (const char* part : {"altup", "laurel", "per_layer_model_proj"}) {
    if (place.name.find(part) != place.name.npos) return "F32";
  }
  const std::string_view wanted = wanted_type(mixture, place, place.name);
  if (fits(wanted, place)) return wanted;
  const std::string_view smaller = wanted == "Q4_K"   ? "Q5_0"
                                   : wanted == "Q5_K" ? "Q5_1"
                                   : wanted == "Q6_K" ? "Q8_0"
                                                      : "F16";
  return fits(smaller, place) ? smaller : "F16";
}

}  // namespace kvzap::gguf
