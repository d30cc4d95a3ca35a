// Linear maps of quantised weights.
#include <algorithm>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/value_types.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/product_kinds.hpp"
#include "linalg/quantised/kernels.hpp"
#include "linalg/quantised/products.hpp"

namespace kvzap::linalg {
namespace {

// Unpacked weights of one panel. oneDNN reads them block by block, so a larger panel reads x fewer
// times.
constexpr std::int64_t unpacked_bytes = std::int64_t{8} << 20;

/// Returns x (m, inputs) in the order of panels, with zeros beside its columns. Hosts only.
ConstMatrix spread_inputs(const ConstMatrix& x, const quantised::Matrix& weights, Vector& scratch) {
  if (weights.is_in_order()) return x;
  const std::int64_t padded = weights.padded_inputs();
  const std::int64_t rows = x.extent(0);
  base::reserve_scratch(scratch, rows * padded, "kvzap::linear::spread");
  const Matrix spread(scratch.data(), rows, padded);
  base::host_for("kvzap::linear::spread", rows, padded,
                 [&](std::int64_t m) { quantised::spread_row(&x(m, 0), weights, &spread(m, 0)); });
  return spread;
}

/// Unpacks the panels begin … end - 1 of a section, 4 to a block, as packed weights.
template <class Panel>
void unpack_blocks(const quantised::Section& section, std::int64_t begin, std::int64_t end,
                   Panel* target) {
  constexpr std::int64_t block = LinearWeights<Panel>::block_outputs;
  constexpr std::int64_t panels_of_block = block / quantised::panel_outputs;
  constexpr std::int64_t lane = std::is_same_v<Panel, bfloat16> ? 2 : 1;
  const std::int64_t inputs = section.panels.inputs;
  const std::int64_t blocks = (end - begin + panels_of_block - 1) / panels_of_block;
  base::host_for("kvzap::linear::unpack", blocks, block * inputs, [=, &section](std::int64_t i) {
    Panel* const own = target + i * block * inputs;
    const std::int64_t first = begin + i * panels_of_block;
    if (first + panels_of_block > end) std::fill_n(own, block * inputs, Panel(0.0f));
    for (std::int64_t p = first; p < std::min(end, first + panels_of_block); ++p) {
      quantised::unpack(section.panels, p, own + (p - first) * quantised::panel_outputs * lane);
    }
  });
}

ConstVector part_of(const ConstVector& bias, std::int64_t begin, std::int64_t end) {
  if (bias.extent(0) == 0) return bias;
  return Kokkos::subview(bias, std::make_pair(begin, end));
}

}  // namespace

/// Many rows on a host with kernels for packed weights. Panel: bfloat16 or float.
template <class Panel>
void LinearMap::by_unpacked(const ExecutionSpace& exec, const ConstMatrix& x,
                            const quantised::Matrix& weights, const ConstVector& bias,
                            Kokkos::View<Panel*, MemorySpace>& panel, const Matrix& y) {
  constexpr std::int64_t block = LinearWeights<Panel>::block_outputs;
  const std::int64_t inputs = weights.padded_inputs();
  const ConstMatrix spread = spread_inputs(x, weights, m_spread);
  const std::int64_t at_once =
      std::max<std::int64_t>(
          1, unpacked_bytes / (block * inputs * static_cast<std::int64_t>(sizeof(Panel)))) *
      block;
  base::reserve_scratch(panel, at_once * inputs, "kvzap::linear::unpacked");
  for (const quantised::Section& section : weights.sections()) {
    for (std::int64_t begin = 0; begin < section.outputs; begin += at_once) {
      const std::int64_t end = std::min(section.outputs, begin + at_once);
      unpack_blocks(section, begin / quantised::panel_outputs,
                    (end + quantised::panel_outputs - 1) / quantised::panel_outputs, panel.data());
      const LinearWeights<Panel> unpacked(end - begin, inputs, panel);
      const std::int64_t first = section.first + begin;
      const std::int64_t last = section.first + end;
      (*this)(exec, spread, unpacked, part_of(bias, first, last),
              Kokkos::subview(y, Kokkos::ALL, std::make_pair(first, last)));
    }
  }
}

namespace {

/// Unpacks plain rows of Value, for products that read them.
template <class Value, class Multiply>
void by_unpacked_rows(const ExecutionSpace& exec, const quantised::Matrix& weights,
                      Kokkos::View<Value*, MemorySpace>& scratch, const Multiply& multiply) {
  const std::int64_t inputs = weights.inputs();
  const std::int64_t outputs = weights.outputs();
  const std::int64_t at_once = std::min(
      outputs, std::max<std::int64_t>(
                   16, unpacked_bytes / (inputs * static_cast<std::int64_t>(sizeof(Value)))));
  base::reserve_scratch(scratch, at_once * inputs, "kvzap::linear::unpacked");
  for (std::int64_t begin = 0; begin < outputs; begin += at_once) {
    const std::int64_t end = std::min(outputs, begin + at_once);
    const typename LinearWeights<Value>::Rows rows(scratch.data(), end - begin, inputs);
    quantised::unpack_rows(exec, weights, begin, rows);
    multiply(LinearWeights<Value>(rows), begin, end);
  }
}

}  // namespace

template <class Value>
void LinearMap::by_quantised(const ExecutionSpace& exec, const ConstMatrix& x,
                             const quantised::Matrix& weights, const ConstVector& bias,
                             const Matrix& y) {
  const std::int64_t rows = x.extent(0);
  const bool on_host = base::runs_on_host && !keeps_type();
  const auto multiply = [&](const auto& part, std::int64_t begin, std::int64_t end) {
    (*this)(exec, x, part, part_of(bias, begin, end),
            Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end)));
  };
  if (!on_host) {
    // For a few rows of x, unpacking would cost more than the product.
    constexpr std::int64_t few_rows = 4;
    if (rows <= few_rows) {
      quantised::multiply_portably(exec, x, weights, bias, y);
    } else if constexpr (std::is_same_v<Value, float>) {
      by_unpacked_rows(exec, weights, m_unpacked, multiply);
    } else if constexpr (std::is_same_v<Value, half>) {
      by_unpacked_rows(exec, weights, m_unpacked_half, multiply);
    } else {
      by_unpacked_rows(exec, weights, m_unpacked_bf16, multiply);
    }
    return;
  }
  base::fence(exec, "kvzap::linear: host kernels read what the instance wrote");
  if (quantised::prefers_blocks(rows, weights)) {
    return quantised::multiply_blocks(x, weights, bias, m_bytes, y);
  }
  if (!has_packed_products()) return by_unpacked_rows(exec, weights, m_unpacked, multiply);
  if (has_bf16_products() && onednn::has_fast_products<bfloat16>(true)) {
    return by_unpacked(exec, x, weights, bias, m_unpacked_bf16, y);
  }
  by_unpacked(exec, x, weights, bias, m_unpacked, y);
}

#define KVZAP_QUANTISED_MAP(Value)                                                           \
  template void LinearMap::by_quantised<Value>(const ExecutionSpace&, const ConstMatrix&,    \
                                               const quantised::Matrix&, const ConstVector&, \
                                               const Matrix&);
KVZAP_FOR_EACH_VALUE(KVZAP_QUANTISED_MAP)
#undef KVZAP_QUANTISED_MAP

}  // namespace kvzap::linalg
