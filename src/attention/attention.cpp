#include <fmt/format.h>

#include <kvzap/core/attention.hpp>

#include "attention/call.hpp"
#include "attention/device/panels.hpp"
#include "attention/device/split_kv.hpp"
#include "attention/host/flash_prefill.hpp"
#include "attention/host/gemm_tiles.hpp"
#include "attention/host/host_attention.hpp"
#include "attention/portable.hpp"
#include "base/device_kernels.hpp"
#include "base/kokkos_compat.hpp"
#include "base/value_types.hpp"

namespace kvzap {

template <class Value>
struct attention::AttentionScratch {
  attention::HostAttention<Value> host;
  attention::GemmTiles<Value> tiles;
  attention::SplitKV<Value> split;
  attention::PanelAttention<Value> panels;
  std::vector<AttentionSpan<Value>> spans;  // for the overloads that take one span
};

template <class Value>
Attention<Value>::Attention() : m_scratch(std::make_unique<attention::AttentionScratch<Value>>()) {}

template <class Value>
Attention<Value>::~Attention() = default;

namespace {

template <class View>
std::int64_t extent(const View& view, int i) {
  return static_cast<std::int64_t>(view.extent(i));
}

/// Throws Error if the views do not fit each other and a layer's heads, or if they have fewer new
/// rows than least_rows.
template <class Layer, class QueryView, class RowsView, class OutputView>
void check_views(const Layer& cached, const QueryView& queries, const RowsView& new_keys,
                 const RowsView& new_values, const OutputView& output, const LogSumExpView& lse,
                 std::int64_t least_rows = 0) {
  const auto fits = [&](const RowsView& view) {
    return extent(view, 0) >= least_rows && view.extent(0) == new_keys.extent(0) &&
           extent(view, 1) == cached.heads && extent(view, 2) == cached.head_dim;
  };
  if (!fits(new_keys) || !fits(new_values) || extent(queries, 2) != cached.head_dim ||
      (cached.heads > 0 ? queries.extent(1) % cached.heads != 0 || queries.extent(1) == 0
                        : queries.extent(1) != 0)) {
    throw Error(fmt::format(
        "attention: queries ({}, {}, {}), new keys ({}, {}, {}) and new values ({}, {}, {}); "
        "expected (token, multiple of {}, {}) and ({} rows or more, {}, {})",
        queries.extent(0), queries.extent(1), queries.extent(2), new_keys.extent(0),
        new_keys.extent(1), new_keys.extent(2), new_values.extent(0), new_values.extent(1),
        new_values.extent(2), cached.heads, cached.head_dim, least_rows, cached.heads,
        cached.head_dim));
  }
  for (int i = 0; i < 3; ++i) {
    if (new_keys.extent(i) > 1 && new_keys.stride(i) != new_values.stride(i)) {
      throw Error(fmt::format(
          "attention: stride {} of the new values is {}; expected {} as in the new keys", i,
          new_values.stride(i), new_keys.stride(i)));
    }
    if (output.extent(i) != queries.extent(i)) {
      throw Error(
          fmt::format("attention: extent {} of the output is {}; expected {} as in the queries", i,
                      output.extent(i), queries.extent(i)));
    }
  }
  if (lse.data() && (lse.extent(0) != queries.extent(0) || lse.extent(1) != queries.extent(1))) {
    throw Error(fmt::format(
        "attention: log-sum-exp ({}, {}); expected ({}, {}) as the queries have it, or none",
        lse.extent(0), lse.extent(1), queries.extent(0), queries.extent(1)));
  }
}

/// Throws Error if a span does not lie in the views or if its layer's shape differs from the first
/// span's.
template <class Span, class QueryView, class RowsView>
void check_span(const Span& span, std::size_t index, const Span& first, const QueryView& queries,
                const RowsView& new_keys) {
  const auto& layer = span.cached;
  if (layer.format != first.cached.format) {
    throw Error(
        fmt::format("attention: the pages of span {} have another format than the first's", index));
  }
  if (layer.heads != first.cached.heads || layer.head_dim != first.cached.head_dim) {
    throw Error(fmt::format(
        "attention: the layer of span {} has {} heads of {}; expected {} of {} as in the first",
        index, layer.heads, layer.head_dim, first.cached.heads, first.cached.head_dim));
  }
  if (span.first_query < 0 || span.queries < 0 ||
      span.first_query + span.queries > extent(queries, 0)) {
    throw Error(
        fmt::format("attention: span {} has {} query tokens from row {} on; expected rows "
                    "below {}",
                    index, span.queries, span.first_query, queries.extent(0)));
  }
  if (span.first_new < 0 || span.new_rows < 0 ||
      (span.new_rows > 0 && span.new_rows < span.queries) ||
      span.first_new + span.new_rows > extent(new_keys, 0)) {
    throw Error(
        fmt::format("attention: span {} has {} new rows from row {} on; expected none or at least "
                    "as many as its {} query tokens, and rows below {}",
                    index, span.new_rows, span.first_new, span.queries, new_keys.extent(0)));
  }
  if (span.window < 0 || (span.window > 0 && (layer.tokens > 0 || span.queries == 1))) {
    throw Error(fmt::format(
        "attention: span {} has a window of {} with {} cached tokens and {} query tokens; "
        "expected a window only without cached tokens and with several queries",
        index, span.window, layer.tokens, span.queries));
  }
}

bool is_for_singles(AttentionPath path) {
  return path == AttentionPath::rows || path == AttentionPath::split_kv;
}

/// The implementations that a path selects on this backend.
struct Implementations {
  bool host = false;      // HostAttention, GemmTiles
  bool by_tiles = false;  // HostAttention and GemmTiles take single queries too
  bool split = false;
  // for spans of more than one query token if `split`, otherwise for all spans
  bool panels = false;
};

Implementations implementations(AttentionPath path) {
  const bool device = base::uses_device_kernels();
  Implementations which;
  switch (path) {
    case AttentionPath::automatic:
      which.host = !device;
      which.split = which.panels = device;
      break;
    case AttentionPath::rows:
      which.host = !device;
      which.split = device;
      break;
    case AttentionPath::flash_prefill:
      which.host = which.by_tiles = !device;
      which.panels = device;
      break;
    case AttentionPath::split_kv:
      which.split = true;
      break;
    case AttentionPath::panels:
      which.panels = true;
      break;
    case AttentionPath::portable:
      break;
  }
  return which;
}

/// Empties a vector when the scope ends, so that it does not keep layers alive.
template <class Vector>
class Emptied {
 public:
  explicit Emptied(Vector& vector) : m_vector(vector) { m_vector.clear(); }
  ~Emptied() { m_vector.clear(); }
  Emptied(const Emptied&) = delete;
  Emptied& operator=(const Emptied&) = delete;

