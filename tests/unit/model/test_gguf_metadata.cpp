// A model's description in the metadata of a GGUF file, and back.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/model/model_config.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "files/json_file.hpp"
#include "gguf/architectures.hpp"
#include "gguf/tensor_names.hpp"
#include "golden/golden_files.hpp"
#include "model/gguf_metadata.hpp"
#include "model/read_weights.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

const fs::path folder_name = "model";

/// Changes that make a golden model one that GGUF can hold, as a JSON merge patch.
const std::map<std::string, json>& changes() {
  // The weights of files include the factors.
  const json unit_factors = {
      {"mamba_proj_bias", false},      {"projectors_bias", false},
      {"attention_bias", false},       {"mamba_norm_before_gate", false},
      {"embedding_multiplier", 1.0},   {"lm_head_multiplier", 1.0},
      {"key_multiplier", 1.0},         {"attention_out_multiplier", 1.0},
      {"ssm_in_multiplier", 1.0},      {"ssm_out_multiplier", 1.0},
      {"mlp_multipliers", {1.0, 1.0}}, {"ssm_multipliers", {1.0, 1.0, 1.0, 1.0, 1.0}}};
  static const std::map<std::string, json> all = {
      // Files imply the limits of Llama 3's scaling.
      {"llama-random", {{"rope_parameters", {{"original_max_position_embeddings", 8192}}}}},
      {"gemma2", {{"query_pre_attn_scalar", 16}}},
      {"gemma3_text", {{"query_pre_attn_scalar", 16}}},
      {"llama4_text",
       {{"attention_chunk_size", 8192},
        {"floor_scale", 8192},
        {"attn_scale", 0.1},
        {"no_rope_layers", {1, 1, 1, 0}},
        {"layer_types",
         {"chunked_attention", "chunked_attention", "chunked_attention", "full_attention"}}}},
      {"smollm3",
       {{"num_hidden_layers", 4},
        {"no_rope_layers", {1, 1, 1, 0}},
        {"layer_types", json(4, "full_attention")}}},
      // Files have no place for these biases and windows.
      {"seed_oss", {{"attention_out_bias", false}}},
      {"ernie4_5", {{"use_bias", false}}},
      {"exaone", {{"rope_parameters", {{"original_max_position_embeddings", 8192}}}}},
      {"mellum",
       {{"mlp_layer_types", json(4, "sparse")},
        {"rope_parameters", {{"sliding_attention", {{"rope_theta", 500000.0}}}}}}},
      {"mimo_v2_flash", {{"attention_bias", false}}},
      {"mimo_v2_full", {{"n_group", 1}, {"topk_group", 1}}},
      {"step3p7",
       {{"rope_parameters",
         {{"full_attention",
           {{"original_max_position_embeddings", 8192}, {"high_freq_factor", 4.0}}}}}}},
      {"phimoe", {{"router_jitter_noise", 0.01}}},
      {"arcee", {{"attention_bias", false}, {"mlp_bias", false}}},
      {"cohere", {{"attention_bias", false}}},
      {"cohere_norms", {{"num_hidden_layers", 64}}},
      {"olmoe", {{"clip_qkv", nullptr}}},
      {"stablelm_norms", {{"qk_layernorm", false}}},
      {"phi_norms", {{"qk_layernorm", false}}},
      {"exaone4", {{"sliding_window_pattern", 0}, {"layer_types", json(4, "full_attention")}}},
      {"dots1", {{"sliding_window", nullptr}, {"layer_types", json(4, "full_attention")}}},
      // A base with alpha is no float.
      {"hunyuan_v1_dense", {{"rope_parameters", {{"rope_type", "default"}, {"alpha", nullptr}}}}},
      {"hunyuan_v1_moe", {{"rope_parameters", {{"rope_type", "default"}, {"alpha", nullptr}}}}},
      {"deepseek_v3",
       {{"attention_bias", false},
        {"rope_parameters", {{"mscale", 0.7}, {"mscale_all_dim", 0.7}}}}},
      {"glm4_moe_lite", {{"mlp_layer_types", {"dense", "sparse", "sparse"}}}},
      {"youtu", {{"rope_interleave", true}}},
      {"minicpm3", {{"scale_emb", 12}, {"dim_model_base", 256}}},
      // Layers without rows read those of the two layers before them.
      {"gemma3n",
       {{"vocab_size_per_layer_input", 256},
        {"layer_types",
         {"full_attention", "sliding_attention", "sliding_attention", "full_attention",
          "sliding_attention", "full_attention", "sliding_attention"}}}},
      {"gemma4",
       {{"per_layer_config", {{"4", {{"head_dim", 24}}}}},
        {"layer_types",
         {"full_attention", "sliding_attention", "full_attention", "sliding_attention",
          "full_attention", "sliding_attention", "full_attention", "full_attention"}}}},
      {"afmoe",
       {{"layer_types",
         {"sliding_attention", "sliding_attention", "sliding_attention", "full_attention"}}}},
      {"bitnet", {{"hidden_act", "silu"}}},
      {"apertus", {{"rope_parameters", {{"original_max_position_embeddings", 8192}}}}},
      {"lfm2", {{"conv_bias", false}}},
      {"lfm2_moe", {{"routed_scaling_factor", 1.0}}},
      {"granitemoehybrid", {{"mamba_proj_bias", false}, {"mamba_conv_bias", true}}},
      {"falcon_h1", unit_factors},
      {"falcon_h1_gates", unit_factors},
      {"jamba_dense", {{"mamba_conv_bias", true}, {"mamba_proj_bias", false}, {"mamba_expand", 2}}},
      {"nemotron_h",
       {{"use_bias", false},
        {"intermediate_size", 24},
        {"layers_block_type", {"moe", "linear_attention", "full_attention", "moe"}}}},
      {"nemotron_h_states", {{"use_conv_bias", true}, {"num_key_value_heads", 2}}},
      {"qwen3_next", {{"linear_value_head_dim", 16}, {"linear_key_head_dim", 16}}},
      // The axes of images are those that transformers takes without the field.
      {"qwen3_5_text",
       {{"linear_value_head_dim", 16},
        {"linear_key_head_dim", 16},
        {"rope_parameters", {{"mrope_section", nullptr}}}}},
      {"qwen3_5_moe_text",
       {{"linear_value_head_dim", 16},
        {"linear_key_head_dim", 16},
        {"rope_parameters", {{"mrope_section", nullptr}}}}},
  };
  return all;
}

