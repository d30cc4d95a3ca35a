// Attention over rows that are stored once, as keys and as values: decode of many query heads that
// share them.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "base/cuda/has_tensor_cores.hpp"
#include "unit/attention/cases.hpp"
#include "watched.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionPath;
using kvzap::AttentionSpan;
using kvzap::bfloat16;
using kvzap::DTypeOf;
using kvzap::half;
using kvzap::PageFormat;
using kvzap::RowType;
using namespace kvzap::test::attention;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr PageFormat latents{RowType::wide, RowType::wide, true};
// What the kernel for tensor cores needs of most_block_memory(): that of compute capability 8.0, or
// of 8.6 for few heads of the smaller sizes.
constexpr int needed_memory(int dim) { return (dim == 576 ? 163 : 99) << 10; }

template <class Value>
struct LatentBatch : Batch<Value> {
  LatentBatch(int dim, int group, int window, int page_rows, const std::vector<SpanCase>& cases,
              unsigned seed, Arrangement arrangement = Arrangement::right)
      : Batch<Value>(dim, group, window, page_rows, cases, seed, arrangement, latents) {
    this->new_values = this->new_keys;
  }
};

template <class Parameter>
class AttentionLatents : public ::testing::Test {
 protected:
  using Value = Parameter;

  static constexpr AttentionPath paths[4] = {AttentionPath::automatic, AttentionPath::rows,
                                             AttentionPath::split_kv,
                                             AttentionPath::portable};  // nvcc does not count them

  static bool has_kernel(int dim) {
    const bool has_size = dim == 288 || dim == 320 || dim == 576;
    return !std::is_same_v<Value, float> && has_size &&
           kvzap::base::cuda::most_block_memory() >= needed_memory(dim);
  }
  // Kernels for tensor cores use two terms.
  static double tolerance_of_decode(AttentionPath path) {
    return kvzap::base::cuda::has_tensor_cores() ? tolerance : tolerance_of<Value>(path);
  }

  /// A path's result of all spans, which have one query each, against the reference.
  void compare(const Batch<Value>& batch, const typename Batch<Value>::Result& found,
               double within) {
    for (const AttentionSpan& span : batch.spans) {
      const auto row = static_cast<std::size_t>(span.first_query);
      for (int h = 0; h < batch.heads; ++h) {
        const std::size_t i = row * batch.heads + h;
        ASSERT_NO_FATAL_FAILURE(
            expect_same(found.lse.at(row, h, 0), batch.lse[i], 4 * within, h, -1));
        for (int d = 0; d < batch.dim; ++d) {
          ASSERT_NO_FATAL_FAILURE(expect_same(found.output.at(row, h, d),
                                              batch.output[i * batch.dim + d], within, h, d));
        }
      }
    }
  }
  static void expect_same(float found, double expected, double within, int head, int dim) {
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found) || (dim >= 0 && std::isinf(found)))
          << "head " << head << " dim " << dim << " is " << found;
    } else if (std::isinf(expected)) {
      // What becomes of an infinite value depends on when its weight is rounded to 0.
      ASSERT_FALSE(std::isfinite(found)) << "head " << head << " dim " << dim;
      if (dim < 0) {
        ASSERT_EQ(found, static_cast<float>(expected)) << "head " << head;
      }
    } else {
      ASSERT_NEAR(found, expected, within) << "head " << head << " dim " << dim;
    }
  }

  void check(Batch<Value>& batch) {
    SCOPED_TRACE("dim " + std::to_string(batch.dim) + " group " + std::to_string(batch.group));
    batch.solve();
    for (const SimdLevel level : simd_levels<Value>()) {
      const LevelInUse in_use(level);
      for (const AttentionPath path : paths) {
        if (!has_levels(path) && level != simd_levels<Value>().front()) continue;
        SCOPED_TRACE(kvzap::base::name_of(level));
        SCOPED_TRACE(name_of(path));
        compare(batch, batch.attend(m_attention, batch.spans, path), tolerance_of_decode(path));
      }
    }
  }

  Attention m_attention{DTypeOf<Value>::value};
};
TYPED_TEST_SUITE(AttentionLatents, Values);

