// Snapshots brought back: on any number of ranks, in any order of pages, in any type of values.
#include <gtest/gtest.h>

#include <kvzap/decoder.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "mpi/io/snapshot_stories.hpp"
#include "watched.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using test::content_of_file;
using test::expect_same_cache;
using test::FolderOfRanks;
using test::same_bits;
using test::SomeRanks;
using test::stories;
using test::Story;
using test::story_append;
using test::story_cache;
using test::story_info;
using test::story_partition;
using test::story_queries;
using test::tell;

template <class Value, PageOrder order>
void write(const fs::path& file, const Story& story, const HeadPartition& partition,
           const Communicator& comm, const SnapshotOptions& options = {}) {
  auto told = tell<Value, order>(story, partition, comm.rank());
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
template <class Value, PageOrder order>
void expect_round_trip(const fs::path& file, const Story& story, const Communicator& comm,
                       int page_rows, const fs::path& again) {
  const HeadPartition partition = story_partition(comm.size());
  auto told = tell<Value, order>(story, partition, comm.rank());
  const auto cache = story_cache<Value, order>(partition, comm.rank(), page_rows);
  cache->add_sequence();  // it need not be the first one
  const SnapshotReader reader(file);
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
  template <PageOrder order>
  void run() {
    const FolderOfRanks folder;
    const Communicator world = Communicator::world();
    constexpr PageOrder other =
        order == PageOrder::token_major ? PageOrder::dim_major : PageOrder::token_major;
    for (int r = 1; r <= std::min(world.size(), 4); ++r) {
      const SomeRanks writers(r);
      for (std::size_t i = 0; i < stories().size(); ++i) {
        // Under the sanitizers one story that has everything.
        if (test::watched && i != 6) continue;
        const Story& story = stories()[i];
        SCOPED_TRACE(story.name);
        const fs::path file = folder / ("cache-" + std::to_string(r) + "-" + std::to_string(i));
        if (writers.has_this_rank()) {
          const Communicator comm = writers.communicator();
          write<Value, order>(file, story, story_partition(r), comm);
        }
        world.barrier();
        for (int s = 1; s <= std::min(world.size(), 4); ++s) {
          SCOPED_TRACE("from " + std::to_string(r) + " ranks to " + std::to_string(s));
          const SomeRanks readers(s);
          if (!readers.has_this_rank()) continue;
          const Communicator comm = readers.communicator();
          const bool writes_again = s == 1 + r % std::min(world.size(), 4);
          expect_round_trip<Value, order>(file, story, comm, 4,
                                          writes_again ? folder / "again" : fs::path());
          expect_round_trip<Value, other>(file, story, comm, 7, {});
        }
        world.barrier();
      }
    }
  }
};

using Values = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(SnapshotRoundTrip, Values);

TYPED_TEST(SnapshotRoundTrip, TokenMajor) { this->template run<PageOrder::token_major>(); }
TYPED_TEST(SnapshotRoundTrip, DimensionMajor) { this->template run<PageOrder::dim_major>(); }

}  // namespace
}  // namespace kvzap
