#include <kvzap/engine/surrogate.hpp>

#include "base/scratch.hpp"
#include "policy/new_scores.hpp"
#include "policy/registry.hpp"

namespace kvzap::policy {
namespace {

using Positions = Kokkos::View<std::int64_t*, MemorySpace>;

void number_from(const ExecutionSpace& exec, std::int64_t first, const Positions& positions) {
  Kokkos::parallel_for(
      "kvzap::policy::number", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, positions.extent(0)),
      KOKKOS_LAMBDA(std::int64_t i) { positions(i) = first + i; });
}

class Kvzap final : public Policy {
 public:
  explicit Kvzap(std::shared_ptr<Scorer> scorer) : m_scorer(std::move(scorer)) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    // Hidden states exist only during a step, so scoring again needs the scores of all tokens.
    needs.every_step = needs.accumulates = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    const ExecutionSpace& exec = layer.exec();
    base::reserve_scratch(m_positions, block.count, "kvzap::policy::positions");
    const auto positions =
        Kokkos::subview(m_positions, std::make_pair(std::int64_t{0}, block.count));
    number_from(exec, block.first, positions);
    m_scorer->score(exec, layer.layer(), positions, packed_hidden(exec, block, m_hidden),
                    m_scores.block(layer, block));
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override { m_scores.fill(layer, scores); }

 private:
  std::shared_ptr<Scorer> m_scorer;
  NewScores m_scores;
  Positions m_positions;                       // scratch
  Kokkos::View<float*, MemorySpace> m_hidden;  // scratch
};

struct KvzapParameters : PolicyParameters {
  std::string surrogate =
      file("surrogate", "", "folder of a published surrogate (config.json, *.safetensors)");
};

}  // namespace

/// KVzap (arXiv 2601.07891): a linear map or a 2-layer MLP predicts log KVzip+ scores from the
/// hidden state that enters attention; see Surrogate. The score of a row never changes. With a
/// threshold, rows are judged as they leave the window, as in the paper; with a budget, as in
/// kvpress' KVzapPress. Cost: the product of hidden states (M, hidden_size) with the surrogate's
/// weights; 4 bytes per row of the step.
PolicyInfo kvzap() {
  PolicyInfo info;
  info.name = "kvzap";
  info.paper = "KVzap, arXiv 2601.07891";
  info.formula = "a linear map or MLP of the hidden state";
  info.needs = "hidden states";
  info.cost =
      "a product of hidden states with hidden_size x KV heads (linear) or the MLP's weights";
  info.surrogate = "surrogate";
  info.judges_tokens = true;
  info.set_up_with<KvzapParameters>([](PolicyChoice& choice, const auto& p,
                                       const PolicySetup& setup) {
    choice.scorer = std::make_shared<Surrogate>(Surrogate::load(
        p.surrogate, setup.config, setup.partition, setup.comm.rank(), setup.dtype, setup.comm));
    choice.make = [scorer = choice.scorer] { return std::make_unique<Kvzap>(scorer); };
  });
  return info;
}

}  // namespace kvzap::policy
