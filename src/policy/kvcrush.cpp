#include <fmt/format.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "base/scratch.hpp"
#include "parallel/rank_exchange.hpp"
#include "policy/mix.hpp"
#include "policy/registry.hpp"
#include "policy/row_protection.hpp"
#include "policy/segments.hpp"

namespace kvzap::policy {
namespace {

using linalg::Matrix;
using Flags = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace>;

struct KvCrushParameters : PolicyParameters {
  double share = number("share", 0.25, {0, 1}, "share of the budget that representatives get");
  std::string anchor = text("anchor", "random", {"random", "zeros", "ones", "alternating"},
                            "pattern from which distances count");
  std::int64_t seed = integer("seed", 0, {0, 4294967295.0}, "seed of the random pattern");

  /// Returns the anchor's bit for a head of the model.
  bool bit(int head) const {
    if (anchor == "alternating") return head % 2 == 1;
    if (anchor == "random") {
      return mix(mix(static_cast<std::uint64_t>(seed)) ^ static_cast<std::uint64_t>(head)) >> 63;
    }
    return anchor == "ones";
  }
};

// distances(position) += 1 for each row of a head whose bit differs from the anchor's. A position
// without a row has bit 0, so that its distance begins with the number of ones in the anchor; a row
// changes that by 1 or -1 if its bit is 1.
void add_distances(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                   const Flags& bits, int head, bool anchor, const RowVector& distances) {
  const float step = anchor ? -1.0f : 1.0f;
  Kokkos::parallel_for(
      "kvzap::kvcrush::distances", RowRange(exec, 0, positions.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        if (bits(head, r) != 0) distances(positions(r)) += step;
      });
}

// of_rows(r) = distances(positions(r)), or a negative number for a row that stays anyway.
void gather_distances(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
                      const RowVector& distances, const Flags& stays, int head,
                      const RowVector& of_rows) {
  Kokkos::parallel_for(
      "kvzap::kvcrush::gather", RowRange(exec, 0, positions.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        of_rows(r) = stays(head, r) != 0 ? -1.0f : distances(positions(r));
      });
}

// Rows that go get the lowest score. The others keep theirs, from which later cuts may continue.
void lower(const ExecutionSpace& exec, const Flags& stays, int head, std::int64_t rows,
           const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::kvcrush::lower", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        if (stays(head, r) == 0) scores(head, r) = -FLT_MAX;
      });
}

/// Returns the first row of each of `count` groups of rows, in order of (distance, position). Rows
/// with a negative distance belong to no group.
std::vector<std::int64_t> representatives(const float* distances, std::int64_t rows, int most,
                                          std::int64_t count) {
  // A counting sort: distances are whole numbers from 0 to `most`.
  std::vector<std::int64_t> places(static_cast<std::size_t>(most) + 2);
  for (std::int64_t r = 0; r < rows; ++r) {
    if (distances[r] >= 0) ++places[static_cast<std::size_t>(distances[r]) + 1];
  }
  for (std::size_t d = 1; d < places.size(); ++d) places[d] += places[d - 1];
  const std::int64_t candidates = places.back();
  std::vector<std::int64_t> order(static_cast<std::size_t>(candidates));
  for (std::int64_t r = 0; r < rows; ++r) {
    if (distances[r] < 0) continue;
    const auto d = static_cast<std::size_t>(distances[r]);
    order[static_cast<std::size_t>(places[d]++)] = r;
  }
  count = std::min(count, candidates);
  std::vector<std::int64_t> found;
  for (std::int64_t i = 0; i < count; ++i) {
    found.push_back(order[static_cast<std::size_t>(i * candidates / count)]);
  }
  return found;
}

