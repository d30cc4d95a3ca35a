// What config.json becomes for families with layers that have no attention, or have a state beside.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <string>
#include <string_view>

#include "model/cache_layers.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::DeltaNetConfig;
using kvzap::HeadPartition;
using kvzap::ModelConfig;
using kvzap::StateSpaceConfig;
using kvzap::TokenMixing;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

/// config.json with the essential sizes and `extra`, a list of further fields.
ModelConfig load(const std::string& class_name, const std::string& extra = "", int layers = 4) {
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":[")" + class_name +
                   R"("],"hidden_size":64,"intermediate_size":96,)"
                   R"("num_hidden_layers":)" +
                   std::to_string(layers) +
                   R"(,)"
                   R"("num_attention_heads":8,"num_key_value_heads":2,"vocab_size":100,)"
                   R"("max_position_embeddings":512)" +
                   (extra.empty() ? "" : "," + extra) + "}");
  return ModelConfig::load(folder.path());
}

/// A letter for each layer: attention, delta net, convolution, state space, both, none, one into
/// the other; then whether it has a feed-forward part (f) or experts (e).
std::string parts_of(const ModelConfig& config) {
  std::string text;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) {
    const kvzap::LayerConfig layer = config.layer(l);
    text += "adcsb-i"[static_cast<int>(layer.mixing)];
    if (layer.has_feed_forward) text += layer.has_experts ? 'e' : 'f';
    text += ' ';
  }
  return text;
}

TEST(HybridFamilies, Lfm2) {
  const ModelConfig by_indices =
      load("Lfm2ForCausalLM", R"("full_attn_idxs":[2],"conv_L_cache":5,"block_ff_dim":120,)"
                              R"("block_multiple_of":32,"block_ffn_dim_multiplier":1.3,)"
                              R"("tie_embedding":false,"block_dim":64,"conv_dim":64)");
  EXPECT_EQ(parts_of(by_indices), "cf cf af cf ");
  EXPECT_EQ(by_indices.short_convolution->kernel, 5);
  EXPECT_FALSE(by_indices.short_convolution->has_bias);
  EXPECT_EQ(by_indices.intermediate_size, 128);  // 120 * 2 / 3 * 1.3 = 104, rounded up
  EXPECT_FALSE(by_indices.tie_word_embeddings);
  EXPECT_TRUE(by_indices.warnings.empty());
  EXPECT_EQ(parts_of(load("Lfm2ForCausalLM")), "af af af af ");
  const ModelConfig experts =
      load("Lfm2MoeForCausalLM",
           R"("layer_types":["conv","full_attention","conv","conv"],"num_experts":8)");
  EXPECT_EQ(parts_of(experts), "cf af ce ce ");
  EXPECT_TRUE(experts.experts->has_correction);
  expect_error([] { load("Lfm2ForCausalLM", R"("conv_L_cache":1)"); },
               {"conv_L_cache", "at least 2", "found 1"});
  expect_error([] { load("Lfm2ForCausalLM", R"("conv_L_cache":17)"); }, {"conv_L_cache"});
  expect_error([] { load("Lfm2ForCausalLM", R"("full_attn_idxs":[4])"); },
               {"full_attn_idxs", "0 to 3"});
  expect_error(
      [] { load("Lfm2ForCausalLM", R"("block_ff_dim":9999,"block_ffn_dim_multiplier":1e6)"); },
      {"block_ffn_dim_multiplier"});
}

