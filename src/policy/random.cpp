#include "policy/mix.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

void hash_positions(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                    std::uint64_t stream, int head, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::random", PolicyRange(exec, 0, positions.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        const std::uint64_t bits = mix(stream ^ static_cast<std::uint64_t>(positions(r)));
        scores(head, r) = static_cast<float>(bits >> 40) * 0x1p-24f;
      });
}

/// Gives every row a number in [0, 1) that depends only on the seed, the layer, the head's index in
/// the model and the row's position. It is the same on any number of ranks, and in every step.
///
/// One pass over positions, no extra memory.
///
/// kvpress draws from torch's generator; these are other numbers.
class Random final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t seed = integer("seed", 0, {0, 4294967295.0}, "seed of the random numbers");
  };

  explicit Random(const Parameters& parameters)
      : m_seed(static_cast<std::uint64_t>(parameters.seed)) {}

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const std::uint64_t of_layer = mix(mix(m_seed) ^ static_cast<std::uint64_t>(layer.layer()));
    for (int h = 0; h < layer.heads(); ++h) {
      const auto head = static_cast<std::uint64_t>(layer.extents().heads[h]);
      hash_positions(layer.exec(), layer.positions(h), mix(of_layer ^ head), h, scores);
    }
  }

 private:
  std::uint64_t m_seed;
};

}  // namespace

PolicyInfo random() {
  PolicyInfo info;
  info.name = "random";
  info.paper = "none: a baseline";
  info.formula = "hash of (seed, layer, head, position)";
  info.needs = "positions";
  info.cost = "O(rows), no extra memory";
  info.judges_tokens = true;
  info.scores_parts = true;
  info.make_class<Random>();
  return info;
}

}  // namespace kvzap::policy
