// Messages about fields that a family renames have the names of the file.
#include <gtest/gtest.h>

#include <kvzap/model/model_config.hpp>
#include <string>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ModelConfig;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

/// Expects an error about `field` for config.json with the class and `fields`, a list.
void expect_named(const std::string& class_name, const std::string& fields,
                  const std::string& field) {
  SCOPED_TRACE(field);
  TemporaryFolder folder;
  folder.write("config.json", R"({"architectures":[")" + class_name + R"("],)" + fields + "}");
  expect_error([&] { ModelConfig::load(folder.path()); },
               {"config.json: " + field + ": expected", "found"});
}

/// The essential sizes, then `extra`.
std::string sizes(const std::string& extra) {
  return R"("hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,"vocab_size":100,)"
         R"("num_attention_heads":8,"num_key_value_heads":2,"max_position_embeddings":512,)" +
         extra;
}

TEST(FieldNames, Dbrx) {
  const std::string rest = R"("n_heads":8,"n_layers":2,"max_seq_len":64,"vocab_size":100)";
  const std::string experts = R"("moe_num_experts":4,"ffn_hidden_size":96)";
  const auto of = [&](const std::string& hidden, const std::string& attention,
                      const std::string& feed_forward) {
    return R"("d_model":)" + hidden + R"(,"attn_config":{)" + attention + R"(},"ffn_config":{)" +
           feed_forward + "}," + rest;
  };
  const std::string name = "DbrxForCausalLM";
  expect_named(name, of("0", "", experts), "d_model");
  expect_named(name, of("64", R"("kv_n_heads":3)", experts), "attn_config.kv_n_heads");
  expect_named(name, of("64", R"("clip_qkv":-1)", experts), "attn_config.clip_qkv");
  expect_named(name, of("64", "", R"("moe_num_experts":0,"ffn_hidden_size":96)"),
               "ffn_config.moe_num_experts");
  expect_named(name, of("64", "", experts + R"(,"moe_top_k":5)"), "ffn_config.moe_top_k");
}

TEST(FieldNames, OtherNamesOfSizes) {
  const std::string xglm = R"("num_layers":2,"attention_heads":8,"ffn_dim":96,"vocab_size":100,)"
                           R"("max_position_embeddings":512)";
  expect_named("XGLMForCausalLM", xglm, "d_model");
  expect_named("XGLMForCausalLM", xglm + R"(,"d_model":"64")", "d_model");
  expect_named("GPT2LMHeadModel",
               R"("n_embd":65,"n_head":8,"n_layer":2,"n_positions":64,)"
               R"("vocab_size":100)",
               "n_embd");
  expect_named("ZambaForCausalLM", sizes(R"("attention_head_dim":65537)"), "attention_head_dim");
  expect_named("ZambaForCausalLM", sizes(R"("layer_types":["hybrid"])"), "layer_types");
}

TEST(FieldNames, Mimo) {
  const auto of = [](const std::string& extra) {
    return sizes(R"("n_routed_experts":8,"num_experts_per_tok":2,)" + extra);
  };
  const std::string name = "MiMoV2FlashForCausalLM";
  expect_named(name, of(R"("swa_rope_theta":-1)"), "swa_rope_theta");
  expect_named(name, of(R"("layernorm_epsilon":0)"), "layernorm_epsilon");
  expect_named(name, of(R"("hybrid_layer_pattern":[0,2])"), "hybrid_layer_pattern");
  expect_named(name, of(R"("moe_layer_freq":[0])"), "moe_layer_freq");
}

TEST(FieldNames, Minimax) {
  for (const std::string field :
       {"layernorm_mlp_alpha", "layernorm_mlp_beta", "layernorm_full_attention_alpha"}) {
    expect_named("MiniMaxForCausalLM", sizes(R"("num_local_experts":4,")" + field + R"(":0)"),
                 field);
  }
}

TEST(FieldNames, KimiLinear) {
  const std::string name = "KimiLinearForCausalLM";
  const auto of = [](const std::string& extra) { return sizes(R"("num_experts":8,)" + extra); };
  for (const std::string field : {"num_expert_group", "num_experts_per_token"}) {
    expect_named(name, of("\"" + field + R"(":9)"), field);
  }
  expect_named(name, of(R"("moe_renormalize":1)"), "moe_renormalize");
  expect_named(name, of(R"("model_max_length":0)"), "model_max_length");
  for (const std::string field : {"num_heads", "head_dim", "short_conv_kernel_size"}) {
    expect_named(name, of(R"("linear_attn_config":{")" + field + R"(":0})"),
                 "linear_attn_config." + field);
  }
  expect_named(name, of(R"("linear_attn_config":{"head_dim":65536})"),
               "linear_attn_config.head_dim");
  expect_named(name, of(R"("linear_head_dim":65536)"), "linear_head_dim");
}

TEST(FieldNames, NemotronH) {
  expect_named("NemotronHForCausalLM", sizes(R"("hybrid_override_pattern":"MX")"),
               "hybrid_override_pattern");
  expect_named("NemotronHForCausalLM", sizes(R"("mamba_d_conv":0)"), "mamba_d_conv");
}

}  // namespace
