#include <fmt/format.h>

#include <kvzap/core/attention_mass.hpp>

#include "attention/device/panel_mass.hpp"
#include "attention/host/host_mass.hpp"
#include "attention/mass_call.hpp"
#include "base/machine.hpp"

namespace kvzap {

/// The kernels of an AttentionMass, with their scratch space.
struct attention::MassKernels {
  HostMass host;
  PanelMass panels;
};

namespace {

/// Throws Error if the extents do not fit each other.
void check(const AttentionSpan& span, DType dtype, const attention::MassCall& call) {
  const auto extent = [](const auto& view, int i) {
    return static_cast<std::int64_t>(view.extent(i));
  };
  const auto& layer = span.cached;
  if (layer.dtype != dtype || call.new_keys.dtype != dtype) {
    throw Error(fmt::format("attention mass: cached rows of {} and new keys of {}; expected {}",
                            name_of(layer.dtype), name_of(call.new_keys.dtype), name_of(dtype)));
  }
  const std::int64_t tokens = extent(call.queries, 0);
  const std::int64_t heads = extent(call.queries, 1);
  if (heads == 0 || heads % layer.heads != 0 || extent(call.queries, 2) != layer.head_dim ||
      call.new_keys.extents[1] != layer.heads || call.new_keys.extents[2] != layer.head_dim) {
    throw Error(fmt::format(
        "attention mass: queries ({}, {}, {}) and new keys ({}, {}, {}); expected (token, multiple "
        "of {}, {}) and (row, {}, {})",
        tokens, heads, call.queries.extent(2), call.new_keys.extents[0], call.new_keys.extents[1],
        call.new_keys.extents[2], layer.heads, layer.head_dim, layer.heads, layer.head_dim));
  }
  if (span.first_query < 0 || span.queries < 0 || span.first_query + span.queries > tokens ||
      span.first_new < 0 || span.new_rows < span.queries ||
      span.first_new + span.new_rows > call.new_keys.extents[0]) {
    throw Error(
        fmt::format("attention mass: a span of {} query tokens from row {} on and {} new "
                    "rows from row {} on; expected no more query tokens than new rows, "
                    "and both within {} and {}",
                    span.queries, span.first_query, span.new_rows, span.first_new, tokens,
                    call.new_keys.extents[0]));
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

AttentionMass::AttentionMass(DType dtype)
    : m_dtype(dtype), m_kernels(std::make_unique<attention::MassKernels>()) {}
AttentionMass::~AttentionMass() = default;

void AttentionMass::operator()(const ExecutionSpace& exec, const Span& span,
                               const QueryView& queries, const ConstArrayView& new_keys,
                               const LogSumExpView& lse, const MassView& mass,
                               const MassOptions& options) {
  const int heads = span.cached.heads;
  if (heads == 0) return;
  const attention::MassCall call{options,
                                 queries,
                                 new_keys,
                                 lse,
                                 mass,
                                 heads,
                                 static_cast<int>(queries.extent(1)) / heads,
                                 span.cached.head_dim};
  check(span, m_dtype, call);
  if (span.queries == 0) return;
  if constexpr (base::runs_on_host) {
    if (base::machine().on_host()) return m_kernels->host(exec, span, call);
  }
  m_kernels->panels(exec, span, call);
}

}  // namespace kvzap
