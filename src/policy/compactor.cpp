#include <algorithm>

#include "base/scratch.hpp"
#include "policy/leverage.hpp"
#include "policy/non_causal.hpp"
#include "policy/registry.hpp"

namespace kvzap::policy {
namespace {

// scores += factor * summands (a head's row of a matrix)
void add_scaled(const ExecutionSpace& exec, const Policy::ScoreView& summands, double factor,
                int head, const RowPart& part, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::compactor", PolicyRange(exec, part.begin, part.begin + part.count),
      KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) += static_cast<float>(factor) * summands(head, r);
      });
}

/// Combines leverage of keys and attention within chunks: blending * leverage + non-causal. Each is
/// standardized over all heads of the layer and all tokens but the first 8 and the last 4. These
/// have the largest score of the layer (Chari and Van Durme: "Compactor", arXiv 2507.08143). See
/// policies leverage and non-causal.
///
/// Cost: that of both, and a float per row of a layer.
///
/// As in kvpress, blending is the evict ratio; the paper has a constant (blending=0.35). If tokens
/// arrive in several steps, the tokens of each step are scored by themselves, and the last 4 of
/// each step have the largest score. Rows keep the score of their step. Tokens that arrived one by
/// one have the largest score of all.
class Compactor final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t sink_start = integer("sink-start", 8, {0, 1e9}, "first tokens that stay");
    std::int64_t sink_end = integer("sink-end", 4, {0, 1e9}, "last tokens that stay");
    std::int64_t chunk =
        integer("chunk", 256, {1, 65536}, "tokens of a chunk, which see one another");
    std::int64_t sketch_dimension =
        integer("sketch-dimension", 48, {1, 4096}, "columns of the random matrix");
    double blending =
        number("blending", -1, {-1, 1e6}, "weight of leverage; below 0: the evict ratio");
    bool scaled = flag("scaled", false, "divide products by sqrt(head_dim)");
    std::int64_t seed = integer("seed", 0, {0, 4294967295.0}, "seed of the random matrix");
  };

  Compactor(const Parameters& options, std::shared_ptr<Sketches> sketches)
      : m_options(options),
        m_leverage(std::move(sketches)),
        m_attention(options.chunk, options.scaled) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    // The queries of a step exist only during the step.
    needs.every_step = true;
    needs.frequencies = true;
    needs.budget = m_options.blending < 0;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_attention.observe(layer, block, tokens_of(layer));
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    TokenRange tokens = tokens_of(layer);
    if (tokens.count() > 1 && m_attention.is_complete(layer, tokens)) {
      const auto parts = m_attention.parts(layer);
      m_attention.scores(layer, scores);
      standardize(layer, parts, scores);
      const double blending =
          m_options.blending < 0 ? layer.extents().evict_ratio : m_options.blending;
      if (blending != 0) add_leverage(layer, parts, blending, scores);
    } else {
      tokens.end = tokens.begin;
    }
    complete_scores(layer, tokens, scores);
  }

 private:
  /// The step's tokens that are not protected.
  TokenRange tokens_of(const PolicyLayer& layer) const {
    const auto& extents = layer.extents();
    const std::int64_t first = extents.tokens - extents.new_tokens;
    const std::int64_t begin = std::clamp(m_options.sink_start, first, extents.tokens);
    return {begin, std::max(begin, extents.tokens - m_options.sink_end)};
  }

  void add_leverage(PolicyLayer& layer, const std::vector<RowPart>& parts, double blending,
                    const ScoreView& scores) {
    const auto heads = static_cast<std::int64_t>(scores.extent(0));
    const auto columns = static_cast<std::int64_t>(scores.extent(1));
    base::reserve_scratch(m_summands, heads * columns, "kvzap::policy::compactor");
    const ScoreView summands(m_summands.data(),
                             Kokkos::LayoutStride(heads, columns, columns, std::int64_t{1}));
    m_leverage(layer, parts, summands);
    standardize(layer, parts, summands);
    for (int h = 0; h < layer.heads(); ++h) {
      add_scaled(layer.exec(), summands, blending, h, parts[h], scores);
    }
  }

  Parameters m_options;
  LeverageScores m_leverage;
  ChunkAttention m_attention;
  Kokkos::View<float*, MemorySpace> m_summands;
};

}  // namespace

PolicyInfo compactor() {
  PolicyInfo info;
  info.name = "compactor";
  info.paper = "Compactor, arXiv 2507.08143";
  info.formula = "blending * leverage + non-causal";
  info.needs = "queries, keys, values, the budget";
  info.cost = "O(rows * (group * chunk * head_dim + k * (head_dim + k))), k floats per row";
  info.make_with<Compactor::Parameters>([](const auto& p, const PolicySetup&) {
    const auto sketches =
        std::make_shared<Sketches>(p.sketch_dimension, static_cast<std::uint32_t>(p.seed));
    return [=] { return std::make_unique<Compactor>(p, sketches); };
  });
  return info;
}

}  // namespace kvzap::policy
