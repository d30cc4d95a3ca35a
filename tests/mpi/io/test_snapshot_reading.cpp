// Snapshots brought back: on any number of ranks, in any order of pages, in any type of values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "cache/raw_rows.hpp"
#include "cache/row_copy.hpp"
#include "engine/decoder.hpp"
#include "mpi/io/snapshot_stories.hpp"
#include "mpi/ranks.hpp"
#include "unit/temporary_folder.hpp"
#include "watched.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using test::content_of_file;
using test::expect_same_cache;
using test::FirstRanks;
using test::same_bits;
using test::SharedFolder;
using test::stories;
using test::Story;
using test::story_append;
using test::story_cache;
using test::story_info;
using test::story_partition;
using test::story_queries;
using test::tell;

template <class Value>
void write(const fs::path& file, const Story& story, const HeadPartition& partition,
           const Communicator& comm, const SnapshotOptions& options = {},
           const PageFormat& format = {}) {
  auto told = tell<Value>(story, partition, comm.rank(), format);
  SnapshotInfo info = story_info(story);
  info.recent_queries = story_queries(story, partition, comm.rank());
  const auto writing = begin_snapshot(file, *told.cache, told.sequence, partition, comm, info,
                                      options, told.context ? &*told.context : nullptr);
  writing->finish();
}

void expect_same_counts(const AppendCounts& a, const AppendCounts& b, const Communicator& comm) {
  EXPECT_EQ(comm.all_reduce_sum(a.judged), comm.all_reduce_sum(b.judged));
  EXPECT_EQ(comm.all_reduce_sum(a.evicted), comm.all_reduce_sum(b.evicted));
  EXPECT_EQ(comm.all_reduce_sum(a.non_finite), comm.all_reduce_sum(b.non_finite));
}

/// That the file comes back as the story, goes on as it, and is written again as it was.
template <class Value>
void expect_round_trip(const fs::path& file, const Story& story, const Communicator& comm,
                       int page_rows, const fs::path& again, const PageFormat& format = {}) {
  const HeadPartition partition = story_partition(comm.size());
  auto told = tell<Value>(story, partition, comm.rank(), format);
  const auto cache = story_cache<Value>(partition, comm.rank(), page_rows, format);
  cache->add_sequence();  // it need not be the first one
  const SnapshotReader reader(file);
  EXPECT_EQ(reader.header().format, format);
  EXPECT_EQ(reader.header().format_version, format.quantised() ? 3 : 2);
  auto loaded = load_snapshot(reader, *cache, partition, comm);
  expect_same_cache(*cache, loaded.sequence, *told.cache, told.sequence);
  expect_same_counts(cache->counts(loaded.sequence), told.cache->counts(told.sequence), comm);
  const auto queries = story_queries(story, partition, comm.rank());
  ASSERT_EQ(loaded.recent_queries.size(), queries.size());
  for (std::size_t l = 0; l < queries.size(); ++l) {
    EXPECT_EQ(loaded.recent_queries[l].first, queries[l].first);
    EXPECT_EQ(loaded.recent_queries[l].tokens, queries[l].tokens);
    EXPECT_TRUE(same_bits(loaded.recent_queries[l].values, queries[l].values));
  }
  ASSERT_EQ(loaded.context.has_value(), story.with_context);

  if (!again.empty()) {
    SnapshotInfo info = reader.header().info;
    info.recent_queries = loaded.recent_queries;
    begin_snapshot(again, *cache, loaded.sequence, partition, comm, info, {},
                   loaded.context ? &*loaded.context : nullptr)
        ->finish();
    EXPECT_EQ(content_of_file(again), content_of_file(file));
  }

  // Both go on, with evictions.
  const std::int64_t tokens = story.context + story.tokens;
  const auto go_on = [&](std::int64_t from, std::int64_t to) {
    story_append(*cache, loaded.sequence, partition, comm.rank(), from, to);
    story_append(*told.cache, told.sequence, partition, comm.rank(), from, to);
    expect_same_cache(*cache, loaded.sequence, *told.cache, told.sequence);
    expect_same_counts(cache->counts(loaded.sequence), told.cache->counts(told.sequence), comm);
  };
  go_on(tokens, tokens + 1);
  go_on(tokens + 1, tokens + 20);
  if (!story.with_context) return;
  for (int time = 0; time < 2; ++time) {
    cache->restore(loaded.sequence, *loaded.context);
    told.cache->restore(told.sequence, *told.context);
    expect_same_cache(*cache, loaded.sequence, *told.cache, told.sequence);
    expect_same_counts(cache->counts(loaded.sequence), told.cache->counts(told.sequence), comm);
    go_on(story.context, story.context + 13);
  }
}

