// Policies that requests name: which a server takes, and why it refuses others.
#include <gtest/gtest.h>

#include <algorithm>
#include <kvzap/engine/repeat_prompt.hpp>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/request_policies.hpp>

namespace kvzap::server {
namespace {

ModelConfig small_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 24;
  config.intermediate_size = 32;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = 4;
  config.head_dim = 8;
  config.vocab_size = 31;
  config.max_position_embeddings = 512;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

class RequestPoliciesTest : public ::testing::Test {
 protected:
  RequestPoliciesTest()
      : config(small_config()),
        comm(Communicator::world()),
        partition(HeadPartition::even(2, 4, comm.size())),
        setup{config, partition, DType::f32, "", comm} {
    options.pruning.window = 16;
    options.pruning.sink = 1;
  }

  void make_engine(const std::string& pruning = "none") {
    options.pruning = Pruning::parse(pruning, options.pruning);
    check(options.pruning);
    options.policy = load(options.pruning, setup).policy;
    const auto model = std::make_shared<const Model>(
        Model::load("", config, DType::f32, partition, comm.rank(), {3}));
    engine = Engine::create(model, options.scorer(), options, comm);
  }

  static PruneWish wish_of(const std::string& policy, std::optional<double> ratio = 0.5) {
    PruneWish wish;
    wish.policy = policy;
    wish.evict_ratio = ratio;
    return wish;
  }

