#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <kvzap/engine/pruning.hpp>
#include <set>

#include "files/decimal.hpp"
#include "files/escaped_list.hpp"
#include "files/nearest.hpp"
#include "files/quote.hpp"
#include "model/cache_layers.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap {
namespace {

constexpr std::array<std::string_view, 18> field_names = {
    "policy",      "surrogate",    "threshold",   "evict_ratio",
    "keep_tokens", "kv_budget",    "layerwise",   "prune",
    "prune_after", "prefill",      "chunk",       "window",
    "sink",        "decode_every", "decode_keep", "decode_evict_ratio",
    "question",    "plan"};

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

double read_number(const std::string& value, const std::string& what) {
  double number = 0;
  if (files::read_real(value, number) != files::DecimalFault::none) {
    throw Error(fmt::format("{} is '{}'; expected a number", what, value));
  }
  return number == 0 ? 0 : number;  // no -0 in texts
}

template <class Integer>
Integer read_integer(const std::string& value, const std::string& what) {
  Integer number = 0;
  if (files::read_whole(value, number) != files::DecimalFault::none) {
    throw Error(fmt::format("{} is '{}'; expected a whole number", what, value));
  }
  return number;
}

template <class Choice>
Choice read_choice(const std::string& value, const std::string& what,
                   const std::vector<Choice>& choices) {
  for (const Choice choice : choices) {
    if (name_of(choice) == value) return choice;
  }
  std::vector<std::string_view> names;
  for (const Choice choice : choices) names.push_back(name_of(choice));
  throw Error(fmt::format("{} is \"{}\"; expected {}", what, value, files::alternatives(names)));
}

/// A setting after the @ in a policy's text.
struct TextKey {
  const char* name;
  void (*read)(Pruning&, const std::string& value, const std::string& what);
};

const std::vector<TextKey>& text_keys() {
  using Text = const std::string&;
  static const std::vector<TextKey> keys = {
      {"surrogate", [](Pruning& p, Text value, Text) { p.surrogate = value; }},
      {"threshold",
       [](Pruning& p, Text value, Text what) {
         if (value == "auto") {
           p.recommended_threshold();
         } else {
           p.threshold(read_number(value, what));
         }
       }},
      {"evict-ratio",
       [](Pruning& p, Text value, Text what) { p.evict_ratio(read_number(value, what)); }},
      {"keep-tokens", [](Pruning& p, Text value,
                         Text what) { p.keep_tokens(read_integer<std::int64_t>(value, what)); }},
      {"kv-budget",
       [](Pruning& p, Text value, Text what) { p.kv_bytes(parse_bytes(value, what)); }},
      {"layerwise",
       [](Pruning& p, Text value, Text what) {
         if (value != "on" && value != "off") {
           throw Error(fmt::format("{} is \"{}\"; expected on or off", what, value));
         }
         p.layerwise = value == "on";
       }},
      {"prune",
       [](Pruning& p, Text value, Text what) {
         p.mode = read_choice<PruneMode>(value, what,
                                         {PruneMode::none, PruneMode::prefill, PruneMode::always});
       }},
      {"prune-after",
       [](Pruning& p, Text value, Text what) {
         p.moment =
             read_choice<PruneMoment>(value, what, {PruneMoment::context, PruneMoment::question});
       }},
      {"prefill",
       [](Pruning& p, Text value, Text what) {
         p.prefill =
             read_choice<PrefillMode>(value, what, {PrefillMode::dense, PrefillMode::sparse});
       }},
      {"chunk", [](Pruning& p, Text value,
                   Text what) { p.chunk = read_integer<std::int64_t>(value, what); }},
      {"window",
       [](Pruning& p, Text value, Text what) {
         p.auto_window = value == "auto";
         p.window = p.auto_window ? Pruning().window : read_integer<int>(value, what);
       }},
      {"sink",
       [](Pruning& p, Text value, Text what) { p.sink = read_integer<std::int64_t>(value, what); }},
      {"decode-every", [](Pruning& p, Text value,
                          Text what) { p.decode.every = read_integer<std::int64_t>(value, what); }},
      {"decode-keep", [](Pruning& p, Text value,
                         Text what) { p.decode.keep = read_integer<std::int64_t>(value, what); }},
      {"decode-evict-ratio",
       [](Pruning& p, Text value, Text what) { p.decode.evict_ratio = read_number(value, what); }}};
  return keys;
}

}  // namespace

