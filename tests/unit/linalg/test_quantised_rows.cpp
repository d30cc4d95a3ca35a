// Rows of 8 to 2 bits: rotation, packing, and products, against plain loops and double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <vector>

#include "base/simd.hpp"
#include "linalg/host/quantised_row_products.hpp"
#include "linalg/host/rotated_rows.hpp"
#include "linalg/pack_row.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::QuantisedPage;
using kvzap::QuantisedRows;
using kvzap::RowType;
using kvzap::base::SimdLevel;
namespace linalg = kvzap::linalg;

constexpr int all_dims[] = {1, 2, 3, 16, 31, 33, 64, 80, 96, 100, 112, 128, 192, 256, 520, 2048};

std::vector<float> random_row(int dim, std::mt19937& random, float outlier = 0) {
  std::normal_distribution<float> normal;
  std::vector<float> row(dim);
  for (float& x : row) x = normal(random);
  if (outlier != 0) row[random() % dim] = outlier;
  return row;
}

double norm(const std::vector<float>& row) {
  double sum = 0;
  for (const float x : row) sum += double{x} * x;
  return std::sqrt(sum);
}

/// A page of random rows.
struct Page {
  QuantisedPage page;
  std::vector<std::vector<float>> rows;
  std::vector<std::uint8_t> bytes;
  QuantisedRows quantised;

  Page(RowType type, int count, int dim, unsigned seed) : page{{type, type}, count, dim} {
    std::mt19937 random(seed);
    bytes.resize(page.bytes() + 64);
    quantised = page.at(address(), false);
    for (int r = 0; r < count; ++r) {
      rows.push_back(random_row(dim, random, r % 3 == 0 ? 50.0f : 0.0f));
      std::vector<float> copy = rows.back();
      linalg::pack_row(type, copy.data(), dim, codes(r), scale(r));
    }
  }
  std::uintptr_t address() {
    return (reinterpret_cast<std::uintptr_t>(bytes.data()) + 63) / 64 * 64;
  }
  std::uint8_t* codes(int row) const {
    return const_cast<std::uint8_t*>(quantised.codes) +
           row * QuantisedRows::code_bytes(quantised.type, quantised.dim);
  }
  bfloat16* scale(int row) const { return const_cast<bfloat16*>(quantised.scales) + row; }
};

template <class Work>
void at_each_level(const Work& work) {
  const SimdLevel before = kvzap::base::machine().simd();
  for (const SimdLevel level : {SimdLevel::baseline, SimdLevel::avx2, SimdLevel::avx512}) {
    if (!kvzap::base::processor_has(level)) continue;
    SCOPED_TRACE(kvzap::base::name_of(level));
    kvzap::base::machine().set_simd(level);
    work();
  }
  kvzap::base::machine().set_simd(before);
}

TEST(RowTurn, IsOrthogonalAndSpreadsOutliers) {
  at_each_level([] {
    for (const int dim : all_dims) {
      SCOPED_TRACE("dim " + std::to_string(dim));
      std::mt19937 random(dim);
      const std::vector<float> x = random_row(dim, random, 30), y = random_row(dim, random);
      std::vector<float> tx = x, ty = y;
      linalg::rotate_row(tx.data(), dim);
      linalg::rotate_row(ty.data(), dim);
      double before = 0, after = 0;
      for (int d = 0; d < dim; ++d) {
        before += double{x[d]} * y[d];
        after += double{tx[d]} * ty[d];
        ASSERT_NEAR(tx[d], linalg::turned_at([&](int i) { return x[i]; }, dim, d), 1e-5 * norm(x));
      }
      EXPECT_NEAR(before, after, 1e-5 * norm(x) * norm(y));
      if (dim >= 16 && dim % 16 == 0) {
        float largest = 0;
        for (const float t : tx) largest = std::max(largest, std::fabs(t));
        EXPECT_LT(largest, 0.75 * norm(x));
      }
      linalg::rotate_row_back(tx.data(), dim);
      for (int d = 0; d < dim; ++d) ASSERT_NEAR(tx[d], x[d], 1e-5 * norm(x));
    }
  });
}

