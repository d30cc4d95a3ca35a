// How a sequence is pruned, as one value: policy, amount, moment, and the rules that they keep.
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

/// Which pairs are judged.
enum class PruneMode {
  none,     // full cache
  prefill,  // those of the context, once, all but its last `window`
  always    // also those of questions and generated tokens, as they leave the window
};

/// When a policy with a budget chooses.
enum class PruneMoment {
  context,  // after the context
  question  // after context and question together (query-aware)
};

/// How the context is processed.
enum class PrefillMode {
  dense,  // one step: every token attends to the whole context before it, then pairs are judged
  sparse  // in chunks: a chunk attends to the rows that earlier chunks left, and to itself
};

/// "none", "prefill" or "always".
std::string_view name_of(PruneMode mode);
/// "context" or "question".
std::string_view name_of(PruneMoment moment);
/// "dense" or "sparse".
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

/// How an error names a field. The program names its flags, a server the keys of a request.
using PruningNames = std::function<std::string(PruningField)>;
/// The field's own name: "evict_ratio".
std::string_view name_of(PruningField field);
/// Names every field by name_of.
const PruningNames& plain_names();

/// A rule that a Pruning breaks.
struct PruningFault {
  enum class Code {
    out_of_range,     // a value is outside its range
    several_amounts,  // two fields say how much is evicted, or by which surrogate
    missing,          // a field that the others need is absent
    no_effect,        // a field has no effect without another one
    conflict          // two fields, or a field and the policy, exclude each other
  };
  Code code = Code::conflict;
  /// The fields that the rule is about, the one to change first.
  std::vector<PruningField> fields;
  /// One line that names the fields.
  std::string text;
};

/// Thrown for a fault.
class PruningError : public Error {
 public:
  explicit PruningError(PruningFault fault) : Error(fault.text), m_fault(std::move(fault)) {}
  const PruningFault& fault() const { return m_fault; }

 private:
  PruningFault m_fault;
};

/// How a sequence is pruned. A value: it names files and loads none.
///
///     Pruning::kvzap("KVzap-mlp-Qwen3-8B").threshold(-4)
///     Pruning::parse("snapkv:window=32+ada@evict-ratio=0.5@prune-after=question")
struct Pruning {
  /// How much is evicted. At most one is set, unless the policy itself says it (then none).
  struct Amount {
    std::optional<double> threshold;          // log score; a pair that scores less is evicted
    std::optional<double> evict_ratio;        // of the tokens that the sequence has seen, in [0, 1)
    std::optional<std::int64_t> keep_tokens;  // rows per head
    std::optional<std::int64_t> kv_bytes;     // of keys and values, over all layers and ranks

    bool operator==(const Amount& other) const;
    bool operator!=(const Amount& other) const { return !(*this == other); }
    /// Whether a budget is given, that is, anything but a threshold.
    bool has_budget() const { return evict_ratio || keep_tokens || kv_bytes; }
  };
  /// The cuts while the model generates.
  struct DecodeCuts {
    std::int64_t every = 0;  // steps between two cuts; 0: no cuts
    // One of these.
    std::optional<std::int64_t> keep;   // rows per head
    std::optional<double> evict_ratio;  // of the tokens so far

    bool operator==(const DecodeCuts& other) const;
    bool operator!=(const DecodeCuts& other) const { return !(*this == other); }
  };

  /// "name:key=value+modifier", see parse_policy; empty: kvzap with `surrogate`, or no policy.
  std::string policy;
  /// Folder of the surrogate of kvzap; empty: `policy` names it, or needs none.
  std::string surrogate;
  Amount amount;
  /// Layers have budgets of their own, for policies that would share one (kvzip).
  bool layerwise = false;
  /// Absent: prefill with a policy, none without.
  std::optional<PruneMode> mode;
  PruneMoment moment = PruneMoment::context;
  PrefillMode prefill = PrefillMode::dense;
  /// Tokens of a chunk of sparse prefill.
  std::int64_t chunk = 2048;
  /// Most recent tokens that a threshold never evicts.
  int window = 128;
  /// First positions that are never evicted.
  std::int64_t sink = 0;
  DecodeCuts decode;

  /// The full cache.
  static Pruning none() { return {}; }
  /// KVzap (arXiv 2601.07891) with the surrogate in this folder.
  static Pruning kvzap(std::string surrogate);
  /// Reads the text that --policy, decks and `kvzap eval` share: a policy, followed by settings,
  /// each behind an at sign: surrogate, threshold, evict-ratio, keep-tokens, kv-budget, prune,
  /// prune-after, prefill, chunk, window, sink, decode-every, decode-keep, decode-evict-ratio,
  /// layerwise. "none" is the full cache. A backslash before an at sign makes it part of the
  /// policy. Throws Error for an unknown key (with the nearest one), a key given twice, and values
  /// out of their type. Fields that the text does not name are those of `base`.
  static Pruning parse(const std::string& text, Pruning base = none());

  Pruning& threshold(double log_score);
  Pruning& evict_ratio(double ratio);
  Pruning& keep_tokens(std::int64_t rows);
  Pruning& kv_bytes(std::int64_t bytes);

  bool operator==(const Pruning& other) const;
  bool operator!=(const Pruning& other) const { return !(*this == other); }

