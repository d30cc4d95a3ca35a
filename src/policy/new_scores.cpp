#include "policy/new_scores.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/scratch.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using Range = PolicyRange;

// scores(head, row) of a head's cached rows and new ones.
void join(const ExecutionSpace& exec, const Kokkos::View<const float*, MemorySpace>& cached,
          const NewScores::View& fresh, int head, std::int64_t n_cached, std::int64_t n_new,
          const Policy::ScoreView& scores) {
  const auto known = static_cast<std::int64_t>(cached.extent(0));
  const float nan = std::nanf("");
  Kokkos::parallel_for(
      "kvzap::new_scores::join", Range(exec, 0, n_cached + n_new), KOKKOS_LAMBDA(std::int64_t row) {
        if (row >= n_cached) {
          scores(head, row) = fresh(head, row - n_cached);
        } else {
          scores(head, row) = row < known ? cached(row) : nan;
        }
      });
}

void copy_rows(const ExecutionSpace& exec, const TokenBlock::HiddenView& hidden,
               const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>& rows) {
  const auto columns = static_cast<std::int64_t>(rows.extent(1));
  Kokkos::parallel_for(
      "kvzap::new_scores::copy",
      Range(exec, 0, static_cast<std::int64_t>(rows.extent(0)) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        rows(i / columns, i % columns) = hidden(i / columns, i % columns);
      });
}

}  // namespace

NewScores::View NewScores::block(const PolicyLayer& layer, const TokenBlock& block) {
  // A failed step may have left scores of its blocks.
  if (m_layer != layer.layer() || block.first != m_next) m_count = 0;
  const auto heads = static_cast<std::size_t>(layer.heads());
  const std::int64_t tokens = layer.extents().new_tokens;
  if (m_count + block.count > tokens) {
    throw Error(
        fmt::format("policy: layer {} shows more than its {} new tokens", layer.layer(), tokens));
  }
  if (m_count == 0) {
    base::reserve_scratch(m_scores, layer.heads() * tokens, "kvzap::new_scores");
  }
  m_layer = layer.layer();
  // Without heads there is no memory to which a pointer could point.
  float* const target = heads == 0 ? m_scores.data() : m_scores.data() + m_count;
  m_count += block.count;
  m_next = block.first + block.count;
  const Kokkos::LayoutStride layout(heads, static_cast<std::size_t>(tokens),
                                    static_cast<std::size_t>(block.count), std::size_t{1});
  return View(target, layout);
}

void NewScores::fill(PolicyLayer& layer, const Policy::ScoreView& scores) {
  const std::int64_t tokens = layer.extents().new_tokens;
  const bool complete = m_count == tokens && (m_layer == layer.layer() || tokens == 0);
  m_count = 0;
  m_layer = -1;
  if (!complete) {
    throw Error(fmt::format("policy: layer {} is scored before all of its {} new tokens were shown",
                            layer.layer(), tokens));
  }
  const Kokkos::LayoutStride layout(static_cast<std::size_t>(layer.heads()),
                                    static_cast<std::size_t>(tokens),
                                    static_cast<std::size_t>(tokens), std::size_t{1});
  const View fresh(m_scores.data(), layout);
  for (int head = 0; head < layer.heads(); ++head) {
    const std::int64_t n_new = std::min(tokens, layer.rows(head));
    const std::int64_t n_cached = layer.rows(head) - n_new;
    Kokkos::View<const float*, MemorySpace> cached;
    if (n_cached > 0) cached = layer.cached_scores(head);
    join(layer.exec(), cached, fresh, head, n_cached, n_new, scores);
  }
}

Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace> packed_hidden(
    const ExecutionSpace& exec, const TokenBlock& block, Kokkos::View<float*, MemorySpace>& room) {
  const auto& hidden = block.hidden;
  const std::size_t rows = hidden.extent(0), columns = hidden.extent(1);
  if (hidden.stride(1) == 1 && hidden.stride(0) == columns) {
    return Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>(hidden.data(), rows,
                                                                         columns);
  }
  base::reserve_scratch(room, static_cast<std::int64_t>(rows * columns), "kvzap::policy::hidden");
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> packed(room.data(), rows, columns);
  copy_rows(exec, hidden, packed);
  return packed;
}

}  // namespace kvzap::policy
