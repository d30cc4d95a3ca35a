// Pruning: its text form, and the rulebook, each rule with its code, fields and words.
#include <gtest/gtest.h>

#include <functional>
#include <kvzap/engine/pruning.hpp>
#include <memory>
#include <random>

namespace kvzap {
namespace {

using Code = PruningFault::Code;
using Field = PruningField;

// The rules look whether the folder is there.
Pruning kvzap_pruning() { return Pruning::kvzap("."); }

TEST(Pruning, WritesAndReadsItsText) {
  EXPECT_EQ(Pruning::none().text(), "none");
  EXPECT_EQ(kvzap_pruning().threshold(-4).text(), "@surrogate=.@threshold=-4");
  EXPECT_EQ(kvzap_pruning().recommended_threshold().text(), "@surrogate=.@threshold=auto");
  EXPECT_EQ(Pruning::parse("kvzap@threshold=auto@surrogate=."),
            Pruning::parse("kvzap@surrogate=.").recommended_threshold());
  Pruning pruning = Pruning::parse("snapkv:window=32+ada@evict-ratio=0.5@prune-after=question");
  EXPECT_EQ(pruning.policy, "snapkv:window=32+ada");
  EXPECT_EQ(pruning.amount.evict_ratio, 0.5);
  EXPECT_EQ(pruning.moment, PruneMoment::question);
  EXPECT_EQ(Pruning::parse("tova @ kv-budget = 2KiB").amount.kv_bytes, 2048);
  EXPECT_EQ(Pruning::parse("none"), Pruning::none());
  EXPECT_EQ(Pruning::parse("kvzap:surrogate=a\\@b").policy, "kvzap:surrogate=a@b");
}

// Any value comes back from its own text.
TEST(Pruning, ComesBackFromItsText) {
  std::mt19937 random(7);
  const auto draw = [&](int below) { return static_cast<int>(random() % below); };
  const char* const names[] = {"snapkv", "tova+ada", "kvzap:surrogate=x@y\\,z", "knorm+global"};
  for (int i = 0; i < 500; ++i) {
    Pruning pruning;
    if (draw(5) != 0) pruning.policy = names[draw(4)];
    if (draw(3) == 0) pruning.surrogate = "folder@2";
    if (draw(2) != 0) pruning.threshold(draw(100) / 7.0 - 9);
    if (draw(4) == 0) pruning.recommended_threshold();
    if (draw(2) != 0) pruning.evict_ratio(draw(100) / 101.0);
    if (draw(2) != 0) pruning.keep_tokens(1 + draw(9999));
    if (draw(2) != 0) pruning.kv_bytes(1 + draw(999999));
    pruning.layerwise = draw(2) != 0;
    if (draw(2) != 0) pruning.mode = static_cast<PruneMode>(draw(3));
    pruning.moment = draw(2) != 0 ? PruneMoment::question : PruneMoment::context;
    pruning.prefill = draw(2) != 0 ? PrefillMode::sparse : PrefillMode::dense;
    pruning.chunk = 1 + draw(5000);
    pruning.window = 1 + draw(500);
    pruning.sink = draw(9);
    pruning.decode.every = draw(9);
    if (draw(2) != 0) pruning.decode.keep = 1 + draw(99);
    if (draw(2) != 0) pruning.decode.evict_ratio = draw(100) / 101.0;
    EXPECT_EQ(Pruning::parse(pruning.text()), pruning) << pruning.text();
  }
}

TEST(Pruning, RefusesTextsThatItCannotRead) {
  const auto error = [](const std::string& text) -> std::string {
    try {
      Pruning::parse(text);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error("none@window=3"), "none@window=3: the full cache has no settings of its own");
  EXPECT_EQ(error("tova@half"), "tova@half: \"@half\" is not @key=value");
  EXPECT_EQ(error("tova@window=3@window=3"), "tova@window=3@window=3: @window is given twice");
  EXPECT_EQ(error("tova@sink=x"), "tova@sink=x: @sink is 'x'; expected a whole number");
  EXPECT_EQ(error("tova@threshold=low"),
            "tova@threshold=low: @threshold is 'low'; expected a number");
  EXPECT_EQ(error("tova@prefill=thin"),
            "tova@prefill=thin: @prefill is \"thin\"; expected dense or sparse");
  EXPECT_NE(error("tova@windo=3").find("did you mean window?"), std::string::npos);
  EXPECT_NE(error("tova@kv-budget=much").find("@kv-budget is 'much'"), std::string::npos);
}

struct Case {
  Code code;
  std::vector<Field> fields;
  std::string text;
  Pruning pruning;
  PruningUse use = {};
};

Pruning changed(Pruning pruning, const std::function<void(Pruning&)>& change) {
  change(pruning);
  return pruning;
}

std::vector<Case> cases() {
  const Pruning half = Pruning::parse("snapkv@evict-ratio=0.5");
  const Pruning kvzap = kvzap_pruning().threshold(-4);
  return {
      {Code::out_of_range,
       {Field::window},
       "window is 0; expected at least 1",
       changed(half, [](Pruning& p) { p.window = 0; })},
      {Code::out_of_range,
       {Field::sink},
       "sink is -1; expected 0 or more",
       changed(half, [](Pruning& p) { p.sink = -1; })},
      {Code::out_of_range,
       {Field::evict_ratio},
       "evict_ratio is 1; expected at least 0 and less than 1",
       Pruning::parse("tova").evict_ratio(1)},
      {Code::out_of_range,
       {Field::threshold},
       "threshold is NaN; expected a number (no score is below NaN)",
       kvzap_pruning().threshold(std::numeric_limits<double>::quiet_NaN())},
      {Code::several_amounts,
       {Field::evict_ratio, Field::keep_tokens},
       "evict_ratio and keep_tokens each say how much is evicted: give one of threshold, "
       "evict_ratio, keep_tokens and kv_budget",
       Pruning(half).keep_tokens(9)},
      {Code::missing,
       {Field::surrogate, Field::policy},
       "prune always needs surrogate DIR or policy NAME",
       changed(Pruning::none(), [](Pruning& p) { p.mode = PruneMode::always; })},
      {Code::missing,
       {Field::threshold, Field::evict_ratio, Field::keep_tokens, Field::kv_budget},
       "surrogate needs threshold, the log score below which a pair is evicted (auto: the one that "
       "kvzap calibrate has recommended), or evict_ratio, for which one is looked up, or one of "
       "keep_tokens and kv_budget",
       kvzap_pruning()},
      {Code::missing,
       {Field::threshold, Field::surrogate},
       "threshold auto needs surrogate DIR, and no policy but kvzap: the threshold is one of the "
       "surrogate's scores",
       Pruning::parse("tova@threshold=auto")},
      {Code::several_amounts,
       {Field::threshold, Field::keep_tokens},
       "threshold and keep_tokens each say how much is evicted: give one of threshold, "
       "evict_ratio, keep_tokens and kv_budget",
       kvzap_pruning().recommended_threshold().keep_tokens(9)},
      {Code::conflict,
       {Field::prune_after, Field::threshold},
       "prune_after question needs a budget, one of evict_ratio, keep_tokens and kv_budget: with "
       "threshold each pair is judged by itself",
       changed(kvzap_pruning().recommended_threshold(),
               [](Pruning& p) { p.moment = PruneMoment::question; })},
      {Code::conflict,
       {Field::prune_after, Field::evict_ratio},
       "prune_after question needs a budget: kvzap reaches evict_ratio by a threshold, policy "
       "kvzap+ada:alpha=1 by a budget of each head",
       changed(Pruning::parse("kvzap@evict-ratio=0.5@surrogate=."),
               [](Pruning& p) { p.moment = PruneMoment::question; })},
      {Code::no_effect,
       {Field::decode_keep, Field::decode_every},
       "decode_keep has no effect without decode_every",
       changed(half, [](Pruning& p) { p.decode.keep = 5; })},
      {Code::conflict,
       {Field::prefill, Field::prune_after},
       "prune_after question runs context and question as one step: it needs prefill dense",
       changed(half,
               [](Pruning& p) {
                 p.moment = PruneMoment::question;
                 p.prefill = PrefillMode::sparse;
               })},
      {Code::missing,
       {Field::question, Field::prune_after},
       "prune_after question needs question",
       changed(half, [](Pruning& p) { p.moment = PruneMoment::question; }),
       {false, false}},
      {Code::conflict,
       {Field::surrogate, Field::policy},
       "surrogate is for policy kvzap; policy snapkv does not use it",
       changed(half, [](Pruning& p) { p.surrogate = "s"; })},
      {Code::missing,
       {Field::surrogate, Field::policy},
       "policy kvzap needs surrogate DIR",
       Pruning::parse("kvzap@evict-ratio=0.5")},
      {Code::missing,
       {Field::evict_ratio, Field::threshold, Field::keep_tokens, Field::kv_budget},
       "policy snapkv needs one of threshold, evict_ratio, keep_tokens and kv_budget: how much is "
       "evicted",
       Pruning::parse("snapkv")},
      {Code::conflict,
       {Field::decode_every, Field::policy},
       "decode_every cannot be combined with policy kvzip, which cannot score again while the "
       "model generates",
       changed(Pruning::parse("kvzip@evict-ratio=0.5"),
               [](Pruning& p) {
                 p.decode.every = 4;
                 p.decode.keep = 9;
               })},
      {Code::missing,
       {Field::decode_every, Field::policy},
       "policy tova with cam needs decode_every N: cam takes up rows that cuts evict while the "
       "model generates",
       Pruning::parse("tova+cam@evict-ratio=0.5")},
      {Code::conflict,
       {Field::prune, Field::policy},
       "prune always cannot be combined with policy tova, which cannot judge new tokens one by "
       "one: leave it out, and cut the cache with decode_every N instead",
       Pruning::parse("tova@threshold=0@prune=always")},
      {Code::conflict,
       {Field::prune, Field::threshold},
       "prune always needs a threshold, which judges each pair as it leaves the window; while the "
       "model generates keep_tokens is met with decode_every N",
       Pruning::parse("knorm@keep-tokens=9@prune=always")},
      {Code::conflict,
       {Field::layerwise, Field::policy},
       "layerwise cannot be combined with policy snapkv; it applies to fastkvzip, kvzip, "
       "kvzip-plus",
       changed(half, [](Pruning& p) { p.layerwise = true; })},
  };
}

TEST(Pruning, NamesTheRuleThatIsBroken) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.text);
    const auto fault = find_fault(c.pruning, c.use);
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->text, c.text);
    EXPECT_EQ(fault->fields, c.fields);
    EXPECT_EQ(fault->code, c.code);
    try {
      check(c.pruning, c.use);
      FAIL();
    } catch (const PruningError& error) {
      EXPECT_EQ(error.what(), c.text);
      EXPECT_EQ(error.fault().fields, c.fields);
    }
  }
}