template <class Value>
class SnapshotRoundTrip : public ::testing::Test {
 protected:
  void run(const PageFormat& format = {}) {
    const SharedFolder folder;
    const Communicator world = Communicator::world();
    for (int r = 1; r <= std::min(world.size(), 4); ++r) {
      const FirstRanks writers(r);
      for (std::size_t i = 0; i < stories().size(); ++i) {
        // Under the sanitizers one story that has everything.
        if (test::watched && i != 6) continue;
        const Story& story = stories()[i];
        SCOPED_TRACE(story.name);
        const fs::path file = folder / ("cache-" + std::to_string(r) + "-" + std::to_string(i));
        if (writers.has_this_rank()) {
          const Communicator comm = writers.communicator();
          write<Value>(file, story, story_partition(r), comm, {}, format);
        }
        world.barrier();
        for (int s = 1; s <= std::min(world.size(), 4); ++s) {
          SCOPED_TRACE("from " + std::to_string(r) + " ranks to " + std::to_string(s));
          const FirstRanks readers(s);
          if (!readers.has_this_rank()) continue;
          const Communicator comm = readers.communicator();
          // Every story from and to each number of ranks, and two of them between all.
          if (i != 3 && i != 6 && (r + s + static_cast<int>(i)) % 4 != 0) continue;
          const bool writes_again = s == 1 + r % std::min(world.size(), 4);
          if (writes_again || i == 6) {
            expect_round_trip<Value>(file, story, comm, 4,
                                     writes_again ? folder / "again" : fs::path(), format);
          }
          if (!writes_again) expect_round_trip<Value>(file, story, comm, 7, {}, format);
        }
        world.barrier();
      }
    }
  }
};

using Values = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(SnapshotRoundTrip, Values);

TYPED_TEST(SnapshotRoundTrip, AcrossRanksAndPages) { this->run(); }

// Quantised rows come back bit by bit.
TYPED_TEST(SnapshotRoundTrip, QuantisedRows) {
  this->run(test::q8_and_q4);
  if (!test::watched) this->run(test::only_q4);
  this->run(test::q3_and_q2);
}

// Rows that kernels read and write, as on devices.
TEST(SnapshotReading, ByKernels) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  struct Portable {
    Portable() { cache::set_row_path(cache::RowPath::portable); }
    ~Portable() { cache::set_row_path(cache::RowPath::automatic); }
  };
  const Story& story = stories()[6];
  const HeadPartition partition = story_partition(comm.size());
  for (const PageFormat& format : {PageFormat(), test::q8_and_q4}) {
    const auto told = tell<bfloat16>(story, partition, comm.rank(), format);
    const auto write_told = [&](const fs::path& file) {
      begin_snapshot(file, *told.cache, told.sequence, partition, comm, story_info(story), {},
                     &*told.context)
          ->finish();
    };
    const fs::path file = folder / "cache.h5", by_host = folder / "by-host.h5";
    write_told(by_host);
    const Portable portable;
    write_told(file);
    EXPECT_TRUE(content_of_file(file) == content_of_file(by_host));
    write<bfloat16>(file, story, partition, comm, {}, format);
    expect_round_trip<bfloat16>(file, story, comm, 3, {}, format);
  }
}

