// Tensors whose form in GGUF files differs from that in checkpoints.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "gguf/tensor_names.hpp"
#include "model/gguf_tensors.hpp"

namespace {

using kvzap::model::StoredTensor;
using Parts = std::vector<std::unique_ptr<StoredTensor>>;

/// Values first, first + 1, … in rows.
class Numbered final : public StoredTensor {
 public:
  Numbered(std::int64_t columns, float first, std::string_view format)
      : m_columns(columns), m_first(first), m_format(format) {}
  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      for (std::int64_t column = begin; column < end; ++column) {
        *target++ = m_first + static_cast<float>(row * m_columns + column);
      }
    }
  }
  std::string_view block_format() const override { return m_format; }
  std::string description() const override { return "numbered"; }
  void release() const override {}

 private:
  std::int64_t m_columns;
  float m_first;
  std::string_view m_format;
};

std::unique_ptr<StoredTensor> numbered(std::int64_t columns, float first,
                                       std::string_view format = "Q8_0") {
  return std::make_unique<Numbered>(columns, first, format);
}

/// One expert: 2 rows of gate and 2 of up, 3 columns each. Gate begins with `first`, up with first
/// + 100.
std::unique_ptr<StoredTensor> expert(float first) {
  Parts parts;
  parts.push_back(numbered(3, first));
  parts.push_back(numbered(3, first + 100));
  return kvzap::model::joined_rows(std::move(parts), 2, false);
}

TEST(GgufTensors, JoinsRows) {
  const auto joined = expert(0);
  std::vector<float> values(6);
  joined->read(1, 4, 1, 3, values.data());
  EXPECT_EQ(values, (std::vector<float>{4, 5, 101, 102, 104, 105}));
  EXPECT_EQ(joined->block_format(), "Q8_0");

  Parts vectors;
  vectors.push_back(numbered(2, 0));
  vectors.push_back(numbered(2, 100));
  const auto column = kvzap::model::joined_rows(std::move(vectors), 2, true);
  values.resize(3);
  column->read(1, 4, 0, 1, values.data());
  EXPECT_EQ(values, (std::vector<float>{1, 100, 101}));
  EXPECT_EQ(column->block_format(), "");

  Parts mixed;
  mixed.push_back(numbered(3, 0));
  mixed.push_back(numbered(3, 0, "Q4_0"));
  EXPECT_EQ(kvzap::model::joined_rows(std::move(mixed), 2, false)->block_format(), "");
}

TEST(GgufTensors, TransposesExperts) {
  for (const bool alternates : {false, true}) {
    Parts experts;
    experts.push_back(expert(0));
    experts.push_back(expert(1000));
    const auto fused = kvzap::model::fused_experts(std::move(experts), 4, 3, alternates);
    // The last column of the first expert, and the first one of the second expert.
    std::vector<float> values(8);
    fused->read(2, 4, 0, 4, values.data());
    EXPECT_EQ(values, (alternates ? std::vector<float>{2, 102, 5, 105, 1000, 1100, 1003, 1103}
                                  : std::vector<float>{2, 5, 102, 105, 1000, 1003, 1100, 1103}));
    values.resize(2);
    fused->read(4, 5, 1, 3, values.data());
    EXPECT_EQ(values,
              (alternates ? std::vector<float>{1101, 1004} : std::vector<float>{1004, 1101}));
  }
}

TEST(GgufTensors, ChangesValues) {
  using kvzap::model::ValueForm;
  kvzap::ModelConfig config;
  const auto form = [&](const char* name) { return kvzap::model::form_in_gguf(config, name); };
  config.architecture = "Gemma3ForCausalLM";
  EXPECT_EQ(form("model.layers.0.self_attn.q_norm.weight"), ValueForm::plus_one);
  EXPECT_EQ(form("model.norm.weight"), ValueForm::plus_one);
  EXPECT_EQ(form("model.layers.0.mlp.up_proj.weight"), ValueForm::same);
  config.architecture = "Olmo3ForCausalLM";
  EXPECT_EQ(form("model.norm.weight"), ValueForm::same);
  config.architecture = "Qwen3_5ForCausalLM";
  EXPECT_EQ(form("model.layers.0.self_attn.q_norm.weight"), ValueForm::plus_one);
  EXPECT_EQ(form("model.layers.0.linear_attn.norm.weight"), ValueForm::same);
  EXPECT_EQ(form("model.layers.0.linear_attn.A_log"), ValueForm::negative_exponential);

  std::vector<float> values(2);
  kvzap::model::from_form(numbered(2, 5), ValueForm::plus_one)->read(0, 1, 0, 2, values.data());
  EXPECT_EQ(values, (std::vector<float>{4, 5}));
  const float decay = kvzap::model::to_form(ValueForm::negative_exponential, 0.5f);
  EXPECT_FLOAT_EQ(decay, -1.6487213f);
  kvzap::model::from_form(numbered(1, decay), ValueForm::negative_exponential)
      ->read(0, 1, 0, 1, values.data());
  EXPECT_FLOAT_EQ(values[0], 0.5f);
}