  static void expect_refusal(const RequestPolicies& policies, const PruneWish& wish,
                             const std::string& field, const std::string& words) {
    try {
      policies.pruning_of(wish);
      ADD_FAILURE() << field << ": " << words;
    } catch (const BadRequest& error) {
      EXPECT_EQ(error.field, field) << error.what();
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  }

  ModelConfig config;
  Communicator comm;
  HeadPartition partition;
  PolicySetup setup;
  CacheOptions options;
  std::unique_ptr<Engine> engine;
};

TEST_F(RequestPoliciesTest, NamesWhatTheEngineCanRun) {
  make_engine();
  RepeatPrompt repeat;
  repeat.first = repeat.later = repeat.suffix = {1};
  const auto has = [](const RequestPolicies& policies, const std::string& name) {
    const auto& names = policies.names();
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const RequestPolicies policies(*engine, setup, repeat);
  for (const char* name : {"none", "knorm", "snapkv", "h2o", "expected-attention", "kvzip"}) {
    EXPECT_TRUE(has(policies, name)) << name;
  }
  // They need a surrogate, a file, or the question.
  for (const char* name : {"kvzap", "qfilter", "fastkvzip", "trim-kv", "finch"}) {
    EXPECT_FALSE(has(policies, name)) << name;
  }
  EXPECT_FALSE(has(RequestPolicies(*engine, setup, {}), "kvzip"));
  EXPECT_TRUE(RequestPolicies(*engine, setup, {}, false).names().empty());
}

TEST_F(RequestPoliciesTest, ReplaceTheServersPolicy) {
  for (const char* server : {"none", "snapkv@evict-ratio=0.25@decode-every=4@decode-keep=9"}) {
    options = {};
    options.pruning.window = 16;
    options.pruning.sink = 1;
    make_engine(server);
    const RequestPolicies policies(*engine, setup, {});
    const Pruning half = policies.pruning_of(wish_of("keydiff+ada:alpha=0.3"));
    Pruning expected = Pruning::parse("keydiff+ada:alpha=0.3@evict-ratio=0.5@prune=prefill");
    expected.window = 16;
    expected.sink = 1;
    EXPECT_EQ(half, expected);
    const LoadedPruning loaded = policies.load(half);
    EXPECT_EQ(loaded.policy->info->name, "keydiff");
    EXPECT_EQ(loaded.policy->budget.evict_ratio, 0.5);
    PruneWish wish = wish_of("knorm", {});
    wish.keep_tokens = 7;
    EXPECT_EQ(policies.pruning_of(wish).amount.keep_tokens, 7);
    wish.decode = {128, {}, 0.9};
    EXPECT_EQ(policies.pruning_of(wish).decode, wish.decode);
    wish.decode = {};
    wish.keep_tokens = {};
    wish.kv_bytes = 100000;
    EXPECT_EQ(policies.pruning_of(wish).amount.kv_bytes, 100000);
    // The full cache has one form, so that all requests for it share states.
    PruneWish none;
    none.prune = PruneMode::none;
    EXPECT_EQ(policies.pruning_of(wish_of("none", {})), policies.pruning_of(none));
  }
}

TEST_F(RequestPoliciesTest, RefusalsNameTheFieldAndTheAlternatives) {
  make_engine();
  const RequestPolicies policies(*engine, setup, {});
  EXPECT_TRUE(policies.amounts().empty());
  const std::string field = "kvzap.policy";
  const auto refuse = [&](const PruneWish& wish, const std::string& of, const std::string& words) {
    expect_refusal(policies, wish, of, words);
  };
  for (const char* name : {"snapvk", "", "kvzap", "qfilter", "qfilter:filters=/etc/passwd", "finch",
                           "kvzip", "fastkvzip:gates=x", "none:a=b"}) {
    refuse(wish_of(name), field,
           std::string(name) == "none:a=b" ? "none without parameters" : name);
  }
  refuse(wish_of("snapvk"), field,
         "'snapvk'; expected one that this server can run for a request: none, knorm, random, ");
  // No file of the server, which there may or may not be.
  refuse(wish_of("expected-attention:statistics=/etc/passwd"), field,
         "statistics of expected-attention is a file; a request cannot name one");
  refuse(wish_of("knorm+per-layer:ratios=/none"), field, "ratios of per-layer is a file");
  refuse(wish_of("snapkv@evict-ratio=0.3"), field, "not after an @");
  refuse(wish_of("snapkv:windows=3"), field, "windows");
  refuse(wish_of("snapkv+adda"), field, "adda");
  refuse(wish_of("snapkv+ada+global"), field, "snapkv+ada+global: ");
  refuse(wish_of("snapkv", {}), "kvzap.evict_ratio",
         "kvzap.policy snapkv needs one of kvzap.threshold, kvzap.evict_ratio, kvzap.keep_tokens "
         "and kvzap.kv_budget");
  refuse(wish_of("snapkv", 1.5), "kvzap.evict_ratio", "is 1.5; expected at least 0");
  refuse(wish_of("simlayerkv"), "kvzap.evict_ratio", "sets its own amount");
  refuse(wish_of("none"), field, "kvzap.policy none cannot be combined with kvzap.evict_ratio");
  PruneWish wish = wish_of("snapkv");
  wish.prune = PruneMode::none;
  refuse(wish, field, "kvzap.policy snapkv cannot be combined with kvzap.prune none");
  wish.prune = PruneMode::always;
  refuse(wish, "kvzap.prune", "kvzap.prune always needs a threshold");
  refuse(wish, "kvzap.prune", "kvzap.evict_ratio is met with kvzap.decode_every N");
  wish.decode = {4, 9, {}};
  EXPECT_EQ(policies.pruning_of(wish).decode, wish.decode);
  wish.decode = {4, {}, {}};
  refuse(wish, "kvzap.decode_keep",
         "kvzap.decode_every needs kvzap.decode_keep or kvzap.decode_evict_ratio");
  wish.decode = {0, 9, {}};
  refuse(wish, "kvzap.decode_keep", "has no effect without kvzap.decode_every");
  wish = wish_of("none", {});
  wish.decode = {4, 9, {}};
  refuse(wish, field, "kvzap.policy none cannot be combined with kvzap.decode_every");
  // Budgets that some prompt would exceed, in the middle of a step.
  wish = wish_of("knorm", {});
  wish.kv_bytes = 10;
  refuse(wish, "kvzap.kv_budget", "the budget of 10 bytes is below the minimum");
  wish = wish_of("knorm+chunkkv:length=20", {});
  wish.keep_tokens = 5;
  refuse(wish, "kvzap.keep_tokens", "below the minimum, 20");
  expect_refusal(RequestPolicies(*engine, setup, {}, false), wish_of("snapkv"), field,
                 "takes no policy from requests");
}

// The server's own policy, too, is checked with the request's amount.
TEST_F(RequestPoliciesTest, ModifiersOfTheServerAreAskedAnew) {
  make_engine("snapkv+kvcrush@evict-ratio=0.5");
  const RequestPolicies policies(*engine, setup, {});
  PruneWish wish = wish_of("snapkv+kvcrush", {});
  expect_refusal(policies, wish, "kvzap.policy", "kvcrush");
  wish.threshold = 0;
  expect_refusal(policies, wish, "kvzap.policy", "kvcrush divides a budget");
  EXPECT_EQ(policies.pruning_of(wish_of("snapkv+kvcrush")).amount.evict_ratio, 0.5);
}

TEST_F(RequestPoliciesTest, WithoutAPolicyTheKindOfAmountIsTheServers) {
  make_engine("knorm@keep-tokens=20");
  const RequestPolicies policies(*engine, setup, {});
  EXPECT_EQ(policies.amounts(), std::vector<std::string>{"keep_tokens"});
  PruneWish wish;
  EXPECT_EQ(policies.pruning_of(wish).amount.keep_tokens, 20);
  wish.keep_tokens = 30;
  EXPECT_EQ(policies.pruning_of(wish).amount.keep_tokens, 30);
  wish.decode = {4, 20, {}};
  EXPECT_EQ(policies.pruning_of(wish).decode, wish.decode);
  wish.keep_tokens = {};
  wish.evict_ratio = 0.5;
  expect_refusal(policies, wish, "kvzap.evict_ratio", "does not prune by evict_ratio");
  wish.evict_ratio = {};
  wish.threshold = -3;
  expect_refusal(policies, wish, "kvzap.threshold", "prunes to a budget");
  wish.threshold = {};
  wish.keep_tokens = 0;
  expect_refusal(policies, wish, "kvzap.keep_tokens", "is 0; expected at least 1");
}

}  // namespace
}  // namespace kvzap::server