TEST(Pruning, LeavesUnknownPoliciesToTheParser) {
  const Pruning unknown = Pruning::parse("snapk@evict-ratio=0.5");
  for (const Pruning& pruning : {changed(unknown, [](Pruning& p) { p.layerwise = true; }),
                                 changed(unknown, [](Pruning& p) { p.surrogate = "."; })}) {
    EXPECT_THROW(find_fault(pruning), Error);
    EXPECT_THROW(pruning.spec(), Error);
  }
}

// The rules know fields; who asks has words for them.
TEST(Pruning, UsesTheWordsOfItsCaller) {
  const PruningNames flags = [](Field field) { return "--" + std::string(name_of(field)); };
  const auto fault = find_fault(Pruning::parse("snapkv"), {}, flags);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->text,
            "--policy snapkv needs one of --threshold, --evict_ratio, --keep_tokens and "
            "--kv_budget: how much is evicted");
}

TEST(Pruning, LetsGoodOnesPass) {
  for (const char* text :
       {"none", "snapkv@evict-ratio=0.5", "snapkv@evict-ratio=0.5@prune-after=question",
        "knorm@keep-tokens=100@decode-every=16@decode-keep=64", "knorm@threshold=-1",
        "knorm+cam@evict-ratio=0@decode-every=16@decode-keep=64", "streaming-llm@kv-budget=1MiB",
        "knorm+ada@evict-ratio=0.9@prefill=sparse"}) {
    EXPECT_FALSE(find_fault(Pruning::parse(text))) << find_fault(Pruning::parse(text))->text;
  }
  EXPECT_FALSE(find_fault(kvzap_pruning().threshold(-4)));
  EXPECT_FALSE(find_fault(kvzap_pruning().evict_ratio(0.7)));
  EXPECT_FALSE(find_fault(kvzap_pruning().recommended_threshold()));
  PruningUse plan;
  plan.plans = true;
  EXPECT_FALSE(find_fault(Pruning::none().evict_ratio(0.7), plan));
}

