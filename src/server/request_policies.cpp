#include <fmt/format.h>

#include <algorithm>
#include <kvzap/engine/thresholds.hpp>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/request_policies.hpp>
#include <string_view>
#include <utility>

#include "files/escaped_list.hpp"
#include "files/quote.hpp"

namespace kvzap::server {
namespace {

constexpr const char* policy_field = "kvzap.policy";
constexpr const char* full_cache = "none";

/// Returns the name that clients use for a field of a Pruning: a request's field, or a flag of the
/// server.
std::string request_name(PruningField field) {
  std::string name(name_of(field));
  switch (field) {
    case PruningField::policy:
    case PruningField::threshold:
    case PruningField::evict_ratio:
    case PruningField::keep_tokens:
    case PruningField::kv_budget:
    case PruningField::prune:
    case PruningField::decode_every:
    case PruningField::decode_keep:
    case PruningField::decode_evict_ratio:
      return "kvzap." + name;
    default:
      std::replace(name.begin(), name.end(), '_', '-');
      return "the server's --" + name;
  }
}

void refuse_fault(const std::optional<PruningFault>& fault) {
  if (fault) throw BadRequest(request_name(fault->fields.front()), fault->text);
}

void set_amount(Pruning& pruning, const PruneWish& wish) {
  pruning.amount = {};
  pruning.amount.threshold = wish.threshold;
  pruning.amount.evict_ratio = wish.evict_ratio;
  pruning.amount.keep_tokens = wish.keep_tokens;
  pruning.amount.kv_bytes = wish.kv_bytes;
}

std::string amount_field(const PruneWish& wish) {
  return request_name(wish.threshold     ? PruningField::threshold
                      : wish.evict_ratio ? PruningField::evict_ratio
                      : wish.keep_tokens ? PruningField::keep_tokens
                                         : PruningField::kv_budget);
}

/// The first field that has no effect on a full cache.
std::string useless_field(const PruneWish& wish) {
  return wish.has_amount() ? amount_field(wish) : request_name(PruningField::decode_every);
}

/// Throws BadRequest for a budget that is too small for some prompt.
void check_smallest(const LoadedPruning& pruning, const PruneWish& wish, const Engine& engine,
                    DType dtype, const PageFormat& format) {
  constexpr std::int64_t most_tokens = std::int64_t{1} << 30;
  if (!pruning.policy) return;
  try {
    check_budget(pruning.policy->budget, engine.config(), dtype, most_tokens, format);
  } catch (const Error& error) {
    const std::string field = wish.has_amount() ? amount_field(wish) : policy_field;
    throw BadRequest(field, field + ": " + error.what());
  }
}

/// Refuses files: a client must not learn what the server's disk has.
void refuse_files(const PolicyText& policy) {
  static_cast<void>(policy.with_files([](const std::string& name, const PolicyParameter& parameter,
                                         const std::string&) -> std::string {
    throw BadRequest(policy_field, fmt::format("{}: {} of {} is a file; a request cannot name one",
                                               policy_field, parameter.name, name));
  }));
}

/// The server's amount in another size: without a policy, a request changes no more.
void set_same_kind(Pruning& pruning, const PruneWish& wish, const LoadedPruning& standard) {
  if (wish.threshold) {
    if (!standard.chooses_rows()) return;
    throw BadRequest("kvzap.threshold",
                     "the server prunes to a budget; expected its amount, or kvzap.policy");
  }
  const Budget::Amount own = standard.policy->budget.amount;
  const std::string field = amount_field(wish);
  const bool is_same = own == pruning.budget().amount;
  if (!is_same) {
    throw BadRequest(field, fmt::format("the server does not prune by {}; expected its amount, or "
                                        "kvzap.policy",
                                        field.substr(field.find('.') + 1)));
  }
  if (pruning.policy.modifiers().empty()) return;
  throw BadRequest(field,
                   fmt::format("the server's policy {} has modifiers; expected no amount, or "
                               "kvzap.policy",
                               pruning.policy.name()));
}

}  // namespace

RequestPolicies::RequestPolicies(const Engine& engine, const PolicySetup& setup,
                                 std::optional<RepeatPrompt> repeat, bool offers)
    : m_engine(engine), m_setup(setup), m_repeat(std::move(repeat)) {
  if (!offers) return;
  m_names.emplace_back(full_cache);
  for (const PolicyInfo& info : policies()) {
    if (can_run(info)) m_names.push_back(info.name);
  }
}

/// Whether the server has loaded a surrogate whose scores it uses unchanged.
bool RequestPolicies::has_own_kvzap() const {
  const CacheOptions& standard = m_engine.options();
  return standard.policy && standard.pruning.is_plain_kvzap();
}

/// Whether the engine runs this policy with its standard parameters.
bool RequestPolicies::can_run(const PolicyInfo& info) const {
  if (!info.surrogate.empty()) return has_own_kvzap();
  Pruning pruning = blank();
  pruning.policy = info.name;
  if (!info.has_own_budget) pruning.evict_ratio(0.5);
  PruningUse use;
  use.has_question = false;
  try {
    if (find_fault(pruning, use)) return false;
    m_engine.check(load(pruning));
  } catch (const Error&) {
    return false;  // it needs a file or texts
  }
  return true;
}

/// The server's settings without those of its policy.
Pruning RequestPolicies::blank() const {
  const Pruning& standard = m_engine.options().pruning;
  Pruning pruning;
  pruning.mode = PruneMode::prefill;
  pruning.prefill = standard.prefill;
  pruning.chunk = standard.chunk;
  pruning.window = standard.window;
  pruning.sink = standard.sink;
  return pruning;
}

LoadedPruning RequestPolicies::load(const Pruning& pruning) const {
  const CacheOptions& standard = m_engine.options();
  const bool is_own =
      pruning.policy == standard.pruning.policy &&
      pruning.surrogate == standard.pruning.surrogate &&
      pruning.layerwise == standard.pruning.layerwise &&
      // Modifiers may have no meaning with another amount.
      (pruning.policy.modifiers().empty() || pruning.amount == standard.pruning.amount);
  if (is_own || !pruning.prunes()) return standard.with_amount_of(pruning);
  LoadedPruning loaded = kvzap::load(pruning, m_setup, m_repeat);
  if (loaded.policy->learner) {
    throw Error(fmt::format("policy {} learns from texts; a request cannot give them",
                            loaded.policy->info->name));
  }
  return loaded;
}

Pruning RequestPolicies::pruning_of(const PruneWish& wish) const {
  Pruning pruning = wish.policy ? requested(wish) : standard(wish);
  if (!pruning.prunes()) return pruning;
  try {
    const LoadedPruning loaded = load(pruning);
    refuse_fault(find_fault(loaded, true, request_name));
    check_smallest(loaded, wish, m_engine, m_setup.dtype, page_format_of(wish));
  } catch (const BadRequest&) {
    throw;
  } catch (const Error& error) {
    throw BadRequest(policy_field, fmt::format("{}: {}", policy_field, error.what()));
  }
  return pruning;
}

std::vector<std::string> RequestPolicies::amounts() const {
  // Values that every policy takes which takes such an amount at all.
  PruneWish threshold, evict_ratio, keep_tokens, kv_bytes;
  threshold.threshold = -4;
  evict_ratio.evict_ratio = 0.5;
  keep_tokens.keep_tokens = std::int64_t{1} << 20;
  kv_bytes.kv_bytes = std::int64_t{1} << 40;
  std::vector<std::string> fields;
  for (const PruneWish* const wish : {&threshold, &evict_ratio, &keep_tokens, &kv_bytes}) {
    try {
      static_cast<void>(pruning_of(*wish));
    } catch (const BadRequest&) {
      continue;
    }
    const std::string field = amount_field(*wish);
    fields.push_back(field.substr(field.find('.') + 1));
  }
  return fields;
}

PageFormat RequestPolicies::page_format_of(const PruneWish& wish) const {
  const std::string field = "kvzap.kv_type";
  const PageFormat& standard = m_engine.options().page_format;
  if (!wish.kv_type) return standard;
  PageFormat format;
  try {
    format = page_format_from_name(*wish.kv_type, m_setup.dtype);
  } catch (const Error& error) {
    throw BadRequest(field, field + ": " + error.what());
  }
  if (m_names.empty() && format != standard) {
    throw BadRequest(
        field, fmt::format("{} is {}; this server takes {} alone", field,
                           files::in_quotes(*wish.kv_type), name_of(standard, m_setup.dtype)));
  }
  return format;
}

/// The server's policy, with the request's own amount and mode.
Pruning RequestPolicies::standard(const PruneWish& wish) const {
  const CacheOptions& standard = m_engine.options();
  Pruning pruning = standard.pruning;
  pruning.mode = wish.prune.value_or(standard.mode());
  if (!standard.policy) {
    if (wish.has_amount() || wish.has_cuts() || pruning.prunes()) {
      throw BadRequest("kvzap", m_names.empty()
                                    ? "the server was started without a surrogate or policy"
                                    : "the server was started without a surrogate or policy; "
                                      "expected kvzap.policy");
    }
    return pruning;
  }
  if (!pruning.prunes()) {
    if (!wish.has_amount() && !wish.has_cuts()) return pruning;
    throw BadRequest("kvzap", fmt::format("{} has no effect: prune is none", useless_field(wish)));
  }
  if (wish.has_cuts()) pruning.decode = wish.decode;
  if (!wish.has_amount()) return pruning;
  set_amount(pruning, wish);
  if (!has_own_kvzap()) {
    set_same_kind(pruning, wish, standard);
  } else if (pruning.looks_up_threshold()) {
    try {
      const double threshold = look_up_threshold(pruning).threshold;
      pruning.amount = {};
      pruning.threshold(threshold);
    } catch (const Error&) {
      throw BadRequest("kvzap.evict_ratio",
                       "the server has no calibrated threshold for this evict ratio");
    }
  }
  return pruning;
}

/// The full cache, or kvzap with the server's surrogate.
Pruning RequestPolicies::of_server(const PruneWish& wish, const std::string& name) const {
  const bool is_full = name == full_cache;
  if (*wish.policy != name) {
    throw BadRequest(policy_field,
                     fmt::format("{} is {}; expected {} without parameters and modifiers",
                                 policy_field, files::in_quotes(*wish.policy), name));
  }
  if (is_full && (wish.has_amount() || wish.has_cuts())) {
    throw BadRequest(policy_field, fmt::format("{} {} cannot be combined with {}", policy_field,
                                               name, useless_field(wish)));
  }
  if (!is_full && !wish.has_amount()) {
    throw BadRequest("kvzap.threshold",
                     fmt::format("{} {} needs one of kvzap.threshold, kvzap.evict_ratio, "
                                 "kvzap.keep_tokens and kvzap.kv_budget: how much is evicted",
                                 policy_field, name));
  }
  return standard(wish);
}

/// A policy of the request, instead of the server's.
Pruning RequestPolicies::requested(const PruneWish& wish) const {
  const std::string& text = *wish.policy;
  if (m_names.empty()) {
    throw BadRequest(policy_field, "the server takes no policy from requests");
  }
  if (files::split_unescaped(text, '@').size() > 1) {
    throw BadRequest(policy_field, fmt::format("{} is {}; expected settings as fields of kvzap, "
                                               "not after an @",
                                               policy_field, files::in_quotes(text)));
  }
  const PolicyText own = text;
  const std::string& name = own.name();
  if (std::find(m_names.begin(), m_names.end(), name) == m_names.end()) {
    throw BadRequest(policy_field,
                     fmt::format("{} is {}; expected one that this server can run for a request: "
                                 "{}",
                                 policy_field, files::in_quotes(text),
                                 files::alternatives({m_names.begin(), m_names.end()})));
  }
  const bool is_full = name == full_cache;
  const PruneMode mode = wish.prune.value_or(is_full ? PruneMode::none : PruneMode::prefill);
  if (is_full != (mode == PruneMode::none)) {
    throw BadRequest(policy_field, fmt::format("{} {} cannot be combined with kvzap.prune {}",
                                               policy_field, name, name_of(mode)));
  }
  if (is_full || !own.info()->surrogate.empty()) {
    PruneWish with_mode = wish;
    with_mode.prune = mode;
    return of_server(with_mode, name);
  }
  refuse_files(own);
  Pruning pruning = blank();
  pruning.policy = own;
  pruning.mode = mode;
  set_amount(pruning, wish);
  pruning.decode = wish.decode;
  PruningUse use;
  use.has_question = false;
  try {
    refuse_fault(find_fault(pruning, use, request_name));
  } catch (const BadRequest&) {
    throw;
  } catch (const Error& error) {
    throw BadRequest(policy_field, fmt::format("{}: {}", policy_field, error.what()));
  }
  return pruning;
}

}  // namespace kvzap::server
