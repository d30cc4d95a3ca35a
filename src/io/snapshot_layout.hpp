// Contents and sizes of a snapshot. docs/reference/snapshot-format.md describes the format.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <kvzap/core/cache.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <limits>
#include <string>
#include <vector>

namespace kvzap::io {

/// Data sets of rows, in the order of their checksums.
enum class RowKind {
  positions,
  scores,
  judged,
  keys,    // with quantised rows (SnapshotGroup::quantised): of the ring
  values,  // the same; not in a file whose values are its keys
  // Of quantised rows: all but the ring's.
  key_codes,
  key_scales,
  value_codes,
  value_scales,
  recent_queries,
  state
};
inline constexpr int n_row_kinds = 11;
/// Returns those of keys and values in a group, which has quantised rows or not. Without values if
/// they are the keys (PageFormat::values_are_keys).
std::vector<RowKind> vector_kinds(const PageFormat& format, bool quantised);
/// The data set's name.
const char* name_of(RowKind kind);

/// The numbers of a row; `dtype`: those that the file's attribute names.
enum class NumberType { int32, uint8, float32, bf16, dtype };
NumberType type_of(RowKind kind);

/// A layer of the sequence, or of the context's ring.
struct SnapshotGroup {
  std::int64_t ring_first = 0;
  std::int64_t own_ring = 0;          // rows, for a layer with a ring only (OwnRing)
  std::int64_t row_dim = 0;           // values of a key: SnapshotHeader::row_dims
  std::int64_t ring_rows = 0;         // rows that the ring has: set_ring
  bool quantised = false;             // rows before the ring are quantised (SnapshotLayout::format)
  std::vector<std::int64_t> offsets;  // (KV head + 1), rows
  std::vector<std::int64_t> retained;  // (KV head), only in a context
  // Recent queries: position of the first token, number of tokens, query heads of a KV head.
  std::int64_t query_first = 0, query_tokens = 0, query_group = 0;
  // Of a layer with a state (StateShape): its heads on all ranks, and the values of each.
  std::int64_t state_heads = 0, state_values = 0;

  /// Returns the rows that the ring has after `tokens` tokens if it begins at `first`. window: the
  /// file's, of layers without an own ring.
  std::int64_t in_ring(std::int64_t tokens, std::int64_t first, std::int64_t window) const {
    return std::min(tokens - first, own_ring > 0 ? own_ring : window);
  }
  /// Sets ring_rows, after own_ring and ring_first.
  void set_ring(std::int64_t tokens, std::int64_t window) {
    ring_rows = in_ring(tokens, ring_first, window);
  }
};

/// Extents of the whole sequence, over all ranks.
struct SnapshotLayout {
  SnapshotContent content = SnapshotContent::all;
  int compress = 0;
  DType dtype = DType::f32;  // of keys and values in the file
  PageFormat format;         // of rows before the ring, unless they have `dtype`, too
  std::int64_t head_dim = 0, window = 0, page_rows = 0, tokens = 0, n_kv_heads = 0;
  AppendCounts counts;
  bool has_queries = false;
  bool has_context = false;
  std::int64_t context_tokens = 0;
  AppendCounts context_counts;
  std::vector<SnapshotGroup> groups;  // the layers, then those of the context if there is one

  int n_layers() const { return static_cast<int>(groups.size()) / (has_context ? 2 : 1); }
  bool is_of_context(int group) const { return group >= n_layers(); }
  /// "/layers/N" or "/context/layers/N".
  std::string path(int group) const;

  /// Data sets of rows that the group has.
  std::vector<RowKind> kinds(int group) const;
  std::vector<std::uint64_t> extents(int group, RowKind kind) const;
  /// A row has the elements of the last extent. A row of recent_queries is one token of one query
  /// head. A row of a state is one value; the state's heads are dealt evenly to the KV heads, in
  /// order, and follow these to their ranks.
  std::int64_t row_bytes(int group, RowKind kind) const;
  std::int64_t row_elements(int group, RowKind kind) const;
  std::int64_t first_row(int group, RowKind kind, int head) const;
  std::int64_t rows(int group, RowKind kind, int head) const;
  /// Bytes of all data sets of rows. Throws Error if they do not fit a file offset.
  std::int64_t row_bytes() const;
};

// A cache counts positions and heads with 32 bits.
inline constexpr std::int64_t largest_extent = std::numeric_limits<std::int32_t>::max();
/// Versions of the format. Quantised rows, and rows whose values are their keys, need the newest:
/// programs that do not know them read files without.
inline constexpr std::int64_t oldest_version = 2, newest_version = 3;

/// Lists counts as attributes of a group.
template <class Counts, class Visit>
void list_counts(Counts& counts, Visit& visit) {
  visit("judged", counts.judged);
  visit("evicted", counts.evicted);
  visit("non_finite", counts.non_finite);
}

/// Lists the attributes of the root, except the version, in the file's order, for
/// io::AttributeWriter and io::AttributeReader. kv_type: of quantised rows. n_layers:
/// layout.n_layers(). A reader knows info.token_ids.
template <class Layout, class Info, class Text, class Integer, class Visit>
void list_root(Layout& layout, Info& info, std::int64_t version, Text& created, Text& kv_type,
               Integer&& n_layers, Visit& visit) {
  visit("kvzap_version", info.kvzap_version);
  visit("model", info.model);
  visit("model_hash", info.model_hash);
  visit("tokenizer_hash", info.tokenizer_hash);
  visit("created", created);
  visit("options", info.options);
  visit("run_state", info.run_state);
  visit("content", layout.content, snapshot_content_from_name);
  visit("compress", layout.compress, 0, 9);
  visit("prune", info.prune);
  visit("threshold", info.threshold);
  visit("sink", info.sink, std::numeric_limits<std::int64_t>::min());
  visit("dtype", layout.dtype, dtype_from_name);
  if (version > oldest_version) visit("kv_type", kv_type);
  visit("n_layers", n_layers, 1, largest_extent);
  visit("n_kv_heads", layout.n_kv_heads, 1, largest_extent);
  visit("head_dim", layout.head_dim, 1, largest_extent);
  visit("window", layout.window, 1, largest_extent);
  visit("page_rows", layout.page_rows, 1, largest_extent);
  visit("tokens", layout.tokens, 0, largest_extent);
  visit("context_tokens", info.context_tokens, 0, static_cast<std::int64_t>(info.token_ids.size()));
}

}  // namespace kvzap::io
