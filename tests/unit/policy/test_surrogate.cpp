#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <kvzap/engine/surrogate.hpp>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "safetensors_writer.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ExecutionSpace;
using kvzap::HeadPartition;
using kvzap::MemorySpace;
using kvzap::ModelConfig;
using kvzap::Surrogate;
using kvzap::test::expect_error;
using kvzap::test::stored_tensor;
using kvzap::test::StoredTensor;
using kvzap::test::TemporaryFolder;
using kvzap::test::write_safetensors;

constexpr int hidden_size = 24;
constexpr int mlp_size = 10;
constexpr int kv_heads = 5;
constexpr int layers = 3;

float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; }

ModelConfig model() {
  ModelConfig config{};
  config.architecture = "Qwen3ForCausalLM";
  config.hidden_size = hidden_size;
  config.num_hidden_layers = layers;
  config.num_attention_heads = 2 * kv_heads;
  config.num_key_value_heads = kv_heads;
  config.head_dim = 8;
  return config;
}

std::string config_json(int input, const std::string& hidden, int output, int modules) {
  return "{\"input_dim\": " + std::to_string(input) + ", \"hidden_dim\": " + hidden +
         ", \"output_dim\": " + std::to_string(output) +
         ", \"n_modules\": " + std::to_string(modules) + "}";
}

/// A surrogate's folder, and the numbers in it as the file's value type rounds them.
struct Folder {
  TemporaryFolder folder;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::vector<double>> numbers;

  explicit Folder(bool mlp, const std::string& dtype = "F32") {
    std::mt19937 random(mlp ? 31 : 30);
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
      std::size_t count = 1;
      for (std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
      std::vector<float> values(count);
      for (auto& value : values) {
        value = uniform(random);
        if (dtype == "F16") value = kvzap::half(value);
        if (dtype == "BF16") value = kvzap::bfloat16(value);
        numbers[name].push_back(value);
      }
      tensors[name] = stored_tensor(dtype, shape, values);
    };
    for (int l = 0; l < layers; ++l) {
      const std::string name = "layers." + std::to_string(l);
      if (mlp) {
        add(name + ".0.weight", {mlp_size, hidden_size});
        add(name + ".0.bias", {mlp_size});
        add(name + ".2.weight", {kv_heads, mlp_size});
        add(name + ".2.bias", {kv_heads});
      } else {
        add(name + ".weight", {kv_heads, hidden_size});
        add(name + ".bias", {kv_heads});
      }
    }
    folder.write("config.json", config_json(hidden_size, mlp ? std::to_string(mlp_size) : "null",
                                            kv_heads, layers));
    save();
  }

  void save() const { write_safetensors(folder.path() / "model.safetensors", tensors); }

  Surrogate load(const HeadPartition& partition, int rank) const {
    return Surrogate::load(folder.path(), model(), partition, rank);
  }
  void load() const { load(HeadPartition::even(layers, kv_heads, 1), 0); }

  std::vector<double> linear(const std::string& name, const std::vector<double>& x) const {
    std::vector<double> y = numbers.at(name + ".bias");
    const auto& weight = numbers.at(name + ".weight");
    for (std::size_t n = 0; n < y.size(); ++n) {
      for (std::size_t k = 0; k < x.size(); ++k) y[n] += weight[n * x.size() + k] * x[k];
    }
    return y;
  }

  /// Scores of all heads for one token.
  std::vector<double> score(int layer, const std::vector<double>& x) const {
    const std::string name = "layers." + std::to_string(layer);
    if (numbers.count(name + ".weight")) return linear(name, x);
    auto hidden = linear(name + ".0", x);
    for (double& h : hidden) h = 0.5 * h * (1 + std::erf(h / std::sqrt(2.0)));
    return linear(name + ".2", hidden);
  }
};

/// Every rank's scores of every layer against the reference.
void expect_scores(const Folder& folder, const HeadPartition& partition, int tokens) {
  std::mt19937 random(32);
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", tokens, hidden_size);
  const auto host_hidden = Kokkos::create_mirror_view(hidden);
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < hidden_size; ++i) host_hidden(t, i) = 2 * uniform(random);
  }
  Kokkos::deep_copy(hidden, host_hidden);
  for (int rank = 0; rank < partition.n_ranks(); ++rank) {
    auto surrogate = folder.load(partition, rank);
    for (int layer = 0; layer < layers; ++layer) {
      const auto& heads = partition.heads(layer, rank);
      // Both layouts: the cache's scores and a part of something larger.
      Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> right("right", heads.size(), tokens);
      Kokkos::View<float**, Kokkos::LayoutLeft, MemorySpace> left("left", heads.size(), tokens);
      const ExecutionSpace exec;
      surrogate.score(exec, layer, {}, hidden, right);
      surrogate.score(exec, layer, {}, hidden, left);
      exec.fence();
      const auto host_right = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, right);
      const auto host_left = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, left);
      for (int t = 0; t < tokens; ++t) {
        std::vector<double> x;
        for (int i = 0; i < hidden_size; ++i) x.push_back(host_hidden(t, i));
        const auto expected = folder.score(layer, x);
        for (std::size_t h = 0; h < heads.size(); ++h) {
          ASSERT_NEAR(host_right(h, t), expected[heads[h]], 2e-5)
              << "rank " << rank << " layer " << layer << " head " << heads[h] << " token " << t;
          ASSERT_EQ(host_left(h, t), host_right(h, t));
        }
      }
    }
  }
}

