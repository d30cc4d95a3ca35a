// The engine of a server: rank 0 decides on the next step, and all ranks carry it out.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <limits>
#include <map>

namespace kvzap::server {

struct Outcome;
struct Plan;
struct PlannedSequence;
struct PlannedSpan;

/// How a request wants its sequence pruned, as far as it differs from the server's own setting.
struct Setting {
  PruneMode prune = PruneMode::none;
  /// Log score; a pair that scores less is evicted. NaN: the server's threshold.
  float threshold = std::numeric_limits<float>::quiet_NaN();
  /// Evicted share of all pairs, for policies with a budget. Negative: the server's share.
  double evict_ratio = -1;

  /// NaN equals NaN.
  bool operator==(const Setting& other) const;
};

/// Carries out the plans of rank 0 on the engine. Every rank has one. Rank 0 passes it to a
/// Scheduler; the other ranks call `follow`.
class Executor {
 public:
  /// Translates a request's setting for the engine. Every rank calls it with the same settings.
  using Settings = std::function<PruneSetting(const Setting&)>;
  /// Abilities of a sequence with some setting.
  struct Traits {
    bool holds = true;    // a context may run in several steps (Engine::can_hold)
    bool goes_on = true;  // more context may follow, and other sequences may be forked from it
  };
  /// The traits of a setting.
  using TraitsOf = std::function<Traits(const Setting&)>;

  /// `standard`: the setting with which the engine creates sequences. `settings` is called for
  /// other settings alone. The engine outlives the executor.
  Executor(Engine& engine, const Setting& standard, Settings settings, TraitsOf traits);

  /// Carries out one plan. The Scheduler and `follow` call it. Collective. Throws an error that
  /// leaves the ranks in different states.
  Outcome operator()(const Plan& plan);
  /// Carries out the plans of rank 0 until the last one. For all ranks but 0. Collective with
  /// Scheduler::run.
  void follow();

  Engine& engine() const { return m_engine; }
  /// Whether a context with this setting may run in several steps.
  bool can_hold(const Setting& setting) const { return m_traits(setting).holds; }
  /// Whether a sequence with this setting takes more context, and others may be forked from it.
  bool can_go_on(const Setting& setting) const { return m_traits(setting).goes_on; }
  /// Number of sequences.
  std::int64_t size() const { return static_cast<std::int64_t>(m_sequences.size()); }

 private:
  struct Sequence {
    SequenceId id = -1;
    Setting setting;
  };

  void create(const PlannedSequence& wanted);
  void free(int handle);
  void step(const Plan& plan, Outcome& outcome);
  StepRule rule_of(const PlannedSpan& span) const;

  Engine& m_engine;
  Setting m_standard;
  Settings m_settings;
  TraitsOf m_traits;
  std::map<int, Sequence> m_sequences;  // by handle
  StepBatch m_batch;
};

}  // namespace kvzap::server
