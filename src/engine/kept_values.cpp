#include "engine/kept_values.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/scratch.hpp"
#include "cache/gather_rows.hpp"
#include "cache/row_access.hpp"

namespace kvzap::engine {
namespace {

// The first `count` numbers of a head. Waits.
template <class Matrix>
auto on_host(const ExecutionSpace& exec, const Matrix& from, int head, std::int64_t count) {
  base::before_allocation(static_cast<std::size_t>(count) * sizeof(float));
  const Kokkos::View<float*, MemorySpace> row(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::merge::row"), count);
  Kokkos::deep_copy(exec, row, Kokkos::subview(from, head, std::make_pair(std::int64_t{0}, count)));
  auto host = Kokkos::create_mirror_view(row);
  Kokkos::deep_copy(exec, host, row);
  base::fence(exec, "kvzap::merge: the host reads numbers of rows");
  return host;
}

}  // namespace

void KeptValues::merge(const ExecutionSpace& exec, KVCache& cache, SequenceId sequence,
                       const CutRows& cut) {
  if (!m_merger) return;
  for (int head = 0; head < static_cast<int>(cut.heads.size()); ++head) {
    merge_head(exec, cache, sequence, cut, head);
  }
}

void KeptValues::merge_head(const ExecutionSpace& exec, KVCache& cache, SequenceId sequence,
                            const CutRows& cut, int head) {
  const bool are_new = static_cast<bool>(cut.new_keys);
  const std::int64_t cached = cache.rows(sequence, cut.layer, head);
  const std::int64_t count = are_new ? cut.new_keys.extents[0] : cached;
  const auto keep = Kokkos::create_mirror_view_and_copy(
      Kokkos::HostSpace(), Kokkos::subview(cut.keep, head, std::make_pair(std::int64_t{0}, count)));
  base::fence(exec, "kvzap::merge: the host reads which rows stay");
  const std::int64_t kept = std::count_if(keep.data(), keep.data() + count,
                                          [](std::uint8_t stays) { return stays != 0; });
  if (kept == 0 || kept == count) return;

  const int dim = cache.shape().dim(cut.layer);
  const bool has_attention = cut.attention.size() > 0;
  const std::int64_t keys_shown = has_attention ? 0 : count;
  base::reserve_scratch(m_keys, keys_shown * dim, "kvzap::merge::keys");
  base::reserve_scratch(m_values, count * dim, "kvzap::merge::values");
  using Rows = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
  const Rows keys(m_keys.data(), keys_shown, dim), values(m_values.data(), count, dim);
  // New rows follow those that the cache has.
  const cache::RowRange range = {head, are_new ? cached : 0, count};
  const RaggedLayer layer = cache.layer(sequence, cut.layer);
  if (!has_attention) cache::gather_rows(exec, layer, range, cut.new_keys, false, keys);
  cache::gather_rows(exec, layer, range, cut.new_values, true, values);

  CutHead shown = {exec, cut.layer, cut.heads[head], keys, values, keep.data()};
  std::vector<std::int64_t> positions;
  base::HostMirror<Kokkos::View<float*, MemorySpace>> scores, attention;
  if (has_attention) {
    positions = cache.positions(sequence, cut.layer, head);
    scores = on_host(exec, cut.scores, head, count);
    attention = on_host(exec, cut.attention, head, count);
    shown.positions = positions.data();
    shown.scores = scores.data();
    shown.attention = attention.data();
    shown.steps = cut.steps;
  }
  const MergedValues& merged = m_merger->merge(shown);
  const auto changed = static_cast<std::int64_t>(merged.rows.size());
  if (changed == 0) return;
  if (static_cast<std::int64_t>(m_numbers.extent(0)) < changed) {
    m_host_numbers = {};
    base::reserve_scratch(m_numbers, changed, "kvzap::merge::numbers");
    m_host_numbers = Kokkos::create_mirror_view(m_numbers);
  }
  std::int64_t row = 0, place = 0;
  for (std::int64_t i = 0; i < changed; ++i) {
    const std::int64_t next = merged.rows[i];
    if (next < row || next >= count || !keep(next)) {
      throw Error(fmt::format("merge: value {} is for row {}; expected rows that stay, ascending",
                              i, next));
    }
    for (; row < next; ++row) place += are_new && keep(row) ? 1 : 0;
    m_host_numbers(i) = are_new ? place : next;
  }
  Kokkos::deep_copy(exec, m_numbers, m_host_numbers);
  cache::RowAccess(cache).set_values(
      exec, sequence, cut.layer, head,
      Kokkos::subview(m_numbers, std::make_pair(std::int64_t{0}, changed)), merged.values);
  base::fence(exec, "kvzap::merge: the next head's rows take the memory");
}

}  // namespace kvzap::engine
