// What AMX's path does unlike the others: shifts that are raised late, and rows of a single token
// with large groups. (The other tests of attention go through its level too.)
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>

#include "unit/attention/cases.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionPath;
using kvzap::bfloat16;
using kvzap::DTypeOf;
using kvzap::half;
using kvzap::base::SimdLevel;
using namespace kvzap::test::attention;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Rows of a type, and the level at which they take one format.
template <class ValueType, SimdLevel simd_level>
struct Format {
  using Value = ValueType;
  static constexpr SimdLevel level = simd_level;
  static constexpr bool is_half = std::is_same_v<Value, half>;
  static constexpr double tolerance = !is_half                            ? pair_tolerance
                                      : simd_level == SimdLevel::amx_fp16 ? half_tolerance
                                                                          : split_tolerance;
};

template <class Format>
class AmxAttention : public ::testing::Test {
 protected:
  using Value = typename Format::Value;
  using AmxBatch = Batch<Value>;

  static SimdLevel level() { return or_emulated(Format::level); }
  void SetUp() override {
    if (!kvzap::base::processor_has(level())) GTEST_SKIP() << "the processor has no AVX512-BF16";
    if (kvzap::base::machine().on_device()) GTEST_SKIP() << "kernels of devices are in use";
  }

  /// The batch as it is now, by all that hosts have for it, against the reference.
  void check(AmxBatch& batch, double tolerance = Format::tolerance) {
    batch.queries.upload();
    batch.new_keys.upload();
    batch.new_values.upload();
    batch.solve();
    const LevelInUse in_use(level());
    for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::flash_prefill}) {
      SCOPED_TRACE(name_of(path));
      const auto found = batch.attend(m_attention, batch.spans, path);
      for (const auto& span : batch.spans) {
        for (int t = 0; t < span.queries; ++t) {
          const std::size_t row = span.first_query + t;
          for (int h = 0; h < batch.heads; ++h) {
            SCOPED_TRACE("token " + std::to_string(row) + " head " + std::to_string(h));
            const double lse = batch.lse[row * batch.heads + h];
            expect_same(found.lse.at(row, h, 0), lse, 4 * tolerance + 1e-6 * std::fabs(lse));
            for (int d = 0; d < batch.dim; ++d) {
              expect_same(found.output.at(row, h, d),
                          batch.output[(row * batch.heads + h) * batch.dim + d], tolerance);
            }
            if (HasFailure()) return;
          }
        }
      }
    }
  }

  static void expect_same(float found, double expected, double within) {
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(found)) << found;
    } else if (std::isinf(expected)) {
      EXPECT_EQ(found, static_cast<float>(expected));
    } else {
      EXPECT_NEAR(found, expected, within);
    }
  }

  Attention m_attention{DTypeOf<Value>::value};
};
using Formats =
    ::testing::Types<Format<bfloat16, SimdLevel::amx_bf16>, Format<half, SimdLevel::amx_fp16>,
                     Format<half, SimdLevel::amx_bf16>>;
TYPED_TEST_SUITE(AmxAttention, Formats);

// Scores of hundreds, exact but for sums since queries are integers that bfloat16 holds, so that
// most rows' first 32 keys say nothing of their largest score; and new keys that grow on top of it.
TYPED_TEST(AmxAttention, ShiftsAreRaised) {
  using Value = typename TypeParam::Value;
  for (const int group : {1, 8, 16}) {
    for (const int dim : {64, 72}) {
      SCOPED_TRACE("group " + std::to_string(group) + " dim " + std::to_string(dim));
      typename TestFixture::AmxBatch batch(
          dim, group, 8, 64, {{{1500, 40}, 8, 1, 1}, {{0, 700}, 8, 40, 600}, {{3, 0}, 8, 530, 530}},
          500);
      for (std::size_t t = 0; t < batch.queries.extents[0]; ++t) {
        for (int h = 0; h < batch.heads; ++h) {
          for (int d = 0; d < dim; ++d) {
            auto& q = batch.queries.at(t, h, d);
            q = std::nearbyint(q * 120);
          }
        }
      }
      const auto& grown = batch.spans[1];
      for (int r = 0; r < grown.new_rows; ++r) {
        for (int d = 0; d < dim; ++d) {
          auto& k = batch.new_keys.at(grown.first_new + r, 1, d);
          k = Value(static_cast<float>(k) * static_cast<float>(1 + r / 50));
        }
      }
      this->check(batch, std::max(TypeParam::tolerance, 0x1p-12));
    }
  }
}