TEST(HybridFamilies, Bamba) {
  const std::string sizes = R"("mamba_n_heads":8,"mamba_n_groups":2,"mamba_d_state":16)";
  const ModelConfig config = load("BambaForCausalLM", sizes + R"(,"attn_layer_indices":[1])");
  EXPECT_EQ(parts_of(config), "sf af sf sf ");
  const StateSpaceConfig& space = *config.state_space;
  EXPECT_EQ(space.head_dim, 16);  // 2 * 64 / 8
  EXPECT_EQ(space.projections(), 2 * 128 + 2 * 32 + 8);
  EXPECT_EQ(space.state_values(), 16 * 16 + 3 * (16 + 32));
  EXPECT_EQ(config.rotary_dim, 4);
  EXPECT_EQ(parts_of(load("BambaForCausalLM", sizes)), "sf sf sf sf ");
  for (const char* limit : {R"({"__float__":"Infinity"})", "Infinity"}) {
    const ModelConfig limited =
        load("BambaForCausalLM", fmt::format(R"({},"time_step_limit":[0.01,{}])", sizes, limit));
    EXPECT_EQ(limited.state_space->least_step, 0.01);
    EXPECT_EQ(limited.state_space->largest_step, 0);
  }
  EXPECT_EQ(
      load("BambaForCausalLM", sizes + R"(,"time_step_limit":[0,0.5])").state_space->largest_step,
      0.5);
  for (const char* limits : {"[0]", R"([0,"Infinity ")", "[-1,1]", "[0,-Infinity]", "3"}) {
    expect_error(
        [&] { load("BambaForCausalLM", fmt::format(R"({},"time_step_limit":{})", sizes, limits)); },
        {});
  }
  expect_error([] { load("BambaForCausalLM", R"("mamba_n_heads":9)"); }, {"mamba_n_heads", "128"});
  expect_error([] { load("BambaForCausalLM", R"("mamba_n_heads":8,"mamba_n_groups":3)"); },
               {"mamba_n_groups", "a divisor of mamba_n_heads (8)", "found 3"});
  expect_error([&] { load("BambaForCausalLM", sizes + R"(,"attn_layer_indices":[4])"); },
               {"attn_layer_indices", "0 to 3"});
  expect_error([] { load("BambaForCausalLM", R"("mamba_d_state":65537)"); }, {"mamba_d_state"});
  expect_error([&] { load("BambaForCausalLM", sizes + R"(,"mamba_d_conv":17)"); },
               {"mamba_d_conv"});
}

TEST(HybridFamilies, GraniteMoeHybrid) {
  const std::string sizes = R"("mamba_n_heads":8,"mamba_d_state":16)";
  const ModelConfig config =
      load("GraniteMoeHybridForCausalLM",
           sizes + R"(,"layer_types":["mamba","attention","mamba","linear_attention"],)"
                   R"("num_local_experts":8,"shared_intermediate_size":48)");
  EXPECT_EQ(parts_of(config), "se ae se se ");
  EXPECT_FALSE(config.layer(1).has_rope);
  EXPECT_EQ(config.experts->shared_intermediate_size, 48);
  const ModelConfig dense =
      load("GraniteMoeHybridForCausalLM",
           sizes + R"(,"num_local_experts":0,"num_experts_per_tok":0,)"
                   R"("shared_intermediate_size":48,"position_embedding_type":"rope")");
  EXPECT_EQ(parts_of(dense), "sf sf sf sf ");
  EXPECT_EQ(dense.intermediate_size, 48);
  EXPECT_TRUE(dense.layer(0).has_rope);
  expect_error([&] { load("GraniteMoeHybridForCausalLM", sizes + R"(,"layer_types":["mamba"])"); },
               {"layer_types", "4 names"});
  expect_error(
      [&] {
        load("GraniteMoeHybridForCausalLM",
             sizes + R"(,"layer_types":["mamba","mamba","mamba","mlp"])");
      },
      {"layer_types", "'mlp'"});
}

TEST(HybridFamilies, NemotronH) {
  const std::string sizes =
      R"("mamba_num_heads":6,"mamba_head_dim":12,"n_groups":2,"ssm_state_size":14)";
  const ModelConfig config =
      load("NemotronHForCausalLM",
           sizes + R"(,"hybrid_override_pattern":"M-*EM","n_routed_experts":8,)"
                   R"("moe_intermediate_size":24,"time_step_limit":[0.0,Infinity])");
  EXPECT_EQ(parts_of(config), "s -f a -e s ");
  EXPECT_EQ(config.num_hidden_layers, 5);
  EXPECT_EQ(config.experts->shared_intermediate_size, 7688);
  EXPECT_EQ(config.state_space->least_step, 0.001);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(kvzap::model::full_layers(config), 1);
  const auto states = kvzap::model::states(config, HeadPartition::even(5, 2, 1), 0);
  EXPECT_EQ(states[0].heads, 6);
  EXPECT_TRUE(states[1].keeps_nothing);
  EXPECT_EQ(states[2].values, 0);
  const ModelConfig none =
      load("NemotronHForCausalLM", sizes + R"(,"layers_block_type":["linear_attention","mlp"])");
  EXPECT_FALSE(none.experts);
  expect_error([&] { kvzap::model::require_full_layers(none); }, {"nothing can be pruned"});
  expect_error([&] { load("NemotronHForCausalLM", sizes); }, {"layer_types", "found none"});
  expect_error([&] { load("NemotronHForCausalLM", sizes + R"(,"hybrid_override_pattern":"MX")"); },
               {"hybrid_override_pattern", "\"mlp\" (-)", "'X'"});
  expect_error(
      [&] {
        load("NemotronHForCausalLM",
             sizes + R"(,"hybrid_override_pattern":"E","n_routed_experts":8,"moe_latent_size":9)");
      },
      {"moe_latent_size"});
}

