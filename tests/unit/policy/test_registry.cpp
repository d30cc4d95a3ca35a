// Policies and modifiers by name: what --policy takes, what it refuses, and with which words.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <kvzap/engine/pruning.hpp>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "files/nearest.hpp"
#include "policy/check_names.hpp"
#include "policy/registry.hpp"
#include "unit/policy/policy_names.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using test::expect_error;

TEST(NearestName, IsTheOneThatTakesFewestChanges) {
  const std::vector<std::string> names = {"window", "kernel", "pooling"};
  EXPECT_EQ(files::nearest_name("windw", names), "window");
  EXPECT_EQ(files::nearest_name("pool", names), "");
  EXPECT_EQ(files::nearest_name("kernels", names), "kernel");
  EXPECT_EQ(files::nearest_name("", {"a"}), "");
  EXPECT_EQ(files::nearest_name("x", {}), "");
}

TEST(PolicyList, HasAllNamesOnce) {
  std::vector<std::string> found;
  for (const PolicyInfo& info : policies()) found.push_back(info.name);
  EXPECT_EQ(found, test::policy_names());
  std::set<std::string> names(found.begin(), found.end());
  for (const ModifierInfo& info : modifiers()) EXPECT_TRUE(names.insert(info.name).second);
  EXPECT_EQ(names.size(), 44u);
}

void check_parameters(const std::string& name, const std::vector<PolicyParameter>& parameters) {
  using Kind = PolicyParameter::Kind;
  std::set<std::string> names;
  for (const PolicyParameter& parameter : parameters) {
    SCOPED_TRACE(name + ":" + parameter.name);
    EXPECT_TRUE(names.insert(parameter.name).second);
    EXPECT_FALSE(parameter.help.empty());
    EXPECT_EQ(parameter.name.find_first_of("=,+:_ "), std::string::npos);
    if (parameter.kind == Kind::integer || parameter.kind == Kind::number) {
      EXPECT_LT(parameter.least, parameter.most);
    }
    if (parameter.kind == Kind::text) {
      EXPECT_GE(parameter.choices.size(), 2u);
    }
    if (parameter.optional || parameter.kind == Kind::file) continue;
    EXPECT_FALSE(parameter.standard.empty());
  }
}

PolicyInfo own_policy(const std::string& name) {
  PolicyInfo info;
  info.name = name;
  info.parameters = policies().front().parameters;
  info.make = policies().front().make;
  return info;
}

