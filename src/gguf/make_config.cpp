// config.json from the metadata of a GGUF file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

#include "base/quote.hpp"
#include "gguf/made_files.hpp"
#include "gguf/tensor_names.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

constexpr std::int64_t max_extent = 2147483647;
constexpr std::int64_t max_layers = 65536;

/// Makes config.json of one file.
class ConfigMaker {
 public:
  explicit ConfigMaker(const GgufFile& file) : m_file(file), m_values(file.metadata()) {}

  json make() {
    read_architecture();
    read_sizes();
    read_rope();
    m_config["rms_norm_eps"] = positive("attention.layer_norm_rms_epsilon");
    m_config["hidden_act"] = "silu";
    m_config["tie_word_embeddings"] = !has_tensor("output.weight");
    m_config["torch_dtype"] = dtype();
    m_attention_bias = m_architecture->name != "qwen2" && has_tensor("blk.0.attn_q.bias");
    m_mlp_bias = m_architecture->name == "llama" && has_tensor("blk.0.ffn_gate.bias");
    if (m_architecture->name != "qwen2") m_config["attention_bias"] = m_attention_bias;
    if (m_architecture->name == "llama") m_config["mlp_bias"] = m_mlp_bias;
    refuse_settings();
    refuse_tensors();
    for (const char* name : {"bos", "eos"}) {
      const auto id =
          m_values.find_integer(fmt::format("tokenizer.ggml.{}_token_id", name), 0, max_extent);
      if (id && *id < m_config["vocab_size"]) m_config[fmt::format("{}_token_id", name)] = *id;
    }
    return std::move(m_config);
  }

 private:
  std::string own(std::string_view key) const {
    return fmt::format("{}.{}", m_architecture->name, key);
  }
  bool has_tensor(std::string_view name) const { return m_file.find(name) != nullptr; }