// The largest share of the square of a normal row that packing may lose on average.
double error_share(RowType type) {
  return type == RowType::q8 ? 1e-4 : type == RowType::q4 ? 1e-2 : type == RowType::q3 ? 3e-2 : 0.1;
}

// 8 bits: half a scale for each dimension of the rotated row. Fewer: on average alone.
TEST(QuantisedRows, ErrorsStayWithinTheirBounds) {
  at_each_level([] {
    for (const int dim : all_dims) {
      SCOPED_TRACE("dim " + std::to_string(dim));
      for (const RowType type : kvzap::quantised_types) {
        const Page page(type, 40, dim, dim);
        double error = 0, all = 0;
        for (std::size_t r = 0; r < page.rows.size(); ++r) {
          std::vector<float> turned = page.rows[r], found(dim);
          linalg::rotate_row(turned.data(), dim);
          linalg::unpack_row(page.quantised, r, found.data(), true);
          const float scale = *page.scale(r);
          for (int d = 0; d < dim; ++d) {
            const double off = double{found[d]} - turned[d];
            if (type == RowType::q8) {
              ASSERT_LE(std::fabs(off), 0.5001 * scale);
              ASSERT_LE(scale, norm(turned) / 127 * (1 + 0x1p-7));
            }
            error += off * off;
            all += double{turned[d]} * turned[d];
          }
        }
        if (dim >= 64 && dim % 16 == 0) {
          EXPECT_LT(error, error_share(type) * all);
        }
      }
    }
  });
}

TEST(QuantisedRows, ReadersAndWritersAgreeElementByElement) {
  at_each_level([] {
    for (const int dim : {1, 33, 64, 80, 128}) {
      SCOPED_TRACE("dim " + std::to_string(dim));
      for (const RowType type : kvzap::quantised_types) {
        const Page page(type, 12, dim, dim + 1);
        int different = 0;
        for (std::size_t r = 0; r < page.rows.size(); ++r) {
          std::vector<float> found(dim);
          linalg::unpack_row(page.quantised, r, found.data());
          for (int d = 0; d < dim; ++d) {
            ASSERT_NEAR(found[d], page.quantised.at(r, d), 1e-5 * norm(page.rows[r]));
          }
          std::vector<std::uint8_t> codes(QuantisedRows::code_bytes(type, dim));
          bfloat16 scale;
          linalg::pack_row_plainly(
              type, [&](int d) { return page.rows[r][d]; }, dim, codes.data(), &scale);
          EXPECT_NEAR(scale, *page.scale(r), 0x1p-7 * scale);
          for (std::size_t j = 0; j < codes.size(); ++j) different += codes[j] != page.codes(r)[j];
        }
        // Sums in another order can round a value to the next level.
        EXPECT_LE(different, 12 * dim / 20);
      }
    }
  });
}

TEST(QuantisedRows, HoldExtremeRows) {
  at_each_level([] {
    for (const RowType type : kvzap::quantised_types) {
      const double most_off = type == RowType::q2 ? 1.5 : type == RowType::q3 ? 1.0 : 0.6;
      for (const float factor : {0.0f, 1e-40f, 1e-30f, 1e-6f, 1e6f, 1e30f}) {
        std::mt19937 random(4);
        std::vector<float> row = random_row(64, random);
        for (float& x : row) x *= factor;
        std::vector<std::uint8_t> bytes(256);
        const QuantisedPage page{{type, type}, 1, 64};
        const QuantisedRows quantised =
            page.at(reinterpret_cast<std::uintptr_t>(bytes.data()), false);
        std::vector<float> turned = row, found(64);
        linalg::pack_row(type, turned.data(), 64, const_cast<std::uint8_t*>(quantised.codes),
                         const_cast<bfloat16*>(quantised.scales));
        linalg::unpack_row(quantised, 0, found.data());
        for (int d = 0; d < 64; ++d) {
          ASSERT_NEAR(found[d], row[d], factor < 1e-35f ? 1e-35f : most_off * factor) << factor;
        }
      }
      for (const float odd : {INFINITY, -INFINITY, NAN}) {
        std::vector<float> row(64, 1.0f);
        row[7] = odd;
        std::uint8_t codes[64];
        bfloat16 scale;
        linalg::pack_row(type, row.data(), 64, codes, &scale);
        EXPECT_TRUE(std::isnan(float{scale}));
        row.assign(64, 1.0f);
        row[7] = odd;
        linalg::pack_row_plainly(
            type, [&](int d) { return row[d]; }, 64, codes, &scale);
        EXPECT_TRUE(std::isnan(float{scale}));
      }
    }
  });
}

