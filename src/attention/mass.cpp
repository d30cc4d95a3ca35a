#include <fmt/format.h>

#include <kvzap/core/attention_mass.hpp>

#include "attention/device/panel_mass.hpp"
#include "attention/host/host_mass.hpp"
#include "attention/mass_call.hpp"
#include "base/machine.hpp"

namespace kvzap {

/// Computes calls for one type of rows, and holds their scratch space.
class attention::MassImplementation {
 public:
  MassImplementation() = default;
  MassImplementation(const MassImplementation&) = delete;
  MassImplementation& operator=(const MassImplementation&) = delete;
  virtual ~MassImplementation() = default;
  virtual DType dtype() const = 0;
  virtual void run(const ExecutionSpace& exec, const AttentionSpan& span,
                   const BasicMassCall<ConstArrayView>& call) = 0;
};

namespace {

/// Throws Error if the extents do not fit each other.
void check(const AttentionSpan& span, DType dtype,
           const attention::BasicMassCall<ConstArrayView>& call) {
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

template <class Value>
class TypedMass final : public attention::MassImplementation {
 public:
  DType dtype() const override { return DTypeOf<Value>::value; }
  void run(const ExecutionSpace& exec, const AttentionSpan& span,
           const attention::BasicMassCall<ConstArrayView>& call) override {
    if constexpr (base::runs_on_host) {
      if (base::machine().on_host()) return m_host(exec, span, call.as<Value>());
    }
    m_panels(exec, span, call.as<Value>());
  }

 private:
  attention::HostMass<Value> m_host;
  attention::PanelMass<Value> m_panels;
};

}  // namespace

AttentionMass::AttentionMass(DType dtype)
    : m_implementation(
          with_value_type(dtype, [](auto zero) -> std::unique_ptr<attention::MassImplementation> {
            return std::make_unique<TypedMass<decltype(zero)>>();
          })) {}
AttentionMass::~AttentionMass() = default;

void AttentionMass::operator()(const ExecutionSpace& exec, const Span& span,
                               const QueryView& queries, const ConstArrayView& new_keys,
                               const LogSumExpView& lse, const MassView& mass,
                               const MassOptions& options) {
  const int heads = span.cached.heads;
  if (heads == 0) return;
  const attention::BasicMassCall<ConstArrayView> call{queries,
                                                      new_keys,
                                                      lse,
                                                      mass,
                                                      options.factors,
                                                      options.reduction,
                                                      heads,
                                                      static_cast<int>(queries.extent(1)) / heads,
                                                      span.cached.head_dim,
                                                      options.soft_cap};
  check(span, m_implementation->dtype(), call);
  if (span.queries > 0) m_implementation->run(exec, span, call);
}

}  // namespace kvzap