std::string bytes_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Writes a file with the model's description and the names of its tensors; their values are 0.
void write_gguf(const ModelConfig& config, const fs::path& file) {
  const gguf::Architecture& architecture = model::gguf_architecture(config, folder_name);
  const gguf::BlockFormat& f32 = *gguf::find_block_format("F32");
  gguf::GgufWriter writer;
  model::add_configuration(config, folder_name, 0, writer);
  std::vector<std::vector<float>> values;
  std::set<std::string> names;
  const auto add = [&](const std::string& name, std::vector<float> of_tensor) {
    if (!names.insert(name).second) return;
    writer.add_tensor(name, {static_cast<std::int64_t>(of_tensor.size())}, f32);
    values.push_back(std::move(of_tensor));
  };
  std::map<std::string, std::vector<float>> parameters;
  for (const auto& tensor : model::tensors_of(config)) {
    if (const auto key = gguf::activation_key(architecture, tensor.name)) {
      parameters[key->first].push_back(0.5F);
      continue;
    }
    const std::string name = gguf::first_gguf_name(architecture, tensor.name);
    // Sizes of these say what the model is.
    const bool is_table = name == "token_embd.weight" || name == "per_layer_token_embd.weight";
    const bool is_map = name == "blk.0.laurel_l.weight";
    const std::int64_t rows = is_table ? config.vocab_size : is_map ? tensor.shape.front() : 1;
    add(name, std::vector<float>(static_cast<std::size_t>(rows)));
  }
  for (const auto& factors : model::rope_factors(config)) add(factors.name, factors.values);
  for (const auto& [key, of_layers] : parameters) {
    writer.add_f32s(key, of_layers);
  }
  writer.write(file, [&](std::size_t index, const gguf::GgufWriter::Sink& sink) {
    sink(values[index].data(), values[index].size() * sizeof(float));
  });
}

/// Returns the model's class. Files of some classes say no more than those of another one.
std::string class_of(const ModelConfig& config) {
  if (config.architecture == "Glm4MoeLiteForCausalLM") return "DeepseekV3ForCausalLM";
  if (config.architecture == "SolarOpenForCausalLM") return "Glm4MoeForCausalLM";
  if (config.architecture == "Gemma4UnifiedForCausalLM") return "Gemma4ForCausalLM";
  return config.architecture;
}

