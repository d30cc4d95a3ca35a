#include <algorithm>

#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

void sinks_and_newest(const ExecutionSpace& exec, std::int64_t rows, std::int64_t sink,
                      std::int64_t pruned, int head, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::streaming_llm", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = r >= sink && r < sink + pruned ? 0.0f : 1.0f;
      });
}

/// Keeps attention sinks and the newest rows. The first `sink` rows of a head have the score 1. Of
/// the rows that follow, the budget evicts the oldest, which have 0; the others have 1 (Xiao, Tian,
/// Chen, Han and Lewis: "StreamingLLM", arXiv 2309.17453).
///
/// One pass over scores, no extra memory. Without a budget (with a threshold) all rows have 1.
///
/// In the paper, positions are those in the cache, as if evicted rows had never existed: modifier
/// rerotate.
class StreamingLlm final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t sink = integer("sink", 4, {0, 1e9}, "first tokens that stay");
  };

  explicit StreamingLlm(const Parameters& parameters) : m_sink(parameters.sink) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.budget = true;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      const std::int64_t pruned = std::max<std::int64_t>(0, rows - layer.extents().keep);
      sinks_and_newest(layer.exec(), rows, m_sink, pruned, h, scores);
    }
  }

 private:
  std::int64_t m_sink;
};

}  // namespace

PolicyInfo streaming_llm() {
  PolicyInfo info;
  info.name = "streaming-llm";
  info.paper = "StreamingLLM, arXiv 2309.17453";
  info.formula = "1 for the first and the newest rows, else 0";
  info.needs = "the budget";
  info.cost = "O(rows), no extra memory";
  info.scores_parts = true;
  info.make_class<StreamingLlm>();
  return info;
}

}  // namespace kvzap::policy
