// States of documents that outlive a server: a second one continues from the files of the first, on
// the same or another number of ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/engine/surrogate.hpp>
#include <kvzap/server/prefix_store.hpp>
#include <kvzap/server/scheduler.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mpi/ranks.hpp"
#include "source_dir.hpp"

namespace kvzap::server {
namespace {

namespace fs = std::filesystem;
using test::FirstRanks;
using test::SharedFolder;

/// An answer, with the log probability of each token.
struct Told final : Listener {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  Ending ending;
  std::string error;

  bool on_token(int, TokenId token, const TokenLogprobs* of_token) override {
    tokens.push_back(token);
    logprobs.push_back(of_token->logprob);
    return true;
  }
  void on_end(int, const Ending& end) override { ending = end; }
  void on_error(const RequestError& of) override { error = of.what; }
};

struct Setting {
  std::string family = "qwen3";
  PruneMode mode = PruneMode::prefill;
  PrefillMode prefill = PrefillMode::dense;
  std::string kv_type = "f32";
};

/// Documents of 300 and 310 tokens, each with a question; the second one begins as the first.
std::vector<GenerationRequest> some_requests(std::int64_t vocabulary, bool reversed) {
  std::vector<GenerationRequest> requests;
  std::uint32_t state = 5;
  std::vector<TokenId> document;
  const auto some = [&](std::size_t count) {
    std::vector<TokenId> tokens(count);
    for (TokenId& token : tokens) {
      state = state * 1664525U + 1013904223U;
      token = static_cast<TokenId>((state >> 10) % vocabulary);
    }
    return tokens;
  };
  document = some(300);
  const std::vector<TokenId> questions[] = {some(7), some(9)};
  for (const std::vector<TokenId>& question : questions) {
    GenerationRequest request;
    request.prompt = {{Segment::Kind::context, document, {}},
                      {Segment::Kind::question, question, {}}};
    request.max_new_tokens = 8;
    request.top_logprobs = 0;
    requests.push_back(request);
    const std::vector<TokenId> more = some(10);
    document.insert(document.end(), more.begin(), more.end());
  }
  if (reversed) std::reverse(requests.begin(), requests.end());
  return requests;
}

/// What a server was and what became of it.
struct Served {
  std::vector<Told> told;
  SchedulerCounts counts;
  std::vector<std::string> warnings;
};

Served serve_with(const Setting& setting, const Communicator& comm, const fs::path& folder,
                  bool reversed = false, std::int64_t most_bytes = std::int64_t{1} << 30) {
  const fs::path model_folder = test::source_dir() / "tests/golden/families" / setting.family;
  const ModelConfig config = ModelConfig::load(model_folder);
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const Model>(
      Model::load(model_folder, config, DType::f32, partition, comm.rank(), {}));
  CacheOptions options;
  options.pruning.mode = setting.mode;
  options.pruning.window = 8;
  options.pruning.prefill = setting.prefill;
  options.pruning.chunk = 64;
  options.pruning.amount.threshold = 0.0;
  options.page_rows = 4;
  options.page_format = page_format_from_name(setting.kv_type, DType::f32);
  std::shared_ptr<Scorer> scorer;
  if (setting.mode != PruneMode::none) {
    scorer = std::make_shared<Surrogate>(Surrogate::load(model_folder / "kvzap-linear", config,
                                                         partition, comm.rank(), DType::f32, comm));
  }
  const auto engine = Engine::create(model, scorer, options, comm);
  Executor executor(*engine);
  Served served;
  if (!comm.is_root()) {
    executor.follow();
    return served;
  }
  std::unique_ptr<PrefixStore> store;
  if (!folder.empty()) {
    PrefixStore::Options of_store;
    of_store.folder = folder;
    of_store.most_bytes = most_bytes;
    of_store.model = setting.family;
    of_store.model_hash = setting.family;
    of_store.dtype = DType::f32;
    of_store.warn = [&](const std::string& warning) { served.warnings.push_back(warning); };
    store = std::make_unique<PrefixStore>(std::move(of_store));
  }
  SchedulerOptions scheduling;
  scheduling.store = store.get();
  Scheduler scheduler(executor, scheduling);
  for (const GenerationRequest& request : some_requests(config.vocab_size, reversed)) {
    const auto told = std::make_shared<Told>();
    scheduler.submit(request, told);
    while (scheduler.step()) {
    }
    served.told.push_back(*told);
  }
  scheduler.drain();
  scheduler.run();
  served.counts = scheduler.counts();
  EXPECT_EQ(executor.size(), 0);
  EXPECT_EQ(engine->bytes().live, 0U);
  return served;
}

void expect_equal(const Served& served, const Served& expected, bool same_bits = true) {
  ASSERT_EQ(served.told.size(), expected.told.size());
  for (std::size_t i = 0; i < served.told.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(served.told[i].error, "");
    EXPECT_EQ(served.told[i].tokens, expected.told[i].tokens);
    EXPECT_DOUBLE_EQ(served.told[i].ending.evict_ratio, expected.told[i].ending.evict_ratio);
    for (std::size_t t = 0; t < served.told[i].logprobs.size(); ++t) {
      const float far = same_bits ? 0 : 1e-3F;
      EXPECT_NEAR(served.told[i].logprobs[t], expected.told[i].logprobs[t], far);
    }
  }
}

TEST(StoredPrefixes, OutliveTheServer) {
  if (!has_snapshots) GTEST_SKIP() << "needs HDF5";
  const Communicator comm = Communicator::world();
  std::vector<Setting> settings = {
      {}, {"qwen3", PruneMode::prefill, PrefillMode::sparse}, {"qwen3", PruneMode::none}};
  settings.push_back({"qwen3", PruneMode::prefill, PrefillMode::dense, "q8"});
  // Rings of windows, delta nets, state spaces, latent rows.
  for (const char* family : {"gemma3_text", "qwen3_next", "jamba", "nemotron_h", "deepseek_v3"}) {
    settings.push_back({family});
  }
  for (const Setting& setting : settings) {
    SCOPED_TRACE(setting.family + " " + std::string(name_of(setting.mode)) + " " +
                 std::string(name_of(setting.prefill)) + " " + setting.kv_type);
    const SharedFolder folder;
    const Served expected = serve_with(setting, comm, "");
    const Served first = serve_with(setting, comm, folder / "store");
    const Served second = serve_with(setting, comm, folder / "store");
    if (!comm.is_root()) continue;
    // Balancing moves pages between ranks, which changes the order of sums.
    expect_equal(first, expected, comm.size() == 1);
    expect_equal(second, expected, comm.size() == 1);
    EXPECT_EQ(first.warnings, std::vector<std::string>());
    EXPECT_EQ(second.warnings, std::vector<std::string>());
    // Without pruning the second document continues the first one, to which it adds few tokens.
    const int files = setting.mode == PruneMode::none ? 1 : 2;
    EXPECT_EQ(first.counts.prefixes_stored, files);
    EXPECT_EQ(second.counts.prefixes_restored, files);
    EXPECT_EQ(second.counts.prefixes_stored, 0);
    EXPECT_EQ(second.told[0].ending.cached_tokens, 300);
    if (setting.mode != PruneMode::none) {
      EXPECT_GT(expected.told[0].ending.evict_ratio, 0.01);
      EXPECT_LT(expected.told[0].ending.evict_ratio, 0.99);
    }
  }
}

TEST(StoredPrefixes, ServeOtherNumbersOfRanks) {
  if (!has_snapshots) GTEST_SKIP() << "needs HDF5";
  const Communicator comm = Communicator::world();
  for (const char* family : {"qwen3", "qwen3_next", "deepseek_v3"}) {
    SCOPED_TRACE(family);
    const SharedFolder folder;
    const Setting setting = {family};
    const Served expected = serve_with(setting, comm, folder / "store");
    const FirstRanks one(1);
    if (!one.has_this_rank()) continue;
    const Served alone = serve_with(setting, one.communicator(), folder / "store");
    expect_equal(alone, expected, false);
    EXPECT_EQ(alone.told[0].ending.cached_tokens, 300);
  }
}

TEST(StoredPrefixes, AFullCacheServesAnyBeginning) {
  if (!has_snapshots) GTEST_SKIP() << "needs HDF5";
  const Communicator comm = Communicator::world();
  const SharedFolder folder;
  const Setting setting = {"qwen3", PruneMode::none};
  const Served expected = serve_with(setting, comm, "");
  serve_with(setting, comm, folder / "store", true);  // stores the longer document alone
  const Served second = serve_with(setting, comm, folder / "store");
  if (!comm.is_root()) return;
  expect_equal(second, expected, false);
  EXPECT_EQ(second.counts.prefixes_restored, 1);
  EXPECT_EQ(second.told[0].ending.cached_tokens, 299);  // one has to run before the context ends
  EXPECT_EQ(second.told[1].ending.cached_tokens, 310);
}

TEST(StoredPrefixes, DamagedRowsAreRunAgain) {
  if (!has_snapshots) GTEST_SKIP() << "needs HDF5";
  const Communicator comm = Communicator::world();
  const SharedFolder folder;
  const Setting setting;
  const Served expected = serve_with(setting, comm, folder / "store");
  if (comm.is_root()) {
    for (const auto& entry : fs::directory_iterator(folder / "store")) {
      std::fstream file(entry.path(), std::ios::binary | std::ios::in | std::ios::out);
      std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
      // Between the structure at the beginning and the one at the end there are rows.
      for (std::size_t i = bytes.size() / 2; i < bytes.size() / 2 + 4096; ++i) bytes[i] ^= 0x55;
      file.clear();
      file.seekp(0);
      file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
  }
  comm.barrier();
  const Served second = serve_with(setting, comm, folder / "store");
  const Served third = serve_with(setting, comm, folder / "store");
  if (!comm.is_root()) return;
  expect_equal(second, expected, comm.size() == 1);
  EXPECT_EQ(second.warnings.size(), 2U);
  for (const std::string& warning : second.warnings) {
    EXPECT_EQ(warning.rfind("removed: snapshot ", 0), 0U) << warning;
  }
  EXPECT_EQ(second.told[0].ending.cached_tokens, 0);
  EXPECT_EQ(second.counts.prefixes_stored, 2);  // anew
  EXPECT_EQ(third.told[0].ending.cached_tokens, 300);
}

TEST(StoredPrefixes, WhatCannotBeWrittenCostsNoRequest) {
  if (!has_snapshots) GTEST_SKIP() << "needs HDF5";
  const Communicator comm = Communicator::world();
  const SharedFolder folder;
  const Served expected = serve_with({}, comm, "");
  const Served small = serve_with({}, comm, folder / "store", false, 1000);
  if (!comm.is_root()) return;
  expect_equal(small, expected);
  EXPECT_FALSE(small.warnings.empty());
  EXPECT_TRUE(fs::is_empty(folder / "store"));
}

}  // namespace
}  // namespace kvzap::server
