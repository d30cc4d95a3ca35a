// config.json from the metadata of a GGUF file.
#include <fmt/format.h>

#include <algorithm>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

#include "files/quote.hpp"
#include "gguf/config_values.hpp"
#include "gguf/made_files.hpp"
#include "gguf/tensor_names.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

constexpr std::int64_t max_layers = 65536;

const Architecture& architecture_of_file(const Metadata& values) {
  constexpr const char* type_key = "general.type";
  const auto type = values.find_string(type_key);
  if (type && *type != "model") values.fail(type_key, "'model'", files::in_quotes(*type));
  constexpr const char* key = "general.architecture";
  const std::string_view name = values.string(key);
  std::vector<std::string_view> names;
  for (const Architecture& known : architectures()) {
    if (known.name == name) return known;
    names.push_back(known.name);
  }
  values.fail(key, files::alternatives(names), files::in_quotes(name));
}

/// Makes config.json of one file.
class ConfigMaker {
 public:
  explicit ConfigMaker(const GgufFile& file)
      : m_file(file),
        m_architecture(architecture_of_file(file.metadata())),
        m_values(file, m_architecture) {}

  json make() {
    m_config["architectures"] = {m_architecture.class_names.front()};
    m_config["model_type"] = m_architecture.model_type;
    read_layers();
    read_sizes();
    if (m_architecture.has_layer_norms) {
      m_config["layer_norm_eps"] = m_values.positive("attention.layer_norm_epsilon");
    } else {
      m_config["rms_norm_eps"] = m_values.positive("attention.layer_norm_rms_epsilon");
    }
    m_config["hidden_act"] = "silu";
    m_config["tie_word_embeddings"] = !m_values.has_tensor("output.weight");
    m_config["torch_dtype"] = dtype();
    add_rope_fields(m_values, m_sizes, m_config);
    m_biases = add_architecture_fields(m_values, m_sizes, m_config);
    refuse_settings();
    refuse_tensors();
    for (const char* name : {"bos", "eos"}) {
      const auto id = m_file.metadata().find_integer(
          fmt::format("tokenizer.ggml.{}_token_id", name), 0, ConfigValues::max_extent);
      if (id && *id < m_config["vocab_size"]) m_config[fmt::format("{}_token_id", name)] = *id;
    }
    return std::move(m_config);
  }

 private:
  void read_layers() {
    m_sizes.blocks = m_values.integer("block_count", 1, max_layers);
    m_sizes.layers = m_sizes.blocks;
    if (m_architecture.has_extra_blocks) {
      m_sizes.layers -=
          m_values.find_integer("nextn_predict_layers", 0, m_sizes.blocks - 1).value_or(0);
    }
    m_config["num_hidden_layers"] = m_sizes.layers;
  }

  void read_sizes() {
    const std::int64_t hidden = m_values.integer("embedding_length", 1);
    const std::int64_t heads = m_values.uniform("attention.head_count", m_sizes.blocks);
    m_config["hidden_size"] = hidden;
    read_width();
    m_config["num_attention_heads"] = heads;
    m_config["num_key_value_heads"] =
        m_values.find_uniform("attention.head_count_kv", m_sizes.blocks).value_or(heads);
    m_sizes.context = m_values.integer("context_length", 1);
    m_config["max_position_embeddings"] = m_sizes.context;
    read_head(hidden, heads);
    read_vocabulary_size();
  }

  void read_width() {
    constexpr const char* key = "feed_forward_length";
    // No layer has a dense part, and published files lack the key.
    const bool is_optional = m_architecture.name == "qwen35moe";
    const auto width = m_values.find_uniform(key, m_sizes.blocks);
    if (width && !is_optional) m_config["intermediate_size"] = *width;
    if (!width && !is_optional) m_values.uniform(key, m_sizes.blocks);  // throws
  }

  void read_head(std::int64_t hidden, std::int64_t heads) {
    const auto key_length = m_values.find_integer("attention.key_length", 1);
    if (!key_length && hidden % heads != 0) {
      m_values.fail("embedding_length",
                    fmt::format("a multiple of {}, as there is no {}", heads,
                                m_values.own("attention.key_length")),
                    fmt::format("{}", hidden));
    }
    const std::int64_t length = key_length.value_or(hidden / heads);
    if (length % 2 != 0) {
      m_values.fail(key_length ? "attention.key_length" : "embedding_length",
                    "an even number of values in a head", fmt::format("{}", length));
    }
    m_sizes.head_dim = m_sizes.rotary_dim = length;
    m_config["head_dim"] = length;
    for (const char* key : {"attention.value_length", "rope.dimension_count"}) {
      const bool is_partial =
          m_architecture.has_partial_rope && key == std::string_view("rope.dimension_count");
      const auto found = m_values.find_integer(key, 1);
      if (!found || *found == length) continue;
      if (is_partial && *found % 2 == 0 && *found < length) {
        m_sizes.rotary_dim = *found;
        continue;
      }
      m_values.fail(key,
                    is_partial
                        ? fmt::format("an even number up to {}, the length of a head", length)
                        : fmt::format("{}, the length of a head", length),
                    fmt::format("{}", *found));
    }
  }