/// Rows in pages, in the ring, and new ones; lengths around tiles of 16 rows and parts of 128.
std::vector<SpanCase> singles(int window) {
  return {{{37}, window, 1, 1},
          {{0}, 0, 1, 1},
          {{300}, window, 1, 2},
          {{0}, 5, 1, 1},
          {{129 - window}, window, 1, 15}};
}

TYPED_TEST(AttentionLatents, AnyGroupAgreesWithDoublePrecision) {
  const int pages[] = {1, 7, 64};
  int i = 0;
  for (const int group : {1, 5, 16, 40, 128}) {
    if (kvzap::test::watched && group > 16) continue;
    LatentBatch<TypeParam> batch(576, group, 8, pages[i % 3], singles(8), 100 + i,
                                 static_cast<Arrangement>(i % 3));
    this->check(batch);
    ++i;
  }
}

// The smaller ones take the portable kernels.
TYPED_TEST(AttentionLatents, OtherSizesAgreeWithDoublePrecision) {
  int i = 0;
  for (const int dim : {288, 24, 56, 320, 128}) {
    LatentBatch<TypeParam> batch(dim, 3 + 7 * i, 8, 7, singles(8), 200 + i,
                                 static_cast<Arrangement>(i % 3));
    this->check(batch);
    ++i;
  }
}

TYPED_TEST(AttentionLatents, RingsAndCachesWithoutNewRows) {
  // A ring longer than a part; then ranks that hold a part of the rows.
  LatentBatch<TypeParam> ring(576, 20, 150, 16, {{{3}, 150, 1, 1}, {{0}, 140, 1, 3}}, 300);
  this->check(ring);
  LatentBatch<TypeParam> cached(576, 3, 8, 16, {{{40}, 8, 1, 0}, {{0}, 8, 1, 0}}, 301);
  this->check(cached);
}

TYPED_TEST(AttentionLatents, MoreSpansThanArgumentsHold) {
  std::vector<SpanCase> cases;
  for (int s = 0; s < 7; ++s) cases.push_back({{s * 17}, 8, 1, 1 + s % 3});
  LatentBatch<TypeParam> batch(576, 2, 8, 7, cases, 400);
  this->check(batch);
}

TYPED_TEST(AttentionLatents, SoftCapsAgreeWithDoublePrecision) {
  LatentBatch<TypeParam> batch(576, 18, 8, 16, singles(8), 500);
  batch.soft_cap = 0.3f;
  this->check(batch);
}

// Queries beyond f16's largest value, and heads of very different sizes.
TYPED_TEST(AttentionLatents, LargeQueries) {
  LatentBatch<TypeParam> batch(576, 5, 8, 16, {{{0}, 0, 1, 40}}, 600);
  for (std::size_t r = 0; r < batch.new_keys.extents[0]; ++r) {
    for (int d = 0; d < 576; ++d) {
      batch.new_keys.at(r, 0, d) = TypeParam(float(batch.new_keys.at(r, 0, d)) * 0x1p-9f);
    }
  }
  batch.new_keys.upload();
  for (int d = 0; d < 576; ++d) {
    batch.queries.at(1, 2, d) *= 0x1p+17f;
    batch.queries.at(1, 3, d) *= 0x1p-40f;
    // Warps of the kernel for tensor cores have different dimensions.
    batch.queries.at(1, 4, d) *= d < 70 ? 0x1p+17f : 0x1p-30f;
  }
  batch.queries.upload();
  batch.solve();
  for (const AttentionPath path : TestFixture::paths) {
    SCOPED_TRACE(name_of(path));
    this->compare(batch, batch.attend(this->m_attention, batch.spans, path),
                  40 * this->tolerance_of_decode(path));  // scores of up to 100
  }
}