TEST(GgufTensors, OrdersDeltaNets) {
  using Rows = std::vector<std::int64_t>;
  kvzap::ModelConfig config;
  config.delta_net = kvzap::DeltaNetConfig{2, 4, 1, 1, 4};
  const auto order = [&](const char* class_name, const char* rest) {
    config.architecture = class_name;
    return kvzap::model::order_in_gguf(config, *kvzap::gguf::architecture_of(class_name),
                                       std::string("model.layers.3.linear_attn.") + rest);
  };
  // Checkpoints: q, k, two values, two gates of the first key head, then those of the second one.
  EXPECT_EQ(order("Qwen3NextForCausalLM", "in_proj_qkvz.weight").rows,
            (Rows{0, 6, 1, 7, 2, 3, 8, 9, 4, 5, 10, 11}));
  EXPECT_EQ(order("Qwen3NextForCausalLM", "A_log").rows, Rows{});
  EXPECT_EQ(order("Qwen3_5ForCausalLM", "in_proj_qkv.weight").rows, (Rows{0, 1, 2, 3, 4, 6, 5, 7}));
  EXPECT_EQ(order("Qwen3_5ForCausalLM", "in_proj_z.weight").rows, (Rows{0, 2, 1, 3}));
  EXPECT_EQ(order("Qwen3_5MoeForCausalLM", "A_log").rows, (Rows{0, 2, 1, 3}));
  EXPECT_EQ(order("Qwen3_5ForCausalLM", "out_proj.weight").columns, (Rows{0, 2, 1, 3}));
  EXPECT_EQ(order("Qwen3_5ForCausalLM", "norm.weight").rows, Rows{});
  config.delta_net->key_heads = 4;
  EXPECT_EQ(order("Qwen3_5ForCausalLM", "in_proj_z.weight").rows, Rows{});
}

TEST(GgufTensors, RestoresTheOrder) {
  // Rows 0, 1 of the first part and 2 of the second one are rows 1, 2, 0 of the checkpoint.
  Parts parts;
  parts.push_back(numbered(4, 0));
  parts.push_back(numbered(4, 100));
  const auto tensor =
      kvzap::model::from_order(std::move(parts), {2, 1}, 4, {{1, 2, 0}, {2, 3, 0, 1}});
  std::vector<float> values(6);
  tensor->read(0, 2, 1, 4, values.data());
  EXPECT_EQ(values, (std::vector<float>{103, 100, 101, 3, 0, 1}));
  EXPECT_EQ(tensor->block_format(), "");  // blocks hold 32 values

  Parts rows;
  rows.push_back(numbered(4, 0));
  EXPECT_EQ(kvzap::model::from_order(std::move(rows), {2}, 4, {{1, 0}, {}})->block_format(),
            "Q8_0");

  Parts vector;
  vector.push_back(numbered(3, 7));
  kvzap::model::from_order(std::move(vector), {3}, 0, {{2, 0, 1}, {}})
      ->read(0, 1, 0, 3, values.data());
  EXPECT_EQ(values[0], 8);
  EXPECT_EQ(values[2], 7);
}

TEST(GgufTensors, NamesTensorsOfArchitectures) {
  const auto name_of = [](const char* class_name, const char* rest) {
    const auto place = kvzap::gguf::gguf_name(*kvzap::gguf::architecture_of(class_name),
                                              std::string("model.layers.3.") + rest);
    return place ? place->name : std::string();
  };
  EXPECT_EQ(name_of("Gemma2ForCausalLM", "post_attention_layernorm.weight"),
            "blk.3.post_attention_norm.weight");
  EXPECT_EQ(name_of("Gemma2ForCausalLM", "pre_feedforward_layernorm.weight"),
            "blk.3.ffn_norm.weight");
  EXPECT_EQ(name_of("GptOssForCausalLM", "post_attention_layernorm.weight"),
            "blk.3.post_attention_norm.weight");
  EXPECT_EQ(name_of("GptOssForCausalLM", "self_attn.sinks"), "blk.3.attn_sinks.weight");
  EXPECT_EQ(name_of("GptOssForCausalLM", "mlp.router.bias"), "blk.3.ffn_gate_inp.bias");
  EXPECT_EQ(name_of("Qwen2ForCausalLM", "self_attn.sinks"), "");
  EXPECT_EQ(name_of("Llama4ForCausalLM", "feed_forward.shared_expert.up_proj.weight"),
            "blk.3.ffn_up_shexp.weight");
  EXPECT_EQ(name_of("Llama4ForCausalLM", "feed_forward.up_proj.weight"), "blk.3.ffn_up.weight");

  using Names = std::vector<std::string>;
  const auto fused = [](const char* class_name, const char* name) {
    return kvzap::gguf::fused_expert_names(*kvzap::gguf::architecture_of(class_name), name);
  };
  EXPECT_EQ(fused("GptOssForCausalLM", "model.layers.3.mlp.experts.gate_up_proj"),
            (Names{"blk.3.ffn_gate_exps.weight", "blk.3.ffn_up_exps.weight"}));
  EXPECT_EQ(fused("GptOssForCausalLM", "model.layers.3.mlp.experts.down_proj_bias"),
            (Names{"blk.3.ffn_down_exps.bias"}));
  EXPECT_EQ(fused("Llama4ForCausalLM", "model.layers.3.feed_forward.experts.down_proj"),
            (Names{"blk.3.ffn_down_exps.weight"}));
  EXPECT_EQ(fused("GptOssForCausalLM", "model.layers.3.mlp.experts.5.up_proj.weight"), Names{});
  EXPECT_EQ(fused("Gemma2ForCausalLM", "model.layers.3.mlp.experts.down_proj"), Names{});
}

}  // namespace
