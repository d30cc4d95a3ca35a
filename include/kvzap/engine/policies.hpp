// The list of policies and modifiers, and the parser of the text that names them.
#pragma once

#include <deque>
#include <filesystem>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/policy.hpp>
#include <kvzap/engine/policy_parameters.hpp>
#include <kvzap/engine/policy_text.hpp>
#include <kvzap/engine/repeat_prompt.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/engine/value_merger.hpp>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap {

/// The input of a policy's factory: the whole model (all its layers, even if fewer are run) and
/// this rank's part of it.
struct PolicySetup {
  const ModelConfig& config;
  const HeadPartition& partition;
  DType dtype = DType::f32;
  std::filesystem::path model;  // its folder
  Communicator comm;
  std::int64_t running_layers = 0;  // the first ones, if `config` has more; 0: all

  /// Whether a table for so many layers has all layers of the model, or those that run.
  bool has_layers(std::int64_t layers) const {
    return layers == config.num_hidden_layers || (layers > 0 && layers == running_layers);
  }
};

struct PolicyChoice;
/// Changes a choice by the values of a policy's or modifier's parameters.
using ChoiceChange = std::function<void(PolicyChoice&, const PolicyArguments&, const PolicySetup&)>;

/// Returns `change(PolicyChoice&, const Parameters&, const PolicySetup&)` for untyped values.
template <class Parameters, class Change>
ChoiceChange with_values(Change change) {
  return
      [change](PolicyChoice& choice, const PolicyArguments& arguments, const PolicySetup& setup) {
        change(choice, values_of<Parameters>(arguments), setup);
      };
}

/// A policy as `kvzap policies` lists it: one file of src/policy and one line of registry.cpp, or
/// one that a program adds by add_policy.
struct PolicyInfo {
  std::string name;
  std::string paper;    // "SnapKV, arXiv 2404.14469"
  std::string formula;  // one line
  std::string needs;    // "keys", "attention of the last w queries", ...
  std::string cost;     // time and extra memory
  std::vector<PolicyParameter> parameters;
  /// The flag among `parameters` that Pruning::layerwise sets: the layers share the budget unless
  /// it is on. Empty: every layer has a budget.
  std::string layerwise;
  /// The file among `parameters` that Pruning::surrogate sets. Empty: none.
  std::string surrogate;
  /// The score of a new token depends only on its own row and hidden state and never changes. So a
  /// threshold judges the token as it leaves the window, and PruneMode::always works.
  bool judges_tokens = false;
  /// The policy scores the rows of one head without looking at other heads, and it can score any
  /// part of a sequence alone (for `chunk`).
  bool scores_parts = false;
  /// The policy uses only keys, values and positions, or keeps its state across steps. So it can
  /// score again while the model generates (Pruning's decode cadence) and chunk by chunk.
  bool scores_again = true;
  /// Scores depend on the question, so pruning must follow it (PruneMoment::question). They need
  /// the blocks of the question and the rows before it, and no newest queries of earlier tokens
  /// (Engine::run_with_question).
  bool needs_question = false;
  /// The policy itself chooses the rows that stay, with scores of 1 and 0. So it accepts no amount
  /// and no threshold.
  bool has_own_budget = false;
  /// The policy scores how the model repeats the context, in separate steps after the whole
  /// context: PolicyChoice::repeat, Policy::context_scores.
  bool repeats_context = false;
  /// With repeats_context: no words ask for the repeat (RepeatPrompt::is_bare).
  bool repeats_without_words = false;
  /// The whole number among `parameters` that is RepeatPrompt::chunk. Empty: none.
  std::string repeat_chunk;
  /// Loads the policy's files and tables, once for all sequences.
  std::function<PolicyMaker(const PolicyArguments&, const PolicySetup&)> make;
  /// For policies that define more than scores (the shape of a budget, a scorer). Called instead of
  /// `make`, with a choice whose budget has its amount. Also sets PolicyChoice::make. Modifiers are
  /// applied afterwards. May be empty.
  ChoiceChange set_up;
  /// The part of a budget's shape that modifiers replace unless they keep it
  /// (ModifierInfo::keeps_shape). Called between `set_up` and the modifiers. May be empty.
  std::function<void(Budget&, const PolicyArguments&)> shape;

  /// Sets `parameters` to those of Parameters, a struct of PolicyParameters, and `make` to
  /// `maker(const Parameters&, const PolicySetup&)`, which returns a PolicyMaker.
  template <class Parameters, class Maker>
  void make_with(Maker maker) {
    parameters = described<Parameters>();
    make = [maker](const PolicyArguments& arguments, const PolicySetup& setup) -> PolicyMaker {
      return maker(values_of<Parameters>(arguments), setup);
    };
  }
  /// The same for a class that is constructed from its parameters, Class::Parameters.
  template <class Class>
  void make_class() {
    using Parameters = typename Class::Parameters;
    make_with<Parameters>([](const Parameters& p, const PolicySetup&) {
      return [p] { return std::make_unique<Class>(p); };
    });
  }
  /// Sets `set_up` to `make`, if that is set, and then
  /// `change(PolicyChoice&, const Parameters&, const PolicySetup&)`. Without `make`, `change` sets
  /// PolicyChoice::make, and `make` returns that.
  template <class Parameters, class Change>
  void set_up_with(Change change) {
    parameters = described<Parameters>();
    set_up_after_make(with_values<Parameters>(change));
  }

 private:
  void set_up_after_make(ChoiceChange change);
};

/// Returns all policies, in the order of `kvzap policies`: kvzap's own, then those of add_policy.
const std::deque<PolicyInfo>& policies();

