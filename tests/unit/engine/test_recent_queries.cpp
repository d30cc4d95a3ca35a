// Newest queries on their way to the host and back: what a sequence knows of its last tokens is
// what another one, of the same or of fewer tokens, is given.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/policy_step.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

constexpr int head_dim = 3;
const std::vector<int> query_heads = {4, 2, 0};

float query(int layer, std::int64_t position, int head, int d) {
  return static_cast<float>(((layer * 1000 + position) * 10 + head) * 10 + d);
}

void take(engine::RecentQueries& recent, int layer, std::int64_t first, std::int64_t count) {
  const int heads = query_heads[layer];
  const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> queries("queries", count, heads,
                                                                         head_dim);
  const auto host = Kokkos::create_mirror_view(queries);
  for (std::int64_t i = 0; i < count; ++i) {
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < head_dim; ++d) host(i, h, d) = query(layer, first + i, h, d);
    }
  }
  Kokkos::deep_copy(queries, host);
  TokenBlock block;
  block.first = first;
  block.count = count;
  block.queries = queries;
  recent.take(ExecutionSpace(), layer, block);
  ExecutionSpace().fence();  // the block goes
}

void take_all(engine::RecentQueries& recent, std::int64_t first, std::int64_t count) {
  for (int l = 0; l < 3; ++l) take(recent, l, first, count);
}

void expect_newest(engine::RecentQueries& recent, std::int64_t tokens, std::int64_t first) {
  for (int l = 0; l < 3; ++l) {
    const TokenBlock block = recent.newest(ExecutionSpace(), l, tokens);
    EXPECT_EQ(block.first, first);
    EXPECT_EQ(block.count, tokens - first);
    const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> packed("packed", block.count,
                                                                          query_heads[l], head_dim);
    Kokkos::deep_copy(packed, block.queries);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), packed);
    for (std::int64_t i = 0; i < block.count; ++i) {
      for (int h = 0; h < query_heads[l]; ++h) {
        for (int d = 0; d < head_dim; ++d) {
          EXPECT_EQ(host(i, h, d), query(l, first + i, h, d)) << l << " " << i;
        }
      }
    }
  }
}

TEST(RecentQueries, GoToTheHostAndBack) {
  engine::RecentQueries recent(5, query_heads, head_dim, true);
  ASSERT_TRUE(recent.lasts());
  const auto none = recent.to_host();
  ASSERT_EQ(none.size(), 3u);
  EXPECT_EQ(none[0].tokens, 0);
  take_all(recent, 0, 3);
  EXPECT_EQ(recent.to_host()[1].tokens, 3);
  take_all(recent, 3, 4);
  const auto layers = recent.to_host();
  ASSERT_EQ(layers.size(), 3u);
  for (int l = 0; l < 3; ++l) {
    EXPECT_EQ(layers[l].first, 2);
    EXPECT_EQ(layers[l].tokens, 5);
    ASSERT_EQ(static_cast<int>(layers[l].values.size()), query_heads[l] * 5 * head_dim);
  }
  EXPECT_EQ(layers[0].values[(2 * 5 + 1) * head_dim + 1], query(0, 3, 2, 1));

  engine::RecentQueries again(5, query_heads, head_dim, true),
      fewer(3, query_heads, head_dim, true), more(9, query_heads, head_dim, true);
  take_all(again, 0, 4);  // which is forgotten
  again.from_host(layers);
  fewer.from_host(layers);
  more.from_host(layers);
  expect_newest(again, 7, 2);
  expect_newest(fewer, 7, 4);
  expect_newest(more, 7, 2);
  for (engine::RecentQueries* const one : {&recent, &again}) {
    take_all(*one, 7, 2);
    expect_newest(*one, 9, 4);
  }
  // Positions that were closed up.
  recent.restart(4);
  again.from_host(recent.to_host());
  take_all(again, 4, 2);
  expect_newest(again, 6, 4);
}

TEST(RecentQueries, RefuseWhatDoesNotFit) {
  engine::RecentQueries recent(5, query_heads, head_dim, true),
      passing(5, query_heads, head_dim, false);
  take_all(recent, 0, 6);
  const auto layers = recent.to_host();
  EXPECT_FALSE(passing.lasts());
  EXPECT_TRUE(passing.to_host().empty());
  test::expect_error([&] { passing.from_host(layers); }, {"3 layers", "expected 0"});
  auto other = layers;
  other.pop_back();
  test::expect_error([&] { recent.from_host(other); }, {"2 layers", "expected 3"});
  other = layers;
  other[1].values.pop_back();
  test::expect_error([&] { recent.from_host(other); }, {"layer 1", "29 numbers"});
  other[1].tokens = -1;
  test::expect_error([&] { recent.from_host(other); }, {"layer 1"});
  expect_newest(recent, 6, 1);
}

}  // namespace
}  // namespace kvzap
