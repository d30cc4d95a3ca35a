#include "engine/shared_heads.hpp"

#include <algorithm>

#include "attention/softmax.hpp"
#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"

namespace kvzap::engine {
namespace {

using SharedRange = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

/// A copy of a list for kernels. On hosts it is the list itself.
template <class Element>
class KernelList {
 public:
  KernelList(const ExecutionSpace& exec, const std::vector<Element>& list) : m_data(list.data()) {
    if constexpr (!base::runs_on_host) {
      const std::size_t bytes = list.size() * sizeof(Element);
      m_view = View(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::shared::list"), bytes);
      Kokkos::deep_copy(
          exec, m_view,
          Kokkos::View<const char*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(
              reinterpret_cast<const char*>(list.data()), bytes));
      base::fence(exec, "kvzap::shared: the host's list may go");
      m_data = reinterpret_cast<const Element*>(m_view.data());
    }
  }
  const Element* data() const { return m_data; }

 private:
  using View = Kokkos::View<char*, MemorySpace>;  // elements may be pointers to const
  View m_view;
  const Element* m_data;
};

template <class Work>
void for_each_item(const ExecutionSpace& exec, const char* label, std::int64_t n,
                   std::int64_t weight, const Work& work) {
  if constexpr (base::runs_on_host) {
    base::host_for(label, n, weight, work);
  } else {
    Kokkos::parallel_for(label, SharedRange(exec, 0, n), work);
  }
}

}  // namespace

void copy_columns(const ExecutionSpace& exec, std::int64_t rows,
                  const std::vector<ColumnCopy>& copies) {
  const auto n = static_cast<std::int64_t>(copies.size());
  if (n == 0) return;
  const KernelList<ColumnCopy> list(exec, copies);
  const ColumnCopy* const all = list.data();
  const auto copy_one = KOKKOS_LAMBDA(std::int64_t i) {
    const ColumnCopy& copy = all[i % n];
    const float* const from = copy.from + i / n * copy.from_stride;
    float* const to = copy.to + i / n * copy.to_stride;
    for (std::int64_t c = 0; c < copy.columns; ++c) to[c] = from[c];
  };
  for_each_item(exec, "kvzap::shared::copy_columns", rows * n, copies.front().columns, copy_one);
  if constexpr (!base::runs_on_host) base::fence(exec, "kvzap::shared: the list may go");
}

void merge_attended(const ExecutionSpace& exec, std::int64_t rows, std::int64_t head_dim,
                    const std::vector<AttendedMerge>& merges,
                    const std::vector<const float*>& records) {
  const auto n = static_cast<std::int64_t>(merges.size());
  if (n == 0) return;
  const KernelList<AttendedMerge> list(exec, merges);
  const KernelList<const float*> firsts(exec, records);
  const AttendedMerge* const all = list.data();
  const float* const* const parts = firsts.data();
  const auto merge_one = KOKKOS_LAMBDA(std::int64_t i) {
    const AttendedMerge& merge = all[i % n];
    const std::int64_t row = i / n;
    const std::int64_t size = merge.columns + merge.query_heads;
    float* const to = merge.to + row * merge.to_stride;
    const auto part = [&](std::int64_t p) { return parts[merge.first_part + p] + row * size; };
    for (std::int64_t q = 0; q < merge.query_heads; ++q) {
      const std::int64_t begin = q == 0 ? 0 : q * head_dim - merge.first;
      const std::int64_t next = (q + 1) * head_dim - merge.first;
      const std::int64_t end = next < merge.columns ? next : merge.columns;
      float largest = attention::minus_infinity;
      for (std::int64_t p = 0; p < merge.parts; ++p) {
        const float lse = part(p)[merge.columns + q];
        if (lse > largest) largest = lse;
      }
      const float shift = attention::shift_of(largest);
      float total = 0;
      for (std::int64_t c = begin; c < end; ++c) to[c] = 0;
      for (std::int64_t p = 0; p < merge.parts; ++p) {
        const float weight = base::math::exp(part(p)[merge.columns + q] - shift);
        if (weight == 0) continue;
        total += weight;
        for (std::int64_t c = begin; c < end; ++c) to[c] += weight * part(p)[c];
      }
      const float inverse = attention::inverse_of(total);
      for (std::int64_t c = begin; c < end; ++c) to[c] *= inverse;
    }
  };
  for_each_item(exec, "kvzap::shared::merge", rows * n, merges.front().columns, merge_one);
  if constexpr (!base::runs_on_host) base::fence(exec, "kvzap::shared: the lists may go");
}

IndexRanges SharedHeads::projected(const HeadPartition& partition, int layer, int rank) const {
  const auto [group, head_dim, kv_dim, vectors] = m_sizes.at(layer);
  if (vectors == 2) return partition.projected(layer, rank, group, head_dim, kv_dim);
  IndexRanges ranges = attended(partition, layer, rank);
  const std::int64_t keys = group * head_dim;
  if (!partition.heads(layer, rank).empty()) ranges.emplace_back(keys, keys + head_dim);
  return ranges;
}

IndexRanges SharedHeads::attended(const HeadPartition& partition, int layer, int rank) const {
  const auto [group, head_dim, kv_dim, vectors] = m_sizes.at(layer);
  if (vectors == 2) return partition.attended(layer, rank, group, head_dim);
  const auto [first, last] = partition.latent_heads(rank, group);
  return {{first * head_dim, last * head_dim}};
}

SharedHeads::SharedHeads(const HeadPartition& partition, std::vector<Sizes> sizes)
    : m_sizes(std::move(sizes)) {
  for (int l = 0; l < partition.n_layers(); ++l) {
    const std::int64_t head_dim = m_sizes.at(l).head_dim;
    const std::int64_t head_inputs = m_sizes.at(l).group * head_dim;
    auto& segments = m_segments.emplace_back();
    auto& widths = m_widths.emplace_back();
    auto& pieces = m_pieces.emplace_back(partition.n_ranks());
    for (int r = 0; r < partition.n_ranks(); ++r) {
      std::int64_t column = 0;
      for (const auto& [begin, end] : projected(partition, l, r)) {
        if (begin < end) segments.push_back({begin, end, r, column});
        column += end - begin;
      }
      widths.push_back(column);
      column = 0;
      for (auto [begin, end] : attended(partition, l, r)) {
        while (begin < end) {
          const std::int64_t head = begin / head_inputs;
          const std::int64_t last = std::min(end, (head + 1) * head_inputs);
          pieces[r].push_back({static_cast<int>(head), begin, last, column,
                               (last - 1) / head_dim - begin / head_dim + 1});
          column += last - begin;
          begin = last;
        }
      }
    }
    std::sort(segments.begin(), segments.end(),
              [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
  }
}

HeadTeams::HeadTeams(const HeadPartition& partition, int rank) {
  const int n_heads = partition.n_kv_heads();
  for (int l = 0; l < partition.n_layers(); ++l) {
    Place& place = m_places.emplace_back();
    auto& teams = m_members.emplace_back(n_heads);
    std::vector<int> free;
    for (int r = 0; r < partition.n_ranks(); ++r) {
      for (const int head : partition.heads(l, r)) teams[head].push_back(r);
      if (partition.heads(l, r).empty()) free.push_back(r);
    }
    for (int h = 0; h < n_heads; ++h) {
      const auto [begin, end] = even_range(static_cast<std::int64_t>(free.size()), n_heads, h);
      teams[h].insert(teams[h].end(), free.begin() + begin, free.begin() + end);
      const auto found = std::find(teams[h].begin(), teams[h].end(), rank);
      // Teams of one have nothing to share; their owner may have several heads.
      if (teams[h].size() == 1 || found == teams[h].end()) continue;
      place = {h, static_cast<int>(found - teams[h].begin()), static_cast<int>(teams[h].size())};
    }
  }
}

std::int64_t SharedHeads::inputs(int layer, int rank) const {
  const auto& own = m_pieces[layer][rank];
  return own.empty() ? 0 : own.back().column + own.back().columns();
}

}  // namespace kvzap::engine
