#include "io/snapshot_layout.hpp"

#include <fmt/format.h>

#include <kvzap/core/head_partition.hpp>
#include <limits>

namespace kvzap::io {
namespace {

bool is_scale(RowKind kind) { return kind == RowKind::key_scales || kind == RowKind::value_scales; }

}  // namespace

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
    case RowKind::key_codes:
      return "key_codes";
    case RowKind::key_scales:
      return "key_scales";
    case RowKind::value_codes:
      return "value_codes";
    case RowKind::value_scales:
      return "value_scales";
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
    if (groups[group].quantised)
      kinds.insert(kinds.end(), quantised_kinds.begin(), quantised_kinds.end());
    if (has_queries && !is_of_context(group)) kinds.push_back(RowKind::recent_queries);
    if (groups[group].state_values > 0) kinds.push_back(RowKind::state);
  }
  return kinds;
}

std::vector<std::uint64_t> SnapshotLayout::extents(int group, RowKind kind) const {
  const SnapshotGroup& of = groups[group];
  const auto elements = static_cast<std::uint64_t>(row_elements(kind));
  if (kind == RowKind::recent_queries) {
    return {static_cast<std::uint64_t>(of.query_group * n_kv_heads),
            static_cast<std::uint64_t>(of.query_tokens), elements};
  }
  if (kind == RowKind::state) return {static_cast<std::uint64_t>(of.state_heads * of.state_values)};
  const auto rows =
      static_cast<std::uint64_t>(first_row(group, kind, static_cast<int>(n_kv_heads)));
  const bool is_number = kind == RowKind::positions || kind == RowKind::scores ||
                         kind == RowKind::judged || is_scale(kind);
  if (is_number) return {rows};
  return {rows, elements};
}

std::int64_t SnapshotLayout::row_elements(RowKind kind) const {
  switch (kind) {
    case RowKind::keys:
    case RowKind::values:
    case RowKind::recent_queries:
      return head_dim;
    case RowKind::key_codes:
      return QuantisedRows::code_bytes(format.keys, static_cast<int>(head_dim));
    case RowKind::value_codes:
      return QuantisedRows::code_bytes(format.values, static_cast<int>(head_dim));
    default:
      return 1;
  }
}

std::int64_t SnapshotLayout::row_bytes(RowKind kind) const {
  switch (kind) {
    case RowKind::judged:
    case RowKind::key_codes:
    case RowKind::value_codes:
      return row_elements(kind);
    case RowKind::keys:
    case RowKind::values:
      return row_elements(kind) * static_cast<std::int64_t>(size_of(dtype));
    case RowKind::key_scales:
    case RowKind::value_scales:
      return sizeof(bfloat16);
    default:
      return row_elements(kind) * static_cast<std::int64_t>(sizeof(float));
  }
}

std::int64_t SnapshotLayout::first_row(int group, RowKind kind, int head) const {
  const SnapshotGroup& of = groups[group];
  switch (kind) {
    case RowKind::state:
      return state_heads_of(of.state_heads, n_kv_heads, head).first * of.state_values;
    case RowKind::recent_queries:
      return head * of.query_group * of.query_tokens;
    case RowKind::keys:
    case RowKind::values:
      return of.quantised ? head * of.ring_rows : of.offsets[head];
    case RowKind::key_codes:
    case RowKind::key_scales:
    case RowKind::value_codes:
    case RowKind::value_scales:
      return of.offsets[head] - head * of.ring_rows;
    default:
      return of.offsets[head];
  }
}

std::int64_t SnapshotLayout::rows(int group, RowKind kind, int head) const {
  return first_row(group, kind, head + 1) - first_row(group, kind, head);
}

std::int64_t SnapshotLayout::row_bytes() const {
  std::int64_t bytes = 0;
  for (int group = 0; group < static_cast<int>(groups.size()); ++group) {
    for (const RowKind kind : kinds(group)) {
      const std::int64_t count = first_row(group, kind, static_cast<int>(n_kv_heads));
      const std::int64_t left = std::numeric_limits<std::int64_t>::max() / 2 - bytes;
      if (count > left / row_bytes(kind)) throw Error("too large for one file");
      bytes += count * row_bytes(kind);
    }
  }
  return bytes;
}

}  // namespace kvzap::io
