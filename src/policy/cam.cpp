// Modifier cam: kept values take up shares of evicted ones, drawn by attention.
#include <algorithm>
#include <limits>

#include "policy/merged_rows.hpp"
#include "policy/mix.hpp"
#include "policy/registry.hpp"

namespace kvzap::policy {
namespace {

struct CamParameters : PolicyParameters {
  std::int64_t window =
      integer("window", 32, {1, 1 << 20}, "kept rows that share the value of an evicted one");
  std::int64_t seed = integer("seed", 0, {0, 4294967295.0}, "seed of the draws");
};

/// CaM (Zhang et al., ICML 2024, openreview LCTmppB165), as in kvpress' CAMPress: in each cut after
/// the context, kept rows take up the values of some of the rows that it evicts. With A(r) the
/// attention that row r has received since the context,
///
///     p(e) = min(1, A(e) / (mean of A over W(e))),
///     v(k) = v(k) + sum over e of b(e) v(e) / |W(e)|
///
/// for the kept rows k of W(e), the first `window` ones after e by position. Here b(e) is 1 with
/// probability p(e), otherwise 0. Candidates e are the n evicted rows of the head with the highest
/// scores, of equal ones the newest, where n is the number of steps since the context or the last
/// cut. A(r) is the sum, over all steps after the context, of the probabilities that the step's
/// last token gives r, over the query heads of the group. If both A(e) and the mean are 0, p is 0.
///
/// kvpress takes the same candidates and windows in all heads of a layer, by mean scores. Here each
/// head has those of its own rows, because heads evict different ones. This is the same if heads
/// have equal scores (tova, streaming-llm) or if there is one KV head. Draws are a hash of (seed,
/// layer, head, position), the same on any number of ranks; kvpress draws from torch's generator.
///
/// Cost: in each step the attention scores of the step's last token once more, 2 rows head_dim
/// operations per query head, and 8 bytes per row and KV head; in a cut a pass over the values
/// of the rows, and n * window * head_dim operations per head.
class CacheMerge final : public ValueMerger {
 public:
  explicit CacheMerge(const CamParameters& parameters)
      : m_window(parameters.window), m_seed(static_cast<std::uint64_t>(parameters.seed)) {}

  const MergedValues& merge(const CutHead& head) override {
    divide(head);
    choose_candidates(head);
    draw(head);
    return m_rows.add(head, m_entries, m_kept.data(), static_cast<std::int64_t>(m_kept.size()),
                      false, m_values);
  }

 private:
  struct Candidate {
    std::int32_t row = 0;
    std::int32_t first = 0;  // of its window, among the rows that stay
  };

  void divide(const CutHead& head) {
    m_kept.clear();
    m_candidates.clear();
    for (std::int32_t row = 0; row < static_cast<std::int32_t>(head.rows()); ++row) {
      if (head.keep[row]) {
        m_kept.push_back(row);
      } else {
        m_candidates.push_back({row, static_cast<std::int32_t>(m_kept.size())});
      }
    }
  }

  // Leaves the evicted rows with the highest scores, by position.
  void choose_candidates(const CutHead& head) {
    const auto score = [&](const Candidate& of) {
      const float own = head.scores[of.row];
      return own == own ? own : -std::numeric_limits<float>::infinity();
    };
    const auto count = static_cast<std::ptrdiff_t>(
        std::min(head.steps, static_cast<std::int64_t>(m_candidates.size())));
    std::partial_sort(m_candidates.begin(), m_candidates.begin() + count, m_candidates.end(),
                      [&](const Candidate& a, const Candidate& b) {
                        const float of_a = score(a), of_b = score(b);
                        return of_a != of_b ? of_a > of_b : a.row > b.row;
                      });
    m_candidates.resize(static_cast<std::size_t>(count));
    std::sort(m_candidates.begin(), m_candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.row < b.row; });
  }

  // Lists the rows of the windows of those that are drawn.
  void draw(const CutHead& head) {
    // Other bits than those of policy random with this seed.
    std::uint64_t stream = mix(mix(m_seed) + 1);
    stream = mix(stream ^ static_cast<std::uint64_t>(head.layer));
    stream = mix(stream ^ static_cast<std::uint64_t>(head.head));
    const auto kept = static_cast<std::int64_t>(m_kept.size());
    m_entries.clear();
    for (const Candidate& each : m_candidates) {
      const std::int64_t count = std::min(m_window, kept - each.first);
      if (count == 0) continue;
      float sum = 0;
      for (std::int64_t k = 0; k < count; ++k) sum += head.attention[m_kept[each.first + k]];
      const float probability = head.attention[each.row] / (sum / static_cast<float>(count));
      const auto position = static_cast<std::uint64_t>(head.positions[each.row]);
      const float drawn = static_cast<float>(mix(stream ^ position) >> 40) * 0x1p-24f;
      if (!(drawn < probability)) continue;  // also for NaN
      for (std::int32_t k = 0; k < static_cast<std::int32_t>(count); ++k) {
        m_entries.push_back({each.first + k, each.row, 1 / static_cast<float>(count)});
      }
    }
  }

  std::int64_t m_window;
  std::uint64_t m_seed;
  std::vector<std::int32_t> m_kept;  // rows
  std::vector<Candidate> m_candidates;
  std::vector<MergeEntry> m_entries;
  MergedRows m_rows;
  MergeFloats m_values;
};

}  // namespace

ModifierInfo cam() {
  ModifierInfo info;
  info.name = "cam";
  info.paper = "CaM, openreview LCTmppB165 (kvpress' CAMPress)";
  info.effect = "in decode, kept values take up shares of evicted ones, drawn by their attention";
  info.needs_decode_cuts = true;
  info.apply_with<CamParameters>([](PolicyChoice& choice, const CamParameters& p,
                                    const PolicySetup& setup) {
    if (!choice.budget.has_amount()) {
      throw Error(
          "cam takes up rows that cuts of a budget evict; give an evict ratio, a number of tokens "
          "or a size instead of a threshold, which judges rows one by one");
    }
    if (choice.merger) {
      throw Error("cam and merge both change the values of kept rows; give one of them");
    }
    if (setup.config.row_vectors() == 1) {
      throw Error(
          "cam has no meaning here: with latent attention a row has no value beside its key");
    }
    choice.merger = [p] { return std::make_unique<CacheMerge>(p); };
    choice.sums_attention = true;
  });
  return info;
}

}  // namespace kvzap::policy