// Large groups: the rows of a single token in items of 1,024, whose softmaxes are merged.
TYPED_TEST(AmxAttention, RowsOfSingleTokensThatAreNotFinite) {
  using Value = typename TypeParam::Value;
  using AmxBatch = typename TestFixture::AmxBatch;
  const auto spoil = [&](const char* what, const std::function<void(AmxBatch&, int)>& change) {
    SCOPED_TRACE(what);
    AmxBatch batch(40, 9, 8, 16, {{{0, 0}, 0, 1, 1700}, {{0, 0}, 0, 1, 45}}, 600);
    for (std::size_t t = 0; t < batch.queries.extents[0]; ++t) {
      for (int h = 0; h < batch.heads; ++h) batch.queries.at(t, h, 0) = h % 3 == 2 ? -0.5f : 0.5f;
    }
    for (const auto& span : batch.spans) change(batch, static_cast<int>(span.first_new));
    this->check(batch);
  };
  const auto set_keys = [](int begin, int end, float value) {
    return [=](AmxBatch& batch, int first) {
      for (int r = begin; r < end && first + r < static_cast<int>(batch.new_keys.extents[0]); ++r) {
        batch.new_keys.at(first + r, 1, 0) = Value(value);
      }
    };
  };
  spoil("a key NaN", set_keys(30, 31, nan));
  spoil("keys -infinity", set_keys(0, 40, -infinity));
  spoil("an item of keys -infinity", set_keys(0, 1024, -infinity));
  spoil("all keys -infinity", set_keys(0, 1700, -infinity));
  spoil("a key +infinity", set_keys(44, 45, infinity));
  spoil("a value NaN",
        [](AmxBatch& batch, int first) { batch.new_values.at(first + 33, 0, 7) = Value(nan); });
  spoil("a value +infinity", [](AmxBatch& batch, int first) {
    batch.new_values.at(first + 33, 0, 7) = Value(infinity);
  });
  spoil("a query -infinity", [](AmxBatch& batch, int) {
    for (std::size_t t = 0; t < batch.queries.extents[0]; ++t) {
      batch.queries.at(t, 4, 3) = -infinity;
    }
  });
  spoil("a query and keys infinite", [&](AmxBatch& batch, int first) {
    set_keys(0, 40, -infinity)(batch, first);
    for (std::size_t t = 0; t < batch.queries.extents[0]; ++t) {
      for (int h = 0; h < batch.heads; h += 2) batch.queries.at(t, h, 0) = infinity;
    }
  });
  spoil("a query NaN", [](AmxBatch& batch, int) {
    for (std::size_t t = 0; t < batch.queries.extents[0]; ++t) batch.queries.at(t, 4, 3) = nan;
  });
}

// The products give a row 0 times what it does not see, which must add nothing.
TYPED_TEST(AmxAttention, ValuesThatARowDoesNotSeeAreNothingToIt) {
  for (const int group : {1, 5, 16}) {
    SCOPED_TRACE("group " + std::to_string(group));
    typename TestFixture::AmxBatch batch(80, group, 8, 16, {{{5, 700}, 8, 90, 90}}, 700);
    const auto& span = batch.spans[0];
    for (const int r : {1, 31, 32, 64, 89}) {
      batch.new_values.at(span.first_new + r, r % 2, r % 80) =
          typename TypeParam::Value(r == 32 ? infinity : nan);
    }
    this->check(batch);
  }
}

// Query rows beyond what half holds, and far below it, each with values of very different size.
TYPED_TEST(AmxAttention, QueriesOfAnyMagnitude) {
  using Value = typename TypeParam::Value;
  for (const int group : {3, 8}) {
    SCOPED_TRACE("group " + std::to_string(group));
    typename TestFixture::AmxBatch batch(72, group, 8, 16,
                                         {{{0, 0}, 0, 1, 600}, {{0, 0}, 0, 70, 90}}, 800);
    for (std::size_t t = 0; t < batch.new_keys.extents[0]; ++t) {
      for (int h = 0; h < batch.kv_heads; ++h) {
        for (int d = 0; d < batch.dim; ++d) {
          auto& k = batch.new_keys.at(t, h, d);
          // Subnormal as half.
          k = Value(static_cast<float>(k) * (d % 3 == 0 ? 0x1p-16f : 1.0f));
        }
      }
    }
    for (std::size_t t = 0; t < batch.queries.extents[0]; ++t) {
      for (int h = 0; h < batch.heads; ++h) {
        const float factor = h % 3 == 0 ? 1.0f : h % 3 == 1 ? 0x1p-40f : 0.0f;
        for (int d = 0; d < batch.dim; ++d) {
          batch.queries.at(t, h, d) *= factor * (d % 3 == 0 ? 0x1p17f : 1.0f);
        }
      }
    }
    this->check(batch);
  }
}

}  // namespace
