// The rulebook: which parts of a Pruning can be combined. Flags, requests, lists of settings and
// code all ask here.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <kvzap/engine/pruning.hpp>
#include <limits>

#include "model/cache_layers.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap {
namespace {

using Code = PruningFault::Code;
using F = PruningField;

/// What the rules ask about: a Pruning, its use, and its policy.
struct Case {
  Case(const Pruning& pruning, const PruningNames& field_names, PruningUse its_use = {})
      : p(pruning),
        names(field_names),
        use(its_use),
        threshold(pruning.amount.threshold),
        mode(pruning.mode_in_force()),
        has_judge(pruning.has_policy()),
        is_plain_kvzap(pruning.is_plain_kvzap()) {
    if (p.amount.evict_ratio) budgets.push_back(F::evict_ratio);
    if (p.amount.keep_tokens) budgets.push_back(F::keep_tokens);
    if (p.amount.kv_bytes) budgets.push_back(F::kv_budget);
  }

  /// Returns whether the text names a policy without this property. parse_policy has an error for a
  /// policy that is not in the registry.
  bool lacks(std::string PolicyInfo::*property) const {
    const PolicyInfo* const own = p.policy.info();
    const bool is_unknown = !own && !p.policy.name().empty();
    return !p.policy.empty() && !is_unknown && (!own || (own->*property).empty());
  }
  /// Returns whether the policy has this property, a parameter, and the text gives it.
  bool gives(std::string PolicyInfo::*property) const {
    return p.policy.info() && p.policy.value(p.policy.info()->*property);
  }

  const Pruning& p;
  const PruningNames& names;
  PruningUse use;
  std::vector<F> budgets;  // the fields that give one
  std::optional<double> threshold;
  PruneMode mode;
  bool has_judge;  // a policy or a scorer
  bool is_plain_kvzap;
  // For the rules of a policy.
  const PolicyInfo* info = nullptr;
  bool has_modifiers = false;
  bool needs_decode_cuts = false;  // a modifier does
  bool has_budget = false;         // a budget chooses rows
  bool has_threshold = false;      // a threshold does
  std::string why_once;            // PolicyChoice::why_once
  bool marks_scores = false;       // PolicyChoice::scores_are_marked
};

/// The text names the rule's fields by their places, {0}, and other fields by their names,
/// {threshold}. Also: {value}; {own}, the field and the name of the policy; {budgets and} and
/// {budgets or}, the fields of all budgets.
struct Rule {
  Rule(bool broken, Code its_code, std::vector<F> its_fields, const char* its_text,
       std::string its_value = {})
      : is_broken(broken),
        code(its_code),
        fields(std::move(its_fields)),
        text(its_text),
        value(std::move(its_value)) {}

