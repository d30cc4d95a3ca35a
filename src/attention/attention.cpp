#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <kvzap/attention.hpp>
#include <limits>

#include "attention/device/panels.hpp"
#include "attention/device/split_kv.hpp"
#include "attention/host/decode_rows.hpp"
#include "attention/host/flash_prefill.hpp"
#include "base/device_kernels.hpp"
#include "base/instantiate.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap {
namespace {

using detail::Matrix;
using detail::Vector;
using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using HostRange =
    Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::IndexType<std::int64_t>>;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Rows of a work item of the row kernel. Fixed, so that neither the number of threads nor other
// sequences of a batch change how sums are grouped; 512 KiB of bfloat16 keys and values of 128.
[[maybe_unused]] constexpr std::int64_t item_rows = 1024;

/// What is subtracted from scores before exp. When all are -infinity (overflowed keys), not their
/// maximum: the difference would be NaN.
KOKKOS_INLINE_FUNCTION float shift_of(float maximum) {
  return maximum == minus_infinity ? 0.0f : maximum;
}

/// target[d] = float(source[d * stride])
template <class Value>
KOKKOS_INLINE_FUNCTION void load_row(const Value* source, std::int64_t stride, float* target,
                                     int dim) {
  if constexpr (detail::runs_on_host) {
    if (stride == 1) return detail::widen(source, target, dim);
  }
  for (int d = 0; d < dim; ++d) target[d] = static_cast<float>(source[d * stride]);
}

}  // namespace

// Not nested in Attention: nvcc takes no kernel inside a private class.
template <class Value, PageOrder order>
struct detail::AttentionScratch {
  using Layer = typename Attention<Value, order>::Layer;
  using QueryView = typename Attention<Value, order>::QueryView;
  using RowsView = typename Attention<Value, order>::RowsView;
  using OutputView = typename Attention<Value, order>::OutputView;

  /// Rows [begin, end) of a head of a sequence, counted over pages, ring and chunk.
  struct Item {
    int sequence;
    int head;
    std::int64_t begin;
    std::int64_t end;
  };

  std::vector<Item> items;
  std::vector<std::int64_t> first_items;  // of each (sequence, head), and the end
  Kokkos::View<float*, Kokkos::HostSpace> partials;
  Kokkos::View<float*, Kokkos::HostSpace> workspaces;
  detail::SplitKV<Value, order> split;
  detail::PanelAttention<Value, order> panels;
  Vector queries;
  Vector keys;
  Vector values;
  Vector scores;
  Vector sums;
  Vector maximum;
  Vector weight;

  /// One query token for each of `sequences` layers; new_rows rows of the chunk for each.
  void rows(const ExecutionSpace& exec, const Layer* cached, int sequences, std::int64_t new_rows,
            const QueryView& query_view, const RowsView& new_keys, const RowsView& new_values,
            const OutputView& output);
  void flash_prefill(const ExecutionSpace& exec, const Layer& cached, const QueryView& query_view,
                     const RowsView& new_keys, const RowsView& new_values,
                     const OutputView& output);
  void tiles(const ExecutionSpace& exec, const Layer& cached, const QueryView& query_view,
             const RowsView& new_keys, const RowsView& new_values, const OutputView& output);
};

