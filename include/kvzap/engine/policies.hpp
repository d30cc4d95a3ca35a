// The policies and modifiers that there are, by name, and what --policy says of them.
#pragma once

#include <filesystem>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/engine/repeat_prompt.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/model/model_config.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap {

/// A parameter of a policy or modifier.
struct PolicyParameter {
  enum class Kind { integer, number, flag, text, file };

  std::string name;  // as in name:key=value
  Kind kind = Kind::number;
  std::string standard;  // its value if none is given; empty: it must be given
  double least = 0;      // integer and number: the valid range
  double most = 0;
  std::vector<std::string> choices;  // text: the valid values
  std::string help;                  // what it is, with its unit
  /// May be left out although it has no standard value; its text is empty then.
  bool optional = false;
};

/// Values of a policy's parameters, all of them present and valid.
class PolicyArguments {
 public:
  PolicyArguments() = default;
  explicit PolicyArguments(std::map<std::string, std::string> values)
      : m_values(std::move(values)) {}
  /// Whether an optional parameter was given.
  bool has(const std::string& name) const { return !text(name).empty(); }
  std::int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  bool flag(const std::string& name) const;
  const std::string& text(const std::string& name) const;

 private:
  std::map<std::string, std::string> m_values;
};

/// What a factory may want to know: the whole model (all its layers, even if fewer are run), and
/// which part of it this rank has.
struct PolicySetup {
  const ModelConfig& config;
  const HeadPartition& partition;
  DType dtype = DType::f32;
  std::filesystem::path model;  // its folder
  Communicator comm;
};

struct PolicyChoice;

/// A policy as `kvzap policies` lists it: one file of src/policy, one line in policies().
struct PolicyInfo {
  std::string name;
  std::string paper;    // "SnapKV, arXiv 2404.14469"
  std::string formula;  // one line
  std::string needs;    // "keys", "attention of the last w queries", ...
  std::string cost;     // order of time and extra memory
  std::vector<PolicyParameter> parameters;
  /// A new token's score is known from its own row and hidden state and never changes: with a
  /// threshold it is judged as it leaves the window, and --prune always works.
  bool judges_tokens = false;
  /// The rows it gives scores to are rows of one head, looked at apart from other heads, and any
  /// part of a sequence can be scored alone (for `chunk`).
  bool scores_parts = false;
  /// Keys, values and positions are all it looks at, or its state spans steps: it can score again
  /// while the model generates (--decode-every), and chunk by chunk.
  bool scores_again = true;
  /// What it scores follows from the question (--prune-after question is needed).
  bool needs_question = false;
  /// It decides which rows stay by scores of 1 and 0 and a budget of its own: no --evict-ratio,
  /// --keep-tokens or --kv-budget fits it.
  bool has_own_budget = false;
  /// It scores the context by how the model repeats it, in steps of their own once all of it has
  /// been run: PolicyChoice::repeat, Policy::context_scores.
  bool repeats_context = false;
  /// Loads what the policy needs, once for all sequences.
  std::function<PolicyMaker(const PolicyArguments&, const PolicySetup&)> make;
  /// For policies that bring more than scores (a budget's shape, a scorer): called in place of
  /// `make`, with a choice that has its budget's amount, and sets PolicyChoice::make too. Modifiers
  /// come after it. May be empty.
  std::function<void(PolicyChoice&, const PolicyArguments&, const PolicySetup&)> set_up;
};

/// All policies, in the order in which `kvzap policies` lists them.
const std::vector<PolicyInfo>& policies();

/// What a policy learns from texts before its first sequence; kvzap::calibrate runs them.
class Calibration {
 public:
  Calibration() = default;
  Calibration(const Calibration&) = delete;
  Calibration& operator=(const Calibration&) = delete;
  virtual ~Calibration() = default;

  /// File of the texts, for read_texts.
  virtual const std::filesystem::path& texts() const = 0;
  /// Forgets what was learned before.
  virtual void begin() = 0;
  /// Makes what watches the next text, which it sees as one step of a sequence of its own. Nothing
  /// follows: rows that score above 0 stay, and one is enough. This object outlives it.
  virtual std::unique_ptr<Policy> watch() = 0;
  /// All texts have been seen. Collective; every rank then knows the same.
  virtual void finish(const Communicator& comm) = 0;
};

/// A policy with its modifiers and its budget, ready to run.
struct PolicyChoice {
  std::string name;  // as it was given: "snapkv:window=32+ada"
  const PolicyInfo* info = nullptr;
  PolicyMaker make;
  Budget budget;
  /// Scores below which a pair is evicted as it leaves the window; used if the budget has no
  /// amount. While modifiers are applied: NaN if none was given.
  double threshold = 0;
  /// Close positions up after the context is pruned, and turn keys to their new ones.
  bool rerotate = false;
  /// For policies that judge new tokens from hidden states alone, in one call for all sequences of
  /// a step (kvzap): the decoder's fast path with a threshold.
  std::shared_ptr<Scorer> scorer;
  /// What `make` waits for, if there is something: calibrate() before the first sequence.
  std::shared_ptr<Calibration> calibration;
  /// How a policy with PolicyInfo::repeats_context asks the model to repeat the context. The policy
  /// sets the chunk's length, who makes the engine the rest: make_repeat_prompt.
  RepeatPrompt repeat;
  /// Some rows have the largest finite score, to mark them (critical).
  bool scores_are_marked = false;
};

/// What changes a policy's scores, its budget or what becomes of the rows that stay; combined by +.
struct ModifierInfo {
  std::string name;
  std::string paper;
  std::string effect;  // one line
  std::vector<PolicyParameter> parameters;
  /// Changes the choice, whose policy is made already (and whose budget has its amount). Throws
  /// Error if that has no meaning, saying why. Applied in the order of modifiers().
  std::function<void(PolicyChoice&, const PolicyArguments&, const PolicySetup&)> apply;
};

/// All modifiers, in the order in which they are applied.
const std::vector<ModifierInfo>& modifiers();

/// A policy as --policy names it, its parameters with all their values.
struct PolicySpec {
  std::string text;
  const PolicyInfo* info = nullptr;
  PolicyArguments arguments;
  std::vector<std::pair<const ModifierInfo*, PolicyArguments>>
      modifiers;  // in order of modifiers()
};

/// Reads "name:key=value,key=value+modifier:key=value+…"; a backslash before , or + makes it part
/// of a value. Throws Error for an unknown name or key (with the nearest one), a value out of its
/// range or a file that is missing.
PolicySpec parse_policy(const std::string& text);

/// Loads what the policy needs. `budget` has the amount that the user gave, `threshold` what was
/// given instead: one of the two, unless the policy or a modifier has its own. Throws Error for
/// files that do not fit the model and combinations without meaning, saying why. Called on every
/// rank.
PolicyChoice make_policy(const PolicySpec& spec, const Budget& budget,
                         std::optional<double> threshold, const PolicySetup& setup);

}  // namespace kvzap
