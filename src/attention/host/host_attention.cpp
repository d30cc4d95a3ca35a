#include "attention/host/host_attention.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>
#include <utility>

#include "attention/host/amx_prefill.hpp"
#include "attention/host/flash_prefill.hpp"
#include "attention/host/quantised_attention.hpp"
#include "base/host_threads.hpp"
#include "base/scratch.hpp"

namespace kvzap::attention {
namespace {

// The fewest rows of a work item: 512 KiB of bfloat16 keys and values of 128 dimensions.
constexpr std::int64_t least_item_rows = 1024;

/// Returns the rows of the work items of a head with `rows` rows. Long heads have longer items,
/// because each item has a fixed cost. The result depends only on the length, so neither the number
/// of threads nor other spans change the order of sums.
constexpr std::int64_t item_rows(std::int64_t rows) {
  return std::clamp(rows / 8 / least_item_rows, std::int64_t{1}, std::int64_t{4}) * least_item_rows;
}

std::int64_t workers() { return base::host_threads(); }

bool has_windows(const std::vector<AttentionSpan>& spans) {
  return std::any_of(spans.begin(), spans.end(),
                     [](const AttentionSpan& span) { return span.window > 0; });
}

/// Returns the rows of a head that are quantised: the first ones.
std::int64_t quantised_rows(const AttentionSpan& span, int head) {
  return span.cached.format.quantised() ? span.cached.retained(head) : 0;
}

bool has_quantised_rows(const AttentionSpan& span) {
  for (int head = 0; head < span.cached.heads; ++head) {
    if (quantised_rows(span, head) > 0) return true;
  }
  return false;
}

/// Calls visit(Format()) with the AMX format for rows of this type and returns true. Returns false
/// if the instruction set in use has none.
template <class Visitor>
bool visit_amx(DType dtype, const Visitor& visit) {
  const auto try_format = [&](auto format) {
    if (!AmxPrefill<decltype(format)>::available()) return false;
    visit(format);
    return true;
  };
  if (dtype == DType::bf16) return try_format(BfloatTiles());
  return dtype == DType::f16 && (try_format(HalfTiles()) || try_format(SplitHalfTiles()));
}

/// Whether AmxPrefill, not FlashPrefill, takes tiles of query tokens.
bool uses_amx(DType dtype) {
  return visit_amx(dtype, [](auto) {});
}

// A KV head with at least this many query heads uses AmxPrefill for rows of a single token too:
// half a tile. With fewer query heads, most of its products would be unused.
constexpr int amx_group = 8;

/// Whether AmxPrefill, not RowAttention, takes the row items. (With SplitHalfTiles it takes twice
/// the time of RowAttention for 8 query heads.)
bool uses_amx_for_rows(DType dtype, int group) {
  if (group < amx_group) return false;
  return dtype == DType::f16 ? AmxPrefill<HalfTiles>::available() : uses_amx(dtype);
}

/// Returns the smallest tile; longer spans may have longer tiles.
std::int64_t least_tile_tokens(DType dtype, int group) {
  const std::int64_t tokens = FlashPrefill::tile_tokens(group);
  return uses_amx(dtype) ? std::min(tokens, amx_least_tile_tokens(group)) : tokens;
}

/// Floats of scratch space that one thread needs: row_space_size for row items, then
/// tile_space_size for tiles and for row items that AmxPrefill takes.
std::int64_t row_space_size(DType dtype, int group, int dim, const PageFormat& format) {
  const std::int64_t size = with_value_type(
      dtype, [&](auto zero) { return RowAttention<decltype(zero)>::scratch_size(group, dim); });
  return format.quantised() ? std::max(size, QuantisedAttention::scratch_size(group, dim)) : size;
}
std::int64_t tile_space_size(DType dtype, int group, int dim) {
  // Spans with windows or quantised rows are left to FlashPrefill.
  std::int64_t size = FlashPrefill::scratch_size(group, dim);
  visit_amx(dtype, [&](auto format) {
    size = std::max(size, AmxPrefill<decltype(format)>::scratch_size(group, dim));
  });
  return size;
}

std::int64_t partial_size(int group, int dim) { return std::int64_t{group} * (dim + 2); }

/// The items of a plan and the places of their results, as threads share them.
template <class Value>
struct Items {
  using Tile = HostAttention::Tile;
  using RowItem = HostAttention::RowItem;

