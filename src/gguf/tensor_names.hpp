// Names of tensors in GGUF files and in checkpoints of Hugging Face.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gguf/architectures.hpp"

namespace kvzap::gguf {

/// The place in a GGUF file of a tensor of Hugging Face's checkpoints.
struct TensorName {
  std::string name;
  /// Set if the tensor is one of several that the file has in one tensor (number, rows, columns),
  /// such as those of experts: its number.
  std::optional<std::int64_t> expert = std::nullopt;
};

/// Returns the place of the tensor that checkpoints of Hugging Face call `name`:
/// "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight", and number 5 of
/// "blk.3.ffn_up_exps.weight" for "model.layers.3.mlp.experts.5.up_proj.weight". Returns nothing
/// for a name that the architecture does not have.
std::optional<TensorName> gguf_name(const Architecture& architecture, std::string_view name);

/// Returns the places of a tensor of all experts, such as
/// "model.layers.3.mlp.experts.gate_up_proj": those of the maps whose rows each expert joins, with
/// shapes (experts, rows, columns). Names of biases end with "_bias"; their shapes are (experts,
/// rows). Returns an empty list for another name.
std::vector<std::string> fused_expert_names(const Architecture& architecture,
                                            std::string_view name);

/// Returns the places of the gate and the up projection that a shared expert joins, or a dense part
/// in models without experts, "model.layers.3.shared_mlp.input_linear.weight". Returns an empty
/// list for another name.
std::vector<std::string> shared_input_names(const Architecture& architecture,
                                            std::string_view name);

/// Returns the places of the tensor with the queries, keys, values and gates of a delta net,
/// "model.layers.3.linear_attn.in_proj_qkvz.weight": those of the queries, keys and values and of
/// the gates, then that of all in older files. Returns an empty list for another name.
std::vector<std::string> delta_input_names(const Architecture& architecture, std::string_view name);

/// Returns the places of the maps that make keys and values of a latent,
/// "model.layers.3.self_attn.kv_b_proj.weight": those of keys, of shape (heads, latent dimensions,
/// key dimensions), and of values, of shape (heads, value dimensions, latent dimensions). Returns
/// an empty list for another name, and if files of the architecture do not divide the tensor. Older
/// files do not: gguf_name().
std::vector<std::string> latent_map_names(const Architecture& architecture, std::string_view name);

/// Returns the whole key of the metadata that holds the parameter of a layer's activation
/// "model.layers.3.mlp.act_fn.alpha_n", and the layer. Returns nothing for another name.
std::optional<std::pair<std::string, std::int64_t>> activation_key(const Architecture& architecture,
                                                                   std::string_view name);

/// Returns the name of the file's tensor that has the first rows of the checkpoint's tensor `name`,
/// whether or not the file divides that tensor. Returns `name` if the architecture lacks it.
std::string first_gguf_name(const Architecture& architecture, std::string_view name);

/// Returns the name that older files use for the tensor of one expert: "blk.3.ffn_up.5.weight" for
/// number 5 of "blk.3.ffn_up_exps.weight".
std::string older_expert_name(const TensorName& place);

/// The parts of a GGUF name of a layer's tensor.
struct NameInLayer {
  std::int64_t layer = 0;
  std::string_view tensor;  // "attn_q"
  std::string_view kind;    // "weight", "bias" or "scale"; "" of a name without an ending, "ssm_a"
};

/// Returns the parts of "blk.3.attn_q.weight"; nothing for a name of another form.
std::optional<NameInLayer> parse_name_in_layer(std::string_view name);

/// Returns whether the tensor, named without "blk.3." and ".weight", is one of experts:
/// "ffn_up_exps", or "ffn_up.5" as in older files.
bool is_of_experts(std::string_view tensor);

/// Returns GGUF's name of a tensor of layer `layer`: "blk.3.attn_q.weight" for "attn_q.weight".
std::string name_in_layer(std::int64_t layer, std::string_view name);

}  // namespace kvzap::gguf