TEST(HybridFamilies, FalconH1) {
  const std::string sizes = R"("mamba_d_ssm":72,"mamba_n_heads":6,"mamba_d_state":16)";
  const ModelConfig config =
      load("FalconH1ForCausalLM",
           sizes + R"(,"ssm_in_multiplier":2,"ssm_multipliers":[1,2,3,4,5],"key_multiplier":0.5,)"
                   R"("mlp_multipliers":[1.5,0.25],"lm_head_multiplier":0.1)");
  EXPECT_EQ(parts_of(config), "bf bf bf bf ");
  EXPECT_EQ(config.state_space->head_dim, 12);
  EXPECT_EQ(config.state_space->gating, StateSpaceConfig::Gating::gate);
  EXPECT_EQ(config.state_space->in_multipliers, (std::array<double, 5>{2, 4, 6, 8, 10}));
  EXPECT_EQ(config.feed_forward_multiplier, 0.25);
  EXPECT_EQ(config.logits_divisor, 10);
  EXPECT_NEAR(*config.attention_multiplier, 0.5 / std::sqrt(8.0), 1e-12);
  EXPECT_EQ(kvzap::model::full_layers(config), 4);
  const auto shape = kvzap::model::cache_shape(config, HeadPartition::even(4, 2, 1), 0, 8, 16);
  EXPECT_TRUE(shape.has_rows(0));
  EXPECT_TRUE(shape.has_state(0));
  EXPECT_TRUE(shape.has_pages(0));
  expect_error([&] { load("FalconH1ForCausalLM", sizes + R"(,"attention_in_multiplier":2)"); },
               {"attention_in_multiplier"});
  expect_error([&] { load("FalconH1ForCausalLM", sizes + R"(,"mlp_multipliers":[1])"); },
               {"mlp_multipliers", "2 numbers"});
  expect_error([&] { load("FalconH1ForCausalLM", sizes + R"(,"projectors_bias":true)"); },
               {"projectors_bias"});
  expect_error(
      [&] {
        load("FalconH1ForCausalLM",
             sizes + R"(,"projectors_bias":true,"mamba_proj_bias":true,"ssm_in_multiplier":2)");
      },
      {"ssm_in_multiplier"});
}

TEST(HybridFamilies, Jamba) {
  const ModelConfig config = load(
      "JambaForCausalLM", R"("attn_layer_period":4,"attn_layer_offset":1,"expert_layer_offset":0,)"
                          R"("num_experts":6,"mamba_d_state":8,"sliding_window":null)");
  EXPECT_EQ(parts_of(config), "se af se sf ");
  const StateSpaceConfig& space = *config.state_space;
  EXPECT_EQ(space.heads, 4);
  EXPECT_EQ(space.head_dim, 32);
  EXPECT_EQ(space.step_rank, 4);  // 64 / 16
  EXPECT_EQ(space.projections(), 2 * 128);
  EXPECT_EQ(space.state_values(), 8 * 32 + 3 * 32);
  EXPECT_TRUE(space.norms_latents);
  EXPECT_FALSE(config.layer(1).has_rope);
  EXPECT_EQ(config.experts->per_token, 2);
  EXPECT_FALSE(config.experts->normalises);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(load("JambaForCausalLM").experts->count, 16);
  const ModelConfig dense =
      load("JambaForCausalLM", R"("num_experts":1,"num_experts_per_tok":1,"mamba_dt_rank":9)");
  EXPECT_EQ(parts_of(dense), "sf sf sf sf ");
  EXPECT_EQ(dense.state_space->step_rank, 9);
  expect_error([] { load("JambaForCausalLM", R"("attn_layer_offset":8)"); },
               {"attn_layer_offset", "below attn_layer_period (8)", "found 8"});
  expect_error([] { load("JambaForCausalLM", R"("expert_layer_offset":0.5)"); },
               {"expert_layer_offset", "a whole number"});
  expect_error([] { load("JambaForCausalLM", R"("mamba_dt_rank":0)"); }, {"mamba_dt_rank"});
  expect_error([] { load("JambaForCausalLM", R"("mamba_d_conv":17)"); }, {"mamba_d_conv"});
  expect_error([] { load("JambaForCausalLM", R"("mamba_expand":1024,"mamba_d_state":65536)"); },
               {"mamba_expand", "mamba_d_state 65536"});
  expect_error([] { load("JambaForCausalLM", R"("num_experts":6,"num_experts_per_tok":7)"); },
               {"num_experts_per_tok", "at most num_experts (6)"});
  expect_error([] { load("JambaForCausalLM", R"("sliding_window":8)"); }, {"sliding_window"});
}

