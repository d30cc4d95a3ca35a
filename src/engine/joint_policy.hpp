// Several policies that score one context while it is read once.
#pragma once

#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/policies.hpp>
#include <memory>
#include <vector>

namespace kvzap::detail {

/// Shows each step to policies that do not know of one another, each with the budget that it is to
/// think it had, and keeps what they score to itself: its own scores say nothing (NaN).
class JointPolicy final : public Policy {
 public:
  /// Makes the policies of `choices`, which outlive this object. Equal ones whose scores do not
  /// depend on the budget are made once.
  JointPolicy(const std::vector<std::shared_ptr<const PolicyChoice>>& choices,
              const Budget::Model& model);

  /// Takes the memory for scores of `tokens` tokens; heads: on this rank, of each layer.
  void reserve(const std::vector<int>& heads, std::int64_t tokens);

  PolicyNeeds needs() const override;
  void observe(PolicyLayer& layer, const TokenBlock& block) override;
  void score(PolicyLayer& layer, const ScoreView& scores) override;

  /// For choices that have the context repeated: fetches the scores of all layers. Collective.
  void take_context_scores(const ExecutionSpace& exec, const Communicator& comm, int layers);
  /// Adds seconds to those of every policy.
  void add_seconds(double seconds);
  /// Seconds of all policies together.
  double seconds() const;

  /// Of the i-th of `choices`.
  const std::shared_ptr<ContextScores>& scores(std::size_t choice) const {
    return m_members[m_member_of[choice]].scores;
  }

 private:
  struct Member {
    const PolicyChoice* choice = nullptr;
    const Budget* budget = nullptr;  // that it is to see
    std::unique_ptr<Policy> policy;
    PolicyNeeds needs;
    std::shared_ptr<ContextScores> scores;
  };

  Budget::Model m_model;
  std::vector<Member> m_members;
  std::vector<std::size_t> m_member_of;  // (choice)
};

}  // namespace kvzap::detail
