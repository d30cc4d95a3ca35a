// The architecture of a Hugging Face decoder model, as its config.json describes it.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// The method that extends RoPE to texts longer than the training context. Names and formulas are
/// those of transformers 5 (modeling_rope_utils.py).
enum class RopeType {
  linear,    // all wavelengths by `factor` (position interpolation, arXiv 2306.15595)
  dynamic,   // the base grows with the text beyond the original length (NTK)
  yarn,      // by `factor` for wavelengths with few turns in the original length (2309.00071)
  longrope,  // a factor for each wavelength; long texts use a second set (2402.13753)
  llama3     // long wavelengths by `factor`, short ones unchanged, those between interpolated
};

/// Returns the name in config.json: "linear", "dynamic", "yarn", "longrope" or "llama3".
std::string_view name_of(RopeType type);

/// RoPE scaling. Each field names the types that use it.
struct RopeScaling {
  RopeType type = RopeType::llama3;
  /// All types: factor by which the context grows, >= 1 (llama3: > 0).
  double factor = 1;
  /// All types: context length in training, in tokens, before it was extended. For linear and
  /// dynamic this is the model's max_position_embeddings.
  std::int64_t original_max_position_embeddings = 0;
  /// yarn, longrope: factor by which RoPE multiplies queries and keys beside rotating them. It
  /// comes from the file, or is derived as in transformers from factor, mscale and mscale_all_dim.
  double attention_factor = 1;
  /// llama3 only.
  double low_freq_factor = 0;
  double high_freq_factor = 0;
  /// yarn: a wavelength with more turns than beta_fast in the original length is unchanged; one
  /// with fewer than beta_slow is stretched by the whole factor. `truncate`: the dimensions of
  /// these limits are rounded outwards.
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;
  /// longrope: head_dim / 2 factors for texts up to the original length, and for longer texts.
  std::vector<double> short_factor;
  std::vector<double> long_factor;

  /// Returns whether frequencies depend on the length of the text: dynamic and longrope.
  bool depends_on_length() const { return type == RopeType::dynamic || type == RopeType::longrope; }

  bool operator==(const RopeScaling& other) const;
  bool operator!=(const RopeScaling& other) const { return !(*this == other); }
};

/// Norms of queries and keys, before RoPE unless ModelConfig::rotates_before_norms. All but
/// layer_of_head are RMS norms.
enum class QkNorm {
  none,
  head,          // of each head, with the same weights for all heads
  unit,          // of each head without weights, in layers with RoPE (Llama 4)
  row,           // of all heads of a token together
  layer_of_head  // LayerNorms of each head, which may have weights of its own (Cohere)
};

/// Norms of the residual stream.
enum class NormType {
  rms,   // x / sqrt(mean(x^2) + eps) * weight
  layer  // the same of x - mean(x) (Ba et al., arXiv 1607.06450)
};

/// What a feed-forward part makes of its gate g and its up projection u. Parts without gates take u
/// for g, and leave out the factor.
enum class Activation {
  silu,          // g sigmoid(g) u
  gelu_tanh,     // GELU(g) u by the approximation with tanh (arXiv 1606.08415)
  clamped_silu,  // min(g, l) sigmoid(1.702 min(g, l)) (clamp(u, -l, l) + 1), l: gate_limit
                 // (gpt-oss)
  gelu,          // GELU(g) u (arXiv 1606.08415)
  relu2,         // max(g, 0)^2 u (So et al., arXiv 2109.08668)
  xielu,         // a g^2 + b g for g > 0, else c (exp(min(g, e)) - 1 - g) + b g; each layer has its
                 // own a, b, c and e (Huang and Schlag, arXiv 2411.13010). Without gates alone.
  relu           // max(g, 0) u
};

/// Scaling of queries by their position p (Llama 4): times 1 + beta ln(1 + floor((p + offset) /
/// length)).
struct QueryScaling {
  double beta = 0;
  std::int64_t length = 1;
  std::int64_t offset = 0;
  /// Layers with RoPE scale too.
  bool in_rope_layers = true;
};

