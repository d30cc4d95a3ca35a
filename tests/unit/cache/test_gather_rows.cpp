// Rows one after the other as floats, as policies get them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <kvzap/core/cache.hpp>
#include <random>
#include <vector>

#include "base/machine.hpp"
#include "cache/gather_rows.hpp"
#include "cache/row_copy.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::CacheShape;
using kvzap::DTypeOf;
using kvzap::EvictionRule;
using kvzap::ExecutionSpace;
using kvzap::half;
using kvzap::KVCache;
using kvzap::MemorySpace;
using kvzap::SequenceId;
using kvzap::cache::gather_positions;
using kvzap::cache::gather_rows;
using kvzap::cache::RowPath;
using kvzap::test::expect_error;

template <class Parameter>
class CacheGather : public ::testing::Test {};
using Values = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(CacheGather, Values);

/// Values in (token, head, dim) order, as a view with other strides on the backend.
template <class Value>
Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace> view_of(
    const std::vector<Value>& rows, std::int64_t tokens, int heads, int dim, int arrangement) {
  std::vector<std::size_t> strides = {std::size_t(heads) * dim, std::size_t(dim), 1};
  if (arrangement == 1) strides = {1, std::size_t(tokens), std::size_t(tokens) * heads};
  if (arrangement == 2) {
    strides = {std::size_t(heads) * (2 * dim + 3), std::size_t(2) * dim + 3, 2};
  }
  std::size_t size = 1;
  const std::size_t extents[3] = {std::size_t(tokens), std::size_t(heads), std::size_t(dim)};
  for (int i = 0; i < 3; ++i) size += extents[i] * strides[i];
  const Kokkos::View<Value*, MemorySpace> storage("rows", size);
  const auto host = Kokkos::create_mirror_view(storage);
  std::size_t i = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < dim; ++d) {
        host(t * strides[0] + h * strides[1] + d * strides[2]) = rows[i++];
      }
    }
  }
  Kokkos::deep_copy(storage, host);
  const Kokkos::LayoutStride layout(tokens, strides[0], heads, strides[1], dim, strides[2]);
  // With memory of its own.
  const Kokkos::View<Value***, Kokkos::LayoutStride, MemorySpace> view("strided", layout);
  Kokkos::deep_copy(view, Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace>(
                              storage.data(), layout));
  return view;
}

template <class Value>
std::vector<Value> random_rows(std::mt19937& random, std::int64_t count) {
  std::vector<Value> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    rows.push_back(Value(static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f));
  }
  return rows;
}

TYPED_TEST(CacheGather, GivesTheRowsOfPagesRingAndNewTokens) {
  using Value = TypeParam;
  constexpr int heads = 2;
  std::mt19937 random(9);
  const ExecutionSpace exec;
  struct Case {
    int dim, window, page_rows;
    std::int64_t tokens;
  };
  // Rings that are empty, partly filled, just full, and wrapped.
  const Case cases[] = {{5, 3, 2, 0},      {4, 7, 4, 5},      {16, 7, 16, 7},   {7, 6, 4, 23},
                        {64, 33, 16, 701}, {80, 20, 64, 150}, {128, 1, 64, 400}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.tokens);
    KVCache cache(DTypeOf<Value>::value, CacheShape{{heads}, c.dim, c.window, c.page_rows});
    const SequenceId id = cache.add_sequence();
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", heads, c.tokens);
    const auto host_scores = Kokkos::create_mirror_view(scores);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (int h = 0; h < heads; ++h) host_scores(h, t) = random() % 2 ? 1.0f : -1.0f;
    }
    Kokkos::deep_copy(scores, host_scores);
    const auto rows = [&](std::int64_t n) {
      return view_of(random_rows<Value>(random, n * heads * c.dim), n, heads, c.dim, 0);
    };
    cache.append(exec, id, 0, rows(c.tokens), rows(c.tokens), scores, EvictionRule{0, 1, true});
    const auto layer = cache.layer(id, 0);
    for (int arrangement = 0; arrangement < 4; ++arrangement) {
      const std::int64_t n_new = arrangement == 3 ? 0 : 11;
      const auto fresh = random_rows<Value>(random, n_new * heads * c.dim);
      Kokkos::View<const Value***, Kokkos::LayoutStride, MemorySpace> new_rows;
      if (n_new > 0) new_rows = view_of(fresh, n_new, heads, c.dim, arrangement);
      for (int h = 0; h < heads; ++h) {
        const auto held = cache.host_rows(id, 0, h);
        const auto cached = static_cast<std::int64_t>(held.positions.size());
        const std::int64_t all = cached + n_new;
        for (int i = 0; i < 8; ++i) {
          const std::int64_t begin = i == 0 ? 0 : random() % (all + 1);
          const std::int64_t count = i == 0 ? all : random() % (all - begin + 1);
          const bool values = i % 2 == 1;
          Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> out("out", count + 1, c.dim);
          Kokkos::View<std::int64_t*, MemorySpace> positions("positions", count + 1);
          kvzap::cache::set_row_path(i % 4 < 2 ? RowPath::automatic : RowPath::portable);
          gather_rows(exec, layer, {h, begin, count}, new_rows, values, out);
          gather_positions(exec, layer, {h, begin, count}, 1000, positions);
          kvzap::cache::set_row_path(RowPath::automatic);
          exec.fence();
          const auto found = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, out);
          const auto at = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, positions);
          for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t row = begin + r;
            ASSERT_EQ(at(r), row < cached ? held.positions[row] : 1000 + row - cached);
            for (int d = 0; d < c.dim; ++d) {
              const float expected =
                  row < cached
                      ? (values ? held.values : held.keys)[row * c.dim + d]
                      : static_cast<float>(fresh[((row - cached) * heads + h) * c.dim + d]);
              ASSERT_EQ(found(r, d), expected) << row << " " << d;
            }
          }
          // Nothing after them.
          for (int d = 0; d < c.dim; ++d) ASSERT_EQ(found(count, d), 0.0f);
          ASSERT_EQ(at(count), 0);
        }
      }
    }
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> small("out", 1, c.dim);
    const Kokkos::View<std::int64_t*, MemorySpace> one("positions", 1);
    expect_error(
        [&] {
          gather_rows(exec, layer, {0, 0, 2}, {}, false, small);
        },
        {"(1, ", "(at least 2, "});
    expect_error([&] { gather_positions(exec, layer, {0, 0, 2}, 0, one); }, {"1 elements", "2"});
  }
}

}  // namespace