namespace {

// Plain two-pass softmax per (query token, query head), rows in the cache first, then the chunk's.
template <class Value, PageOrder order>
void attend_portable(const ExecutionSpace& exec, const RaggedLayer<Value, order>& cached,
                     const typename Attention<Value, order>::QueryView& queries,
                     const typename Attention<Value, order>::RowsView& new_keys,
                     const typename Attention<Value, order>::RowsView& new_values,
                     const typename Attention<Value, order>::OutputView& output) {
  const std::int64_t tokens = queries.extent(0);
  const int heads = static_cast<int>(queries.extent(1));
  const int dim = static_cast<int>(queries.extent(2));
  if (cached.heads == 0) return;
  const int group = heads / cached.heads;
  const std::int64_t before = new_keys.extent(0) - tokens;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  using Span = typename RaggedLayer<Value, order>::Span;
  Kokkos::parallel_for(
      "kvzap::attention::portable", Range(exec, 0, tokens * heads), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads;
        const int head = static_cast<int>(i % heads);
        const int kv_head = head / group;
        const std::int64_t n_spans = cached.pages(kv_head) + 2;
        const auto span_of = [&](std::int64_t s) -> Span {
          if (s < n_spans - 1) return cached.span(kv_head, s);
          return {&new_keys(0, kv_head, 0), &new_values(0, kv_head, 0), before + token + 1,
                  static_cast<std::int64_t>(new_keys.stride(0)),
                  static_cast<std::int64_t>(new_keys.stride(2))};
        };
        const auto score_of = [&](const Span& span, std::int64_t row) {
          float score = 0;
          for (int d = 0; d < dim; ++d) {
            score += queries(token, head, d) *
                     static_cast<float>(span.keys[row * span.row_stride + d * span.dim_stride]);
          }
          return score * scale;
        };
        float maximum = minus_infinity;
        for (std::int64_t s = 0; s < n_spans; ++s) {
          const Span span = span_of(s);
          for (std::int64_t r = 0; r < span.rows; ++r) {
            const float score = score_of(span, r);
            if (score > maximum) maximum = score;
          }
        }
        float weight = 0;
        for (int d = 0; d < dim; ++d) output(token, head, d) = 0;
        for (std::int64_t s = 0; s < n_spans; ++s) {
          const Span span = span_of(s);
          for (std::int64_t r = 0; r < span.rows; ++r) {
            const float p = detail::math::exp(score_of(span, r) - shift_of(maximum));
            weight += p;
            const Value* value = span.values + r * span.row_stride;
            for (int d = 0; d < dim; ++d) {
              output(token, head, d) += p * static_cast<float>(value[d * span.dim_stride]);
            }
          }
        }
        for (int d = 0; d < dim; ++d) output(token, head, d) /= weight;
      });
}

}  // namespace

namespace {

// The run of rows of a head that begins at `row` and ends before `end` at the latest. Rows are
// counted over the head's pages, the ring, and the chunk's rows from first_row on.
template <class Value, class Layer, class RowsView>
detail::RowRun<Value> run_of(const Layer& layer, int head, const RowsView& new_keys,
                             const RowsView& new_values, std::int64_t first_row,
                             std::int64_t new_rows, std::int64_t row, std::int64_t end) {
  const std::int64_t retained = layer.retained(head);
  const std::int64_t cached_rows = layer.rows(head);
  detail::RowRun<Value> run;
  std::int64_t skipped;
  if (row < cached_rows) {
    const bool in_page = row < retained;
    const std::int64_t index = in_page ? row / layer.page_rows : layer.pages(head);
    const auto span = layer.span(head, index);
    run = {span.keys, span.values, span.rows, span.row_stride, span.dim_stride};
    skipped = in_page ? row - index * layer.page_rows : row - retained;
  } else {
    run = {&new_keys(first_row, head, 0), &new_values(first_row, head, 0), new_rows,
           static_cast<std::int64_t>(new_keys.stride(0)),
           static_cast<std::int64_t>(new_keys.stride(2))};
    skipped = row - cached_rows;
  }
  run.keys += skipped * run.row_stride;
  run.values += skipped * run.row_stride;
  run.rows = std::min(run.rows - skipped, end - row);
  return run;
}

}  // namespace