const std::vector<std::string>& policy::setting_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const TextKey& key : text_keys()) all.emplace_back(key.name);
    return all;
  }();
  return names;
}

std::string_view name_of(PruningField field) {
  return field_names.at(static_cast<std::size_t>(field));
}

std::string_view name_of(PruneMode mode) {
  switch (mode) {
    case PruneMode::none:
      return "none";
    case PruneMode::prefill:
      return "prefill";
    case PruneMode::always:
      return "always";
  }
  return "unknown";
}

std::string_view name_of(PrefillMode mode) {
  return mode == PrefillMode::sparse ? "sparse" : "dense";
}

std::string_view name_of(PruneMoment moment) {
  return moment == PruneMoment::question ? "question" : "context";
}

std::string_view name_of(PruningFault::Code code) {
  switch (code) {
    case PruningFault::Code::out_of_range:
      return "out_of_range";
    case PruningFault::Code::several_amounts:
      return "several_amounts";
    case PruningFault::Code::missing:
      return "missing";
    case PruningFault::Code::no_effect:
      return "no_effect";
    case PruningFault::Code::conflict:
      return "conflict";
  }
  return "unknown";
}

const PruningNames& plain_names() {
  static const PruningNames names = [](PruningField field) { return std::string(name_of(field)); };
  return names;
}

bool Pruning::Amount::operator==(const Amount& other) const {
  return threshold == other.threshold && recommended == other.recommended &&
         evict_ratio == other.evict_ratio && keep_tokens == other.keep_tokens &&
         kv_bytes == other.kv_bytes;
}

bool Pruning::DecodeCuts::operator==(const DecodeCuts& other) const {
  return every == other.every && keep == other.keep && evict_ratio == other.evict_ratio;
}

bool Pruning::operator==(const Pruning& other) const {
  return policy == other.policy && surrogate == other.surrogate && amount == other.amount &&
         layerwise == other.layerwise && mode == other.mode && moment == other.moment &&
         prefill == other.prefill && chunk == other.chunk && window == other.window &&
         auto_window == other.auto_window && sink == other.sink && decode == other.decode;
}

Pruning Pruning::kvzap(std::string surrogate) {
  Pruning pruning;
  pruning.surrogate = std::move(surrogate);
  return pruning;
}

Pruning Pruning::parse(const std::string& text, Pruning base) {
  const std::vector<std::string> parts = files::split_unescaped(text, '@');
  const std::string policy = files::without_escapes(trimmed(parts[0]), "@");
  const bool is_full = policy == "none";
  if (is_full && parts.size() > 1) {
    throw Error(fmt::format("{}: the full cache has no settings of its own", text));
  }
  base.policy = is_full ? "" : policy;
  std::set<std::string> seen;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t equals = parts[i].find('=');
    if (equals == std::string::npos) {
      throw Error(fmt::format("{}: \"@{}\" is not @key=value", text, parts[i]));
    }
    const std::string key = trimmed(parts[i].substr(0, equals));
    const auto& keys = text_keys();
    const auto known =
        std::find_if(keys.begin(), keys.end(), [&](const TextKey& k) { return key == k.name; });
    if (known == keys.end()) {
      const std::vector<std::string>& names = policy::setting_names();
      const std::string nearest = files::nearest_name(key, names);
      throw Error(fmt::format("{}: @{}: unknown setting; {}an @ is followed by one of {}", text,
                              key, nearest.empty() ? "" : "did you mean " + nearest + "? ",
                              fmt::join(names, ", ")));
    }
    if (!seen.insert(key).second) {
      throw Error(fmt::format("{}: @{} is given twice", text, key));
    }
    known->read(base, files::without_escapes(trimmed(parts[i].substr(equals + 1)), "@"),
                fmt::format("{}: @{}", text, key));
  }
  return base;
}