// The same whole numbers at every level, and sums of values as in double precision.
TEST(PackedProducts, AgreeWithPlainLoops) {
  // Every remainder of the 8 and 16 rows that kernels take at once, with some dims and queries.
  const int all_rows[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64};
  int next = 0;
  for (const int dim : {1, 16, 33, 64, 80, 96, 128, 256, 2048}) {
    for (const RowType type : kvzap::quantised_types) {
      const int count = 67, first = 2;
      const Page page(type, count, dim, dim + 2);
      for (const int queries : {1, 2, 3, 4, 5, 6, 7}) {
        const int rows = all_rows[next++ % std::size(all_rows)];
        SCOPED_TRACE("dim " + std::to_string(dim) + ", rows " + std::to_string(rows));
        const int width = linalg::packed_width(type, dim);
        std::vector<std::int16_t> space(queries * width + 32);
        auto* const numbers = reinterpret_cast<std::int16_t*>(
            (reinterpret_cast<std::uintptr_t>(space.data()) + 63) / 64 * 64);
        std::vector<float> scales(queries);
        std::vector<std::int32_t> number_sums(queries);
        const linalg::QuantisedQueries quantised{numbers, number_sums.data(), scales.data(),
                                                 queries};
        std::mt19937 random(9);
        std::vector<std::vector<float>> all;
        for (int q = 0; q < queries; ++q) {
          all.push_back(random_row(dim, random, q == 1 ? 40.0f : 0.0f));
          linalg::pack_query(type, all.back().data(), dim, quantised, q);
        }
        std::vector<float> weights(queries * 64);
        for (float& w : weights) w = static_cast<float>(random() % 1000) / 1000;
        std::vector<float> scores_before;
        at_each_level([&] {
          std::vector<float> scores(queries * 64, NAN);
          linalg::score_quantised_rows(page.quantised, first, rows, quantised, scores.data(), 64);
          for (int q = 0; q < queries; ++q) {
            std::fill_n(scores.begin() + q * 64 + rows, 64 - rows, 0.0f);  // after the rows
          }
          if (scores_before.empty()) scores_before = scores;
          EXPECT_EQ(scores, scores_before);
          std::vector<float> sums(queries * width + 32);
          float* const own = reinterpret_cast<float*>(
              (reinterpret_cast<std::uintptr_t>(sums.data()) + 63) / 64 * 64);
          linalg::accumulate_quantised_rows(page.quantised, first, rows,
                                            {weights.data(), 64, queries}, own);
          for (int q = 0; q < queries; ++q) {
            for (int r = 0; r < rows; ++r) {
              double product = 0, size = 0;
              for (int d = 0; d < dim; ++d) {
                product += double{all[q][d]} * page.quantised.level_at(first + r, d);
                size += 127 * std::fabs(all[q][d]);
              }
              const double scale = *page.scale(first + r);
              ASSERT_NEAR(scores[q * 64 + r], scale * product,
                          scale * (1e-6 * size + scales[q] * 64 * dim));
            }
            for (int d = 0; d < dim; ++d) {
              double sum = 0;
              for (int r = 0; r < rows; ++r) {
                sum += double{weights[q * 64 + r]} * page.quantised.level_at(first + r, d);
              }
              // Half a unit of 15 bits of the largest weight, 1, for each row.
              ASSERT_NEAR(own[q * width + linalg::quantised_place(type, dim, d)], sum,
                          rows * 127 * 0.5 / 32767);
            }
          }
        });
      }
    }
  }
}

}  // namespace