// One query token per sequence. Every item's partial softmax is kept; those of a head merge exactly
// in the end.
template <class Value, PageOrder order>
void detail::AttentionScratch<Value, order>::rows(const ExecutionSpace& exec, const Layer* cached,
                                                  int sequences, std::int64_t new_rows,
                                                  const QueryView& query_view,
                                                  const RowsView& new_keys,
                                                  const RowsView& new_values,
                                                  const OutputView& output) {
  using Run = detail::RowRun<Value>;
  const int kv_heads = cached[0].heads;
  const int dim = static_cast<int>(query_view.extent(2));
  const int group = static_cast<int>(query_view.extent(1)) / kv_heads;
  detail::fence(exec, "kvzap::attention: host kernels read what the instance wrote");

  items.clear();
  first_items.clear();
  for (int b = 0; b < sequences; ++b) {
    for (int head = 0; head < kv_heads; ++head) {
      first_items.push_back(static_cast<std::int64_t>(items.size()));
      const std::int64_t rows = cached[b].rows(head) + new_rows;
      for (std::int64_t begin = 0; begin < rows; begin += item_rows) {
        items.push_back({b, head, begin, std::min(rows, begin + item_rows)});
      }
    }
  }
  const std::int64_t n_items = static_cast<std::int64_t>(items.size());
  first_items.push_back(n_items);

  const std::int64_t workers = Kokkos::DefaultHostExecutionSpace().concurrency();
  const std::int64_t partial_size = std::int64_t{group} * (dim + 2);
  const std::int64_t workspace_size = detail::RowAttention<Value>::scratch_size(group, dim);
  detail::reserve_scratch(partials, n_items * partial_size, "kvzap::attention::partials");
  detail::reserve_scratch(workspaces, workers * workspace_size, "kvzap::attention::workspaces");
  float* const partial_base = partials.data();
  float* const workspace_base = workspaces.data();
  const Item* const item_list = items.data();
  std::atomic<std::int64_t> next_item{0};
  std::atomic<std::int64_t>* const queue = &next_item;
  Kokkos::parallel_for("kvzap::attention::rows", HostRange(0, workers), [=](std::int64_t worker) {
    detail::RowAttention<Value> attention(group, dim, order == PageOrder::token_major,
                                          workspace_base + worker * workspace_size);
    for (std::int64_t i = (*queue)++; i < n_items; i = (*queue)++) {
      const Item& item = item_list[i];
      const Layer& layer = cached[item.sequence];
      const int head = item.head;
      const auto run_at = [&](std::int64_t row) -> Run {
        if (row >= item.end) return {};
        return run_of<Value>(layer, head, new_keys, new_values, item.sequence * new_rows, new_rows,
                             row, item.end);
      };
      attention.begin(&query_view(item.sequence, head * group, 0), query_view.stride(1),
                      query_view.stride(2));
      Run run = run_at(item.begin);
      for (std::int64_t row = item.begin; row < item.end;) {
        row += run.rows;
        const Run next = run_at(row);
        attention.attend(run, next);
        run = next;
      }
      float* const partial = partial_base + i * partial_size;
      attention.finish(partial, partial + group, partial + 2 * std::int64_t{group});
    }
  });
  const std::int64_t* const first_of = first_items.data();
  const float scaling = 1.0f / std::sqrt(static_cast<float>(dim));
  Kokkos::parallel_for(
      "kvzap::attention::merge", HostRange(0, std::int64_t{sequences} * kv_heads * group),
      [=](std::int64_t i) {
        const std::int64_t q = i % group;
        const std::int64_t sequence = i / (std::int64_t{kv_heads} * group);
        const std::int64_t head = i / group % kv_heads;
        const float* const begin = partial_base + first_of[i / group] * partial_size;
        const float* const end = partial_base + first_of[i / group + 1] * partial_size;
        float largest = minus_infinity;
        for (const float* p = begin; p < end; p += partial_size) largest = std::max(largest, p[q]);
        float* const result = &output(sequence, head * group + q, 0);
        const std::int64_t stride = output.stride(2);
        for (int d = 0; d < dim; ++d) result[d * stride] = 0;
        float total = 0;
        for (const float* p = begin; p < end; p += partial_size) {
          const float factor = std::exp((p[q] - shift_of(largest)) * scaling);
          total += factor * p[group + q];
          const float* const summand = p + 2 * std::int64_t{group} + q * dim;
          for (int d = 0; d < dim; ++d) result[d * stride] += factor * summand[d];
        }
        for (int d = 0; d < dim; ++d) result[d * stride] /= total;
      });
}

