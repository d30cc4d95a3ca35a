// Gates whose hidden units ranks share, and groups of rows over the heads of all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <vector>

#include "mpi/ranks.hpp"
#include "policy/registry.hpp"
#include "unit/policy/kvcrush_reference.hpp"
#include "unit/policy/retention_gates.hpp"
#include "unit/policy/row_policies.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::LayerData;

constexpr int layers = 2;

/// Five heads in contiguous runs, in another order, and nearly all on other ranks than the first.
HeadPartition dealt(int placement, int ranks) {
  if (placement == 0) return HeadPartition::even(layers, 5, ranks);
  const std::vector<std::int64_t> rows = placement == 1
                                             ? std::vector<std::int64_t>{1, 5, 2, 4, 3}
                                             : std::vector<std::int64_t>{100, 1, 1, 1, 1};
  return HeadPartition::balanced({rows, rows}, ranks);
}

LayerData five_heads(unsigned seed) {
  test::LayerShape shape;
  shape.kv_heads = 5;
  shape.tokens = 90;
  shape.new_tokens = 70;
  shape.head_dim = 8;
  shape.hidden_size = 24;
  shape.layer = 1;
  shape.layers = layers;
  LayerData data = test::random_layer(shape, seed);
  for (float& x : data.hidden) x /= 4;
  return data;
}

std::vector<std::size_t> best(const std::vector<double>& scores, double ratio) {
  std::vector<std::size_t> rows(scores.size());
  for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = r;
  std::stable_sort(rows.begin(), rows.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  rows.resize(static_cast<std::size_t>(static_cast<double>(rows.size()) * (1 - ratio)));
  std::sort(rows.begin(), rows.end());
  return rows;
}

TEST(TrimKv, RanksShareTheUnitsOfGates) {
  const auto comm = Communicator::world();
  const test::SharedFolder folder;
  LayerData data = five_heads(7);
  const std::int64_t before = data.tokens - data.new_tokens;
  ModelConfig config;
  config.num_hidden_layers = layers;
  config.num_key_value_heads = data.kv_heads;
  config.hidden_size = data.hidden_size;
  for (const bool is_deep : {false, true}) {
    SCOPED_TRACE(is_deep ? "DBTrimKV" : "TRIM-KV");
    const auto file = folder / (is_deep ? "deep.safetensors" : "gates.safetensors");
    comm.agree_on_root([&] {
      test::write_safetensors(
          file, test::retention_gates(is_deep, layers, data.kv_heads, data.hidden_size));
    });
    // What the step before has left.
    for (int h = 0; h < data.kv_heads; ++h) {
      data.cached_scores[h].clear();
      for (std::int64_t r = 0; r < data.cached(h); ++r) {
        const std::int64_t position = data.positions[h][r];
        data.cached_scores[h].push_back(
            static_cast<float>(static_cast<double>(before + 1 - position) *
                               test::log_retention(data, is_deep, h, position)));
      }
    }
    const auto expected = test::retentions(data, is_deep);
    for (int placement = 0; placement < 3; ++placement) {
      SCOPED_TRACE(placement);
      const HeadPartition partition = dealt(placement, comm.size());
      const std::vector<int>& heads = partition.heads(data.layer, comm.rank());
      const PolicySetup setup{config, partition, DType::f32, {}, comm};
      const auto make = policy::trim_kv().make(PolicyArguments({{"gates", file.string()}}), setup);
      const auto scores = FakeLayer(data, heads, comm).run(*make(), 32);
      ASSERT_EQ(scores.size(), heads.size());
      for (std::size_t i = 0; i < heads.size(); ++i) {
        const auto& of_head = expected[heads[i]];
        ASSERT_EQ(scores[i].size(), of_head.size());
        for (std::size_t r = 0; r < of_head.size(); ++r) {
          EXPECT_NEAR(scores[i][r], of_head[r], 4e-5 * std::fabs(of_head[r]))
              << "head " << heads[i] << ", row " << r;
        }
        for (const double ratio : {0.5, 0.8}) {
          EXPECT_EQ(best({scores[i].begin(), scores[i].end()}, ratio), best(of_head, ratio))
              << "head " << heads[i] << " at " << ratio;
        }
      }
    }
  }
}

TEST(KvCrush, RepresentativesOverTheHeadsOfAllRanks) {
  const auto comm = Communicator::world();
  const LayerData base = five_heads(8);
  const auto plain = FakeLayer(base).run(*test::make_policy(policy::random(), base));
  PolicyInfo info = policy::random();
  for (const char* anchor : {"zeros", "ones", "alternating", "random"}) {
    for (const double ratio : {0.5, 0.8}) {
      SCOPED_TRACE(std::string(anchor) + ", " + std::to_string(ratio));
      LayerData data = base;
      data.keep = static_cast<std::int64_t>(static_cast<double>(data.tokens) * (1 - ratio));
      PolicyChoice choice;
      choice.info = &info;
      choice.budget.amount = Budget::Amount::evict_ratio;
      choice.budget.evict_ratio = ratio;
      choice.make = [&] { return test::make_policy(info, data); };
      const ModelConfig config;
      const HeadPartition partition = dealt(0, comm.size());
      policy::kvcrush().apply(
          choice, PolicyArguments({{"share", "0.3"}, {"anchor", anchor}, {"seed", "3"}}),
          {config, partition, DType::f32, {}, comm});
      test::KvCrushCase of{data.positions, plain, {}, data.keep, 0.3};
      for (int h = 0; h < data.kv_heads; ++h) {
        of.anchor.push_back(std::string(anchor) == "ones" ||
                            (std::string(anchor) == "alternating" && h % 2 == 1));
      }
      const auto expected = test::kept_by_kvcrush(of);
      const auto alone = FakeLayer(data).run(*choice.make());
      for (int placement = 0; placement < 3; ++placement) {
        const std::vector<int> heads = dealt(placement, comm.size()).heads(data.layer, comm.rank());
        const auto scores = FakeLayer(data, heads, comm).run(*choice.make());
        ASSERT_EQ(scores.size(), heads.size());
        for (std::size_t i = 0; i < heads.size(); ++i) {
          const auto h = static_cast<std::size_t>(heads[i]);
          EXPECT_EQ(scores[i], alone[h]) << "head " << h;
          for (std::size_t r = 0; r < scores[i].size(); ++r) {
            if (std::string(anchor) == "random") continue;
            EXPECT_EQ(scores[i][r], expected[h][r] ? plain[h][r] : -FLT_MAX)
                << "head " << h << ", row " << r;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvzap
