#include "io/snapshot_layout.hpp"

#include <fmt/format.h>

#include <kvzap/core/head_partition.hpp>
#include <limits>

namespace kvzap::io {
namespace {

/// What the data sets of a kind have in every file.
struct Declaration {
  const char* name;
  NumberType type;
  bool has_columns;  // a row has several numbers
};

// In the order of RowKind.
constexpr std::array<Declaration, n_row_kinds> declarations{{
    {"positions", NumberType::int32, false},
    {"scores", NumberType::float32, false},
    {"judged", NumberType::uint8, false},
    {"keys", NumberType::dtype, true},
    {"values", NumberType::dtype, true},
    {"key_codes", NumberType::uint8, true},
    {"key_scales", NumberType::bf16, false},
    {"value_codes", NumberType::uint8, true},
    {"value_scales", NumberType::bf16, false},
    {"recent_queries", NumberType::float32, true},
    {"state", NumberType::float32, false},
}};

const Declaration& declaration_of(RowKind kind) {
  return declarations[static_cast<std::size_t>(kind)];
}

}  // namespace

const char* name_of(RowKind kind) { return declaration_of(kind).name; }

NumberType type_of(RowKind kind) { return declaration_of(kind).type; }

std::string SnapshotLayout::path(int group) const {
  return is_of_context(group) ? fmt::format("/context/layers/{}", group - n_layers())
                              : fmt::format("/layers/{}", group);
}

std::vector<RowKind> vector_kinds(const PageFormat& format, bool quantised) {
  std::vector<RowKind> kinds{RowKind::keys};
  if (!format.values_are_keys) kinds.push_back(RowKind::values);
  if (!quantised) return kinds;
  kinds.insert(kinds.end(), {RowKind::key_codes, RowKind::key_scales});
  if (!format.values_are_keys) {
    kinds.insert(kinds.end(), {RowKind::value_codes, RowKind::value_scales});
  }
  return kinds;
}

std::vector<RowKind> SnapshotLayout::kinds(int group) const {
  std::vector<RowKind> kinds{RowKind::positions};
  if (content != SnapshotContent::positions) kinds.push_back(RowKind::scores);
  kinds.push_back(RowKind::judged);
  if (content == SnapshotContent::all) {
    const std::vector<RowKind> of_vectors = vector_kinds(format, groups[group].quantised);
    kinds.insert(kinds.end(), of_vectors.begin(), of_vectors.end());
    if (has_queries && !is_of_context(group)) kinds.push_back(RowKind::recent_queries);
    if (groups[group].state_values > 0) kinds.push_back(RowKind::state);
  }
  return kinds;
}

std::vector<std::uint64_t> SnapshotLayout::extents(int group, RowKind kind) const {
  const SnapshotGroup& of = groups[group];
  const auto elements = static_cast<std::uint64_t>(row_elements(group, kind));
  if (kind == RowKind::recent_queries) {
    return {static_cast<std::uint64_t>(of.query_group * n_kv_heads),
            static_cast<std::uint64_t>(of.query_tokens), elements};
  }
  if (kind == RowKind::state) return {static_cast<std::uint64_t>(of.state_heads * of.state_values)};
  const auto rows =
      static_cast<std::uint64_t>(first_row(group, kind, static_cast<int>(n_kv_heads)));
  if (!declaration_of(kind).has_columns) return {rows};
  return {rows, elements};
}

std::int64_t SnapshotLayout::row_elements(int group, RowKind kind) const {
  switch (kind) {
    case RowKind::keys:
    case RowKind::values:
      return groups[group].row_dim;
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

std::int64_t SnapshotLayout::row_bytes(int group, RowKind kind) const {
  switch (type_of(kind)) {
    case NumberType::uint8:
      return row_elements(group, kind);
    case NumberType::bf16:
      return row_elements(group, kind) * static_cast<std::int64_t>(sizeof(bfloat16));
    case NumberType::dtype:
      return row_elements(group, kind) * static_cast<std::int64_t>(size_of(dtype));
    case NumberType::int32:
    case NumberType::float32:
      break;
  }
  return row_elements(group, kind) * static_cast<std::int64_t>(sizeof(float));
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
      if (count > left / row_bytes(group, kind)) throw Error("too large for one file");
      bytes += count * row_bytes(group, kind);
    }
  }
  return bytes;
}

}  // namespace kvzap::io