TEST(Surrogate, LinearScores) {
  for (const char* dtype : {"F32", "F16", "BF16"}) {
    const Folder folder(false, dtype);
    for (int tokens : {1, 8, 9, 33}) {
      expect_scores(folder, HeadPartition::even(layers, kv_heads, 1), tokens);
    }
    EXPECT_EQ(folder.load(HeadPartition::even(layers, kv_heads, 1), 0).kind(), "linear");
  }
}

TEST(Surrogate, MlpScoresWithExactGelu) {
  for (const char* dtype : {"F32", "BF16"}) {
    const Folder folder(true, dtype);
    for (int tokens : {1, 8, 9, 33}) {
      expect_scores(folder, HeadPartition::even(layers, kv_heads, 1), tokens);
    }
    EXPECT_EQ(folder.load(HeadPartition::even(layers, kv_heads, 1), 0).kind(), "mlp");
  }
}

TEST(Surrogate, ARankScoresItsOwnHeads) {
  // Other heads in every layer, neither contiguous nor equally many per rank.
  const auto balanced =
      HeadPartition::balanced({{90, 1, 40, 2, 50}, {0, 0, 0, 0, 99}, {5, 9, 1, 7, 3}}, 2);
  ASSERT_NE(balanced.heads(0, 0), balanced.heads(1, 0));
  for (bool mlp : {false, true}) {
    const Folder folder(mlp);
    expect_scores(folder, balanced, 4);
    expect_scores(folder, HeadPartition::even(layers, kv_heads, 3), 11);
  }
}

TEST(Surrogate, ConfigMustFitTheModel) {
  const Folder folder(false);
  const auto expect = [&](int input, int output, int modules,
                          std::initializer_list<std::string_view> parts) {
    folder.folder.write("config.json", config_json(input, "null", output, modules));
    expect_error([&] { folder.load(); }, {"config.json"});
    expect_error([&] { folder.load(); }, parts);
  };
  expect(32, kv_heads, layers, {"input_dim is 32", "hidden_size is 24"});
  expect(hidden_size, 8, layers, {"output_dim is 8", "num_key_value_heads is 5"});
  expect(hidden_size, kv_heads, 4, {"n_modules is 4", "num_hidden_layers is 3"});
  expect(-1, kv_heads, layers, {"input_dim: expected a whole number from 1", "found -1"});
  folder.folder.write("config.json", config_json(hidden_size, "0", kv_heads, layers));
  expect_error([&] { folder.load(); }, {"hidden_dim: expected a whole number from 1", "found 0"});
  folder.folder.write("config.json", R"({"output_dim": 5, "n_modules": 3})");
  expect_error([&] { folder.load(); }, {"config.json", "input_dim", "found none"});
}

TEST(Surrogate, TensorsMustHaveTheConfiguredShape) {
  const auto expect = [](bool mlp, const std::string& name, std::vector<std::int64_t> shape,
                         std::initializer_list<std::string_view> parts) {
    Folder folder(mlp);
    std::size_t count = 1;
    for (std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    folder.tensors.at(name) = stored_tensor("F32", shape, std::vector<float>(count));
    folder.save();
    expect_error([&] { folder.load(); }, {"model.safetensors", name});
    expect_error([&] { folder.load(); }, parts);
  };
  expect(false, "layers.1.weight", {hidden_size, kv_heads}, {"[5, 24]", "[24, 5]"});
  expect(false, "layers.2.bias", {4}, {"[5]", "[4]"});
  expect(true, "layers.0.0.weight", {11, hidden_size}, {"[10, 24]", "[11, 24]"});
  expect(true, "layers.1.0.bias", {1, mlp_size}, {"[10]", "[1, 10]"});
  expect(true, "layers.2.2.weight", {kv_heads, 9}, {"[5, 10]", "[5, 9]"});
  expect(true, "layers.2.2.bias", {6}, {"[5]", "[6]"});

  Folder missing(true);
  missing.tensors.erase("layers.1.2.bias");
  missing.save();
  expect_error([&] { missing.load(); }, {"layers.1.2.bias"});
  // An MLP's tensors under a linear configuration.
  missing.folder.write("config.json", config_json(hidden_size, "null", kv_heads, layers));
  expect_error([&] { missing.load(); }, {"layers.0.weight"});
}

TEST(Surrogate, ScoresMustFitTheHiddenStates) {
  const Folder folder(false);
  auto surrogate = folder.load(HeadPartition::even(layers, kv_heads, 2), 1);
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> hidden("hidden", 4, hidden_size);
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> all_heads("scores", kv_heads, 4);
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> few_tokens("scores", 2, 3);
  const ExecutionSpace exec;
  expect_error([&] { surrogate.score(exec, 0, {}, hidden, all_heads); }, {"(5, 4)", "(2, 4)"});
  expect_error([&] { surrogate.score(exec, 0, {}, hidden, few_tokens); }, {"(2, 3)", "(2, 4)"});
}

}  // namespace