Pruning& Pruning::threshold(double log_score) {
  amount.threshold = log_score;
  amount.recommended = false;
  return *this;
}

Pruning& Pruning::recommended_threshold() {
  amount.threshold.reset();
  amount.recommended = true;
  return *this;
}

Pruning& Pruning::evict_ratio(double ratio) {
  amount.evict_ratio = ratio;
  return *this;
}

Pruning& Pruning::keep_tokens(std::int64_t rows) {
  amount.keep_tokens = rows;
  return *this;
}

Pruning& Pruning::kv_bytes(std::int64_t bytes) {
  amount.kv_bytes = bytes;
  return *this;
}

std::string Pruning::plain_surrogate() const {
  return policy.modifiers().empty() ? used_surrogate() : "";
}

std::string Pruning::used_surrogate() const {
  if (policy.empty()) return surrogate;
  if (!info() || info()->surrogate.empty()) return "";
  return policy.value(info()->surrogate)
      .value_or(policy.policy().arguments.empty() ? surrogate : "");
}

const PolicyInfo* Pruning::info() const {
  return policy.empty() && has_policy() ? &policy::with_surrogate() : policy.info();
}

bool Pruning::lacks_surrogate() const {
  const PolicyInfo* const named = info();
  return named && !named->surrogate.empty() && surrogate.empty() && !policy.value(named->surrogate);
}

bool Pruning::looks_up_threshold() const {
  return (amount.evict_ratio || amount.recommended) && is_plain_kvzap();
}

bool Pruning::has_budget(const PolicySpec& spec) const {
  return (amount.has_budget() && !looks_up_threshold()) ||
         spec.has_modifier(&ModifierInfo::gives_budget);
}

Budget Pruning::budget() const {
  Budget budget;
  if (amount.evict_ratio) {
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = *amount.evict_ratio;
  } else if (amount.keep_tokens) {
    budget.amount = Budget::Amount::keep_tokens;
    budget.keep_tokens = *amount.keep_tokens;
  } else if (amount.kv_bytes) {
    budget.amount = Budget::Amount::bytes;
    budget.bytes = *amount.kv_bytes;
  }
  return budget;
}

std::string Pruning::text() const {
  const Pruning standard;
  if (*this == standard) return "none";
  std::string text = escaped_in_settings(policy.text());
  const auto add = [&](const char* key, const auto& value) {
    text += fmt::format("@{}={}", key, value);
  };
  if (!surrogate.empty()) add("surrogate", escaped_in_settings(surrogate));
  if (amount.threshold) add("threshold", *amount.threshold);
  if (amount.recommended) add("threshold", "auto");
  if (amount.evict_ratio) add("evict-ratio", *amount.evict_ratio);
  if (amount.keep_tokens) add("keep-tokens", *amount.keep_tokens);
  if (amount.kv_bytes) add("kv-budget", *amount.kv_bytes);
  if (layerwise) add("layerwise", "on");
  if (mode) add("prune", name_of(*mode));
  if (moment != standard.moment) add("prune-after", name_of(moment));
  if (prefill != standard.prefill) add("prefill", name_of(prefill));
  if (chunk != standard.chunk) add("chunk", chunk);
  if (auto_window) {
    add("window", "auto");
  } else if (window != standard.window) {
    add("window", window);
  }
  if (sink != standard.sink) add("sink", sink);
  if (decode.every != 0) add("decode-every", decode.every);
  if (decode.keep) add("decode-keep", *decode.keep);
  if (decode.evict_ratio) add("decode-evict-ratio", *decode.evict_ratio);
  return text;
}

bool LoadedPruning::is_judged_by_scorer() const {
  return policy && policy->scorer && !policy->budget.has_amount() && pruning.decode.every == 0;
}

bool LoadedPruning::chooses_rows() const {
  return policy && (policy->budget.has_amount() || policy->info->has_own_budget);
}