 private:
  Vector& m_vector;
};

}  // namespace

template <class Value>
void Attention<Value>::operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                                  const QueryView& queries, const RowsView& new_keys,
                                  const RowsView& new_values, const OutputView& output,
                                  AttentionPath path, const LogSumExpView& lse, float soft_cap) {
  if (spans.empty()) return;
  const Layer& any = spans.front().cached;
  check_views(any, queries, new_keys, new_values, output, lse);
  for (std::size_t s = 0; s < spans.size(); ++s) {
    check_span(spans[s], s, spans.front(), queries, new_keys);
    if (is_for_singles(path) && spans[s].queries > 1) {
      throw Error(fmt::format("attention: this path takes one query token per span, not {}",
                              spans[s].queries));
    }
  }
  if (queries.extent(0) == 0 || any.heads == 0) return;
  const attention::AttentionCall<Value> call{queries,
                                             new_keys,
                                             new_values,
                                             output,
                                             lse,
                                             any.heads,
                                             static_cast<int>(queries.extent(1)) / any.heads,
                                             any.head_dim,
                                             soft_cap};
  const Implementations which = implementations(path);
  if constexpr (base::runs_on_host) {
    if (which.host) {
      m_scratch->host(exec, spans, call, which.by_tiles);
      if (attention::FlashPrefill<Value>::available()) return;
      for (const Span& span : spans) {
        if (which.by_tiles ? span.queries > 0 : span.queries > 1) {
          m_scratch->tiles(exec, span, call);
        }
      }
      return;
    }
  }
  if (which.split) m_scratch->split(exec, spans, call);
  for (const Span& span : spans) {
    if (span.queries == 0 || (which.split && span.queries == 1)) continue;
    if (which.panels) {
      m_scratch->panels(exec, span, call);
    } else {
      attention::attend_portable(exec, span, call);
    }
  }
}