// A cache of another format unpacks quantised rows, and packs rows as it packs those of its ring.
TEST(SnapshotReading, OtherFormats) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = story_partition(comm.size());
  const Story& story = stories()[6];
  const PageFormat wide;
  for (const auto& [from, to] :
       {std::pair(test::q8_and_q4, wide), std::pair(wide, test::only_q4),
        std::pair(test::q8_and_q4, test::only_q4), std::pair(test::only_q4, test::q3_and_q2)}) {
    SCOPED_TRACE(name_of(from, DType::f32) + " to " + name_of(to, DType::f32));
    const auto told = tell<float>(story, partition, comm.rank(), from);
    // With a type for the file, rows are stored in that type.
    for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(DType::f32)}) {
      const fs::path file = folder / "cache.h5";
      SnapshotOptions options;
      options.dtype = dtype;
      options.compress = dtype ? 0 : 3;
      write<float>(file, story, partition, comm, options, from);
      const SnapshotReader reader(file);
      EXPECT_TRUE(reader.verify().empty());
      EXPECT_EQ(reader.header().format, dtype ? wide : from);
      const auto cache = story_cache<float>(partition, comm.rank(), 4, to);
      const auto loaded = load_snapshot(reader, *cache, partition, comm);
      const auto quantised = [&](std::vector<float> rows, RowType type) {
        const auto count =
            static_cast<std::int64_t>(rows.size()) / test::story_dim - 5;  // the ring
        if (type == RowType::wide) return rows;
        const auto bytes = count * QuantisedRows::code_bytes(type, test::story_dim);
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(bytes) + 64);
        std::vector<bfloat16> scales(static_cast<std::size_t>(count));
        cache::pack_rows(type, rows.data(), count, test::story_dim, codes.data(), scales.data());
        cache::unpack_rows({codes.data(), scales.data(), test::story_dim, type}, count,
                           rows.data());
        return rows;
      };
      for (int layer = 0; layer < test::story_layers; ++layer) {
        const auto& heads = partition.heads(layer, comm.rank());
        for (std::size_t h = 0; h < heads.size(); ++h) {
          const int head = static_cast<int>(h);
          const auto found = cache->host_rows(loaded.sequence, layer, head);
          const auto expected = told.cache->host_rows(told.sequence, layer, head);
          const SnapshotRows read = reader.rows(layer, heads[h], true);
          EXPECT_EQ(found.positions, expected.positions);
          EXPECT_TRUE(same_bits(found.scores, expected.scores));
          EXPECT_TRUE(same_bits(read.keys, expected.keys));
          EXPECT_TRUE(same_bits(read.values, expected.values));
          // Rows that have the right type already stay as they are.
          const auto arrived = [&](const std::vector<float>& rows, RowType before, RowType now) {
            return quantised(rows, !dtype && before == now ? RowType::wide : now);
          };
          EXPECT_TRUE(same_bits(found.keys, arrived(expected.keys, from.keys, to.keys)));
          EXPECT_TRUE(same_bits(found.values, arrived(expected.values, from.values, to.values)));
        }
      }
      comm.barrier();
    }
  }
}

template <class From, class To>
void expect_converted(const SnapshotOptions& options, DType in_file) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = story_partition(comm.size());
  const Story& story = stories()[6];
  const fs::path file = folder / "cache.h5";
  write<From>(file, story, partition, comm, options);
  const auto told = tell<From>(story, partition, comm.rank());
  const SnapshotReader reader(file);
  EXPECT_EQ(reader.header().dtype, in_file);
  EXPECT_EQ(reader.header().compress, options.compress);
  const auto cache = story_cache<To>(partition, comm.rank());
  const auto loaded = load_snapshot(reader, *cache, partition, comm);
  const auto converted = [&](const std::vector<float>& values) {
    std::vector<float> all;
    for (const float wide : values) {
      const float stored = in_file == DType::f32   ? wide
                           : in_file == DType::f16 ? static_cast<float>(half(wide))
                                                   : static_cast<float>(bfloat16(wide));
      all.push_back(static_cast<float>(To(stored)));
    }
    return all;
  };
  for (int layer = 0; layer < test::story_layers; ++layer) {
    for (int head = 0; head < cache->shape().heads[layer]; ++head) {
      const auto found = cache->host_rows(loaded.sequence, layer, head);
      const auto expected = told.cache->host_rows(told.sequence, layer, head);
      EXPECT_EQ(found.positions, expected.positions);
      EXPECT_TRUE(same_bits(found.scores, expected.scores));
      EXPECT_TRUE(same_bits(found.keys, converted(expected.keys)));
      EXPECT_TRUE(same_bits(found.values, converted(expected.values)));
    }
  }
}

