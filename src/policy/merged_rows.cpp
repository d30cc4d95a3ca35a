#include "policy/merged_rows.hpp"

#include <utility>

#include "linalg/gemm.hpp"

namespace kvzap::policy {
namespace {

struct MergeList {
  const std::int32_t* targets;
  const std::int32_t* begins;
  const std::int32_t* gone;
  const float* weights;
};

void add_values(const ExecutionSpace& exec, const CutHead::Rows& values, std::int64_t targets,
                const MergeList& list, bool is_mean, float* merged) {
  const std::int64_t dim = values.extent(1);
  const MergeList l = list;
  each_row(
      exec, "kvzap::policy::merge_values", targets, KOKKOS_LAMBDA(std::int64_t t) {
        float* const sum = merged + t * dim;
        for (std::int64_t d = 0; d < dim; ++d) sum[d] = 0;
        float weight = 0;
        for (std::int32_t e = l.begins[t]; e < l.begins[t + 1]; ++e) {
          const float* const value = &values(l.gone[e], 0);
          const float by = l.weights[e];
          for (std::int64_t d = 0; d < dim; ++d) sum[d] += by * value[d];
          weight += by;
        }
        const float* const own = &values(l.targets[t], 0);
        const float all = is_mean ? 1 + weight : 1;
        for (std::int64_t d = 0; d < dim; ++d) sum[d] = (own[d] + sum[d]) / all;
      });
}

}  // namespace

const MergedValues& MergedRows::add(const CutHead& head, const std::vector<MergeEntry>& entries,
                                    const std::int32_t* kept, std::int64_t count_kept, bool is_mean,
                                    MergeFloats& room) {
  m_counts.assign(count_kept, 0);
  for (const MergeEntry& entry : entries) ++m_counts[entry.kept];
  const auto targets = static_cast<std::int64_t>(std::count_if(
      m_counts.begin(), m_counts.end(), [](std::int32_t count) { return count > 0; }));
  const auto count = static_cast<std::int64_t>(entries.size());
  m_targets.reserve(targets, "kvzap::policy::merge_targets");
  m_begins.reserve(targets + 1, "kvzap::policy::merge_begins");
  m_gone.reserve(count, "kvzap::policy::merge_entries");
  m_weights.reserve(count, "kvzap::policy::merge_weights");
  m_merged.rows.clear();
  std::int32_t begin = 0;
  for (std::int64_t k = 0; k < count_kept; ++k) {
    if (m_counts[k] == 0) continue;
    const std::size_t target = m_merged.rows.size();
    m_targets.host()[target] = kept[k];
    m_begins.host()[target] = begin;
    m_merged.rows.push_back(kept[k]);
    begin += std::exchange(m_counts[k], begin);  // from now on: the place of its next entry
  }
  if (targets == 0) return m_merged;
  m_begins.host()[targets] = begin;
  for (const MergeEntry& entry : entries) {
    const std::int32_t place = m_counts[entry.kept]++;
    m_gone.host()[place] = entry.gone;
    m_weights.host()[place] = entry.weight;
  }
  m_targets.to_kernels(head.exec);
  m_begins.to_kernels(head.exec);
  m_gone.to_kernels(head.exec);
  m_weights.to_kernels(head.exec);
  const auto dim = static_cast<std::int64_t>(head.values.extent(1));
  base::reserve_scratch(room, targets * dim, "kvzap::policy::merge_values");
  add_values(head.exec, head.values, targets,
             {m_targets.device(), m_begins.device(), m_gone.device(), m_weights.device()}, is_mean,
             room.data());
  m_merged.values = linalg::ConstMatrix(room.data(), targets, dim);
  return m_merged;
}

}  // namespace kvzap::policy