// Many query tokens on the host. Work items are (KV head, tile of query tokens); those that see the
// most rows come first.
template <class Value, PageOrder order>
void detail::AttentionScratch<Value, order>::flash_prefill(
    const ExecutionSpace& exec, const Layer& cached, const QueryView& query_view,
    const RowsView& new_keys, const RowsView& new_values, const OutputView& output) {
  const std::int64_t tokens = query_view.extent(0);
  const int kv_heads = cached.heads;
  const int dim = static_cast<int>(query_view.extent(2));
  const int group = static_cast<int>(query_view.extent(1)) / kv_heads;
  const std::int64_t new_rows = new_keys.extent(0);
  const std::int64_t tile = detail::FlashPrefill<Value>::tile_tokens(group);
  const std::int64_t tiles = (tokens + tile - 1) / tile;
  const std::int64_t workers = Kokkos::DefaultHostExecutionSpace().concurrency();
  const std::int64_t workspace_size = detail::FlashPrefill<Value>::scratch_size(group, dim);
  detail::reserve_scratch(workspaces, workers * workspace_size, "kvzap::attention::workspaces");
  float* const workspace_base = workspaces.data();
  std::atomic<std::int64_t> next_item{0};
  std::atomic<std::int64_t>* const queue = &next_item;
  detail::fence(exec, "kvzap::attention: host kernels read what the instance wrote");
  Kokkos::parallel_for("kvzap::attention::tiles", HostRange(0, workers), [=](std::int64_t worker) {
    detail::FlashPrefill<Value> attention(group, dim, workspace_base + worker * workspace_size);
    for (std::int64_t i = (*queue)++; i < tiles * kv_heads; i = (*queue)++) {
      const int head = static_cast<int>(i % kv_heads);
      const std::int64_t first = (tiles - 1 - i / kv_heads) * tile;
      const std::int64_t count = std::min(tile, tokens - first);
      const std::int64_t visible = cached.rows(head) + new_rows - tokens + first + 1;
      attention.begin(&query_view(first, head * group, 0), count, query_view.stride(0),
                      query_view.stride(1), query_view.stride(2), visible);
      const std::int64_t end = visible + count - 1;
      for (std::int64_t row = 0; row < end;) {
        const auto run = run_of<Value>(cached, head, new_keys, new_values, 0, new_rows, row, end);
        attention.attend(run);
        row += run.rows;
      }
      attention.finish(&output(first, head * group, 0), output.stride(0), output.stride(1),
                       output.stride(2));
    }
  });
}

