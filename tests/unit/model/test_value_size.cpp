// Values of another size than keys: padded tensors, and the families that have such values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/model_config.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "linalg/quantised/format.hpp"
#include "model/padded_tensor.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ModelConfig;
using kvzap::model::HeadPadding;
using kvzap::model::pad_heads;
using kvzap::model::StoredTensor;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;

/// Values are 1 + their index. As blocks of Q8_0, whose bytes are 1 + the row's number.
struct Counting final : StoredTensor {
  explicit Counting(std::int64_t n, bool quantised = false) : columns(n), has_blocks(quantised) {}
  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    for (std::int64_t r = row_begin; r < row_end; ++r) {
      for (std::int64_t c = begin; c < end; ++c) {
        *target++ = static_cast<float>(1 + r * columns + c);
      }
    }
  }
  std::string_view block_format() const override { return has_blocks ? "Q8_0" : ""; }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    const auto* const format = kvzap::linalg::quantised::find_format("Q8_0");
    const std::int64_t blocks = columns / format->values;
    buffer.clear();
    for (std::int64_t b = 0; b < blocks; ++b) {
      buffer.insert(buffer.end(), format->bytes, static_cast<std::byte>(1 + row * blocks + b));
    }
    return buffer.data();
  }
  std::string description() const override { return "counting"; }
  void release() const override {}
  std::int64_t columns;
  bool has_blocks;
};

constexpr std::int64_t stored = 3, padded = 5, heads = 2, others = 4;

/// The expected value at a place of the padded axis and the other axis.
float value(std::int64_t place, std::int64_t other, bool of_columns) {
  const std::int64_t inside = place % padded, in_file = place / padded * stored + inside;
  if (inside >= stored) return 0;
  return static_cast<float>(
      1 + (of_columns ? other * heads * stored + in_file : in_file * others + other));
}

TEST(PaddedTensor, ReadsRowsColumnsAndVectors) {
  for (const bool of_columns : {false, true}) {
    const std::int64_t rows = of_columns ? others : heads * padded;
    const std::int64_t columns = of_columns ? heads * padded : others;
    const auto tensor = pad_heads(std::make_unique<Counting>(of_columns ? heads * stored : others),
                                  {stored, padded, of_columns}, columns);
    EXPECT_EQ(tensor->block_format(), "");
    for (std::int64_t begin = 0; begin < columns; ++begin) {
      for (std::int64_t end = begin; end <= columns; ++end) {
        std::vector<float> found(rows * (end - begin));
        tensor->read(0, rows, begin, end, found.data());
        std::size_t i = 0;
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = begin; c < end; ++c, ++i) {
            ASSERT_EQ(found[i], of_columns ? value(c, r, true) : value(r, c, false)) << r << c;
          }
        }
      }
    }
  }
  // A vector of heads, such as a bias.
  const auto vector = pad_heads(std::make_unique<Counting>(heads * stored), {stored, padded}, 0);
  std::vector<float> found(6);
  vector->read(0, 1, 2, 8, found.data());
  EXPECT_EQ(found, (std::vector<float>{3, 0, 0, 4, 5, 6}));
}

TEST(PaddedTensor, BlocksStayBlocks) {
  const auto bytes_of = [](const StoredTensor& tensor, std::int64_t row, std::int64_t blocks) {
    const std::int64_t bytes = kvzap::linalg::quantised::find_format("Q8_0")->bytes;
    std::vector<std::byte> buffer;
    const std::byte* const data = tensor.row_blocks(row, buffer);
    std::vector<int> marks;
    for (std::int64_t b = 0; b < blocks; ++b) {
      EXPECT_TRUE(std::all_of(data + b * bytes, data + (b + 1) * bytes,
                              [&](std::byte byte) { return byte == data[b * bytes]; }));
      marks.push_back(static_cast<int>(data[b * bytes]));
    }
    return marks;
  };
  const auto rows = pad_heads(std::make_unique<Counting>(64, true), {2, 3}, 64);
  EXPECT_EQ(rows->block_format(), "Q8_0");
  EXPECT_EQ(bytes_of(*rows, 1, 2), (std::vector<int>{3, 4}));
  EXPECT_EQ(bytes_of(*rows, 2, 2), (std::vector<int>{0, 0}));
  EXPECT_EQ(bytes_of(*rows, 3, 2), (std::vector<int>{5, 6}));
  const auto columns = pad_heads(std::make_unique<Counting>(128, true), {64, 96, true}, 192);
  EXPECT_EQ(columns->block_format(), "Q8_0");
  EXPECT_EQ(bytes_of(*columns, 1, 6), (std::vector<int>{5, 6, 0, 7, 8, 0}));
  // Blocks of two heads become plain values.
  EXPECT_EQ(pad_heads(std::make_unique<Counting>(96, true), {48, 64, true}, 128)->block_format(),
            "");
}