  const AttentionSpan* spans;
  AttentionCall call;
  const Tile* tiles;
  const RowItem* row_items;
  std::int64_t n_tiles, n_rows;
  std::int64_t n_amx_tiles;
  bool rows_by_amx;  // then all tiles are AMX's, too
  float* partials;   // one of `partial` floats for each row item
  std::int64_t partial;
  PageFormat page_format;
  float* workspaces;  // `space` floats for each worker: first for row items, then for tiles
  std::int64_t row_space, space;

  void begin_tile(FlashPrefill& attention, const float* queries, std::int64_t tokens,
                  std::int64_t visible, std::int64_t first_seen) const {
    attention.begin(queries, tokens, call.queries.stride(0), call.queries.stride(1),
                    call.queries.stride(2), visible, first_seen);
  }
  // AMX takes no spans with windows.
  template <class Format>
  void begin_tile(AmxPrefill<Format>& attention, const float* queries, std::int64_t tokens,
                  std::int64_t visible, std::int64_t /*first_seen*/) const {
    attention.begin(queries, tokens, call.queries.stride(0), call.queries.stride(1),
                    call.queries.stride(2), visible);
  }

  // The rows of a head that a span's queries see. Sums take the ring in the order of memory.
  HeadRows<Value> rows_of(const AttentionSpan& span, int head) const {
    return {span.cached, head, RingOrder::slots,
            NewRows<Value>(span, call.new_keys, call.new_values).of_head(head)};
  }

  // Quantised rows come first, for rotated queries.
  void attend_quantised(FlashPrefill& attention, const Tile& tile, std::int64_t rows) const {
    const auto& layer = spans[tile.span].cached;
    attention.rotate_queries();
    for (std::int64_t row = 0; row < rows; row += layer.page_rows) {
      const std::int64_t page = row / layer.page_rows;
      attention.attend_quantised(layer.quantised(tile.head, page, false),
                                 layer.quantised(tile.head, page, true), 0,
                                 std::min<std::int64_t>(layer.page_rows, rows - row));
    }
    attention.rotate_back();
  }
  // AMX takes no spans with quantised rows.
  template <class Format>
  void attend_quantised(AmxPrefill<Format>& /*attention*/, const Tile& /*tile*/,
                        std::int64_t /*rows*/) const {}

  template <class Tiles>
  void attend_tile(Tiles& attention, const Tile& tile) const {
    const AttentionSpan& span = spans[tile.span];
    const std::int64_t first = span.first_query + tile.first_token;
    // Rows up to the first token's own; without new rows, all.
    const std::int64_t visible = span.new_rows > 0 ? tile.rows - tile.tokens + 1 : tile.rows;
    const std::int64_t begin =
        span.window > 0 ? std::max<std::int64_t>(0, visible - span.window) : 0;
    begin_tile(attention, &call.queries(first, tile.head * call.group, 0), tile.tokens,
               visible - begin, span.window > 0 ? visible - span.window - begin : no_window);
    const std::int64_t quantised = quantised_rows(span, tile.head);
    if (quantised > 0) attend_quantised(attention, tile, quantised);
    const HeadRows<Value> rows = rows_of(span, tile.head);
    for (std::int64_t row = begin + quantised; row < tile.rows;) {
      const auto run = rows.run(row, tile.rows);
      attention.attend(run);
      row += run.rows;
    }
    attention.finish(&call.output(first, tile.head * call.group, 0), call.output.stride(0),
                     call.output.stride(1), call.output.stride(2),
                     call.wants_lse() ? &call.lse(first, tile.head * call.group) : nullptr,
                     call.lse.stride(0), call.lse.stride(1));
  }

  /// Attends to the rows of an item. run_at(row): the run of rows that begins there; empty from the
  /// item's end on.
  template <class Rows, class RunAt>
  void attend_runs(Rows& attention, std::int64_t i, const RunAt& run_at) const {
    const RowItem& item = row_items[i];
    attention.begin(&call.queries(spans[item.span].first_query, item.head * call.group, 0),
                    call.queries.stride(1), call.queries.stride(2));
    auto run = run_at(item.begin);
    for (std::int64_t row = item.begin; row < item.end;) {
      row += run.rows;
      const auto next = run_at(row);
      attention.attend(run, next);
      run = next;
    }
    finish_rows(attention, i);
  }

