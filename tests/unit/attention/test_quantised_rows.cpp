// Attention and its mass over pages with rows of 8 to 2 bits.
#include <gtest/gtest.h>

#include <kvzap/core/attention_mass.hpp>
#include <string>

#include "unit/attention/cases.hpp"

namespace {

using kvzap::Attention;
using kvzap::AttentionMass;
using kvzap::AttentionPath;
using kvzap::DTypeOf;
using kvzap::half;
using kvzap::MemorySpace;
using kvzap::PageFormat;
using kvzap::RowType;
using namespace kvzap::test::attention;

constexpr PageFormat formats[] = {{RowType::q8, RowType::q8}, {RowType::q4, RowType::q4},
                                  {RowType::q8, RowType::q4}, {RowType::q4, RowType::q8},
                                  {RowType::q3, RowType::q3}, {RowType::q2, RowType::q2},
                                  {RowType::q4, RowType::q3}, {RowType::q2, RowType::q8}};

constexpr AttentionPath paths[] = {AttentionPath::automatic, AttentionPath::flash_prefill,
                                   AttentionPath::panels, AttentionPath::portable};

// Plain loops unpack a whole row for each of its dimensions, for each query.
bool takes_long(AttentionPath path, int dim, std::size_t spans) {
  return path == AttentionPath::portable && (dim > 40 || spans > 3);
}

template <class Parameter>
class QuantisedAttention : public ::testing::Test {
 protected:
  using Value = Parameter;

  // Beside what the path may differ by: kernels round queries to 16 bits, and the reference's rows
  // are rounded to Value.
  static double tolerance_of_quantised(AttentionPath path) {
    const double of_rows = std::is_same_v<Value, float>  ? 2e-4
                           : std::is_same_v<Value, half> ? 2e-3
                                                         : 1.5e-2;
    return of_rows + tolerance_of<Value>(path);
  }

  void check(int dim, int group, int page_rows, const std::vector<SpanCase>& cases,
             const PageFormat& format, unsigned seed, float soft_cap = 0) {
    SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group) + " pages of " +
                 std::to_string(page_rows) + " " +
                 kvzap::name_of(format, kvzap::DTypeOf<Value>::value));
    Batch<Value> batch(dim, group, 8, page_rows, cases, seed, Arrangement::right, format);
    batch.soft_cap = soft_cap;
    batch.solve();
    for (const SimdLevel level : simd_levels<Value>()) {
      const LevelInUse in_use(level);
      for (const AttentionPath path : paths) {
        if (!has_levels(path) && level != simd_levels<Value>().front()) continue;
        if (takes_long(path, dim, cases.size())) continue;
        SCOPED_TRACE(kvzap::base::name_of(level));
        SCOPED_TRACE(name_of(path));
        compare(batch, batch.attend(m_attention, batch.spans, path), tolerance_of_quantised(path));
      }
    }
  }

  void compare(const Batch<Value>& batch, const typename Batch<Value>::Result& found,
               double within) {
    double output = 0, lse = 0;
    for (const auto& span : batch.spans) {
      for (std::int64_t t = span.first_query; t < span.first_query + span.queries; ++t) {
        for (int h = 0; h < batch.heads; ++h) {
          const std::size_t i = t * batch.heads + h;
          lse = std::max(
              lse, std::fabs(found.lse.at(t, h, 0) - batch.lse[i]) / (1 + std::fabs(batch.lse[i])));
          for (int d = 0; d < batch.dim; ++d) {
            ASSERT_TRUE(std::isfinite(found.output.at(t, h, d)));
            output = std::max(
                output, std::fabs(found.output.at(t, h, d) - batch.output[i * batch.dim + d]));
          }
        }
      }
    }
    EXPECT_LT(output, within);
    EXPECT_LT(lse, within);
  }

  Attention m_attention{DTypeOf<Value>::value};
};
TYPED_TEST_SUITE(QuantisedAttention, Values);

// Lengths around pages, blocks of rows and items; heads without a quantised row; decode beside
// chunks.
std::vector<SpanCase> mixed() {
  return {{{1, 63}, 8, 1, 1},  {{64, 65}, 8, 1, 1},   {{0, 0}, 5, 1, 1},   {{1100, 0}, 8, 1, 1},
          {{37, 90}, 8, 5, 9}, {{0, 130}, 8, 40, 40}, {{0, 0}, 0, 17, 17}, {{2, 7}, 8, 0, 2}};
}