std::string refusal_of(PolicyInfo info) {
  try {
    add_policy(std::move(info));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PolicyList, RefusesNamesThatAreTakenOrCannotBeWritten) {
  for (const char* name : {"snapkv", "ada", "none"}) {
    EXPECT_NE(refusal_of(own_policy(name)).find("exists"), std::string::npos) << name;
  }
  for (const char* name : {"", "a+b", "a:b", "a@b", "a=b", "a,b", "a b", "-", "--help"}) {
    EXPECT_NE(refusal_of(own_policy(name)).find("expected letters"), std::string::npos) << name;
  }
  PolicyInfo unmade = own_policy("unmade");
  unmade.make = nullptr;
  EXPECT_NE(refusal_of(unmade).find("no function"), std::string::npos);
  EXPECT_EQ(PolicyText("unmade").info(), nullptr);
}

// In a process of its own, because the list keeps what is added.
TEST(PolicyList, TakesPoliciesOfOthers) {
  const auto adds = [] {
    const Pruning before = Pruning::parse("snapkv+ada@evict-ratio=0.5");
    const PolicyInfo* const first = &policies().front();
    for (int i = 0; i < 100; ++i) add_policy(own_policy("own-" + std::to_string(i)));
    const Pruning own = Pruning::parse("own-7+ada@evict-ratio=0.5@decode-every=4@decode-keep=8");
    const bool is_right = own.info() && own.info()->name == "own-7" &&
                          before.info()->name == "snapkv" && first == &policies().front() &&
                          !refusal_of(own_policy("own-7")).empty();
    std::_Exit(is_right ? 0 : 1);
  };
  EXPECT_EXIT(adds(), testing::ExitedWithCode(0), "");
}

TEST(PolicyList, SaysWhatEachIs) {
  for (const PolicyInfo& info : policies()) {
    SCOPED_TRACE(info.name);
    for (const std::string& text : {info.paper, info.formula, info.needs, info.cost}) {
      EXPECT_FALSE(text.empty());
      EXPECT_EQ(text.find('\n'), std::string::npos);
    }
    EXPECT_TRUE(info.make);
    check_parameters(info.name, info.parameters);
  }
  for (const ModifierInfo& info : modifiers()) {
    SCOPED_TRACE(info.name);
    EXPECT_FALSE(info.paper.empty());
    EXPECT_FALSE(info.effect.empty());
    EXPECT_TRUE(info.apply);
    check_parameters(info.name, info.parameters);
  }
}

/// The name, with a file for every parameter that has to be given.
template <class Info>
std::string with_files(const Info& info, const std::string& file) {
  std::string text = info.name;
  for (const PolicyParameter& parameter : info.parameters) {
    if (!parameter.standard.empty() || parameter.optional) continue;
    text += (text == info.name ? ':' : ',') + parameter.name + "=" + file;
  }
  return text;
}

TEST(ParsePolicy, TakesEveryNameAndFillsInValues) {
  const test::TemporaryFolder folder;
  for (const PolicyInfo& info : policies()) {
    const PolicySpec spec = parse_policy(with_files(info, folder.path().string()));
    EXPECT_EQ(spec.info, &info);
    EXPECT_TRUE(spec.modifiers.empty());
    for (const PolicyParameter& parameter : info.parameters) {
      if (parameter.standard.empty()) continue;
      EXPECT_EQ(spec.arguments.text(parameter.name), parameter.standard);
    }
  }
  for (const ModifierInfo& info : modifiers()) {
    const PolicySpec spec = parse_policy("knorm+" + with_files(info, folder.path().string()));
    ASSERT_EQ(spec.modifiers.size(), 1u);
    EXPECT_EQ(spec.modifiers[0].first, &info);
  }
}

TEST(ParsePolicy, ReadsValues) {
  const PolicySpec spec =
      parse_policy("snapkv:window=32,pooling=max+critical:epsilon=1e-3+ada:alpha=0");
  EXPECT_EQ(spec.text, "snapkv:window=32,pooling=max+critical:epsilon=1e-3+ada:alpha=0");
  EXPECT_EQ(spec.info->name, "snapkv");
  EXPECT_EQ(spec.arguments.integer("window"), 32);
  EXPECT_EQ(spec.arguments.text("pooling"), "max");
  // Modifiers are applied in the order of their list, not of the text.
  ASSERT_EQ(spec.modifiers.size(), 2u);
  EXPECT_EQ(spec.modifiers[0].first->name, "ada");
  EXPECT_EQ(spec.modifiers[0].second.number("alpha"), 0.0);
  EXPECT_EQ(spec.modifiers[1].first->name, "critical");
  EXPECT_EQ(spec.modifiers[1].second.number("epsilon"), 1e-3);
  EXPECT_TRUE(parse_policy("h2o:normalize=on").arguments.flag("normalize"));
  EXPECT_FALSE(parse_policy("h2o:normalize=off").arguments.flag("normalize"));
  EXPECT_FALSE(parse_policy("knorm+dms").modifiers[0].second.has("threshold"));
  EXPECT_EQ(parse_policy("knorm+dms:threshold=-3.5").modifiers[0].second.number("threshold"), -3.5);
}

TEST(CheckNames, AcceptsWhatIsStillMissing) {
  for (const char* text : {"", "kvzap", "kvzap+ada", "qfilter:filters=no-such-file", "knorm+dms"}) {
    policy::check_names(text);
  }
  expect_error([] { policy::check_names("snpkv"); }, {"did you mean snapkv?"});
  expect_error([] { policy::check_names("snap"); }, {"did you mean snapkv?"});
  expect_error([] { policy::check_names("snapkv:windw=3"); }, {"did you mean window?"});
  expect_error([] { policy::check_names("snapkv:window=x"); }, {"expected a whole number"});
  expect_error([] { policy::check_names("snapkv+adda"); }, {"did you mean ada?"});
  expect_error([] { policy::check_names("knorm+snapkv"); }, {"both policies"});
}

TEST(ParsePolicy, FilesMayHaveCommasAndPluses) {
  const test::TemporaryFolder folder;
  folder.write("a,b+c=d:e", "");
  const std::string file = (folder.path() / "a,b+c=d:e").string();
  const PolicySpec spec =
      parse_policy("qfilter:filters=" + (folder.path() / "a\\,b\\+c=d:e").string() + "+ada");
  EXPECT_EQ(spec.arguments.text("filters"), file);
  EXPECT_EQ(spec.modifiers.size(), 1u);
}

TEST(PolicyText, KeepsAnyText) {
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (auto length = random() % 12; length > 0; --length) text += "ab:,=+\\@"[random() % 8];
    const PolicyText policy = text;
    EXPECT_EQ(policy.text(), text);
    EXPECT_EQ(policy.empty(), text.empty());
  }
}