  bool has_policy() const { return !policy.empty() || !surrogate.empty(); }
  /// The mode in force.
  PruneMode mode_in_force() const {
    return mode.value_or(has_policy() ? PruneMode::prefill : PruneMode::none);
  }
  bool prunes() const { return mode_in_force() != PruneMode::none; }
  /// Whether the surrogate's scores are used as they are, without a modifier.
  bool is_plain_kvzap() const;
  /// Whether the evict ratio stands for the threshold that `kvzap calibrate` has stored beside the
  /// surrogate (ThresholdTable): with a surrogate and no policy.
  bool looks_up_threshold() const;
  /// The amount as a budget; without one, Budget::Amount::none.
  Budget budget() const;
  /// The policy as parse_policy takes it, with the surrogate and layerwise put in; empty without a
  /// policy. Throws PruningError if these do not go together.
  std::string policy_text(const PruningNames& names = plain_names()) const;
  /// The text that parse reads back as an equal value. Leaves out defaults; "none" if all are.
  std::string text() const;
};

/// A Pruning whose policy is loaded: ready to run. `pruning.policy` need not name the policy, so
/// that a program can bring one of its own.
struct LoadedPruning {
  Pruning pruning;
  /// Null: the full cache, or the engine's scorer judges by pruning.amount.threshold.
  std::shared_ptr<const PolicyChoice> policy;

  /// The mode in force: without a mode, prefill with a policy and none without.
  PruneMode mode() const {
    return pruning.mode.value_or(policy ? PruneMode::prefill : pruning.mode_in_force());
  }
  bool prunes() const { return mode() != PruneMode::none; }
  /// Whether policy->scorer and a threshold do all that the policy would. An engine with this
  /// scorer then needs no policy.
  bool is_judged_by_scorer() const;
  /// Whether a budget or the policy itself chooses rows. Otherwise a threshold judges them.
  bool chooses_rows() const;
  /// Log score below which a pair is evicted, as the cache compares it.
  float threshold() const;
  /// The scorer that the policy brings for Engine::create; null without one.
  std::shared_ptr<Scorer> scorer() const { return policy ? policy->scorer : nullptr; }
  /// Whether the whole cache exists before a row is evicted: nothing is evicted at all, or the
  /// choice waits for all layers, or the model repeats the context first.
  bool is_full_at_first() const;
  /// The same policy with the amount of `other`, which names the same policy. The policy's files
  /// are shared.
  LoadedPruning with_amount_of(const Pruning& other) const;
};

/// What a Pruning is wanted for.
struct PruningUse {
  /// Memory is planned, nothing is run: no amount is needed, and a threshold has no effect.
  bool plans = false;
  /// A question is known together with the context.
  bool has_question = true;
};

/// The rules that every Pruning keeps, and those of its policy. Returns the first rule that it
/// breaks. Throws Error where parse_policy does. Does not communicate.
std::optional<PruningFault> find_fault(const Pruning& pruning, const PruningUse& use = {},
                                       const PruningNames& names = plain_names());
/// The same rules for a policy that is at hand, whatever its name in the registry. `has_scorer`:
/// whether the engine has a scorer, which can judge in place of a policy.
std::optional<PruningFault> find_fault(const LoadedPruning& pruning, bool has_scorer,
                                       const PruningNames& names = plain_names());
/// Throws PruningError for the first rule that is broken.
void check(const Pruning& pruning, const PruningUse& use = {},
           const PruningNames& names = plain_names());
/// The same for a policy that is at hand.
void check(const LoadedPruning& pruning, bool has_scorer,
           const PruningNames& names = plain_names());
/// The policy that is to be made for the pruning, checked against all rules; none for the full
/// cache. Throws as check does.
std::optional<PolicySpec> policy_spec(const Pruning& pruning, const PruningUse& use = {},
                                      const PruningNames& names = plain_names());
/// Makes the policy that the pruning names, with its amount; the full cache has none. `repeat`:
/// how a policy with PolicyInfo::repeats_context asks the model to repeat the context. Throws
/// PruningError as check does, Error as make_policy does and for a pruning that still
/// looks_up_threshold. Does not communicate.
LoadedPruning load(const Pruning& pruning, const PolicySetup& setup,
                   const std::optional<RepeatPrompt>& repeat = {}, const PruningUse& use = {},
                   const PruningNames& names = plain_names());
/// What a budget's counts are made of.
Budget::Model budget_model(const ModelConfig& config, DType dtype);
/// Throws Error, naming the least possible, if the budget is too small for `tokens` tokens.
void check_budget(const Budget& budget, const ModelConfig& config, DType dtype,
                  std::int64_t tokens);

/// Bytes of "512M", "1.5GiB", "2 GB" or "4096": k, M, G, T and P are powers of 1000, Ki, Mi, … of
/// 1024, a B may follow. Throws Error naming `what` for anything else and for less than 1 byte.
std::int64_t parse_bytes(const std::string& text, const std::string& what);
/// The policy as Pruning::parse takes it: with a backslash before each @.
std::string escaped_in_settings(const std::string& policy);
/// The value of a policy's parameter as parse_policy takes it: with a backslash before each , and
/// +.
std::string escaped_in_policy(const std::string& value);

}  // namespace kvzap
