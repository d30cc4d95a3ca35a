#include "engine/joint_policy.hpp"

#include <algorithm>
#include <limits>

#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "base/stopwatch.hpp"
#include "engine/policy_layer.hpp"

namespace kvzap::engine {
namespace {

/// A layer as one of several policies sees it: with its own budget, and with the number of recent
/// tokens that it requested.
class MemberLayer final : public PolicyLayer {
 public:
  MemberLayer(PolicyLayer& whole, const Budget* budget, const Budget::Model& model,
              std::int64_t recent)
      : PolicyLayer(whole.exec(), whole.comm()), m_whole(&whole), m_recent(recent) {
    m_extents = whole.extents();
    set_keep(budget, model, m_extents.tokens, m_extents);
  }

  using PolicyLayer::keys;
  using PolicyLayer::positions;
  using PolicyLayer::values;
  PositionView positions(int head, std::int64_t begin, std::int64_t count) override {
    return m_whole->positions(head, begin, count);
  }
  RowsView keys(int head, std::int64_t begin, std::int64_t count) override {
    return m_whole->keys(head, begin, count);
  }
  RowsView values(int head, std::int64_t begin, std::int64_t count) override {
    return m_whole->values(head, begin, count);
  }
  Kokkos::View<const float*, MemorySpace> cached_scores(int head) override {
    return m_whole->cached_scores(head);
  }
  TokenBlock recent() override {
    if (m_recent <= 0) throw Error("policy: it asks for recent tokens without needing them");
    TokenBlock block = m_whole->recent();
    const std::int64_t count = std::min(block.count, m_recent);
    block.queries = Kokkos::subview(block.queries, std::make_pair(block.count - count, block.count),
                                    Kokkos::ALL, Kokkos::ALL);
    block.first += block.count - count;
    block.count = count;
    return block;
  }
  void attention_mass(const TokenBlock& queries, MassReduction reduction, const MassView& mass,
                      const MassFactors& factors) override {
    m_whole->attention_mass(queries, reduction, mass, factors);
  }
  RowsView output_weights(int query_head) override { return m_whole->output_weights(query_head); }
  Kokkos::View<const float*, MemorySpace> inverse_frequencies() override {
    return m_whole->inverse_frequencies();
  }

 private:
  PolicyLayer* m_whole;
  std::int64_t m_recent;
};

void fill_with_nan(const ExecutionSpace& exec, const Policy::ScoreView& scores) {
  const auto columns = static_cast<std::int64_t>(scores.extent(1));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Kokkos::parallel_for(
      "kvzap::engine::no_scores",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0,
                                          static_cast<std::int64_t>(scores.extent(0)) * columns),
      KOKKOS_LAMBDA(const std::int64_t i) { scores(i / columns, i % columns) = nan; });
}

}  // namespace

JointPolicy::JointPolicy(const std::vector<std::shared_ptr<const PolicyChoice>>& choices,
                         const Budget::Model& model)
    : m_model(model) {
  for (const auto& choice : choices) {
    const auto same = std::find_if(m_members.begin(), m_members.end(), [&](const Member& member) {
      return member.choice == choice.get() ||
             (!member.needs.budget && member.choice->name == choice->name &&
              member.choice->info == choice->info);
    });
    m_member_of.push_back(static_cast<std::size_t>(same - m_members.begin()));
    if (same != m_members.end()) continue;
    Member member;
    member.choice = choice.get();
    // A repeat of the context is not pruned.
    member.budget = choice->info->repeats_context ? nullptr : &choice->budget;
    member.policy = choice->make();
    member.needs = member.policy->needs();
    member.scores = std::make_shared<ContextScores>();
    m_members.push_back(std::move(member));
  }
}

void JointPolicy::reserve(const std::vector<int>& heads, std::int64_t tokens) {
  for (const Member& member : m_members) {
    for (const int own : heads) {
      base::before_allocation(static_cast<std::size_t>(own) * static_cast<std::size_t>(tokens) *
                              sizeof(float));
      member.scores->layers.emplace_back(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::context_scores"), own,
          tokens);
    }
  }
}

PolicyNeeds JointPolicy::needs() const {
  PolicyNeeds all;
  for (const Member& member : m_members) {
    all.blocks = all.blocks || member.needs.blocks;
    all.log_sum_exp = all.log_sum_exp || member.needs.log_sum_exp;
    all.recent = std::max(all.recent, member.needs.recent);
    all.frequencies = all.frequencies || member.needs.frequencies;
    all.output_weights = all.output_weights || member.needs.output_weights;
  }
  return all;
}

void JointPolicy::observe(PolicyLayer& layer, const TokenBlock& block) {
  for (Member& member : m_members) {
    if (!member.needs.blocks) continue;
    const base::Stopwatch watch(member.scores->seconds);
    MemberLayer own(layer, member.budget, m_model, member.needs.recent);
    member.policy->observe(own, block);
    base::fence(layer.exec(), "kvzap::engine: each policy is timed");
  }
}

void JointPolicy::score(PolicyLayer& layer, const ScoreView& scores) {
  for (Member& member : m_members) {
    const base::Stopwatch watch(member.scores->seconds);
    MemberLayer own(layer, member.budget, m_model, member.needs.recent);
    member.policy->score(own, member.scores->layers.at(layer.layer()));
    base::fence(layer.exec(), "kvzap::engine: each policy is timed");
  }
  fill_with_nan(layer.exec(), scores);
}

void JointPolicy::take_context_scores(const ExecutionSpace& exec, const Communicator& comm,
                                      const CacheShape& shape) {
  for (Member& member : m_members) {
    const base::Stopwatch watch(member.scores->seconds);
    for (int l = 0; l < static_cast<int>(shape.heads.size()); ++l) {
      auto& layer = member.scores->layers.emplace_back();
      if (shape.has_pages(l)) layer = member.policy->context_scores(exec, comm, l);
    }
    member.scores->merger = member.policy->context_merger();
    base::fence(exec, "kvzap::engine: each policy is timed");
  }
}

void JointPolicy::add_seconds(double seconds) {
  for (Member& member : m_members) member.scores->seconds += seconds;
}

double JointPolicy::seconds() const {
  double sum = 0;
  for (const Member& member : m_members) sum += member.scores->seconds;
  return sum;
}

}  // namespace kvzap::engine
