// The types of tensors are those that llama.cpp's tool chooses.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gguf/block_formats.hpp"
#include "gguf/type_mixture.hpp"

namespace {

using namespace kvzap;

using Shape = std::vector<std::int64_t>;

std::string type_of(const char* mixture, const std::string& name, std::int64_t n_layers = 30,
                    const Shape& shape = {512, 1024}, bool is_tied = false,
                    std::int64_t heads_per_group = 1) {
  return std::string(gguf::tensor_type(*gguf::find_type_mixture(mixture),
                                       {name, n_layers, shape, is_tied, heads_per_group}));
}

/// The layers in which a tensor has another type than in most.
std::vector<int> layers_of(const char* mixture, const std::string& tensor, const char* type) {
  std::vector<int> layers;
  for (int layer = 0; layer < 30; ++layer) {
    if (type_of(mixture, "blk." + std::to_string(layer) + "." + tensor) == type) {
      layers.push_back(layer);
    }
  }
  return layers;
}

TEST(TypeMixture, GivesSensitiveTensorsMoreBits) {
  const std::vector<int> most = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29};
  for (const char* mixture : {"Q4_K_M", "Q5_K_M"}) {
    EXPECT_EQ(layers_of(mixture, "attn_v.weight", "Q6_K"), most);
    EXPECT_EQ(layers_of(mixture, "ffn_down.weight", "Q6_K"), most);
    EXPECT_TRUE(layers_of(mixture, "ffn_up.weight", "Q6_K").empty());
    EXPECT_TRUE(layers_of(mixture, "attn_k.weight", "Q6_K").empty());
  }
  EXPECT_EQ(layers_of("Q4_K_M", "ffn_down.weight", "Q4_K").size(), 16u);
  EXPECT_EQ(layers_of("Q5_K_M", "attn_v.weight", "Q5_K").size(), 16u);
  EXPECT_EQ(layers_of("Q4_K_S", "attn_v.weight", "Q5_K"), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers_of("Q4_K_S", "ffn_down.weight", "Q5_K"), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(layers_of("Q5_K_S", "attn_v.weight", "Q5_K").size(), 30u);
  EXPECT_EQ(layers_of("IQ4_NL", "ffn_down.weight", "Q5_K"), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(layers_of("IQ4_NL", "attn_v.weight", "IQ4_NL").size(), 30u);
}

TEST(TypeMixture, KnowsExperts) {
  const Shape stacked = {16, 512, 1024};
  EXPECT_EQ(type_of("Q4_K_M", "blk.2.ffn_down_exps.weight", 30, stacked), "Q6_K");
  EXPECT_EQ(type_of("Q4_K_M", "blk.3.ffn_down_exps.weight", 30, stacked), "Q4_K");
  EXPECT_EQ(type_of("Q4_K_M", "blk.2.ffn_up_exps.weight", 30, stacked), "Q4_K");
  EXPECT_EQ(type_of("Q4_K_M", "blk.2.ffn_down_shexp.weight"), "Q6_K");
  for (const char* mixture : {"BF16", "Q8_0", "Q4_K_M"}) {
    EXPECT_EQ(type_of(mixture, "blk.2.ffn_gate_inp.weight"), "F32");
    EXPECT_EQ(type_of(mixture, "blk.2.ffn_gate_inp_shexp.weight", 30, {1, 1024}), "F32");
    EXPECT_EQ(type_of(mixture, "blk.2.exp_probs_b.bias", 30, {16}), "F32");
  }
  EXPECT_EQ(type_of("MXFP4_MOE", "blk.2.ffn_down_exps.weight", 30, stacked), "MXFP4");
  for (const char* name : {"blk.2.attn_v.weight", "output.weight", "token_embd.weight"}) {
    EXPECT_EQ(type_of("MXFP4_MOE", name), "Q8_0");
  }
  // Models of eight experts, such as Mixtral 8x7B.
  const auto of_eight = [](const char* mixture, const char* name) {
    const Shape shape = {1024, 1024};
    return gguf::tensor_type(*gguf::find_type_mixture(mixture), {name, 30, shape, false, 4, 8});
  };
  EXPECT_EQ(of_eight("Q4_K_M", "blk.3.attn_v.weight"), "Q8_0");
  EXPECT_EQ(of_eight("Q5_K_M", "blk.3.attn_k.weight"), "Q8_0");
  EXPECT_EQ(of_eight("Q4_K_M", "blk.3.attn_output.weight"), "Q5_K");
  EXPECT_EQ(of_eight("Q5_K_M", "blk.3.attn_output.weight"), "Q5_K");
  EXPECT_EQ(of_eight("Q4_0", "blk.3.attn_output.weight"), "Q4_0");
  EXPECT_EQ(of_eight("Q4_K_M", "blk.3.attn_q.weight"), "Q4_K");
  EXPECT_EQ(of_eight("BF16", "blk.3.attn_k.weight"), "BF16");
}

TEST(TypeMixture, KnowsFusedMaps) {
  EXPECT_EQ(type_of("Q4_K_M", "blk.2.attn_qkv.weight"), "Q6_K");
  EXPECT_EQ(type_of("Q4_K_M", "blk.3.attn_qkv.weight"), "Q4_K");
}

TEST(TypeMixture, GivesTheHeadMoreBits) {
  for (const char* mixture :
       {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_S", "Q5_K_M", "Q6_K", "IQ4_NL"}) {
    EXPECT_EQ(type_of(mixture, "output.weight"), "Q6_K");
    EXPECT_EQ(type_of(mixture, "token_embd.weight", 30, {512, 1024}, true), "Q6_K");
  }
  EXPECT_EQ(type_of("Q4_K_M", "token_embd.weight"), "Q4_K");
  EXPECT_EQ(type_of("Q8_0", "output.weight"), "Q8_0");
  EXPECT_EQ(type_of("BF16", "output.weight"), "BF16");
}

TEST(TypeMixture, GivesTheLargestModelsMoreBits) {
  EXPECT_EQ(type_of("Q4_K_M", "blk.12.attn_v.weight", 80, {1024, 8192}, false, 8), "Q6_K");
  EXPECT_EQ(type_of("Q4_K_M", "blk.13.attn_v.weight", 80, {1024, 8192}, false, 8), "Q5_K");
  EXPECT_EQ(type_of("Q4_K_M", "blk.13.attn_v.weight", 80, {8192, 8192}), "Q4_K");
  EXPECT_EQ(type_of("IQ4_NL", "blk.13.attn_v.weight", 30, {256, 1024}, false, 4), "Q5_K");
}

TEST(TypeMixture, FallsBackForShortRows) {
  EXPECT_EQ(type_of("Q4_K_M", "blk.3.attn_q.weight", 30, {576, 576}), "Q5_0");
  EXPECT_EQ(type_of("Q5_K_M", "blk.3.attn_q.weight", 30, {576, 576}), "Q5_1");
  EXPECT_EQ(type_of("Q6_K", "blk.3.attn_q.weight", 30, {576, 576}), "Q8_0");
  EXPECT_EQ(type_of("Q4_0", "output.weight", 30, {49152, 576}), "Q8_0");
  for (const char* mixture : {"Q4_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q4_0"}) {
    EXPECT_EQ(type_of(mixture, "blk.3.attn_q.weight", 30, {72, 72}), "F16");
  }
}

TEST(TypeMixture, KeepsVectorsAndNorms) {
  for (const gguf::TypeMixture& mixture : gguf::type_mixtures()) {
    const std::string name(mixture.name);
    EXPECT_EQ(type_of(name.c_str(), "blk.3.attn_norm.weight", 30, {1024}), "F32");
    EXPECT_EQ(type_of(name.c_str(), "blk.3.attn_q.bias", 30, {1024}), "F32");
    EXPECT_EQ(type_of(name.c_str(), "blk.3.attn_q_norm.weight", 30, {2, 256}), "F32");
    const std::string matrices(name == "MXFP4_MOE" ? "Q8_0" : mixture.main_type);
    EXPECT_EQ(type_of(name.c_str(), "blk.3.ffn_gate.weight"), matrices);
    EXPECT_NE(gguf::find_block_format(mixture.main_type)->encode, nullptr);
  }
}

TEST(TypeMixture, FindsNames) {
  EXPECT_EQ(gguf::find_type_mixture("q4_k_m")->file_type, 15u);
  EXPECT_EQ(gguf::find_type_mixture("Q2_K"), nullptr);
  EXPECT_EQ(gguf::find_type_mixture("Q4_K"), nullptr);
}

}  // namespace