ModelConfig load(const std::string& class_name, const std::string& fields) {
  TemporaryFolder folder;
  folder.write("config.json",
               R"({"architectures":[")" + class_name +
                   R"("],"hidden_size":128,"intermediate_size":96,"num_attention_heads":8,)"
                   R"("vocab_size":100,"max_position_embeddings":512,"num_hidden_layers":7,)" +
                   fields + "}");
  return ModelConfig::load(folder.path());
}

TEST(ValueSize, Mimo) {
  const std::string experts = R"("n_routed_experts":8,"num_experts_per_tok":2)";
  const ModelConfig config = load("MiMoV2FlashForCausalLM", experts);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.head_dim, 192);
  EXPECT_EQ(config.value_dim, 128);
  EXPECT_EQ(config.rotated_dims(), 64);
  EXPECT_EQ(config.window_rotary_dim, 64);
  EXPECT_EQ(config.rope_theta, 5e6);
  EXPECT_EQ(config.window_rope_theta, 1e4);
  EXPECT_EQ(config.attention_out_multiplier, 0.707);
  EXPECT_EQ(config.experts->shared_intermediate_size, 0);
  for (std::int64_t l = 0; l < 7; ++l) {
    const bool is_full = l == 0 || l == 5;
    EXPECT_EQ(config.layer(l).window, is_full ? 0 : 129) << l;
    EXPECT_EQ(config.layer(l).has_sinks, !is_full) << l;
    EXPECT_EQ(config.kv_heads_of(l), is_full ? 4 : 8) << l;
    EXPECT_EQ(config.is_full(l), is_full) << l;
    EXPECT_EQ(config.layer(l).has_experts, l > 0) << l;
  }
  // Published files.
  const ModelConfig published = load(
      "MiMoV2FlashForCausalLM",
      experts + R"(,"hybrid_layer_pattern":[0,1,1,0,1,1,1],"moe_layer_freq":[0,1,0,1,1,1,1],)"
                R"("sliding_window":128,"sliding_window_size":128,"swa_rope_theta":20000,)"
                R"("rope_theta":4000000,"partial_rotary_factor":0.334,"layernorm_epsilon":1e-4,)"
                R"("swa_num_attention_heads":8,"swa_num_key_value_heads":8,"swa_head_dim":192,)"
                R"("swa_v_head_dim":128,"add_swa_attention_sink_bias":true,)"
                R"("add_full_attention_sink_bias":false,"n_shared_experts":null,)"
                R"("routed_scaling_factor":null,"scoring_func":"sigmoid","topk_method":"noaux_tc",)"
                R"("attention_value_scale":null,"attention_chunk_size":128)");
  EXPECT_TRUE(published.warnings.empty());
  EXPECT_EQ(published.layer(1).window, 129);
  EXPECT_EQ(published.layer(3).window, 0);
  EXPECT_FALSE(published.layer(2).has_experts);
  EXPECT_EQ(published.rope_theta, 4e6);
  EXPECT_EQ(published.window_rope_theta, 2e4);
  EXPECT_EQ(published.rms_norm_eps, 1e-4);
  EXPECT_EQ(published.attention_out_multiplier, 1);
  const auto refused = [&](const std::string& fields,
                           std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("MiMoV2FlashForCausalLM", experts + "," + fields); }, parts);
  };
  refused(R"("v_head_dim":193)", {"v_head_dim", "at most head_dim (192)", "found 193"});
  refused(R"("num_key_value_heads":8)", {"num_key_value_heads", "half of", "(8)", "found 8"});
  refused(R"("swa_num_key_value_heads":4)", {"swa_num_key_value_heads", "expected 8", "found 4"});
  refused(R"("add_full_attention_sink_bias":true)", {"add_full_attention_sink_bias", "false"});
  refused(R"("n_shared_experts":1)", {"n_shared_experts", "none"});
  refused(R"("hybrid_layer_pattern":[0,2,1,0,1,1,1])", {"hybrid_layer_pattern", "found 2"});
  refused(R"("rope_parameters":{"full_attention":3})", {"rope_parameters"});
  refused(R"("rope_parameters":{"sliding_attention":{"partial_rotary_factor":0.001}})",
          {"partial_rotary_factor", "even number", "0 of 192"});
  refused(R"("rope_parameters":{"sliding_attention":{"partial_rotary_factor":0}})",
          {"partial_rotary_factor", "even number", "0 of 192"});
}

