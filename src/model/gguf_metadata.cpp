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
        {"glm4moe", &MetadataWriter::add_glm4moe},
        {"olmo2", &MetadataWriter::add_olmo2},
        {"gemma2", &MetadataWriter::add_gemma2},
        {"gemma3", &MetadataWriter::add_gemma3},
        {"gpt-oss", &MetadataWriter::add_gpt_oss},
        {"cohere2", &MetadataWriter::add_cohere2},
        {"llama4", &MetadataWriter::add_llama4},
        {"qwen3next", &MetadataWriter::add_qwen3next},
        {"qwen35", &MetadataWriter::add_qwen35},
        {"qwen35moe", &MetadataWriter::add_qwen35moe}};
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
    // Without a key for windows, texts end where a window would begin to matter.
    const bool has_windows = m_architecture.window_pattern > 0 || m_architecture.name == "phi3";
    std::int64_t longest = m_config.max_position_embeddings;
    for (const LayerConfig& layer : m_config.layers) {
      if (!has_windows && layer.window > 0) longest = std::min(longest, layer.window);
    }
    add_u32("context_length", longest);
    add_u32("embedding_length", m_config.hidden_size);
    add_u32("feed_forward_length", m_config.intermediate_size);
    add_u32("attention.head_count", m_config.num_attention_heads);
    add_u32("attention.head_count_kv", m_config.num_key_value_heads);
    add_u32("attention.key_length", m_config.head_dim);
    add_u32("attention.value_length", m_config.head_dim);
    add_f32(m_architecture.has_layer_norms ? "attention.layer_norm_epsilon"
                                           : "attention.layer_norm_rms_epsilon",
            m_config.rms_norm_eps);
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
    // No key says so: gpt-oss does not round, other architectures do.
    const bool truncates = m_architecture.name != "gpt-oss";
    if (scaling.truncate != truncates) {
      fail("rope_parameters.truncate",
           fmt::format("{}, which {} in GGUF implies", truncates, m_architecture.name),
           fmt::format("{}", scaling.truncate));
    }
    if (!(is_usual || has_multiplier) ||
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

  /// Adds the window and the pattern of layers that have one.
  void add_windows() {
    std::int64_t window = 0, pattern = 0;  // 0: no layer is full
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      window = std::max(window, m_config.layer(l).window);
      if (pattern == 0 && m_config.layer(l).window == 0) pattern = l + 1;
    }
    if (window == 0) {
      fail("sliding_window",
           fmt::format("a window in some layers, which {} in GGUF implies", m_architecture.name),
           "none");
    }
    check_pattern(pattern, "sliding_attention");
    add_u32("attention.sliding_window", window);
    add_u32("attention.sliding_window_pattern", pattern);
  }

  void check_pattern(std::int64_t pattern, std::string_view reduced) const {
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      const bool is_full = m_config.layer(l).window == 0 && m_config.layer(l).chunk == 0;
      const bool expected = pattern > 0 && (l + 1) % pattern == 0;
      if (is_full == expected) continue;
      const auto name = [&](bool full) { return full ? "full_attention" : reduced; };
      fail(fmt::format("layer_types[{}]", l),
           fmt::format("{}, as GGUF needs one full layer in {}", name(expected), pattern),
           name(is_full));
    }
  }

  void require(bool condition, std::string_view field, std::string_view expected,
               std::string_view found) const {
    if (condition) return;
    fail(field, fmt::format("{}, which {} in GGUF implies", expected, m_architecture.name), found);
  }

  /// Programs do not read biases of attention in files of these architectures.
  void refuse_attention_bias() const {
    require(!m_config.qkv_bias && !m_config.o_bias, "attention_bias", "false", "true");
  }

  /// Programs scale RoPE of these architectures by keys alone, not by a tensor of factors.
  void check_scaling(bool may_be_yarn) const {
    if (!m_config.rope_scaling) return;
    const RopeType type = m_config.rope_scaling->type;
    require(type == RopeType::linear || (type == RopeType::yarn && may_be_yarn), "RoPE scaling",
            may_be_yarn ? "linear or yarn" : "linear", name_of(type));
  }

  void add_olmo2() {
    check_scaling(true);
    if (m_config.architecture != "Olmo3ForCausalLM") return;
    add_windows();
  }

  void check_gemma() const {
    constexpr double tolerance = 1e-6;
    refuse_attention_bias();
    const auto expected =
        m_architecture.query_scalar(m_config.num_hidden_layers, m_config.hidden_size,
                                    m_config.num_attention_heads, m_config.head_dim);
    const double found = 1 / (*m_config.attention_multiplier * *m_config.attention_multiplier);
    require(std::abs(found / static_cast<double>(expected) - 1) < tolerance,
            "query_pre_attn_scalar", fmt::format("{}", expected), fmt::format("{:.6g}", found));
  }

  void add_gemma2() {
    check_gemma();
    check_scaling(true);
    require(m_config.attention_soft_cap > 0, "attn_logit_softcapping", "a number above 0", "none");
    require(m_config.logits_soft_cap > 0, "final_logit_softcapping", "a number above 0", "none");
    require(m_config.tie_word_embeddings, "tie_word_embeddings", "true", "a head of its own");
    add_f32("attn_logit_softcapping", m_config.attention_soft_cap);
    add_f32("final_logit_softcapping", m_config.logits_soft_cap);
    add_windows();
  }

  void add_gemma3() {
    check_gemma();
    check_scaling(false);
    if (m_config.logits_soft_cap > 0) {
      add_f32("final_logit_softcapping", m_config.logits_soft_cap);
    }
    if (std::all_of(m_config.layers.begin(), m_config.layers.end(),
                    [](const LayerConfig& layer) { return layer.window == 0; })) {
      return;
    }
    add_windows();
    add_f32("rope.freq_base_swa", m_config.window_rope_theta.value_or(m_config.rope_theta));
  }

  void add_gpt_oss() {
    constexpr double limit = 7;
    require(m_config.gate_limit == limit, "swiglu_limit", fmt::format("{}", limit),
            fmt::format("{}", m_config.gate_limit));
    require(!m_config.tie_word_embeddings, "tie_word_embeddings", "false", "true");
    check_scaling(true);
    const ExpertsConfig& experts = *m_config.experts;
    add_u32("expert_count", experts.count);
    add_u32("expert_used_count", experts.per_token);
    add_u32("expert_feed_forward_length", experts.intermediate_size);
    add_windows();
  }

  void add_cohere2() {
    refuse_attention_bias();
    require(m_config.tie_word_embeddings, "tie_word_embeddings", "true", "a head of its own");
    add_f32("logit_scale", 1 / m_config.logits_divisor);
    add_windows();
  }

  /// Programs derive these settings from the architecture.
  void check_llama4() const {
    constexpr std::int64_t chunk = 8192, interval = 4, experts_without_norm = 128;
    constexpr double beta = 0.1;
    const bool has_norm = m_config.experts->count != experts_without_norm;
    require((m_config.qk_norm == QkNorm::unit) == has_norm, "use_qk_norm",
            fmt::format("{} for {} experts", has_norm, m_config.experts->count),
            fmt::format("{}", !has_norm));
    require(m_config.query_scaling.has_value(), "attn_temperature_tuning", "true", "false");
    require(m_config.query_scaling->beta == beta, "attn_scale", fmt::format("{}", beta),
            fmt::format("{}", m_config.query_scaling->beta));
    require(m_config.query_scaling->length == chunk, "floor_scale", fmt::format("{}", chunk),
            fmt::format("{}", m_config.query_scaling->length));
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      const LayerConfig layer = m_config.layer(l);
      const bool expected = (l + 1) % interval != 0;
      require(layer.has_rope == expected, fmt::format("no_rope_layers[{}]", l),
              expected ? "1" : "0", expected ? "0" : "1");
      require(layer.chunk == 0 || layer.chunk == chunk, "attention_chunk_size",
              fmt::format("{}", chunk), fmt::format("{}", layer.chunk));
    }
  }

  void add_llama4() {
    check_llama4();
    std::int64_t pattern = 0, step = 0;  // of full layers, and of layers with experts
    for (std::int64_t l = m_config.num_hidden_layers - 1; l >= 0; --l) {
      if (m_config.layer(l).chunk == 0) pattern = l + 1;
      if (m_config.layer(l).has_experts) step = l + 1;
    }
    check_pattern(pattern, "chunked_attention");
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      const bool expected = step > 0 && (l + 1) % step == 0;
      if (m_config.layer(l).has_experts == expected) continue;
      fail("moe_layers",
           fmt::format("every {}-th layer from the first one, layer {}", step, step - 1),
           fmt::format("layer {} {}", l, expected ? "without experts" : "with experts"));
    }
    add_experts(sigmoid);
    add_u32("interleave_moe_layer_step", step > 0 ? step : m_config.num_hidden_layers + 1);
    add_u32("attention.sliding_window_pattern", pattern);
  }

  /// Adds the layers with a delta net: all but every interval-th one, or a flag for each, which
  /// older programs do not know.
  void add_hybrid_layers() {
    std::vector<bool> has_delta_net;
    std::int64_t interval = 0;  // 0: no layer has attention
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      has_delta_net.push_back(m_config.layer(l).has_delta_net);
      if (interval == 0 && !has_delta_net.back()) interval = l + 1;
    }
    if (interval == 0) interval = m_config.num_hidden_layers + 1;
    add_u32("full_attention_interval", interval);
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      const bool expected = (l + 1) % interval != 0;
      if (has_delta_net[static_cast<std::size_t>(l)] == expected) continue;
      return m_writer.add_flags(own("attention.recurrent_layers"), has_delta_net);
    }
  }

  void add_hybrid() {
    refuse_attention_bias();
    check_scaling(true);
    const DeltaNetConfig& net = *m_config.delta_net;
    require(net.value_dim == net.key_dim, "linear_value_head_dim",
            fmt::format("{} as linear_key_head_dim", net.key_dim),
            fmt::format("{}", net.value_dim));
    add_u32("ssm.conv_kernel", net.kernel);
    add_u32("ssm.state_size", net.key_dim);
    add_u32("ssm.group_count", net.key_heads);
    add_u32("ssm.time_step_rank", net.value_heads);
    add_u32("ssm.inner_size", net.value_heads * net.value_dim);
    add_hybrid_layers();
  }

  void add_hybrid_experts() {
    check_norm(true);
    for (std::int64_t l = 0; l < m_config.num_hidden_layers; ++l) {
      require(m_config.layer(l).has_experts, "mlp_only_layers",
              fmt::format("experts in layer {}", l), "none");
    }
    add_experts(softmax);
    add_u32("expert_shared_feed_forward_length", m_config.experts->shared_intermediate_size);
  }

  void add_qwen3next() {
    add_hybrid();
    add_hybrid_experts();
  }

  /// Adds the pairs of dimensions of each image axis, which programs need for texts, too. Pairs
  /// take the axes in turns. llama.cpp does not rotate a pair beyond its axis' number.
  void add_image_sections() {
    std::vector<std::int64_t> sections = m_config.image_sections;
    if (sections.empty()) sections = {11, 11, 10};  // transformers' default
    const std::int64_t sum = sections[0] + sections[1] + sections[2];
    for (std::int64_t pair = 0; pair < m_config.rotated_dims() / 2; ++pair) {
      const std::int64_t place = sum == 0 ? 0 : pair % sum;
      require(place < 3 * sections[static_cast<std::size_t>(place % 3)],
              "rope_parameters.mrope_section", "three almost equal numbers",
              fmt::format("{}, {} and {}", sections[0], sections[1], sections[2]));
    }
    std::vector<std::int32_t> axes(sections.begin(), sections.end());
    axes.push_back(0);
    m_writer.add_i32s(own("rope.dimension_sections"), axes);
  }

  void add_qwen35() {
    add_hybrid();
    add_image_sections();
  }

  void add_qwen35moe() {
    add_qwen35();
    add_hybrid_experts();
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