  bool is_broken;
  Code code;
  std::vector<F> fields;
  const char* text;
  std::string value;
};
using Rules = std::vector<Rule>;

/// The names of the policies that support Pruning::layerwise.
std::string layerwise_policies() {
  std::string names;
  for (const PolicyInfo& info : policies()) {
    if (!info.layerwise.empty()) names += (names.empty() ? "" : ", ") + info.name;
  }
  return names;
}

Rule at_least(std::int64_t least, F field, std::optional<std::int64_t> number) {
  return Rule(
      number && *number < least, Code::out_of_range, {field},
      least == 0 ? "{0} is {value}; expected 0 or more" : "{0} is {value}; expected at least 1",
      std::to_string(number.value_or(0)));
}

Rule within_1(F field, std::optional<double> ratio) {
  // Written so that NaN does not pass.
  return Rule(ratio && !(*ratio >= 0 && *ratio < 1), Code::out_of_range, {field},
              "{0} is {value}; expected at least 0 and less than 1",
              fmt::format("{}", ratio.value_or(0)));
}

Rules ranges(const Case& c) {
  const Pruning& p = c.p;
  const double threshold = c.threshold.value_or(0);
  return {
      at_least(1, F::window, p.window),
      Rule(p.auto_window && p.used_surrogate().empty(), Code::missing, {F::window, F::surrogate},
           "{0} auto needs {1} DIR: the surrogate's table of thresholds has the windows"),
      at_least(0, F::sink, p.sink),
      at_least(1, F::chunk, p.chunk),
      Rule(p.window > 1 << 24, Code::out_of_range, {F::window},
           "{0} is {value}; expected at most 16777216", std::to_string(p.window)),
      Rule(std::isnan(threshold), Code::out_of_range, {F::threshold},
           "{0} is NaN; expected a number (no score is below NaN)"),
      Rule(std::isfinite(threshold) && std::fabs(threshold) > std::numeric_limits<float>::max(),
           Code::out_of_range, {F::threshold},
           "{0} is {value}; expected a number in the range of float, or inf or -inf",
           fmt::format("{}", threshold)),
      within_1(F::evict_ratio, p.amount.evict_ratio),
      at_least(1, F::keep_tokens, p.amount.keep_tokens),
      Rule(p.amount.kv_bytes.value_or(1) < 1, Code::out_of_range, {F::kv_budget},
           "{0} is {value}; expected at least 1 byte",
           std::to_string(p.amount.kv_bytes.value_or(0))),
  };
}

Rules amounts(const Case& c) {
  std::vector<F> given = c.budgets;
  // A plan does not use the threshold.
  if (c.p.amount.has_threshold() && !c.use.plans) given.insert(given.begin(), F::threshold);
  return {
      Rule(given.size() > 1, Code::several_amounts, given,
           "{0} and {1} each say how much is evicted: give one of {threshold}, {budgets and}"),
  };
}

Rules decode_cuts(const Case& c) {
  const Pruning::DecodeCuts& decode = c.p.decode;
  const bool has_target = decode.keep || decode.evict_ratio;
  const F target = decode.keep ? F::decode_keep : F::decode_evict_ratio;
  return {
      at_least(0, F::decode_every, decode.every),
      at_least(1, F::decode_keep, decode.keep),
      within_1(F::decode_evict_ratio, decode.evict_ratio),
      Rule(decode.keep && decode.evict_ratio, Code::several_amounts,
           {F::decode_keep, F::decode_evict_ratio},
           "{0} and {1} each say how much stays: give one of them"),
      Rule(decode.every != 0 && !has_target, Code::missing,
           {F::decode_keep, F::decode_evict_ratio, F::decode_every},
           "{2} needs {0} or {1}: how much stays"),
      Rule(decode.every <= 0 && has_target, Code::no_effect, {target, F::decode_every},
           "{0} has no effect without {1}"),
      Rule(decode.every != 0 && c.p.mode == PruneMode::none, Code::no_effect,
           {F::decode_every, F::prune}, "{0} has no effect with {1} none"),
  };
}

Rules recommended_threshold(const Case& c) {
  return {
      Rule(c.p.amount.recommended && !c.is_plain_kvzap, Code::missing, {F::threshold, F::surrogate},
           "{0} auto needs {1} DIR, and no {policy} but kvzap: the threshold is one of the "
           "surrogate's scores"),
  };
}

Rules judge(const Case& c) {
  return {
      Rule(c.mode != PruneMode::none && !c.has_judge, Code::missing, {F::surrogate, F::policy},
           "{prune} {value} needs {0} DIR or {1} NAME", std::string(name_of(c.mode))),
  };
}

Rules presence(const Case& c) {
  const bool has_threshold = c.p.amount.has_threshold();
  const bool has_policy = c.p.has_policy();
  const bool has_budget = !c.budgets.empty();
  return {
      Rule(!has_policy && has_threshold, Code::no_effect, {F::threshold, F::policy},
           "{0} has no effect without {surrogate} or {1}: no pair has a score"),
      Rule(!has_policy && has_budget && !c.use.plans, Code::no_effect,
           {has_budget ? c.budgets[0] : F::evict_ratio, F::policy},
           "{0} has no effect without {plan}, {1} or {surrogate}"),
      Rule(
          c.p.prunes() && !c.use.plans && c.is_plain_kvzap && !has_threshold && !has_budget,
          Code::missing, {F::threshold, F::evict_ratio, F::keep_tokens, F::kv_budget},
          "{surrogate} needs {0}, the log score below which a pair is evicted (auto: the one that "
          "kvzap calibrate has recommended), or {1}, for which one is looked up, or one of {2} and "
          "{3}"),
      Rule(c.p.decode.every != 0 && !has_policy, Code::no_effect, {F::decode_every, F::policy},
           "{0} has no effect without {1} or {surrogate}"),
  };
}

/// For PruneMoment::question.
Rules question(const Case& c) {
  const Pruning::Amount& amount = c.p.amount;
  const bool runs = !c.use.plans;
  return {
      Rule(!c.p.prunes(), Code::no_effect, {F::prune_after, F::policy},
           "{0} question has no effect without {1} or {surrogate}"),
      Rule(runs && c.p.looks_up_threshold() && !amount.recommended, Code::conflict,
           {F::prune_after, F::evict_ratio},
           "{0} question needs a budget: kvzap reaches {1} by a threshold, {policy} "
           "kvzap+ada:alpha=1 by a budget of each head"),
      Rule(runs && amount.has_threshold() && c.is_plain_kvzap, Code::conflict,
           {F::prune_after, F::threshold},
           "{0} question needs a budget, one of {budgets and}: with {1} each pair is judged by "
           "itself"),
      Rule(runs && !c.use.has_question, Code::missing, {F::question, F::prune_after},
           "{1} question needs {0}"),
  };
}

/// For PruneMoment::question.
Rules one_step(const Case& c) {
  const PolicyInfo* const info = c.info ? c.info : c.p.info();
  const bool scores_by_question = info && info->needs_question;
  return {
      Rule(c.p.prefill != PrefillMode::dense && !scores_by_question, Code::conflict,
           {F::prefill, F::prune_after},
           "{1} question runs context and question as one step: it needs {0} dense"),
  };
}

/// Rules of Pruning::layerwise and Pruning::surrogate, which set arguments of the policy.
Rules policy_fields(const Case& c) {
  const Pruning& p = c.p;
  const bool has_surrogate = !p.surrogate.empty();
  return {
      Rule(p.layerwise && p.policy.empty(), Code::conflict, {F::layerwise, F::policy},
           "{0} has no effect without {1} ({value})", layerwise_policies()),
      Rule(p.layerwise && c.lacks(&PolicyInfo::layerwise), Code::conflict,
           {F::layerwise, F::policy}, "{0} cannot be combined with {own}; it applies to {value}",
           layerwise_policies()),
      Rule(p.layerwise && c.gives(&PolicyInfo::layerwise), Code::several_amounts,
           {F::layerwise, F::policy},
           "{0} and {1} {value} both say whether layers share a budget: give one of them",
           p.policy.text()),
      Rule(p.lacks_surrogate(), Code::missing, {F::surrogate, F::policy}, "{own} needs {0} DIR"),
      Rule(has_surrogate && c.lacks(&PolicyInfo::surrogate), Code::conflict,
           {F::surrogate, F::policy}, "{0} is for {1} {value}; {own} does not use it",
           policy::with_surrogate().name),
      Rule(has_surrogate && c.gives(&PolicyInfo::surrogate), Code::several_amounts,
           {F::surrogate, F::policy}, "{0} and {1} both name a surrogate: give one of them"),
  };
}

/// Exactly one setting determines the number of rows that stay.
Rules policy_amount(const Case& c) {
  const bool has_own = c.info->has_own_budget;
  const bool has_none = !c.p.amount.has_threshold() && c.budgets.empty();
  return {
      // A modifier may supply its own threshold; make_policy checks that.
      Rule(!has_own && c.p.prunes() && !c.use.plans && has_none && !c.has_modifiers, Code::missing,
           {F::evict_ratio, F::threshold, F::keep_tokens, F::kv_budget},
           "{own} needs one of {threshold}, {budgets and}: how much is evicted"),
      Rule(has_own && !has_none, Code::conflict,
           {c.budgets.empty() ? F::threshold : c.budgets[0], F::policy},
           "{0} cannot be combined with {own}, which sets its own amount"),
      Rule(has_own && c.p.decode.every != 0, Code::conflict, {F::decode_every, F::policy},
           "{0} cannot be combined with {own}, which sets its own amount"),
  };
}

/// The policy can do what the Pruning asks of it.
Rules abilities(const Case& c) {
  const PolicyInfo& info = *c.info;
  const bool after_question = c.p.moment == PruneMoment::question;
  const bool cuts = c.p.decode.every != 0;
  const bool scores_chunks = (info.scores_again || info.needs_question) && !info.has_own_budget;
  return {
      Rule(info.repeats_context && c.p.amount.has_threshold(), Code::conflict,
           {F::threshold, F::policy},
           "{0} cannot be combined with {own}, which keeps a share of all pairs, whatever their "
           "scores: give {budgets or}"),
      Rule(
          info.repeats_context && after_question, Code::conflict, {F::prune_after, F::policy},
          "{0} question cannot be combined with {own}: the model runs the context again before any "
          "question"),
      Rule(info.repeats_context && c.p.mode == PruneMode::always, Code::conflict,
           {F::prune, F::policy},
           "{0} always cannot be combined with {own}, which scores the context alone"),
      Rule(info.needs_question && !after_question, Code::missing, {F::prune_after, F::policy},
           "{own} needs {0} question: the question decides its scores"),
      Rule(after_question && info.judges_tokens && c.has_threshold, Code::conflict,
           {F::prune_after, F::threshold},
           "{0} question needs a budget, one of {budgets and}: {own} judges each pair by itself, "
           "whatever the question"),
      Rule(c.needs_decode_cuts && !info.scores_again, Code::conflict, {F::policy},
           "{own} cannot have cam, which takes up rows of cuts while the model generates: the "
           "policy "
           "cannot score again then"),
      Rule(c.needs_decode_cuts && c.has_threshold, Code::conflict, {F::threshold, F::policy},
           "{own} with cam needs a budget, one of {budgets and}, instead of {0}"),
      Rule(c.needs_decode_cuts && !cuts, Code::missing, {F::decode_every, F::policy},
           "{own} with cam needs {0} N: cam takes up rows that cuts evict while the model "
           "generates"),
      Rule(c.p.prefill != PrefillMode::dense && info.needs_question && c.marks_scores,
           Code::conflict, {F::prefill, F::policy},
           "{0} sparse of {own} cannot be combined with critical: its first stage would count the "
           "question's rows, which leave after each chunk"),
      Rule(cuts && !info.scores_again, Code::conflict, {F::decode_every, F::policy},
           "{0} cannot be combined with {own}, which cannot score again while the model generates"),
      Rule(cuts && info.has_own_budget, Code::conflict, {F::decode_every, F::policy},
           "{0} cannot be combined with {own}, which sets its own amount"),
      Rule(cuts && !c.why_once.empty(), Code::conflict, {F::decode_every, F::policy},
           "{0} cannot be combined with {own}: {value}", c.why_once),
      Rule(c.p.prefill != PrefillMode::dense && !c.why_once.empty() && c.marks_scores,
           Code::conflict, {F::prefill, F::policy},
           "{0} sparse cannot be combined with {own}: {value}", c.why_once),
      Rule(c.p.prefill != PrefillMode::dense && !scores_chunks, Code::conflict,
           {F::prefill, F::policy},
           "{0} sparse cannot be combined with {own}, which cannot score again after each chunk"),
      Rule(c.p.prefill != PrefillMode::dense && info.needs_question && c.has_threshold,
           Code::conflict, {F::prefill, F::threshold},
           "{0} sparse of {own} needs a budget, one of {budgets and}: scores of one chunk do not "
           "compare with those of another"),
  };
}

/// For PruneMode::always.
Rules always(const Case& c) {
  return {
      Rule(c.info->has_own_budget, Code::conflict, {F::prune, F::policy},
           "{0} always cannot be combined with {own}, which sets its own amount"),
      // A cut moves rows out of the ring, unjudged. Which rows these are depends on the rank's
      // heads.
      Rule(!c.has_budget && c.p.decode.every != 0, Code::conflict, {F::prune, F::decode_every},
           "{0} always judges each pair by the threshold of {own}, {1} cuts to a number of them: "
           "give one of the two"),
      Rule(!c.has_budget && !c.info->judges_tokens, Code::conflict, {F::prune, F::policy},
           "{0} always cannot be combined with {own}, which cannot judge new tokens one by one: "
           "leave it out, and cut the cache with {decode_every} N instead"),
      Rule(
          c.has_budget && c.p.decode.every <= 0, Code::conflict, {F::prune, F::threshold},
          "{0} always needs a threshold, which judges each pair as it leaves the window; while the "
          "model generates {value} is met with {decode_every} N",
          c.budgets.empty() ? "a budget" : c.names(c.budgets[0])),
  };
}

/// Returns the text of a key in the braces of Rule::text.
std::string shown(std::string_view key, const Rule& rule, const Case& c) {
  if (key.size() == 1) return c.names(rule.fields.at(static_cast<std::size_t>(key[0] - '0')));
  if (key == "value") return rule.value;
  if (key == "own") return c.names(F::policy) + " " + (c.info ? c.info->name : c.p.policy.name());
  if (key.substr(0, 8) == "budgets ") {
    return fmt::format("{}, {} {} {}", c.names(F::evict_ratio), c.names(F::keep_tokens),
                       key.substr(8), c.names(F::kv_budget));
  }
  for (int field = 0; field <= static_cast<int>(F::plan); ++field) {
    if (name_of(static_cast<F>(field)) == key) return c.names(static_cast<F>(field));
  }
  throw Error(fmt::format("the rules of policies have no {}", key));
}

std::string text_of(const Rule& rule, const Case& c) {
  std::string result;
  std::string_view text = rule.text;
  for (std::size_t open = 0; (open = text.find('{')) != std::string_view::npos;) {
    const std::size_t close = text.find('}', open);
    result += text.substr(0, open);
    result += shown(text.substr(open + 1, close - open - 1), rule, c);
    text.remove_prefix(close + 1);
  }
  return result.append(text);
}

/// Returns the first broken rule.
std::optional<PruningFault> first_fault(const Case& c,
                                        std::initializer_list<Rules (*)(const Case&)> tables) {
  for (const auto table : tables) {
    for (const Rule& rule : table(c)) {
      if (rule.is_broken) return PruningFault{rule.code, rule.fields, text_of(rule, c)};
    }
  }
  return {};
}

void throw_fault(const std::optional<PruningFault>& fault) {
  if (fault) throw PruningError(*fault);
}

/// Checks the rules that do not depend on a policy's properties.
std::optional<PruningFault> general_fault(const Case& c) {
  auto fault =
      first_fault(c, {ranges, amounts, decode_cuts, recommended_threshold, judge, presence});
  if (!fault && c.p.moment == PruneMoment::question) fault = first_fault(c, {question, one_step});
  return fault ? fault : first_fault(c, {policy_fields});
}

/// Checks the rules that combine a Pruning with a policy.
std::optional<PruningFault> ability_fault(const Case& c) {
  auto fault = first_fault(c, {abilities});
  return fault || c.p.mode != PruneMode::always ? fault : first_fault(c, {always});
}

std::optional<PruningFault> policy_fault(Case c, const PolicySpec& spec) {
  c.info = spec.info;
  c.has_modifiers = !spec.modifiers.empty();
  c.needs_decode_cuts = spec.has_modifier(&ModifierInfo::needs_decode_cuts);
  // An evict ratio that is converted to a threshold by a table is no budget.
  const bool looks_up = c.p.looks_up_threshold();
  c.has_budget = c.p.has_budget(spec);
  c.has_threshold =
      c.p.amount.has_threshold() || looks_up || spec.has_modifier(&ModifierInfo::judges_rows);
  auto fault = first_fault(c, {policy_amount});
  return fault || !c.p.prunes() ? fault : ability_fault(c);
}

/// Returns the policy with the surrogate and layerwise as its arguments.
PolicyText full_policy(const Pruning& p, const PruningNames& names) {
  if (p.policy.is_own()) return p.policy;
  throw_fault(first_fault(Case(p, names), {policy_fields}));
  const PolicyInfo* const info = p.info();
  if (!info) return p.policy;  // parse_policy has an error for it
  PolicyText policy = p.policy.empty() ? info->name : p.policy;
  if (p.layerwise) policy.add(info->layerwise, "on");
  if (!p.surrogate.empty()) policy.add(info->surrogate, p.surrogate);
  return policy;
}

/// Returns a pruning by a policy of the caller's own as if it were loaded.
LoadedPruning planned(const Pruning& p) {
  auto choice = std::make_shared<PolicyChoice>();
  choice->name = p.policy.name();
  choice->info = p.policy.info();
  choice->budget = p.budget();
  choice->threshold = p.amount.threshold.value_or(0);
  return {p, choice};
}

}  // namespace