TEST(ValueSize, ThePlanOfLagunaHasScratchForItsLargestLayers) {
  const ModelConfig config =
      load("LagunaForCausalLM",
           R"("layer_types":["full_attention","sliding_attention","full_attention",)"
           R"("sliding_attention","sliding_attention","full_attention","full_attention"],)"
           R"("num_experts":16,"num_attention_heads_per_layer":[8,24,8,24,16,8,8])");
  ModelConfig large = config;
  large.num_attention_heads = 24;
  for (kvzap::LayerConfig& layer : large.layers) layer.query_heads = 0;
  const auto scratch = [](const ModelConfig& of) {
    return kvzap::plan_memory(of, {kvzap::DType::f32, 100000, 0, 1, 0}).attention;
  };
  EXPECT_EQ(scratch(config), scratch(large));
  large.num_attention_heads = 8;
  EXPECT_GT(scratch(config), scratch(large));
}

TEST(ValueSize, LagunaHasQueryHeadsOfEachLayer) {
  const std::string sizes =
      R"("num_experts":16,"layer_types":["full_attention","sliding_attention","full_attention",)"
      R"("sliding_attention","sliding_attention","full_attention","full_attention"])";
  const ModelConfig config =
      load("LagunaForCausalLM", sizes + R"(,"num_attention_heads_per_layer":[8,16,8,8,24,8,8])");
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_EQ(config.query_group_of(0), 1);
  EXPECT_EQ(config.query_heads_of(1), 16);
  EXPECT_EQ(config.query_group_of(4), 3);
  EXPECT_TRUE(config.layer(1).keeps_window);
  EXPECT_FALSE(config.layer(3).keeps_window);
  EXPECT_EQ(config.rotated_dims(), 64);
  EXPECT_EQ(config.window_rotary_dim, 128);
  EXPECT_TRUE(config.gates_attention && config.gates_heads && config.has_softplus_gates);
  EXPECT_FALSE(config.layer(0).has_experts);
  EXPECT_TRUE(config.layer(1).has_experts);
  for (const char* gating : {R"("per-element")", "false"}) {
    EXPECT_FALSE(load("LagunaForCausalLM", sizes + R"(,"gating":)" + gating).gates_heads);
  }
  const auto refused = [&](const std::string& fields,
                           std::initializer_list<std::string_view> parts) {
    expect_error([&] { load("LagunaForCausalLM", sizes + "," + fields); }, parts);
  };
  const std::string heads = R"("num_attention_heads_per_layer":)";
  refused(heads + "[8]", {"num_attention_heads_per_layer", "array of 7"});
  refused(heads + "[8,12,8,8,8,8,8]", {"multiples of num_key_value_heads (8)", "found 12"});
  refused(heads + "[8,8,16,8,8,8,8]", {"same number in all full layers (8)", "found 16"});
  refused(heads + "[8,-8,8,8,8,8,8]", {"multiples of", "found -8"});
  refused(R"("gating":1)", {"gating", "per-head", "found 1"});
  refused(R"("moe_router_logit_softcapping":30)", {"moe_router_logit_softcapping", "found 30"});
  refused(R"("moe_apply_router_weight_on_input":true)", {"moe_apply_router_weight_on_input"});
}

}  // namespace
