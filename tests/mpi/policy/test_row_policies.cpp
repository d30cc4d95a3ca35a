// Policies that score rows, with heads on several ranks: the same scores, to the bit.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "policy/registry.hpp"
#include "unit/policy/row_policies.hpp"

namespace kvzap {
namespace {

using test::FakeLayer;
using test::LayerData;

TEST(RowPolicies, ScoresDoNotDependOnThePlacementOfHeads) {
  const auto comm = Communicator::world();
  test::LayerShape shape;
  shape.kv_heads = 5;
  shape.tokens = 300;
  shape.new_tokens = 260;
  shape.head_dim = 32;
  shape.layer = 1;
  shape.layers = 2;
  LayerData data = test::random_layer(shape, 3);
  data.keep = 150;
  data.evict_ratio = 0.5;
  for (int h = 0; h < data.kv_heads; ++h) {
    data.cached_scores[h].assign(data.cached(h), 0.1f * static_cast<float>(h));
  }
  for (const PolicyInfo& info : {policy::knorm(), policy::random(), policy::streaming_llm(),
                                 policy::keydiff(), policy::lagkv(), policy::leverage(),
                                 policy::cur(), policy::compactor(), policy::non_causal()}) {
    const auto expected = FakeLayer(data).run(*test::make_policy(info, data), 100);
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
      const auto policy = test::make_policy(info, data);
      const auto scores = FakeLayer(data, heads, comm).run(*policy, 100);
      ASSERT_EQ(scores.size(), heads.size());
      for (std::size_t i = 0; i < heads.size(); ++i) {
        EXPECT_EQ(scores[i], expected[heads[i]]) << "head " << heads[i];
      }
    }
  }
}

}  // namespace
}  // namespace kvzap