TEST(HybridFamilies, Zamba) {
  const std::string sizes = R"("mamba_d_state":8,"attn_layer_period":2,"attn_layer_offset":0)";
  const ModelConfig config = load("ZambaForCausalLM", sizes);
  EXPECT_EQ(parts_of(config), "s s if if ");
  EXPECT_EQ(config.layer(2).weights_of, -1);
  EXPECT_EQ(config.layer(3).weights_of, 2);
  EXPECT_EQ(config.head_dim, 16);  // 2 * 64 / 8
  EXPECT_EQ(config.attention_inputs(), 128);
  EXPECT_NEAR(*config.attention_multiplier, 1 / std::sqrt(8.0), 1e-12);
  EXPECT_EQ(config.state_space->groups, 2);
  EXPECT_EQ(config.state_space->heads, 4);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(kvzap::model::full_layers(config), 2);
  const auto shape = kvzap::model::cache_shape(config, HeadPartition::even(4, 2, 1), 0, 8, 16);
  EXPECT_TRUE(shape.has_pages(2));
  EXPECT_TRUE(shape.has_state(2));
  EXPECT_FALSE(shape.has_rows(1));
  EXPECT_EQ(parts_of(load("ZambaForCausalLM",
                          R"("layers_block_type":["hybrid","mamba","mamba","hybrid"])")),
            "if s s if ");
  expect_error([] { load("ZambaForCausalLM", R"("n_mamba_heads":3)"); },
               {"n_mamba_heads", "a divisor of the 128 channels", "found 3"});
  expect_error([] { load("ZambaForCausalLM", R"("layers_block_type":["hybrid"])"); },
               {"layers_block_type", "4 names", "found 1"});
  expect_error(
      [] { load("ZambaForCausalLM", R"("layers_block_type":["mamba","mamba","mamba","mamba"])"); },
      {"layers_block_type", "at least one"});
  expect_error([] { load("ZambaForCausalLM", R"("attention_hidden_size":64)"); },
               {"attention_hidden_size", "2 hidden_size (128)"});
  expect_error([] { load("ZambaForCausalLM", R"("hidden_mamba_act":"gelu")"); },
               {"hidden_mamba_act"});
}

TEST(HybridFamilies, Zamba2) {
  const std::string sizes =
      R"("layers_block_type":["hybrid","hybrid","linear_attention","hybrid"],"mamba_d_state":16)";
  const ModelConfig config = load(
      "Zamba2ForCausalLM", sizes + R"(,"num_mem_blocks":2,"adapter_rank":8,"use_mem_rope":true)");
  EXPECT_EQ(parts_of(config), "if if s if ");
  EXPECT_EQ(config.layer(1).weights_of, -1);
  EXPECT_EQ(config.layer(3).weights_of, 0);
  EXPECT_TRUE(config.layer(0).has_rope);
  EXPECT_EQ(config.shared_blocks->feed_forward_rank, 8);
  EXPECT_EQ(config.shared_blocks->attention_rank, 0);
  EXPECT_EQ(config.state_space->head_dim, 16);  // 2 * 64 / 8
  EXPECT_EQ(config.state_space->norm_eps, 1e-5);
  EXPECT_EQ(config.state_space->least_step, 0.001);
  EXPECT_FALSE(load("Zamba2ForCausalLM", sizes).layer(0).has_rope);
  EXPECT_EQ(
      load("Zamba2ForCausalLM", sizes + R"(,"tie_word_embeddings":false)").layer(3).weights_of, -1);
  EXPECT_EQ(
      load("Zamba2ForCausalLM", sizes + R"(,"use_long_context":true)").max_position_embeddings,
      16384);
  expect_error(
      [&] { load("Zamba2ForCausalLM", sizes + R"(,"use_shared_attention_adapter":true)"); },
      {"num_key_value_heads", "num_attention_heads (8)", "found 2"});
  expect_error([] { load("Zamba2ForCausalLM"); }, {"layer_types", "4 layers", "found none"});
  expect_error([&] { load("Zamba2ForCausalLM", sizes + R"(,"n_mamba_heads":9)"); },
               {"n_mamba_heads", "128"});
  expect_error(
      [] {
        load("Zamba2ForCausalLM", R"("layers_block_type":["mlp","hybrid","hybrid","hybrid"])");
      },
      {"layers_block_type", "'mlp'"});
}

TEST(HybridFamilies, Lfm3) {
  EXPECT_EQ(parts_of(load("Lfm3ForCausalLM")), "cf cf af cf ");
  const ModelConfig config = load(
      "Lfm3ForCausalLM",
      R"("layer_types":["conv","full_attention","conv","sliding_attention"],"sliding_window":32)");
  EXPECT_EQ(parts_of(config), "cf af cf af ");
  EXPECT_EQ(config.layer(1).window, 0);
  EXPECT_EQ(config.layer(3).window, 32);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.turning_part, 0.5);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(*config.window_rope_theta, 1e4);
  EXPECT_EQ(config.short_convolution->kernel, 7);
  EXPECT_TRUE(config.gates_heads);
  EXPECT_FALSE(load("Lfm3ForCausalLM", R"("use_attention_gate":false)").gates_attention);
  EXPECT_TRUE(config.norms_outputs);
  EXPECT_FALSE(load("Lfm3ForCausalLM", R"("use_sandwich_norm":false)").norms_outputs);
  expect_error([] { load("Lfm3ForCausalLM", R"("layer_types":["conv"])"); },
               {"layer_types", "4 names"});
  expect_error([] { load("Lfm3ForCausalLM", R"("layer_types":["conv","conv","conv","mamba"])"); },
               {"layer_types", "'mamba'"});
  expect_error(
      [] {
        load("Lfm3ForCausalLM",
             R"("layer_types":["conv","sliding_attention","conv","conv"],"sliding_window":null)");
      },
      {"sliding_window"});
}

TEST(HybridFamilies, OlmoHybrid) {
  const ModelConfig config = load("OlmoHybridForCausalLM");
  EXPECT_EQ(parts_of(config), "df df df af ");
  EXPECT_EQ(config.delta_net->key_heads, 8);
  EXPECT_EQ(config.delta_net->key_dim, 6);  // 0.75 * 64 / 8
  EXPECT_EQ(config.delta_net->value_dim, 12);
  EXPECT_EQ(config.delta_net->strength_multiplier, 2);
  EXPECT_EQ(parts_of(load("OlmoHybridForCausalLM", "", 3)), "df df af ");
  const auto theta = [](const std::string& fields) {
    const ModelConfig read = load("OlmoHybridForCausalLM", fields);
    return read.layer(3).has_rope ? read.rope_theta : 0;
  };
  EXPECT_EQ(theta(""), 10000);
  EXPECT_EQ(theta(R"("rope_parameters":null)"), 10000);
  EXPECT_EQ(theta(R"("rope_theta":500000.0)"), 500000);
  EXPECT_EQ(theta(R"("rope_parameters":{"rope_type":"default"})"), 10000);
  EXPECT_EQ(theta(R"("rope_parameters":{"rope_theta":40000.0,"rope_type":"default"})"), 40000);
  EXPECT_EQ(theta(R"("rope_parameters":{"rope_theta":null,"rope_type":"default"})"), 0);
}

TEST(HybridFamilies, OlderNamesOfNemotronH) {
  const std::string sizes =
      R"("mamba_num_heads":8,"mamba_head_dim":12,"n_groups":2,"mamba_n_groups":4,)"
      R"("num_nextn_predict_layers":1,"rms_norm_eps":0.001,"hybrid_override_pattern":"M-*M")";
  const ModelConfig config = load("NemotronHForCausalLM", sizes + R"(,"layers_block_type":null)");
  EXPECT_EQ(config.state_space->groups, 4);  // the older name decides
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(parts_of(config), "s -f a s ");
  for (const char* limits : {"[0,0]", "[Infinity,1]", R"([{"__float__":"Infinity"},1])"}) {
    expect_error(
        [&] {
          load("BambaForCausalLM",
               R"("mamba_n_heads":8,"mamba_d_head":16,"time_step_limit":)" + std::string(limits));
        },
        {"time_step_limit", "above zero"});
  }
}