  void read_vocabulary_size() {
    constexpr const char* key = "tokenizer.ggml.tokens";
    if (const TensorEntry* const table = m_file.find("token_embd.weight")) {
      m_config["vocab_size"] = table->shape.front();
    } else if (const auto tokens = m_file.metadata().find_strings(key, ConfigValues::max_extent)) {
      m_config["vocab_size"] = tokens->left();
    } else {
      m_config["vocab_size"] = m_values.integer("vocab_size", 1);
    }
  }

  std::string dtype() const {
    const TensorEntry* const weights = m_file.find("blk.0.attn_output.weight");
    if (weights == nullptr || weights->format == nullptr) return "bfloat16";
    if (weights->format->name == "F32") return "float32";
    return weights->format->name == "F16" ? "float16" : "bfloat16";
  }

  /// Settings of related models. If a file sets one that its architecture does not read, its
  /// results depend on it.
  void refuse_settings() {
    constexpr std::pair<const char*, double> neutral[] = {{"expert_count", 0},
                                                          {"expert_used_count", 0},
                                                          {"expert_shared_count", 0},
                                                          {"expert_group_count", 0},
                                                          {"expert_group_used_count", 0},
                                                          {"leading_dense_block_count", 0},
                                                          {"nextn_predict_layers", 0},
                                                          {"expert_weights_scale", 1},
                                                          {"logit_scale", 1},
                                                          {"residual_scale", 1},
                                                          {"embedding_scale", 1},
                                                          {"attention.scale", 0},
                                                          {"attention.clamp_kqv", 0},
                                                          {"attention.temperature_scale", 0},
                                                          {"attention.temperature_length", 0},
                                                          {"attn_logit_softcapping", 0},
                                                          {"final_logit_softcapping", 0},
                                                          {"rope.scaling.attn_factor", 1},
                                                          {"rope.scaling.yarn_ext_factor", 1},
                                                          {"rope.scaling.yarn_attn_factor", 1},
                                                          {"rope.scaling.yarn_log_multiplier", 0}};
    for (const auto& [key, number] : neutral) {
      if (m_values.was_read(key)) continue;
      const auto value = m_values.find_number(key);
      if (!value || *value == number) continue;
      m_values.fail(key, fmt::format("{} (other values are not supported)", number),
                    fmt::format("{}", *value));
    }
    constexpr const char* sections = "rope.dimension_sections";
    if (!m_values.was_read(sections) && m_file.metadata().has(m_values.own(sections))) {
      m_values.fail(sections, "none (RoPE of several axes is not supported)", "a value");
    }
  }

  /// A tensor that the architecture does not have belongs to another computation.
  void refuse_tensors() const {
    for (const auto& [name, tensor] : m_file.tensors()) {
      if (is_read(name)) continue;
      throw Error(fmt::format(
          "{}: tensor {}: expected no such tensor in a model of {} layers of "
          "the architecture {}",
          *tensor.file, files::in_quotes(name, 200), m_sizes.layers, m_architecture.name));
    }
  }

  bool is_read(std::string_view name) const {
    for (const char* whole :
         {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}) {
      if (name == whole) return true;
    }
    if (name == "rope_factors_long.weight" || name == "rope_factors_short.weight") {
      return m_architecture.name == "phi3";
    }
    const auto parts = parse_name_in_layer(name);
    if (!parts || parts->layer >= m_sizes.blocks) return false;
    return parts->layer >= m_sizes.layers || is_read_in_layer(parts->tensor, parts->kind);
  }

  bool is_read_in_layer(std::string_view tensor, std::string_view kind) const {
    std::string stacked;
    if (is_of_experts(tensor) && tensor.find('.') != tensor.npos) {
      stacked = fmt::format("{}_exps", tensor.substr(0, tensor.rfind('.')));
      tensor = stacked;
    }
    if (!m_architecture.has_tensor(tensor)) return false;
    const bool is_routed = is_of_experts(tensor) || tensor == "ffn_gate_inp";
    if (is_routed && !m_config.contains("num_experts_per_tok")) return false;
    const auto is_one_of = [&](std::initializer_list<std::string_view> names) {
      return std::find(names.begin(), names.end(), tensor) != names.end();
    };
    if (tensor == "exp_probs_b" || tensor == "ssm_dt") return kind == "bias";
    if (tensor == "ssm_a") return kind.empty();
    if (kind == "weight") return true;
    if (is_one_of({"attn_q", "attn_k", "attn_v"})) return m_biases.qkv;
    if (tensor == "attn_output") return m_biases.output;
    if (is_routed) return m_biases.experts;
    return is_one_of({"ffn_gate", "ffn_up", "ffn_down"}) && m_biases.feed_forward;
  }

  const GgufFile& m_file;
  const Architecture& m_architecture;
  ConfigValues m_values;
  ConfigSizes m_sizes;
  ConfigBiases m_biases;
  json m_config = json::object();
};

}  // namespace

json make_config(const GgufFile& file) { return ConfigMaker(file).make(); }

}  // namespace kvzap::gguf