// Many query tokens on a host without AVX-512. Per KV head and tile of query tokens: for each tile
// of rows, scores by gemm, a running softmax, weighted sums by gemm. Rows are gathered into float
// tiles, which costs a 1/tile_queries part of the arithmetic.
template <class Value, PageOrder order>
void detail::AttentionScratch<Value, order>::tiles(const ExecutionSpace& exec, const Layer& cached,
                                                   const QueryView& query_view,
                                                   const RowsView& new_keys,
                                                   const RowsView& new_values,
                                                   const OutputView& output) {
  const std::int64_t tokens = query_view.extent(0);
  const int kv_heads = cached.heads;
  const int dim = static_cast<int>(query_view.extent(2));
  const int group = static_cast<int>(query_view.extent(1)) / kv_heads;
  const std::int64_t before = new_keys.extent(0) - tokens;
  const float scaling = 1.0f / std::sqrt(static_cast<float>(dim));
  // Query rows (tokens x group) and key rows.
  constexpr std::int64_t tile_queries = 512;
  constexpr std::int64_t tile_keys = 512;
  const std::int64_t tile_tokens =
      std::min(tokens, std::max<std::int64_t>(1, tile_queries / group));
  const std::int64_t most_rows = tile_tokens * group;
  detail::reserve_scratch(queries, most_rows * dim, "kvzap::attention::queries");
  detail::reserve_scratch(keys, tile_keys * dim, "kvzap::attention::keys");
  detail::reserve_scratch(values, tile_keys * dim, "kvzap::attention::values");
  detail::reserve_scratch(scores, most_rows * tile_keys, "kvzap::attention::scores");
  detail::reserve_scratch(sums, most_rows * dim, "kvzap::attention::sums");
  detail::reserve_scratch(maximum, most_rows, "kvzap::attention::maximum");
  detail::reserve_scratch(weight, most_rows, "kvzap::attention::weight");
  const auto row_maximum = maximum;
  const auto row_weight = weight;
  Kokkos::View<std::int64_t*, Kokkos::HostSpace> host_retained("kvzap::attention::retained",
                                                               kv_heads);
  Kokkos::deep_copy(host_retained, cached.retained);

  for (int head = 0; head < kv_heads; ++head) {
    const std::int64_t retained = host_retained(head);
    const std::int64_t cached_rows = retained + cached.ring_rows();
    const std::int64_t pages = (retained + cached.page_rows - 1) / cached.page_rows;
    for (std::int64_t first = 0; first < tokens; first += tile_tokens) {
      const std::int64_t tile = std::min(tile_tokens, tokens - first);
      const Matrix q(queries.data(), tile * group, dim);
      const Matrix o(sums.data(), tile * group, dim);
      Kokkos::parallel_for(
          "kvzap::attention::load_queries", Range(exec, 0, tile * group),
          KOKKOS_LAMBDA(std::int64_t i) {
            for (int d = 0; d < dim; ++d) {
              q(i, d) = scaling *
                        query_view(first + i / group, std::int64_t{head} * group + i % group, d);
              o(i, d) = 0;
            }
            row_maximum(i) = minus_infinity;
            row_weight(i) = 0;
          });

      // Row i of the tile is token first + i / group. It sees every cached row and the chunk's up
      // to its own: `visible` is how many rows of a tile of rows the first token sees, each later
      // token one more.
      const auto attend_tile = [&](std::int64_t rows, std::int64_t visible) {
        const Matrix k(keys.data(), rows, dim);
        const Matrix v(values.data(), rows, dim);
        const Matrix s(scores.data(), tile * group, rows);
        detail::multiply_nt(exec, 1, q, k, 0, s);
        detail::fence(exec, "kvzap::attention: host kernels read what the instance wrote");
        Kokkos::parallel_for(
            "kvzap::attention::softmax", HostRange(0, tile * group), [=](std::int64_t i) {
              float* row = &s(i, 0);
              const std::int64_t limit = std::min(rows, visible + i / group);
              if (limit > 0) {
                const float largest = std::max(row_maximum(i), detail::max_of(row, limit));
                if (largest > row_maximum(i)) {
                  const float factor = std::exp(row_maximum(i) - largest);
                  row_weight(i) *= factor;
                  detail::scale(&o(i, 0), dim, factor);
                  row_maximum(i) = largest;
                }
                row_weight(i) += detail::exp_shifted(row, limit, shift_of(largest));
              }
              std::fill(row + std::max<std::int64_t>(0, limit), row + rows, 0.0f);
            });
        detail::multiply_nn(exec, 1, s, v, 1, o);
      };

      for (std::int64_t begin = 0; begin < cached_rows; begin += tile_keys) {
        const std::int64_t rows = std::min(tile_keys, cached_rows - begin);
        const Matrix k(keys.data(), rows, dim);
        const Matrix v(values.data(), rows, dim);
        Kokkos::parallel_for(
            "kvzap::attention::load_cached", Range(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t i) {
              const std::int64_t row = begin + i;
              const bool in_page = row < retained;
              const auto span = cached.span(head, in_page ? row / cached.page_rows : pages);
              const std::int64_t offset =
                  (in_page ? row % cached.page_rows : row - retained) * span.row_stride;
              load_row(span.keys + offset, span.dim_stride, &k(i, 0), dim);
              load_row(span.values + offset, span.dim_stride, &v(i, 0), dim);
            });
        attend_tile(rows, rows);
      }
      const std::int64_t new_rows = before + first + tile;
      for (std::int64_t begin = 0; begin < new_rows; begin += tile_keys) {
        const std::int64_t rows = std::min(tile_keys, new_rows - begin);
        const Matrix k(keys.data(), rows, dim);
        const Matrix v(values.data(), rows, dim);
        Kokkos::parallel_for(
            "kvzap::attention::load_chunk", Range(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t i) {
              load_row(&new_keys(begin + i, head, 0), new_keys.stride(2), &k(i, 0), dim);
              load_row(&new_values(begin + i, head, 0), new_values.stride(2), &v(i, 0), dim);
            });
        attend_tile(rows, before + first + 1 - begin);
      }
      Kokkos::parallel_for(
          "kvzap::attention::store", Range(exec, 0, tile * group), KOKKOS_LAMBDA(std::int64_t i) {
            const float inverse = 1.0f / row_weight(i);
            for (int d = 0; d < dim; ++d) {
              output(first + i / group, std::int64_t{head} * group + i % group, d) =
                  o(i, d) * inverse;
            }
          });
    }
  }
}