/// A feed-forward part that consists of experts, a few of which serve each token (Shazeer et al.,
/// arXiv 1701.06538).
struct ExpertsConfig {
  /// How a router's logits become scores.
  enum class Scores { softmax, sigmoid };
  std::int64_t count = 0;
  /// The experts of a token are those with the largest scores; the scores are their weights.
  std::int64_t per_token = 0;
  std::int64_t intermediate_size = 0;
  Scores scores = Scores::softmax;
  /// A bias takes part in the choice of experts, but not in their weights (DeepSeek-V3, arXiv
  /// 2412.19437, equation 16).
  bool has_correction = false;
  /// The experts form groups of equal size. A token uses those of the groups_per_token groups whose
  /// two best experts have the largest sum of scores.
  std::int64_t groups = 1;
  std::int64_t groups_per_token = 1;
  /// Groups are ranked by their best expert alone (DeepSeek-V2).
  bool ranks_groups_by_best = false;
  /// A token's weights are divided by their sum, then multiplied by `scale`.
  bool normalises = false;
  double scale = 1;
  /// Width of the expert that serves all tokens; 0: none.
  std::int64_t shared_intermediate_size = 0;
  /// The output of that expert is multiplied by the sigmoid of one more logit.
  bool has_shared_gate = false;
  /// Biases of the router, and of gate, up and down of all experts.
  bool has_router_bias = false;
  bool has_biases = false;
  /// A token's weight multiplies the input of its expert, not the output (Llama 4).
  bool scales_input = false;
  /// Layers with experts have a dense part as well. Both read the residual stream, each with norms
  /// of its own input and output, and so does the router. A learned factor of each expert
  /// multiplies its weight (Gemma 4).
  bool beside_dense = false;
  /// Layers with experts have a dense part as well. Both read the same input, and the experts'
  /// output is added to that of the next layer (Cai et al., arXiv 2404.05019; LongCat-Flash).
  bool joins_next = false;
  /// The router chooses among `count` experts and this many more, whose output is their input.
  std::int64_t identities = 0;
  /// Logits, not scores, are ranked; a correction is added to them.
  bool ranks_logits = false;
  /// SparseMixer (Liu et al., arXiv 2409.12136) instead of scores, if above 0. Each next expert is
  /// the one with the largest logit l of those left. Its weight is its softmax among those left
  /// whose logits x are near: (l - x) / max(|x|, l) <= mixer_margin.
  double mixer_margin = 0;
  /// The output is half the sum of the routed experts' and the shared expert's.
  bool averages_shared = false;

  bool have_dense_part() const { return beside_dense || joins_next; }
  std::int64_t routes() const { return count + identities; }
};

/// Inputs of each layer from a second embedding of the token (Gemma 3n). With the embedding x of
/// the whole model, layer l adds norm(W_o (gelu(W_g h) p)) to its output h, where p = (norm(W_l x /
/// sqrt(hidden_size)) + sqrt(size) E_l) / sqrt(2), and E_l is the token's row of the layer's table.
struct LayerInputsConfig {
  std::int64_t size = 0;
  /// Rows of the tables. Ids beyond have row 0.
  std::int64_t vocab_size = 0;
};

/// Several residual streams (AltUp, Baykal et al., arXiv 2301.13310). Layers compute with the
/// stream `active` alone. Before a layer, each stream adds a mixture of all streams; after it, each
/// adds a multiple of how the active one has changed. The factors are learned functions of the
/// token.
struct AltUpConfig {
  static constexpr std::int64_t most_streams = 16;
  std::int64_t streams = 1;
  std::int64_t active = 0;
  /// A learned vector scales the active stream before LayerInputsConfig reads it.
  bool scales_output = true;
  /// Rank of the map from a layer's normed input that is added beside attention (LAUREL, arXiv
  /// 2411.07501).
  std::int64_t laurel_rank = 0;
};