// The file has one ring for all ranks. Other rows that lie in a rank's ring are quantised on the
// way.
TEST(SnapshotReading, QuantisedRowsOfRingsThatSomeRanksHaveEmptied) {
  const Communicator comm = Communicator::world();
  if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  const SharedFolder folder;
  const HeadPartition partition = story_partition(comm.size());
  const auto told = tell<float>(stories()[4], partition, comm.rank(), test::q8_and_q4);
  KVCache& cache = *told.cache;
  if (comm.is_root()) test::story_evict(cache, told.sequence, partition, comm.rank());
  const fs::path file = folder / "cache.h5";
  begin_snapshot(file, cache, told.sequence, partition, comm, test::story_info(stories()[4]))
      ->finish();
  const SnapshotReader reader(file);
  EXPECT_EQ(reader.header().ring_first, (std::vector<std::int64_t>{55, 55}));
  for (int layer = 0; layer < test::story_layers; ++layer) {
    const auto& heads = partition.heads(layer, comm.rank());
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const int head = static_cast<int>(h);
      auto expected = cache.host_rows(told.sequence, layer, head);
      const std::int64_t in_ring = comm.is_root() ? 0 : test::story_window;
      const auto pack = [&](RowType type, std::vector<float>& rows) {
        float* const newest = rows.data() + rows.size() - in_ring * test::story_dim;
        std::vector<std::uint8_t> codes(test::story_dim * 8 + 64);
        std::vector<bfloat16> scales(8);
        cache::pack_rows(type, newest, in_ring, test::story_dim, codes.data(), scales.data());
        cache::unpack_rows({codes.data(), scales.data(), test::story_dim, type}, in_ring, newest);
      };
      pack(RowType::q8, expected.keys);
      pack(RowType::q4, expected.values);
      const SnapshotRows rows = reader.rows(layer, heads[h], true);
      EXPECT_EQ(rows.positions, expected.positions);
      EXPECT_TRUE(same_bits(rows.keys, expected.keys));
      EXPECT_TRUE(same_bits(rows.values, expected.values));
    }
  }
}

TEST(SnapshotReading, OtherTypesOfValues) {
  expect_converted<float, bfloat16>({}, DType::f32);
  expect_converted<half, bfloat16>({}, DType::f16);
  expect_converted<bfloat16, float>({}, DType::bf16);
  SnapshotOptions options;
  options.compress = 5;
  options.dtype = DType::bf16;
  expect_converted<float, float>(options, DType::bf16);
}

