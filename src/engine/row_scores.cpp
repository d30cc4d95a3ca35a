#include "engine/row_scores.hpp"

#include <algorithm>

#include "base/scratch.hpp"

namespace kvzap::engine {

LayerScores copy_first(const ExecutionSpace& exec, const LayerScores& scores, std::int64_t sink) {
  LayerScores copies;
  for (const auto& of_layer : scores) {
    const auto rows = std::min<std::int64_t>(sink, of_layer.extent(1));
    base::before_allocation(of_layer.extent(0) * rows * sizeof(float));
    copies.emplace_back(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::first"),
                        of_layer.extent(0), rows);
    Kokkos::deep_copy(
        exec, copies.back(),
        Kokkos::subview(of_layer, Kokkos::ALL, std::make_pair(std::int64_t{0}, rows)));
  }
  return copies;
}

void put_back(const ExecutionSpace& exec, const LayerScores& copies, const LayerScores& scores) {
  for (std::size_t l = 0; l < copies.size(); ++l) {
    const auto rows = static_cast<std::int64_t>(copies[l].extent(1));
    Kokkos::deep_copy(
        exec, Kokkos::subview(scores[l], Kokkos::ALL, std::make_pair(std::int64_t{0}, rows)),
        copies[l]);
  }
}

std::int64_t count_non_finite(const ExecutionSpace& exec, const ScoredLayer& layer,
                              std::int64_t end) {
  const auto scores = layer.scores;
  const auto keep = layer.keep;
  std::int64_t count = 0;
  Kokkos::parallel_reduce(
      "kvzap::engine::count_non_finite",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0,
                                          static_cast<std::int64_t>(layer.heads.size()) * end),
      KOKKOS_LAMBDA(const std::int64_t i, std::int64_t& sum) {
        const bool stays = keep(i / end, i % end) != 0;
        if (stays && !EvictionRule::is_finite(scores(i / end, i % end))) ++sum;
      },
      count);
  return count;
}

void judge_rows(const ExecutionSpace& exec, const ScoredLayer& layer, const EvictionRule& rule,
                std::int64_t end) {
  const auto scores = layer.scores;
  const auto keep = layer.keep;
  const auto columns = static_cast<std::int64_t>(keep.extent(1));
  Kokkos::parallel_for(
      "kvzap::engine::judge_rows",
      Kokkos::RangePolicy<ExecutionSpace>(exec, 0, static_cast<std::int64_t>(keep.size())),
      KOKKOS_LAMBDA(const std::int64_t i) {
        const std::int64_t row = i % columns;
        keep(i / columns, row) = static_cast<std::uint8_t>(
            row >= end || rule.keeps(scores(i / columns, row), row) ? 1 : 0);
      });
}

}  // namespace kvzap::engine