/// A gated delta net (Yang et al., arXiv 2412.06464): a layer without attention, which keeps a
/// state of fixed size. Queries, keys and values pass a short causal convolution and SiLU, then
/// queries and keys are divided by their lengths. With the decay g and the strength b that a token
/// gives a value head, the head's state S (key_dim, value_dim) becomes S' = g S + k (b (v - (g S)^T
/// k))^T, and its output is S'^T q / sqrt(key_dim). An RMS norm of each head and a gate follow.
struct DeltaNetConfig {
  /// The recurrence.
  enum class Kind {
    gated,  // the above; SiLU of gates
    kimi,   // Kimi Delta Attention (arXiv 2510.26692): a decay of each row of S; sigmoid of gates
    lightning  // lightning attention (arXiv 2401.04658): S' = g S + k v^T with a fixed g of each
               // head (lightning_decay), output S'^T q. No convolution, no lengths; one norm of all
               // heads; sigmoid of gates.
  };
  std::int64_t key_heads = 0;
  /// A multiple of key_heads; value head v uses key head v / group().
  std::int64_t value_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  /// Tokens that the convolution of a channel sees, its own among them; at most max_kernel.
  std::int64_t kernel = 4;
  static constexpr int max_kernel = 16;
  /// The strength is the sigmoid of its projection, times this (2 lets S change its sign).
  double strength_multiplier = 1;
  /// The eps of the norm of the output; absent: ModelConfig::rms_norm_eps.
  std::optional<double> norm_eps = std::nullopt;
  Kind kind = Kind::gated;
  /// Dimensions of the latents of decays and of gates, each a map of a map of the hidden state
  /// (Kimi Linear); 0: they are maps of the hidden state.
  std::int64_t gate_rank = 0;
  /// ln g is this bound, below 0, times sigmoid(exp(A_log) (x + dt_bias)) of the projection x; 0:
  /// ln g = -exp(A_log) softplus(x + dt_bias).
  double least_log_decay = 0;
  /// Factor of the output of the layer.
  double out_multiplier = 1;

  std::int64_t group() const { return value_heads / key_heads; }
  /// Returns the decays that a token gives a value head; 0: they are fixed.
  std::int64_t decays() const {
    return kind == Kind::gated ? 1 : (kind == Kind::kimi ? key_dim : 0);
  }
  /// Returns the channels of a key head: its query, its key, and the values of its value heads.
  std::int64_t channels() const { return 2 * key_dim + group() * value_dim; }
  /// Returns the values that a key head's state has: those of its value heads, then the inputs of
  /// its convolution for the last kernel - 1 tokens, oldest first.
  std::int64_t state_values() const {
    return group() * key_dim * value_dim + (kernel - 1) * channels();
  }
};

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). A token's keys and
/// values of all query heads are linear maps of one latent c (rank) and one key k of rope_dim
/// dimensions with RoPE. The maps are absorbed into queries and outputs: attention reads rows (k,
/// c) of one KV head, whose values are c, so that ModelConfig has num_key_value_heads = 1, head_dim
/// = rank + rope_dim, and rotary_dim = rope_dim.
struct LatentConfig {
  /// Dimensions of a row's latent (kv_lora_rank); even.
  std::int64_t rank = 0;
  /// Dimensions of the latent of queries (q_lora_rank); 0: queries are a map of the hidden state.
  std::int64_t query_rank = 0;
  /// Dimensions of a query head without RoPE, and with it (even).
  std::int64_t nope_dim = 0;
  std::int64_t rope_dim = 0;
  /// Dimensions of a value of a query head (v_head_dim).
  std::int64_t value_dim = 0;
  /// The eps of the norms of both latents.
  double norm_eps = 1e-6;
  /// A factor of the normed latents of rows.
  double row_multiplier = 1;
  /// The output of each query head is multiplied by the sigmoid of a gate (Ling 3).
  bool gates_heads = false;

  std::int64_t query_dim() const { return nope_dim + rope_dim; }
};

/// A gated short convolution (Liquid AI's LFM2): of three projections b, c and x of a token, each
/// of hidden_size channels, b x passes a causal convolution of each channel, whose output times c
/// is the layer's.
struct ShortConvolutionConfig {
  /// Tokens that the convolution sees, the token's own among them; 2 to DeltaNetConfig::max_kernel.
  std::int64_t kernel = 3;
  /// Biases of the projections, the convolution and the output.
  bool has_bias = false;

  /// Returns the values of a channel's state: its inputs for the last kernel - 1 tokens, oldest
  /// first.
  std::int64_t state_values() const { return kernel - 1; }
};

