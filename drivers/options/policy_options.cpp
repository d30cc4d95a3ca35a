#include "options/policy_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <kvzap/engine/thresholds.hpp>
#include <limits>
#include <vector>

namespace kvzap::driver {
namespace {

/// The name in front of "name:key=value+modifier".
std::string name_in(const std::string& policy) {
  return policy.substr(0, policy.find_first_of(":+"));
}

/// The flags of `given` that are set.
std::vector<std::string> set_flags(const std::vector<std::pair<const char*, bool>>& given) {
  std::vector<std::string> flags;
  for (const auto& [flag, is_set] : given) {
    if (is_set) flags.emplace_back(flag);
  }
  return flags;
}

std::vector<std::string> amounts(const RunOptions& o) {
  return set_flags({{"--evict-ratio", o.evict_ratio.has_value()},
                    {"--keep-tokens", o.keep_tokens.has_value()},
                    {"--kv-budget", !o.kv_budget.empty()}});
}

/// Whether a threshold decides, given by its flag or with +dms.
bool has_threshold(const RunOptions& o, const PolicySpec& spec) {
  return o.threshold ||
         std::any_of(spec.modifiers.begin(), spec.modifiers.end(),
                     [](const auto& modifier) { return modifier.first->name == "dms"; });
}

/// Whether a budget is met over all layers together (Budget::Pool::model), as its policy, which
/// may need weights to be made, will say.
bool chooses_over_layers(const PolicySpec& spec) {
  const auto& parameters = spec.info->parameters;
  const bool may_by_layer =
      std::any_of(parameters.begin(), parameters.end(),
                  [](const PolicyParameter& parameter) { return parameter.name == "layerwise"; });
  return (may_by_layer && !spec.arguments.flag("layerwise")) ||
         std::any_of(spec.modifiers.begin(), spec.modifiers.end(),
                     [](const auto& modifier) { return modifier.first->name == "global"; });
}

/// The budget of the flags with what modifiers that say how much stays make of it. (What others do
/// is in whose favour rows go, or may need weights.)
Budget planned_budget(const RunOptions& o, const std::optional<PolicySpec>& spec,
                      const PolicySetup& setup) {
  PolicyChoice choice;
  choice.budget = budget_of(o);
  if (!spec) return choice.budget;
  choice.info = spec->info;
  choice.threshold = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [modifier, arguments] : spec->modifiers) {
    const bool changes = modifier->name == "per-layer" ||
                         (modifier->name == "chunkkv" && choice.budget.has_amount());
    if (changes) modifier->apply(choice, arguments, setup);
  }
  return choice.budget;
}

/// "name:key=value+modifier" with another key and value.
std::string with_argument(std::string policy, const std::string& argument) {
  const std::size_t name = name_in(policy).size();
  const bool has_arguments = policy.compare(name, 1, ":") == 0;
  policy.replace(name, has_arguments ? 1 : 0, ":" + argument + (has_arguments ? "," : ""));
  return policy;
}

/// The policy's text with what --layerwise adds to it.
std::string with_layerwise(const RunOptions& o, const std::string& policy) {
  if (!o.layerwise) return policy;
  const std::string name = name_in(policy);
  std::string takers;
  bool takes = false;
  for (const PolicyInfo& info : policies()) {
    const bool has = std::any_of(info.parameters.begin(), info.parameters.end(),
                                 [](const auto& p) { return p.name == "layerwise"; });
    if (has) takers += (takers.empty() ? "" : ", ") + info.name;
    takes = takes || (has && info.name == name);
  }
  require(takes, policy.empty()
                     ? fmt::format("--layerwise has no effect without --policy ({})", takers)
                     : fmt::format("--layerwise does not go with --policy {}; it is for "
                                   "{}",
                                   name, takers));
  require(policy.find(":layerwise=") == std::string::npos &&
              policy.find(",layerwise=") == std::string::npos,
          fmt::format("--layerwise and --policy {} both say whether layers share a budget: give "
                      "one of them",
                      policy));
  return with_argument(policy, "layerwise=on");
}

/// The surrogate's scores as they are.
bool is_plain_kvzap(const RunOptions& o) {
  return !o.surrogate.empty() && (o.policy.empty() || o.policy == "kvzap");
}

void check_ratio(const std::optional<double>& ratio, const char* flag) {
  // Written so that NaN does not pass.
  require(!ratio || (*ratio >= 0 && *ratio < 1),
          fmt::format("{} is {}; expected at least 0 and less than 1", flag, ratio.value_or(0)));
}

void check_amounts(const RunOptions& o) {
  check_ratio(o.evict_ratio, "--evict-ratio");
  require(!o.keep_tokens || *o.keep_tokens >= 1,
          fmt::format("--keep-tokens is {}; expected at least 1", o.keep_tokens.value_or(0)));
  if (!o.kv_budget.empty()) parse_bytes(o.kv_budget, "--kv-budget");
  std::vector<std::string> given = amounts(o);
  // A plan has no use for the threshold.
  if (o.threshold && !o.dry_run) given.insert(given.begin(), "--threshold");
  require(given.size() < 2,
          given.size() < 2
              ? ""
              : fmt::format("{} and {} each say how much is evicted: give one of "
                            "--threshold, --evict-ratio, --keep-tokens and --kv-budget",
                            given[0], given[1]));
}

void check_decode(const RunOptions& o) {
  require(o.decode_every >= 0,
          fmt::format("--decode-every is {}; expected 0 or more", o.decode_every));
  require(!o.decode_keep || *o.decode_keep >= 1,
          fmt::format("--decode-keep is {}; expected at least 1", o.decode_keep.value_or(0)));
  check_ratio(o.decode_evict_ratio, "--decode-evict-ratio");
  require(!(o.decode_keep && o.decode_evict_ratio),
          "--decode-keep and --decode-evict-ratio each say how much stays: give one of them");
  const bool has_target = o.decode_keep || o.decode_evict_ratio;
  require(o.decode_every == 0 || has_target,
          "--decode-every needs --decode-keep or --decode-evict-ratio: how much stays");
  require(o.decode_every > 0 || !has_target,
          fmt::format("{} has no effect without --decode-every",
                      o.decode_keep ? "--decode-keep" : "--decode-evict-ratio"));
  require(o.decode_every == 0 || o.prune != "none",
          "--decode-every has no effect with --prune none");
}

}  // namespace

