// Rows of GGUF metadata that several families have.
#pragma once

#include <cstdint>
#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>

#include "model/gguf_fields.hpp"

namespace kvzap::model {

// Numbers of expert_gating_func.
inline constexpr std::int64_t softmax = 1, sigmoid = 2, softmax_of_chosen = 3;

inline constexpr const char* query_scale_key = "attention.temperature_scale";
inline constexpr const char* window_key = "attention.sliding_window";
inline constexpr const char* window_theta_key = "rope.freq_base_swa";
inline constexpr const char* width_key = "expert_feed_forward_length";
inline constexpr const char* shared_width_key = "expert_shared_feed_forward_length";

// Attention.

/// Biases on q, k and v, and on the output if `with_output`: tensors say whether there are any.
void attention_bias(GgufFields& f, bool with_output, const char* field = "attention_bias");
/// The biases of Llama.
void all_biases(GgufFields& f);
/// Programs do not read biases of attention in files of some architectures.
void no_attention_bias(GgufFields& f);
void tied_head(GgufFields& f);
/// partial_rotary_factor, the product of which with head_dim is rounded down.
void rotary_factor(GgufFields& f);
/// Moves RoPE's fields into rope_parameters.
nlohmann::json& rope_parameters(GgufFields& f);
/// Scaling of queries by their position.
void scaled_queries(GgufFields& f);
/// Layers without RoPE: every interval-th one.
void rope_layers(GgufFields& f, std::int64_t interval);
/// RoPE of layers with a window is that of the others.
void one_rope(GgufFields& f);
/// Layers are full or `reduced`. The file has a flag for each reduced layer, or the number of
/// layers of which the last one is full (0: none is).
void pattern_of_layers(GgufFields& f, const char* reduced);
/// Returns the window of the file, `absent` without the key, or that of the model's layers.
std::int64_t window_of(GgufFields& f, std::int64_t absent);
/// Layers with a window; `absent`: its length without the key.
void windows(GgufFields& f, std::int64_t absent = 0);

/// The factors of embedding, attention, residuals and logits of Granite.
void granite_factors(GgufFields& f);

// Families whose layers keep states (gguf_state_rows.cpp).

void lfm2_rows(GgufFields& f);
void lfm2moe_rows(GgufFields& f);
void granitehybrid_rows(GgufFields& f);
void falcon_h1_rows(GgufFields& f);
void nemotron_h_rows(GgufFields& f);
void jamba_rows(GgufFields& f);

// Families whose layers with windows have other heads (gguf_mixed_rows.cpp).

/// The numbers of heads of full layers and of those with a window.
void heads_of_kinds(GgufFields& f);
void mellum_rows(GgufFields& f);
void mimo2_rows(GgufFields& f);
void step35_rows(GgufFields& f);

// Experts.

/// The experts of a token, and their number. `width` has the rows for their width. The graph of an
/// architecture fixes how a router's logits become weights, whether or not the file says so.
void experts(GgufFields& f, const char* count_field, std::int64_t gating,
             void (*width)(GgufFields& f));
/// The width of experts is that of the dense part by the number of a token's experts, if the file
/// does not say.
void own_width(GgufFields& f);
/// The width of experts is intermediate_size, as that of dense layers would be.
void dense_width(GgufFields& f);
/// No layer is dense: intermediate_size is the width of experts.
void only_width(GgufFields& f);
void shared_width(GgufFields& f);
/// Whether weights are divided by their sum.
void normalised(GgufFields& f, bool value);
/// The experts of Qwen. Layers without a router are dense.
void qwen_experts(GgufFields& f, bool normalises);
/// What config.json calls the numbers of grouped experts.
struct GroupedFields {
  const char* count = "n_routed_experts";
  const char* shared = "n_shared_experts";
  const char* scale = "routed_scaling_factor";
  const char* normalises = "norm_topk_prob";
  const char* leading = "first_k_dense_replace";
};
/// Experts beside shared ones, behind dense layers. Programs read how the router's logits become
/// weights.
void grouped_experts(GgufFields& f, std::int64_t gating, const GroupedFields& fields = {});
/// The groups of these experts.
void expert_groups(GgufFields& f);
/// Returns the number of layers before the first one with experts.
std::int64_t leading_dense_layers(const ModelConfig& model);

}  // namespace kvzap::model