/// A selective state space (Mamba-2; Dao and Gu, arXiv 2405.21060): a layer that keeps a state of
/// fixed size. A token's x (of each head), B and C (of each group of heads) pass a short causal
/// convolution and SiLU. With the step d = softplus(its projection + dt_bias), limited to
/// [least_step, largest_step], a head's state S (state_dim, head_dim) becomes S' = exp(-d
/// exp(A_log)) S + B (d x)^T, and its output is S'^T C + D x. A gate and a norm follow.
///
/// Mamba-1 (Gu and Dao, arXiv 2312.00752) differs in this. x alone passes the convolution. B, C and
/// a latent l (step_rank) are maps of the x of a group. Each channel p has a step of its own, the
/// softplus of its map of l + dt_bias, and each S_np an A_log. `heads` are runs of channels that
/// stay on one rank.
struct StateSpaceConfig {
  /// What follows the recurrence. The norm is an RMS norm of the channels of each group.
  enum class Gating {
    gate,              // y silu(z)
    gate_before_norm,  // norm(y silu(z))
    norm_before_gate   // norm(y) silu(z)
  };
  /// A multiple of groups; head h has the B and C of group h / heads_of_group().
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t groups = 1;
  std::int64_t state_dim = 0;
  /// Tokens that the convolution of a channel sees, its own among them; at most
  /// DeltaNetConfig::max_kernel.
  std::int64_t kernel = 4;
  bool has_convolution_bias = true;
  /// Biases of the first and the last projection.
  bool has_projection_bias = false;
  Gating gating = Gating::gate_before_norm;
  double least_step = 0;
  /// 0: no limit.
  double largest_step = 0;
  /// Factors of the projections z, x, B, C and d, and of the output (Falcon-H1).
  std::array<double, 5> in_multipliers = {1, 1, 1, 1, 1};
  double out_multiplier = 1;
  /// Of Mamba-1; 0: Mamba-2.
  std::int64_t step_rank = 0;
  /// RMS norms of l, B and C, each with weights. Of Mamba-1 (Jamba).
  bool norms_latents = false;
  /// The eps of the norm that follows the recurrence; absent: ModelConfig::rms_norm_eps.
  std::optional<double> norm_eps = std::nullopt;

  bool is_mamba1() const { return step_rank > 0; }
  std::int64_t heads_of_group() const { return heads / groups; }
  /// Returns the channels of all heads.
  std::int64_t inner_size() const { return heads * head_dim; }
  /// Returns the outputs of the first projection: z, x, B, C and d, in the order of the files; of
  /// Mamba-1 x and z.
  std::int64_t projections() const {
    return 2 * inner_size() + (is_mamba1() ? 0 : 2 * groups * state_dim + heads);
  }
  /// Returns the values l, B and C of a group in Mamba-1.
  std::int64_t latents() const { return step_rank + 2 * state_dim; }
  /// Returns the values that a head's state has: S, then the convolution's inputs for the last
  /// kernel - 1 tokens, oldest first: those of x, and those of B and C. Heads of a group have the
  /// same B and C, so that every head can move to another rank alone.
  std::int64_t state_values() const {
    return state_dim * head_dim + (kernel - 1) * (head_dim + (is_mamba1() ? 0 : 2 * state_dim));
  }
};

/// Residual connections from the normed input of each part of a layer (MiniMax-Text-01): the
/// residual stream h becomes factor norm(h) + part(norm(h)).
struct NormedResiduals {
  /// Factors of attention, of token mixers without attention, and of feed-forward parts.
  double attention = 1, state = 1, feed_forward = 1;
};

/// Layers that share the weights of attention and feed-forward part (Zamba, arXiv 2405.16712;
/// Zamba2, arXiv 2411.15242). With the embedding e of the token, such a layer computes t = W
/// f(norm(attention(norm(h, e)))) from the residual stream h, and then h' = h + s(norm(h + t)). f
/// is the feed-forward part and s the state space. W, s and their norm are the layer's own.
struct SharedBlocksConfig {
  /// Ranks of the maps that a layer of its own adds to those of q, k and v, and of gate and up
  /// (LoRA, arXiv 2106.09685); 0: none.
  std::int64_t attention_rank = 0;
  std::int64_t feed_forward_rank = 0;
};