template <class Value, PageOrder order>
Attention<Value, order>::Attention()
    : m_scratch(std::make_unique<detail::AttentionScratch<Value, order>>()) {}

template <class Value, PageOrder order>
Attention<Value, order>::~Attention() = default;

namespace {

/// Throws Error on extents that do not fit each other.
template <class Layer, class QueryView, class RowsView, class OutputView>
void check(const Layer& cached, const QueryView& queries, const RowsView& new_keys,
           const RowsView& new_values, const OutputView& output) {
  const auto fits = [&](const RowsView& view) {
    return view.extent(0) >= queries.extent(0) && view.extent(0) == new_keys.extent(0) &&
           static_cast<int>(view.extent(1)) == cached.heads &&
           static_cast<int>(view.extent(2)) == cached.head_dim;
  };
  if (!fits(new_keys) || !fits(new_values) ||
      static_cast<int>(queries.extent(2)) != cached.head_dim ||
      (cached.heads > 0 ? queries.extent(1) % cached.heads != 0 || queries.extent(1) == 0
                        : queries.extent(1) != 0)) {
    throw Error(fmt::format(
        "attention: queries ({}, {}, {}) and chunk rows ({}, {}, {}); expected (token, multiple of "
        "{}, {}) and (as many tokens or more, {}, {})",
        queries.extent(0), queries.extent(1), queries.extent(2), new_keys.extent(0),
        new_keys.extent(1), new_keys.extent(2), cached.heads, cached.head_dim, cached.heads,
        cached.head_dim));
  }
  for (int i = 0; i < 3; ++i) {
    if (output.extent(i) != queries.extent(i)) {
      throw Error(
          fmt::format("attention: extent {} of the output is {}; expected {} as in the queries", i,
                      output.extent(i), queries.extent(i)));
    }
  }
}

/// The path that is taken.
AttentionPath resolve(AttentionPath path, bool single) {
  if (path == AttentionPath::automatic)
    path = single ? AttentionPath::rows : AttentionPath::flash_prefill;
  const bool chosen = path == AttentionPath::rows || path == AttentionPath::flash_prefill;
  if (!chosen || (detail::runs_on_host && !detail::uses_device_kernels())) return path;
  return path == AttentionPath::rows ? AttentionPath::split_kv : AttentionPath::panels;
}

}  // namespace

