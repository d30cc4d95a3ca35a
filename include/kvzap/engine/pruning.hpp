// How a sequence is pruned, as one value: policy, amount, moment, and the rules for combining them.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine/policies.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// The pairs that are judged.
enum class PruneMode {
  none,     // full cache
  prefill,  // the pairs of the context, once, all but its last `window`
  always    // also the pairs of questions and generated tokens, as they leave the window
};

/// The moment at which a policy with a budget chooses.
enum class PruneMoment {
  context,  // after the context
  question  // after context and question together (query-aware)
};

/// How the context is processed.
enum class PrefillMode {
  dense,  // one step: every token attends to the whole context before it, then pairs are judged
  sparse  // in chunks: a chunk attends to the rows that earlier chunks left, and to itself
};

/// Returns "none", "prefill" or "always".
std::string_view name_of(PruneMode mode);
/// Returns "context" or "question".
std::string_view name_of(PruneMoment moment);
/// Returns "dense" or "sparse".
std::string_view name_of(PrefillMode mode);

/// A part of a Pruning, for errors. The order is that of the text form.
enum class PruningField {
  policy,
  surrogate,
  threshold,
  evict_ratio,
  keep_tokens,
  kv_budget,
  layerwise,
  prune,
  prune_after,
  prefill,
  chunk,
  window,
  sink,
  decode_every,
  decode_keep,
  decode_evict_ratio,
  question,
  plan  // PruningUse::plans
};

/// How an error names a field: the program names its flags, a server the keys of a request.
using PruningNames = std::function<std::string(PruningField)>;
/// Returns the field's own name, such as "evict_ratio".
std::string_view name_of(PruningField field);
/// Names every field by name_of.
const PruningNames& plain_names();

/// A rule that a Pruning breaks.
struct PruningFault {
  enum class Code {
    out_of_range,     // a value is outside its range
    several_amounts,  // two fields give an amount, or two fields give a surrogate
    missing,          // a required field is absent
    no_effect,        // a field has no effect without another one
    conflict          // two fields, or a field and the policy, exclude each other
  };
  Code code = Code::conflict;
  /// The fields of the rule; the first one is the one to change first.
  std::vector<PruningField> fields;
  /// One line that names the fields.
  std::string text;
};
/// Returns the enumerator's own name, such as "out_of_range".
std::string_view name_of(PruningFault::Code code);

/// Thrown by `check` and `load` if a Pruning breaks a rule.
class PruningError : public Error {
 public:
  explicit PruningError(PruningFault fault) : Error(fault.text), m_fault(std::move(fault)) {}
  const PruningFault& fault() const { return m_fault; }

 private:
  PruningFault m_fault;
};

/// How a sequence is pruned. It is a value: it names files and loads none.
///
///     Pruning::kvzap("KVzap-mlp-Qwen3-8B").threshold(-4)
///     Pruning::parse("snapkv:window=32+ada@evict-ratio=0.5@prune-after=question")
struct Pruning {
  /// The amount to evict. At most one of these is set. None is set if the policy has its own
  /// amount.
  struct Amount {
    std::optional<double> threshold;  // log score; pairs with a lower score are evicted
    bool recommended = false;  // the threshold that `kvzap calibrate --evaluation` recommends
    // fraction of the tokens that the sequence has seen, in [0, 1)
    std::optional<double> evict_ratio;
    std::optional<std::int64_t> keep_tokens;  // rows per head
    std::optional<std::int64_t> kv_bytes;     // bytes of keys and values, over all layers and ranks

    bool operator==(const Amount& other) const;
    bool operator!=(const Amount& other) const { return !(*this == other); }
    /// Returns whether the amount is a threshold, given or recommended.
    bool has_threshold() const { return threshold || recommended; }
    /// Returns whether the amount is a budget: anything but a threshold.
    bool has_budget() const { return evict_ratio || keep_tokens || kv_bytes; }
  };
  /// The cuts while the model generates.
  struct DecodeCuts {
    std::int64_t every = 0;  // steps between two cuts; 0: no cuts
    // With cuts, exactly one of these is set.
    std::optional<std::int64_t> keep;   // rows per head
    std::optional<double> evict_ratio;  // fraction of the tokens so far

    bool operator==(const DecodeCuts& other) const;
    bool operator!=(const DecodeCuts& other) const { return !(*this == other); }
  };