/// How the tokens of a layer see one another.
enum class TokenMixing {
  attention,
  delta_net,                  // ModelConfig::delta_net
  short_convolution,          // ModelConfig::short_convolution
  state_space,                // ModelConfig::state_space
  attention_and_state_space,  // both read the same input, and add their outputs (Falcon-H1)
  none,                       // the layer is a feed-forward part alone (Nemotron-H)
  attention_into_state_space  // ModelConfig::shared_blocks
};

/// What differs between the layers of a model.
struct LayerConfig {
  /// RoPE rotates queries and keys.
  bool has_rope = true;
  /// The feed-forward part is ModelConfig::experts, not dense.
  bool has_experts = false;
  TokenMixing mixing = TokenMixing::attention;
  /// The layer has a feed-forward part.
  bool has_feed_forward = true;
  /// Attention of a token sees the last `window` tokens, its own among them; 0: all.
  std::int64_t window = 0;
  /// Attention sees no token before the last multiple of `chunk` positions; 0: all tokens (Llama
  /// 4).
  std::int64_t chunk = 0;
  /// The layer has no keys and values: its queries see those of this earlier layer, which has a
  /// window of the same size, or none, too. -1: it has its own.
  std::int64_t rows_of = -1;
  /// Width of the dense feed-forward part; 0: ModelConfig::intermediate_size.
  std::int64_t intermediate_size = 0;
  /// Of a layer with a window: dimensions of a head (0: ModelConfig::head_dim), and KV heads for
  /// each of ModelConfig::num_key_value_heads.
  std::int64_t head_dim = 0;
  std::int64_t kv_heads_factor = 1;
  /// A window stays one however short the longest text is, so that the layer is never pruned.
  bool keeps_window = false;
  /// Values are the keys before norm and RoPE; there is no v_proj.
  bool values_are_keys = false;
  /// Gates g of the feed-forward part become max(0, g - mean(g) - gate_cutoff std(g)); absent: they
  /// do not (Gemma 3n).
  std::optional<double> gate_cutoff = std::nullopt;
  /// Attention and feed-forward part have the weights of this earlier layer
  /// (SharedBlocksConfig). -1: their own.
  std::int64_t weights_of = -1;
  /// Of a layer with a window: query heads; 0: ModelConfig::num_attention_heads.
  std::int64_t query_heads = 0;
  /// The layer has the sinks of ModelConfig::has_sinks.
  bool has_sinks = true;
  /// A limit l of feed-forward parts with gates: the activation of a gate becomes at most l, and
  /// its factor u clamp(u, -l, l) (Step-3.5). Of the dense part or the shared expert, and of the
  /// other experts; 0: none.
  double dense_limit = 0;
  double experts_limit = 0;

  bool has_attention() const {
    return mixing == TokenMixing::attention || mixing == TokenMixing::attention_and_state_space ||
           mixing == TokenMixing::attention_into_state_space;
  }
  bool has_state_space() const {
    return mixing == TokenMixing::state_space || mixing == TokenMixing::attention_and_state_space ||
           mixing == TokenMixing::attention_into_state_space;
  }
};

