#include <fmt/format.h>

#include <kvzap/core/attention.hpp>

#include "attention/call.hpp"
#include "attention/cuda/tensor_cores.hpp"
#include "attention/device/page_choice.hpp"
#include "attention/device/panels.hpp"
#include "attention/device/split_kv.hpp"
#include "attention/host/host_attention.hpp"
#include "attention/host/page_choice.hpp"
#include "attention/portable.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"

namespace kvzap {

/// The implementations that a path selects on this backend.
struct Implementations {
  bool host = false;
  bool by_tiles = false;  // HostAttention takes single queries as tiles too
  bool split = false;
  // for spans of more than one query token if `split`, otherwise for all spans
  bool panels = false;
};

/// The kernels of an Attention, with their scratch space.
struct attention::Kernels {
  PageChoice choice;
  HostAttention host;
  DevicePageChoice device_choice;
  SplitKV split;
  PanelAttention panels;
  linalg::Vector of_tiles;  // scratch space of tensor_cores::attend_span
};

namespace {

template <class View>
std::int64_t extent(const View& view, int i) {
  return static_cast<std::int64_t>(view.extent(i));
}

/// Throws Error if the views do not fit each other and a layer's heads, or if they have fewer new
/// rows than least_rows.
void check_views(const RaggedLayer& cached, const Attention::QueryView& queries,
                 const ConstArrayView& new_keys, const ConstArrayView& new_values,
                 const Attention::OutputView& output, const LogSumExpView& lse,
                 std::int64_t least_rows = 0) {
  const auto fits = [&](const ConstArrayView& rows) {
    return rows.extents[0] >= least_rows && rows.extents[0] == new_keys.extents[0] &&
           rows.extents[1] == cached.heads && rows.extents[2] == cached.head_dim;
  };
  if (!fits(new_keys) || !fits(new_values) || extent(queries, 2) != cached.head_dim ||
      (cached.heads > 0 ? queries.extent(1) % cached.heads != 0 || queries.extent(1) == 0
                        : queries.extent(1) != 0)) {
    throw Error(fmt::format(
        "attention: queries ({}, {}, {}), new keys ({}, {}, {}) and new values ({}, {}, {}); "
        "expected (token, multiple of {}, {}) and ({} rows or more, {}, {})",
        queries.extent(0), queries.extent(1), queries.extent(2), new_keys.extents[0],
        new_keys.extents[1], new_keys.extents[2], new_values.extents[0], new_values.extents[1],
        new_values.extents[2], cached.heads, cached.head_dim, least_rows, cached.heads,
        cached.head_dim));
  }
  for (int i = 0; i < 3; ++i) {
    if (new_keys.extents[i] > 1 && new_keys.strides[i] != new_values.strides[i]) {
      throw Error(fmt::format(
          "attention: stride {} of the new values is {}; expected {} as in the new keys", i,
          new_values.strides[i], new_keys.strides[i]));
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
/// span's, or if it reads some of its pages and the path reads all.
void check_span(const AttentionSpan& span, std::size_t index, const AttentionSpan& first,
                const Attention::QueryView& queries, const ConstArrayView& new_keys,
                bool reads_some_pages) {
  const auto& layer = span.cached;
  if (layer.format != first.cached.format) {
    throw Error(
        fmt::format("attention: the pages of span {} have another format than the first's", index));
  }
  if (layer.dtype != new_keys.dtype) {
    throw Error(fmt::format("attention: the rows of span {} are {}; expected {}", index,
                            name_of(layer.dtype), name_of(new_keys.dtype)));
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
      span.first_new + span.new_rows > new_keys.extents[0]) {
    throw Error(
        fmt::format("attention: span {} has {} new rows from row {} on; expected none or at least "
                    "as many as its {} query tokens, and rows below {}",
                    index, span.new_rows, span.first_new, span.queries, new_keys.extents[0]));
  }
  if (span.window < 0 || (span.window > 0 && (layer.tokens > 0 || span.queries == 1))) {
    throw Error(fmt::format(
        "attention: span {} has a window of {} with {} cached tokens and {} query tokens; "
        "expected a window only without cached tokens and with several queries",
        index, span.window, layer.tokens, span.queries));
  }
  if (layer.has_bounds && !span.read_pages.all() && !reads_some_pages) {
    throw Error(
        fmt::format("attention: span {} reads some of its pages; expected all, because this path "
                    "has no form of the choice",
                    index));
  }
}

bool is_for_singles(AttentionPath path) {
  return path == AttentionPath::rows || path == AttentionPath::split_kv;
}

Implementations implementations(AttentionPath path) {
  const bool device = base::machine().on_device();
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

Attention::Attention(DType dtype)
    : m_dtype(dtype), m_kernels(std::make_unique<attention::Kernels>()) {}
Attention::~Attention() = default;

// Checks a call of at least one span.
attention::AttentionCall Attention::checked_call(const std::vector<Span>& spans,
                                                 const QueryView& queries,
                                                 const ConstArrayView& new_keys,
                                                 const ConstArrayView& new_values,
                                                 const OutputView& output,
                                                 const AttentionOptions& options) const {
  const Layer& any = spans.front().cached;
  if (new_keys.dtype != m_dtype || new_values.dtype != m_dtype) {
    throw Error(fmt::format("attention: new keys are {} and new values {}; expected {}",
                            name_of(new_keys.dtype), name_of(new_values.dtype), name_of(m_dtype)));
  }
  check_views(any, queries, new_keys, new_values, output, options.lse);
  const Implementations which = implementations(options.path);
  for (std::size_t s = 0; s < spans.size(); ++s) {
    check_span(spans[s], s, spans.front(), queries, new_keys, which.host || which.split);
    if (is_for_singles(options.path) && spans[s].queries > 1) {
      throw Error(fmt::format("attention: this path takes one query token per span, not {}",
                              spans[s].queries));
    }
  }
  const int group = any.heads > 0 ? static_cast<int>(queries.extent(1)) / any.heads : 1;
  return {options, queries, new_keys, new_values, output, any.heads, group, any.head_dim};
}

void Attention::operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                           const QueryView& queries, const ConstArrayView& new_keys,
                           const ConstArrayView& new_values, const OutputView& output,
                           const AttentionOptions& options) {
  if (spans.empty()) return;
  const attention::AttentionCall call =
      checked_call(spans, queries, new_keys, new_values, output, options);
  if (queries.extent(0) == 0 || call.kv_heads == 0) return;
  const Implementations which = implementations(options.path);
  if constexpr (base::runs_on_host) {
    if (which.host) {
      m_kernels->host(exec, m_kernels->choice(exec, spans, call), call, which.by_tiles);
      return m_kernels->choice.release();
    }
  }
  if (which.split) {
    m_kernels->split(exec, m_kernels->device_choice(exec, spans, call), call);
    m_kernels->device_choice.release();
  }
  for (const AttentionSpan& span : spans) {
    if (span.queries == 0 || (which.split && span.queries == 1)) continue;
    if (which.panels) {
      const bool by_tensor_cores =
          options.path != AttentionPath::panels && base::cuda::has_tensor_cores();
      if (by_tensor_cores &&
          attention::tensor_cores::attend_span(exec, span, call, m_kernels->of_tiles)) {
        continue;
      }
      m_kernels->panels(exec, span, call);
    } else {
      attention::attend_portable(exec, span, call);
    }
  }
}

void Attention::operator()(const ExecutionSpace& exec, const Layer& cached,
                           const QueryView& queries, const ConstArrayView& new_keys,
                           const ConstArrayView& new_values, const OutputView& output,
                           const AttentionOptions& options) {
  check_views(cached, queries, new_keys, new_values, output, options.lse, extent(queries, 0));
  const Emptied emptied(m_spans);
  m_spans.push_back({cached, 0, extent(queries, 0), 0, new_keys.extents[0], 0});
  (*this)(exec, m_spans, queries, new_keys, new_values, output, options);
}

void Attention::decode(const ExecutionSpace& exec, const std::vector<Layer>& cached,
                       const QueryView& queries, const ConstArrayView& new_keys,
                       const ConstArrayView& new_values, const OutputView& output,
                       const AttentionOptions& options) {
  const auto n = static_cast<std::int64_t>(cached.size());
  if (extent(queries, 0) != n || new_keys.extents[0] != n || new_values.extents[0] != n) {
    throw Error(fmt::format(
        "attention: {} query rows, {} new keys and {} new values; expected one of each for each of "
        "{} sequences",
        queries.extent(0), new_keys.extents[0], new_values.extents[0], n));
  }
  const Emptied emptied(m_spans);
  for (const Layer& layer : cached) {
    const auto row = static_cast<std::int64_t>(m_spans.size());
    m_spans.push_back({layer, row, 1, row, 1, 0});
  }
  (*this)(exec, m_spans, queries, new_keys, new_values, output, options);
}

void Attention::plan_calls(std::size_t calls) {
  m_kernels->device_choice.plan_calls(calls);
  m_kernels->split.plan_calls(calls);
}

void Attention::plan(std::size_t number, const std::vector<Span>& spans, const QueryView& queries,
                     const ConstArrayView& new_keys, const ConstArrayView& new_values,
                     const OutputView& output, const AttentionOptions& options) {
  if (spans.empty()) return;
  const attention::AttentionCall call =
      checked_call(spans, queries, new_keys, new_values, output, options);
  if (queries.extent(0) == 0 || call.kv_heads == 0) return;
  m_kernels->split.plan(number, m_kernels->device_choice.plan(number, spans, call), call);
  m_kernels->device_choice.release();
}

void Attention::copy_plans(const ExecutionSpace& exec) {
  m_kernels->device_choice.copy_plans(exec);
  m_kernels->split.copy_plans(exec);
}

void Attention::run_planned(const ExecutionSpace& exec, std::size_t number) {
  m_kernels->device_choice.run_planned(exec, number);
  m_kernels->split.run_planned(exec, number);
}

void Attention::add_planned_shape(std::vector<std::int64_t>& shape) const {
  m_kernels->device_choice.add_shape(shape);
  m_kernels->split.add_shape(shape);
}

bool Attention::can_plan(const AttentionExtents& extents, AttentionPath path) {
  return implementations(path).split && attention::SplitKV::can_plan(extents);
}

void Attention::reserve(const AttentionExtents& extents, AttentionPath path) {
  m_spans.reserve(extents.spans);
  const Implementations which = implementations(path);
  if constexpr (base::runs_on_host) {
    if (which.host) {
      m_kernels->choice.reserve(extents);
      return m_kernels->host.reserve(m_dtype, extents, which.by_tiles);
    }
  }
  if (which.split) {
    m_kernels->device_choice.reserve(extents);
    m_kernels->split.reserve(extents);
  }
  if (which.panels) {
    m_kernels->panels.reserve(m_dtype, extents);
    base::reserve_scratch(
        m_kernels->of_tiles,
        static_cast<std::int64_t>(attention::tensor_cores::span_scratch_floats(m_dtype, extents)),
        "kvzap::attention::tile_partials");
  }
}

std::size_t Attention::scratch_bytes(DType dtype, const AttentionExtents& extents,
                                     AttentionPath path) {
  const std::size_t spans = extents.spans * sizeof(Span);
  const Implementations which = implementations(path);
  if constexpr (base::runs_on_host) {
    if (which.host) {
      return spans + attention::PageChoice::scratch_bytes(extents) +
             attention::HostAttention::scratch_bytes(dtype, extents, which.by_tiles);
    }
  }
  return spans +
         (which.split ? attention::DevicePageChoice::scratch_bytes(extents) +
                            attention::SplitKV::scratch_bytes(extents)
                      : 0) +
         (which.panels
              ? attention::PanelAttention::scratch_bytes(dtype, extents) +
                    sizeof(float) * attention::tensor_cores::span_scratch_floats(dtype, extents)
              : 0);
}

}  // namespace kvzap