std::int64_t parse_bytes(const std::string& text, const std::string& flag) {
  const auto fail = [&] {
    throw Error(
        fmt::format("{} is '{}'; expected bytes, as 512M, 2GB (powers of 1000) or 1.5GiB "
                    "(of 1024)",
                    flag, text));
  };
  // No sign, no "inf", no hexadecimal number.
  if (text.empty() || text.front() < '0' || text.front() > '9') fail();
  if (text.find_first_of("xX") != std::string::npos) fail();
  char* used = nullptr;
  double bytes = std::strtod(text.c_str(), &used);
  std::string unit = used;
  unit.erase(0, std::min(unit.find_first_not_of(' '), unit.size()));
  if (!unit.empty() && (unit.back() == 'B' || unit.back() == 'b')) unit.pop_back();
  double base = 1000;
  if (unit.size() == 2 && unit.back() == 'i') {
    base = 1024;
    unit.pop_back();
  }
  if (!unit.empty()) {
    const auto power = std::string("KMGTP").find(unit == "k" ? 'K' : unit.front());
    if (unit.size() > 1 || power == std::string::npos) fail();
    bytes *= std::pow(base, static_cast<double>(power + 1));
  } else if (base != 1000) {
    fail();
  }
  constexpr double most = 9.2e18;  // of 64 bits
  if (!(bytes >= 1 && bytes <= most)) fail();
  return static_cast<std::int64_t>(bytes);
}

bool looks_up_threshold(const RunOptions& o) {
  return o.evict_ratio && !o.surrogate.empty() && o.policy.empty();
}

LookedUpThreshold look_up_threshold(const RunOptions& o) {
  const std::filesystem::path file = ThresholdTable::file_in(o.surrogate);
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) {
    throw Error(fmt::format(
        "--evict-ratio {}: {} is not there, which says by what threshold the surrogate reaches it: "
        "kvzap calibrate makes it; or give --threshold, or --policy kvzap, which takes an evict "
        "ratio as a budget",
        *o.evict_ratio, file.string()));
  }
  const ThresholdTable table = ThresholdTable::load(file);
  LookedUpThreshold found;
  found.evict_ratio = *o.evict_ratio;
  found.file = file.string();
  try {
    // As the cache compares.
    found.threshold = static_cast<float>(table.threshold(*o.evict_ratio));
  } catch (const Error& error) {
    throw Error(fmt::format("--evict-ratio: {}: {}", found.file, error.what()));
  }
  const auto differs = [&](const char* flag, std::int64_t of_table, std::int64_t of_run) {
    if (of_table == of_run) return;
    found.warnings.push_back(
        fmt::format("{} was calibrated with {} {}, and {} is {}: another share will be evicted",
                    found.file, flag, of_table, flag, of_run));
  };
  differs("--window", table.window, o.window);
  differs("--sink", table.sink, o.sink);
  if (!o.token_ids && table.chat_template == o.raw) {
    found.warnings.push_back(
        fmt::format("{} was calibrated {} the chat template, and this run is {} it: another share "
                    "will be evicted",
                    found.file, table.chat_template ? "with" : "without",
                    table.chat_template ? "without" : "with"));
  }
  return found;
}

