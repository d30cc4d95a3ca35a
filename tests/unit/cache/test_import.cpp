// What a cache refuses to take from the host, and that it is as before then. (What it takes is
// compared with caches that were kept in tests/mpi/io/test_snapshot_reading.cpp.)
#include <gtest/gtest.h>

#include <cstdint>
#include <kvzap/core/cache.hpp>
#include <limits>
#include <vector>

#include "cache/row_access.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::expect_error;
using Cache = KVCache;

CacheShape two_layers() {
  CacheShape shape;
  shape.heads = {2, 0};
  shape.head_dim = 3;
  shape.window = 4;
  shape.page_rows = 2;
  return shape;
}

TEST(CacheImport, RefusesWhatNoCacheHas) {
  KVCache cache(DType::f32, two_layers());
  cache::RowAccess access(cache);
  const SequenceId id = cache.add_sequence();
  const ExecutionSpace exec;
  const auto refuse = [&](int layer, std::int64_t tokens, std::int64_t ring_first,
                          const std::vector<std::int64_t>& rows, std::string_view part) {
    expect_error([&] { access.import_layer(exec, id, layer, tokens, ring_first, rows); }, {part});
    EXPECT_EQ(cache.pool().pages_in_use(), 0U);
  };
  constexpr std::int64_t too_many = std::int64_t{1} << 31;
  refuse(2, 1, 0, {}, "no layer 2");
  refuse(0, -1, 0, {0, 0}, "-1 tokens");
  refuse(0, too_many, 0, {4, 4}, "2147483648 tokens");
  refuse(0, 9, 10, {4, 4}, "from position 10");
  refuse(0, 9, -1, {4, 4}, "from position -1");
  refuse(0, 9, 0, {4}, "rows of 1 heads");
  refuse(0, 9, 0, {4, 3}, "head 1 of layer 0 with 3 rows; expected 4");
  refuse(0, 9, 7, {1, 3}, "head 0 of layer 0 with 1 rows; expected 2");
  refuse(0, 9, 0, {10, 4}, "head 0 of layer 0 with 10 rows");
  refuse(1, 9, 0, {4}, "rows of 1 heads");

  access.import_layer(exec, id, 1, 9, 5, {});
  access.import_layer(exec, id, 0, 9, 5, {9, 4});
  EXPECT_EQ(cache.pool().pages_in_use(), 3U);
  EXPECT_EQ(cache.rows(id, 0, 0), 9);
  EXPECT_EQ(cache.rows(id, 0, 1), 4);
  EXPECT_EQ(cache.tokens(id, 1), 9);
  expect_error([&] { access.import_layer(exec, id, 0, 9, 5, {9, 4}); }, {"has had 9 tokens"});

  const std::vector<float> scores(10, 1.0f);
  cache::ImportedRows rows;
  rows.scores = scores.data();
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  expect_error([&] { access.import_rows(exec, id, 0, 0, 0, 10, rows); }, {"10 rows from row 0"});
  expect_error([&] { access.import_rows(exec, id, 0, 1, 4, 1, rows); }, {"the head has 4"});
  expect_error([&] { access.import_rows(exec, id, 0, 1, -1, 1, rows); }, {"from row -1"});
  expect_error([&] { access.import_rows(exec, id, 0, 1, 1, most, rows); }, {"from row 1"});
  expect_error([&] { access.import_rows(exec, id, 0, 2, 0, 1, rows); }, {"no head 2"});
  expect_error([&] { access.import_rows(exec, 7, 0, 0, 0, 1, rows); }, {"no sequence 7"});
  cache.begin_step(exec, {{id, 1}});
  expect_error([&] { access.import_rows(exec, id, 0, 0, 0, 1, rows); }, {"in a step"});
  cache.cancel_step();
  access.import_rows(exec, id, 0, 0, 0, 9, rows);
  EXPECT_EQ(cache.host_rows(id, 0, 0).scores, std::vector<float>(9, 1.0f));
}

TEST(CacheImport, RefusesCheckpointsThatTheSequenceCannotHaveHad) {
  KVCache cache(DType::f32, two_layers());
  cache::RowAccess access(cache);
  const SequenceId id = cache.add_sequence();
  const ExecutionSpace exec;
  access.import_layer(exec, id, 0, 9, 0, {9, 5});
  access.import_layer(exec, id, 1, 9, 0, {});
  const auto refuse = [&](const std::vector<std::int64_t>& tokens,
                          const std::vector<std::int64_t>& ring_first,
                          const std::vector<std::int64_t>& retained, std::string_view part) {
    expect_error([&] { access.import_checkpoint(exec, id, tokens, ring_first, retained, {}); },
                 {part});
  };
  refuse({6}, {0, 0}, {2, 0}, "tokens of 1 layers");
  refuse({6, 6}, {0, 0}, {2}, "retained rows of 1 heads");
  refuse({10, 6}, {0, 0}, {2, 0}, "10 tokens in layer 0");
  refuse({6, 6}, {0, 7}, {2, 0}, "from position 7");
  refuse({6, 6}, {0, 0}, {2, 2}, "2 retained rows in layer 0, head 1");
  refuse({6, 6}, {0, 0}, {-1, 0}, "-1 retained rows");
  const auto checkpoint = access.import_checkpoint(exec, id, {6, 6}, {0, 0}, {2, 0}, {4, 2, 1});
  cache::ImportedRows rows;
  const std::vector<float> scores{1, 2, 3, 4, 5};
  rows.scores = scores.data();
  expect_error([&] { access.import_rows(exec, checkpoint, 0, 0, 0, 5, rows); }, {"the head has 4"});
  expect_error([&] { access.import_rows(exec, checkpoint, 1, 0, 0, 1, rows); }, {"no head 0"});
  for (int head : {0, 1}) access.import_rows(exec, checkpoint, 0, head, 0, 4, rows);
  cache.restore(id, checkpoint);
  EXPECT_EQ(cache.host_rows(id, 0, 1).scores, (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(cache.host_rows(id, 0, 1).positions, (std::vector<std::int64_t>{2, 3, 4, 5}));
  EXPECT_EQ(cache.rows(id, 0, 0), 6);
  EXPECT_EQ(cache.counts(id).judged, 4);
  EXPECT_EQ(cache.counts(id).non_finite, 1);
}

TEST(CacheImport, WithoutRoomLeavesTheSequenceEmpty) {
  KVCache cache(DType::f32, two_layers());
  cache::RowAccess access(cache);
  const SequenceId id = cache.add_sequence();
  cache.set_limit(1);
  EXPECT_THROW(access.import_layer(ExecutionSpace(), id, 0, 900, 0, {900, 900}), OutOfMemory);
  EXPECT_EQ(cache.tokens(id, 0), 0);
  EXPECT_EQ(cache.rows(id, 0, 0), 0);
  cache.set_limit(0);
  access.import_layer(ExecutionSpace(), id, 0, 900, 0, {900, 900});
  EXPECT_EQ(cache.rows(id, 0, 0), 900);
}

}  // namespace
}  // namespace kvzap