  void read_architecture() {
    constexpr const char* type_key = "general.type";
    const auto type = m_values.find_string(type_key);
    if (type && *type != "model") m_values.fail(type_key, "'model'", base::in_quotes(*type));
    constexpr const char* key = "general.architecture";
    const std::string_view name = m_values.string(key);
    const std::vector<Architecture>& known = architectures();
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const Architecture& a) { return a.name == name; });
    if (found == known.end()) {
      std::vector<std::string_view> names;
      for (const Architecture& a : known) names.push_back(a.name);
      m_values.fail(key, base::alternatives(names), base::in_quotes(name));
    }
    m_architecture = &*found;
    m_config["architectures"] = {m_architecture->class_name};
    m_config["model_type"] = m_architecture->name;
  }

  /// Reads a value that may be an array with the same number for each layer.
  std::optional<std::int64_t> find_uniform(const std::string& key, std::int64_t layers) const {
    const MetadataValue* const value = m_values.find(key);
    if (value == nullptr || value->type != ValueType::array) {
      return m_values.find_integer(key, 1, max_extent);
    }
    const auto numbers =
        m_values.find_integers(key, static_cast<std::uint64_t>(layers), 1, max_extent);
    for (const std::int64_t number : *numbers) {
      if (number == numbers->front()) continue;
      m_values.fail(key, "the same number for all layers",
                    fmt::format("{} and {}", numbers->front(), number));
    }
    return numbers->front();
  }
  std::int64_t uniform(const std::string& key, std::int64_t layers) const {
    const auto value = find_uniform(key, layers);
    if (!value) m_values.fail(key, "a whole number above 0", "none");
    return *value;
  }

  double positive(std::string_view key) const {
    const auto value = m_values.find_number(own(key));
    if (value && *value > 0) return *value;
    m_values.fail(own(key), "a number above 0", value ? fmt::format("{}", *value) : "none");
  }

  void read_sizes() {
    m_layers = m_values.integer(own("block_count"), 1, max_layers);
    const std::int64_t hidden = m_values.integer(own("embedding_length"), 1, max_extent);
    const std::int64_t heads = uniform(own("attention.head_count"), m_layers);
    m_config["num_hidden_layers"] = m_layers;
    m_config["hidden_size"] = hidden;
    m_config["intermediate_size"] = uniform(own("feed_forward_length"), m_layers);
    m_config["num_attention_heads"] = heads;
    m_config["num_key_value_heads"] =
        find_uniform(own("attention.head_count_kv"), m_layers).value_or(heads);
    m_context = m_values.integer(own("context_length"), 1, max_extent);
    m_config["max_position_embeddings"] = m_context;

    const auto key_length = m_values.find_integer(own("attention.key_length"), 1, max_extent);
    if (!key_length && hidden % heads != 0) {
      m_values.fail(
          own("embedding_length"),
          fmt::format("a multiple of {}, as there is no {}", heads, own("attention.key_length")),
          fmt::format("{}", hidden));
    }
    m_head_dim = key_length.value_or(hidden / heads);
    if (m_head_dim % 2 != 0) {
      m_values.fail(own(key_length ? "attention.key_length" : "embedding_length"),
                    "an even number of values in a head", fmt::format("{}", m_head_dim));
    }
    m_config["head_dim"] = m_head_dim;
    for (const char* key : {"attention.value_length", "rope.dimension_count"}) {
      const auto length = m_values.find_integer(own(key), 1, max_extent);
      if (!length || *length == m_head_dim) continue;
      m_values.fail(own(key), fmt::format("{}, the length of a head", m_head_dim),
                    fmt::format("{}", *length));
    }
    read_vocabulary_size();
  }

  void read_vocabulary_size() {
    constexpr const char* key = "tokenizer.ggml.tokens";
    if (const TensorEntry* const table = m_file.find("token_embd.weight")) {
      m_config["vocab_size"] = table->shape.front();
    } else if (const auto tokens = m_values.find_strings(key, max_extent)) {
      m_config["vocab_size"] = tokens->left();
    } else {
      m_config["vocab_size"] = m_values.integer(own("vocab_size"), 1, max_extent);
    }
  }

  void read_rope() {
    const auto base = m_values.find_number(own("rope.freq_base"));
    m_config["rope_theta"] = base ? positive("rope.freq_base") : 10000.0;
    json scaling = scaling_of_keys();
    if (const TensorEntry* const factors = m_file.find("rope_freqs.weight")) {
      if (!scaling.is_null()) {
        m_values.fail(own("rope.scaling.type"), "none beside the tensor 'rope_freqs.weight'",
                      base::in_quotes(scaling["rope_type"].get<std::string>()));
      }
      scaling = scaling_of_factors(*factors);
    }
    if (!scaling.is_null()) m_config["rope_scaling"] = std::move(scaling);
  }

  json scaling_of_keys() const {
    const std::string key = own("rope.scaling.type");
    const auto type = m_values.find_string(key);
    const std::string older = own("rope.scale_linear");
    if (type == "yarn") {
      json scaling = {{"rope_type", "yarn"}, {"factor", positive("rope.scaling.factor")}};
      const auto original =
          m_values.find_integer(own("rope.scaling.original_context_length"), 1, max_extent);
      scaling["original_max_position_embeddings"] = original.value_or(m_context);
      for (const char* name : {"beta_fast", "beta_slow"}) {
        const auto beta = m_values.find_number(own(fmt::format("rope.scaling.yarn_{}", name)));
        if (beta) scaling[name] = *beta;
      }
      return scaling;
    }
    if (type == "linear" || (!type && m_values.has(older))) {
      const double factor = positive(type ? "rope.scaling.factor" : "rope.scale_linear");
      if (factor == 1) return nullptr;
      return {{"rope_type", "linear"}, {"factor", factor}};
    }
    if (type && *type != "none") {
      m_values.fail(key, "none, linear or yarn", base::in_quotes(*type));
    }
    return nullptr;
  }

  /// Returns the scaling that divides RoPE's frequencies by the factors of a tensor, which
  /// converters write for Llama 3.1 and newer.
  json scaling_of_factors(const TensorEntry& tensor) const {
    const std::int64_t pairs = m_head_dim / 2;
    const std::string where = fmt::format("{}: tensor '{}'", *tensor.file, tensor.name);
    if (tensor.shape != std::vector<std::int64_t>{pairs} || tensor.format == nullptr ||
        tensor.format->name != "F32") {
      throw Error(fmt::format("{}: expected {} values of type F32, found {} of type {}", where,
                              pairs, tensor.shape.back(), type_name(tensor)));
    }
    std::vector<float> factors(static_cast<std::size_t>(pairs));
    std::memcpy(factors.data(), tensor.data, tensor.bytes);
    for (const float factor : factors) {
      if (std::isfinite(factor) && factor > 0) continue;
      throw Error(fmt::format("{}: expected finite values above 0, found {}", where, factor));
    }
    const double largest = *std::max_element(factors.begin(), factors.end());
    if (largest == 1 && *std::min_element(factors.begin(), factors.end()) == 1) return nullptr;
    if (json llama3 = llama3_scaling(factors, largest); !llama3.is_null()) return llama3;
    // This kind of scaling takes any factors.
    return {{"rope_type", "longrope"}, {"factor", 1.0},
            {"attention_factor", 1.0}, {"original_max_position_embeddings", m_context},
            {"short_factor", factors}, {"long_factor", factors}};
  }

  /// Returns Llama 3's scaling if its published settings give these factors, else null.
  json llama3_scaling(const std::vector<float>& factors, double factor) const {
    constexpr double low = 1, high = 4, original = 8192;
    const double theta = m_config["rope_theta"].get<double>();
    for (std::size_t i = 0; i < factors.size(); ++i) {
      const double wavelength =
          2 * M_PI * std::pow(theta, 2 * static_cast<double>(i) / static_cast<double>(m_head_dim));
      const double smooth = (original / wavelength - low) / (high - low);
      const double expected = smooth > 1   ? 1
                              : smooth < 0 ? factor
                                           : 1 / ((1 - smooth) / factor + smooth);
      constexpr double tolerance = 1e-4;
      if (!(std::fabs(expected - factors[i]) <= tolerance * expected)) return nullptr;
    }
    return {{"rope_type", "llama3"},
            {"factor", factor},
            {"low_freq_factor", low},
            {"high_freq_factor", high},
            {"original_max_position_embeddings", static_cast<std::int64_t>(original)}};
  }

  std::string dtype() const {
    const TensorEntry* const weights = m_file.find("blk.0.attn_q.weight");
    if (weights == nullptr || weights->format == nullptr) return "bfloat16";
    if (weights->format->name == "F32") return "float32";
    return weights->format->name == "F16" ? "float16" : "bfloat16";
  }

  /// Settings of related models. If a file sets one, its results depend on it.
  void refuse_settings() const {
    constexpr std::pair<const char*, double> neutral[] = {{"expert_count", 0},
                                                          {"expert_used_count", 0},
                                                          {"logit_scale", 1},
                                                          {"residual_scale", 1},
                                                          {"embedding_scale", 1},
                                                          {"attention.scale", 0},
                                                          {"attention.clamp_kqv", 0},
                                                          {"attn_logit_softcapping", 0},
                                                          {"final_logit_softcapping", 0},
                                                          {"rope.scaling.attn_factor", 1},
                                                          {"rope.scaling.yarn_ext_factor", 1},
                                                          {"rope.scaling.yarn_attn_factor", 1},
                                                          {"rope.scaling.yarn_log_multiplier", 0}};
    for (const auto& [key, number] : neutral) {
      const auto value = m_values.find_number(own(key));
      if (!value || *value == number) continue;
      m_values.fail(own(key), fmt::format("{} (other values are not supported)", number),
                    fmt::format("{}", *value));
    }
  }

  /// A tensor that the architecture does not have belongs to another computation.
  void refuse_tensors() const {
    for (const auto& [name, tensor] : m_file.tensors()) {
      if (name == "rope_freqs.weight" || is_read(name)) continue;
      throw Error(
          fmt::format("{}: tensor {}: expected no such tensor in a model of {} layers of "
                      "the architecture {}",
                      *tensor.file, base::in_quotes(name, 200), m_layers, m_architecture->name));
    }
  }

  bool is_read(const std::string& name) const {
    if (!hugging_face_name(name)) return false;
    constexpr std::string_view layers = "blk.";
    if (name.compare(0, layers.size(), layers) != 0) return true;
    const std::size_t dot = name.find('.', layers.size());
    const std::string digits = name.substr(layers.size(), dot - layers.size());
    constexpr std::size_t max_digits = 9;
    if (digits.size() > max_digits || std::stoll(digits) >= m_layers) return false;
    const std::string own_name = name.substr(dot + 1);
    const auto is_one_of = [&](std::initializer_list<std::string_view> names) {
      return std::find(names.begin(), names.end(), own_name) != names.end();
    };
    if (is_one_of({"attn_q.bias", "attn_k.bias", "attn_v.bias"})) {
      return m_attention_bias || m_architecture->name == "qwen2";
    }
    if (own_name == "attn_output.bias") return m_attention_bias;
    if (is_one_of({"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"})) return m_mlp_bias;
    if (is_one_of({"attn_q_norm.weight", "attn_k_norm.weight"})) return m_architecture->qk_norm;
    return own_name.size() > 7 && own_name.compare(own_name.size() - 7, 7, ".weight") == 0;
  }

  const GgufFile& m_file;
  const Metadata& m_values;
  const Architecture* m_architecture = nullptr;
  std::int64_t m_layers = 0;
  std::int64_t m_context = 0;
  std::int64_t m_head_dim = 0;
  bool m_attention_bias = false;
  bool m_mlp_bias = false;
  json m_config = json::object();
};

}  // namespace

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> known = {{"llama", "LlamaForCausalLM", false},
                                                  {"qwen2", "Qwen2ForCausalLM", false},
                                                  {"qwen3", "Qwen3ForCausalLM", true}};
  return known;
}

json make_config(const GgufFile& file) { return ConfigMaker(file).make(); }

}  // namespace kvzap::gguf