TEST(SnapshotReading, Rows) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = story_partition(comm.size());
  const Story& story = stories()[6];
  auto told = tell<half>(story, partition, comm.rank());
  for (const int compress : {0, 6}) {
    for (const SnapshotContent content :
         {SnapshotContent::positions, SnapshotContent::scores, SnapshotContent::all}) {
      SCOPED_TRACE(std::string(name_of(content)) + " " + std::to_string(compress));
      SnapshotOptions options;
      options.content = content;
      options.compress = compress;
      const fs::path file = folder / "cache.h5";
      write<half>(file, story, partition, comm, options);
      SnapshotReader reader(file);
      reader = SnapshotReader(file);
      EXPECT_TRUE(reader.verify().empty());
      const SnapshotHeader& header = reader.header();
      const SnapshotInfo expected_info = story_info(story);
      EXPECT_EQ(header.format_version, 2);
      EXPECT_EQ(header.content, content);
      EXPECT_EQ(header.dtype, DType::f16);
      EXPECT_EQ(header.n_layers, test::story_layers);
      EXPECT_EQ(header.n_kv_heads, test::story_heads);
      EXPECT_EQ(header.head_dim, test::story_dim);
      EXPECT_EQ(header.window, test::story_window);
      EXPECT_EQ(header.page_rows, 4);
      EXPECT_EQ(header.tokens, 45);
      EXPECT_EQ(header.ring_first, (std::vector<std::int64_t>{40, 40}));
      EXPECT_TRUE(header.has_context);
      EXPECT_EQ(header.has_recent_queries, content == SnapshotContent::all);
      EXPECT_EQ(header.file_bytes, static_cast<std::int64_t>(fs::file_size(file)));
      EXPECT_EQ(header.counts.judged, comm.all_reduce_sum(told.cache->counts(0).judged));
      EXPECT_EQ(header.info.model, expected_info.model);
      EXPECT_EQ(header.info.model_hash, "abc");
      EXPECT_EQ(header.info.tokenizer_hash, "def");
      EXPECT_EQ(header.info.kvzap_version, "1.2.3");
      EXPECT_EQ(header.info.created, expected_info.created);
      EXPECT_EQ(header.info.prune, "kvzap");
      EXPECT_EQ(header.info.threshold, 0.1f);
      EXPECT_EQ(header.info.sink, 4);
      EXPECT_EQ(header.info.options, expected_info.options);
      EXPECT_EQ(header.info.run_state, expected_info.run_state);
      EXPECT_EQ(header.info.token_ids, expected_info.token_ids);
      EXPECT_EQ(header.info.context_tokens, 40);
      EXPECT_TRUE(same_bits(header.info.logits, expected_info.logits));
      EXPECT_EQ(header.info.state, expected_info.state);
      EXPECT_EQ(header.info.further, expected_info.further);
      for (int layer = 0; layer < test::story_layers; ++layer) {
        const auto& heads = partition.heads(layer, comm.rank());
        for (std::size_t h = 0; h < heads.size(); ++h) {
          const auto expected = told.cache->host_rows(told.sequence, layer, static_cast<int>(h));
          const SnapshotRows rows = reader.rows(layer, heads[h], true);
          EXPECT_EQ(rows.positions, expected.positions);
          EXPECT_EQ(header.offsets[layer][heads[h] + 1] - header.offsets[layer][heads[h]],
                    static_cast<std::int64_t>(rows.positions.size()));
          std::vector<std::uint8_t> judged(expected.positions.size(), 1);
          std::fill(judged.end() - 5, judged.end(), std::uint8_t{0});
          EXPECT_EQ(rows.judged, judged);
          if (content == SnapshotContent::positions) {
            EXPECT_TRUE(rows.scores.empty());
          } else {
            EXPECT_TRUE(same_bits(rows.scores, expected.scores));
          }
          if (content == SnapshotContent::all) {
            EXPECT_TRUE(same_bits(rows.keys, expected.keys));
            EXPECT_TRUE(same_bits(rows.values, expected.values));
          } else {
            EXPECT_TRUE(rows.keys.empty() && rows.values.empty());
          }
          EXPECT_TRUE(reader.rows(layer, heads[h], false).keys.empty());
        }
      }
      test::expect_error([&] { reader.rows(2, 0, false); }, {file.string(), "no layer 2"});
      test::expect_error([&] { reader.rows(0, 5, false); }, {file.string(), "head 5"});
      // Only from keys and values can a run go on.
      const auto cache = story_cache<half>(partition, comm.rank());
      if (content != SnapshotContent::all) {
        test::expect_error([&] { load_snapshot(reader, *cache, partition, comm); },
                           {file.string(), "without keys and values"});
        EXPECT_TRUE(cache->sequences().empty());
      }
      comm.barrier();
    }
  }
}

