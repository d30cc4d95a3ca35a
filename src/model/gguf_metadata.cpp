#include "model/gguf_metadata.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "gguf/model_file.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

std::uint32_t number(std::int64_t value) { return static_cast<std::uint32_t>(value); }

/// Adds the description of one model.
class MetadataWriter {
 public:
  MetadataWriter(const ModelConfig& config, const fs::path& folder, gguf::GgufWriter& writer)
      : m_config(config),
        m_folder(folder),
        m_architecture(gguf_architecture(config, folder)),
        m_writer(writer) {}

  void add(std::uint32_t file_type) {
    m_writer.add_string("general.architecture", m_architecture.name);
    m_writer.add_string("general.name", m_folder.filename().string());
    m_writer.add_u32("general.file_type", file_type);
    add_sizes();
    add_rope();
    constexpr std::pair<std::string_view, void (MetadataWriter::*)()> functions[] = {
        {"llama", &MetadataWriter::add_llama},
        {"qwen2moe", &MetadataWriter::add_qwen2moe},
        {"qwen3moe", &MetadataWriter::add_qwen3moe},
        {"mistral3", &MetadataWriter::add_mistral3},
        {"smollm3", &MetadataWriter::check_smollm3},
        {"minimax-m2", &MetadataWriter::add_minimax_m2},
        {"phi3", &MetadataWriter::add_phi3},
        {"granite", &MetadataWriter::add_granite},
        {"glm4moe", &MetadataWriter::add_glm4moe}};
    for (const auto& [name, function] : functions) {
      if (name == m_architecture.name) (this->*function)();
    }
  }

 private:
  std::string own(std::string_view key) const {
    return fmt::format("{}.{}", m_architecture.name, key);
  }
  void add_u32(std::string_view key, std::int64_t value) {
    m_writer.add_u32(own(key), number(value));
  }
  void add_f32(std::string_view key, double value) {
    m_writer.add_f32(own(key), static_cast<float>(value));
  }

  [[noreturn]] void fail(std::string_view field, std::string_view expected,
                         std::string_view found) const {
    throw Error(fmt::format("{}: {}: expected {}, found {}",
                            gguf::name_of_model_file(m_folder, "config.json"), field, expected,
                            found));
  }

  void add_sizes() {
    add_u32("block_count", m_config.num_hidden_layers);
    // Most architectures have no key for a window: texts end where it would begin to matter.
    std::int64_t longest = m_config.max_position_embeddings;
    for (const LayerConfig& layer : m_config.layers) {
      if (m_architecture.name != "phi3" && layer.window > 0) {
        longest = std::min(longest, layer.window);
      }
    }
    add_u32("context_length", longest);
    add_u32("embedding_length", m_config.hidden_size);
    add_u32("feed_forward_length", m_config.intermediate_size);
    add_u32("attention.head_count", m_config.num_attention_heads);
    add_u32("attention.head_count_kv", m_config.num_key_value_heads);
    add_u32("attention.key_length", m_config.head_dim);
    add_u32("attention.value_length", m_config.head_dim);
    add_f32("attention.layer_norm_rms_epsilon", m_config.rms_norm_eps);
    add_u32("vocab_size", m_config.vocab_size);
  }

  void add_rope() {
    add_f32("rope.freq_base", m_config.rope_theta);
    add_u32("rope.dimension_count", m_config.rotated_dims());
    if (!m_config.rope_scaling) return;
    const RopeScaling& scaling = *m_config.rope_scaling;
    switch (scaling.type) {
      case RopeType::llama3:
        return;  // rope_factors
      case RopeType::linear:
        return add_scaling("linear", scaling.factor);
      case RopeType::yarn:
        return add_yarn(scaling);
      case RopeType::longrope:
        if (m_architecture.name == "phi3") {
          add_u32("rope.scaling.original_context_length", scaling.original_max_position_embeddings);
          return add_f32("rope.scaling.attn_factor", scaling.attention_factor);
        }
        break;
      case RopeType::dynamic:
        break;
    }
    refuse_scaling();
  }

  [[noreturn]] void refuse_scaling() const {
    fail("RoPE scaling", "linear, llama3, or yarn with its usual attention factor",
         name_of(m_config.rope_scaling->type));
  }

  void add_scaling(std::string_view type, double factor) {
    m_writer.add_string(own("rope.scaling.type"), type);
    add_f32("rope.scaling.factor", factor);
  }

  void add_yarn(const RopeScaling& scaling) {
    constexpr double tolerance = 1e-6;
    const double growth = 0.1 * std::log(scaling.factor);
    // The attention factor is (growth + 1) / (multiplier growth + 1).
    const double multiplier =
        growth > 0 ? ((growth + 1) / scaling.attention_factor - 1) / growth : 0;
    const bool is_usual = std::abs(multiplier * growth) < tolerance;
    const bool has_multiplier = m_architecture.name == "mistral3";
    if (!scaling.truncate || !(is_usual || has_multiplier) ||
        (growth == 0 && std::abs(scaling.attention_factor - 1) > tolerance)) {
      refuse_scaling();
    }
    add_scaling("yarn", scaling.factor);
    add_u32("rope.scaling.original_context_length", scaling.original_max_position_embeddings);
    add_f32("rope.scaling.yarn_beta_fast", scaling.beta_fast);
    add_f32("rope.scaling.yarn_beta_slow", scaling.beta_slow);
    if (!is_usual) add_f32("rope.scaling.yarn_log_multiplier", multiplier);
  }

