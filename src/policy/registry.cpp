#include "policy/registry.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "files/ascii.hpp"
#include "files/json_field.hpp"
#include "policy/named.hpp"

namespace kvzap {
namespace {

// A deque, because texts of policies point to their entries.
std::deque<PolicyInfo>& all_policies() {
  static std::deque<PolicyInfo> all = {
      policy::knorm(),         policy::random(),
      policy::streaming_llm(), policy::keydiff(),
      policy::lagkv(),         policy::leverage(),
      policy::cur(),           policy::compactor(),
      policy::qfilter(),       policy::cap(),
      policy::snapkv(),        policy::tova(),
      policy::h2o(),           policy::scissorhands(),
      policy::r_kv(),          policy::lazy_eviction(),
      policy::tri_attention(), policy::dropkv(),
      policy::pyramidkv(),     policy::expected_attention(),
      policy::non_causal(),    policy::simlayerkv(),
      policy::finch(),         policy::kvzap(),
      policy::fastkvzip(),     policy::trim_kv(),
      policy::duo_attention(), policy::kvzip(),
      policy::kvzip_plus(),    policy::kvcompose(),
  };
  return all;
}

/// Whether texts of policies, and command lines, can name a policy so.
bool is_name(std::string_view text) {
  const bool is_option = !text.empty() && text.front() == '-';
  return !text.empty() && !is_option && std::all_of(text.begin(), text.end(), [](char c) {
    return files::is_letter_or_digit(c) || c == '_' || c == '-';
  });
}

}  // namespace

const std::deque<PolicyInfo>& policies() { return all_policies(); }

void add_policy(PolicyInfo info) {
  if (!is_name(info.name)) {
    throw Error(
        fmt::format("the name of a policy is {}; expected letters, digits, _ and -, and no - "
                    "first",
                    files::abbreviated(info.name)));
  }
  if (info.name == "none" || policy::find_named(policies(), info.name) ||
      policy::find_named(modifiers(), info.name)) {
    throw Error(fmt::format("the policy {} exists; expected another name", info.name));
  }
  if (!info.make && !info.set_up) {
    throw Error(fmt::format("the policy {} has no function that makes it", info.name));
  }
  all_policies().push_back(std::move(info));
}

const std::vector<ModifierInfo>& modifiers() {
  // Order of application: modifiers of the amount, of the pools that share it, of scores, and of
  // the rows that stay. Each modifier sees the settings of those before it.
  static const std::vector<ModifierInfo> all = {
      policy::dms(),      policy::per_layer(), policy::per_head(), policy::pyramid(),   //
      policy::ada(),      policy::global(),                                             //
      policy::critical(), policy::chunk(),     policy::chunkkv(),                       //
      policy::kvcrush(),  policy::merge(),     policy::cam(),      policy::rerotate(),  //
      policy::fit(),
  };
  return all;
}

void PolicyInfo::set_up_after_make(ChoiceChange change) {
  if (!make) {
    make = [change](const PolicyArguments& arguments, const PolicySetup& setup) {
      PolicyChoice choice;
      change(choice, arguments, setup);
      return choice.make;
    };
    set_up = std::move(change);
    return;
  }
  set_up = [made = make, change = std::move(change)](
               PolicyChoice& choice, const PolicyArguments& arguments, const PolicySetup& setup) {
    choice.make = made(arguments, setup);
    change(choice, arguments, setup);
  };
}

bool PolicySpec::has_modifier(bool ModifierInfo::*property) const {
  return std::any_of(modifiers.begin(), modifiers.end(),
                     [&](const auto& modifier) { return modifier.first->*property; });
}

bool PolicySpec::has_amount_of_modifier() const {
  return std::any_of(modifiers.begin(), modifiers.end(), [](const auto& modifier) {
    const std::string& amount = modifier.first->amount;
    return !amount.empty() && modifier.second.has(amount);
  });
}

bool PolicySpec::pools_layers() const {
  return (!info->layerwise.empty() && !arguments.flag(info->layerwise)) ||
         has_modifier(&ModifierInfo::pools_layers);
}

std::int64_t PolicySpec::repeat_chunk() const {
  return info->repeat_chunk.empty() ? 0 : arguments.integer(info->repeat_chunk);
}

namespace {

void check_amount(const Budget& budget) {
  if (budget.amount == Budget::Amount::evict_ratio &&
      !(budget.evict_ratio >= 0 && budget.evict_ratio < 1)) {
    throw Error(fmt::format("the evict ratio is {}; expected at least 0 and less than 1",
                            budget.evict_ratio));
  }
  if (budget.amount == Budget::Amount::keep_tokens && budget.keep_tokens < 1) {
    throw Error(
        fmt::format("the number of tokens to keep is {}; expected at least 1", budget.keep_tokens));
  }
  if (budget.amount == Budget::Amount::bytes && budget.bytes < 1) {
    throw Error(fmt::format("the budget is {} bytes; expected at least 1", budget.bytes));
  }
}

std::string names_of_repeating_policies() {
  std::vector<std::string> names;
  for (const PolicyInfo& info : policies()) {
    if (info.repeats_context) names.push_back(info.name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

PolicyChoice make_policy(const PolicySpec& spec, const Budget& budget,
                         std::optional<double> threshold, const PolicySetup& setup) {
  const PolicyInfo& info = *spec.info;
  check_amount(budget);
  if (threshold && std::isnan(*threshold)) {
    throw Error(fmt::format("the threshold is {}; expected a number", *threshold));
  }
  if (threshold && budget.has_amount()) {
    throw Error(
        "a threshold and a budget are given: a threshold judges each pair by itself, a budget "
        "keeps "
        "a number of them; give one of the two");
  }
  if (info.has_own_budget) {
    if (threshold || budget.has_amount()) {
      throw Error(fmt::format(
          "policy {} decides by itself how many rows stay: give neither a threshold nor an evict "
          "ratio, a number of tokens or a size",
          info.name));
    }
    if (!spec.modifiers.empty()) {
      throw Error(fmt::format(
          "policy {} decides by itself which rows stay, as scores of 1 and 0: modifier {} has "
          "nothing to change",
          info.name, spec.modifiers[0].first->name));
    }
  }

  for (const auto& [modifier, arguments] : spec.modifiers) {
    if (info.repeats_context && !modifier->needs_repeat) {
      throw Error(fmt::format(
          "policy {} scores the context after the model has run it again, and has a budget "
          "of its own: it cannot have the modifier {}",
          info.name, modifier->name));
    }
    if (!info.repeats_context && modifier->needs_repeat) {
      throw Error(
          fmt::format("{}: {} needs a policy for which the model runs the context again; expected "
                      "one of {}",
                      spec.text, modifier->name, names_of_repeating_policies()));
    }
  }

  PolicyChoice choice;
  choice.name = spec.text;
  choice.info = &info;
  choice.budget = budget;
  choice.threshold = threshold.value_or(std::numeric_limits<double>::quiet_NaN());
  if (info.set_up) {
    info.set_up(choice, spec.arguments, setup);
  } else {
    choice.make = info.make(spec.arguments, setup);
  }
  const bool keeps_shape =
      std::all_of(spec.modifiers.begin(), spec.modifiers.end(),
                  [](const auto& modifier) { return modifier.first->keeps_shape; });
  if (info.shape && keeps_shape) info.shape(choice.budget, spec.arguments);
  for (const auto& [modifier, arguments] : spec.modifiers) {
    try {
      modifier->apply(choice, arguments, setup);
    } catch (const AgreedError&) {
      throw;
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", spec.text, error.what()));
    }
  }
  if (info.has_own_budget) choice.threshold = 0.5;
  if (!choice.budget.has_amount() && std::isnan(choice.threshold)) {
    throw Error(
        fmt::format("policy {} needs one of: a threshold, an evict ratio, a number of tokens to "
                    "keep, or a size "
                    "for the KV cache",
                    info.name));
  }
  if (choice.budget.has_amount()) choice.threshold = 0;
  return choice;
}

}  // namespace kvzap