template <class Value>
void Attention<Value>::operator()(const ExecutionSpace& exec, const Layer& cached,
                                  const QueryView& queries, const RowsView& new_keys,
                                  const RowsView& new_values, const OutputView& output,
                                  AttentionPath path, const LogSumExpView& lse, float soft_cap) {
  check_views(cached, queries, new_keys, new_values, output, lse, extent(queries, 0));
  const Emptied emptied(m_scratch->spans);
  m_scratch->spans.push_back({cached, 0, extent(queries, 0), 0, extent(new_keys, 0), 0});
  (*this)(exec, m_scratch->spans, queries, new_keys, new_values, output, path, lse, soft_cap);
}

template <class Value>
void Attention<Value>::decode(const ExecutionSpace& exec, const std::vector<Layer>& cached,
                              const QueryView& queries, const RowsView& new_keys,
                              const RowsView& new_values, const OutputView& output,
                              AttentionPath path, const LogSumExpView& lse, float soft_cap) {
  if (queries.extent(0) != cached.size() || new_keys.extent(0) != cached.size() ||
      new_values.extent(0) != cached.size()) {
    throw Error(fmt::format(
        "attention: {} query rows, {} new keys and {} new values; expected one of each for each of "
        "{} sequences",
        queries.extent(0), new_keys.extent(0), new_values.extent(0), cached.size()));
  }
  const Emptied emptied(m_scratch->spans);
  for (const Layer& layer : cached) {
    const auto row = static_cast<std::int64_t>(m_scratch->spans.size());
    m_scratch->spans.push_back({layer, row, 1, row, 1, 0});
  }
  (*this)(exec, m_scratch->spans, queries, new_keys, new_values, output, path, lse, soft_cap);
}

template <class Value>
void Attention<Value>::reserve(const AttentionExtents& extents, AttentionPath path) {
  const Implementations which = implementations(path);
  m_scratch->spans.reserve(extents.spans);
  if constexpr (base::runs_on_host) {
    if (which.host) {
      m_scratch->host.reserve(extents, which.by_tiles);
      if (!attention::FlashPrefill<Value>::available()) {
        m_scratch->tiles.reserve(extents.group, extents.head_dim, extents.tokens);
      }
      return;
    }
  }
  if (which.split) m_scratch->split.reserve(extents);
  if (which.panels) {
    m_scratch->panels.reserve(extents.kv_heads, extents.group, extents.head_dim, extents.tokens);
  }
}

template <class Value>
std::size_t Attention<Value>::scratch_bytes(const AttentionExtents& extents, AttentionPath path) {
  const Implementations which = implementations(path);
  const std::size_t spans = extents.spans * sizeof(Span);
  if constexpr (base::runs_on_host) {
    if (which.host) {
      return spans + attention::HostAttention<Value>::scratch_bytes(extents, which.by_tiles) +
             (attention::FlashPrefill<Value>::available()
                  ? 0
                  : attention::GemmTiles<Value>::scratch_bytes(extents.group, extents.head_dim,
                                                               extents.tokens));
    }
  }
  return spans + (which.split ? attention::SplitKV<Value>::scratch_bytes(extents) : 0) +
         (which.panels ? attention::PanelAttention<Value>::scratch_bytes(
                             extents.kv_heads, extents.group, extents.head_dim, extents.tokens)
                       : 0);
}

#define KVZAP_INSTANTIATE(Value) template class Attention<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
