// A sequence whose last tokens are taken back is the sequence that never had them.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <cstring>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::expect_error;

constexpr int dim = 8, window = 6, page_rows = 2;
const std::vector<int> all_heads = {2, 0, 1, 2};

float element(std::int64_t position, int layer, int head, int d, bool is_value) {
  return static_cast<float>((position * 5 + layer) * 2 + head) / 16 +
         static_cast<float>(d + (is_value ? dim : 0)) / 32;
}
/// Below zero for some tokens, and without a meaning for others.
float score_of(std::int64_t position) {
  if (position % 7 == 5) return std::numeric_limits<float>::quiet_NaN();
  return position % 3 == 1 ? -1.0F : 1.0F;
}

struct Form {
  const char* name;
  std::vector<OwnRing> rings;
  PageFormat format;
};

class TakeBack : public ::testing::TestWithParam<Form> {
 protected:
  TakeBack() : m_cache(make()), m_expected(make()) {}

  static std::unique_ptr<KVCache> make() {
    CacheShape shape{all_heads, dim, window, page_rows, GetParam().rings};
    shape.format = GetParam().format;
    return std::make_unique<KVCache>(DType::bf16, shape);
  }

  /// Appends `count` tokens in one step, whose rows arrive `at_once` (0: all) in a call. Tokens
  /// from `drafted` on differ from those that a sequence really has.
  static void step(KVCache& cache, const std::vector<SequenceId>& ids, std::int64_t count,
                   std::int64_t at_once, const EvictionRule& rule, std::int64_t drafted) {
    std::vector<StepSpan> spans;
    for (const SequenceId id : ids) spans.push_back({id, count});
    cache.begin_step(ExecutionSpace(), spans);
    for (std::size_t l = 0; l < all_heads.size(); ++l) {
      const int layer = static_cast<int>(l);
      for (const SequenceId id : ids) {
        for (std::int64_t done = 0; done < count;) {
          const std::int64_t part = at_once == 0 ? count : std::min(at_once, count - done);
          append(cache, id, layer, part, rule, drafted);
          done += part;
        }
      }
    }
    cache.end_step();
  }

  static void append(KVCache& cache, SequenceId id, int layer, std::int64_t count,
                     const EvictionRule& rule, std::int64_t drafted) {
    const std::int64_t begin = cache.tokens(id, layer);
    const int heads = all_heads[layer];
    using Rows = Kokkos::View<bfloat16***, Kokkos::LayoutRight, MemorySpace>;
    const Rows keys("keys", count, heads, dim), values("values", count, heads, dim);
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads, count);
    const auto host_keys = Kokkos::create_mirror_view(keys);
    const auto host_values = Kokkos::create_mirror_view(values);
    const auto host_scores = Kokkos::create_mirror_view(scores);
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t position = begin + t, wrong = position >= drafted ? 1000 : 0;
      for (int h = 0; h < heads; ++h) {
        host_scores(h, t) = score_of(position + h + wrong);
        for (int d = 0; d < dim; ++d) {
          host_keys(t, h, d) = bfloat16(element(position + wrong, layer, h, d, false));
          host_values(t, h, d) = bfloat16(element(position + wrong, layer, h, d, true));
        }
      }
    }
    Kokkos::deep_copy(keys, host_keys);
    Kokkos::deep_copy(values, host_values);
    Kokkos::deep_copy(scores, host_scores);
    cache.append(ExecutionSpace(), id, layer, keys, values, scores, rule);
  }

  void expect_equal(SequenceId id, SequenceId expected) {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    };
    for (std::size_t l = 0; l < all_heads.size(); ++l) {
      const int layer = static_cast<int>(l);
      EXPECT_EQ(m_cache->tokens(id, layer), m_expected->tokens(expected, layer));
      EXPECT_EQ(m_cache->ring_first(id, layer), m_expected->ring_first(expected, layer));
      for (int h = 0; h < all_heads[l]; ++h) {
        SCOPED_TRACE(testing::Message() << "layer " << l << ", head " << h);
        const auto found = m_cache->host_rows(id, layer, h);
        const auto wanted = m_expected->host_rows(expected, layer, h);
        EXPECT_EQ(found.positions, wanted.positions);
        EXPECT_TRUE(same(found.scores, wanted.scores));
        EXPECT_TRUE(same(found.keys, wanted.keys));
        EXPECT_TRUE(same(found.values, wanted.values));
        EXPECT_EQ(m_cache->page_list(id, layer, h).size(),
                  m_expected->page_list(expected, layer, h).size());
      }
    }
    const AppendCounts& found = m_cache->counts(id);
    const AppendCounts& wanted = m_expected->counts(expected);
    EXPECT_EQ(found.judged, wanted.judged);
    EXPECT_EQ(found.evicted, wanted.evicted);
    EXPECT_EQ(found.non_finite, wanted.non_finite);
  }

  std::unique_ptr<KVCache> m_cache, m_expected;
};

