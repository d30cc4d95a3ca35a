#include "gguf/tensor_names.hpp"

#include <fmt/format.h>

#include <charconv>
#include <utility>

namespace kvzap::gguf {
namespace {

using NamePair = std::pair<std::string_view, std::string_view>;  // Hugging Face, GGUF

constexpr NamePair whole_names[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
    {"model.norm.bias", "output_norm.bias"},
    {"model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"},
    {"model.per_layer_model_projection.weight", "per_layer_model_proj.weight"},
    {"model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"},
    {"model.embedding_norm.weight", "token_embd_norm.weight"},
    {"backbone.embeddings.weight", "token_embd.weight"},
    {"backbone.norm_f.weight", "output_norm.weight"},
    {"model.final_layernorm.weight", "output_norm.weight"},
    {"model.final_layernorm.bias", "output_norm.bias"},
    {"lm_head.bias", "output.bias"},
    {"gpt_neox.embed_in.weight", "token_embd.weight"},
    {"gpt_neox.final_layer_norm.weight", "output_norm.weight"},
    {"gpt_neox.final_layer_norm.bias", "output_norm.bias"},
    {"embed_out.weight", "output.weight"},
    {"transformer.word_embeddings.weight", "token_embd.weight"},
    {"transformer.wte.weight", "token_embd.weight"},
    {"transformer.norm_f.weight", "output_norm.weight"},
    {"transformer.wpe.weight", "position_embd.weight"},
    {"transformer.ln_f.weight", "output_norm.weight"},
    {"transformer.ln_f.bias", "output_norm.bias"}};

// Whole names of tensors that are one in files; {} is a number.
constexpr NamePair stacked_names[] = {
    {"model.altup_projections.{}.weight", "altup_proj.weight"},
    {"model.altup_unembed_projections.{}.weight", "altup_unembd_proj.weight"}};

// Without ".weight" and ".bias"; {} is an expert's number. An architecture uses the first pair
// whose second name it has.
constexpr NamePair layer_names[] = {{"input_layernorm", "attn_norm"},
                                    {"self_attn.q_proj", "attn_q"},
                                    {"self_attn.k_proj", "attn_k"},
                                    {"self_attn.v_proj", "attn_v"},
                                    {"self_attn.qkv_proj", "attn_qkv"},
                                    {"self_attn.o_proj", "attn_output"},
                                    {"self_attn.q_a_proj", "attn_q_a"},
                                    {"self_attn.q_a_layernorm", "attn_q_a_norm"},
                                    {"self_attn.q_b_proj", "attn_q_b"},
                                    {"self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"},
                                    {"self_attn.kv_a_layernorm", "attn_kv_a_norm"},
                                    {"self_attn.kv_b_proj", "attn_kv_b"},
                                    {"self_attn.q_norm", "attn_q_norm"},
                                    {"self_attn.k_norm", "attn_k_norm"},
                                    {"post_attention_layernorm", "ffn_norm"},
                                    {"post_attention_layernorm", "post_attention_norm"},
                                    {"post_self_attn_layernorm", "post_attention_norm"},
                                    {"pre_feedforward_layernorm", "ffn_norm"},
                                    {"post_feedforward_layernorm", "post_ffw_norm"},
                                    {"post_mlp_layernorm", "post_ffw_norm"},
                                    {"mlp.gate_proj", "ffn_gate"},
                                    {"mlp.up_proj", "ffn_up"},
                                    {"mlp.gate_up_proj", "ffn_up"},
                                    {"mlp.down_proj", "ffn_down"},
                                    {"mlp.gate", "ffn_gate_inp"},
                                    {"mlp.router", "ffn_gate_inp"},
                                    {"mlp.experts.{}.gate_proj", "ffn_gate_exps"},
                                    {"mlp.experts.{}.up_proj", "ffn_up_exps"},
                                    {"mlp.experts.{}.down_proj", "ffn_down_exps"},
                                    {"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
                                    {"mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
                                    {"mlp.shared_expert.up_proj", "ffn_up_shexp"},
                                    {"mlp.shared_expert.down_proj", "ffn_down_shexp"},
                                    {"mlp.shared_experts.gate_proj", "ffn_gate_shexp"},
                                    {"mlp.shared_experts.up_proj", "ffn_up_shexp"},
                                    {"mlp.shared_experts.down_proj", "ffn_down_shexp"},
                                    {"feed_forward.gate_proj", "ffn_gate"},
                                    {"feed_forward.up_proj", "ffn_up"},
                                    {"feed_forward.down_proj", "ffn_down"},
                                    {"feed_forward.router", "ffn_gate_inp"},
                                    {"feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"},
                                    {"feed_forward.shared_expert.up_proj", "ffn_up_shexp"},
                                    {"feed_forward.shared_expert.down_proj", "ffn_down_shexp"},
                                    {"share_expert.gate_proj", "ffn_gate_shexp"},
                                    {"share_expert.up_proj", "ffn_up_shexp"},
                                    {"share_expert.down_proj", "ffn_down_shexp"},
                                    {"moe.gate", "ffn_gate_inp"},
                                    {"block_sparse_moe.gate", "ffn_gate_inp"},
                                    {"block_sparse_moe.experts.{}.w1", "ffn_gate_exps"},
                                    {"block_sparse_moe.experts.{}.w3", "ffn_up_exps"},
                                    {"block_sparse_moe.experts.{}.w2", "ffn_down_exps"},
                                    {"linear_attn.in_proj_qkv", "attn_qkv"},
                                    {"linear_attn.in_proj_z", "attn_gate"},
                                    {"linear_attn.in_proj_a", "ssm_alpha"},
                                    {"linear_attn.in_proj_b", "ssm_beta"},
                                    {"linear_attn.in_proj_ba", "ssm_ba"},
                                    {"linear_attn.conv1d", "ssm_conv1d"},
                                    {"linear_attn.norm", "ssm_norm"},
                                    {"linear_attn.out_proj", "ssm_out"},
                                    {"attention_layernorm", "attn_norm"},
                                    {"feedforward_layernorm", "ffn_norm"},
                                    {"self_attn.attn_sub_norm", "attn_sub_norm"},
                                    {"mlp.ffn_sub_norm", "ffn_sub_norm"},
                                    {"per_layer_input_gate", "inp_gate"},
                                    {"per_layer_projection", "proj"},
                                    {"post_per_layer_input_norm", "post_norm"},
                                    {"altup.router_norm", "altup_router_norm"},
                                    {"altup.modality_router", "altup_router"},
                                    {"altup.prediction_coefs", "altup_predict_coef"},
                                    {"altup.correction_coefs", "altup_correct_coef"},
                                    {"laurel.linear_left", "laurel_l"},
                                    {"laurel.linear_right", "laurel_r"},
                                    {"laurel.post_laurel_norm", "laurel_post_norm"},
                                    {"post_feedforward_layernorm_1", "post_ffw_norm_1"},
                                    {"pre_feedforward_layernorm_2", "pre_ffw_norm_2"},
                                    {"post_feedforward_layernorm_2", "post_ffw_norm_2"},
                                    {"router.proj", "ffn_gate_inp"},
                                    {"experts.{}.gate_proj", "ffn_gate_exps"},
                                    {"experts.{}.up_proj", "ffn_up_exps"},
                                    {"experts.{}.down_proj", "ffn_down_exps"},
                                    {"operator_norm", "attn_norm"},
                                    {"ffn_norm", "ffn_norm"},
                                    {"norm", "attn_norm"},
                                    {"self_attn.out_proj", "attn_output"},
                                    {"self_attn.q_layernorm", "attn_q_norm"},
                                    {"self_attn.k_layernorm", "attn_k_norm"},
                                    {"conv.in_proj", "shortconv.in_proj"},
                                    {"conv.conv", "shortconv.conv"},
                                    {"conv.out_proj", "shortconv.out_proj"},
                                    {"feed_forward.w1", "ffn_gate"},
                                    {"feed_forward.w3", "ffn_up"},
                                    {"feed_forward.w2", "ffn_down"},
                                    {"feed_forward.gate", "ffn_gate_inp"},
                                    {"feed_forward.experts.{}.w1", "ffn_gate_exps"},
                                    {"feed_forward.experts.{}.w3", "ffn_up_exps"},
                                    {"feed_forward.experts.{}.w2", "ffn_down_exps"},
                                    {"mamba.in_proj", "ssm_in"},
                                    {"mamba.conv1d", "ssm_conv1d"},
                                    {"mamba.norm", "ssm_norm"},
                                    {"mamba.out_proj", "ssm_out"},
                                    {"mamba.x_proj", "ssm_x"},
                                    {"mamba.dt_proj", "ssm_dt"},
                                    {"mamba.dt_layernorm", "ssm_dt_norm"},
                                    {"mamba.b_layernorm", "ssm_b_norm"},
                                    {"mamba.c_layernorm", "ssm_c_norm"},
                                    {"feed_forward.experts.{}.gate_proj", "ffn_gate_exps"},
                                    {"feed_forward.experts.{}.up_proj", "ffn_up_exps"},
                                    {"feed_forward.experts.{}.down_proj", "ffn_down_exps"},
                                    {"mixer.in_proj", "ssm_in"},
                                    {"mixer.conv1d", "ssm_conv1d"},
                                    {"mixer.norm", "ssm_norm"},
                                    {"mixer.out_proj", "ssm_out"},
                                    {"mixer.q_proj", "attn_q"},
                                    {"mixer.k_proj", "attn_k"},
                                    {"mixer.v_proj", "attn_v"},
                                    {"mixer.o_proj", "attn_output"},
                                    {"mixer.up_proj", "ffn_up"},
                                    {"mixer.down_proj", "ffn_down"},
                                    {"mixer.gate", "ffn_gate_inp"},
                                    {"mixer.experts.{}.up_proj", "ffn_up_exps"},
                                    {"mixer.experts.{}.down_proj", "ffn_down_exps"},
                                    {"mixer.shared_experts.up_proj", "ffn_up_shexp"},
                                    {"mixer.shared_experts.down_proj", "ffn_down_shexp"},
                                    {"self_attn.dense", "attn_output"},
                                    {"mlp.fc1", "ffn_up"},
                                    {"mlp.fc2", "ffn_down"},
                                    {"mlp.c_fc", "ffn_up"},
                                    {"mlp.c_proj", "ffn_down"},
                                    {"ln_mlp", "attn_norm"},
                                    {"ln_attn", "attn_norm_2"},
                                    {"self_attention.query_key_value", "attn_qkv"},
                                    {"self_attention.dense", "attn_output"},
                                    {"attention.query_key_value", "attn_qkv"},
                                    {"attention.dense", "attn_output"},
                                    {"mlp.dense_h_to_4h", "ffn_up"},
                                    {"mlp.dense_4h_to_h", "ffn_down"},
                                    {"self_attn.query_layernorm", "attn_q_norm"},
                                    {"self_attn.key_layernorm", "attn_k_norm"},
                                    {"self_attn.gate_proj", "attn_gate"},
                                    {"self_attn.g_proj", "attn_gate"},
                                    {"pre_mlp_layernorm", "ffn_norm"},
                                    {"block_sparse_moe.router.layer", "ffn_gate_inp"},
                                    {"block_sparse_moe.router", "ffn_gate_inp"},
                                    {"mlp.router.gate", "ffn_gate_inp"},
                                    {"mlp.gate.wg", "ffn_gate_inp"},
                                    {"ffn.router.layer", "ffn_gate_inp"},
                                    {"shared_mlp.input_linear", "ffn_gate_shexp"},
                                    {"shared_mlp.output_linear", "ffn_down_shexp"},
                                    {"shared_mlp.output_linear", "ffn_down"},
                                    {"mlp.shared_mlp.gate_proj", "ffn_gate_shexp"},
                                    {"mlp.shared_mlp.up_proj", "ffn_up_shexp"},
                                    {"mlp.shared_mlp.down_proj", "ffn_down_shexp"},
                                    {"attn.attention.q_proj", "attn_q"},
                                    {"attn.attention.k_proj", "attn_k"},
                                    {"attn.attention.v_proj", "attn_v"},
                                    {"attn.attention.out_proj", "attn_output"},
                                    {"mlp.c_fc_0", "ffn_gate"},
                                    {"mlp.c_fc_1", "ffn_up"},
                                    {"norm_attn_norm.norm_1", "attn_norm"},
                                    {"norm_attn_norm.norm_2", "attn_output_norm"},
                                    {"norm_attn_norm.attn.Wqkv", "attn_qkv"},
                                    {"norm_attn_norm.attn.out_proj", "attn_output"},
                                    {"ln_1", "attn_norm"},
                                    {"ln_2", "ffn_norm"},
                                    {"attn.c_attn", "attn_qkv"},
                                    {"attn.c_proj", "attn_output"}};

// The block of tensors of all experts.
constexpr std::string_view expert_blocks[] = {
    "mlp.experts.",      "feed_forward.experts.", "block_sparse_moe.experts.",
    "block_sparse_moe.", "ffn.experts.mlp.",      "moe."};

// Whole names in a layer, of tensors without ".weight" and ".bias" in checkpoints.
constexpr NamePair bare_names[] = {{"self_attn.sinks", "attn_sinks.weight"},
                                   {"self_attn.attention_sink_bias", "attn_sinks.weight"},
                                   {"linear_attn.A_log", "ssm_a"},
                                   {"linear_attn.dt_bias", "ssm_dt.bias"},
                                   {"altup.correct_output_scale", "altup_correct_scale.weight"},
                                   {"layer_scalar", "layer_output_scale.weight"},
                                   {"router.scale", "ffn_gate_inp.scale"},
                                   {"router.per_expert_scale", "ffn_down_exps.scale"},
                                   {"pre_ff_layernorm.weight", "ffn_norm"},
                                   {"mamba.A_log", "ssm_a"},
                                   {"mamba.D", "ssm_d"},
                                   {"mamba.dt_bias", "ssm_dt.bias"},
                                   {"mixer.A_log", "ssm_a"},
                                   {"mixer.D", "ssm_d"},
                                   {"mixer.dt_bias", "ssm_dt.bias"}};

// The names in a layer of files that have no ending; ffn_norm in files of Falcon-H1 alone, and
// exp_probs_b in those of Hy3.
constexpr std::string_view names_without_kind[] = {"ssm_a", "ssm_d", "ffn_norm", "exp_probs_b"};

// Factors of the router's input and of the outputs of experts.
constexpr std::string_view names_of_scales[] = {"ffn_gate_inp", "ffn_down_exps"};
constexpr std::string_view scale_end = ".scale";

// Biases that Hugging Face's checkpoints name otherwise.
constexpr std::string_view correction_names[] = {"mlp.gate.e_score_correction_bias",
                                                 "block_sparse_moe.e_score_correction_bias",
                                                 "mlp.moe_statics.e_score_correction_bias",
                                                 "mixer.gate.e_score_correction_bias",
                                                 "feed_forward.expert_bias",
                                                 "mlp.e_score_correction_bias",
                                                 "mlp.expert_bias",
                                                 "moe.router_bias"};
constexpr std::string_view correction_tensor = "exp_probs_b";

constexpr std::string_view hugging_face_layers[] = {"model.layers.", "gpt_neox.layers.",
                                                    "transformer.h.", "transformer.blocks.",
                                                    "backbone.layers."};
constexpr std::string_view gguf_layers = "blk.";
constexpr std::string_view stacked_end = "_exps";

bool begins_with(std::string_view text, std::string_view begin) {
  return text.substr(0, begin.size()) == begin;
}

/// Returns the number if the text is one of at most nine digits.
std::optional<std::int64_t> index_of(std::string_view digits) {
  constexpr std::size_t max_digits = 9;
  std::int64_t index = 0;
  if (digits.empty() || digits.size() > max_digits ||
      digits.find_first_not_of("0123456789") != digits.npos) {
    return std::nullopt;
  }
  std::from_chars(digits.data(), digits.data() + digits.size(), index);
  return index;
}

/// Returns whether `name` is `pattern` with a number in place of {}, which `expert` becomes.
bool matches(std::string_view name, std::string_view pattern, std::optional<std::int64_t>& expert) {
  const std::size_t hole = pattern.find("{}");
  if (hole == pattern.npos) return name == pattern;
  const std::string_view begin = pattern.substr(0, hole), end = pattern.substr(hole + 2);
  if (name.size() <= begin.size() + end.size() || !begins_with(name, begin) ||
      name.substr(name.size() - end.size()) != end) {
    return false;
  }
  expert = index_of(name.substr(begin.size(), name.size() - begin.size() - end.size()));
  return expert.has_value();
}

/// The layer of a name that begins with `layers`, and the rest of the name.
std::optional<std::pair<std::int64_t, std::string_view>> split_layer(std::string_view name,
                                                                     std::string_view layers) {
  if (!begins_with(name, layers)) return std::nullopt;
  name.remove_prefix(layers.size());
  const std::size_t dot = name.find('.');
  const auto layer = index_of(name.substr(0, dot));
  if (!layer || dot == name.npos) return std::nullopt;
  return std::pair(*layer, name.substr(dot + 1));
}

/// The same of a name in a checkpoint.
std::optional<std::pair<std::int64_t, std::string_view>> split_published(std::string_view name) {
  for (const std::string_view layers : hugging_face_layers) {
    if (begins_with(name, layers)) return split_layer(name, layers);
  }
  return std::nullopt;
}

/// The name before the last dot, and "weight" or "bias" after it.
std::optional<std::pair<std::string_view, std::string_view>> split_kind(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == name.npos || dot == 0) return std::nullopt;
  const std::string_view kind = name.substr(dot + 1);
  if (kind != "weight" && kind != "bias") return std::nullopt;
  return std::pair(name.substr(0, dot), kind);
}

}  // namespace

std::optional<TensorName> gguf_name(const Architecture& architecture, std::string_view name) {
  for (const auto& [published, own] : whole_names) {
    if (published == name) return TensorName{std::string(own)};
  }
  for (const auto& [published, own] : stacked_names) {
    TensorName place{std::string(own)};
    if (matches(name, published, place.expert)) return place;
  }
  const auto in_layer = split_published(name);
  if (!in_layer) return std::nullopt;
  // No structured binding: a lambda captures them.
  const auto layer = in_layer->first;
  const auto rest = in_layer->second;
  for (const std::string_view correction : correction_names) {
    if (rest == correction && architecture.has_tensor(correction_tensor)) {
      const char* const end = architecture.name == "hy_v3" ? "" : ".bias";
      return TensorName{name_in_layer(layer, fmt::format("{}{}", correction_tensor, end))};
    }
  }
  const auto parts = split_kind(rest);
  TensorName place;
  const auto is_place = [&](const NamePair& pair) {
    if (!parts || !matches(parts->first, pair.first, place.expert) ||
        !architecture.has_tensor(pair.second)) {
      return false;
    }
    place.name = name_in_layer(layer, fmt::format("{}.{}", pair.second, parts->second));
    return true;
  };
  for (const NamePair& pair : architecture.own_names) {
    if (is_place(pair)) return place;
  }
  for (const auto& [published, own] : bare_names) {
    if (rest == published && architecture.has_tensor(own.substr(0, own.find('.')))) {
      return TensorName{name_in_layer(layer, own)};
    }
  }
  for (const NamePair& pair : layer_names) {
    if (is_place(pair)) return place;
  }
  return std::nullopt;
}

std::vector<std::string> fused_expert_names(const Architecture& architecture,
                                            std::string_view name) {
  const auto in_layer = split_published(name);
  if (!in_layer || !architecture.has_tensor("ffn_down_exps")) return {};
  auto [layer, rest] = *in_layer;
  for (const std::string_view block : expert_blocks) {
    if (!begins_with(rest, block)) continue;
    rest.remove_prefix(block.size());
    constexpr std::string_view bias_end = "_bias";
    const bool is_bias =
        rest.size() > bias_end.size() && rest.substr(rest.size() - bias_end.size()) == bias_end;
    if (is_bias) rest.remove_suffix(bias_end.size());
    const auto named = [&, layer = layer](std::string_view map) {
      return name_in_layer(layer, fmt::format("{}.{}", map, is_bias ? "bias" : "weight"));
    };
    if (rest == "gate_up_proj" || rest == "input_linear.weight")
      return {named("ffn_gate_exps"), named("ffn_up_exps")};
    if (rest == "w1" || rest == "gate_proj.weight") return {named("ffn_gate_exps")};
    if (rest == "v1" || rest == "up_proj.weight") return {named("ffn_up_exps")};
    if (rest == "down_proj" || rest == "down_proj.weight" || rest == "output_linear.weight" ||
        rest == "w2") {
      return {named("ffn_down_exps")};
    }
  }
  return {};
}

std::vector<std::string> shared_input_names(const Architecture& architecture,
                                            std::string_view name) {
  const auto in_layer = split_published(name);
  if (!in_layer || in_layer->second != "shared_mlp.input_linear.weight") return {};
  const char* const end = architecture.has_tensor("ffn_up_shexp") ? "_shexp" : "";
  return {name_in_layer(in_layer->first, fmt::format("ffn_gate{}.weight", end)),
          name_in_layer(in_layer->first, fmt::format("ffn_up{}.weight", end))};
}

std::vector<std::string> delta_input_names(const Architecture& architecture,
                                           std::string_view name) {
  const auto in_layer = split_published(name);
  if (!in_layer || in_layer->second != "linear_attn.in_proj_qkvz.weight" ||
      !architecture.has_tensor("ssm_in")) {
    return {};
  }
  const std::int64_t layer = in_layer->first;
  return {name_in_layer(layer, "attn_qkv.weight"), name_in_layer(layer, "attn_gate.weight"),
          name_in_layer(layer, "ssm_in.weight")};
}

std::vector<std::string> latent_map_names(const Architecture& architecture, std::string_view name) {
  const auto in_layer = split_published(name);
  if (!in_layer || in_layer->second != "self_attn.kv_b_proj.weight" ||
      !architecture.has_tensor("attn_k_b")) {
    return {};
  }
  return {name_in_layer(in_layer->first, "attn_k_b.weight"),
          name_in_layer(in_layer->first, "attn_v_b.weight")};
}

std::optional<std::pair<std::string, std::int64_t>> activation_key(const Architecture& architecture,
                                                                   std::string_view name) {
  constexpr std::string_view block = "mlp.act_fn.";
  const auto in_layer = split_published(name);
  if (architecture.name != "apertus" || !in_layer || !begins_with(in_layer->second, block)) {
    return std::nullopt;
  }
  return std::pair(fmt::format("xielu.{}", in_layer->second.substr(block.size())), in_layer->first);
}

std::string first_gguf_name(const Architecture& architecture, std::string_view name) {
  for (const auto names_of :
       {fused_expert_names, shared_input_names, delta_input_names, latent_map_names}) {
    auto names = names_of(architecture, name);
    if (!names.empty()) return std::move(names.front());
  }
  auto place = gguf_name(architecture, name);
  return place ? std::move(place->name) : std::string(name);
}

std::string older_expert_name(const TensorName& place) {
  std::string name = place.name;
  const std::size_t end = name.rfind(stacked_end);
  if (end == name.npos || !place.expert) return name;
  return name.replace(end, stacked_end.size(), fmt::format(".{}", *place.expert));
}

std::optional<NameInLayer> parse_name_in_layer(std::string_view name) {
  const auto in_layer = split_layer(name, gguf_layers);
  if (!in_layer) return std::nullopt;
  for (const std::string_view bare : names_without_kind) {
    if (in_layer->second == bare) return NameInLayer{in_layer->first, bare, {}};
  }
  for (const std::string_view scaled : names_of_scales) {
    const bool begins = begins_with(in_layer->second, scaled);
    if (begins && in_layer->second.substr(scaled.size()) == scale_end) {
      return NameInLayer{in_layer->first, in_layer->second.substr(0, scaled.size()), "scale"};
    }
  }
  const auto parts = split_kind(in_layer->second);
  if (!parts) return std::nullopt;
  return NameInLayer{in_layer->first, parts->first, parts->second};
}

bool is_of_experts(std::string_view tensor) {
  const std::size_t dot = tensor.rfind('.');
  if (dot != tensor.npos) return index_of(tensor.substr(dot + 1)).has_value();
  return tensor.size() > stacked_end.size() &&
         tensor.substr(tensor.size() - stacked_end.size()) == stacked_end;
}

std::string name_in_layer(std::int64_t layer, std::string_view name) {
  return fmt::format("{}{}.{}", gguf_layers, layer, name);
}

}  // namespace kvzap::gguf