  void attend_rows(RowAttention<Value>& attention, std::int64_t i) const {
    const RowItem& item = row_items[i];
    const HeadRows<Value> rows = rows_of(spans[item.span], item.head);
    attend_runs(attention, i, [&](std::int64_t row) { return rows.run(row, item.end); });
  }

  void attend_rows(QuantisedAttention& attention, std::int64_t i) const {
    const RowItem& item = row_items[i];
    const auto& layer = spans[item.span].cached;
    attend_runs(attention, i, [&](std::int64_t row) -> QuantisedAttention::Run {
      if (row >= item.end) return {};
      const std::int64_t page = row / layer.page_rows;
      const std::int64_t slot = row % layer.page_rows;
      return {layer.quantised(item.head, page, false), layer.quantised(item.head, page, true), slot,
              std::min(layer.page_rows - slot, item.end - row)};
    });
  }

  template <class Tiles>
  void attend_rows_by_amx(Tiles& attention, std::int64_t i) const {
    const RowItem& item = row_items[i];
    const AttentionSpan& span = spans[item.span];
    attention.begin(&call.queries(span.first_query, item.head * call.group, 0), 1, 0,
                    call.queries.stride(1), call.queries.stride(2), item.end - item.begin);
    const HeadRows<Value> rows = rows_of(span, item.head);
    for (std::int64_t row = item.begin; row < item.end;) {
      const auto run = rows.run(row, item.end);
      attention.attend(run);
      row += run.rows;
    }
    finish_rows(attention, i);
  }

  template <class Rows>
  void finish_rows(Rows& attention, std::int64_t i) const {
    float* const result = partials + i * partial;
    attention.finish(result, result + call.group, result + 2 * std::int64_t{call.group});
  }

  /// Takes items from the queue until it is empty.
  void work(std::int64_t worker, std::atomic<std::int64_t>& queue) const {
    float* const workspace = workspaces + worker * space;
    std::int64_t i = queue++;
    const std::int64_t n_by_amx = rows_by_amx ? n_tiles + n_rows : n_amx_tiles;
    if (i < n_by_amx) {
      visit_amx(call.dtype(), [&](auto format) {
        if constexpr (std::is_same_v<typename decltype(format)::Value, Value>) {
          const TileScope scope;
          AmxPrefill<decltype(format)> attention(call.group, call.dim, workspace + row_space,
                                                 call.soft_cap);
          for (; i < n_amx_tiles; i = queue++) attend_tile(attention, tiles[i]);
          for (; i < n_by_amx; i = queue++) attend_rows_by_amx(attention, i - n_tiles);
        }
      });
    }
    if (i < n_tiles) {
      FlashPrefill attention(call.dtype(), call.group, call.dim, workspace + row_space,
                             call.soft_cap);
      for (; i < n_tiles; i = queue++) attend_tile(attention, tiles[i]);
    }
    if (i >= n_tiles + n_rows) return;
    RowAttention<Value> attention(call.group, call.dim, workspace, call.soft_cap);
    QuantisedAttention quantised(call.group, call.dim, page_format, workspace, call.soft_cap);
    for (; i < n_tiles + n_rows; i = queue++) {
      if (row_items[i - n_tiles].quantised) {
        attend_rows(quantised, i - n_tiles);
      } else {
        attend_rows(attention, i - n_tiles);
      }
    }
  }
};

}  // namespace

HostAttention::Sizes HostAttention::sizes_of(DType dtype, const AttentionExtents& extents,
                                             bool by_tiles) {
  const std::int64_t tile = least_tile_tokens(dtype, extents.group);
  Sizes sizes{};
  sizes.singles = by_tiles ? 0 : extents.spans;
  const int kinds = extents.format.quantised() ? 2 : 1;  // of items that a head can have
  sizes.row_items =
      by_tiles ? 0
               : extents.single_rows / least_item_rows + kinds * extents.spans * extents.kv_heads;
  sizes.tiles = (extents.tokens / tile + extents.spans) * extents.kv_heads;
  sizes.partials = sizes.row_items * partial_size(extents.group, extents.head_dim);
  sizes.workspaces =
      workers() *
      (tile_space_size(dtype, extents.group, extents.head_dim) +
       (by_tiles ? 0 : row_space_size(dtype, extents.group, extents.head_dim, extents.format)));
  return sizes;
}

std::size_t HostAttention::scratch_bytes(DType dtype, const AttentionExtents& extents,
                                         bool by_tiles) {
  const Sizes sizes = sizes_of(dtype, extents, by_tiles);
  const std::size_t gemm_tiles =
      FlashPrefill::available()
          ? 0
          : GemmTiles::scratch_bytes(extents.group, extents.head_dim, extents.tokens);
  return gemm_tiles + (sizes.partials + sizes.workspaces) * sizeof(float) +
         sizes.tiles * sizeof(Tile) + sizes.row_items * sizeof(RowItem) +
         sizes.singles * sizeof(int) +
         (sizes.singles * extents.kv_heads + 1) * sizeof(std::int64_t);
}

void HostAttention::reserve(DType dtype, const AttentionExtents& extents, bool by_tiles) {
  const Sizes sizes = sizes_of(dtype, extents, by_tiles);
  m_tiles.reserve(sizes.tiles);
  m_row_items.reserve(sizes.row_items);
  m_singles.reserve(sizes.singles);
  m_first_items.reserve(sizes.singles * extents.kv_heads + 1);
  base::reserve_scratch(m_partials, sizes.partials, "kvzap::attention::partials");
  base::reserve_scratch(m_workspaces, sizes.workspaces, "kvzap::attention::workspaces");
  if (!FlashPrefill::available()) {
    m_gemm_tiles.reserve(extents.group, extents.head_dim, extents.tokens);
  }
}

void HostAttention::operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                               const AttentionCall& call, bool by_tiles) {
  base::fence(exec, "kvzap::attention: host kernels read what the instance wrote");
  plan(spans, call, by_tiles);
  run(spans, call);
  if (!m_singles.empty()) merge(spans, call);  // also of spans without rows
  if (FlashPrefill::available()) return;
  for (const Span& span : spans) {
    if (by_tiles ? span.queries > 0 : span.queries > 1) m_gemm_tiles(exec, span, call);
  }
}

