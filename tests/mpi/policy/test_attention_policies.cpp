// Policies that score rows by attention, with heads on several ranks, some of which may have none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "policy/registry.hpp"
#include "unit/policy/row_policies.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::LayerData;

TEST(AttentionPolicies, ScoresDoNotDependOnThePlacementOfHeads) {
  const auto comm = Communicator::world();
  test::LayerShape shape;
  shape.kv_heads = 5;
  shape.group = 2;
  shape.tokens = 150;
  shape.new_tokens = 120;
  shape.head_dim = 32;
  shape.layer = 1;
  shape.layers = 2;
  LayerData data = test::random_layer(shape, 4);
  data.keep = 70;
  data.evict_ratio = 0.5;
  data.question = 30;
  for (int h = 0; h < data.kv_heads; ++h) {
    data.cached_scores[h].assign(data.cached(h), 0.01f * static_cast<float>(h + 1));
  }
  const std::vector<std::pair<PolicyInfo, test::Arguments>> policies = {
      {policy::snapkv(), {{"window", "16"}}},
      {policy::tova(), {}},
      {policy::h2o(), {}},
      {policy::h2o(), {{"local", "on"}}},
      {policy::scissorhands(), {}},
      {policy::r_kv(), {{"retained", "3"}}},
      {policy::r_kv(), {{"mass", "0.8"}}},
      {policy::lazy_eviction(), {{"alpha", "0.02"}}},
      {policy::tri_attention(), {}},
      {policy::dropkv(), {}},
      {policy::expected_attention(), {}},
      {policy::cap(), {}},
      {policy::simlayerkv(), {{"lazy-threshold", "0.01"}, {"recent", "8"}}},
      {policy::simlayerkv(), {{"lazy-threshold", "0.9"}, {"recent", "8"}}},
      {policy::finch(), {}}};
  for (const auto& [info, arguments] : policies) {
    const auto expected = FakeLayer(data).run(*test::make_policy(info, data, arguments), 50);
    // Dealt in turn, in turn from the other end, and all on one rank.
    for (int placement = 0; placement < 3; ++placement) {
      SCOPED_TRACE(info.name + ", placement " + std::to_string(placement));
      std::vector<int> heads;
      for (int h = 0; h < data.kv_heads; ++h) {
        const int owner = placement == 0   ? h % comm.size()
                          : placement == 1 ? (data.kv_heads - 1 - h) / 2 % comm.size()
                                           : comm.size() - 1;
        if (owner == comm.rank()) heads.push_back(h);
      }
      const auto policy = test::make_policy(info, data, arguments);
      // Twice: the object goes on with the next step, and so do the ranks together.
      for (int step = 0; step < 2; ++step) {
        const auto scores = FakeLayer(data, heads, comm).run(*policy, 50);
        ASSERT_EQ(scores.size(), heads.size());
        for (std::size_t i = 0; i < heads.size(); ++i) {
          const auto& of_head = expected[heads[i]];
          ASSERT_EQ(scores[i].size(), of_head.size());
          for (std::size_t r = 0; r < of_head.size(); ++r) {
            // TOVA's sums over heads are added in another order.
            EXPECT_NEAR(scores[i][r], of_head[r], 1e-6f * std::max(1.0f, std::fabs(of_head[r])))
                << "head " << heads[i] << ", row " << r;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvzap
