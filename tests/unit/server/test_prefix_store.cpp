// The folder of stored states: its bound, which states are found, and what is no state.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/core/communicator.hpp>
#include <kvzap/server/prefix_store.hpp>
#include <string>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace kvzap::server {
namespace {

namespace fs = std::filesystem;
using Key = std::vector<std::int32_t>;

class PrefixStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_snapshots) GTEST_SKIP() << "needs HDF5";
    options.folder = folder.path() / "store";
    options.most_bytes = std::int64_t{1} << 30;
    options.least_tokens = 3;
    options.model = "small";
    options.model_hash = "0123";
    options.text_of = [](const std::vector<TokenId>& tokens) {
      return "  first\n words of " + std::to_string(tokens.size());
    };
    options.warn = [this](const std::string& warning) { warnings.push_back(warning); };
  }

  /// Writes the state of a key: the rows do not matter.
  StoredPrefix write(PrefixStore& store, const Key& key, std::int64_t whole_from = -1,
                     const Pruning& pruning = {}) {
    const auto place = store.place_for(
        pruning, {}, key, whole_from < 0 ? static_cast<std::int64_t>(key.size()) : whole_from);
    CacheShape shape;
    shape.heads = {1};
    shape.head_dim = 4;
    shape.window = 4;
    shape.page_rows = 4;
    KVCache cache(DType::f32, shape);
    write_snapshot(place.state.file, cache, cache.add_sequence(), HeadPartition::even(1, 1, 1),
                   Communicator::self(), place.info);
    store.note_written(place.state);
    return place.state;
  }
  /// Sets a file's time of use.
  static void set_used(const fs::path& file, int seconds_ago) {
    fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::seconds(seconds_ago));
  }
  std::int64_t length_of(PrefixStore& store, const Key& key, const Pruning& pruning = {}) {
    const auto found =
        store.find(store.kind_of(pruning, {}), key, static_cast<std::int64_t>(key.size()));
    return found ? found->length : 0;
  }

  test::TemporaryFolder folder;
  PrefixStore::Options options;
  std::vector<std::string> warnings;
};

TEST_F(PrefixStoreTest, FindsTheLongestBeginningOfItsKind) {
  Pruning other;
  other.amount.threshold = -3;
  {
    PrefixStore store(options);
    write(store, {-1, 1, 2, 3, -2});
    write(store, {-1, 1, 2, 3, 4, 5, 6, -2, -3, 9});
    write(store, {-1, 7, 8, 9, 10, 11}, 1);
    EXPECT_EQ(store.size(), 3);
  }
  PrefixStore store(options);  // a later server
  EXPECT_EQ(store.size(), 3);
  EXPECT_EQ(length_of(store, {-1, 1, 2, 3, -2, -3, 4}), 5);
  EXPECT_EQ(length_of(store, {-1, 1, 2, 3, 4, 5, 6, -2, -3, 9, 9}), 10);
  EXPECT_EQ(length_of(store, {-1, 1, 2, 3, 4}), 1);     // judged after 3, or after 6
  EXPECT_EQ(length_of(store, {-1, 7, 8, 9, 1, 1}), 4);  // cut back
  EXPECT_EQ(length_of(store, {-1, 1, 2, 3, -2}, other), 0);
  const auto found = store.find(store.kind_of({}, {}), {-1, 7, 8, 9, 1}, 5);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->state.key, (Key{-1, 7, 8, 9, 10, 11}));
  EXPECT_EQ(found->state.whole_from, 1);
  EXPECT_EQ(found->state.tokens, 5);
  EXPECT_EQ(found->state.text, "first words of 5");
  EXPECT_EQ(warnings, std::vector<std::string>());
  struct stat status = {};
  ASSERT_EQ(stat(options.folder.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0700u);

  options.model_hash = "4567";  // other weights
  PrefixStore of_other(options);
  EXPECT_EQ(length_of(of_other, {-1, 1, 2, 3, -2}), 0);
  EXPECT_EQ(of_other.size(), 3);
  options.model_hash = "0123";
  options.setting = "another dtype";
  PrefixStore of_third(options);
  EXPECT_EQ(length_of(of_third, {-1, 1, 2, 3, -2}), 0);
}

TEST_F(PrefixStoreTest, WantsStatesThatSaveEnough) {
  PrefixStore store(options);
  const std::string kind = store.kind_of({}, {});
  EXPECT_FALSE(store.wants(kind, {-1, 1, 2, -2}));
  EXPECT_TRUE(store.wants(kind, {-1, 1, 2, 3, -2}));
  write(store, {-1, 1, 2, 3, -2});
  EXPECT_FALSE(store.wants(kind, {-1, 1, 2, 3, -2}));
  EXPECT_FALSE(store.wants(kind, {-1, 1, 2, 3, -2, -1, 4, 5, -2}));
  EXPECT_TRUE(store.wants(kind, {-1, 1, 2, 3, -2, -1, 4, 5, 6, -2}));
}