TEST(PolicyText, HasItsParts) {
  const PolicyText text = "snapkv:window=32,pooling+ada:alpha=0,x=a\\,b+chunk";
  EXPECT_EQ(text.info()->name, "snapkv");
  EXPECT_EQ(text.value("window"), "32");
  EXPECT_EQ(text.value("pooling"), "");
  EXPECT_FALSE(text.value("alpha"));
  ASSERT_EQ(text.modifiers().size(), 2u);
  EXPECT_EQ(text.modifiers()[0].arguments, (std::vector<std::string>{"alpha=0", "x=a\\,b"}));
  EXPECT_EQ(PolicyText("snapk:window=32").info(), nullptr);
}

TEST(PolicyText, TakesAnotherArgument) {
  PolicyText text = "kvzap+ada:alpha=1";
  text.add("surrogate", "a,b+c");
  EXPECT_EQ(text.text(), "kvzap:surrogate=a\\,b\\+c+ada:alpha=1");
  EXPECT_EQ(text.value("surrogate"), "a,b+c");
}

TEST(PolicyText, ReplacesFiles) {
  std::vector<std::string> seen;
  const PolicyText text = "expected-attention:sink=2,statistics=a\\+b+ada:alpha=0";
  const PolicyText other = text.with_files(
      [&](const std::string& name, const PolicyParameter& parameter, const std::string& value) {
        seen = {name, parameter.name, value};
        return "c," + value;
      });
  EXPECT_EQ(seen, (std::vector<std::string>{"expected-attention", "statistics", "a+b"}));
  EXPECT_EQ(other, "expected-attention:sink=2,statistics=c\\,a\\+b+ada:alpha=0");
}

TEST(PolicyText, IsAPolicyOfTheCallersOwnWhateverItsName) {
  const auto own = std::make_shared<PolicyInfo>();
  own->name = "kvzap";
  const PolicyText text(own);
  EXPECT_EQ(parse_policy(text).info, own.get());
  EXPECT_EQ(text.text(), "kvzap");
  EXPECT_NE(text, "kvzap");
}

TEST(ParsePolicy, SaysHowTheContextIsRepeated) {
  for (const PolicyInfo& info : policies()) {
    EXPECT_EQ(info.repeats_context, !info.repeat_chunk.empty()) << info.name;
  }
  EXPECT_EQ(parse_policy("kvzip:chunk=40").repeat_chunk(), 40);
  EXPECT_EQ(parse_policy("knorm").repeat_chunk(), 0);
}

