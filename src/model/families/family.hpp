// Families of models. Each file beside this one maps the config.json and the tensors of a family to
// the description in ModelConfig; no other code asks which family a model is of.
#pragma once

#include <array>
#include <kvzap/model/model_config.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/config_fields.hpp"
#include "model/rope_config.hpp"

namespace kvzap::model {

/// Names of tensors, without ".weight" and ".bias"; those of a layer follow its prefix, such as
/// "model.layers.3.". Weights that the description lacks are not read, whatever the name.
struct TensorNames {
  std::string_view layers = "model.layers.";
  std::string_view embedding = "model.embed_tokens";
  std::string_view final_norm = "model.norm";
  std::string_view head = "lm_head";
  // A map and a norm between the final norm and the head, with the activation of feed-forward parts
  // in between; empty: none.
  std::string_view output_map = "";
  std::string_view output_map_norm = "";
  std::string_view positions = "";       // of the embedding
  std::int64_t first_position = 0;       // its row; rows before it are unused
  bool has_sinusoids = false;            // instead of a table, see WeightSource::sinusoids
  std::string_view embedding_norm = "";  // of the sum of both; empty: none
  // Norms of the input and of the output of attention and feed-forward part; empty: no such norm.
  std::string_view attention_in = "input_layernorm";
  bool first_has_attention_norm = true;  // the first layer has attention_in
  std::string_view attention_out = "";
  std::string_view feed_forward_in = "post_attention_layernorm";
  std::string_view feed_forward_out = "";
  // The norm of the output of experts, in layers that have them; empty: feed_forward_out.
  std::string_view experts_out = "";
  // Those of the inputs of parallel parts with a norm each; empty: the same.
  std::string_view parallel_attention_in = "";
  std::string_view parallel_feed_forward_in = "";
  // Maps of attention.
  std::string_view query = "self_attn.q_proj";
  std::string_view key = "self_attn.k_proj";
  std::string_view value = "self_attn.v_proj";
  std::string_view output = "self_attn.o_proj";
  std::string_view last_output_bias = "";  // of the last layer's output alone, the whole name
  // RMS norms of the inputs of the last map of attention and of dense feed-forward parts.
  std::string_view attention_inner = "";
  std::string_view feed_forward_inner = "";
  // Files hold the maps of attention and dense feed-forward parts as (inputs, outputs).
  bool maps_are_transposed = false;
  // The block of latent attention's maps, beside `output`.
  std::string_view latent = "self_attn";
  // Norms of queries and keys. Those of QkNorm::layer_of_head: {} is the head's number in names of
  // a tensor for each head; `head_norms_are_matrix`: one tensor (head, dim); else one for all
  // heads.
  std::string_view q_norm = "self_attn.q_norm";
  std::string_view k_norm = "self_attn.k_norm";
  bool head_norms_are_matrix = false;
  bool head_norms_have_biases = false;
  std::string_view sinks = "self_attn.sinks";  // the whole name
  // Gates of attention; empty: q_proj has those of a head after its query.
  std::string_view attention_gate = "";
  // One tensor with the rows of q, k and v, or of gate and up; empty: a tensor for each.
  std::string_view qkv = "";
  std::string_view gate_up = "";
  // qkv has the rows of each KV head together: those of its queries, its key and its value.
  bool qkv_by_head = false;
  // qkv has this many shards, each with its part of the rows of queries, values and keys; 0: none.
  int qkv_shards = 0;
  // The block of the dense feed-forward part (empty: none), and its maps.
  std::string_view feed_forward = "mlp";
  std::string_view gate = "gate_proj";
  std::string_view up = "up_proj";
  std::string_view down = "down_proj";
  // The block of the parameters of Activation::xielu.
  std::string_view activation = "mlp.act_fn";
  // Norms multiply by 1 plus their weight.
  bool norms_add_one = false;
  // Norms of the residual stream have weights.
  bool norms_have_weights = true;
  // Experts. {} is the expert's number.
  std::string_view router = "mlp.gate";
  std::string_view correction = "mlp.gate.e_score_correction_bias";  // the whole name
  bool correction_is_matrix = false;                                 // (1, expert)
  std::string_view expert_gate = "mlp.experts.{}.gate_proj";
  std::string_view expert_up = "mlp.experts.{}.up_proj";
  std::string_view expert_down = "mlp.experts.{}.down_proj";
  // Or all experts in tensors of three dimensions (expert, input, output), with rows of gate and
  // up: the whole names, without "_bias". `alternates`: gate and up alternate instead of following
  // each other.
  std::string_view experts_gate_up = "";
  std::string_view experts_down = "";
  bool alternates = false;
  bool rows_first = false;  // (expert, output, input)
  // Or gate and up in tensors of their own: (expert, output, input) with rows_first, else (expert *
  // output, input) beside an `experts_down` (expert * input, output).
  std::string_view experts_gate = "";
  std::string_view experts_up = "";
  std::string_view shared = "mlp.shared_experts";
  // The maps of the shared expert, if gate and up are one tensor; empty: as in `shared`.
  std::string_view shared_gate_up = "";
  std::string_view shared_down = "";
  std::string_view shared_gate = "mlp.shared_expert_gate";
  // Gated delta nets. One tensor with the rows of queries, keys, values and gates of each key head,
  // and one with those of strengths and decays; empty: a tensor for the queries, keys and values of
  // all heads, and one for each of the others. With lightning attention delta_qkvz lacks gates.
  std::string_view delta_qkvz = "";
  std::string_view delta_ba = "";
  // Or one for each of queries, keys and values, and of their convolutions.
  std::array<std::string_view, 3> delta_maps = {};
  std::array<std::string_view, 3> delta_convolutions = {};
  std::string_view delta_gates = "linear_attn.in_proj_z";
  std::string_view delta_strengths = "linear_attn.in_proj_b";
  std::string_view delta_decays = "linear_attn.in_proj_a";
  // The first maps of decays and gates with DeltaNetConfig::gate_rank; those above are the second
  // ones.
  std::string_view delta_decay_latents = "";
  std::string_view delta_gate_latents = "";
  // The whole names of A_log, which may have the shape (1, 1, head, 1), and dt_bias.
  std::string_view delta_decay_rates = "linear_attn.A_log";
  bool delta_decay_rates_are_column = false;
  std::string_view delta_decay_shifts = "linear_attn.dt_bias";
  std::string_view delta_norm = "linear_attn.norm";
  std::string_view delta_output = "linear_attn.out_proj";
  // Norms of the inputs of both parts in layers without attention, which have none of outputs then;
  // empty: the same as in the others.
  std::string_view state_in = "";
  std::string_view state_feed_forward_in = "";
  // The blocks of state spaces and short convolutions.
  std::string_view state_space = "mamba";
  std::string_view short_convolution = "conv";
  // Maps of Mamba-1 in its block: the whole names. `by_group`: its tensors have one more dimension,
  // of groups, and rows of x and z alternate in the first map.
  std::string_view space_latents = "x_proj.weight";
  std::string_view space_steps = "dt_proj.weight";
  std::string_view space_shifts = "dt_proj.bias";
  bool space_by_group = false;
  // Of layers with a shared block, within the layer: the block, the map of its output, and the part
  // with the state space and its norm. Adapters in the block, {} is the number of the layer among
  // those with a block: maps of q, k and v, and of gate and up.
  std::string_view shared_block = "";
  std::string_view block_out = "linear";
  std::string_view state_part = "mamba_decoder";
  std::array<std::string_view, 3> qkv_adapters = {};
  std::string_view gate_up_adapter = "";
};

struct Family {
  /// The class in `architectures`, and the value of `model_type` with it. `other_classes`: what
  /// published files with remote code of their own call it, or the class that transformers runs it
  /// as, if files of this `model_type` have other names of tensors.
  std::string_view class_name;
  std::vector<std::string_view> other_classes = {};
  std::string_view model_type;
  /// How it was tested.
  std::string_view tested;
  /// Meaning of absent fields in transformers; 0: derived from the other sizes, as for null.
  std::int64_t default_key_value_heads = 0;
  std::int64_t default_head_dim = 0;
  double default_norm_eps = 1e-6;
  const char* norm_eps_field = "rms_norm_eps";
  /// Width of feed-forward parts; another field if no layer has a dense one.
  const char* width_field = "intermediate_size";
  /// Further values of `model_type` in the text_config of models of texts and images whose text
  /// model is of this family. `text_defaults`: fields that text_config may lack, as a JSON object.
  std::vector<std::string_view> text_types = {};
  std::string_view text_defaults = "{}";
  bool ties_by_default = false;
  RopeRules rope = {};
  /// Copies fields with names of the family's own to the common names, before the sizes are read.
  void (*rename)(ConfigContent& content) = nullptr;
  /// Reads the fields that not all families have. The sizes have been read, and config.layers has
  /// an entry for each layer.
  void (*read)(ConfigFields& fields, ModelConfig& config) = nullptr;
  TensorNames tensors = {};
  /// Returns what files call the tensor that `tensors` names; null: the same.
  std::string (*stored_name)(std::string_view name) = nullptr;
};

/// Returns all families, those with most tests first.
const std::vector<const Family*>& families();

/// Returns the family of the class; null if there is none. If several share the class, it is the
/// one of `model_type`, or else the first one.
const Family* find_family(std::string_view class_name, std::string_view model_type = "");
/// Returns the family of the class, or of config.architecture. Throws Error if there is none.
const Family& family_of(std::string_view class_name);
const Family& family_of(const ModelConfig& config);

/// Returns what a known class needs that kvzap lacks; "" for a class that it does not know.
std::string_view missing_parts(std::string_view class_name);

// For the families' files:

/// Reads a bias field that not every class has. transformers ignores such a field; a file that sets
/// it was probably written for other code, so it gets a warning and false is returned.
void ignore_bias(ConfigFields& fields, const char* field, ModelConfig& config);

/// Returns a soft cap; 0: none, also for null. absent: without the field.
double read_soft_cap(ConfigFields& fields, const char* field, double absent);

/// Reads layer_types. Returns for each layer whether its attention is `reduced`, which may be ""
/// (no such layers), rather than full; nothing without the field.
std::optional<std::vector<bool>> read_layer_types(ConfigFields& fields, std::string_view reduced,
                                                  const ModelConfig& config);

/// Gives the window to the layers that slide: those of layer_types or, without this field, those of
/// `absent`. A window of 0 is none.
void read_windows(ConfigFields& fields, std::int64_t window, const std::vector<bool>& absent,
                  ModelConfig& config);

/// The same for a family whose every `pattern`-th layer is full.
void read_pattern_of_windows(ConfigFields& fields, std::int64_t window, std::int64_t pattern,
                             ModelConfig& config);

/// Gives the window to all layers.
void set_window(ConfigFields& fields, std::int64_t window, ModelConfig& config);

/// Returns the window of a field; `absent` without the field and 0 for null.
std::int64_t sliding_window_or(ConfigFields& fields, std::int64_t absent,
                               const char* field = "sliding_window");

/// Sets the query heads of the layers, numbers that `field` states. Those of full layers become the
/// model's; others are for layers with windows alone, which then stay windows. Throws Error for
/// numbers that are no multiples of the KV heads, and for full layers with different ones.
void set_query_heads(ConfigFields& fields, const char* field, const nlohmann::json& counts,
                     ModelConfig& config);

/// Reads the numbers of experts and of those of a token (default 0: the file must have it), of
/// which `identities` more can be (ExpertsConfig). Throws Error for sizes out of bounds.
ExpertsConfig read_experts(ConfigFields& fields, const char* count_field,
                           std::int64_t default_per_token, const ModelConfig& config,
                           const char* per_token_field = "num_experts_per_tok",
                           std::int64_t identities = 0);

/// The same for a family all of whose layers have experts of the width intermediate_size.
void read_experts_everywhere(ConfigFields& fields, std::int64_t default_per_token,
                             ModelConfig& config);

/// Reads the number of experts that serve all tokens, and sets the width of all of them together.
void read_shared_width(ConfigFields& fields, const char* field, std::int64_t absent,
                       ExpertsConfig& experts);

/// Names and defaults of the fields of grouped experts.
struct GroupedExperts {
  const char* count_field = "n_routed_experts";
  const char* shared_field = "n_shared_experts";
  const char* scale_field = "routed_scaling_factor";
  std::int64_t default_per_token = 8;  // 0: the file must have it
  std::int64_t default_shared = 1;     // 0: the file must have it
  std::int64_t default_width = 0;      // 0: the file must have it
  double default_scale = 1;
  std::int64_t default_groups = 1;
  std::int64_t default_groups_per_token = 1;
  bool normalises = true;
  /// The class knows n_group, topk_group and norm_topk_prob. If not, it ignores them: there is one
  /// group, and scores are normalised.
  bool has_groups = true;
};

/// Reads experts that are chosen by sigmoids with a correction, perhaps in groups, beside shared
/// ones, as in DeepSeek-V3.
void read_grouped_experts(ConfigFields& fields, const GroupedExperts& rules, ModelConfig& config);

/// Gives experts to all layers but the first ones, the number of which is in `field`.
void read_leading_dense(ConfigFields& fields, std::int64_t absent, ModelConfig& config,
                        const char* field = "first_k_dense_replace");

/// Gives experts to the layers that mlp_layer_types calls "sparse". Without this field nothing
/// changes.
void read_sparse_types(ConfigFields& fields, ModelConfig& config);

/// Gives experts to every decoder_sparse_step-th layer that is not in mlp_only_layers, as the
/// classes of Qwen do.
void read_sparse_layers(ConfigFields& fields, ModelConfig& config,
                        const std::vector<std::int64_t>& absent = {});

/// Reads the layers without RoPE from no_rope_layers or no_rope_layer_interval. `empty_is_absent`:
/// an empty list means none.
void read_rope_layers(ConfigFields& fields, bool empty_is_absent, ModelConfig& config);

/// Defaults of the fields of a gated delta net, as far as classes differ.
struct DeltaNetDefaults {
  std::int64_t key_heads = 16, value_heads = 32, key_dim = 128, value_dim = 128;
};

/// Reads the sizes of a gated delta net. Throws Error for sizes out of bounds.
DeltaNetConfig read_delta_net(ConfigFields& fields, const DeltaNetDefaults& absent);

/// Returns the product of mamba_expand and hidden_size.
std::int64_t expanded_size(ConfigFields& fields, const ModelConfig& config);

/// Names and defaults of the fields of a state space.
struct StateSpaceFields {
  const char* heads = "mamba_n_heads";
  const char* head_dim = "mamba_d_head";
  const char* groups = "mamba_n_groups";
  const char* state_dim = "mamba_d_state";
  const char* kernel = "mamba_d_conv";
  const char* convolution_bias = "mamba_conv_bias";
  const char* projection_bias = "mamba_proj_bias";
  const char* chunk = "mamba_chunk_size";
  std::int64_t default_heads = 128;
  std::int64_t default_head_dim = 64;
  std::int64_t default_groups = 1;
  std::int64_t default_state_dim = 256;
  /// Returns the channels of all heads, if the file states them; null: it does not.
  std::int64_t (*inner)(ConfigFields& fields, const ModelConfig& config) = expanded_size;
};

/// Reads a state space. Throws Error for sizes out of bounds.
void read_state_space(ConfigFields& fields, const StateSpaceFields& names, ModelConfig& config);

/// Reads a state space of Mamba-1, whose channels form `groups` groups, a number that
/// `groups_field` states. Throws Error for sizes out of bounds.
void read_mamba1(ConfigFields& fields, std::int64_t groups, const char* groups_field,
                 ModelConfig& config);

/// Returns the kind of each layer that a field lists, by their current names: `older` has pairs of
/// an older name and a current one. Empty without the field. Throws Error for another number.
std::vector<std::string> read_layer_kinds(
    ConfigFields& fields, const char* field,
    const std::vector<std::pair<std::string_view, std::string_view>>& older,
    const ModelConfig& config);

/// Throws Error if query heads share KV heads.
void require_own_kv_heads(ConfigFields& fields, const ModelConfig& config);

/// Throws Error if the dimensions of all heads are not hidden_size together.
void require_heads_of_hidden_size(ConfigFields& fields, const ModelConfig& config);

/// Reads the activation of feed-forward parts by its name in transformers; `absent` without the
/// field. Throws Error for a name that Activation lacks, and for xielu.
Activation read_activation(ConfigFields& fields, const char* field, Activation absent);

/// Sets `name` to the value of `own`, unless that is absent or null. Messages about `name` have the
/// name `own`, also if the file lacks both.
void rename_field(ConfigContent& content, const char* own, const char* name);

/// The same for the field `own` of an object of the file.
void rename_inner_field(ConfigContent& content, const char* object, const char* own,
                        const char* name);

/// Sets intermediate_size to 4 hidden_size if it is absent.
void default_width(nlohmann::json& content);

/// Sets LayerNorms with weights and biases.
void set_layer_norms(ModelConfig& config);

/// Reads a factor of values or logits: a number above 0, or `absent` if there is none.
double read_multiplier(ConfigFields& fields, const char* field, double absent = 1);

}  // namespace kvzap::model
