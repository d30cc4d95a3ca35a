#include <fmt/format.h>

#include <kvzap/core/attention_mass.hpp>

#include "attention/device/panel_mass.hpp"
#include "attention/host/host_mass.hpp"
#include "attention/mass_call.hpp"
#include "base/device_kernels.hpp"
#include "base/value_types.hpp"

namespace kvzap {

template <class Value>
struct attention::MassScratch {
  attention::HostMass<Value> host;
  attention::PanelMass<Value> panels;
};

template <class Value>
AttentionMass<Value>::AttentionMass()
    : m_scratch(std::make_unique<attention::MassScratch<Value>>()) {}

template <class Value>
AttentionMass<Value>::~AttentionMass() = default;

namespace {

/// Throws Error if the extents do not fit each other.
template <class Value>
void check(const AttentionSpan<Value>& span, const attention::MassCall<Value>& call) {
  const auto extent = [](const auto& view, int i) {
    return static_cast<std::int64_t>(view.extent(i));
  };
  const auto& layer = span.cached;
  const std::int64_t tokens = extent(call.queries, 0);
  const std::int64_t heads = extent(call.queries, 1);
  if (heads == 0 || heads % layer.heads != 0 || extent(call.queries, 2) != layer.head_dim ||
      extent(call.new_keys, 1) != layer.heads || extent(call.new_keys, 2) != layer.head_dim) {
    throw Error(fmt::format(
        "attention mass: queries ({}, {}, {}) and new keys ({}, {}, {}); expected (token, multiple "
        "of {}, {}) and (row, {}, {})",
        tokens, heads, call.queries.extent(2), call.new_keys.extent(0), call.new_keys.extent(1),
        call.new_keys.extent(2), layer.heads, layer.head_dim, layer.heads, layer.head_dim));
  }
  if (span.first_query < 0 || span.queries < 0 || span.first_query + span.queries > tokens ||
      span.first_new < 0 || span.new_rows < span.queries ||
      span.first_new + span.new_rows > extent(call.new_keys, 0)) {
    throw Error(
        fmt::format("attention mass: a span of {} query tokens from row {} on and {} new "
                    "rows from row {} on; expected no more query tokens than new rows, "
                    "and both within {} and {}",
                    span.queries, span.first_query, span.new_rows, span.first_new, tokens,
                    call.new_keys.extent(0)));
  }
  if (extent(call.lse, 0) != tokens || extent(call.lse, 1) != heads) {
    throw Error(fmt::format(
        "attention mass: log-sum-exp ({}, {}); expected ({}, {}) as the queries have it",
        call.lse.extent(0), call.lse.extent(1), tokens, heads));
  }
  std::int64_t longest = 0;
  for (int h = 0; h < layer.heads; ++h) longest = std::max(longest, layer.bounds(h));
  longest += layer.ring_rows() + span.new_rows;
  if (extent(call.mass, 0) != layer.heads || extent(call.mass, 1) < longest) {
    throw Error(fmt::format("attention mass: a mass of ({}, {}); expected ({}, {} or more)",
                            call.mass.extent(0), call.mass.extent(1), layer.heads, longest));
  }
  const auto& factors = call.factors;
  if (factors.rows.extent(0) > 0 &&
      (extent(factors.rows, 0) != heads || extent(factors.rows, 1) < longest)) {
    throw Error(fmt::format("attention mass: factors of rows ({}, {}); expected ({}, {} or more)",
                            factors.rows.extent(0), factors.rows.extent(1), heads, longest));
  }
  if (factors.queries.extent(0) > 0 && extent(factors.queries, 0) != tokens) {
    throw Error(fmt::format("attention mass: {} factors of queries; expected {}",
                            factors.queries.extent(0), tokens));
  }
}

}  // namespace

template <class Value>
void AttentionMass<Value>::operator()(const ExecutionSpace& exec, const Span& span,
                                      const QueryView& queries, const RowsView& new_keys,
                                      const LogSumExpView& lse, MassReduction reduction,
                                      const MassView& mass, const MassFactors& factors,
                                      float soft_cap) {
  const int heads = span.cached.heads;
  if (heads == 0) return;
  const attention::MassCall<Value> call{queries,
                                        new_keys,
                                        lse,
                                        mass,
                                        factors,
                                        reduction,
                                        heads,
                                        static_cast<int>(queries.extent(1)) / heads,
                                        span.cached.head_dim,
                                        soft_cap};
  check(span, call);
  if (span.queries == 0) return;
  if constexpr (base::runs_on_host) {
    if (!base::uses_device_kernels()) return m_scratch->host(exec, span, call);
  }
  m_scratch->panels(exec, span, call);
}

#define KVZAP_INSTANTIATE(Value) template class AttentionMass<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