TYPED_TEST(AttentionLatents, NonFiniteRowsReachThoseThatSeeThem) {
  using Value = TypeParam;
  struct Case {
    const char* what;
    float value;
    int first, last;  // rows
    int dim;
  };
  // In the first tile, in a later one, in all rows, and in all rows of a part.
  for (const Case& c : {Case{"NaN", nan, 3, 4, 5},
                        {"NaN", nan, 140, 141, 400},
                        {"NaN", nan, 137, 138, 575},
                        {"-infinity", -infinity, 20, 21, 0},
                        {"-infinity", -infinity, 0, 130, 0},
                        {"-infinity", -infinity, 0, 150, 0},
                        {"infinity", infinity, 60, 61, 530}}) {
    SCOPED_TRACE(c.what + std::string(" in rows ") + std::to_string(c.first) + " … " +
                 std::to_string(c.last));
    LatentBatch<TypeParam> batch(576, 19, 8, 16, {{{0}, 0, 1, 150}, {{0}, 0, 1, 20}}, 700);
    const auto first = batch.spans[0].first_new;
    for (int r = c.first; r < c.last; ++r) {
      batch.new_keys.at(first + r, 0, c.dim) = Value(c.value);
    }
    batch.new_keys.upload();
    // Signs that decide what an infinite key makes of a score.
    for (int h = 0; h < batch.heads; ++h) {
      batch.queries.at(1, h, c.dim) = h % 3 == 2 ? -0.5f : 0.5f;
      if (h % 5 == 4) batch.queries.at(1, h, c.dim) = 0.3f;  // with a rest, of the same sign or not
    }
    batch.queries.at(1, 7, 2) = nan;
    batch.queries.at(3, 9, 570) = -infinity;
    batch.queries.upload();
    this->check(batch);
    if (this->HasFailure()) return;
  }
}

// What a span gets is the same, bit for bit, alone and beside others.
TYPED_TEST(AttentionLatents, OtherSpansChangeNoBit) {
  LatentBatch<TypeParam> batch(576, 17, 8, 7, singles(8), 800);
  for (const AttentionPath path : TestFixture::paths) {
    const auto together = batch.attend(this->m_attention, batch.spans, path);
    for (const AttentionSpan& span : batch.spans) {
      Attention own{DTypeOf<TypeParam>::value};
      const auto alone = batch.attend(own, {span}, path);
      const auto row = static_cast<std::size_t>(span.first_query);
      for (int h = 0; h < batch.heads; ++h) {
        ASSERT_EQ(together.lse.at(row, h, 0), alone.lse.at(row, h, 0));
        for (int d = 0; d < batch.dim; ++d) {
          ASSERT_EQ(together.output.at(row, h, d), alone.output.at(row, h, d));
        }
      }
    }
  }
}

// The kernel for tensor cores runs where it should: it rounds otherwise than the portable one.
TYPED_TEST(AttentionLatents, TensorCoresTakeTheirSizes) {
  for (const int dim : {576, 320, 288, 24}) {
    for (const bool shares_new_rows : {true, false}) {
      LatentBatch<TypeParam> batch(dim, 6, 8, 16, singles(8), 900);
      if (!shares_new_rows) {
        std::mt19937 random(7);
        batch.new_values = Array<TypeParam>(batch.new_keys.extents[0], 1, dim, Arrangement::right);
        fill_random(batch.new_values, 0, random);
      }
      this->check(batch);
      if (!kvzap::base::machine().on_device()) continue;
      const auto found = batch.attend(this->m_attention, batch.spans, AttentionPath::automatic);
      const auto portable = batch.attend(this->m_attention, batch.spans, AttentionPath::split_kv);
      bool differs = false;
      for (int d = 0; d < dim; ++d) {
        const auto row = static_cast<std::size_t>(batch.spans[2].first_query);
        differs = differs || found.output.at(row, 1, d) != portable.output.at(row, 1, d);
      }
      EXPECT_EQ(differs, shares_new_rows && TestFixture::has_kernel(dim)) << "dim " << dim;
    }
  }
}

// More tiles of a part than shared memory holds, twice.
TYPED_TEST(AttentionLatents, LongHeads) {
  const bool is_own_case = std::is_same_v<TypeParam, bfloat16> && this->has_kernel(576);
  if (kvzap::test::watched || !is_own_case) return;
  LatentBatch<TypeParam> batch(576, 1, 8, 64, {{{16500}, 8, 1, 1}}, 1000);
  batch.solve();
  this->compare(batch, batch.attend(this->m_attention, batch.spans, AttentionPath::automatic),
                tolerance);
}

}  // namespace