TYPED_TEST(QuantisedAttention, AgreesWithDoublePrecision) {
  const int pages[] = {1, 7, 64};
  const int dims[] = {64, 80, 33, 128, 96, 256};
  int i = 0;
  for (const int group : {1, 2, 3, 5, 8, 16}) {
    this->check(dims[i], group, pages[i % 3], mixed(), formats[i % 4], 300 + i);
    this->check(dims[i], group, pages[i % 3], mixed(), formats[i % 4 + 4], 400 + i);
    if (i < 3) this->check(dims[i], group, pages[i], mixed(), formats[i + 1], 500 + i);
    ++i;
  }
}

// Kernels for tensor cores split the rows of such spans into parts, of both kinds of rows.
TYPED_TEST(QuantisedAttention, FewQueriesOverManyRows) {
  const std::vector<SpanCase> cases = {
      {{1100, 300}, 8, 5, 9}, {{0, 600}, 8, 2, 2}, {{512, 65}, 8, 33, 700}};
  this->check(128, 4, 64, cases, formats[0], 601);
  this->check(64, 2, 7, cases, formats[1], 602);
  this->check(96, 1, 64, cases, formats[2], 603);
  this->check(256, 2, 64, cases, formats[3], 604);
  this->check(128, 2, 64, cases, formats[1], 605, 0.2f);
}

// Rows whose values are 0 or tiny, beside others: their weights count, and no weight is lost.
TYPED_TEST(QuantisedAttention, RowsOfTinyValues) {
  using Value = typename TestFixture::Value;
  for (const PageFormat& format : {formats[0], formats[1]}) {
    Batch<Value> batch(64, 2, 4, 16, {{{0, 0}, 0, 9, 9}}, 9, Arrangement::right, format);
    Array<Value> keys(80, 2, 64, Arrangement::right), values(80, 2, 64, Arrangement::right);
    std::mt19937 random(10);
    fill_random(keys, 0, random);
    fill_random(values, 0, random);
    for (int t = 0; t < 80; t += 3) {
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 64; ++d) {
          values.at(t, h, d) = Value(t % 2 == 0 ? 0.0f : 1e-6f * uniform(random));
          // These rows have the largest scores.
          keys.at(t, h, d) = Value(2 * batch.queries.at(3, 2 * h, d));
        }
      }
    }
    keys.upload();
    values.upload();
    const kvzap::ExecutionSpace exec;
    batch.cache.append(exec, batch.sequences[0], 0, keys.template view<const Value>(),
                       values.template view<const Value>(), {}, {});
    batch.spans[0].cached = batch.cache.layer(batch.sequences[0], 0);
    batch.solve();
    for (const AttentionPath path : paths) {
      SCOPED_TRACE(name_of(path));
      this->compare(batch, batch.attend(this->m_attention, batch.spans, path),
                    this->tolerance_of_quantised(path));
    }
  }
}

// More spans than the arguments of a kernel describe.
TYPED_TEST(QuantisedAttention, DecodeOfDevicesAgreesWithDoublePrecision) {
  const std::vector<SpanCase> singles = {{{1, 63}, 8, 1, 1}, {{64, 65}, 8, 1, 1},
                                         {{0, 0}, 5, 1, 1},  {{1100, 0}, 8, 1, 1},
                                         {{2, 7}, 8, 1, 3},  {{128, 129}, 0, 1, 1}};
  const int dims[] = {128, 33, 80, 64, 96, 256};
  int i = 0;
  for (const int group : {1, 2, 3, 5, 8, 16}) {
    for (const int f : {i % 4, (i + 1) % 4, i % 4 + 4}) {
      Batch<TypeParam> batch(dims[i], group, 8, i % 2 == 0 ? 7 : 64, singles, 700 + i,
                             Arrangement::right, formats[f]);
      batch.solve();
      this->compare(batch, batch.attend(this->m_attention, batch.spans, AttentionPath::split_kv),
                    this->tolerance_of_quantised(AttentionPath::split_kv));
    }
    ++i;
  }
}