  /// Empty: kvzap with `surrogate`, or no policy.
  PolicyText policy;
  /// Folder of the surrogate of kvzap; empty: `policy` names it, or needs none.
  std::string surrogate;
  Amount amount;
  /// Each layer has its own budget, for policies whose layers would share one (kvzip).
  bool layerwise = false;
  /// Absent: `prefill` with a policy, `none` without one.
  std::optional<PruneMode> mode;
  PruneMoment moment = PruneMoment::context;
  PrefillMode prefill = PrefillMode::dense;
  /// Tokens of a chunk of sparse prefill.
  std::int64_t chunk = 2048;
  /// Most recent tokens. A threshold never evicts them.
  int window = 128;
  /// Take the window from the surrogate's ThresholdTable: resolve_window replaces it by a number.
  bool auto_window = false;
  /// First positions. They are never evicted.
  std::int64_t sink = 0;
  DecodeCuts decode;

  /// Returns the pruning that keeps the full cache.
  static Pruning none() { return {}; }
  /// Returns KVzap (arXiv 2601.07891) with the surrogate in this folder.
  static Pruning kvzap(std::string surrogate);
  /// Parses the text that --policy, decks and `kvzap eval` use: a policy, followed by settings,
  /// each after an at sign. Settings: surrogate, threshold, evict-ratio, keep-tokens, kv-budget,
  /// prune, prune-after, prefill, chunk, window, sink, decode-every, decode-keep,
  /// decode-evict-ratio, layerwise. "threshold=auto" is recommended_threshold(), "window=auto" is
  /// auto_window. "none" is the full cache. A backslash before an at sign makes it part of the
  /// policy. Fields that the text does not name keep their values from `base`.
  /// Throws Error for an unknown key (with the nearest one), a key that occurs twice, and values of
  /// a wrong type.
  static Pruning parse(const std::string& text, Pruning base = none());

  Pruning& threshold(double log_score);
  /// Evicts by the threshold that `kvzap calibrate --evaluation` has stored beside the surrogate,
  /// instead of a given one.
  Pruning& recommended_threshold();
  Pruning& evict_ratio(double ratio);
  Pruning& keep_tokens(std::int64_t rows);
  Pruning& kv_bytes(std::int64_t bytes);

  bool operator==(const Pruning& other) const;
  bool operator!=(const Pruning& other) const { return !(*this == other); }

  bool has_policy() const { return !policy.empty() || !surrogate.empty(); }
  /// Returns the policy in force. Null without one, and if there is none of its name.
  const PolicyInfo* info() const;
  /// Returns the policy in force with the values of its parameters, including the surrogate and
  /// layerwise. Throws PruningError if these cannot be combined, and Error as parse_policy does,
  /// for a pruning without a policy too.
  PolicySpec spec(const PruningNames& names = plain_names()) const;
  /// Returns whether the policy in force needs a surrogate, and neither it nor `surrogate` names
  /// one.
  bool lacks_surrogate() const;
  /// Returns the mode in force.
  PruneMode mode_in_force() const {
    return mode.value_or(has_policy() ? PruneMode::prefill : PruneMode::none);
  }
  bool prunes() const { return mode_in_force() != PruneMode::none; }
  /// Returns the folder of the surrogate whose scores the policy uses, or "".
  std::string used_surrogate() const;
  /// Returns the surrogate's folder if its scores are used unchanged: kvzap without a modifier.
  /// Otherwise returns "".
  std::string plain_surrogate() const;
  bool is_plain_kvzap() const { return !plain_surrogate().empty(); }
  /// Returns whether the threshold is one that `kvzap calibrate` has stored beside the surrogate
  /// (ThresholdTable): plain kvzap with an evict ratio, or with the recommended threshold.
  bool looks_up_threshold() const;
  /// Returns whether a budget chooses rows: that of the amount, or one that a modifier of `spec`
  /// brings.
  bool has_budget(const PolicySpec& spec) const;
  /// Returns the amount as a budget. Without one, returns Budget::Amount::none.
  Budget budget() const;
  /// Returns the text of the policy in force, including the surrogate and layerwise; empty without
  /// a policy. Throws PruningError if these cannot be combined.
  std::string policy_text(const PruningNames& names = plain_names()) const;
  /// Returns the text that `parse` reads back as an equal value, except a policy of the caller's
  /// own, whose name it gives. Omits defaults. Returns "none" if
  /// all fields have their defaults.
  std::string text() const;
};

