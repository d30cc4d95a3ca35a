// A fork of the beginning of a sequence is the sequence as it was then.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstring>
#include <kvzap/core/cache.hpp>
#include <string>
#include <vector>

namespace kvzap {
namespace {

constexpr int dim = 8, window = 5, page_rows = 4;
const std::vector<int> all_heads = {2, 0, 1};

/// A row that is unlike all others, and a score that is below zero for every third token.
float element(std::int64_t position, int layer, int head, int d, bool is_value) {
  return static_cast<float>((position * 3 + layer) * 2 + head) +
         static_cast<float>(d + (is_value ? dim : 0)) / 32;
}
float score_of(std::int64_t position) { return position % 3 == 1 ? -1.0F : 1.0F; }

template <class Element>
class ForkBeginning : public ::testing::Test {
 protected:
  explicit ForkBeginning(const std::vector<OwnRing>& rings = {})
      : cache(DTypeOf<Element>::value, CacheShape{all_heads, dim, window, page_rows, rings}) {}

  /// Appends tokens up to `end` to a sequence, as a rule judges them.
  void append(SequenceId id, std::int64_t end, const EvictionRule& rule) {
    const std::int64_t begin = cache.tokens(id, 0);
    const auto count = static_cast<std::size_t>(end - begin);
    for (std::size_t l = 0; l < all_heads.size(); ++l) {
      const int layer = static_cast<int>(l), heads = all_heads[l];
      using Rows = Kokkos::View<Element***, Kokkos::LayoutRight, MemorySpace>;
      const Rows keys("keys", count, heads, dim), values("values", count, heads, dim);
      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads, count);
      const auto host_keys = Kokkos::create_mirror_view(keys);
      const auto host_values = Kokkos::create_mirror_view(values);
      const auto host_scores = Kokkos::create_mirror_view(scores);
      for (std::size_t t = 0; t < count; ++t) {
        const std::int64_t position = begin + static_cast<std::int64_t>(t);
        for (int h = 0; h < heads; ++h) {
          host_scores(h, t) = score_of(position + h);
          for (int d = 0; d < dim; ++d) {
            host_keys(t, h, d) = Element(element(position, layer, h, d, false));
            host_values(t, h, d) = Element(element(position, layer, h, d, true));
          }
        }
      }
      Kokkos::deep_copy(keys, host_keys);
      Kokkos::deep_copy(values, host_values);
      Kokkos::deep_copy(scores, host_scores);
      cache.append(ExecutionSpace(), id, layer, keys, values, scores, rule);
    }
  }

  void expect_equal(SequenceId id, SequenceId expected) {
    for (std::size_t l = 0; l < all_heads.size(); ++l) {
      const int layer = static_cast<int>(l);
      EXPECT_EQ(cache.tokens(id, layer), cache.tokens(expected, layer));
      EXPECT_EQ(cache.ring_first(id, layer), cache.ring_first(expected, layer));
      for (int h = 0; h < all_heads[l]; ++h) {
        const auto found = cache.host_rows(id, layer, h);
        const auto wanted = cache.host_rows(expected, layer, h);
        EXPECT_EQ(found.positions, wanted.positions);
        EXPECT_EQ(found.scores, wanted.scores);
        ASSERT_EQ(found.keys.size(), wanted.keys.size());
        const std::size_t bytes = found.keys.size() * sizeof(found.keys[0]);
        if (bytes > 0) {  // memcmp takes no null pointers
          EXPECT_EQ(std::memcmp(found.keys.data(), wanted.keys.data(), bytes), 0);
          EXPECT_EQ(std::memcmp(found.values.data(), wanted.values.data(), bytes), 0);
        }
        EXPECT_EQ(cache.page_list(id, layer, h).size(), cache.page_list(expected, layer, h).size());
      }
    }
  }

  /// A sequence of `tokens` tokens, of which those before `judged` were judged as they left the
  /// ring, and the others were kept.
  SequenceId sequence_of(std::int64_t tokens, std::int64_t judged) {
    const SequenceId id = cache.add_sequence();
    append(id, std::min(judged, tokens), {0, 2, true});
    if (tokens > judged) append(id, tokens, EvictionRule::keep_all());
    return id;
  }

  KVCache cache;
};

/// Beside a window of 7 tokens, chunks of 4.
template <class Element>
class ForkBeginningOfRings : public ForkBeginning<Element> {
 protected:
  ForkBeginningOfRings() : ForkBeginning<Element>({{6, false}, {}, {4, true}}) {}