PolicySpec Pruning::spec(const PruningNames& names) const {
  return parse_policy(full_policy(*this, names));
}

std::string Pruning::policy_text(const PruningNames& names) const {
  return full_policy(*this, names).text();
}

std::optional<PruningFault> find_fault(const Pruning& p, const PruningUse& use,
                                       const PruningNames& names) {
  if (p.policy.is_own()) return find_fault(planned(p), /*has_scorer*/ false, names);
  const Case c(p, names, use);
  if (auto fault = general_fault(c)) return fault;
  if (!p.has_policy()) return {};
  return policy_fault(c, p.spec(names));
}

std::optional<PruningFault> find_fault(const LoadedPruning& pruning, bool has_scorer,
                                       const PruningNames& names) {
  Case c(pruning.pruning, names);
  c.mode = pruning.mode();
  c.has_judge = pruning.policy || has_scorer;
  auto fault = first_fault(c, {ranges, decode_cuts, judge});
  if (fault || !pruning.prunes()) return fault;
  c.has_budget = pruning.chooses_rows();
  c.has_threshold = !c.has_budget;
  if (c.has_threshold) c.threshold = pruning.threshold();
  if (pruning.policy) c.info = pruning.policy->info;
  if (c.p.moment == PruneMoment::question) fault = first_fault(c, {one_step});
  if (!fault) fault = first_fault(c, {ranges});
  if (fault || !c.info) return fault;
  c.why_once = pruning.policy->why_once;
  c.marks_scores = pruning.policy->scores_are_marked;
  c.needs_decode_cuts = pruning.policy->sums_attention;
  return ability_fault(c);
}

