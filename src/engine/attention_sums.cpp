#include "engine/attention_sums.hpp"

#include <algorithm>

#include "base/allocation_hook.hpp"

namespace kvzap::engine {
namespace {

using Sums = AttentionSums::Sums;
using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

Sums zeros(const ExecutionSpace& exec, std::int64_t heads, std::int64_t rows) {
  base::before_allocation(heads * rows * sizeof(float));
  Sums made(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::attention_sums"), heads, rows);
  Kokkos::deep_copy(exec, made, 0.0f);
  return made;
}

Sums wider(const ExecutionSpace& exec, const Sums& from, std::int64_t heads, std::int64_t rows) {
  Sums made = zeros(exec, heads, rows);
  if (from.size() == 0) return made;
  const auto columns = std::make_pair(std::size_t{0}, from.extent(1));
  Kokkos::deep_copy(exec, Kokkos::subview(made, Kokkos::ALL, columns), from);
  return made;
}

Sums copy_of(const Sums& from) {
  base::before_allocation(from.size() * sizeof(float));
  Sums made(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::attention_sums"),
            from.extent(0), from.extent(1));
  Kokkos::deep_copy(made, from);
  return made;
}

// sums += step; step = 0
void fold(const ExecutionSpace& exec, const Sums& sums, const Sums& step) {
  const auto columns = static_cast<std::int64_t>(sums.extent(1));
  Kokkos::parallel_for(
      "kvzap::attention_sums::fold", Range(exec, 0, static_cast<std::int64_t>(sums.size())),
      KOKKOS_LAMBDA(std::int64_t i) {
        sums(i / columns, i % columns) += step(i / columns, i % columns);
        step(i / columns, i % columns) = 0;
      });
}

// to(head, i) = from(head, the i-th of its first `rows` rows that stay)
void keep_rows(const ExecutionSpace& exec, const ScoredLayer& cut, int head, std::int64_t rows,
               const Sums& from, const Sums& to) {
  const auto keep = cut.keep;
  Kokkos::parallel_scan(
      "kvzap::attention_sums::keep", Range(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t & before, bool is_final) {
        if (keep(head, row) == 0) return;
        if (is_final) to(head, before) = from(head, row);
        ++before;
      });
}

}  // namespace

AttentionSums AttentionSums::clone() const {
  AttentionSums copy(static_cast<int>(m_layers.size()));
  for (std::size_t l = 0; l < m_layers.size(); ++l) {
    copy.m_layers[l] = {copy_of(m_layers[l].sums), copy_of(m_layers[l].step), m_layers[l].first};
  }
  return copy;
}

bool AttentionSums::empty() const {
  return std::all_of(m_layers.begin(), m_layers.end(),
                     [](const Layer& layer) { return layer.first < 0; });
}

void AttentionSums::reserve(const ExecutionSpace& exec, int layer, int heads, std::int64_t rows) {
  Layer& of = m_layers[layer];
  const auto columns = static_cast<std::int64_t>(of.sums.extent(1));
  if (columns >= rows) return;
  constexpr std::int64_t more = 64;  // rows of the next steps
  const std::int64_t wanted = std::max(rows + more, columns + columns / 4);
  const Sums sums = wider(exec, of.sums, heads, wanted);
  of.step = wider(exec, of.step, heads, wanted);
  of.sums = sums;
}

void AttentionSums::add(PolicyLayer& layer, const TokenBlock& block) {
  const auto& extents = layer.extents();
  if (block.first + block.count < extents.tokens) return;
  Layer& of = m_layers[layer.layer()];
  fold(layer.exec(), of.sums, of.step);
  of.first = extents.tokens - extents.new_tokens;
  if (layer.heads() == 0) return;
  const auto last = std::make_pair(block.count - 1, block.count);
  TokenBlock newest;
  newest.first = extents.tokens - 1;
  newest.count = 1;
  newest.queries = Kokkos::subview(block.queries, last, Kokkos::ALL, Kokkos::ALL);
  newest.log_sum_exp = Kokkos::subview(block.log_sum_exp, last, Kokkos::ALL);
  layer.attention_mass(newest, MassReduction::sum, of.step);
}

void AttentionSums::cancel(const ExecutionSpace& exec, std::int64_t first) {
  for (const Layer& layer : m_layers) {
    if (layer.first == first) Kokkos::deep_copy(exec, layer.step, 0.0f);
  }
}

Sums AttentionSums::sums(const ExecutionSpace& exec, int layer) {
  Layer& of = m_layers[layer];
  fold(exec, of.sums, of.step);
  return of.sums;
}

void AttentionSums::evict(const ExecutionSpace& exec, const ScoredLayer& cut) {
  Layer& of = m_layers[cut.layer];
  if (of.sums.size() == 0) return;
  fold(exec, of.sums, of.step);
  for (std::size_t h = 0; h < cut.heads.size(); ++h) {
    // A later context has rows without sums.
    const auto rows = std::min(cut.rows[h], static_cast<std::int64_t>(of.sums.extent(1)));
    keep_rows(exec, cut, static_cast<int>(h), rows, of.sums, of.step);
  }
  std::swap(of.sums, of.step);
  Kokkos::deep_copy(exec, of.step, 0.0f);
}

}  // namespace kvzap::engine