class KvCrush final : public Policy {
 public:
  KvCrush(std::unique_ptr<Policy> inner, KvCrushParameters parameters)
      : m_inner(std::move(inner)), m_parameters(std::move(parameters)) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs = m_inner->needs();
    needs.budget = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_inner->observe(layer, block);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_inner->score(layer, scores);
    const std::int64_t keep = layer.extents().keep;
    const auto few =
        static_cast<std::int64_t>(std::floor(static_cast<double>(keep) * m_parameters.share));
    if (few == 0) return;
    const ExecutionSpace& exec = layer.exec();
    const Flags flags("kvzap::kvcrush::flags", layer.heads(), scores.extent(1));
    std::vector<std::int64_t> halves, important;
    for (int h = 0; h < layer.heads(); ++h) {
      halves.push_back(layer.rows(h) / 2);
      important.push_back(std::min(layer.rows(h), keep - few));
    }
    select(layer, scores, halves, flags);
    find_distances(layer, flags);
    select(layer, scores, important, flags);
    for (int h = 0; h < layer.heads(); ++h) {
      if (layer.rows(h) <= keep) continue;
      add_representatives(layer, h, few, flags);
      lower(exec, flags, h, layer.rows(h), scores);
    }
    base::fence(exec, "kvzap::kvcrush: the flags go");
  }

 private:
  // flags = 1 for the best keep(head) rows of each head. Waits for the instance.
  static void select(PolicyLayer& layer, const ScoreView& scores,
                     const std::vector<std::int64_t>& keep, const Flags& flags) {
    std::vector<Segment> segments;
    for (int h = 0; h < layer.heads(); ++h) {
      Segment segment;
      segment.rows = layer.rows(h);
      segment.stride = static_cast<std::int64_t>(scores.stride(1));
      segment.scores = scores.data() + static_cast<std::int64_t>(scores.stride(0)) * h;
      segment.keep = flags.data() + static_cast<std::int64_t>(flags.stride(0)) * h;
      segments.push_back(segment);
    }
    select_alone(layer.exec(), keep, segments);
    judge(layer.exec(), segments);
  }

  // m_distances(position), over the heads of all ranks. Collective.
  void find_distances(PolicyLayer& layer, const Flags& bits) {
    const ExecutionSpace& exec = layer.exec();
    const std::int64_t tokens = layer.extents().tokens;
    base::reserve_scratch(m_distances, tokens, "kvzap::kvcrush::distances");
    const auto all = Kokkos::subview(m_distances, std::make_pair(std::int64_t{0}, tokens));
    float ones = 0;
    for (int h = 0; h < layer.heads(); ++h) {
      ones += m_parameters.bit(layer.extents().heads[h]) ? 1.0f : 0.0f;
    }
    Kokkos::deep_copy(exec, all, ones);
    for (int h = 0; h < layer.heads(); ++h) {
      add_distances(exec, layer.positions(h), bits, h, m_parameters.bit(layer.extents().heads[h]),
                    m_distances);
    }
    m_exchange.sum(exec, layer.comm(), Matrix(m_distances.data(), 1, tokens));
  }

  // Sets the flags of a head's representatives. Waits for the instance.
  void add_representatives(PolicyLayer& layer, int head, std::int64_t few, const Flags& flags) {
    const ExecutionSpace& exec = layer.exec();
    const std::int64_t rows = layer.rows(head);
    const RowVector of_rows(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::kvcrush::of_rows"), rows);
    gather_distances(exec, layer.positions(head), m_distances, flags, head, of_rows);
    base::fence(exec, "kvzap::kvcrush: the host reads distances");
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), of_rows);
    const auto of_head = Kokkos::subview(flags, head, Kokkos::ALL);
    const Kokkos::View<std::uint8_t*, MemorySpace> row_flags("kvzap::kvcrush::row_flags",
                                                             flags.extent(1));
    Kokkos::deep_copy(row_flags, of_head);
    const auto marks = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), row_flags);
    for (const std::int64_t r : representatives(host.data(), rows, layer.extents().kv_heads, few)) {
      marks(r) = 1;
    }
    Kokkos::deep_copy(row_flags, marks);
    Kokkos::deep_copy(of_head, row_flags);
  }

  std::unique_ptr<Policy> m_inner;
  KvCrushParameters m_parameters;
  parallel::RankExchange m_exchange;
  RowVector m_distances;  // (position), scratch
};

void refuse(bool condition, const std::string& why) {
  if (condition) throw Error(fmt::format("kvcrush has no meaning here: {}", why));
}

}  // namespace

/// KVCrush (Jha et al., arXiv 2503.00022): a share of the budget is for rows that represent those
/// that go, over the scores of any policy. Of the k rows that a head keeps, k - floor(share k) are
/// those with the best scores. A token's pattern has a bit for each KV head of the layer: 1 if the
/// head has a row of it whose score is in the upper half of the head's rows. The head's other rows,
/// in order of (Hamming distance of the pattern from the anchor, position), form floor(share k)
/// groups of equal size (up to one row), and the first row of each group stays.
///
/// Shapes: distances (token). Cost: two selections of the best rows, a sum over ranks of one float
/// per token, and a pass over the distances on the host. Memory: 4 bytes per token and 5 per row.
///
/// The policy's scores decide what is important; the paper takes those of H2O or SnapKV. Rows that
/// go get the lowest score, so that first tokens (`--sink`) take the place of the lowest others.
/// The authors' implementation in OpenVINO GenAI evicts blocks of tokens in all heads: a block's
/// pattern has a bit for each of its tokens, whether their scores, summed over heads, are in the
/// upper half. Here each head keeps rows of its own, so that a row takes the place of a block, and
/// heads that of the block's tokens, as in the paper. OpenVINO takes every floor(n / groups)-th of
/// n blocks, which leaves out the last groups unless n is a multiple; its anchor `mean` is that of
/// zeros here, as no head has more than half of its rows in the upper half. Random bits differ.
ModifierInfo kvcrush() {
  ModifierInfo info;
  info.name = "kvcrush";
  info.paper = "KVCrush, arXiv 2503.00022";
  info.effect = "a share of the budget is for rows that represent groups of evicted ones";
  info.apply_with<KvCrushParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    if (!choice.budget.has_amount()) {
      throw Error(
          "kvcrush divides a budget; give an evict ratio, a number of tokens or a size instead of "
          "a threshold");
    }
    refuse(choice.budget.pool != Budget::Pool::head,
           "representatives are a share of each head's rows, so that heads cannot compete (ada, "
           "global, fastkvzip)");
    refuse(choice.budget.chunk != 0 || choice.budget.group != 0,
           "it chooses among all rows of a head, not among parts or groups (chunk, chunkkv)");
    refuse(choice.make()->needs().every_step,
           fmt::format("policy {} continues from its scores of earlier steps, which it would lose",
                       choice.info->name));
    choice.scorer = nullptr;
    choice.make = [inner = choice.make, p] { return std::make_unique<KvCrush>(inner(), p); };
  });
  return info;
}

}  // namespace kvzap::policy