bool prunes(const RunOptions& o) {
  return o.prune.empty() ? !o.surrogate.empty() || !o.policy.empty() : o.prune != "none";
}

Budget budget_of(const RunOptions& o) {
  Budget budget;
  if (o.evict_ratio) {
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = *o.evict_ratio;
  } else if (o.keep_tokens) {
    budget.amount = Budget::Amount::keep_tokens;
    budget.keep_tokens = *o.keep_tokens;
  } else if (!o.kv_budget.empty()) {
    budget.amount = Budget::Amount::bytes;
    budget.bytes = parse_bytes(o.kv_budget, "--kv-budget");
  }
  return budget;
}

std::string escaped_in_policy(const std::string& value) {
  std::string escaped;
  for (const char c : value) {
    if (c == ',' || c == '+') escaped += '\\';  // part of the name
    escaped += c;
  }
  return escaped;
}

std::string policy_text(const RunOptions& o) {
  if (o.surrogate.empty()) {
    require(name_in(o.policy) != "kvzap" || o.policy.find("surrogate=") != std::string::npos,
            "--policy kvzap needs --surrogate DIR");
    return with_layerwise(o, o.policy);
  }
  std::string text = o.policy.empty() ? "kvzap" : o.policy;
  const std::string name = name_in(text);
  require(name == "kvzap",
          fmt::format("--surrogate is for --policy kvzap; --policy {} has no use for it", name));
  require(text.find("surrogate=") == std::string::npos,
          "--surrogate and --policy both name a surrogate: give one of them");
  return with_argument(with_layerwise(o, text), "surrogate=" + escaped_in_policy(o.surrogate));
}

std::optional<PolicySpec> policy_spec(const RunOptions& o) {
  const bool has_policy = !o.policy.empty() || !o.surrogate.empty();
  const bool is_judged = amounts(o).empty() || looks_up_threshold(o);
  if (!has_policy || (is_plain_kvzap(o) && is_judged && o.decode_every == 0)) return {};
  PolicySpec spec = parse_policy(policy_text(o));
  const PolicyInfo& info = *spec.info;
  const std::vector<std::string> given = amounts(o);
  const std::string name = "--policy " + info.name;
  const auto refuse_if = [&](bool wrong, const std::string& message) { require(!wrong, message); };
  if (info.has_own_budget) {
    const std::string flag = !given.empty() ? given.front() : "--threshold";
    refuse_if(
        o.threshold || !given.empty(),
        fmt::format("{} does not go with {}, which decides itself how much stays", flag, name));
    refuse_if(o.decode_every > 0, fmt::format("--decode-every does not go with {}, which decides "
                                              "itself how much stays",
                                              name));
  } else {
    // A modifier may bring its threshold; make_policy knows.
    refuse_if(prunes(o) && !o.dry_run && !o.threshold && given.empty() && spec.modifiers.empty(),
              fmt::format("{} needs one of --threshold, --evict-ratio, --keep-tokens and "
                          "--kv-budget: how much is evicted",
                          name));
  }
  if (o.dry_run || !prunes(o)) return spec;
  if (info.repeats_context) {
    refuse_if(o.threshold.has_value(),
              fmt::format("--threshold does not go with {}, which keeps a share of all pairs, "
                          "whatever their scores: give --evict-ratio, --keep-tokens or --kv-budget",
                          name));
    refuse_if(o.prune_after == "question",
              fmt::format("--prune-after question does not go with {}: the model repeats the "
                          "context before any question",
                          name));
    refuse_if(
        o.prune == "always",
        fmt::format("--prune always does not go with {}, which scores the context alone", name));
  }
  refuse_if(info.needs_question && o.prune_after != "question",
            fmt::format("{} needs --prune-after question: the question decides its scores", name));
  refuse_if(o.prune_after == "question" && info.judges_tokens && has_threshold(o, spec),
            "--prune-after question needs a budget, one of --evict-ratio, --keep-tokens and "
            "--kv-budget: " +
                name + " judges each pair by itself, whatever the question");
  refuse_if(o.decode_every > 0 && !info.scores_again,
            fmt::format("--decode-every does not go with {}, which cannot score again while the "
                        "model generates",
                        name));
  refuse_if(o.prefill == "sparse" && (!info.scores_again || info.has_own_budget),
            fmt::format("--prefill sparse does not go with {}, which cannot score again after each "
                        "chunk",
                        name));
  if (o.prune == "always") {
    refuse_if(
        info.has_own_budget,
        fmt::format("--prune always does not go with {}, which decides itself how much of the "
                    "context stays",
                    name));
    refuse_if(given.empty() && o.decode_every > 0,
              fmt::format("--prune always judges each pair by the threshold of {}, --decode-every "
                          "cuts to a number of them: give one of the two",
                          name));
    refuse_if(
        given.empty() && !info.judges_tokens,
        fmt::format("--prune always does not go with {}, which cannot judge new tokens one by "
                    "one: leave it out, and cut the cache with --decode-every N instead",
                    name));
    refuse_if(
        !given.empty() && o.decode_every == 0,
        fmt::format("--prune always needs a threshold, which judges each pair as it leaves the "
                    "window; while the model generates {} is met with --decode-every N",
                    given.empty() ? "" : given.front()));
  }
  return spec;
}

