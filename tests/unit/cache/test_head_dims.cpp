// Layers with rings whose heads have other dimensions than those of pages, and layers without rows.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <kvzap/core/cache.hpp>
#include <vector>

namespace kvzap {
namespace {

// Pages; a ring with more heads, of fewer dimensions; a ring of more dimensions; no rows.
const CacheShape mixed_shape{
    {2, 4, 1, 2}, 16, 5, 4, {{}, {7, false, 6}, {3, false, 20}, {1, true, 6}}};
constexpr int empty_layer = 3;

float mixed_element(std::int64_t position, int layer, int head, int d) {
  return static_cast<float>(position * 64 + layer * 16 + head) + static_cast<float>(d) / 64;
}

class MixedDims : public ::testing::TestWithParam<bool> {
 protected:
  MixedDims() : cache(DType::f32, mixed_shape) {}

  /// Appends one token to each of the sequences, by append or append_deferred.
  void append(const std::vector<SequenceId>& ids, std::int64_t count = 1) {
    using Rows = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
    for (int layer = 0; layer < static_cast<int>(mixed_shape.heads.size()); ++layer) {
      if (layer == empty_layer) {
        for (const SequenceId id : ids) cache.count_tokens(id, layer, count);
        continue;
      }
      const int heads = mixed_shape.heads[layer], dim = mixed_shape.dim(layer);
      const auto all = static_cast<std::int64_t>(ids.size()) * count;
      const Rows keys("keys", all, heads, dim), values("values", all, heads, dim);
      const auto host = Kokkos::create_mirror_view(keys);
      std::vector<AppendSpan> spans;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::int64_t first = static_cast<std::int64_t>(i) * count;
        spans.push_back({ids[i], first, count, {}, false});
        for (std::int64_t t = 0; t < count; ++t) {
          for (int h = 0; h < heads; ++h) {
            for (int d = 0; d < dim; ++d) {
              host(first + t, h, d) = mixed_element(cache.tokens(ids[i], layer) + t, layer, h, d) +
                                      float(ids[i]) * 4096;
            }
          }
        }
      }
      Kokkos::deep_copy(keys, host);
      Kokkos::deep_copy(values, host);
      if (GetParam() && count == 1) {
        cache.append_deferred(ExecutionSpace(), spans, layer, keys, values, {});
      } else {
        cache.append(ExecutionSpace(), spans, layer, keys, values, {});
      }
    }
  }

  /// Checks every row of a sequence whose rows `of` has appended.
  void expect_rows(SequenceId id, SequenceId of, std::int64_t tokens) {
    for (int layer = 0; layer < static_cast<int>(mixed_shape.heads.size()); ++layer) {
      ASSERT_EQ(cache.tokens(id, layer), tokens);
      const int dim = mixed_shape.dim(layer);
      for (int h = 0; h < mixed_shape.heads[layer]; ++h) {
        const auto rows = cache.host_rows(id, layer, h);
        const std::int64_t ring = mixed_shape.own_rings[layer].rows;
        const std::int64_t expected = layer == empty_layer ? 0
                                      : ring > 0           ? std::min(ring, tokens)
                                                           : tokens;
        ASSERT_EQ(static_cast<std::int64_t>(rows.positions.size()), expected);
        for (std::size_t r = 0; r < rows.positions.size(); ++r) {
          for (int d = 0; d < dim; ++d) {
            ASSERT_EQ(rows.keys[r * dim + d],
                      mixed_element(rows.positions[r], layer, h, d) + float(of) * 4096)
                << "layer " << layer << " head " << h << " row " << r;
          }
        }
        ASSERT_EQ(rows.keys, rows.values);
      }
    }
  }

  KVCache cache;
};

TEST_P(MixedDims, KeepEveryRow) {
  const std::vector<SequenceId> ids = {cache.add_sequence(), cache.add_sequence()};
  for (int t = 0; t < 30; ++t) append(ids);
  for (const SequenceId id : ids) expect_rows(id, id, 30);
  append({ids[0]}, 9);
  expect_rows(ids[0], ids[0], 39);
  const SequenceId copy = cache.fork(ids[1]);
  append({ids[1]}, 3);
  expect_rows(copy, ids[1], 30);
}

TEST_P(MixedDims, ReturnFromSteps) {
  const std::vector<SequenceId> ids = {cache.add_sequence(), cache.add_sequence()};
  append(ids, 20);
  const auto checkpoint = cache.checkpoint(ids[0]);
  for (const std::int64_t count : {1, 4, 11}) {
    cache.begin_step(ExecutionSpace(), {{ids[0], count}, {ids[1], count}});
    append(ids, count);
    cache.cancel_step();
    for (const SequenceId id : ids) expect_rows(id, id, 20);
  }
  // In parts, which save the rings' rows one after the other.
  cache.begin_step(ExecutionSpace(), {{ids[0], 3}});
  for (int t = 0; t < 3; ++t) append({ids[0]});
  cache.cancel_step();
  expect_rows(ids[0], ids[0], 20);
  append(ids, 13);
  cache.restore(ids[0], checkpoint);
  expect_rows(ids[0], ids[0], 20);
}

INSTANTIATE_TEST_SUITE_P(Appends, MixedDims, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "deferred" : "judged"; });

TEST(HeadDims, BytesAndErrors) {
  KVCache cache(DType::f32, mixed_shape);
  const std::size_t scores = 2 * 5 + 4 * 7 + 1 * 3 + 2 * 1;
  const std::size_t values = 2 * (2 * 5 * 16 + 4 * 7 * 6 + 1 * 3 * 20 + 2 * 1 * 6);
  EXPECT_EQ(cache.bytes_per_sequence(), (scores + values) * sizeof(float));
  const SequenceId id = cache.add_sequence();
  EXPECT_THROW(cache.count_tokens(id, 0, 1), Error);
  EXPECT_THROW(KVCache(DType::f32, CacheShape{{1}, 8, 4, 4, {{0, false, 6}}}), Error);
}

}  // namespace
}  // namespace kvzap
