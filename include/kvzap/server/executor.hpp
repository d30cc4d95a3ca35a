// The engines of a server: rank 0 decides on the next step, and all ranks carry it out.
#pragma once

#include <cstdint>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/server/engine_set.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvzap::server {

struct Outcome;
struct Plan;
struct PlannedSequence;
struct PlannedSpan;

/// Carries out the plans of rank 0 on the engines. Every rank has one. Rank 0 passes it to a
/// Scheduler; the other ranks call `follow`.
class Executor {
 public:
  /// Abilities of a sequence that depend on its pruning.
  struct Traits {
    bool holds = true;    // a context may run in several steps, judged then (Engine::can_hold)
    bool goes_on = true;  // more context may follow a state that other sequences are forked from
    std::string why_one;  // why the policy takes one context alone; empty: it takes several
    bool drafts = false;  // a step can check drafts (Engine::why_no_drafts)
    bool drafts_packed = false;  // the same if pages store quantised rows
    bool takes_parts = false;    // a policy takes a context in several steps (Engine::takes_parts)
    bool answers_go_on = true;   // more context may follow an answer, too
  };
  using TraitsOf = std::function<Traits(const Pruning&)>;
  using Load = std::function<LoadedPruning(const Pruning&)>;

  /// Makes an executor. `load`: loads the policies of requests (RequestPolicies::load); without it
  /// requests have the engine's policy, with an amount of their own. `traits` replaces the default
  /// traits, for tests. `make`: makes engines for requests with another type of cached rows;
  /// without it there are none. The engine must outlive the executor.
  explicit Executor(Engine& engine, Load load = {}, TraitsOf traits = {},
                    EngineSet::Make make = {});
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Carries out one plan. The Scheduler and `follow` call it. Collective. Throws an error that
  /// leaves the ranks in different states.
  Outcome operator()(const Plan& plan);
  /// Carries out the plans of rank 0 until the last one. For all ranks but 0. Collective with
  /// Scheduler::run.
  void follow();

  /// The engine of requests without a type of their own.
  Engine& engine() const { return m_engines.first(); }
  EngineSet& engines() { return m_engines; }
  const EngineSet& engines() const { return m_engines; }
  /// The pruning of requests without one of their own. Its mode is set.
  const Pruning& standard() const { return m_standard; }
  /// Returns the abilities of a sequence with this pruning. Throws Error for a pruning that the
  /// engine refuses.
  Traits traits(const Pruning& pruning) const { return m_traits(pruning); }
  /// Number of sequences.
  std::int64_t size() const { return static_cast<std::int64_t>(m_sequences.size()); }

 private:
  /// A sequence and its engine.
  struct Held {
    Engine* engine = nullptr;
    SequenceId id = -1;
  };

  Traits traits_of(const Pruning& pruning) const;
  LoadedPruning load(const Pruning& pruning) const;
  void create(const PlannedSequence& wanted);
  void read(const PlannedSequence& wanted, Outcome& outcome);
  void store(const Plan& plan, Outcome& outcome);
  std::vector<CacheReport> report(const std::vector<int>& handles) const;
  TokenRows count(int handle) const;
  void free(int handle);
  bool fork(int handle, int source, Outcome& outcome);
  void end_context(const PlannedSpan& span, Outcome& outcome);
  void step(const Plan& plan, Outcome& outcome);
  StepRule rule_of(const PlannedSpan& span) const;

  EngineSet m_engines;
  Pruning m_standard;
  Load m_load;
  TraitsOf m_traits;
  std::map<int, Held> m_sequences;  // by handle
  StepBatch m_batch;
  std::unique_ptr<SnapshotWriting> m_writing;  // a file of a sequence
};

}  // namespace kvzap::server