TEST(ParsePolicy, UnknownNames) {
  const auto refuse = [](const char* text, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(text);
    expect_error([&] { parse_policy(text); }, parts);
  };
  refuse("snapky", {"no policy \"snapky\"; did you mean snapkv?", "knorm, random, streaming-llm"});
  refuse("something", {"no policy \"something\". Policies: knorm"});
  refuse("", {"no policy \"\". Policies: knorm"});
  refuse("ada", {"ada is a modifier", "POLICY+ada"});
  refuse("snapkv+adda", {"no modifier \"adda\"; did you mean ada?", "rerotate"});
  refuse("snapkv+", {"no modifier \"\"", "rerotate"});
  refuse("snapkv+knorm", {"snapkv and knorm are both policies"});
  refuse("snapkv+ada+ada", {"ada is given twice"});
  refuse("snapkv:windw=3",
         {"snapkv has no parameter \"windw\"; did you mean window?", "window, kernel, pooling"});
  refuse("knorm:window=3", {"knorm has no parameter \"window\", nor any other"});
  refuse("snapkv+ada:aplha=0.1", {"modifier ada has no parameter \"aplha\"; did you mean alpha?"});
}

TEST(ParsePolicy, ValuesThatAreNotValid) {
  const auto refuse = [](const char* text, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(text);
    expect_error([&] { parse_policy(text); }, parts);
  };
  const std::string_view range = "expected a whole number from 1 to ";
  refuse("snapkv:window=0", {"policy snapkv: window is \"0\"", range});
  refuse("snapkv:window=3.5", {"window is \"3.5\"", range});
  refuse("snapkv:window=many", {"window is \"many\"", range});
  refuse("snapkv:window=", {"window is \"\"", range});
  refuse("snapkv:window=99999999999999999999", {range});
  refuse("snapkv:window", {"policy snapkv: \"window\" is not key=value"});
  refuse("snapkv:", {"policy snapkv: \"\" is not key=value"});
  refuse("snapkv:window=8,window=9", {"policy snapkv: window is given twice"});
  refuse("snapkv:pooling=median", {"pooling is \"median\"; expected one of mean, max"});
  refuse("h2o:normalize=yes", {"normalize is \"yes\"; expected on or off"});
  refuse("snapkv+ada:alpha=1.5", {"modifier ada: alpha is \"1.5\"; expected a number from 0 to 1"});
  refuse("snapkv+ada:alpha=nan", {"expected a number from 0 to 1"});
  refuse("knorm+dms:threshold=inf", {"threshold is \"inf\"; expected a number"});
  refuse("qfilter", {"policy qfilter needs filters", "(filters=FILE)"});
  refuse("qfilter:filters=/no/such/file", {"\"/no/such/file\"", "no such file"});
  refuse("knorm+per-layer", {"modifier per-layer needs ratios"});
}

class MakePolicy : public ::testing::Test {
 protected:
  MakePolicy() : m_partition(HeadPartition::even(4, 2, 1)) {
    m_config.num_hidden_layers = 4;
    m_config.num_key_value_heads = 2;
    m_folder.write("ratios", "0.1 0.2 0.3 0.4");
    m_folder.write("full_attention_heads.tsv", "1\t0\n1\t0\n0\t1\n1\t0\n");
    m_folder.write("config.json", R"({"sink_size": 2, "recent_size": 3})");
    m_ratios = "+per-layer:ratios=" + (m_folder.path() / "ratios").string();
    m_duo = "duo-attention:pattern=" + m_folder.path().string();
  }