TEST_F(PrefixStoreTest, RemovesTheLeastRecentlyUsedStates) {
  std::vector<StoredPrefix> states;
  std::int64_t bytes = 0;
  {
    PrefixStore store(options);
    for (int i = 0; i < 4; ++i) states.push_back(write(store, {-1, i, i, i, -2}));
    bytes = store.bytes() / 4;
    for (int i = 0; i < 4; ++i) set_used(states[i].file, 1000 - i);
    store.note_used(states[0]);
  }
  options.most_bytes = 3 * bytes + bytes / 2;
  std::ofstream(options.folder / "kvzap-prefix-notes.txt") << "of somebody else";
  std::ofstream(options.folder / "0123456789abcdef.h5") << "of somebody else";
  PrefixStore store(options);
  EXPECT_EQ(store.size(), 3);
  EXPECT_FALSE(fs::exists(states[1].file));
  EXPECT_TRUE(fs::exists(states[0].file));
  write(store, {-1, 9, 9, 9, -2});
  EXPECT_EQ(store.size(), 3);
  EXPECT_FALSE(fs::exists(states[2].file));
  EXPECT_TRUE(fs::exists(options.folder / "kvzap-prefix-notes.txt"));
  EXPECT_TRUE(fs::exists(options.folder / "0123456789abcdef.h5"));
  EXPECT_EQ(warnings, std::vector<std::string>());
}

TEST_F(PrefixStoreTest, RemovesWhatIsNoState) {
  fs::path whole;
  {
    PrefixStore store(options);
    whole = write(store, {-1, 1, 2, 3, -2}).file;
    write(store, {-1, 4, 4, 4, -2});
  }
  const auto name = [&](char digit) {
    return options.folder / ("kvzap-prefix-" + std::string(16, digit) + ".h5");
  };
  std::ifstream stream(whole, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  std::ofstream(name('a')) << bytes.substr(0, bytes.size() / 2);  // truncated
  std::ofstream(name('b')) << "no HDF5 file";
  std::ofstream(name('c')) << bytes;  // under another name
  std::ofstream(name('d'));           // empty
  {
    // A snapshot of another program.
    CacheShape shape;
    shape.heads = {1};
    shape.head_dim = 4;
    shape.window = 4;
    shape.page_rows = 4;
    KVCache cache(DType::f32, shape);
    write_snapshot(name('e'), cache, cache.add_sequence(), HeadPartition::even(1, 1, 1),
                   Communicator::self(), {});
  }
  fs::create_symlink(whole, name('f'));  // not ours
  // What a killed server has left: no process has this number.
  std::ofstream(whole.string() + ".tmp-nowhere-1-0") << "of another node, which may live";
  std::vector<std::string> told;
  EXPECT_EQ(stored_prefixes(options.folder, [&](const auto& one) { told.push_back(one); }).size(),
            2U);
  EXPECT_EQ(told.size(), 5U);
  EXPECT_TRUE(fs::exists(name('a')));  // reading removes nothing
  PrefixStore store(options);
  EXPECT_EQ(store.size(), 2);
  for (const char digit : {'a', 'b', 'c', 'd', 'e'}) {
    EXPECT_FALSE(fs::exists(name(digit))) << digit;
  }
  EXPECT_TRUE(fs::is_symlink(name('f')));
  EXPECT_EQ(warnings.size(), 6U);  // the last: of the unfinished file
}

TEST_F(PrefixStoreTest, SharesTheFolderWithOtherServers) {
  PrefixStore one(options), two(options);
  EXPECT_EQ(length_of(two, {-1, 1, 2, 3, -2}), 0);
  const StoredPrefix state = write(one, {-1, 1, 2, 3, -2});
  PrefixStore three(options);
  EXPECT_EQ(length_of(three, {-1, 1, 2, 3, -2}), 5);
  fs::remove(state.file);  // by a fourth
  one.note_used(state);
  one.refuse(state, "it cannot be opened");
  EXPECT_EQ(one.size(), 0);
  three.note_written(state);
  EXPECT_EQ(warnings, std::vector<std::string>());
}

TEST_F(PrefixStoreTest, RefusesAFolderWhereNothingCanBeWritten) {
  std::ofstream(folder.path() / "store") << "a file";
  test::expect_error([&] { PrefixStore store(options); }, {"store"});
}

TEST(StoredPrefixIds, AreSixteenHexadecimalDigits) {
  EXPECT_EQ(file_of_stored_prefix("x", "0123456789abcdef"), "x/kvzap-prefix-0123456789abcdef.h5");
  for (const char* id : {"", "0123", "0123456789abcdeF", "0123456789abcdef0", "../456789abcdef0"}) {
    EXPECT_EQ(file_of_stored_prefix("x", id), "") << id;
  }
}

}  // namespace
}  // namespace kvzap::server
