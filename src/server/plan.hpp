// What all ranks of a server do next, as rank 0 has decided: a message, and carrying it out.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace kvzap::server {

/// How a request wants its sequence pruned, where it differs from what the server was started with.
struct Setting {
  PruneMode prune = PruneMode::none;
  /// NaN: the server's.
  float threshold = std::numeric_limits<float>::quiet_NaN();
  /// Of a policy's budget; negative: the server's.
  double evict_ratio = -1;

  bool operator==(const Setting& other) const;
};

/// Next tokens of a sequence, and what follows behind them.
struct PlannedSpan {
  int handle = -1;
  StepPart part = StepPart::other;
  StepOutput output = StepOutput::none;
  /// A context ends with it: it is judged (StepPart::held), or its policy told.
  bool ends_context = false;
  /// The sequence is forked then, under this handle; -1: it is not.
  int keep_as = -1;
  std::vector<TokenId> tokens;
};

/// One message. Sequences have handles that rank 0 has chosen. Done in the order of the members.
struct Plan {
  struct Create {
    int handle = -1;
    int source = -1;  // -1: an empty sequence
    Setting setting;  // of an empty one
  };
  std::vector<int> reports;  // sequences whose state is asked for
  std::vector<int> frees;
  bool trims = false;
  std::vector<Create> creates;
  std::vector<PlannedSpan> spans;
  /// Nothing comes for a while: ranks wait for the next one asleep.
  bool sleeps = false;
  /// None comes any more.
  bool ends = false;

  std::vector<std::int64_t> encode() const;
  /// Throws Error for what encode cannot have made.
  static Plan decode(const std::vector<std::int64_t>& message);
};

/// The plan of rank 0, on every rank: one broadcast, of which a decode step of some tens of
/// sequences fills a part; a second one for what does not fit. Collective.
void share(Plan& plan, const Communicator& comm);

/// What has become of a plan; the same on every rank, but for logits.
struct Outcome {
  /// Sequences that could not be made for want of memory. The step is left out then.
  std::vector<int> not_made;
  /// There was no memory for the step: no sequence has changed.
  bool out_of_memory = false;
  /// The step was taken or left out otherwise: its error. Sequences of its spans are as they were.
  std::string failure;
  /// Of each span, if there was a step.
  std::vector<StepResult> results;
  /// Of the step's sequences, those that are gone, since there was no memory for what follows it.
  std::vector<int> lost;
  /// Handles of `keep_as` under which there is no sequence, for the same reason.
  std::vector<int> not_kept;
  std::vector<CacheReport> reports;
};

/// Carries plans out, on every rank alike.
class Executor {
 public:
  /// What the engine makes of a request's setting; called on every rank alike.
  using Settings = std::function<PruneSetting(const Setting&)>;
  /// What can be done with a sequence that is pruned so.
  struct Traits {
    bool holds = true;
    bool goes_on = true;
  };
  using TraitsOf = std::function<Traits(const Setting&)>;

  /// `standard`: the setting of sequences that ask for nothing, for which `settings` is not called.
  Executor(Engine& engine, const Setting& standard, Settings settings, TraitsOf traits);

  /// Collective. Throws what cannot be gone on from.
  Outcome operator()(const Plan& plan);
  /// Carries out what rank 0 shares, until a plan ends it. For the other ranks.
  void follow();

  Engine& engine() const { return m_engine; }
  /// Whether a context under such a setting may be run in parts (Engine::can_hold).
  bool can_hold(const Setting& setting) const { return m_traits(setting).holds; }
  /// Whether a sequence under such a setting may get more context, and be a state of others.
  bool can_go_on(const Setting& setting) const { return m_traits(setting).goes_on; }
  std::int64_t size() const { return static_cast<std::int64_t>(m_sequences.size()); }

 private:
  struct Sequence {
    SequenceId id = -1;
    Setting setting;
  };

  void create(const Plan::Create& create);
  void free(int handle);
  void step(const Plan& plan, Outcome& outcome);
  StepRule rule_of(const PlannedSpan& span) const;

  Engine& m_engine;
  Setting m_standard;
  Settings m_settings;
  TraitsOf m_traits;
  std::map<int, Sequence> m_sequences;
  StepBatch m_batch;
};

}  // namespace kvzap::server