TEST(Pruning, HasItsPolicyWithSurrogateAndLayerwise) {
  Pruning pruning = Pruning::parse("kvzip:chunk=40@layerwise=on@evict-ratio=0.5");
  EXPECT_TRUE(pruning.spec().arguments.flag("layerwise"));
  EXPECT_EQ(pruning.spec().repeat_chunk(), 40);
  EXPECT_EQ(pruning.policy_text(), "kvzip:layerwise=on,chunk=40");
  pruning.policy = "kvzip:layerwise=off";
  EXPECT_THROW(pruning.spec(), PruningError);
  pruning = kvzap_pruning();
  EXPECT_EQ(pruning.info()->name, "kvzap");
  EXPECT_EQ(pruning.spec().arguments.text("surrogate"), ".");
  EXPECT_EQ(pruning.policy_text(), "kvzap:surrogate=.");
  pruning.policy = "kvzap+ada:alpha=1";
  EXPECT_EQ(pruning.policy_text(), "kvzap:surrogate=.+ada:alpha=1");
  EXPECT_FALSE(pruning.lacks_surrogate());
  pruning.surrogate.clear();
  EXPECT_TRUE(pruning.lacks_surrogate());
  EXPECT_EQ(Pruning::none().info(), nullptr);
  EXPECT_EQ(Pruning::none().policy_text(), "");
}

