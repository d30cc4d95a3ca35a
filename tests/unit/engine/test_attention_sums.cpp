// Sums of the attention that rows receive from step to step: against sums in double, over cuts,
// copies and failed steps.
#include "engine/attention_sums.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/allocation_hook.hpp"
#include "unit/policy/fake_layer.hpp"

namespace kvzap {
namespace {

using engine::AttentionSums;

/// Shows a step's blocks to sums.
class Adding final : public Policy {
 public:
  explicit Adding(AttentionSums& sums) : m_sums(sums) {}
  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = needs.log_sum_exp = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override { m_sums.add(layer, block); }
  void score(PolicyLayer& /*layer*/, const ScoreView& /*scores*/) override {}

 private:
  AttentionSums& m_sums;
};

/// A sequence of one layer: the positions that its heads have, and their sums.
struct Followed {
  int group = 1;
  std::int64_t tokens = 0;
  std::vector<std::vector<std::int64_t>> positions;
  std::vector<std::vector<double>> sums;

  Followed(int heads, int its_group) : group(its_group), positions(heads), sums(heads) {}

  /// A step of new tokens. In a failed one nothing happens here.
  void step(AttentionSums& added, std::int64_t count, unsigned seed, bool fails = false) {
    test::LayerShape shape;
    shape.kv_heads = static_cast<int>(positions.size());
    shape.group = group;
    shape.head_dim = 16;
    shape.tokens = tokens + count;
    shape.new_tokens = count;
    test::LayerData data = test::random_layer(shape, seed);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::int64_t most = 0;
    for (int h = 0; h < shape.kv_heads; ++h) {
      data.positions[h] = positions[h];
      for (std::int64_t t = tokens; t < tokens + count; ++t) data.positions[h].push_back(t);
      data.keys[h].resize(data.positions[h].size() * 16);
      data.values[h].resize(data.positions[h].size() * 16);
      for (float& x : data.keys[h]) x = normal(random);
      most = std::max(most, data.rows(h));
    }
    const ExecutionSpace exec;
    added.reserve(exec, 0, shape.kv_heads, most);
    test::FakeLayer layer(data);
    Adding policy(added);
    layer.observe(policy, 3);
    if (fails) {
      added.cancel(exec, tokens);
      return;
    }
    for (int h = 0; h < shape.kv_heads; ++h) {
      positions[h] = data.positions[h];
      sums[h].resize(positions[h].size());
      for (int q = 0; q < group; ++q) {
        const double all = data.log_sum_exp(tokens + count - 1, h * group + q);
        for (std::size_t row = 0; row < sums[h].size(); ++row) {
          sums[h][row] += std::exp(data.attention_score(tokens + count - 1, h * group + q,
                                                        static_cast<std::int64_t>(row)) -
                                   all);
        }
      }
    }
    tokens += count;
  }

  void cut(AttentionSums& added, unsigned seed) {
    std::mt19937 random(seed);
    std::size_t most = 0;
    for (const auto& of_head : positions) most = std::max(most, of_head.size());
    engine::AttentionSums::Sums scores("scores", positions.size(), most);
    ScoredLayer layer;
    layer.keep = decltype(layer.keep)("keep", positions.size(), most);
    const auto keep = Kokkos::create_mirror_view(layer.keep);
    for (std::size_t h = 0; h < positions.size(); ++h) {
      layer.heads.push_back(static_cast<int>(h));
      layer.rows.push_back(static_cast<std::int64_t>(positions[h].size()));
      std::size_t stay = 0;
      for (std::size_t row = 0; row < positions[h].size(); ++row) {
        keep(h, row) = random() % (h + 2) == 0 || row == 0;
        if (!keep(h, row)) continue;
        positions[h][stay] = positions[h][row];
        sums[h][stay++] = sums[h][row];
      }
      positions[h].resize(stay);
      sums[h].resize(stay);
    }
    Kokkos::deep_copy(layer.keep, keep);
    added.evict(ExecutionSpace(), layer);
  }