void check_policy_options(const RunOptions& o) {
  check_threshold(o.threshold);
  check_amounts(o);
  check_decode(o);
  const bool has_policy = !o.policy.empty() || !o.surrogate.empty();
  const std::vector<std::string> given = amounts(o);
  require(!prunes(o) || has_policy,
          fmt::format("--prune {} needs --surrogate DIR or --policy NAME", o.prune));
  require(has_policy || !o.threshold,
          "--threshold has no effect without --surrogate or --policy: no pair has a score");
  require(has_policy || given.empty() || o.dry_run,
          fmt::format("{} has no effect without --dry-run, --policy or --surrogate",
                      given.empty() ? "" : given.front()));
  require(!prunes(o) || o.dry_run || !is_plain_kvzap(o) || o.threshold || !given.empty(),
          "--surrogate needs --threshold, the log score below which a pair is evicted, or "
          "--evict-ratio, for which one is looked up, or one of --keep-tokens and --kv-budget");
  require(o.decode_every == 0 || has_policy,
          "--decode-every has no effect without --policy or --surrogate");
  if (o.prune_after == "question") {
    require(prunes(o), "--prune-after question has no effect without --policy or --surrogate");
    require(!looks_up_threshold(o) || o.dry_run,
            "--prune-after question needs a budget: with --surrogate alone --evict-ratio is "
            "reached by a threshold, with --policy kvzap it is a budget");
    require(!o.threshold || o.dry_run || !is_plain_kvzap(o),
            "--prune-after question needs a budget, one of --evict-ratio, --keep-tokens and "
            "--kv-budget: with --threshold each pair is judged by itself");
    require(!o.questions.empty() || o.dry_run || !o.resume.empty(),
            "--prune-after question needs --question");
    require(o.prefill == "dense",
            "--prune-after question runs context and question as one step: it needs --prefill "
            "dense");
  }
  policy_text(o);  // throws if --policy and --surrogate do not go together
}

Budget::Model budget_model(const ModelConfig& config, DType dtype) {
  Budget::Model model;
  model.layers = static_cast<int>(config.num_hidden_layers);
  model.kv_heads = static_cast<int>(config.num_key_value_heads);
  model.row_bytes = 2 * config.head_dim * static_cast<std::int64_t>(size_of(dtype));
  return model;
}

PlannedEviction planned_eviction(const RunOptions& o, const std::optional<PolicySpec>& spec,
                                 const PolicySetup& setup, const ModelConfig& config,
                                 std::int64_t tokens) {
  const Budget budget = planned_budget(o, spec, setup);
  const bool has_policy = !o.policy.empty() || !o.surrogate.empty();
  const bool is_plain_ratio =
      budget.amount == Budget::Amount::evict_ratio && (!has_policy || looks_up_threshold(o));
  if (!budget.has_amount()) return {0, o.window, !prunes(o)};
  if (is_plain_ratio || tokens == 0) return {budget.evict_ratio, o.window, false};
  // A budget's choice reaches the rows of the window too.
  const Budget::Model model = budget_model(config, setup.dtype);
  std::int64_t rows = 0;
  for (int layer = 0; layer < model.layers; ++layer) {
    rows += budget.rows_per_head(model, layer, tokens);
  }
  rows = (rows + model.layers - 1) / model.layers;  // on average
  const auto evicted = static_cast<double>(tokens - rows);
  double ratio = evicted / static_cast<double>(tokens);
  // The plan rounds down to whole rows, and the quotient may be a little too small.
  while (std::floor(ratio * static_cast<double>(tokens)) < evicted)
    ratio = std::nextafter(ratio, 1.0);
  const bool waits_for_all =
      spec && o.prefill == "dense" && (chooses_over_layers(*spec) || spec->info->repeats_context);
  return {ratio, 0, !prunes(o) || waits_for_all};
}

}  // namespace kvzap::driver