TEST(LatentFamilies, NullIsAsAbsent) {
  for (const char* name : {"DeepseekV3ForCausalLM", "YoutuForCausalLM", "MiniCPM3ForCausalLM"}) {
    const std::string experts = std::string(name) == "DeepseekV3ForCausalLM"
                                    ? R"("n_routed_experts":16,"n_group":4,"topk_group":2)"
                                    : R"("bos_token_id":1)";
    const ModelConfig absent = load(name, experts);
    for (const std::string field : {"kv_lora_rank", "qk_rope_head_dim"}) {
      const ModelConfig read = load(name, experts + ",\"" + field + R"(":null)");
      EXPECT_EQ(read.head_dim, absent.latent->rank + absent.latent->rope_dim) << name << field;
      EXPECT_EQ(read.latent->rank, absent.latent->rank) << name << field;
    }
    expect_error([&] { load(name, experts + R"(,"kv_lora_rank":3)"); },
                 {"kv_lora_rank", "even", "found 3"});
    expect_error([&] { load(name, experts + R"(,"kv_lora_rank":65536)"); },
                 {"kv_lora_rank", "at most 65536", "found 65536"});
  }
  const ModelConfig lite =
      load("Glm4MoeLiteForCausalLM", R"("n_routed_experts":8,"first_k_dense_replace":3)");
  EXPECT_EQ(parts_of(lite), "af ae ae ae ");
}

TEST(LatentFamilies, SarvamMla) {
  const ModelConfig config =
      load("SarvamMLAForCausalLM",
           R"("num_experts":8,"moe_intermediate_size":24,"rope_scaling":{"type":"deepseek_yarn",)"
           R"("factor":4,"original_max_position_embeddings":64,"mscale":1,"mscale_all_dim":1})");
  EXPECT_EQ(parts_of(config), "af ae ae ae ");
  EXPECT_EQ(config.latent->query_rank, 0);
  EXPECT_EQ(config.experts->groups, 1);
  EXPECT_EQ(config.rope_scaling->type, kvzap::RopeType::yarn);
}

TEST(LatentFamilies, LongcatFlash) {
  const std::string sizes = R"("num_layers":3,"n_routed_experts":8,"ffn_hidden_size":40,)"
                            R"("expert_ffn_hidden_size":24,"moe_topk":9,"zero_expert_num":)";
  const ModelConfig config = load("LongcatFlashForCausalLM", sizes + "4");
  EXPECT_EQ(parts_of(config), "ae af ae af ae af ");
  EXPECT_EQ(config.intermediate_size, 40);
  EXPECT_EQ(config.experts->routes(), 12);
  EXPECT_EQ(config.experts->per_token, 9);
  EXPECT_EQ(config.latent->row_multiplier, std::sqrt(64.0 / 512));
  EXPECT_NEAR(*config.attention_multiplier, std::sqrt(64.0 / 1536 / 192), 1e-12);
  EXPECT_EQ(load("LongcatFlashForCausalLM", R"("n_routed_experts":12)").num_hidden_layers, 4);
  const auto refused = [](const std::string& fields,
                          std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("LongcatFlashForCausalLM", fields); }, parts);
  };
  refused(sizes + "0", {"moe_topk", "at most n_routed_experts (8)", "found 9"});
  refused(sizes + R"(4,"zero_expert_type":"copy")", {"zero_expert_type", "'identity'", "'copy'"});
  refused(sizes + R"(4,"q_lora_rank":null)", {"q_lora_rank", "found none"});
  refused(sizes + "-1", {"zero_expert_num", "found -1"});
}