/// Description of a decoder: sizes and switches. Fields that config.json omits have the defaults of
/// transformers. load() refuses every feature that would change the result and is not represented
/// here.
struct ModelConfig {
  /// A name of supported_models(), such as "Qwen3ForCausalLM". It says how the tensors are called.
  std::string architecture;
  std::int64_t hidden_size = 0;
  /// Width of dense feed-forward parts.
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  /// Dimensions of one head; even. Need not be hidden_size / num_attention_heads.
  std::int64_t head_dim = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;
  /// The eps of all norms.
  double rms_norm_eps = 0;
  NormType norm_type = NormType::rms;
  /// Norms of the residual stream add a bias. Only of NormType::layer.
  bool norm_bias = false;
  double rope_theta = 0;
  /// Absent: RoPE without scaling.
  std::optional<RopeScaling> rope_scaling;
  /// Layers with a window have this base, and RoPE without scaling; absent: they have the RoPE of
  /// the other layers.
  std::optional<double> window_rope_theta;
  /// Dimensions of a head that RoPE rotates, the first ones; even. 0: all.
  std::int64_t rotary_dim = 0;
  /// The part of the pairs (i, i + head_dim / 2) that RoPE turns, the first ones, by the
  /// frequencies of a whole head (rope_type proportional). Not of layers with a window, which turn
  /// all.
  double turning_part = 1;
  /// RoPE rotates dimension 2i with 2i + 1, not i with i + rotary_dim / 2.
  bool rope_is_interleaved = false;
  /// RoPE turns in the other direction (nanochat).
  bool rope_is_reversed = false;
  /// Pairs of dimensions that RoPE rotates by each coordinate of an image (mrope_section); empty:
  /// not stated. All coordinates of a text are the same.
  std::vector<std::int64_t> image_sections;
  /// Value type that the checkpoint declares (dtype or torch_dtype). The type of the stored weights
  /// takes precedence.
  std::optional<DType> dtype;
  /// The output head is the embedding table. False unless config.json sets it, and if the weights
  /// have an lm_head.weight with other values.
  bool tie_word_embeddings = false;
  QkNorm qk_norm = QkNorm::none;
  /// Norms of heads follow RoPE instead of preceding it (HunYuan).
  bool rotates_before_norms = false;
  /// Values get an RMS norm of each head without weights (Gemma 3n).
  bool norms_values = false;
  bool qkv_bias = false;
  bool o_bias = false;
  /// Biases on gate, up and down.
  bool mlp_bias = false;
  /// The output head has a bias.
  bool head_bias = false;
  /// The embedding of a token adds a learned one of its position, which is below
  /// max_position_embeddings (GPT-2).
  bool embeds_positions = false;
  /// RMS norms precede the last map of attention and of dense feed-forward parts (BitNet).
  bool has_inner_norms = false;
  /// The outputs of attention and feed-forward parts have the norms that the family knows. False
  /// for models of LFM3 without them.
  bool norms_outputs = true;
  /// Queries, keys and values are clamped to [-qkv_limit, qkv_limit], before RoPE and norms of
  /// heads, after QkNorm::row; 0: they are not.
  double qkv_limit = 0;
  /// Feed-forward parts have a gate beside their up projection.
  bool gates_feed_forward = true;
  Activation activation = Activation::silu;
  /// Only of Activation::clamped_silu.
  double gate_limit = 0;
  /// Attention and feed-forward part read the same residual stream, which adds both outputs.
  bool is_parallel = false;
  /// Parallel parts share the norm of their input (Cohere), or have one each (GPT-NeoX).
  bool shares_norm = false;
  /// Factors of the embedding and of the output of each attention and feed-forward part, and the
  /// divisor of logits (Granite).
  double embedding_multiplier = 1;
  /// embedding_multiplier is rounded to the value type of the weights.
  bool rounds_embedding_multiplier = false;
  double residual_multiplier = 1;
  double logits_divisor = 1;
  /// Factor of the products of queries and keys; absent: 1 / sqrt(head_dim).
  std::optional<double> attention_multiplier;
  std::optional<QueryScaling> query_scaling;
  /// Scores of attention, and logits, become cap tanh(x / cap); 0: unchanged (Gemma 2).
  double attention_soft_cap = 0;
  double logits_soft_cap = 0;
  /// A learned logit of each query head joins the softmax of attention, without a value (gpt-oss).
  bool has_sinks = false;
  /// The output of attention is multiplied by the sigmoid of gates, which q_proj gives beside the
  /// queries (Qwen3-Next).
  bool gates_attention = false;
  std::optional<DeltaNetConfig> delta_net;
  std::optional<ShortConvolutionConfig> short_convolution;
  std::optional<StateSpaceConfig> state_space;
  std::optional<SharedBlocksConfig> shared_blocks;
  /// Factors of the outputs of attention, of gates before their activation, and of the outputs of
  /// feed-forward parts (Falcon-H1).
  double attention_out_multiplier = 1;
  double gate_multiplier = 1;
  double feed_forward_multiplier = 1;
  std::optional<ExpertsConfig> experts;
  /// Of all attention layers.
  std::optional<LatentConfig> latent;
  /// A token sees this many tokens, which an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556); 0:
  /// all. kvzap has no indexer, so it runs only texts in which a token sees all others.
  std::int64_t attention_top_k = 0;
  std::optional<LayerInputsConfig> layer_inputs;
  std::optional<AltUpConfig> alt_up;
  /// A learned number multiplies the output of each layer (Gemma 4).
  bool scales_layers = false;
  std::optional<NormedResiduals> normed_residuals;
  /// Dimensions of a value, at most head_dim; 0: head_dim. The engine pads values with zeros to
  /// head_dim, so rows of the cache have one size (MiMo-V2).
  std::int64_t value_dim = 0;
  /// rotary_dim of layers with a window_rope_theta; 0: the same.
  std::int64_t window_rotary_dim = 0;
  /// A gate of attention is one for a whole head (LFM3, Laguna).
  bool gates_heads = false;
  /// The softplus of gates of attention counts, not their sigmoid (Laguna).
  bool has_softplus_gates = false;
  /// One entry for each layer; empty: all layers are LayerConfig().
  std::vector<LayerConfig> layers;
  /// One line for each unknown field that may have an effect. These fields are ignored.
  std::vector<std::string> warnings;