float LoadedPruning::threshold() const {
  return static_cast<float>(policy ? policy->threshold : pruning.amount.threshold.value_or(0));
}

bool LoadedPruning::is_full_at_first() const {
  return !prunes() ||
         (pruning.prefill == PrefillMode::dense && policy && policy->budget.has_amount() &&
          (!policy->budget.by_layer() || policy->info->repeats_context));
}

LoadedPruning LoadedPruning::with_amount_of(const Pruning& other) const {
  LoadedPruning made{other, policy};
  if (!policy) return made;
  PolicyChoice choice = *policy;
  const Budget budget = other.budget();
  choice.budget.amount = budget.amount;
  choice.budget.evict_ratio = budget.evict_ratio;
  choice.budget.keep_tokens = budget.keep_tokens;
  choice.budget.bytes = budget.bytes;
  if (other.amount.threshold) choice.threshold = *other.amount.threshold;
  made.policy = std::make_shared<const PolicyChoice>(std::move(choice));
  return made;
}

LoadedPruning load(const Pruning& pruning, const PolicySetup& setup,
                   const std::optional<RepeatPrompt>& repeat, const PruningNames& names) {
  if (!pruning.prunes()) return {pruning, nullptr};
  model::require_full_layers(setup.config);
  const PolicySpec spec = pruning.spec(names);
  if (pruning.auto_window) {
    throw Error(fmt::format("{}: auto is not supported here; expected a number",
                            names(PruningField::window)));
  }
  if (pruning.looks_up_threshold() && pruning.amount.recommended) {
    throw Error(fmt::format("{}: a recommended one is not supported here; expected a number",
                            names(PruningField::threshold)));
  }
  if (pruning.looks_up_threshold()) {
    throw Error(fmt::format("{} is reached by a threshold: look_up_threshold finds it",
                            names(PruningField::evict_ratio)));
  }
  PolicyChoice choice = make_policy(spec, pruning.budget(), pruning.amount.threshold, setup);
  if (repeat && spec.info->repeats_context && !choice.repeat.is_bare) {
    const std::int64_t chunk = choice.repeat.chunk;  // the policy's
    choice.repeat = *repeat;
    choice.repeat.chunk = chunk;
  }
  LoadedPruning loaded{pruning, std::make_shared<const PolicyChoice>(std::move(choice))};
  check(loaded, /*has_scorer*/ false, names);
  return loaded;
}

std::int64_t parse_bytes(const std::string& text, const std::string& what) {
  const auto fail = [&] {
    throw Error(
        fmt::format("{} is '{}'; expected bytes, as 512M, 2GB (powers of 1000) or 1.5GiB "
                    "(of 1024)",
                    what, text));
  };
  // No sign, no "inf".
  if (text.empty() || text.front() < '0' || text.front() > '9') fail();
  double bytes = 0;
  std::string unit = text.substr(files::read_leading_real(text, bytes));
  unit.erase(0, std::min(unit.find_first_not_of(' '), unit.size()));
  if (!unit.empty() && (unit.back() == 'B' || unit.back() == 'b')) unit.pop_back();
  double factor = 1000;
  if (unit.size() == 2 && unit.back() == 'i') {
    factor = 1024;
    unit.pop_back();
  }
  if (!unit.empty()) {
    const auto power = std::string("KMGTP").find(unit == "k" ? 'K' : unit.front());
    if (unit.size() > 1 || power == std::string::npos) fail();
    bytes *= std::pow(factor, static_cast<double>(power + 1));
  } else if (factor != 1000) {
    fail();
  }
  constexpr double most = 9.2e18;  // of 64 bits
  if (!(bytes >= 1 && bytes <= most)) fail();
  return static_cast<std::int64_t>(bytes);
}

std::string escaped_in_settings(const std::string& policy) {
  std::string escaped;
  for (const char c : policy) {
    if (c == '@') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string escaped_in_policy(const std::string& value) {
  std::string escaped;
  for (const char c : value) {
    if (c == ',' || c == '+') escaped += '\\';  // part of the name
    escaped += c;
  }
  return escaped;
}

}  // namespace kvzap