// Its name is that of a policy with a surrogate, whose rules it does not have.
TEST(Pruning, TakesAPolicyOfTheCallersOwn) {
  const auto own = std::make_shared<PolicyInfo>();
  own->name = "kvzap";
  Pruning pruning = Pruning::none().evict_ratio(0.5);
  pruning.policy = PolicyText(own);
  EXPECT_FALSE(find_fault(pruning));
  EXPECT_EQ(pruning.spec().info, own.get());
  EXPECT_FALSE(pruning.looks_up_threshold());
  pruning.mode = PruneMode::always;
  ASSERT_TRUE(find_fault(pruning));
  EXPECT_EQ(find_fault(pruning)->fields, (std::vector<Field>{Field::prune, Field::threshold}));
}

TEST(Pruning, MakesABudget) {
  EXPECT_FALSE(kvzap_pruning().threshold(-4).budget().has_amount());
  EXPECT_EQ(Pruning::parse("tova@keep-tokens=7").budget().keep_tokens, 7);
  EXPECT_EQ(Pruning::parse("tova@kv-budget=7M").budget().bytes, 7000000);
}

// An evict ratio has one meaning for kvzap, however its surrogate is named.
TEST(Pruning, LooksUpTheThresholdOfAnEvictRatioForPlainKvzap) {
  for (const char* text : {"@surrogate=a", "kvzap@surrogate=a", "kvzap:surrogate=a"}) {
    const Pruning pruning = Pruning::parse(text);
    EXPECT_EQ(pruning.plain_surrogate(), "a");
    EXPECT_TRUE(Pruning(pruning).evict_ratio(0.5).looks_up_threshold());
    EXPECT_FALSE(Pruning(pruning).keep_tokens(5).looks_up_threshold());
  }
  EXPECT_EQ(Pruning::parse("kvzap:surrogate=a\\,b\\+c").plain_surrogate(), "a,b+c");
  for (const char* text : {"kvzap+ada@surrogate=a", "kvzap:surrogate=a+ada:alpha=1", "snapkv"}) {
    EXPECT_FALSE(Pruning::parse(text).evict_ratio(0.5).looks_up_threshold()) << text;
  }
}

TEST(Pruning, LooksUpARecommendedThreshold) {
  EXPECT_TRUE(kvzap_pruning().recommended_threshold().looks_up_threshold());
  EXPECT_TRUE(Pruning::parse("kvzap@surrogate=.@threshold=auto").looks_up_threshold());
  EXPECT_FALSE(kvzap_pruning().recommended_threshold().threshold(-4).looks_up_threshold());
  EXPECT_FALSE(kvzap_pruning().threshold(-4).recommended_threshold().amount.threshold);
  EXPECT_FALSE(kvzap_pruning().recommended_threshold().budget().has_amount());
  PruningUse plan;
  plan.plans = true;
  EXPECT_FALSE(find_fault(kvzap_pruning().recommended_threshold(), plan));
}

TEST(Pruning, TakesTheWindowOfASurrogate) {
  const Pruning pruning = Pruning::parse("kvzap@surrogate=.@threshold=-4@window=auto");
  EXPECT_TRUE(pruning.auto_window);
  EXPECT_EQ(pruning.text(), "kvzap@surrogate=.@threshold=-4@window=auto");
  EXPECT_EQ(Pruning::parse(pruning.text()), pruning);
  EXPECT_NE(Pruning::parse("kvzap@surrogate=.@threshold=-4"), pruning);
  EXPECT_FALSE(Pruning::parse("@window=128", pruning).auto_window);
  EXPECT_FALSE(find_fault(pruning));
  EXPECT_EQ(Pruning::parse("kvzap+ada@surrogate=a").used_surrogate(), "a");
  EXPECT_EQ(Pruning::parse("kvzap:surrogate=b+ada").used_surrogate(), "b");
  EXPECT_EQ(Pruning::parse("snapkv@surrogate=a").used_surrogate(), "");
  for (const char* text :
       {"snapkv@evict-ratio=0.5@window=auto", "@window=auto", "@window=auto@prune=none"}) {
    const auto fault = find_fault(Pruning::parse(text));
    ASSERT_TRUE(fault) << text;
    EXPECT_EQ(fault->code, PruningFault::Code::missing);
    EXPECT_EQ(fault->fields, (std::vector<Field>{Field::window, Field::surrogate}));
    EXPECT_NE(fault->text.find("window auto needs surrogate DIR"), std::string::npos);
  }
  EXPECT_THROW(Pruning::parse("kvzap@window=automatic"), Error);
}

}  // namespace
}  // namespace kvzap