  // Numbers of expert_gating_func.
  enum Gating : std::uint32_t { softmax = 1, sigmoid = 2 };

  void add_experts(Gating gating) {
    const ExpertsConfig& experts = *m_config.experts;
    add_u32("expert_count", experts.count);
    add_u32("expert_used_count", experts.per_token);
    add_u32("expert_feed_forward_length", experts.intermediate_size);
    add_u32("expert_gating_func", gating);
  }

  /// Programs derive from these architectures whether weights are divided by their sum.
  void check_norm(bool expected) const {
    if (m_config.experts->normalises == expected) return;
    fail("norm_topk_prob",
         fmt::format("{}, which {} in GGUF implies", expected, m_architecture.name),
         fmt::format("{}", !expected));
  }

  void add_llama() {
    if (m_config.experts) add_experts(softmax);
  }

  void add_qwen2moe() {
    check_norm(false);
    add_experts(softmax);
    add_u32("expert_shared_feed_forward_length", m_config.experts->shared_intermediate_size);
  }

  void add_qwen3moe() {
    check_norm(true);
    add_experts(softmax);
  }

  void add_mistral3() {
    if (!m_config.query_scaling) return;
    add_f32("attention.temperature_scale", m_config.query_scaling->beta);
    const std::int64_t length = m_config.query_scaling->length;
    if (!m_config.rope_scaling) {
      add_u32("rope.scaling.original_context_length", length);
    } else if (m_config.rope_scaling->original_max_position_embeddings != length) {
      refuse_scaling();
    }
  }

  void check_smollm3() {
    constexpr std::int64_t interval = 4;
    for (std::int64_t layer = 0; layer < m_config.num_hidden_layers; ++layer) {
      const bool expected = (layer + 1) % interval != 0;
      if (m_config.layer(layer).has_rope == expected) continue;
      fail(fmt::format("no_rope_layers[{}]", layer),
           fmt::format("{}, which smollm3 in GGUF implies", expected ? 1 : 0),
           expected ? "0" : "1");
    }
  }

  void add_minimax_m2() { add_experts(sigmoid); }

  void add_phi3() {
    // llama.cpp takes Phi-4 from a window of 0.
    add_u32("attention.sliding_window", m_config.layer(0).window);
  }

  void add_granite() {
    add_f32("embedding_scale", m_config.embedding_multiplier);
    add_f32("residual_scale", m_config.residual_multiplier);
    add_f32("logit_scale", m_config.logits_divisor);
    if (m_config.attention_multiplier) {
      add_f32("attention.scale", *m_config.attention_multiplier);
    }
  }

  void add_glm4moe() {
    const ExpertsConfig& experts = *m_config.experts;
    add_experts(sigmoid);
    add_u32("expert_shared_count", experts.shared_intermediate_size / experts.intermediate_size);
    std::int64_t dense = 0;
    while (dense < m_config.num_hidden_layers && !m_config.layer(dense).has_experts) ++dense;
    add_u32("leading_dense_block_count", dense);
    add_f32("expert_weights_scale", experts.scale);
    m_writer.add_flag(own("expert_weights_norm"), experts.normalises);
    if (experts.groups == 1) return;
    add_u32("expert_group_count", experts.groups);
    add_u32("expert_group_used_count", experts.groups_per_token);
  }

  const ModelConfig& m_config;
  const fs::path& m_folder;
  const gguf::Architecture& m_architecture;
  gguf::GgufWriter& m_writer;
};

std::vector<float> narrowed(const std::vector<double>& values) {
  std::vector<float> result;
  result.reserve(values.size());
  for (const double value : values) result.push_back(static_cast<float>(value));
  return result;
}

}  // namespace

const gguf::Architecture& gguf_architecture(const ModelConfig& config, const fs::path& folder) {
  const gguf::Architecture* const found = gguf::architecture_of(config.architecture);
  if (found != nullptr) return *found;
  throw Error(fmt::format("{}: architectures: expected one that GGUF has a name for, found {}",
                          gguf::name_of_model_file(folder, "config.json"), config.architecture));
}

void add_configuration(const ModelConfig& config, const fs::path& folder, std::uint32_t file_type,
                       gguf::GgufWriter& writer) {
  MetadataWriter(config, folder, writer).add(file_type);
}

std::vector<RopeFactors> rope_factors(const ModelConfig& config) {
  if (!config.rope_scaling) return {};
  const RopeScaling& scaling = *config.rope_scaling;
  if (scaling.type == RopeType::longrope) {
    return {{"rope_factors_long.weight", narrowed(scaling.long_factor)},
            {"rope_factors_short.weight", narrowed(scaling.short_factor)}};
  }
  if (scaling.type != RopeType::llama3) return {};
  RopeFactors factors{"rope_freqs.weight", {}};
  const std::vector<float> scaled = rope_inverse_frequencies(config, 0);
  for (std::int64_t i = 0; i < config.rotated_dims() / 2; ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(config.rotated_dims());
    factors.values.push_back(static_cast<float>(std::pow(config.rope_theta, -exponent) /
                                                scaled[static_cast<std::size_t>(i)]));
  }
  return {factors};
}

}  // namespace kvzap::model