template <class Value, PageOrder order>
void Attention<Value, order>::operator()(const ExecutionSpace& exec, const Layer& cached,
                                         const QueryView& queries, const RowsView& new_keys,
                                         const RowsView& new_values, const OutputView& output,
                                         AttentionPath path) {
  check(cached, queries, new_keys, new_values, output);
  if (queries.extent(0) == 0 || cached.heads == 0) return;
  const bool single = queries.extent(0) == 1;
  if ((path == AttentionPath::rows || path == AttentionPath::split_kv) && !single) {
    throw Error(
        fmt::format("attention: the row kernel takes one query token, not {}", queries.extent(0)));
  }
  path = resolve(path, single);
  if (path == AttentionPath::split_kv) {
    return m_scratch->split(exec, &cached, 1, new_keys.extent(0), queries, new_keys, new_values,
                            output);
  }
  if (path == AttentionPath::panels) {
    return m_scratch->panels(exec, cached, queries, new_keys, new_values, output);
  }
  if constexpr (detail::runs_on_host) {
    if (path == AttentionPath::rows) {
      return m_scratch->rows(exec, &cached, 1, new_keys.extent(0), queries, new_keys, new_values,
                             output);
    }
    if (path == AttentionPath::flash_prefill) {
      if (detail::FlashPrefill<Value>::available()) {
        return m_scratch->flash_prefill(exec, cached, queries, new_keys, new_values, output);
      }
      return m_scratch->tiles(exec, cached, queries, new_keys, new_values, output);
    }
  }
  attend_portable<Value, order>(exec, cached, queries, new_keys, new_values, output);
}

template <class Value, PageOrder order>
void Attention<Value, order>::decode(const ExecutionSpace& exec, const std::vector<Layer>& cached,
                                     const QueryView& queries, const RowsView& new_keys,
                                     const RowsView& new_values, const OutputView& output,
                                     AttentionPath path) {
  if (queries.extent(0) != cached.size() || new_keys.extent(0) != cached.size() ||
      new_values.extent(0) != cached.size()) {
    throw Error(fmt::format(
        "attention: {} query rows, {} chunk keys and {} chunk values; expected one of each for "
        "each of {} sequences",
        queries.extent(0), new_keys.extent(0), new_values.extent(0), cached.size()));
  }
  for (std::size_t b = 0; b < cached.size(); ++b) {
    const Layer& layer = cached[b];
    if (layer.heads != cached[0].heads || layer.head_dim != cached[0].head_dim) {
      throw Error(fmt::format(
          "attention: the layer of sequence {} has {} heads of {}; expected {} of {} as in the "
          "first",
          b, layer.heads, layer.head_dim, cached[0].heads, cached[0].head_dim));
    }
    check(layer, queries, new_keys, new_values, output);
  }
  if (cached.empty() || cached[0].heads == 0) return;
  path = resolve(path, true);
  if (path == AttentionPath::split_kv) {
    return m_scratch->split(exec, cached.data(), cached.size(), 1, queries, new_keys, new_values,
                            output);
  }
  if constexpr (detail::runs_on_host) {
    if (path == AttentionPath::rows) {
      return m_scratch->rows(exec, cached.data(), static_cast<int>(cached.size()), 1, queries,
                             new_keys, new_values, output);
    }
  }
  for (std::size_t b = 0; b < cached.size(); ++b) {
    const auto own = std::make_pair(b, b + 1);
    (*this)(exec, cached[b], Kokkos::subview(queries, own, Kokkos::ALL, Kokkos::ALL),
            Kokkos::subview(new_keys, own, Kokkos::ALL, Kokkos::ALL),
            Kokkos::subview(new_values, own, Kokkos::ALL, Kokkos::ALL),
            Kokkos::subview(output, own, Kokkos::ALL, Kokkos::ALL), path);
  }
}

#define KVZAP_INSTANTIATE(Value, order) template class Attention<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