  PolicyChoice make(const std::string& text, const Budget& budget,
                    std::optional<double> threshold = std::nullopt) const {
    return make_policy(parse_policy(text), budget, threshold,
                       {m_config, m_partition, DType::f32, {}, Communicator::self()});
  }
  static Budget half() {
    Budget budget;
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = 0.5;
    return budget;
  }
  void refuse(const std::string& text, const Budget& budget, std::optional<double> threshold,
              std::initializer_list<std::string_view> parts) const {
    SCOPED_TRACE(text);
    expect_error([&] { make(text, budget, threshold); }, parts);
  }

  ModelConfig m_config;
  HeadPartition m_partition;
  test::TemporaryFolder m_folder;
  std::string m_ratios;
  std::string m_duo;
};

TEST_F(MakePolicy, WithABudgetOrAThreshold) {
  PolicyChoice choice = make("knorm", half());
  EXPECT_EQ(choice.name, "knorm");
  EXPECT_EQ(choice.info->name, "knorm");
  EXPECT_EQ(choice.budget.pool, Budget::Pool::head);
  EXPECT_EQ(choice.threshold, 0);
  EXPECT_TRUE(choice.make());
  choice = make("knorm", {}, -2.5);
  EXPECT_FALSE(choice.budget.has_amount());
  EXPECT_EQ(choice.threshold, -2.5);
  EXPECT_EQ(make("knorm+dms", {}, -2.5).threshold, -2.5);
  EXPECT_EQ(make("knorm+dms:threshold=3", {}).threshold, 3);
  choice = make("knorm" + m_ratios, {});
  EXPECT_EQ(choice.budget.layer_ratios, (std::vector<double>{0.1, 0.2, 0.3, 0.4}));
  EXPECT_TRUE(choice.budget.has_amount());
  choice = make(m_duo, {});
  EXPECT_FALSE(choice.budget.has_amount());
  // Between its scores, 0 and 1.
  EXPECT_EQ(choice.threshold, 0.5);
}

TEST_F(MakePolicy, ThatLearnsFromTextsFirst) {
  EXPECT_FALSE(make(m_duo, {}).learner);
  const auto file = m_folder.path() / "ratios";
  const PolicyChoice choice = make("duo-attention:texts=" + file.string(), {});
  ASSERT_TRUE(choice.learner);
  EXPECT_EQ(choice.learner->texts(), file);
  expect_error([&] { choice.make(); }, {"its texts have not been run", "learn_from_texts"});
}

TEST_F(MakePolicy, ModifiersSetTheBudget) {
  EXPECT_EQ(make("knorm+ada:alpha=0.4", half()).budget.pool, Budget::Pool::layer);
  EXPECT_EQ(make("knorm+ada:alpha=0.4", half()).budget.safeguard, 0.4);
  EXPECT_EQ(make("knorm+global", half()).budget.pool, Budget::Pool::model);
  EXPECT_EQ(make("knorm+chunkkv:length=7", half()).budget.group, 7);
  EXPECT_EQ(make("knorm+chunk:length=7", half()).budget.chunk, 7);
  EXPECT_TRUE(make("knorm+rerotate", half()).rerotate);
  EXPECT_FALSE(make("knorm+ada", half()).merger);
  EXPECT_TRUE(make("knorm+merge:similarity=1,fraction=0.1", half()).merger);
  EXPECT_FALSE(make("knorm+merge", half()).sums_attention);
  EXPECT_TRUE(make("knorm+cam:window=1,seed=2", half()).merger);
  EXPECT_TRUE(make("knorm+cam", half()).sums_attention);
  const Budget pyramid = make("knorm+pyramid:window=3,beta=4", half()).budget;
  EXPECT_TRUE(pyramid.pyramid);
  EXPECT_EQ(pyramid.pyramid_window, 3);
  EXPECT_EQ(pyramid.pyramid_beta, 4);
}

