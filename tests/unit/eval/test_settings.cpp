// Lists of policies, and the settings that they are made to with the general lists.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>

#include "eval/settings.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::Error;
using kvzap::eval::EvalSetting;
using kvzap::eval::parse_settings;
using kvzap::eval::setting_words;
using kvzap::eval::SettingsRequest;

// (parse_policy wants a surrogate that exists.)
SettingsRequest request(const std::string& policies) {
  SettingsRequest made;
  made.policies = policies;
  made.evict_ratios = {0, 0.5, 0.75};
  made.general.surrogate = ".";
  return made;
}

std::vector<std::string> labels(const SettingsRequest& request) {
  std::vector<std::string> all;
  for (const EvalSetting& setting : parse_settings(request)) all.push_back(setting.label);
  return all;
}

std::string error_of(const SettingsRequest& request) {
  try {
    parse_settings(request);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

using Labels = std::vector<std::string>;

TEST(EvalSettings, EveryPolicyGetsEveryRatioAndZeroIsTheFullCacheOnce) {
  EXPECT_EQ(labels(request("snapkv; h2o+ada;")),
            (Labels{"none", "snapkv@evict-ratio=0.5", "snapkv@evict-ratio=0.75",
                    "h2o+ada@evict-ratio=0.5", "h2o+ada@evict-ratio=0.75"}));
  SettingsRequest with_thresholds = request("kvzap;knorm;snapkv@evict-ratios=0.9");
  with_thresholds.evict_ratios = {0.5};
  with_thresholds.thresholds = {-4.25};
  EXPECT_EQ(labels(with_thresholds),
            (Labels{"kvzap@threshold=-4.25", "knorm@evict-ratio=0.5", "snapkv@evict-ratio=0.9"}));
  with_thresholds.recommended = true;
  with_thresholds.policies = "kvzap;kvzap+ada:alpha=1";
  EXPECT_EQ(labels(with_thresholds), (Labels{"kvzap@threshold=-4.25", "kvzap@threshold=auto",
                                             "kvzap+ada:alpha=1@evict-ratio=0.5"}));
}

TEST(EvalSettings, CutsOfAnswersAreNoFullCache) {
  const std::string cuts = "@decode-every=4@decode-keep=48";
  EXPECT_EQ(labels(request("knorm@evict-ratio=0" + cuts)), (Labels{"knorm@evict-ratio=0" + cuts}));
  EXPECT_NE(
      error_of(request("knorm@evict-ratio=0.5@prune-after=question" + cuts)).find("found question"),
      std::string::npos);
}

TEST(EvalSettings, PoliciesOfTheCaller) {
  auto info = std::make_shared<kvzap::PolicyInfo>();
  info->name = "python:value_norm";
  SettingsRequest own =
      request("python:value_norm;knorm@evict-ratio=0.5;python:value_norm@keep-tokens=9");
  own.own.emplace(info->name, info);
  EXPECT_EQ(labels(own), (Labels{"none", "python:value_norm@evict-ratio=0.5",
                                 "python:value_norm@evict-ratio=0.75", "knorm@evict-ratio=0.5",
                                 "python:value_norm@keep-tokens=9"}));
  const auto settings = parse_settings(own);
  EXPECT_EQ(settings[1].pruning.spec().info, info.get());
  EXPECT_EQ(settings[3].pruning.spec().info->name, "knorm");
  EXPECT_TRUE(settings[0].is_none());
  // They are checked by the rules of all policies.
  own.policies = "python:value_norm@evict-ratio=2";
  EXPECT_THROW(check(parse_settings(own).front().pruning), kvzap::PruningError);
  own.policies = "python:value_norm@threshold=1@prune=always";
  EXPECT_THROW(check(parse_settings(own).front().pruning), kvzap::PruningError);
  own.policies = "python:other";
  EXPECT_NE(error_of(own).find("python:other"), std::string::npos);
}

TEST(EvalSettings, EntriesHaveTypesOfRows) {
  const auto settings = parse_settings(request("none;none@kv-type=q4;snapkv@kv-type=q8,q4"));
  ASSERT_EQ(settings.size(), 5u);
  EXPECT_EQ(settings[0].kv_type, "");
  EXPECT_EQ(settings[1].label, "none@kv-type=q4");
  EXPECT_EQ(settings[1].kv_type, "q4");
  EXPECT_TRUE(settings[1].is_none());
  EXPECT_EQ(settings[2].label, "none@kv-type=q8,q4");  // the evict ratio 0
  EXPECT_EQ(settings[4].label, "snapkv@evict-ratio=0.75@kv-type=q8,q4");
  EXPECT_EQ(labels(request(settings[4].label)), (Labels{settings[4].label}));
  EXPECT_EQ(to_json(settings[4]).at("kv_type"), "q8,q4");
  EXPECT_FALSE(to_json(settings[0]).contains("kv_type"));
  EXPECT_EQ(setting_words(settings[1].label, 0), "none, kv type q4");
  EXPECT_EQ(setting_words(settings[4].label, 0.75), "snapkv, evict ratio 0.75, kv type q8,q4");
  EXPECT_NE(error_of(request("none@kv-type=q4@kv-type=q8")).find("given twice"), std::string::npos);
  EXPECT_NE(error_of(request("none@kv-type=")).find("no value"), std::string::npos);
}

TEST(EvalSettings, OwnSettingsReplaceGeneralOnes) {
  EXPECT_EQ(labels(request("none;kvzap@thresholds=-5,-4@prune=always;knorm@keep-tokens=128"
                           "@kv-budget=1MB;snapkv@prune-after=question@evict-ratios=0.5;"
                           "tova@prefill=sparse@evict-ratio=0.25;simlayerkv")),
            (Labels{"none", "kvzap@threshold=-5@prune=always", "kvzap@threshold=-4@prune=always",
                    "knorm@keep-tokens=128", "knorm@kv-budget=1MB",
                    "snapkv@evict-ratio=0.5@prune-after=question",
                    "tova@evict-ratio=0.25@prefill=sparse", "simlayerkv"}));
}

TEST(EvalSettings, LabelsAreUniqueAndGiveTheirSettingAgain) {
  SettingsRequest all = request(
      "none;snapkv:window=16@prune-after=question;snapkv:window=16;kvzap@thresholds=-5,1e-05"
      "@prune=always;knorm+dms:threshold=3;knorm+dms@threshold=3;tova@prefill=sparse;finch;snapkv;"
      "snapkv");
  const auto settings = parse_settings(all);
  const Labels made = labels(all);
  EXPECT_EQ(std::set<std::string>(made.begin(), made.end()).size(), made.size());
  for (const EvalSetting& setting : settings) {
    const auto again = parse_settings(request(setting.label));
    ASSERT_EQ(again.size(), 1u) << setting.label;
    EXPECT_EQ(kvzap::eval::to_json(again[0]), kvzap::eval::to_json(setting));
  }
}

TEST(EvalSettings, GeneralMomentsHoldForThePoliciesThatTheyGoWith) {
  SettingsRequest always = request("kvzap@evict-ratios=0.5@thresholds=-4;snapkv;kvzip");
  always.evict_ratios = {0.5};
  always.general.mode = kvzap::PruneMode::always;
  always.general.prefill = kvzap::PrefillMode::sparse;
  EXPECT_EQ(labels(always),
            (Labels{"kvzap@evict-ratio=0.5@prune=always@prefill=sparse",
                    "kvzap@threshold=-4@prune=always@prefill=sparse",
                    "snapkv@evict-ratio=0.5@prefill=sparse", "kvzip@evict-ratio=0.5"}));
  SettingsRequest question = request("finch;snapkv;kvzip");
  question.evict_ratios = {0.5};
  question.general.moment = kvzap::PruneMoment::question;
  EXPECT_EQ(labels(question),
            (Labels{"finch@evict-ratio=0.5", "snapkv@evict-ratio=0.5@prune-after=question",
                    "kvzip@evict-ratio=0.5"}));
  EXPECT_EQ(parse_settings(question)[0].pruning.moment, kvzap::PruneMoment::question);
  // A threshold judges pairs before the question.
  question.policies = "kvzap;kvzap+ada";
  EXPECT_EQ(labels(question),
            (Labels{"kvzap@evict-ratio=0.5", "kvzap+ada@evict-ratio=0.5@prune-after=question"}));
}

TEST(EvalSettings, AnEvictRatioOfKvzapIsToBeLookedUp) {
  const auto settings = parse_settings(request("kvzap;kvzap@evict-ratios=0.6;snapkv"));
  ASSERT_EQ(settings.size(), 6u);
  for (const std::size_t i : {1u, 2u, 3u}) {
    EXPECT_TRUE(settings[i].pruning.looks_up_threshold()) << settings[i].label;
    EXPECT_EQ(settings[i].has_general_amount, i < 3) << settings[i].label;
  }
  EXPECT_FALSE(settings[4].pruning.looks_up_threshold());
  EvalSetting found = settings[3];
  found.looked_up_ratio = found.pruning.amount.evict_ratio;
  found.pruning.amount = {};
  found.pruning.threshold(-3.5);
  const auto json = kvzap::eval::to_json(found);
  EXPECT_EQ(json["evict_ratio"], 0.6);
  EXPECT_EQ(json["threshold"], -3.5);
}

TEST(EvalSettings, SeparatorsBehindABackslashBelongToThePolicy) {
  const kvzap::test::TemporaryFolder folder;
  const auto surrogate = folder.path() / "a@b;c";
  std::filesystem::create_directory(surrogate);
  const std::string text =
      "kvzap:surrogate=" + (folder.path() / "a\\@b\\;c").string() + "@threshold=-4";
  const auto settings = parse_settings(request(text));
  ASSERT_EQ(settings.size(), 1u);
  EXPECT_EQ(settings[0].pruning.policy, "kvzap:surrogate=" + surrogate.string());
  EXPECT_EQ(settings[0].label, text);
}

TEST(EvalSettings, MessagesNameTheEntryAndTheNearestName) {
  const auto expect = [](const std::string& policies, const std::string& part) {
    const std::string message = error_of(request(policies));
    EXPECT_NE(message.find(part), std::string::npos) << policies << ": " << message;
  };
  expect("none;snapkw", "snapkw: ");
  expect("none;snapkw", "did you mean snapkv?");
  expect("snapkv@evict-ratoi=0.5", "did you mean evict-ratio?");
  expect("snapkv@evict-ratios=", "@evict-ratio is ''");
  expect("snapkv@evict-ratios=0.5@evict-ratio=0.25", "given twice");
  expect("snapkv@half", "is not @key=value");
  expect("snapkv@prune-after=answer", "is \"answer\"; expected context or question");
  expect("kvzap@thresholds=nan", "@threshold=nan; expected a finite threshold");
  expect("knorm@keep-tokens=1.5", "@keep-tokens is '1.5'; expected a whole number");
  expect("simlayerkv@evict-ratios=0.5", "has a built-in amount");
  expect("none@prefill=sparse", "the full cache has no settings");
  expect("knorm+dms", "no amount to evict");
  expect("snapkv@sink=4", "@sink is the same for all settings: give sink");
  expect("@prune=always", "there is no policy");
  expect(" ; ", "no policies");
  SettingsRequest without = request("kvzap");
  without.general.surrogate.clear();
  EXPECT_NE(error_of(without).find("needs surrogate DIR"), std::string::npos);
}

TEST(EvalSettings, LabelsInWordsShowTheEvictRatio) {
  EXPECT_EQ(setting_words("none", 0), "none");
  EXPECT_EQ(setting_words("kvzap@threshold=-5.50583", 0.7354, -5.50583),
            "kvzap, threshold -5.506 (74 % evicted)");
  EXPECT_EQ(setting_words("kvzap@threshold=auto@prune=always", 0.7354, -1.7),
            "kvzap, threshold auto, prune always (74 % evicted, threshold -1.700)");
  EXPECT_EQ(setting_words("kvzap@evict-ratio=0.75", 0.7354, -1.7),
            "kvzap, evict ratio 0.75 (74 % evicted, threshold -1.700)");
  EXPECT_EQ(setting_words("snapkv+ada@evict-ratio=0.5@prune-after=question", 0.5),
            "snapkv+ada, evict ratio 0.5, prune after question");
  EXPECT_EQ(setting_words("tova@keep-tokens=64", 0.937), "tova, keep tokens 64 (94 % evicted)");
  EXPECT_EQ(setting_words("simlayerkv", 0.333), "simlayerkv (33 % evicted)");
  EXPECT_EQ(setting_words("qfilter:filters=a\\@b\\;c@evict-ratio=0.5", 0.5),
            "qfilter:filters=a@b;c, evict ratio 0.5");
}

TEST(EvalSettings, EntriesTakeTheSettingsOfPruningTexts) {
  const auto settings = parse_settings(request(
      "kvzap@threshold=-4;kvzap@threshold=-4@surrogate=..;kvzip@layerwise=on@evict-ratio=0.5;"
      "tova@evict-ratio=0.5@prefill=sparse"));
  ASSERT_EQ(settings.size(), 4u);
  EXPECT_EQ(settings[0].pruning.surrogate, ".");
  EXPECT_EQ(settings[1].pruning.surrogate, "..");
  EXPECT_EQ(settings[1].label, "kvzap@surrogate=..@threshold=-4");
  EXPECT_TRUE(settings[2].pruning.layerwise);
  EXPECT_EQ(settings[3].label, "tova@evict-ratio=0.5@prefill=sparse");
}

}  // namespace
