// The architecture of a Hugging Face decoder model, as its config.json describes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/types.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap {

/// RoPE scaling of type "llama3": long wavelengths are stretched by `factor`, short ones kept,
/// those between interpolated.
struct RopeScaling {
  double factor;
  double low_freq_factor;
  double high_freq_factor;
  /// Tokens the model was trained on before its context was extended.
  std::int64_t original_max_position_embeddings;
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
  /// One line for each field that is not known and not known to be harmless; it was ignored.
  std::vector<std::string> warnings;

  /// Query heads that share one KV head: num_attention_heads / num_key_value_heads.
  std::int64_t query_group() const { return num_attention_heads / num_key_value_heads; }

  /// Reads `folder`/config.json. Throws Error naming file, field, what was expected and what was
  /// found: for missing or malformed fields, sizes out of bounds, and every feature that would
  /// change the result and is not supported (other architectures, RoPE types other than default and
  /// llama3, sliding windows, quantization, experts, soft capping, multipliers).
  static ModelConfig load(const std::filesystem::path& folder);
};

/// Ids that end a generation: eos_token_id (one id or a list) of generation_config.json, else of
/// config.json, without repetitions, in the order given; empty if neither names one. Throws Error
/// for a malformed file or an id outside [0, vocab_size).
std::vector<TokenId> load_stop_ids(const std::filesystem::path& folder, std::int64_t vocab_size);

/// RoPE's inverse frequencies, head_dim / 2 values in radians per token: rope_theta^(-2i /
/// head_dim), with llama3 scaling where the model has it. Computed in float in the order of
/// operations of transformers' `_compute_llama3_parameters`, because angles at long contexts show
/// the rounding.
std::vector<float> rope_inverse_frequencies(const ModelConfig& config);

}  // namespace kvzap
