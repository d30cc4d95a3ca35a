#include "io/snapshot_layout.hpp"

#include <fmt/format.h>

#include <kvzap/core/head_partition.hpp>
#include <limits>

namespace kvzap::io {

const char* name_of(RowKind kind) {
  switch (kind) {
    case RowKind::positions:
      return "positions";
    case RowKind::scores:
      return "scores";
    case RowKind::judged:
      return "judged";
    case RowKind::keys:
      return "keys";
    case RowKind::values:
      return "values";
    case RowKind::recent_queries:
      return "recent_queries";
    case RowKind::state:
      return "state";
  }
  return "unknown";
}

std::string SnapshotLayout::path(int group) const {
  return is_of_context(group) ? fmt::format("/context/layers/{}", group - n_layers())
                              : fmt::format("/layers/{}", group);
}

std::vector<RowKind> SnapshotLayout::kinds(int group) const {
  std::vector<RowKind> kinds{RowKind::positions};
  if (content != SnapshotContent::positions) kinds.push_back(RowKind::scores);
  kinds.push_back(RowKind::judged);
  if (content == SnapshotContent::all) {
    kinds.push_back(RowKind::keys);
    kinds.push_back(RowKind::values);
    if (has_queries && !is_of_context(group)) kinds.push_back(RowKind::recent_queries);
    if (groups[group].state_values > 0) kinds.push_back(RowKind::state);
  }
  return kinds;
}

std::vector<std::uint64_t> SnapshotLayout::extents(int group, RowKind kind) const {
  const SnapshotGroup& of = groups[group];
  const auto dim = static_cast<std::uint64_t>(head_dim);
  if (kind == RowKind::recent_queries) {
    return {static_cast<std::uint64_t>(of.query_group * n_kv_heads),
            static_cast<std::uint64_t>(of.query_tokens), dim};
  }
  if (kind == RowKind::state) return {static_cast<std::uint64_t>(of.state_heads * of.state_values)};
  const auto rows = static_cast<std::uint64_t>(of.offsets.back());
  if (kind == RowKind::keys || kind == RowKind::values) return {rows, dim};
  return {rows};
}

std::int64_t SnapshotLayout::row_bytes(RowKind kind) const {
  switch (kind) {
    case RowKind::positions:
      return sizeof(std::int32_t);
    case RowKind::scores:
    case RowKind::state:
      return sizeof(float);
    case RowKind::judged:
      return 1;
    case RowKind::keys:
    case RowKind::values:
      return head_dim * static_cast<std::int64_t>(size_of(dtype));
    case RowKind::recent_queries:
      return head_dim * static_cast<std::int64_t>(sizeof(float));
  }
  return 0;
}

std::int64_t SnapshotLayout::first_row(int group, RowKind kind, int head) const {
  if (kind == RowKind::state) {
    const SnapshotGroup& of = groups[group];
    return state_heads_of(of.state_heads, n_kv_heads, head).first * of.state_values;
  }
  if (kind != RowKind::recent_queries) return groups[group].offsets[head];
  return head * rows(group, kind, head);
}

std::int64_t SnapshotLayout::rows(int group, RowKind kind, int head) const {
  const SnapshotGroup& of = groups[group];
  if (kind == RowKind::recent_queries) return of.query_group * of.query_tokens;
  if (kind == RowKind::state) {
    const auto [begin, end] = state_heads_of(of.state_heads, n_kv_heads, head);
    return (end - begin) * of.state_values;
  }
  return of.offsets[head + 1] - of.offsets[head];
}

std::int64_t SnapshotLayout::row_bytes() const {
  std::int64_t bytes = 0;
  for (int group = 0; group < static_cast<int>(groups.size()); ++group) {
    for (const RowKind kind : kinds(group)) {
      const int last = static_cast<int>(n_kv_heads) - 1;
      const std::int64_t count = first_row(group, kind, last) + rows(group, kind, last);
      const std::int64_t left = std::numeric_limits<std::int64_t>::max() / 2 - bytes;
      if (count > left / row_bytes(kind)) throw Error("too large for one file");
      bytes += count * row_bytes(kind);
    }
  }
  return bytes;
}

}  // namespace kvzap::io
