// Several policies that score a context which is read once.
#pragma once

#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/policies.hpp>
#include <memory>
#include <vector>

namespace kvzap::engine {

/// Passes each step to several independent policies, each with its own budget, and stores their
/// scores. Its own scores are NaN.
class JointPolicy final : public Policy {
 public:
  /// Makes the policies of `choices`, which must outlive this object. Equal policies whose scores
  /// do not depend on the budget are made once.
  JointPolicy(const std::vector<std::shared_ptr<const PolicyChoice>>& choices,
              const Budget::Model& model);

  /// Allocates memory for scores of `tokens` tokens. heads: on this rank, for each layer.
  void reserve(const std::vector<int>& heads, std::int64_t tokens);

  PolicyNeeds needs() const override;
  void observe(PolicyLayer& layer, const TokenBlock& block) override;
  void score(PolicyLayer& layer, const ScoreView& scores) override;

  /// For choices that repeat the context: fetches the scores of all layers that are pruned, and
  /// mergers. Collective.
  void take_context_scores(const ExecutionSpace& exec, const Communicator& comm,
                           const CacheShape& shape);
  /// Adds seconds to the time of every policy.
  void add_seconds(double seconds);
  /// Returns the seconds of all policies together.
  double seconds() const;

  /// Returns the scores of the i-th of `choices`.
  const std::shared_ptr<ContextScores>& scores(std::size_t choice) const {
    return m_members[m_member_of[choice]].scores;
  }

 private:
  struct Member {
    const PolicyChoice* choice = nullptr;
    const Budget* budget = nullptr;  // the budget that the policy sees
    std::unique_ptr<Policy> policy;
    PolicyNeeds needs;
    std::shared_ptr<ContextScores> scores;
  };

  Budget::Model m_model;
  std::vector<Member> m_members;
  std::vector<std::size_t> m_member_of;  // (choice)
};

}  // namespace kvzap::engine