/// Returns what a model computes, also where no key of the metadata says so.
std::string described(const ModelConfig& c) {
  std::string text = fmt::format(
      "{} {} {} {} {} {} {} {} {} eps {} {} theta {} {} rotary {} {} tied {} norm {} biases {} {} "
      "{} "
      "activation {} {} {} factors {} {} {} {} {} caps {} {} sinks {} gates {} {} norms {} {} head "
      "{} limit {} positions {}",
      class_of(c), c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
      c.head_dim, c.vocab_size, c.max_position_embeddings, c.longest_context(), c.rms_norm_eps,
      static_cast<int>(c.norm_type), c.rope_theta, c.window_rope_theta.value_or(0),
      c.rotated_dims(), c.rope_is_interleaved, c.tie_word_embeddings, static_cast<int>(c.qk_norm),
      c.qkv_bias, c.o_bias, c.mlp_bias, static_cast<int>(c.activation), c.gate_limit, c.is_parallel,
      c.embedding_multiplier, c.rounds_embedding_multiplier, c.residual_multiplier,
      c.logits_divisor, c.attention_multiplier.value_or(0), c.attention_soft_cap, c.logits_soft_cap,
      c.has_sinks, c.gates_attention, c.gates_feed_forward, c.norm_bias, c.shares_norm, c.head_bias,
      c.qkv_limit, c.embeds_positions);
  text += fmt::format("\nsections {} frequencies {} {}", fmt::join(c.image_sections, " "),
                      fmt::join(rope_inverse_frequencies(c, 8), " "), c.rope_attention_factor());
  if (c.query_scaling) {
    text += fmt::format("\nqueries {} {} {} {}", c.query_scaling->beta, c.query_scaling->length,
                        c.query_scaling->offset, c.query_scaling->in_rope_layers);
  }
  if (c.delta_net) {
    text += fmt::format("\nnet {} {} {} {} {}", c.delta_net->key_heads, c.delta_net->value_heads,
                        c.delta_net->key_dim, c.delta_net->value_dim, c.delta_net->kernel);
  }
  if (c.state_space) {
    const StateSpaceConfig& s = *c.state_space;
    text += fmt::format("\nspace {} {} {} {} {} biases {} {} gating {} steps {} {} {} {}", s.heads,
                        s.head_dim, s.groups, s.state_dim, s.kernel, s.has_convolution_bias,
                        s.has_projection_bias, static_cast<int>(s.gating), s.least_step,
                        s.largest_step, s.step_rank, s.norms_latents);
  }
  if (c.short_convolution) {
    text += fmt::format("\nconvolution {} {}", c.short_convolution->kernel,
                        c.short_convolution->has_bias);
  }
  if (c.layer_inputs) {
    text += fmt::format("\ninputs {} {}", c.layer_inputs->size, c.layer_inputs->vocab_size);
  }
  if (c.alt_up) {
    text += fmt::format("\nstreams {} {} {} {}", c.alt_up->streams, c.alt_up->active,
                        c.alt_up->scales_output, c.alt_up->laurel_rank);
  }
  if (c.latent) {
    const LatentConfig& l = *c.latent;
    text += fmt::format("\nlatent {} {} {} {} {}", l.rank, l.query_rank, l.nope_dim, l.rope_dim,
                        l.value_dim);
  }
  if (c.experts) {
    const ExpertsConfig& e = *c.experts;
    text += fmt::format("\nexperts {} {} {} {} {} {} {} {} {} {} {} {} {} {}", e.count, e.per_token,
                        e.intermediate_size, static_cast<int>(e.scores), e.has_correction, e.groups,
                        e.groups_per_token, e.normalises, e.scale, e.shared_intermediate_size,
                        e.has_shared_gate, e.has_router_bias, e.has_biases, e.scales_input);
  }
  for (const LayerConfig& layer : c.layers) {
    text += fmt::format("\nlayer {} {} {} {} {} {}", layer.has_rope, layer.has_experts,
                        static_cast<int>(layer.mixing), layer.window, layer.chunk,
                        layer.has_feed_forward);
    const std::int64_t width = layer.intermediate_size;
    text +=
        fmt::format(" {} {} {} {} {} {} {}", layer.rows_of, width > 0 ? width : c.intermediate_size,
                    layer.head_dim, layer.kv_heads_factor, layer.keeps_window,
                    layer.values_are_keys, static_cast<float>(layer.gate_cutoff.value_or(0)));
  }
  return text;
}

/// Every architecture: a model, its file, and the model that the file describes.
TEST(GgufMetadata, DescribesTheSameModel) {
  std::set<std::string_view> checked;
  std::vector<fs::path> models = {golden::golden_dir / "models/llama-random",
                                  golden::golden_dir / "models/qwen2-random"};
  for (const auto& entry : fs::directory_iterator(golden::golden_dir / "families")) {
    models.push_back(entry.path());
  }
  for (const fs::path& path : models) {
    const std::string name = path.filename().string();
    SCOPED_TRACE(name);
    json content = files::read_json_object(path / "config.json");
    if (changes().count(name) > 0) content.merge_patch(changes().at(name));
    if (name == "exaone4") content["sliding_window"] = nullptr;  // a patch would remove the field
    TemporaryFolder folder;
    folder.write("config.json", content.dump());
    const ModelConfig before = ModelConfig::load(folder.path());
    const auto* const architecture =
        gguf::architecture_of(before.architecture, before.experts.has_value());
    if (architecture == nullptr) continue;
    const fs::path first = folder.path() / "first.gguf", second = folder.path() / "second.gguf";
    write_gguf(before, first);
    const ModelConfig after = ModelConfig::load(first);
    // These architectures have no key for windows.
    if (name != "mistral_window" && name != "qwen2_window") {
      EXPECT_EQ(described(after), described(before));
    }
    // The file of that model is the same, too.
    write_gguf(after, second);
    EXPECT_EQ(bytes_of(second), bytes_of(first));
    EXPECT_EQ(model::read_config(second)->content, model::read_config(first)->content);
    checked.insert(architecture->name);
  }
  for (const gguf::Architecture& architecture : gguf::architectures()) {
    EXPECT_EQ(checked.count(architecture.name), 1u) << architecture.name;
  }
}

}  // namespace
}  // namespace kvzap::test