TEST_F(MakePolicy, PyramidkvFallsWithDepthUnlessWrapped) {
  const Budget alone = make("pyramidkv:window=16,beta=5", half()).budget;
  EXPECT_TRUE(alone.pyramid);
  EXPECT_EQ(alone.pyramid_window, 16);
  EXPECT_EQ(alone.pyramid_beta, 5);
  // kvpress' presses around PyramidKVPress take its scores alone.
  for (const char* modifier :
       {"ada", "critical", "rerotate", "global", "chunkkv", "merge", "cam"}) {
    EXPECT_FALSE(make(std::string("pyramidkv+") + modifier, half()).budget.pyramid) << modifier;
  }
  EXPECT_TRUE(make("pyramidkv+ada+pyramid", half()).budget.pyramid);
}

TEST_F(MakePolicy, AmountsThatAreMissingOrTooMany) {
  refuse("knorm", {}, {}, {"knorm needs one of: a threshold, an evict ratio"});
  refuse("knorm+dms", {}, {}, {"needs one of"});
  refuse("knorm", half(), 1, {"a threshold and a budget are given"});
  refuse("knorm", {}, std::nan(""), {"the threshold is nan"});
  refuse("knorm+dms", half(), {}, {"dms has no meaning here", "a budget is given"});
  refuse("knorm+dms:threshold=1", {}, 2, {"another threshold is given"});
  refuse("knorm" + m_ratios, half(), {}, {"per-layer has no meaning", "its file gives"});
  refuse("knorm" + m_ratios, {}, 1, {"per-layer has no meaning"});
  refuse("duo-attention", {}, {}, {"duo-attention needs one of pattern=FILE", "texts=FILE"});
  refuse(m_duo + ",texts=" + (m_folder.path() / "ratios").string(), {}, {},
         {"duo-attention needs only one of pattern=FILE", "texts=FILE"});
  refuse(m_duo, half(), {}, {"duo-attention decides by itself how many rows stay"});
  refuse(m_duo, {}, 1, {"duo-attention decides by itself how many rows stay"});
  refuse(m_duo + "+ada", {}, {}, {"duo-attention decides by itself", "modifier ada"});
  Budget budget = half();
  budget.evict_ratio = 1;
  refuse("knorm", budget, {}, {"the evict ratio is 1; expected at least 0 and less than 1"});
  budget = {};
  budget.amount = Budget::Amount::keep_tokens;
  refuse("knorm", budget, {}, {"the number of tokens to keep is 0; expected at least 1"});
  budget.amount = Budget::Amount::bytes;
  refuse("knorm", budget, {}, {"the budget is 0 bytes"});
}

