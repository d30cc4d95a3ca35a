// The rulebook: which parts of a Pruning can be combined. Flags, requests, lists of settings and
// code all ask here.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <kvzap/engine/pruning.hpp>
#include <limits>

#include "model/cache_layers.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap {
namespace {

using Code = PruningFault::Code;
using Field = PruningField;

/// Collects the first rule that a Pruning breaks.
class Rules {
 public:
  explicit Rules(const PruningNames& names) : m_names(names) {}

  std::string name(Field field) const { return m_names(field); }
  /// `text` is only made for the first fault.
  template <class Text>
  void require(bool good, Code code, std::vector<Field> fields, const Text& text) {
    if (good || m_fault) return;
    m_fault = PruningFault{code, std::move(fields), text()};
  }
  std::optional<PruningFault> fault() const { return m_fault; }

 private:
  const PruningNames& m_names;
  std::optional<PruningFault> m_fault;
};

std::vector<Field> budget_fields(const Pruning& p) {
  std::vector<Field> fields;
  if (p.amount.evict_ratio) fields.push_back(Field::evict_ratio);
  if (p.amount.keep_tokens) fields.push_back(Field::keep_tokens);
  if (p.amount.kv_bytes) fields.push_back(Field::kv_budget);
  return fields;
}

std::string several_budgets(const Rules& rules, const char* conjunction) {
  return fmt::format("{}, {} {} {}", rules.name(Field::evict_ratio), rules.name(Field::keep_tokens),
                     conjunction, rules.name(Field::kv_budget));
}

bool has_modifier(const PolicySpec& spec, std::string_view name) {
  return std::any_of(spec.modifiers.begin(), spec.modifiers.end(),
                     [&](const auto& modifier) { return modifier.first->name == name; });
}

void check_at_least(Rules& rules, Field field, std::optional<std::int64_t> value,
                    std::int64_t least) {
  rules.require(!value || *value >= least, Code::out_of_range, {field}, [&] {
    return least == 0
               ? fmt::format("{} is {}; expected 0 or more", rules.name(field), *value)
               : fmt::format("{} is {}; expected at least {}", rules.name(field), *value, least);
  });
}

void check_ratio(Rules& rules, Field field, const std::optional<double>& ratio) {
  // Written so that NaN does not pass.
  rules.require(!ratio || (*ratio >= 0 && *ratio < 1), Code::out_of_range, {field}, [&] {
    return fmt::format("{} is {}; expected at least 0 and less than 1", rules.name(field), *ratio);
  });
}

void check_threshold(Rules& rules, const std::optional<double>& threshold) {
  const std::string name = rules.name(Field::threshold);
  rules.require(!threshold || !std::isnan(*threshold), Code::out_of_range, {Field::threshold}, [&] {
    return fmt::format("{} is NaN; expected a number (no score is below NaN)", name);
  });
  rules.require(!threshold || std::isinf(*threshold) ||
                    std::fabs(*threshold) <= std::numeric_limits<float>::max(),
                Code::out_of_range, {Field::threshold}, [&] {
                  return fmt::format(
                      "{} is {}; expected a number in the range of float, or inf or -inf", name,
                      *threshold);
                });
}

void check_ranges(Rules& rules, const Pruning& p) {
  check_at_least(rules, Field::window, p.window, 1);
  check_at_least(rules, Field::sink, p.sink, 0);
  check_at_least(rules, Field::chunk, p.chunk, 1);
  constexpr int most = 1 << 24;
  rules.require(p.window <= most, Code::out_of_range, {Field::window}, [&] {
    return fmt::format("{} is {}; expected at most {}", rules.name(Field::window), p.window, most);
  });
  check_threshold(rules, p.amount.threshold);
  check_ratio(rules, Field::evict_ratio, p.amount.evict_ratio);
  check_at_least(rules, Field::keep_tokens, p.amount.keep_tokens, 1);
  rules.require(!p.amount.kv_bytes || *p.amount.kv_bytes >= 1, Code::out_of_range,
                {Field::kv_budget}, [&] {
                  return fmt::format("{} is {}; expected at least 1 byte",
                                     rules.name(Field::kv_budget), *p.amount.kv_bytes);
                });
}

void check_amounts(Rules& rules, const Pruning& p, const PruningUse& use) {
  std::vector<Field> given = budget_fields(p);
  // A plan does not use the threshold.
  if (p.amount.has_threshold() && !use.plans) given.insert(given.begin(), Field::threshold);
  rules.require(given.size() < 2, Code::several_amounts, given, [&] {
    return fmt::format("{} and {} each say how much is evicted: give one of {}, {}",
                       rules.name(given[0]), rules.name(given[1]), rules.name(Field::threshold),
                       several_budgets(rules, "and"));
  });
}

void check_decode(Rules& rules, const Pruning& p) {
  const auto name = [&](Field field) { return rules.name(field); };
  check_at_least(rules, Field::decode_every, p.decode.every, 0);
  check_at_least(rules, Field::decode_keep, p.decode.keep, 1);
  check_ratio(rules, Field::decode_evict_ratio, p.decode.evict_ratio);
  rules.require(!(p.decode.keep && p.decode.evict_ratio), Code::several_amounts,
                {Field::decode_keep, Field::decode_evict_ratio}, [&] {
                  return fmt::format("{} and {} each say how much stays: give one of them",
                                     name(Field::decode_keep), name(Field::decode_evict_ratio));
                });
  const bool has_target = p.decode.keep || p.decode.evict_ratio;
  rules.require(p.decode.every == 0 || has_target, Code::missing,
                {Field::decode_keep, Field::decode_evict_ratio, Field::decode_every}, [&] {
                  return fmt::format("{} needs {} or {}: how much stays", name(Field::decode_every),
                                     name(Field::decode_keep), name(Field::decode_evict_ratio));
                });
  const Field target = p.decode.keep ? Field::decode_keep : Field::decode_evict_ratio;
  rules.require(
      p.decode.every > 0 || !has_target, Code::no_effect, {target, Field::decode_every}, [&] {
        return fmt::format("{} has no effect without {}", name(target), name(Field::decode_every));
      });
  rules.require(p.decode.every == 0 || p.mode != PruneMode::none, Code::no_effect,
                {Field::decode_every, Field::prune}, [&] {
                  return fmt::format("{} has no effect with {} none", name(Field::decode_every),
                                     name(Field::prune));
                });
}

void check_judge(Rules& rules, PruneMode mode, bool has_judge) {
  rules.require(
      mode == PruneMode::none || has_judge, Code::missing, {Field::surrogate, Field::policy}, [&] {
        return fmt::format("{} {} needs {} DIR or {} NAME", rules.name(Field::prune), name_of(mode),
                           rules.name(Field::surrogate), rules.name(Field::policy));
      });
}

void check_presence(Rules& rules, const Pruning& p, const PruningUse& use) {
  const auto name = [&](Field field) { return rules.name(field); };
  const std::vector<Field> given = budget_fields(p);
  rules.require(!p.amount.recommended || p.is_plain_kvzap(), Code::missing,
                {Field::threshold, Field::surrogate}, [&] {
                  return fmt::format(
                      "{} auto needs {} DIR, and no {} but kvzap: the threshold is one of the "
                      "surrogate's scores",
                      name(Field::threshold), name(Field::surrogate), name(Field::policy));
                });
  check_judge(rules, p.mode_in_force(), p.has_policy());
  rules.require(p.has_policy() || !p.amount.has_threshold(), Code::no_effect,
                {Field::threshold, Field::policy}, [&] {
                  return fmt::format("{} has no effect without {} or {}: no pair has a score",
                                     name(Field::threshold), name(Field::surrogate),
                                     name(Field::policy));
                });
  rules.require(
      p.has_policy() || given.empty() || use.plans, Code::no_effect,
      given.empty() ? std::vector<Field>{} : std::vector<Field>{given[0], Field::policy}, [&] {
        return fmt::format("{} has no effect without {}, {} or {}", name(given[0]),
                           name(Field::plan), name(Field::policy), name(Field::surrogate));
      });
  rules.require(
      !p.prunes() || use.plans || !p.is_plain_kvzap() || p.amount.has_threshold() || !given.empty(),
      Code::missing, {Field::threshold, Field::evict_ratio, Field::keep_tokens, Field::kv_budget},
      [&] {
        return fmt::format(
            "{} needs {}, the log score below which a pair is evicted (auto: the one that kvzap "
            "calibrate has recommended), or {}, for which one is looked up, or one of {} and {}",
            name(Field::surrogate), name(Field::threshold), name(Field::evict_ratio),
            name(Field::keep_tokens), name(Field::kv_budget));
      });
  rules.require(p.decode.every == 0 || p.has_policy(), Code::no_effect,
                {Field::decode_every, Field::policy}, [&] {
                  return fmt::format("{} has no effect without {} or {}", name(Field::decode_every),
                                     name(Field::policy), name(Field::surrogate));
                });
}

void check_one_step(Rules& rules, const Pruning& p) {
  rules.require(p.moment != PruneMoment::question || p.prefill == PrefillMode::dense,
                Code::conflict, {Field::prefill, Field::prune_after}, [&] {
                  return fmt::format(
                      "{} question runs context and question as one step: it needs {} dense",
                      rules.name(Field::prune_after), rules.name(Field::prefill));
                });
}

void check_question(Rules& rules, const Pruning& p, const PruningUse& use) {
  if (p.moment != PruneMoment::question) return;
  const auto name = [&](Field field) { return rules.name(field); };
  const std::string after_question = name(Field::prune_after) + " question";
  rules.require(p.prunes(), Code::no_effect, {Field::prune_after, Field::policy}, [&] {
    return fmt::format("{} has no effect without {} or {}", after_question, name(Field::policy),
                       name(Field::surrogate));
  });
  rules.require(!p.looks_up_threshold() || p.amount.recommended || use.plans, Code::conflict,
                {Field::prune_after, Field::evict_ratio}, [&] {
                  return fmt::format(
                      "{} needs a budget: kvzap reaches {} by a threshold, {} kvzap+ada:alpha=1 "
                      "by a budget of each head",
                      after_question, name(Field::evict_ratio), name(Field::policy));
                });
  rules.require(!p.amount.has_threshold() || use.plans || !p.is_plain_kvzap(), Code::conflict,
                {Field::prune_after, Field::threshold}, [&] {
                  return fmt::format(
                      "{} needs a budget, one of {}: with {} each pair is judged by itself",
                      after_question, several_budgets(rules, "and"), name(Field::threshold));
                });
  rules.require(use.has_question || use.plans, Code::missing, {Field::question, Field::prune_after},
                [&] { return fmt::format("{} needs {}", after_question, name(Field::question)); });
  check_one_step(rules, p);
}

/// The names of the policies that support --layerwise.
std::string layerwise_policies() {
  std::string names;
  for (const PolicyInfo& info : policies()) {
    const bool has = std::any_of(info.parameters.begin(), info.parameters.end(),
                                 [](const auto& p) { return p.name == "layerwise"; });
    if (has) names += (names.empty() ? "" : ", ") + info.name;
  }
  return names;
}

/// Returns whether the Pruning's policy has an unknown name, for which parse_policy has an error.
bool has_unknown_policy(const Pruning& p) {
  const std::string own = policy::name_in(p.policy);
  return !own.empty() && std::none_of(policies().begin(), policies().end(),
                                      [&](const PolicyInfo& info) { return info.name == own; });
}

void check_layerwise(Rules& rules, const Pruning& p) {
  if (!p.layerwise || has_unknown_policy(p)) return;
  const auto name = [&](Field field) { return rules.name(field); };
  const std::string own = policy::name_in(p.policy);
  const auto& all = policies();
  const bool takes = std::any_of(all.begin(), all.end(), [&](const PolicyInfo& info) {
    return info.name == own &&
           std::any_of(info.parameters.begin(), info.parameters.end(),
                       [](const auto& parameter) { return parameter.name == "layerwise"; });
  });
  rules.require(takes, Code::conflict, {Field::layerwise, Field::policy}, [&] {
    return p.policy.empty()
               ? fmt::format("{} has no effect without {} ({})", name(Field::layerwise),
                             name(Field::policy), layerwise_policies())
               : fmt::format("{} cannot be combined with {} {}; it applies to {}",
                             name(Field::layerwise), name(Field::policy), own,
                             layerwise_policies());
  });
  rules.require(!policy::has_argument(p.policy, "layerwise"), Code::several_amounts,
                {Field::layerwise, Field::policy}, [&] {
                  return fmt::format(
                      "{} and {} {} both say whether layers share a budget: give one of them",
                      name(Field::layerwise), name(Field::policy), p.policy);
                });
}

/// Checks that the Pruning names one surrogate.
void check_surrogate(Rules& rules, const Pruning& p) {
  if (has_unknown_policy(p)) return;
  const auto name = [&](Field field) { return rules.name(field); };
  const std::string own = policy::name_in(p.policy.empty() ? "kvzap" : p.policy);
  const bool names_one = policy::has_argument(p.policy, "surrogate");
  if (p.surrogate.empty()) {
    rules.require(p.policy.empty() || own != "kvzap" || names_one, Code::missing,
                  {Field::surrogate, Field::policy}, [&] {
                    return fmt::format("{} kvzap needs {} DIR", name(Field::policy),
                                       name(Field::surrogate));
                  });
    return;
  }
  rules.require(own == "kvzap", Code::conflict, {Field::surrogate, Field::policy}, [&] {
    return fmt::format("{0} is for {1} kvzap; {1} {2} does not use it", name(Field::surrogate),
                       name(Field::policy), own);
  });
  rules.require(!names_one, Code::several_amounts, {Field::surrogate, Field::policy}, [&] {
    return fmt::format("{} and {} both name a surrogate: give one of them", name(Field::surrogate),
                       name(Field::policy));
  });
}

void check_repeating(Rules& rules, const Pruning& p, const std::string& policy) {
  const auto name = [&](Field field) { return rules.name(field); };
  rules.require(!p.amount.has_threshold(), Code::conflict, {Field::threshold, Field::policy}, [&] {
    return fmt::format(
        "{} cannot be combined with {}, which keeps a share of all pairs, whatever their scores: "
        "give {}",
        name(Field::threshold), policy, several_budgets(rules, "or"));
  });
  rules.require(
      p.moment != PruneMoment::question, Code::conflict, {Field::prune_after, Field::policy}, [&] {
        return fmt::format(
            "{} question cannot be combined with {}: the model repeats the context before any "
            "question",
            name(Field::prune_after), policy);
      });
  rules.require(p.mode != PruneMode::always, Code::conflict, {Field::prune, Field::policy}, [&] {
    return fmt::format("{} always cannot be combined with {}, which scores the context alone",
                       name(Field::prune), policy);
  });
}

void check_always(Rules& rules, const Pruning& p, const PolicyInfo& info, bool has_budget,
                  const std::string& policy) {
  const auto name = [&](Field field) { return rules.name(field); };
  rules.require(!info.has_own_budget, Code::conflict, {Field::prune, Field::policy}, [&] {
    return fmt::format("{} always cannot be combined with {}, which sets its own amount",
                       name(Field::prune), policy);
  });
  // A cut moves rows out of the ring, unjudged. Which rows these are depends on the rank's heads.
  rules.require(has_budget || p.decode.every == 0, Code::conflict,
                {Field::prune, Field::decode_every}, [&] {
                  return fmt::format(
                      "{} always judges each pair by the threshold of {}, {} cuts to a number of "
                      "them: give one of the two",
                      name(Field::prune), policy, name(Field::decode_every));
                });
  rules.require(
      has_budget || info.judges_tokens, Code::conflict, {Field::prune, Field::policy}, [&] {
        return fmt::format(
            "{} always cannot be combined with {}, which cannot judge new tokens one by one: "
            "leave it out, and cut the cache with {} N instead",
            name(Field::prune), policy, name(Field::decode_every));
      });
  rules.require(!has_budget || p.decode.every > 0, Code::conflict, {Field::prune, Field::threshold},
                [&] {
                  const std::vector<Field> given = budget_fields(p);
                  return fmt::format(
                      "{} always needs a threshold, which judges each pair as it leaves the "
                      "window; while the model generates {} is met with {} N",
                      name(Field::prune), given.empty() ? "a budget" : name(given.front()),
                      name(Field::decode_every));
                });
}

/// Checks that exactly one setting determines the number of rows that stay.
void check_policy_amount(Rules& rules, const Pruning& p, const PruningUse& use,
                         const PolicySpec& spec) {
  const auto name = [&](Field field) { return rules.name(field); };
  const std::string policy = name(Field::policy) + " " + spec.info->name;
  const std::vector<Field> given = budget_fields(p);
  if (!spec.info->has_own_budget) {
    // A modifier may supply its own threshold; make_policy checks that.
    const bool says_none = !p.amount.has_threshold() && given.empty() && spec.modifiers.empty();
    rules.require(!p.prunes() || use.plans || !says_none, Code::missing,
                  {Field::evict_ratio, Field::threshold, Field::keep_tokens, Field::kv_budget},
                  [&] {
                    return fmt::format("{} needs one of {}, {}: how much is evicted", policy,
                                       name(Field::threshold), several_budgets(rules, "and"));
                  });
    return;
  }
  const Field amount = given.empty() ? Field::threshold : given.front();
  rules.require(!p.amount.has_threshold() && given.empty(), Code::conflict, {amount, Field::policy},
                [&] {
                  return fmt::format("{} cannot be combined with {}, which sets its own amount",
                                     name(amount), policy);
                });
  rules.require(p.decode.every == 0, Code::conflict, {Field::decode_every, Field::policy}, [&] {
    return fmt::format("{} cannot be combined with {}, which sets its own amount",
                       name(Field::decode_every), policy);
  });
}

void throw_fault(const std::optional<PruningFault>& fault) {
  if (fault) throw PruningError(*fault);
}

/// Checks the rules that do not depend on a policy.
std::optional<PruningFault> find_general_fault(const Pruning& p, const PruningUse& use,
                                               const PruningNames& names) {
  Rules rules(names);
  check_ranges(rules, p);
  check_amounts(rules, p, use);
  check_decode(rules, p);
  check_presence(rules, p, use);
  check_question(rules, p, use);
  check_layerwise(rules, p);
  check_surrogate(rules, p);
  return rules.fault();
}

/// Checks the rules that combine a Pruning with a policy. `has_budget`, `has_threshold`: whether
/// one of them selects rows.
void check_policy(Rules& rules, const Pruning& p, const PolicyInfo& info, bool has_budget,
                  bool has_threshold) {
  const auto name = [&](Field field) { return rules.name(field); };
  const std::string policy = name(Field::policy) + " " + info.name;
  if (info.repeats_context) check_repeating(rules, p, policy);
  rules.require(!info.needs_question || p.moment == PruneMoment::question, Code::missing,
                {Field::prune_after, Field::policy}, [&] {
                  return fmt::format("{} needs {} question: the question decides its scores",
                                     policy, name(Field::prune_after));
                });
  rules.require(p.moment != PruneMoment::question || !info.judges_tokens || !has_threshold,
                Code::conflict, {Field::prune_after, Field::threshold}, [&] {
                  return fmt::format(
                      "{} question needs a budget, one of {}: {} judges each pair by itself, "
                      "whatever the question",
                      name(Field::prune_after), several_budgets(rules, "and"), policy);
                });
  rules.require(
      p.decode.every == 0 || info.scores_again, Code::conflict,
      {Field::decode_every, Field::policy}, [&] {
        return fmt::format(
            "{} cannot be combined with {}, which cannot score again while the model generates",
            name(Field::decode_every), policy);
      });
  rules.require(p.decode.every == 0 || !info.has_own_budget, Code::conflict,
                {Field::decode_every, Field::policy}, [&] {
                  return fmt::format("{} cannot be combined with {}, which sets its own amount",
                                     name(Field::decode_every), policy);
                });
  rules.require(
      p.prefill == PrefillMode::dense || (info.scores_again && !info.has_own_budget),
      Code::conflict, {Field::prefill, Field::policy}, [&] {
        return fmt::format(
            "{} sparse cannot be combined with {}, which cannot score again after each chunk",
            name(Field::prefill), policy);
      });
  if (p.mode == PruneMode::always) check_always(rules, p, info, has_budget, policy);
}

std::optional<PruningFault> find_policy_fault(const Pruning& p, const PruningUse& use,
                                              const PolicySpec& spec, const PruningNames& names) {
  Rules rules(names);
  check_policy_amount(rules, p, use, spec);
  if (rules.fault() || use.plans || !p.prunes()) return rules.fault();
  // An evict ratio that is converted to a threshold by a table is no budget.
  const bool looks_up = p.looks_up_threshold();
  check_policy(rules, p, *spec.info, p.amount.has_budget() && !looks_up,
               p.amount.has_threshold() || looks_up || has_modifier(spec, "dms"));
  return rules.fault();
}

}  // namespace