// Cuts the spans into tiles, the largest first, and row items.
void HostAttention::plan(const std::vector<Span>& spans, const AttentionCall& call, bool by_tiles) {
  m_tiles.clear();
  m_row_items.clear();
  m_singles.clear();
  m_first_items.clear();
  // AmxPrefill knows neither windows nor quantised rows.
  const bool windows = has_windows(spans);
  for (int s = 0; s < static_cast<int>(spans.size()); ++s) {
    const AttentionSpan& span = spans[s];
    if (!by_tiles && span.queries == 1) {
      m_singles.push_back(s);
      for (int head = 0; head < call.kv_heads; ++head) {
        m_first_items.push_back(static_cast<std::int64_t>(m_row_items.size()));
        const std::int64_t quantised = quantised_rows(span, head);
        plan_rows(s, head, 0, quantised, true);
        plan_rows(s, head, quantised, span.cached.rows(head) + span.new_rows, false);
      }
    } else if (FlashPrefill::available()) {
      const bool by_amx = uses_amx(call.dtype()) && !windows && !has_quantised_rows(span);
      const std::int64_t tile = by_amx ? amx_tile_tokens(call.group, span.queries)
                                       : FlashPrefill::tile_tokens(call.group);
      for (int head = 0; head < call.kv_heads; ++head) {
        for (std::int64_t first = 0; first < span.queries; first += tile) {
          const std::int64_t count = std::min(tile, span.queries - first);
          const std::int64_t rows = span.cached.rows(head) + span.seen_new_rows(first + count - 1);
          m_tiles.push_back({rows, first, count, s, head, by_amx});
        }
      }
    }
  }
  m_first_items.push_back(static_cast<std::int64_t>(m_row_items.size()));
  std::sort(m_tiles.begin(), m_tiles.end(), [](const Tile& a, const Tile& b) {
    return std::make_pair(a.by_amx, a.rows * a.tokens) >
           std::make_pair(b.by_amx, b.rows * b.tokens);
  });
}

void HostAttention::plan_rows(int span, int head, std::int64_t begin, std::int64_t end,
                              bool quantised) {
  const std::int64_t step = item_rows(end - begin);
  for (; begin < end; begin += step) {
    m_row_items.push_back({begin, std::min(end, begin + step), span, head, quantised});
  }
}