/// A Pruning whose policy is loaded and ready to run. `pruning.policy` need not name the policy, so
/// a program can supply a policy of its own.
struct LoadedPruning {
  Pruning pruning;
  /// Null for the full cache, and if the engine's scorer judges by pruning.amount.threshold.
  std::shared_ptr<const PolicyChoice> policy;

  /// Returns the mode in force: without a mode, `prefill` with a policy and `none` without one.
  PruneMode mode() const {
    return pruning.mode.value_or(policy ? PruneMode::prefill : pruning.mode_in_force());
  }
  bool prunes() const { return mode() != PruneMode::none; }
  /// Returns whether policy->scorer and a threshold give the same result as the policy. An engine
  /// with this scorer then needs no policy.
  bool is_judged_by_scorer() const;
  /// Returns whether a budget or the policy itself chooses rows. Otherwise a threshold judges them.
  bool chooses_rows() const;
  /// Returns the log score below which a pair is evicted, as the float that the cache compares.
  float threshold() const;
  /// Returns the policy's scorer for Engine::create, or null without one.
  std::shared_ptr<Scorer> scorer() const { return policy ? policy->scorer : nullptr; }
  /// Returns whether the whole cache exists before a row is evicted: nothing is evicted at all, or
  /// the choice waits for all layers, or the model repeats the context first.
  bool is_full_at_first() const;
  /// Returns the same policy with the amount of `other`, which must name the same policy. The two
  /// share the policy's files.
  LoadedPruning with_amount_of(const Pruning& other) const;
};

/// The use of a Pruning, on which the rules depend.
struct PruningUse {
  /// Memory is planned and nothing is run: no amount is needed, and a threshold has no effect.
  bool plans = false;
  /// The question is known together with the context.
  bool has_question = true;
};

/// Returns the first rule that a pruning breaks: a general rule, or a rule of its policy. A policy
/// of the caller's own has the rules of loaded ones. Throws Error where parse_policy does. Does not
/// communicate.
std::optional<PruningFault> find_fault(const Pruning& pruning, const PruningUse& use = {},
                                       const PruningNames& names = plain_names());
/// Checks the same rules for a loaded policy, whatever its name in the registry. `has_scorer`:
/// whether the engine has a scorer, which can judge in place of a policy.
std::optional<PruningFault> find_fault(const LoadedPruning& pruning, bool has_scorer,
                                       const PruningNames& names = plain_names());
/// Throws PruningError for the first broken rule.
void check(const Pruning& pruning, const PruningUse& use = {},
           const PruningNames& names = plain_names());
/// Checks the same rules for a loaded policy.
void check(const LoadedPruning& pruning, bool has_scorer,
           const PruningNames& names = plain_names());
/// Makes the policy of a checked pruning, with its amount. The full cache has none. `repeat`: how a
/// policy with PolicyInfo::repeats_context asks the model to repeat the context. Throws Error as
/// Pruning::spec and make_policy do, and for a pruning that still looks_up_threshold or has an
/// auto_window. Does not communicate.
LoadedPruning load(const Pruning& pruning, const PolicySetup& setup,
                   const std::optional<RepeatPrompt>& repeat = {},
                   const PruningNames& names = plain_names());
/// Returns the sizes from which a budget computes its counts, for a cache of values of this size
/// and pages of this format. Rows of the window count as those of pages.
Budget::Model budget_model(const ModelConfig& config, std::size_t value_bytes,
                           const PageFormat& format = {});
/// Throws Error, naming the smallest possible budget, if the budget is too small for `tokens`
/// tokens.
void check_budget(const Budget& budget, const ModelConfig& config, DType dtype, std::int64_t tokens,
                  const PageFormat& format = {});

/// Parses "512M", "1.5GiB", "2 GB" or "4096" as bytes: k, M, G, T and P are powers of 1000, Ki, Mi,
/// … powers of 1024; a B may follow. Throws Error naming `what` for anything else and for less than
/// 1 byte.
std::int64_t parse_bytes(const std::string& text, const std::string& what);
/// Escapes a policy for Pruning::parse: with a backslash before each @.
std::string escaped_in_settings(const std::string& policy);
/// Escapes the value of a policy's parameter for parse_policy: with a backslash before each , and
/// +.
std::string escaped_in_policy(const std::string& value);

}  // namespace kvzap