  LayerConfig layer(std::int64_t index) const {
    return layers.empty() ? LayerConfig() : layers.at(static_cast<std::size_t>(index));
  }
  /// Returns whether a layer's attention sees all tokens of a text of up to longest_context()
  /// tokens, and whether the rows that it sees are its own. Only such layers are pruned; the others
  /// keep what they see (OwnRing, StateShape), or nothing.
  bool is_full(std::int64_t index) const {
    const LayerConfig of_layer = layer(index);
    const std::int64_t longest = longest_context();
    const bool is_wide = of_layer.window >= longest && !of_layer.keeps_window;
    return of_layer.has_attention() && of_layer.rows_of < 0 && (of_layer.window == 0 || is_wide) &&
           (of_layer.chunk == 0 || of_layer.chunk >= longest);
  }
  /// Returns the size of the normed vectors that attention reads: the residual stream, or this and
  /// the embedding (SharedBlocksConfig).
  std::int64_t attention_inputs() const { return shared_blocks ? 2 * hidden_size : hidden_size; }
  /// Returns the vectors of head_dim values that a row of the cache has: a key and a value, or with
  /// latent attention one that is both.
  std::int64_t row_vectors() const { return latent ? 1 : 2; }
  /// Returns the layer whose rows a layer reads (LayerConfig::rows_of).
  std::int64_t rows_of(std::int64_t index) const {
    const std::int64_t other = layer(index).rows_of;
    return other < 0 ? index : other;
  }
  /// Returns the sizes of a layer's attention: dimensions of a head, KV heads, query heads, and
  /// query heads of each KV head.
  std::int64_t head_dim_of(std::int64_t index) const {
    const std::int64_t own = layer(index).head_dim;
    return own == 0 ? head_dim : own;
  }
  std::int64_t kv_heads_of(std::int64_t index) const {
    return num_key_value_heads * layer(index).kv_heads_factor;
  }
  std::int64_t query_heads_of(std::int64_t index) const {
    const std::int64_t own = layer(index).query_heads;
    return own == 0 ? num_attention_heads : own;
  }
  std::int64_t query_group_of(std::int64_t index) const {
    return query_heads_of(index) / kv_heads_of(index);
  }
  /// Returns the dimensions of a head that RoPE rotates.
  std::int64_t rotated_dims() const { return rotary_dim == 0 ? head_dim : rotary_dim; }
  /// Returns whether RoPE rotates dimension i of a head with i + head_dim / 2, for all i. Other
  /// models are brought into this form: the engine reorders the dimensions of queries and keys, and
  /// gives those that do not turn a frequency of 0.
  bool rotates_halves() const {
    return rotated_dims() == head_dim && !rope_is_interleaved && !rope_is_reversed;
  }
  /// Returns the tokens of the longest text that the model supports: max_position_embeddings, or
  /// more if RoPE is scaled, but at most attention_top_k. For linear, dynamic, yarn and longrope it
  /// is the original length times the factor, if that is longer.
  std::int64_t longest_context() const;
  /// Returns the factor by which RoPE multiplies queries and keys beside rotating them
  /// (RopeScaling::attention_factor), in float; 1 for most models.
  float rope_attention_factor() const;
  /// Returns whether RoPE's frequencies depend on the length of the text.
  bool rope_depends_on_length() const { return rope_scaling && rope_scaling->depends_on_length(); }