TEST(HybridFamilies, KimiLinear) {
  const std::string experts = R"("num_experts":8,"num_experts_per_token":2,"num_expert_group":2)";
  const ModelConfig config = load("KimiLinearForCausalLM", experts);
  EXPECT_EQ(parts_of(config), "df de de de ");
  EXPECT_EQ(config.delta_net->kind, DeltaNetConfig::Kind::kimi);
  EXPECT_EQ(config.delta_net->key_heads, 32);
  EXPECT_EQ(config.delta_net->gate_rank, 128);
  EXPECT_EQ(config.delta_net->decays(), 128);
  EXPECT_EQ(config.delta_net->state_values(), 128 * 128 + 3 * 3 * 128);
  EXPECT_EQ(config.latent->query_rank, 0);
  EXPECT_EQ(config.head_dim, 512 + 64);
  EXPECT_FALSE(config.layer(3).has_rope);
  EXPECT_EQ(config.experts->per_token, 2);
  EXPECT_EQ(config.experts->groups, 2);
  EXPECT_NEAR(*config.attention_multiplier, 1 / std::sqrt(192.0), 1e-12);
  EXPECT_TRUE(config.warnings.empty());
  // As published, and as transformers writes it: the object of its own takes precedence.
  const ModelConfig stated = load(
      "KimiLinearForCausalLM",
      experts + R"(,"linear_num_heads":9,"linear_attn_config":{"num_heads":3,"head_dim":12,)"
                R"("short_conv_kernel_size":3,"kda_layers":[1,2,4],"full_attn_layers":[3]},)"
                R"("mla_use_nope":true,"moe_renormalize":false,"first_k_dense_replace":3,)"
                R"("moe_router_activation_func":"sigmoid","q_lora_rank":20,"attention_bias":true)");
  EXPECT_EQ(parts_of(stated), "df df af de ");
  EXPECT_EQ(stated.delta_net->key_heads, 3);
  EXPECT_EQ(stated.delta_net->kernel, 3);
  EXPECT_EQ(stated.latent->query_rank, 20);
  EXPECT_TRUE(stated.qkv_bias);
  EXPECT_FALSE(stated.experts->normalises);
  EXPECT_TRUE(stated.warnings.empty());
  EXPECT_EQ(parts_of(load("KimiLinearForCausalLM",
                          experts + R"(,"layer_types":["full_attention","linear_attention",)"
                                    R"("linear_attention","full_attention"],"mlp_layer_types":)"
                                    R"(["sparse","dense","dense","dense"])")),
            "ae df df af ");
  const auto refused = [&](const char* fields, std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("KimiLinearForCausalLM", experts + "," + fields); }, parts);
  };
  refused(R"("linear_attn_config":[])", {"linear_attn_config", "an object"});
  refused(R"("linear_attn_config":{"kda_layers":[1,5],"full_attn_layers":[3]})",
          {"linear_attn_config.kda_layers", "1 to 4", "found 5"});
  refused(R"("linear_attn_config":{"kda_layers":[1,2],"full_attn_layers":[3]})",
          {"linear_attn_config.kda_layers", "layer 4"});
  refused(R"("linear_attn_config":{"head_dim":0})", {"linear_attn_config.head_dim"});
  refused(R"("linear_num_heads":65536,"linear_head_dim":65536)", {"linear_head_dim", "states"});
  refused(R"("linear_conv_kernel_dim":17)", {"linear_conv_kernel_dim"});
  refused(R"("mla_use_nope":false)", {"mla_use_nope"});
  refused(R"("moe_router_activation_func":"softmax")", {"moe_router_activation_func"});
  refused(R"("rope_scaling":{"rope_type":"linear","factor":2})", {"rope_scaling"});
}

TEST(HybridFamilies, Ling3) {
  const std::string experts = R"("num_experts":16,"num_expert_group":2,"topk_group":1)";
  const ModelConfig config =
      load("BailingHybridForCausalLM", experts + R"(,"head_dim":12,"layer_group_size":2)");
  EXPECT_EQ(parts_of(config), "df af de ae ");
  EXPECT_EQ(config.delta_net->kind, DeltaNetConfig::Kind::kimi);
  EXPECT_EQ(config.delta_net->key_heads, 8);
  EXPECT_EQ(config.delta_net->key_dim, 12);
  EXPECT_EQ(config.delta_net->gate_rank, 0);
  EXPECT_EQ(config.delta_net->least_log_decay, -5);
  EXPECT_TRUE(config.latent->gates_heads);
  EXPECT_EQ(config.head_dim, 512 + 64);
  EXPECT_TRUE(config.layer(1).has_rope);
  EXPECT_TRUE(config.rope_is_interleaved);
  EXPECT_EQ(config.rope_theta, 6e6);
  EXPECT_EQ(config.experts->per_token, 8);
  EXPECT_EQ(config.experts->scale, 2.5);
  EXPECT_TRUE(config.warnings.empty());
  // As transformers writes it: head_dim is then that of RoPE.
  const ModelConfig written = load(
      "BailingHybridForCausalLM",
      experts + R"(,"head_dim":64,"linear_head_dim":12,"linear_num_heads":3,)"
                R"("linear_conv_kernel_dim":3,"short_conv_kernel_size":3,"kda_safe_gate":false,)"
                R"("layer_types":["linear_attention","linear_attention","linear_attention",)"
                R"("full_attention"],"first_k_dense_replace":0)");
  EXPECT_EQ(parts_of(written), "de de de ae ");
  EXPECT_EQ(written.delta_net->key_dim, 12);
  EXPECT_EQ(written.delta_net->key_heads, 3);
  EXPECT_EQ(written.delta_net->kernel, 3);
  EXPECT_EQ(written.delta_net->least_log_decay, 0);
  const auto refused = [&](const char* fields, std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("BailingHybridForCausalLM", experts + "," + fields); }, parts);
  };
  refused(R"("kda_lower_bound":0)", {"kda_lower_bound"});
  refused(R"("kda_lower_bound":1)", {"kda_lower_bound"});
  refused(R"("layer_group_size":0)", {"layer_group_size"});
  refused(R"("head_dim":0)", {": head_dim: expected"});
  refused(R"("short_conv_kernel_size":17)", {"short_conv_kernel_size"});
}