TYPED_TEST(QuantisedAttention, PlainLoopsAgreeWithDoublePrecision) {
  int i = 0;
  for (const PageFormat& format : formats) {
    this->check(i % 2 == 0 ? 33 : 16, 1 + i, 7, {{{1, 63}, 8, 1, 1}, {{9, 0}, 8, 5, 9}}, format,
                500 + i);
    ++i;
  }
}

TYPED_TEST(QuantisedAttention, OtherSpansChangeNoBit) {
  using Value = TypeParam;
  Batch<Value> batch(80, 3, 8, 16, mixed(), 5, Arrangement::right, formats[2]);
  Attention attention{DTypeOf<Value>::value};
  const auto all = batch.attend(attention, batch.spans, AttentionPath::automatic);
  for (const auto& span : batch.spans) {
    const auto alone = batch.attend(attention, {span}, AttentionPath::automatic);
    for (std::int64_t t = span.first_query; t < span.first_query + span.queries; ++t) {
      for (int h = 0; h < batch.heads; ++h) {
        for (int d = 0; d < batch.dim; ++d) {
          ASSERT_EQ(alone.output.at(t, h, d), all.output.at(t, h, d));
        }
      }
    }
  }
}

TYPED_TEST(QuantisedAttention, MassAgreesWithDoublePrecision) {
  using Value = typename TestFixture::Value;
  AttentionMass attention_mass{DTypeOf<Value>::value};
  for (const PageFormat& format : formats) {
    Batch<Value> batch(80, 2, 8, 7, {{{70, 200}, 8, 33, 40}}, 6, Arrangement::right, format);
    batch.solve();
    for (const SimdLevel level : simd_levels<Value>()) {
      const LevelInUse in_use(level);
      const auto found = batch.attend(this->m_attention, batch.spans, AttentionPath::automatic);
      const Kokkos::View<float**, MemorySpace> mass("mass", 2, 250);
      const kvzap::ExecutionSpace exec;
      attention_mass(exec, batch.spans[0], batch.queries.template view<const float>(),
                     batch.new_keys.template view<const Value>(), batch.lse_view(found.lse), mass);
      exec.fence();
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, mass);
      for (int h = 0; h < 2; ++h) {
        const auto& expected = batch.mass_sum[0][h];
        for (std::size_t r = 0; r < expected.size(); ++r) {
          ASSERT_NEAR(host(h, r), expected[r], 2e-2 * (1 + expected[r])) << "row " << r;
        }
      }
    }
  }
}

// A row with a NaN or an infinity is NaN as a whole: it reaches the queries that see it, in all
// dimensions, and no others.
TYPED_TEST(QuantisedAttention, NonFiniteRowsReachTheQueriesThatSeeThem) {
  using Value = typename TestFixture::Value;
  for (const bool in_value : {false, true}) {
    for (const PageFormat& format : {formats[0], formats[1], formats[4], formats[5]}) {
      Batch<Value> batch(16, 2, 4, 4, {{{0, 0}, 0, 1, 1}, {{0, 0}, 0, 9, 9}}, 7, Arrangement::right,
                         format);
      Array<Value> keys(12, 2, 16, Arrangement::right), values(12, 2, 16, Arrangement::right);
      std::mt19937 random(8);
      fill_random(keys, 0, random);
      fill_random(values, 0, random);
      (in_value ? values : keys).at(3, 1, 5) = Value(-INFINITY);
      keys.upload();
      values.upload();
      const kvzap::ExecutionSpace exec;
      for (const int sequence : batch.sequences) {
        batch.cache.append(exec, sequence, 0, keys.template view<const Value>(),
                           values.template view<const Value>(), {}, {});
      }
      for (std::size_t s = 0; s < batch.spans.size(); ++s) {
        batch.spans[s].cached = batch.cache.layer(batch.sequences[s], 0);
      }
      for (const AttentionPath path : paths) {
        SCOPED_TRACE(name_of(path));
        const auto found = batch.attend(this->m_attention, batch.spans, path);
        for (const auto& span : batch.spans) {
          for (std::int64_t t = span.first_query; t < span.first_query + span.queries; ++t) {
            for (int h = 0; h < batch.heads; ++h) {
              for (int d = 0; d < batch.dim; ++d) {
                ASSERT_EQ(std::isnan(found.output.at(t, h, d)), h >= 2) << "head " << h;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