// None after a cut that closes up positions; more than fit one piece of writing, of which no number
// of query heads is a multiple; a query head that does not fit one.
TEST(SnapshotReading, RecentQueriesOfAnyNumber) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = story_partition(comm.size());
  struct Case {
    std::int64_t tokens, query_tokens, query_group;
  };
  for (const Case& of : {Case{45, 0, 0}, Case{45, 45, 250}, Case{11000, 11000, 2}}) {
    const Story story{"queries", of.tokens, false, 0, false, false};
    auto told = tell<half>(story, partition, comm.rank());
    SnapshotInfo info = story_info(story);
    for (int layer = 0; layer < test::story_layers; ++layer) {
      SnapshotQueries queries{of.tokens - of.query_tokens, of.query_tokens, {}};
      for (const int head : partition.heads(layer, comm.rank())) {
        for (std::int64_t i = 0; i < of.query_group * of.query_tokens * test::story_dim; ++i) {
          queries.values.push_back(static_cast<float>(head) + static_cast<float>(i) / 1024);
        }
      }
      info.recent_queries.push_back(std::move(queries));
    }
    for (const int compress : {0, 1}) {
      SCOPED_TRACE(
          fmt::format("{} of {} tokens, compress {}", of.query_tokens, of.tokens, compress));
      const fs::path file = folder / fmt::format("{}-{}.h5", of.query_tokens, compress);
      SnapshotOptions options;
      options.compress = compress;
      begin_snapshot(file, *told.cache, told.sequence, partition, comm, info, options)->finish();
      const SnapshotReader reader(file);
      EXPECT_TRUE(reader.verify().empty());
      const auto cache = story_cache<half>(partition, comm.rank());
      const auto loaded = load_snapshot(reader, *cache, partition, comm);
      ASSERT_EQ(loaded.recent_queries.size(), info.recent_queries.size());
      for (std::size_t l = 0; l < info.recent_queries.size(); ++l) {
        EXPECT_EQ(loaded.recent_queries[l].first, info.recent_queries[l].first);
        EXPECT_EQ(loaded.recent_queries[l].tokens, of.query_tokens);
        EXPECT_TRUE(same_bits(loaded.recent_queries[l].values, info.recent_queries[l].values));
      }
    }
  }
}

TEST(SnapshotReading, CacheOfOtherExtents) {
  const SharedFolder folder;
  const Communicator comm = Communicator::world();
  const HeadPartition partition = story_partition(comm.size());
  const fs::path file = folder / "cache.h5";
  write<float>(file, stories()[3], partition, comm);
  const SnapshotReader reader(file);
  CacheShape shape = story_cache<float>(partition, comm.rank())->shape();
  const auto refused = [&](const CacheShape& other, const HeadPartition& heads,
                           std::string_view part) {
    KVCache cache(DType::f32, other);
    EXPECT_THROW(load_snapshot(reader, cache, heads, comm), AgreedError);
    test::expect_error([&] { load_snapshot(reader, cache, heads, comm); }, {file.string(), part});
    EXPECT_TRUE(cache.sequences().empty());
  };
  CacheShape other = shape;
  other.window = 9;
  refused(other, partition, "window is 8; expected 9");
  other = shape;
  other.head_dim = 8;
  refused(other, partition, "head_dim is 6; expected 8");
  other = shape;
  other.heads.push_back(1);
  refused(other, partition, "n_layers is 2; expected 3");
  refused(shape, HeadPartition::even(2, 8, comm.size()), "n_kv_heads is 5; expected 8");
  refused(shape, HeadPartition::even(2, 5, comm.size() + 1), "partition");

  // No room for pages on one rank.
  const std::size_t rings = static_cast<std::size_t>(shape.heads[0] + shape.heads[1]) *
                            test::story_window * ring_row_bytes(test::story_dim, sizeof(float));
  KVCache cache(DType::f32, shape, nullptr, comm.is_root() ? rings + 1 : 0);
  EXPECT_THROW(load_snapshot(reader, cache, partition, comm), AgreedOutOfMemory);
  EXPECT_TRUE(cache.sequences().empty());
  cache.set_limit(0);
  const auto loaded = load_snapshot(reader, cache, partition, comm);
  const auto told = tell<float>(stories()[3], partition, comm.rank());
  expect_same_cache(cache, loaded.sequence, *told.cache, told.sequence);
}

}  // namespace
}  // namespace kvzap