// Runs all items on all threads. Tiles write their output; row items leave partial softmaxes.
void HostAttention::run(const std::vector<Span>& spans, const AttentionCall& call) {
  const DType dtype = call.dtype();
  const PageFormat format = spans.front().cached.format;
  const auto n_tiles = static_cast<std::int64_t>(m_tiles.size());
  const auto n_rows = static_cast<std::int64_t>(m_row_items.size());
  const std::int64_t n_amx_tiles =
      std::count_if(m_tiles.begin(), m_tiles.end(), [](const Tile& tile) { return tile.by_amx; });
  const bool rows_by_amx =
      !format.quantised() && !has_windows(spans) && uses_amx_for_rows(dtype, call.group);
  const std::int64_t partial = partial_size(call.group, call.dim);
  const bool by_rows = n_rows > 0 && !rows_by_amx;
  const bool by_tiles = n_tiles > 0 || (n_rows > 0 && rows_by_amx);
  const std::int64_t row_space = by_rows ? row_space_size(dtype, call.group, call.dim, format) : 0;
  const std::int64_t space =
      row_space + (by_tiles ? tile_space_size(dtype, call.group, call.dim) : 0);
  const std::int64_t needed = n_rows * partial;
  const auto room = static_cast<std::int64_t>(m_partials.extent(0));
  if (needed > room) {
    // Grows by at least half, because heads grow in every step.
    base::reserve_scratch(m_partials, std::max(needed, room + room / 2),
                          "kvzap::attention::partials");
  }
  base::reserve_scratch(m_workspaces, workers() * space, "kvzap::attention::workspaces");
  std::atomic<std::int64_t> next_item{0};
  std::atomic<std::int64_t>* const queue = &next_item;
  with_value_type(dtype, [&](auto zero) {
    const Items<decltype(zero)> items{
        spans.data(),      call,    m_tiles.data(), m_row_items.data(),
        n_tiles,           n_rows,  n_amx_tiles,    rows_by_amx,
        m_partials.data(), partial, format,         m_workspaces.data(),
        row_space,         space};
    base::host_for("kvzap::attention::items", workers(),
                   [=](std::int64_t worker) { items.work(worker, *queue); });
  });
}

// Merges the partial softmaxes of row items into the outputs of their query heads.
void HostAttention::merge(const std::vector<Span>& spans, const AttentionCall& call) {
  const int kv_heads = call.kv_heads;
  const int group = call.group;
  const int dim = call.dim;
  const std::int64_t partial = partial_size(group, dim);
  const auto n_rows = static_cast<std::int64_t>(m_row_items.size());
  const Span* const span_list = spans.data();
  const float* const partials = m_partials.data();
  const std::int64_t* const first_of = m_first_items.data();
  const int* const singles = m_singles.data();
  const float scaling = 1.0f / std::sqrt(static_cast<float>(dim));
  base::host_for("kvzap::attention::merge",
                 static_cast<std::int64_t>(m_singles.size()) * kv_heads * group,
                 dim * (1 + n_rows / std::max<std::int64_t>(1, m_singles.size() * kv_heads)),
                 [=](std::int64_t i) {
                   const std::int64_t q = i % group;
                   const std::int64_t query = span_list[singles[i / group / kv_heads]].first_query;
                   const std::int64_t head = i / group % kv_heads;
                   const float* const begin = partials + first_of[i / group] * partial;
                   const float* const end = partials + first_of[i / group + 1] * partial;
                   float largest = minus_infinity;
                   for (const float* p = begin; p < end; p += partial)
                     largest = std::max(largest, p[q]);
                   float* const result = &call.output(query, head * group + q, 0);
                   const std::int64_t stride = call.output.stride(2);
                   for (int d = 0; d < dim; ++d) result[d * stride] = 0;
                   float total = 0;
                   for (const float* p = begin; p < end; p += partial) {
                     const float factor = std::exp((p[q] - shift_of(largest)) * scaling);
                     total += factor * p[group + q];
                     const float* const summand = p + 2 * std::int64_t{group} + q * dim;
                     for (int d = 0; d < dim; ++d) result[d * stride] += factor * summand[d];
                   }
                   const float inverse = inverse_of(total);
                   for (int d = 0; d < dim; ++d) result[d * stride] *= inverse;
                   if (call.wants_lse()) {
                     call.lse(query, head * group + q) = log_sum_exp(largest * scaling, total);
                   }
                 });
}

}  // namespace kvzap::attention
