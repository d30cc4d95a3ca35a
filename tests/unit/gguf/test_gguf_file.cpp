// GGUF files: reading, writing, and the contents of a model's folder made from them.
#include "gguf/gguf_file.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "gguf/gguf_writer.hpp"
#include "gguf/model_file.hpp"
#include "gguf/tensor_names.hpp"
#include "model/gguf_metadata.hpp"
#include "model/gguf_store.hpp"
#include "unit/gguf/gguf_bytes.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

using nlohmann::json;
using namespace std::string_literals;

json made(const GgufDraft& draft, const char* name) {
  TemporaryFolder folder;
  folder.write("x.gguf", draft.bytes());
  const auto path = folder.path() / "x.gguf";
  const auto file =
      name == "config.json"s ? model::read_config(path) : gguf::read_model_file(path, name);
  EXPECT_TRUE(file);
  return file ? file->content : json();
}

TEST(GgufFile, Configuration) {
  const json expected = {{"architectures", {"LlamaForCausalLM"}},
                         {"model_type", "llama"},
                         {"num_hidden_layers", 1},
                         {"hidden_size", 64},
                         {"intermediate_size", 32},
                         {"num_attention_heads", 4},
                         {"num_key_value_heads", 2},
                         {"max_position_embeddings", 128},
                         {"head_dim", 16},
                         {"vocab_size", 5},
                         {"rope_theta", 500000.0},
                         {"rms_norm_eps", 1e-5},
                         {"hidden_act", "silu"},
                         {"tie_word_embeddings", true},
                         {"torch_dtype", "bfloat16"},
                         {"attention_bias", false},
                         {"mlp_bias", false},
                         {"bos_token_id", 0},
                         {"eos_token_id", 1}};
  EXPECT_EQ(made(small_draft(), "config.json"), expected);
}

TEST(GgufFile, RopeScaling) {
  GgufDraft draft = small_draft();
  draft.set("llama.rope.scaling.type", text_value("yarn"));
  draft.set("llama.rope.scaling.factor", f32_value(4));
  draft.set("llama.rope.scaling.original_context_length", u32_value(32));
  EXPECT_EQ(
      made(draft, "config.json")["rope_scaling"],
      json({{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}}));
  draft.set("llama.rope.scaling.type", text_value("linear"));
  EXPECT_EQ(made(draft, "config.json")["rope_scaling"],
            json({{"rope_type", "linear"}, {"factor", 4.0}}));
  draft.set("llama.rope.scaling.type", text_value("none"));
  EXPECT_FALSE(made(draft, "config.json").contains("rope_scaling"));
}