  void expect(AttentionSums& added) const {
    const ExecutionSpace exec;
    const auto found = added.sums(exec, 0);
    exec.fence();
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), found);
    for (std::size_t h = 0; h < sums.size(); ++h) {
      for (std::size_t row = 0; row < host.extent(1); ++row) {
        const double expected = row < sums[h].size() ? sums[h][row] : 0;
        EXPECT_NEAR(host(h, row), expected, 1e-5) << h << ", " << row;
      }
    }
  }
};

TEST(AttentionSums, AreThoseOfEveryStep) {
  for (const auto& [heads, group] : {std::pair{1, 1}, std::pair{3, 4}, std::pair{2, 7}}) {
    SCOPED_TRACE(heads);
    Followed text(heads, group);
    AttentionSums sums(2);
    EXPECT_TRUE(sums.empty());
    unsigned seed = 0;
    for (int round = 0; round < 4; ++round) {
      // Blocks of three tokens: the last one's attention counts. Rows outgrow the memory.
      for (const std::int64_t count : {1, 7, 3, 1, 90, 1}) {
        text.step(sums, count, ++seed);
        if (count == 7) text.expect(sums);
      }
      EXPECT_FALSE(sums.empty());
      text.expect(sums);
      text.cut(sums, ++seed);
      text.expect(sums);
    }
  }
}

TEST(AttentionSums, ForgetFailedSteps) {
  Followed text(2, 2);
  AttentionSums sums(1);
  unsigned seed = 20;
  text.step(sums, 5, ++seed, true);
  text.step(sums, 9, ++seed);
  text.step(sums, 1, ++seed);
  for (const std::int64_t count : {1, 4, 2}) text.step(sums, count, ++seed, true);
  text.expect(sums);
  text.step(sums, 1, ++seed);
  text.step(sums, 1, ++seed, true);
  text.cut(sums, ++seed);
  text.expect(sums);
  text.step(sums, 1, ++seed, true);
  text.step(sums, 2, ++seed);
  text.expect(sums);
}

TEST(AttentionSums, OfCopiesAreTheirOwn) {
  Followed text(2, 2);
  AttentionSums sums(1);
  unsigned seed = 40;
  text.step(sums, 9, ++seed);
  AttentionSums copy = sums.clone();
  Followed other = text;
  text.step(sums, 1, ++seed);
  text.cut(sums, ++seed);
  other.expect(copy);
  for (int i = 0; i < 3; ++i) other.step(copy, 1, ++seed);
  other.expect(copy);
  text.expect(sums);
  EXPECT_TRUE(AttentionSums(1).clone().empty());
}

// A context that follows generated tokens has rows without sums.
TEST(AttentionSums, OfLaterContextsAreZero) {
  Followed text(2, 1);
  AttentionSums sums(1);
  text.step(sums, 9, 60);
  for (int h = 0; h < 2; ++h) {
    for (std::int64_t t = 9; t < 200; ++t) text.positions[h].push_back(t);
    text.sums[h].resize(200);
  }
  text.tokens = 200;
  text.cut(sums, 61);
  text.expect(sums);
  text.step(sums, 1, 62);
  text.expect(sums);
}

TEST(AttentionSums, SurviveAFailedReserve) {
  Followed text(2, 2);
  AttentionSums sums(1);
  text.step(sums, 9, 80);
  static int left;
  for (left = 0; left < 2; ++left) {
    static int calls;
    calls = 0;
    base::allocation_hook = [](std::size_t) {
      if (calls++ == left) throw OutOfMemory("test", 1, 0);
    };
    EXPECT_THROW(sums.reserve(ExecutionSpace(), 0, 2, 1000), OutOfMemory);
    base::allocation_hook = nullptr;
    text.expect(sums);
    text.step(sums, 1, 81);
    text.expect(sums);
  }
}

}  // namespace
}  // namespace kvzap