  /// Forks every beginning of a sequence. Each equals the sequence as it was then, and goes on
  /// like it, or is refused. Returns the tokens of those that are not refused.
  std::vector<std::int64_t> beginnings(SequenceId source) {
    std::vector<std::int64_t> found;
    for (std::int64_t tokens = 0; tokens <= this->cache.tokens(source, 0); ++tokens) {
      SCOPED_TRACE(tokens);
      SequenceId id = -1;
      try {
        id = this->cache.fork_beginning(ExecutionSpace(), source, tokens);
      } catch (const Error&) {
        continue;
      }
      found.push_back(tokens);
      const SequenceId expected = this->sequence_of(tokens, 0);
      this->expect_equal(id, expected);
      for (const std::int64_t more : {1, 9}) {
        for (const SequenceId each : {id, expected}) {
          this->append(each, tokens + more, EvictionRule::keep_all());
        }
        this->expect_equal(id, expected);
      }
      this->cache.free_sequence(id);
      this->cache.free_sequence(expected);
    }
    return found;
  }
};

using Values = ::testing::Types<float, bfloat16, half>;
TYPED_TEST_SUITE(ForkBeginning, Values);

TYPED_TEST_SUITE(ForkBeginningOfRings, Values);

TYPED_TEST(ForkBeginningOfRings, IsTheSequenceOrRefused) {
  using Tokens = std::vector<std::int64_t>;
  const auto of = [&](std::int64_t tokens) {
    return this->beginnings(this->sequence_of(tokens, 0));
  };
  EXPECT_EQ(of(3), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(of(4), (Tokens{0, 4}));
  EXPECT_EQ(of(6), (Tokens{0, 4, 5, 6}));
  EXPECT_EQ(of(7), (Tokens{0, 7}));
  EXPECT_EQ(of(24), (Tokens{0, 24}));
}

TYPED_TEST(ForkBeginningOfRings, NotRowsOfACancelledStep) {
  const SequenceId source = this->sequence_of(4, 0);
  this->cache.begin_step(ExecutionSpace(), {{source, 2}});
  this->append(source, 6, EvictionRule::keep_all());
  this->cache.cancel_step();
  EXPECT_EQ(this->beginnings(source), (std::vector<std::int64_t>{0, 4}));
}

TYPED_TEST(ForkBeginning, IsTheSequenceAfterItsFirstTokens) {
  auto& cache = this->cache;
  for (const std::int64_t judged : {0, 14}) {
    for (std::int64_t tokens = judged; tokens <= 37; ++tokens) {
      SCOPED_TRACE(tokens);
      const SequenceId source = this->sequence_of(37, judged);
      const SequenceId expected = this->sequence_of(tokens, judged);
      const SequenceId found = cache.fork_beginning(ExecutionSpace(), source, tokens);
      this->expect_equal(found, expected);
      // Each goes on without the other, judged or not.
      this->append(source, 44, {0, 2, true});
      const SequenceId unlike = this->sequence_of(37, judged);
      this->append(unlike, 44, {0, 2, true});
      for (const SequenceId id : {found, expected}) this->append(id, tokens + 9, {0, 2, true});
      this->expect_equal(found, expected);
      this->expect_equal(source, unlike);
      cache.free_sequence(source);
      for (const SequenceId id : {found, expected}) {
        this->append(id, tokens + 21, EvictionRule::keep_all());
      }
      this->expect_equal(found, expected);
      for (const SequenceId id : {found, expected, unlike}) cache.free_sequence(id);
      EXPECT_EQ(cache.pool().pages_in_use(), 0U);
    }
  }
}

TYPED_TEST(ForkBeginning, SharesPages) {
  auto& cache = this->cache;
  const SequenceId source = this->sequence_of(37, 0);
  const std::size_t pages = cache.pool().pages_in_use();
  const SequenceId found = cache.fork_beginning(ExecutionSpace(), source, 30);
  EXPECT_EQ(cache.pool().pages_in_use(), pages);
  cache.free_sequence(source);
  EXPECT_EQ(cache.pool().pages_in_use(), 3U * 7U);  // 25 rows of each head
  cache.free_sequence(found);
  EXPECT_EQ(cache.pool().pages_in_use(), 0U);
}

TYPED_TEST(ForkBeginning, NeedsTheRowsOfTheRing) {
  auto& cache = this->cache;
  const ExecutionSpace exec;
  const SequenceId source = this->sequence_of(37, 0);
  // Evicts rows that are older than the window.
  for (std::size_t l = 0; l < all_heads.size(); ++l) {
    const std::vector<Cutoff> cutoffs(static_cast<std::size_t>(all_heads[l]), {0, 1000});
    cache.evict(exec, source, static_cast<int>(l), cutoffs, {0, window});
  }
  this->append(source, 50, EvictionRule::keep_all());
  const std::size_t pages = cache.pool().pages_in_use();
  const auto error_of = [&](SequenceId id, std::int64_t tokens) -> std::string {
    try {
      cache.fork_beginning(exec, id, tokens);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(error_of(source, 30).find("has evicted rows of positions 25 to 29"), std::string::npos)
      << error_of(source, 30);
  EXPECT_NE(error_of(source, 3), "");
  EXPECT_NE(error_of(source, 51).find("51 tokens of sequence 0; expected 0 to 50"),
            std::string::npos);
  EXPECT_NE(error_of(source, -1), "");
  EXPECT_NE(error_of(1000, 1), "");
  EXPECT_EQ(cache.pool().pages_in_use(), pages);
  const SequenceId found = cache.fork_beginning(exec, source, 38);
  EXPECT_EQ(cache.tokens(found, 0), 38);
  EXPECT_EQ(cache.rows(found, 0, 0), cache.rows(source, 0, 0) - 12);
  cache.begin_step(exec, {{source, 1}});
  EXPECT_NE(error_of(source, 40).find("in a step"), std::string::npos);
  cache.cancel_step();
  // Without memory for a ring nothing changes.
  cache.set_limit(1);
  EXPECT_THROW(cache.fork_beginning(exec, source, 40), OutOfMemory);
  cache.set_limit(0);
  cache.free_sequence(found);
  cache.free_sequence(source);
  EXPECT_EQ(cache.pool().pages_in_use(), 0U);
}

}  // namespace
}  // namespace kvzap