TEST(GgufFile, ByteLevelTokenizer) {
  const json tokenizer = made(small_draft(), "tokenizer.json");
  EXPECT_EQ(tokenizer["model"]["vocab"],
            json({{"<s>", 0}, {"<|im_end|>", 1}, {"a", 2}, {"b", 3}, {"ab", 4}}));
  EXPECT_EQ(tokenizer["model"]["merges"], json::array({"a b"}));
  EXPECT_EQ(tokenizer["added_tokens"].size(), 2u);
  EXPECT_EQ(tokenizer["added_tokens"][1]["content"], "<|im_end|>");
  EXPECT_EQ(tokenizer["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
  EXPECT_EQ(tokenizer["post_processor"], nullptr);

  GgufDraft draft = small_draft();
  draft.set("tokenizer.ggml.add_bos_token", flag_value(1));
  EXPECT_EQ(made(draft, "tokenizer.json")["post_processor"]["special_tokens"]["<s>"]["ids"],
            json::array({0}));

  const json config = made(small_draft(), "tokenizer_config.json");
  EXPECT_EQ(config, json({{"tokenizer_class", "PreTrainedTokenizerFast"},
                          {"bos_token", "<s>"},
                          {"eos_token", "<|im_end|>"},
                          {"chat_template", "{{ messages }}"}}));
}

/// Chats with tools may have another template.
TEST(GgufFile, ChatTemplates) {
  GgufDraft draft = small_draft();
  draft.set("tokenizer.chat_template.tool_use", text_value("{{ tools }}"));
  const json templates = made(draft, "tokenizer_config.json")["chat_template"];
  ASSERT_EQ(templates.size(), 2u);
  EXPECT_EQ(templates[0], json({{"name", "default"}, {"template", "{{ messages }}"}}));
  EXPECT_EQ(templates[1], json({{"name", "tool_use"}, {"template", "{{ tools }}"}}));
}

/// The merges of SentencePiece's BPE follow the scores of the tokens.
TEST(GgufFile, SentencePieceTokenizer) {
  GgufDraft draft = small_draft();
  draft.set("tokenizer.ggml.model", text_value("llama"));
  draft.set("tokenizer.ggml.tokens", texts_value({"<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a",
                                                  "b", "ab", "\u2581a", "\u2581ab"}));
  draft.set("tokenizer.ggml.token_type", i32s_value({2, 3, 3, 6, 1, 1, 1, 1, 1, 1}));
  draft.set("tokenizer.ggml.scores", f32s_value({0, 0, 0, 0, -9, -7, -8, -2, -1, -3}));
  draft.set("tokenizer.ggml.bos_token_id", u32_value(1));
  draft.set("tokenizer.ggml.eos_token_id", u32_value(2));
  draft.remove("tokenizer.ggml.merges");
  json tokenizer = made(draft, "tokenizer.json");
  EXPECT_EQ(tokenizer["model"]["merges"],
            json::array({"\u2581 a", "a b", "\u2581a b", "\u2581 ab"}));
  EXPECT_TRUE(tokenizer["model"]["byte_fallback"].get<bool>());
  EXPECT_EQ(tokenizer["model"]["unk_token"], "<unk>");
  EXPECT_EQ(tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"], json::array({1}));
  // Converters of tokenizer.json add its merges. Those of other tokens are left out.
  draft.set("tokenizer.ggml.merges", texts_value({"a b", "a a", "\u2581 a"}));
  tokenizer = made(draft, "tokenizer.json");
  EXPECT_EQ(tokenizer["model"]["merges"], json::array({"a b", "\u2581 a"}));
}

/// Tokens of users have marks in place of the spaces in a prompt.
TEST(GgufFile, TokensOfUsers) {
  GgufDraft draft = small_draft();
  draft.set("tokenizer.ggml.model", text_value("llama"));
  draft.set("tokenizer.ggml.tokens",
            texts_value({"<unk>", "\u2581", "a", "\u2581\u2581", "<x\u2581y>", "  ", "<0x0A>"}));
  draft.set("tokenizer.ggml.token_type", i32s_value({2, 1, 1, 4, 4, 4, 6}));
  draft.set("tokenizer.ggml.scores", f32s_value({0, -1, -2, -3, -4, -5, -6}));
  draft.set("tokenizer.ggml.merges", texts_value({"\u2581 \u2581"}));
  draft.set("tokenizer.ggml.bos_token_id", u32_value(0));
  draft.set("tokenizer.ggml.add_space_prefix", flag_value(0));
  TemporaryFolder folder;
  folder.write("x.gguf", draft.bytes());
  const Tokenizer tokenizer = Tokenizer::load(folder.path() / "x.gguf");
  EXPECT_EQ(tokenizer.encode("a  a a<x y>"), (std::vector<TokenId>{2, 3, 2, 1, 2, 4}));
  EXPECT_EQ(tokenizer.decode({3, 4}), "  <x y>");
}

/// Characters with merges: spaces are marks, and characters without a token are bytes.
TEST(GgufFile, MergesOfCharacters) {
  GgufDraft draft = small_draft();
  draft.set("tokenizer.ggml.model", text_value("gemma4"));
  draft.set("tokenizer.ggml.tokens", texts_value({"<bos>", "<0x0A>", "\u2581", "a", "\u2581a"}));
  draft.set("tokenizer.ggml.token_type", i32s_value({3, 6, 1, 1, 1}));
  draft.set("tokenizer.ggml.merges", texts_value({"\u2581 a"}));
  TemporaryFolder folder;
  folder.write("x.gguf", draft.bytes());
  const Tokenizer tokenizer = Tokenizer::load(folder.path() / "x.gguf");
  const std::vector<TokenId> ids = {0, 3, 4, 2, 1, 4};
  EXPECT_EQ(tokenizer.encode("a a \n a", true), ids);
  EXPECT_EQ(tokenizer.decode(ids), "a a \n a");

  draft.set("tokenizer.ggml.model", text_value("gpt2"));
  draft.set("tokenizer.ggml.pre", text_value("sarvam-moe"));
  EXPECT_EQ(made(draft, "tokenizer.json")["post_processor"], nullptr);
}

/// Names tell which control tokens end an answer, beside the ids that the file gives.
TEST(GgufFile, EndsOfAnswers) {
  GgufDraft draft = small_draft();
  EXPECT_EQ(made(draft, "generation_config.json"),
            json({{"bos_token_id", 0}, {"eos_token_id", {1}}}));
  draft.set("tokenizer.ggml.eos_token_id", u32_value(0));
  EXPECT_EQ(made(draft, "generation_config.json")["eos_token_id"], json::array({0, 1}));
}

TEST(GgufFile, FilesThatAModelLacks) {
  GgufDraft draft = small_draft();
  draft.remove("tokenizer.ggml.tokens");
  draft.remove("tokenizer.ggml.bos_token_id");
  draft.remove("tokenizer.ggml.eos_token_id");
  TemporaryFolder folder;
  folder.write("x.gguf", draft.bytes());
  const auto file = folder.path() / "x.gguf";
  EXPECT_FALSE(gguf::has_model_file(file, "tokenizer.json"));
  EXPECT_FALSE(gguf::read_model_file(file, "tokenizer.json"));
  EXPECT_FALSE(gguf::read_model_file(file, "tokenizer_config.json"));
  EXPECT_FALSE(gguf::read_model_file(file, "chat_template.jinja"));
  EXPECT_TRUE(gguf::has_model_file(file, "config.json"));
  EXPECT_EQ(ModelConfig::load(file).vocab_size, 5);
}

TEST(GgufFile, Names) {
  const auto name_in = [](const char* architecture, const char* published) -> std::string {
    for (const gguf::Architecture& known : gguf::architectures()) {
      if (known.name != architecture) continue;
      const auto place = gguf::gguf_name(known, published);
      if (!place) return "none";
      return place->expert ? place->name + " " + std::to_string(*place->expert) : place->name;
    }
    return "no architecture";
  };
  EXPECT_EQ(name_in("llama", "model.embed_tokens.weight"), "token_embd.weight");
  EXPECT_EQ(name_in("llama", "lm_head.weight"), "output.weight");
  EXPECT_EQ(name_in("qwen2", "model.layers.12.self_attn.k_proj.bias"), "blk.12.attn_k.bias");
  // The same norm has another place in each of these.
  const char* norm = "model.layers.0.post_attention_layernorm.weight";
  EXPECT_EQ(name_in("llama", norm), "blk.0.ffn_norm.weight");
  EXPECT_EQ(name_in("glm4", norm), "blk.0.ffn_norm.weight");
  EXPECT_EQ(name_in("olmo2", norm), "blk.0.post_attention_norm.weight");
  EXPECT_EQ(name_in("glm4moe", norm), "blk.0.post_attention_norm.weight");
  EXPECT_EQ(name_in("phi3", "model.layers.1.mlp.gate_up_proj.weight"), "blk.1.ffn_up.weight");
  EXPECT_EQ(name_in("qwen3moe", "model.layers.3.mlp.experts.17.up_proj.weight"),
            "blk.3.ffn_up_exps.weight 17");
  EXPECT_EQ(name_in("llama", "model.layers.3.block_sparse_moe.experts.2.w2.weight"),
            "blk.3.ffn_down_exps.weight 2");
  EXPECT_EQ(name_in("glm4moe", "model.layers.3.mlp.gate.e_score_correction_bias"),
            "blk.3.exp_probs_b.bias");
  EXPECT_EQ(name_in("qwen3", "model.layers.3.mlp.experts.17.up_proj.weight"), "none");
  EXPECT_EQ(name_in("qwen35", "model.layers.3.linear_attn.in_proj_a.weight"),
            "blk.3.ssm_alpha.weight");
  EXPECT_EQ(name_in("qwen35", "model.layers.3.linear_attn.A_log"), "blk.3.ssm_a");
  EXPECT_EQ(name_in("qwen35", "model.layers.3.linear_attn.dt_bias"), "blk.3.ssm_dt.bias");
  EXPECT_EQ(name_in("qwen35", "model.layers.3.linear_attn.in_proj_ba.weight"), "none");
  EXPECT_EQ(name_in("qwen3next", "model.layers.3.linear_attn.in_proj_ba.weight"),
            "blk.3.ssm_ba.weight");
  EXPECT_EQ(name_in("llama", "model.layers.3.linear_attn.A_log"), "none");
  for (const char* name :
       {"model.layers.3.mlp.experts.x.up_proj.weight", "model.layers.3.mlp.experts..up_proj.weight",
        "model.layers.3.mlp.experts.1234567890.up_proj.weight", "model.layers..mlp.gate.weight",
        "model.layers.3.mlp.gate", "model.layers.3.mlp.gate.scale", "model.layers.3.", ""}) {
    EXPECT_EQ(name_in("qwen3moe", name), "none") << name;
  }
  EXPECT_EQ(gguf::older_expert_name({"blk.3.ffn_up_exps.weight", 5}), "blk.3.ffn_up.5.weight");
  EXPECT_TRUE(gguf::is_of_experts("ffn_up.5"));
  EXPECT_TRUE(gguf::is_of_experts("ffn_up_exps"));
  EXPECT_FALSE(gguf::is_of_experts("ffn_up"));
  EXPECT_FALSE(gguf::is_of_experts("ffn_up.x"));
  const auto parts = gguf::parse_name_in_layer("blk.12.attn_k.bias");
  ASSERT_TRUE(parts);
  EXPECT_EQ(parts->layer, 12);
  EXPECT_EQ(parts->tensor, "attn_k");
  EXPECT_EQ(parts->kind, "bias");
  EXPECT_EQ(gguf::parse_name_in_layer("blk.1.ssm_a")->kind, "");
  for (const char* name : {"blk.attn_q.weight", "blk.1.attn_q", "blk.1.attn_q.scale", "blk.1.",
                           "blk..attn_q.weight", "blk.1.weight", "rope_freqs.weight", ""}) {
    EXPECT_FALSE(gguf::parse_name_in_layer(name)) << name;
  }
}

/// Values, arrays and tensors of a file of the writer, also over two parts.
TEST(GgufFile, WriterAndParts) {
  TemporaryFolder folder;
  const auto part = [&](int index) {
    return folder.path() / ("m-0000" + std::to_string(index) + "-of-00002.gguf");
  };
  const gguf::BlockFormat& f32 = *gguf::find_block_format("F32");
  const gguf::BlockFormat& q8 = *gguf::find_block_format("Q8_0");
  std::vector<float> values(15);
  std::iota(values.begin(), values.end(), 0.0f);
  const std::string blocks(34 * 2, '\1');
  for (int i = 1; i <= 2; ++i) {
    gguf::GgufWriter writer;
    writer.add_u32("split.count", 2);
    writer.add_u32("split.no", static_cast<std::uint32_t>(i - 1));
    if (i == 1) writer.add_u32("split.tensors.count", 2);
    writer.add_string("name", "a");
    writer.add_strings("names", {"a", "", "\u00e4"});
    writer.add_flag("flag", true);
    writer.add_f32s("numbers", {1, 2.5f});
    writer.add_i32s("integers", {-1, 7});
    writer.add_f32("number", 1e-6f);
    if (i == 1) writer.add_tensor("first", {3, 5}, f32);
    if (i == 2) writer.add_tensor("second", {2, 32}, q8);
    writer.write(part(i), [&](std::size_t index, const gguf::GgufWriter::Sink& sink) {
      EXPECT_EQ(index, 0u);
      if (i == 1) sink(values.data(), values.size() * sizeof(float));
      if (i == 2) {
        sink(blocks.data(), 34);
        sink(blocks.data(), 34);
      }
    });
  }
  for (int given = 1; given <= 2; ++given) {
    const auto file = gguf::GgufFile::open(part(given));
    const auto& metadata = file.metadata();
    EXPECT_EQ(metadata.string("name"), "a");
    EXPECT_EQ(metadata.find_flag("flag"), true);
    EXPECT_EQ(metadata.find_number("number"), 1e-6);
    EXPECT_EQ(metadata.find_floats("numbers", 2), (std::vector<float>{1, 2.5f}));
    EXPECT_EQ(metadata.find_integers("integers", 2, -1, 7), (std::vector<std::int64_t>{-1, 7}));
    ASSERT_EQ(file.tensors().size(), 2u);
    const gguf::TensorEntry& first = *file.find("first");
    EXPECT_EQ(first.shape, (std::vector<std::int64_t>{3, 5}));
    EXPECT_EQ(std::memcmp(first.data, values.data(), first.bytes), 0);
    const gguf::TensorEntry& second = *file.find("second");
    EXPECT_EQ(second.format->name, "Q8_0");
    EXPECT_EQ(std::memcmp(second.data, blocks.data(), 68), 0);
    EXPECT_EQ(*second.file, part(2).string());
  }
  std::filesystem::remove(part(2));
  expect_error([&] { gguf::GgufFile::open(part(1)); }, {part(2).string()});
}

TEST(GgufFile, WriterRefusals) {
  TemporaryFolder folder;
  gguf::GgufWriter writer;
  const gguf::BlockFormat& q8 = *gguf::find_block_format("Q8_0");
  expect_error([&] { writer.add_tensor("t", {2, 33}, q8); }, {"tensor t", "blocks of 32", "2, 33"});
  writer.add_tensor("t", {2, 32}, q8);
  expect_error(
      [&] {
        writer.write(folder.path() / "x.gguf",
                     [](std::size_t, const gguf::GgufWriter::Sink& sink) { sink("x", 1); });
      },
      {"x.gguf", "tensor t", "expected 68 bytes, found 1"});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "x.gguf"));
}

/// Rows of queries and keys of the architecture llama are in another order in the file.
TEST(GgufFile, RowsOfQueries) {
  constexpr std::int64_t rows = 64, columns = 64, head = 16;
  std::vector<float> stored(rows * columns);
  for (std::int64_t row = 0; row < rows; ++row) {
    // Converters view a head's rows as (2, head / 2) and swap the two.
    const std::int64_t in_head = row % head;
    const std::int64_t original = row - in_head + in_head / 2 + in_head % 2 * (head / 2);
    for (std::int64_t i = 0; i < columns; ++i) {
      stored[row * columns + i] = static_cast<float>(original * 100 + i);
    }
  }
  for (const bool is_llama : {true, false}) {
    GgufDraft draft = small_draft();
    if (!is_llama) {
      draft.set("general.architecture", text_value("qwen2"));
      for (auto& [key, value] : draft.values) {
        if (key.rfind("llama.", 0) == 0) key = "qwen2." + key.substr(6);
      }
    }
    draft.tensors.push_back(tensor_entry("blk.0.attn_q.weight", {64, 64}, 0, draft.data.size()));
    draft.data.append(reinterpret_cast<const char*>(stored.data()), stored.size() * sizeof(float));
    TemporaryFolder folder;
    folder.write("x.gguf", draft.bytes());
    const model::GgufStore store(folder.path() / "x.gguf");
    const auto tensor = store.at("model.layers.0.self_attn.q_proj.weight", {rows, columns});
    EXPECT_EQ(tensor->plain().has_value(), !is_llama);
    std::vector<float> read(20 * 3);
    tensor->read(7, 27, 5, 8, read.data());
    for (std::int64_t row = 0; row < 20; ++row) {
      for (std::int64_t i = 0; i < 3; ++i) {
        const float expected = is_llama ? static_cast<float>((row + 7) * 100 + i + 5)
                                        : stored[(row + 7) * columns + i + 5];
        EXPECT_EQ(read[row * 3 + i], expected) << row << " " << i;
      }
    }
    expect_error(
        [&] {
          store.at("model.layers.0.self_attn.q_proj.weight", {rows, 32});
        },
        {"x.gguf: tensor 'blk.0.attn_q.weight': expected shape [64, 32], found [64, 64]"});
    expect_error([&] { store.at("model.norm.weight", {64}); },
                 {"x.gguf: tensor 'output_norm.weight' of shape [64] is missing"});
    EXPECT_TRUE(store.has("model.embed_tokens.weight"));
    EXPECT_FALSE(store.has("lm_head.weight"));
  }
}

TEST(GgufFile, UnsupportedTypes) {
  GgufDraft draft = small_draft();
  draft.tensors = {tensor_entry("token_embd.weight", {64, 5}, 29, 0)};
  TemporaryFolder folder;
  folder.write("x.gguf", draft.bytes());
  const model::GgufStore store(folder.path() / "x.gguf");
  expect_error(
      [&] {
        store.at("model.embed_tokens.weight", {5, 64});
      },
      {"x.gguf: tensor 'token_embd.weight': expected one of the types F32, F16,",
       "found type number 29"});
}

}  // namespace
}  // namespace kvzap::test