TEST(HybridFamilies, MiniMax) {
  const std::string experts = R"("num_local_experts":8)";
  const ModelConfig config =
      load("MiniMaxForCausalLM", experts +
                                     R"(,"full_attn_alpha_factor":2,"full_attn_beta_factor":3,)"
                                     R"("linear_attn_alpha_factor":4,"linear_attn_beta_factor":5,)"
                                     R"("mlp_alpha_factor":6,"mlp_beta_factor":7,"block_size":64)");
  EXPECT_EQ(parts_of(config), "ae de ae de ");
  EXPECT_EQ(config.delta_net->kind, DeltaNetConfig::Kind::lightning);
  EXPECT_EQ(config.delta_net->key_heads, 8);
  EXPECT_EQ(config.delta_net->decays(), 0);
  EXPECT_EQ(config.delta_net->state_values(), 8 * 8);
  EXPECT_EQ(config.delta_net->out_multiplier, 5);
  EXPECT_EQ(config.attention_out_multiplier, 3);
  EXPECT_EQ(config.feed_forward_multiplier, 7);
  EXPECT_EQ(config.normed_residuals->attention, 2);
  EXPECT_EQ(config.normed_residuals->state, 4);
  EXPECT_EQ(config.normed_residuals->feed_forward, 6);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_EQ(config.rotated_dims(), 8);
  EXPECT_TRUE(config.warnings.empty());
  // As published.
  const ModelConfig published =
      load("MiniMaxText01ForCausalLM",
           experts + R"(,"model_type":"minimax_text_01","attn_type_list":[0,0,0,1],"rotary_dim":4,)"
                     R"("layernorm_full_attention_alpha":3.5,"layernorm_full_attention_beta":1.0,)"
                     R"("layernorm_linear_attention_alpha":2.5,"layernorm_mlp_alpha":1.5,)"
                     R"("postnorm":true,"shared_intermediate_size":0,"shared_moe_mode":"sigmoid",)"
                     R"("sliding_window":null)");
  EXPECT_EQ(parts_of(published), "de de de ae ");
  EXPECT_EQ(published.rotary_dim, 4);
  EXPECT_EQ(published.normed_residuals->attention, 3.5);
  EXPECT_EQ(published.normed_residuals->state, 2.5);
  EXPECT_EQ(published.normed_residuals->feed_forward, 1.5);
  EXPECT_TRUE(published.warnings.empty());
  EXPECT_EQ(load("MiniMaxForCausalLM", experts + R"(,"sliding_window":16)").layer(0).window, 16);
  const auto refused = [&](const char* fields, std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("MiniMaxForCausalLM", experts + "," + fields); }, parts);
  };
  refused(R"("attn_type_list":[0,1])", {"attn_type_list", "an array of 4 numbers"});
  refused(R"("attn_type_list":[0,1,2,1])", {"attn_type_list", "0 or 1", "found 2"});
  refused(R"("linear_attn_alpha_factor":0)", {"linear_attn_alpha_factor"});
  refused(R"("layernorm_mlp_beta":"1")", {"mlp_beta"});
  refused(R"("postnorm":false)", {"postnorm"});
  refused(R"("shared_intermediate_size":64)", {"shared_intermediate_size"});
  refused(R"("rotary_dim":3)", {"rotary_dim", "even"});
}

TEST(HybridFamilies, Qwen4IsRefusedForWhatItNeeds) {
  expect_error([] { load("Qwen4ExpForCausalLM"); }, {"hyper-connections", "n-grams", "indexer"});
}

}  // namespace
