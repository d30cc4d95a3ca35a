// The architecture of a Hugging Face decoder model, as its config.json describes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// How RoPE is stretched to texts longer than those the model was trained on; as transformers 5
/// names and computes it (modeling_rope_utils.py).
enum class RopeType {
  linear,    // all wavelengths by `factor` (position interpolation, arXiv 2306.15595)
  dynamic,   // the base grows with the text once that is longer than the original length (NTK)
  yarn,      // by `factor` where a wavelength turns seldom within the original length (2309.00071)
  longrope,  // each wavelength by a factor of its own, other ones for long texts (2402.13753)
  llama3     // long wavelengths by `factor`, short ones not, those between interpolated
};

/// As config.json has it: "linear", "dynamic", "yarn", "longrope", "llama3".
std::string_view name_of(RopeType type);

/// RoPE scaling. What a type does not name below it does not use.
struct RopeScaling {
  RopeType type = RopeType::llama3;
  /// All types: how many times longer texts may get, >= 1 (llama3: > 0).
  double factor = 1;
  /// All types: tokens the model was trained on before its context was extended. For linear and
  /// dynamic the model's max_position_embeddings.
  std::int64_t original_max_position_embeddings = 0;
  /// yarn, longrope: what RoPE multiplies queries and keys by beside turning them; as the file has
  /// it, or as transformers derives it from factor, mscale and mscale_all_dim.
  double attention_factor = 1;
  /// llama3.
  double low_freq_factor = 0;
  double high_freq_factor = 0;
  /// yarn: turns within the original length above which a wavelength is kept, and below which it is
  /// stretched by the whole factor; whether the dimensions where that is are rounded outwards.
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;
  /// longrope: head_dim / 2 factors for texts up to the original length, and for longer ones.
  std::vector<double> short_factor;
  std::vector<double> long_factor;

  /// Whether frequencies depend on the length of the text: dynamic and longrope.
  bool depends_on_length() const { return type == RopeType::dynamic || type == RopeType::longrope; }

  bool operator==(const RopeScaling& other) const;
  bool operator!=(const RopeScaling& other) const { return !(*this == other); }
};

/// Sizes and switches of a decoder. What config.json leaves out has the default transformers gives
/// it. Everything that would change the result is either represented here or refused by load().
struct ModelConfig {
  /// "Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM" or "MistralForCausalLM".
  std::string architecture;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  /// Dimensions of one head; even. Need not be hidden_size / num_attention_heads.
  std::int64_t head_dim = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;
  double rms_norm_eps = 0;
  double rope_theta = 0;
  /// Absent: plain RoPE.
  std::optional<RopeScaling> rope_scaling;
  /// Value type the checkpoint declares (dtype or torch_dtype). The weights themselves decide.
  std::optional<DType> dtype;
  /// The output head is the embedding table; false unless config.json says otherwise.
  bool tie_word_embeddings = false;
  /// RMS norms over head_dim on queries and keys, before RoPE.
  bool qk_norm = false;
  bool qkv_bias = false;
  bool o_bias = false;
  /// Biases on gate, up and down.
  bool mlp_bias = false;
  /// Tokens that some layer attends to at most, the newest included; 0: all. A sequence of no more
  /// tokens than that is computed as without, and longer ones are not supported.
  std::int64_t sliding_window = 0;
  /// One line for each field that is not known and not known to be harmless; it was ignored.
  std::vector<std::string> warnings;

  /// Tokens of the longest text the model is meant for: max_position_embeddings, or more where RoPE
  /// is scaled. linear, dynamic, yarn and longrope: the original length times the factor, where
  /// that is longer. Never more than sliding_window.
  std::int64_t longest_context() const;
  /// What RoPE multiplies queries and keys by beside turning them (RopeScaling::attention_factor),
  /// in float; 1 for most models.
  float rope_attention_factor() const;
  /// Whether RoPE's frequencies depend on the length of the text.
  bool rope_depends_on_length() const { return rope_scaling && rope_scaling->depends_on_length(); }

  /// Query heads that share one KV head: num_attention_heads / num_key_value_heads.
  std::int64_t query_group() const { return num_attention_heads / num_key_value_heads; }

  /// Reads `folder`/config.json. Throws Error naming file, field, what was expected and what was
  /// found: for missing or malformed fields, sizes out of bounds, and every feature that would
  /// change the result and is not supported (other architectures, other RoPE types than default and
  /// those of RopeType, quantization, experts, soft capping, multipliers). Of a folder that is
  /// none, the error says what to do about it: a name of the Hugging Face hub, a GGUF file, a file
  /// of a folder.
  static ModelConfig load(const std::filesystem::path& folder);
};

/// Ids that end a generation: eos_token_id (one id or a list) of generation_config.json, else of
/// config.json, without repetitions, in the order given; empty if neither names one. Throws Error
/// for a malformed file or an id outside [0, vocab_size).
std::vector<TokenId> load_stop_ids(const std::filesystem::path& folder, std::int64_t vocab_size);

/// What a model's files say of how its answers' tokens are chosen, as far as transformers' generate
/// follows them without being told to: generation_config.json, or, where there is none, fields of
/// the same names in config.json. Fields for sampling (do_sample, temperature, top_k, top_p, min_p
/// and their like), lengths and output are left to the caller.
struct GenerationConfig {
  /// As load_stop_ids.
  std::vector<TokenId> stop_ids;
  /// See SamplingOptions.
  double repetition_penalty = 1;
  std::vector<TokenId> suppress_tokens;
  /// Without those that are a single one of stop_ids, as transformers leaves them out.
  std::vector<std::vector<TokenId>> bad_words;
  /// The file that these come from; empty if there is none.
  std::string file;
  /// One line for each field that is not known; it was ignored.
  std::vector<std::string> warnings;

  bool changes_logits() const {
    return repetition_penalty != 1 || !suppress_tokens.empty() || !bad_words.empty();
  }

  /// Throws Error naming file and field for malformed fields, ids outside [0, vocab_size), and for
  /// every other field that would change greedy answers (as no_repeat_ngram_size, min_new_tokens,
  /// forced_bos_token_id, num_beams).
  static GenerationConfig load(const std::filesystem::path& folder, std::int64_t vocab_size);
};

/// The scaling that `type` (linear, dynamic or yarn) and `factor` alone give a model: the original
/// length is its max_position_embeddings, everything else has transformers' defaults. Throws Error
/// for other types, which need more than a factor, and for a factor out of [1, 1e6].
RopeScaling rope_scaling_by_factor(const ModelConfig& config, RopeType type, double factor);

/// RoPE's inverse frequencies, head_dim / 2 values in radians per position: rope_theta^(-2i /
/// head_dim), scaled where the model has that. Computed in float in transformers' order of
/// operations, because angles at long contexts show the rounding.
///
/// `length`: positions of the sequence when the step is over in which tokens are turned by them
/// (the largest position + 1). It counts for dynamic and longrope alone: beyond the original length
/// dynamic's base is that of this length, and longrope's factors are the long ones. A step turns
/// its own queries and keys; those in a cache stay as earlier steps have turned them. So does
/// transformers with a model freshly loaded; that a long text there changes dynamic's frequencies
/// for shorter ones that come after it, in the same process, is not followed.
std::vector<float> rope_inverse_frequencies(const ModelConfig& config, std::int64_t length = 0);

}  // namespace kvzap