std::string Pruning::policy_text(const PruningNames& names) const {
  Rules rules(names);
  check_layerwise(rules, *this);
  check_surrogate(rules, *this);
  throw_fault(rules.fault());
  if (!has_policy()) return "";
  std::string text = policy.empty() ? "kvzap" : policy;
  if (layerwise) text = policy::with_argument(text, "layerwise=on");
  if (surrogate.empty()) return text;
  return policy::with_argument(text, "surrogate=" + escaped_in_policy(surrogate));
}

std::optional<PruningFault> find_fault(const Pruning& p, const PruningUse& use,
                                       const PruningNames& names) {
  if (auto fault = find_general_fault(p, use, names)) return fault;
  if (!p.has_policy()) return {};
  return find_policy_fault(p, use, parse_policy(p.policy_text(names)), names);
}

std::optional<PruningFault> find_fault(const LoadedPruning& pruning, bool has_scorer,
                                       const PruningNames& names) {
  Rules rules(names);
  const Pruning& p = pruning.pruning;
  check_ranges(rules, p);
  check_decode(rules, p);
  check_judge(rules, pruning.mode(), pruning.policy || has_scorer);
  if (rules.fault() || !pruning.prunes()) return rules.fault();
  check_one_step(rules, p);
  if (!pruning.chooses_rows()) check_threshold(rules, pruning.threshold());
  if (pruning.policy) {
    check_policy(rules, p, *pruning.policy->info, pruning.chooses_rows(), !pruning.chooses_rows());
  }
  return rules.fault();
}

void check(const Pruning& p, const PruningUse& use, const PruningNames& names) {
  throw_fault(find_fault(p, use, names));
}

void check(const LoadedPruning& pruning, bool has_scorer, const PruningNames& names) {
  throw_fault(find_fault(pruning, has_scorer, names));
}

std::optional<PolicySpec> policy_spec(const Pruning& p, const PruningUse& use,
                                      const PruningNames& names) {
  throw_fault(find_general_fault(p, use, names));
  if (!p.has_policy()) return {};
  PolicySpec spec = parse_policy(p.policy_text(names));
  throw_fault(find_policy_fault(p, use, spec, names));
  return spec;
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
  model.row_bytes = static_cast<std::int64_t>(
      page_row_values(static_cast<int>(config.head_dim), value_bytes, format));
  return model;
}

}  // namespace kvzap