void check(const Pruning& p, const PruningUse& use, const PruningNames& names) {
  throw_fault(find_fault(p, use, names));
}

void check(const LoadedPruning& pruning, bool has_scorer, const PruningNames& names) {
  throw_fault(find_fault(pruning, has_scorer, names));
}

void check_budget(const Budget& budget, const ModelConfig& config, DType dtype, std::int64_t tokens,
                  const PageFormat& format) {
  if (!budget.has_amount()) return;
  const Budget::Model model = budget_model(config, size_of(dtype), format);
  for (int layer = 0; layer < static_cast<int>(config.num_hidden_layers); ++layer) {
    if (config.is_full(layer)) {
      budget.rows_per_head(model, layer, tokens);  // throws if it is too small
    }
  }
}

Budget::Model budget_model(const ModelConfig& config, std::size_t value_bytes,
                           const PageFormat& format) {
  Budget::Model model;
  model.layers = static_cast<int>(model::full_layers(config));
  if (model.layers < config.num_hidden_layers) {
    for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
      if (config.is_full(l)) model.pruned.push_back(l);
    }
  }
  model.kv_heads = static_cast<int>(config.num_key_value_heads);
  model.row_bytes = static_cast<std::int64_t>(page_row_values(
      static_cast<int>(config.head_dim), value_bytes, model::stored_format(config, format)));
  return model;
}

}  // namespace kvzap