/// Adds a policy of your own to policies(). Texts of policies, options of the program and requests
/// to the server then name it as they name the others. Call it before other threads use kvzap.
/// Throws Error if its name is taken, begins with - or has other characters than letters, digits, _
/// and -, or if it has neither `make` nor `set_up`.
void add_policy(PolicyInfo info);

/// Learns the tables of a policy from texts, before its first sequence. kvzap::learn_from_texts
/// runs the texts.
class TextLearner {
 public:
  TextLearner() = default;
  TextLearner(const TextLearner&) = delete;
  TextLearner& operator=(const TextLearner&) = delete;
  virtual ~TextLearner() = default;

  /// Returns the file of the texts, for read_texts.
  virtual const std::filesystem::path& texts() const = 0;
  /// Discards the results of earlier texts.
  virtual void begin() = 0;
  /// Makes the policy that observes the next text. It sees the text as one step of its own
  /// sequence. Nothing follows that step; rows that score above 0 stay, and one row is enough. This
  /// object outlives the policy.
  virtual std::unique_ptr<Policy> watch() = 0;
  /// Called after all texts. Collective; afterwards every rank has the same results.
  virtual void finish(const Communicator& comm) = 0;
};

/// A policy with its modifiers and its budget, ready to run.
struct PolicyChoice {
  std::string name;  // as given: "snapkv:window=32+ada"
  const PolicyInfo* info = nullptr;
  PolicyMaker make;
  Budget budget;
  /// A pair with a score below this is evicted as it leaves the window. Used if the budget has no
  /// amount. NaN while modifiers are applied, if no threshold was given.
  double threshold = 0;
  /// Renumber positions without gaps after the context is pruned, and rotate keys to them.
  bool rerotate = false;
  /// What rows that stay take up of those that a cut evicts (merge, cam). Empty: nothing. Values
  /// that fit changes are those of Policy::context_merger.
  MergerMaker merger;
  /// `merger` works in cuts after the context alone, by the attention that rows have received in
  /// the steps before: CutHead::attention.
  bool sums_attention = false;
  /// For policies that judge new tokens from hidden states alone, in one call for all sequences of
  /// a step (kvzap): the decoder's fast path with a threshold.
  std::shared_ptr<Scorer> scorer;
  /// If set, call kvzap::learn_from_texts before the first sequence; `make` depends on its results.
  std::shared_ptr<TextLearner> learner;
  /// The prompt by which a policy with PolicyInfo::repeats_context asks the model to repeat the
  /// context. The policy sets the length of a chunk. The caller that makes the engine sets
  /// everything else with make_repeat_prompt.
  RepeatPrompt repeat;
  /// Why later steps cannot continue from the scores of earlier ones. Empty: they can, or need not.
  std::string why_once;
  /// Some rows are marked with the largest finite score (critical).
  bool scores_are_marked = false;
};

/// A change of a policy's scores, of its budget or of the kept rows; combined by +.
struct ModifierInfo {
  std::string name;
  std::string paper;
  std::string effect;  // one line
  std::vector<PolicyParameter> parameters;
  /// The parameter that is an amount of its own, if it is given. Empty: none.
  std::string amount;
  /// `amount` is a budget.
  bool gives_budget = false;
  /// A threshold decides, not a budget.
  bool judges_rows = false;
  /// All layers share the budget (Budget::Pool::model).
  bool pools_layers = false;
  /// Makes a budget that no other modifier can change. parse_policy refuses others beside it.
  bool is_alone = false;
  /// Works in cuts after the context alone (Pruning::decode).
  bool needs_decode_cuts = false;
  /// Needs a policy with PolicyInfo::repeats_context, which takes no other modifiers.
  bool needs_repeat = false;
  /// Keeps the budget's shape that belongs to the policy (PolicyInfo::shape).
  bool keeps_shape = false;
  /// Changes the choice, whose policy exists already (and whose budget has its amount). Throws
  /// Error that gives the reason if the combination has no meaning. Applied in the order of
  /// modifiers().
  ChoiceChange apply;

  /// Sets `parameters` to those of Parameters, a struct of PolicyParameters, and `apply` to
  /// `change(PolicyChoice&, const Parameters&, const PolicySetup&)`.
  template <class Parameters, class Change>
  void apply_with(Change change) {
    parameters = described<Parameters>();
    apply = with_values<Parameters>(change);
  }
};

/// Returns all modifiers, in the order in which they are applied.
const std::vector<ModifierInfo>& modifiers();

/// A policy whose text is valid, with the values of all parameters.
struct PolicySpec {
  std::string text;
  const PolicyInfo* info = nullptr;
  PolicyArguments arguments;
  std::vector<std::pair<const ModifierInfo*, PolicyArguments>>
      modifiers;  // in order of modifiers()

  /// Returns whether one of the modifiers has this property, such as &ModifierInfo::judges_rows.
  bool has_modifier(bool ModifierInfo::*property) const;
  /// Returns whether one of the modifiers has an amount of its own.
  bool has_amount_of_modifier() const;
  /// Returns whether all layers share the budget (Budget::Pool::model).
  bool pools_layers() const;
  /// Returns the tokens of the context that the model repeats at a time; 0 if it repeats none.
  std::int64_t repeat_chunk() const;
};

/// Parses a policy. Throws Error for an unknown name or key (with the nearest known one), for a
/// value outside its range, and for a missing file.
PolicySpec parse_policy(const PolicyText& text);

/// Loads the policy's files and returns the policy with its budget. Give an amount in `budget` or a
/// `threshold`, exactly one of the two, unless the policy or a modifier defines its own. Every rank
/// must call it. Throws Error that gives the reason for files that do not fit the model and for
/// combinations without meaning.
PolicyChoice make_policy(const PolicySpec& spec, const Budget& budget,
                         std::optional<double> threshold, const PolicySetup& setup);

}  // namespace kvzap