  /// Returns the number of query heads that share one KV head: num_attention_heads /
  /// num_key_value_heads.
  std::int64_t query_group() const { return num_attention_heads / num_key_value_heads; }

  /// Reads `model`/config.json, or the metadata of the GGUF file `model`. Throws Error that names
  /// file, field, expected and found value. It does so for missing or malformed fields, for sizes
  /// out of bounds, and for every unsupported feature that would change the result. Such features
  /// are other architectures, RoPE types other than default and those of RopeType, unsupported
  /// quantization, and fields of other families. Of a model of texts and images it describes the
  /// part that reads text. If `model` is a name on the Hugging
  /// Face hub or a file inside a model folder, the error says how to proceed.
  static ModelConfig load(const std::filesystem::path& model);
};

/// Reads the ids that end a generation: eos_token_id (one id or a list) of generation_config.json,
/// or else of config.json. Returns them without repetitions, in the order of the file; empty if
/// neither file has the field. Throws Error for a malformed file or an id outside [0, vocab_size).
std::vector<TokenId> load_stop_ids(const std::filesystem::path& folder, std::int64_t vocab_size);

/// The generation settings of a model that transformers' generate applies by default. They come
/// from generation_config.json, or from fields of the same names in config.json if that file does
/// not exist. The caller chooses sampling (do_sample, temperature, top_k, top_p, min_p and
/// similar), lengths and output.
struct GenerationConfig {
  /// See load_stop_ids.
  std::vector<TokenId> stop_ids;
  /// See SamplingOptions.
  double repetition_penalty = 1;
  std::vector<TokenId> suppress_tokens;
  /// Excludes words that are a single stop id, as transformers does.
  std::vector<std::vector<TokenId>> bad_words;
  /// The file that was read; empty if there is none.
  std::string file;
  /// One line for each unknown field. These fields are ignored.
  std::vector<std::string> warnings;

  /// Returns whether any of these settings changes logits.
  bool changes_logits() const {
    return repetition_penalty != 1 || !suppress_tokens.empty() || !bad_words.empty();
  }

  /// Reads the settings from `folder`. Throws Error that names file and field for malformed fields
  /// and for ids outside [0, vocab_size). Every other field that would change greedy answers is an
  /// error, too, such as no_repeat_ngram_size, min_new_tokens, forced_bos_token_id and num_beams.
  static GenerationConfig load(const std::filesystem::path& folder, std::int64_t vocab_size);
};

/// Returns the scaling that `type` (linear, dynamic or yarn) and `factor` alone define for a model.
/// The original length is max_position_embeddings; everything else has the defaults of
/// transformers. Throws Error for other types, which need more than a factor, and for a factor
/// outside [1, 1e6].
RopeScaling rope_scaling_by_factor(const ModelConfig& config, RopeType type, double factor);

/// Returns RoPE's inverse frequencies: head_dim / 2 values in radians per position. The first
/// rotated_dims() / 2 are rope_theta^(-2i / rotated_dims()), scaled if the model scales RoPE; the
/// others are 0. They are computed in float in the order of operations of transformers, because
/// angles at long contexts depend on the rounding.
///
/// `length`: number of positions of the sequence after the step that rotates tokens by these
/// frequencies (the largest position + 1). Only dynamic and longrope use it. Beyond the original
/// length, dynamic takes its base for this length, and longrope takes its long factors. A step
/// rotates its own queries and keys; cached keys keep the rotation of their step. A freshly loaded
/// model in transformers does the same. In one respect transformers differs: there, a long text
/// changes dynamic's frequencies for shorter texts that follow in the same process.
std::vector<float> rope_inverse_frequencies(const ModelConfig& config, std::int64_t length = 0);

/// Returns the description of the RoPE that layers with a window have: `config` with the base
/// window_rope_theta, no scaling, and the head_dim and window_rotary_dim of these layers; or
/// `config` itself.
ModelConfig with_window_rope(const ModelConfig& config);

}  // namespace kvzap