TEST_F(MakePolicy, CombinationsWithoutMeaning) {
  for (const char* modifier : {"ada", "global", "pyramid", "critical", "chunk", "chunkkv",
                               "kvcrush", "merge", "cam", "rerotate"}) {
    refuse(std::string("knorm+") + modifier, {}, 1, {modifier, "threshold"});
  }
  const Budget budget = half();
  refuse("knorm+ada+global", budget, {}, {"global has no meaning here", "give one"});
  refuse("knorm+pyramid+global", budget, {},
         {"global has no meaning", "cannot decrease with depth"});
  refuse("knorm+global" + m_ratios, {}, {}, {"global has no meaning", "its own ratio"});
  refuse("knorm+pyramid" + m_ratios, {}, {}, {"pyramid has no meaning", "per-layer"});
  refuse("pyramidkv" + m_ratios, {}, {},
         {"per-layer has no meaning", "already decreases with depth"});
  refuse("knorm+chunk+ada", budget, {}, {"chunk has no meaning", "heads cannot compete"});
  refuse("knorm+chunkkv+ada", budget, {}, {"chunkkv has no meaning", "heads cannot compete"});
  refuse("knorm+chunkkv+chunk", budget, {}, {"chunkkv has no meaning"});
  refuse("knorm+chunkkv+critical", budget, {}, {"chunkkv has no meaning", "critical marks"});
  refuse("snapkv+chunk", budget, {}, {"chunk has no meaning", "snapkv cannot score a part"});
  refuse("knorm+kvcrush+ada", budget, {}, {"kvcrush has no meaning", "heads cannot compete"});
  refuse("knorm+kvcrush+chunk", budget, {}, {"kvcrush has no meaning", "parts"});
  refuse("knorm+kvcrush+chunkkv", budget, {}, {"kvcrush has no meaning", "parts"});
  refuse("h2o+kvcrush", budget, {}, {"kvcrush has no meaning", "h2o continues"});
  refuse("h2o+critical+kvcrush", budget, {}, {"kvcrush has no meaning", "h2o continues"});
  refuse("knorm+rerotate+ada", budget, {}, {"rerotate has no meaning", "one length"});
  refuse("knorm+rerotate+pyramid", budget, {}, {"rerotate has no meaning", "one length"});
  refuse("knorm+rerotate+chunkkv", budget, {}, {"rerotate has no meaning", "chunkkv"});
  refuse("knorm+merge:fraction=0", budget, {}, {"fraction is \"0\"", "from 1e-06 to 1"});
  refuse("knorm+merge:fraction=1.5", budget, {}, {"fraction", "1.5"});
  refuse("knorm+merge:similarity=-0.1", budget, {}, {"similarity", "-0.1"});
  refuse("knorm+merge:similarty=0", budget, {}, {"similarty", "similarity"});
  refuse("knorm+merge", {}, 0.5, {"merge takes up the rows that a cut evicts"});
  refuse("knorm+cam:window=0", budget, {}, {"window", "0"});
  refuse("knorm+cam:seed=-1", budget, {}, {"seed", "-1"});
  refuse("knorm+cam", {}, 0.5, {"cam takes up rows that cuts of a budget evict"});
  refuse("knorm+cam+merge", budget, {}, {"cam and merge both change the values of kept rows"});
  refuse("knorm+fit", budget, {},
         {"knorm+fit: fit needs a policy", "kvzip, kvzip-plus, kvcompose"});
  refuse("kvzip+fit+merge", budget, {}, {"kvzip", "cannot have the modifier merge"});
  refuse("kvzip+fit:queries=0", budget, {}, {"queries", "0"});
  refuse("kvzip+fit:ridge=0", budget, {}, {"ridge", "0"});
}

TEST_F(MakePolicy, CombinationsWithMeaning) {
  for (const char* text : {"knorm+ada+pyramid",
                           "knorm+critical",
                           "knorm+critical+ada",
                           "knorm+critical+global",
                           "knorm+critical+pyramid",
                           "knorm+critical+chunk",
                           "knorm+critical+rerotate",
                           "snapkv+kvcrush",
                           "knorm+kvcrush+critical",
                           "knorm+kvcrush+pyramid",
                           "snapkv+kvcrush+rerotate",
                           "knorm+chunk+rerotate",
                           "knorm+chunk+pyramid",
                           "knorm+chunkkv+pyramid",
                           "knorm+merge",
                           "snapkv+merge+ada",
                           "keydiff+merge+global",
                           "knorm+chunkkv+merge",
                           "knorm+merge+rerotate",
                           "knorm+critical+merge",
                           "knorm+cam",
                           "h2o+cam",
                           "snapkv+cam+ada",
                           "knorm+cam+global+critical",
                           "knorm+chunkkv+cam",
                           "knorm+cam+rerotate",
                           "kvzip+fit",
                           "kvzip-plus:layerwise=on+fit:queries=1,ridge=10",
                           "kvcompose+fit"}) {
    EXPECT_TRUE(make(text, half()).make) << text;
  }
  for (const char* modifier : {"ada", "critical", "chunk", "chunkkv"}) {
    EXPECT_TRUE(make("knorm+" + (modifier + m_ratios), {}).make) << modifier;
  }
  // The scores bring ada's safeguard with them.
  EXPECT_EQ(make("knorm+critical+ada", half()).budget.safeguard, 0);
}

}  // namespace
}  // namespace kvzap
