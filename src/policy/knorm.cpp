#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

void negative_norms(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys, int head,
                    const Policy::ScoreView& scores) {
  const std::int64_t dim = keys.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::knorm", PolicyRange(exec, 0, keys.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) { scores(head, r) = -norm(&keys(r, 0), dim); });
}

/// Keys of small norm get much attention, so the score of a row is the negative Euclidean norm of
/// its key (Devoto, Zhao, Scardapane and Minervini, arXiv 2406.11430). RoPE does not change norms.
///
/// One pass over the keys, (rows, head_dim) of each head; no extra memory.
///
/// The paper does not prune the first two layers; kvpress does, and so does this policy (the
/// modifier per-layer gives layers their own ratios).
class KeyNorm final : public Policy {
 public:
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    for (int h = 0; h < layer.heads(); ++h) {
      negative_norms(layer.exec(), layer.compared_keys(h), h, scores);
    }
  }
};

}  // namespace

PolicyInfo knorm() {
  PolicyInfo info;
  info.name = "knorm";
  info.paper = "Devoto et al., arXiv 2406.11430";
  info.formula = "-||k||";
  info.needs = "keys";
  info.cost = "O(rows * head_dim), no extra memory";
  info.judges_tokens = true;
  info.scores_parts = true;
  info.make = [](const PolicyArguments&, const PolicySetup&) -> PolicyMaker {
    return [] { return std::make_unique<KeyNorm>(); };
  };
  return info;
}

}  // namespace kvzap::policy