TEST_P(TakeBack, LeavesTheSequenceWithoutTheTokens) {
  const EvictionRule judging{0, 2, true};
  for (const EvictionRule& rule : {judging, EvictionRule::keep_all()}) {
    for (const std::int64_t at_once : {0, 1}) {
      const SequenceId id = m_cache->add_sequence(), other = m_cache->add_sequence();
      const SequenceId expected = m_expected->add_sequence(), next = m_expected->add_sequence();
      for (const std::int64_t accepted : {0, 3, 1, 0, 2, 2, 1, 0, 3, 3, 0, 1, 2, 3, 1, 0, 0, 2}) {
        const std::int64_t tokens = m_cache->tokens(id, 0);
        SCOPED_TRACE(tokens);
        step(*m_cache, {other, id}, 4, at_once, rule, tokens + 1 + accepted);
        // In two parts, as after a snapshot within an answer.
        m_cache->take_back(id, (3 - accepted) / 2);
        m_cache->take_back(other, 3 - accepted);
        m_cache->take_back(id, 3 - accepted - (3 - accepted) / 2);
        for (std::int64_t t = 0; t <= accepted; ++t) {
          step(*m_expected, {expected, next}, 1, 0, rule, 1000);
        }
        expect_equal(id, expected);
        expect_equal(other, next);
      }
      const SequenceId fork = m_cache->fork(id), same = m_expected->fork(expected);
      step(*m_cache, {id}, 4, at_once, rule, m_cache->tokens(id, 0) + 1);
      m_cache->take_back(id, 3);
      step(*m_expected, {expected}, 1, 0, rule, 1000);
      expect_equal(id, expected);
      expect_equal(fork, same);
    }
  }
}

TEST_P(TakeBack, FreesPages) {
  const SequenceId id = m_cache->add_sequence();
  step(*m_cache, {id}, 4, 0, EvictionRule::keep_all(), 1000);
  for (int i = 0; i < 12; ++i) {
    const std::size_t pages = m_cache->pool().pages_in_use();
    step(*m_cache, {id}, 4, 0, EvictionRule::keep_all(), 0);
    m_cache->take_back(id, 4);
    EXPECT_EQ(m_cache->pool().pages_in_use(), pages);
    step(*m_cache, {id}, 1, 0, EvictionRule::keep_all(), 1000);
  }
}

TEST_P(TakeBack, RefusesOtherTokens) {
  const SequenceId id = m_cache->add_sequence(), other = m_cache->add_sequence();
  step(*m_cache, {id}, 4, 0, EvictionRule::keep_all(), 1000);
  expect_error([&] { m_cache->take_back(id, 5); }, {"5 tokens", "has left 4"});
  expect_error([&] { m_cache->take_back(id, -1); }, {"-1 tokens"});
  expect_error([&] { m_cache->take_back(other, 1); }, {"was not in the last step"});
  step(*m_cache, {other}, 1, 0, EvictionRule::keep_all(), 1000);
  expect_error([&] { m_cache->take_back(id, 1); }, {"was not in the last step"});
  step(*m_cache, {id}, window + 1, 0, EvictionRule::keep_all(), 1000);
  expect_error([&] { m_cache->take_back(id, 1); }, {"longer than a ring"});
}

INSTANTIATE_TEST_SUITE_P(Forms, TakeBack,
                         ::testing::Values(Form{"wide", {}, {}},
                                           Form{"quantised", {}, {RowType::q8, RowType::q4}},
                                           Form{"narrow", {}, {RowType::q3, RowType::q2}},
                                           Form{"rings", {{5, false}, {}, {}, {4, true}}, {}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace kvzap
