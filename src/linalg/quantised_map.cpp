// Linear maps of quantised weights.
#include <algorithm>

#include "base/cuda/has_tensor_cores.hpp"
#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/scratch.hpp"
#include "linalg/cuda/quantised_products.hpp"
#include "linalg/device/float8.hpp"
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

/// The same by kernels of a device; x stays where it is if its rows are vectors.
ConstMatrix spread_on_device(const ExecutionSpace& exec, const ConstMatrix& x,
                             const quantised::Matrix& weights, Vector& scratch) {
  if (weights.is_in_order() && tensor_cores::has_vectors(x)) return x;
  const std::int64_t padded = weights.padded_inputs();
  const auto rows = static_cast<std::int64_t>(x.extent(0));
  const auto columns = static_cast<std::int64_t>(x.extent(1));
  base::reserve_scratch(scratch, rows * padded, "kvzap::linear::spread");
  const Matrix spread(scratch.data(), rows, padded);
  const quantised::Places places = weights.places();
  base::launch([=] { Kokkos::deep_copy(exec, spread, 0.0f); });
  base::parallel_for(
      "kvzap::linear::spread",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        spread(i / columns, places(i % columns)) = x(i / columns, i % columns);
      });
  return spread;
}

/// Unpacks the panels begin … end - 1 of a section, 4 to a block, as packed weights.
template <class Panel>
void unpack_blocks(const quantised::Section& section, std::int64_t begin, std::int64_t end,
                   Panel* target) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
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

/// Calls multiply(weights, begin, end) for packed weights of the outputs begin … end - 1, whose
/// inputs are those of panels. Hosts only. Panel: bfloat16 or float.
template <class Panel, class Multiply>
void by_unpacked(const quantised::Matrix& weights, Bytes& scratch, const Multiply& multiply) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
  const std::int64_t inputs = weights.padded_inputs();
  const std::int64_t at_once =
      std::max<std::int64_t>(
          1, unpacked_bytes / (block * inputs * static_cast<std::int64_t>(sizeof(Panel)))) *
      block;
  Panel* const panel =
      base::scratch_of<Panel>(scratch, at_once * inputs, "kvzap::linear::unpacked");
  for (const quantised::Section& section : weights.sections()) {
    for (std::int64_t begin = 0; begin < section.outputs; begin += at_once) {
      const std::int64_t end = std::min(section.outputs, begin + at_once);
      unpack_blocks(section, begin / quantised::panel_outputs,
                    (end + quantised::panel_outputs - 1) / quantised::panel_outputs, panel);
      multiply(LinearWeights(WeightLayout::packed, end - begin, inputs, panel),
               section.first + begin, section.first + end);
    }
  }
}

/// The same for plain rows of any type, whose inputs are the columns of x.
template <class Multiply>
void by_unpacked_rows(const ExecutionSpace& exec, const quantised::Matrix& weights, DType dtype,
                      Bytes& scratch, const Multiply& multiply) {
  const std::int64_t inputs = weights.inputs();
  const std::int64_t outputs = weights.outputs();
  const std::int64_t row_bytes = inputs * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t at_once =
      std::min(outputs, std::max<std::int64_t>(16, unpacked_bytes / row_bytes));
  base::reserve_scratch(scratch, at_once * row_bytes, "kvzap::linear::unpacked");
  for (std::int64_t begin = 0; begin < outputs; begin += at_once) {
    const std::int64_t end = std::min(outputs, begin + at_once);
    quantised::unpack_rows(exec, weights, begin,
                           {scratch.data(), dtype, {end - begin, 1, inputs}, {inputs, inputs, 1}});
    multiply(LinearWeights(WeightLayout::rows, dtype, end - begin, inputs, scratch), begin, end);
  }
}

// y = source + bias, or y += bias if source is empty. A product without scales of blocks is first
// multiplied by those of its rows.
void finish_float8(const ExecutionSpace& exec, const Float8Product& product,
                   const ConstMatrix& source, const ConstVector& bias, const Matrix& y) {
  const bool is_copied = source.extent(0) > 0;
  const bool biased = bias.extent(0) > 0;
  const bool scaled = !product.has_blocks();
  if (!is_copied && !biased && !scaled) return;
  const float* const of_rows = product.a.scales;
  const float* const of_columns = product.b.scales;
  const auto columns = static_cast<std::int64_t>(y.extent(1));
  const auto rows = static_cast<std::int64_t>(y.extent(0));
  base::parallel_for(
      "kvzap::linear::finish",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t m = i / columns, n = i % columns;
        const float factor = scaled ? of_rows[m] * of_columns[n] : 1.0f;
        y(m, n) = (is_copied ? source(m, n) : y(m, n)) * factor + (biased ? bias(n) : 0.0f);
      });
}

}  // namespace

// Both operands in 8-bit floats. Returns false if this machine or the library has no such product.
bool LinearMap::by_float8(const ExecutionSpace& exec, const ConstMatrix& x,
                          const LinearWeights& weights, const ConstVector& bias, const Matrix& y) {
  // Fewer rows are decode steps, which weights bound: their x keeps its accuracy.
  constexpr std::int64_t fewest_rows = 32;
  const quantised::Matrix& matrix = *weights.quantised();
  const auto rows = static_cast<std::int64_t>(x.extent(0));
  if (rows < fewest_rows) return false;
  const Float8Scales scales = float8_scales(exec, matrix);
  if (scales == Float8Scales::none) return false;
  const std::int64_t inputs = matrix.padded_inputs(), outputs = matrix.outputs();
  const std::int64_t at_once =
      std::min(Float8Rows::padded(outputs),
               std::max<std::int64_t>(16, float8_copied_bytes / inputs / 16 * 16));
  Float8Rows a, b;
  a.rows = Float8Rows::padded(rows);
  b.rows = at_once;
  a.inputs = b.inputs = inputs;
  a.block = b.block = scales == Float8Scales::rows ? inputs : float8_block;
  a.codes = base::scratch_of<std::uint8_t>(m_bytes, a.rows * inputs, "kvzap::linear::bytes");
  b.codes = base::scratch_of<std::uint8_t>(m_unpacked, at_once * inputs, "kvzap::linear::unpacked");
  base::reserve_scratch(m_scales, a.n_scales() + b.n_scales(), "kvzap::linear::scales");
  a.scales = m_scales.data();
  b.scales = a.scales + a.n_scales();
  const bool in_place = rows == a.rows && outputs % 16 == 0 && y.stride(0) % 4 == 0 &&
                        reinterpret_cast<std::uintptr_t>(y.data()) % 16 == 0;
  if (!in_place) base::reserve_scratch(m_padded, a.rows * at_once, "kvzap::linear::padded");
  const auto product_of = [&](std::int64_t begin) {
    Float8Product product{a, b, m_padded.data(), at_once};
    product.b.rows = std::min(at_once, Float8Rows::padded(outputs - begin));
    if (in_place) {
      product.c = y.data() + begin;
      product.c_stride = static_cast<std::int64_t>(y.stride(0));
    }
    return product;
  };
  for (std::int64_t begin = 0; begin < outputs; begin += at_once) {
    if (!has_float8_product(exec, product_of(begin))) return false;
  }
  const bool in_order = matrix.is_in_order();
  round_to_float8(exec, in_order ? x : spread_on_device(exec, x, matrix, m_spread), a);
  for (std::int64_t begin = 0; begin < outputs; begin += at_once) {
    const Float8Product product = product_of(begin);
    copy_float8(exec, matrix, begin, product.b);
    multiply(exec, product);
    const std::int64_t end = std::min(outputs, begin + at_once);
    finish_float8(
        exec, product, in_place ? ConstMatrix() : ConstMatrix(m_padded.data(), a.rows, at_once),
        part_of(bias, begin, end), Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end)));
  }
  return true;
}

void LinearMap::by_quantised(const ExecutionSpace& exec, const ConstMatrix& x,
                             const LinearWeights& weights, const ConstVector& bias,
                             const Matrix& y) {
  const quantised::Matrix& matrix = *weights.quantised();
  const std::int64_t rows = x.extent(0);
  ConstMatrix operand = x;
  const auto multiply = [&](const LinearWeights& part, std::int64_t begin, std::int64_t end) {
    (*this)(exec, operand, part, part_of(bias, begin, end),
            Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end)));
  };
  if (!base::runs_on_host || keeps_type()) {
    if (rows <= tensor_cores::most_rows && !matrix.has_floats() && base::cuda::has_tensor_cores() &&
        tensor_cores::multiply_quantised(exec, spread_on_device(exec, x, matrix, m_spread), matrix,
                                         bias, y)) {
      return;
    }
    // For a few rows of x, unpacking would cost more than the product.
    constexpr std::int64_t few_rows = 4;
    if (rows <= few_rows) return quantised::multiply_portably(exec, x, matrix, bias, y);
    if (by_float8(exec, x, weights, bias, y)) return;
    return by_unpacked_rows(exec, matrix, weights.dtype(), m_unpacked, multiply);
  }
  base::fence(exec, "kvzap::linear: host kernels read what the instance wrote");
  if (quantised::prefers_blocks(rows, matrix)) {
    return quantised::multiply_blocks(x, matrix, bias, m_bytes, y);
  }
  if (!has_packed_products()) {
    return by_unpacked_rows(exec, matrix, DType::f32, m_unpacked, multiply);
  }
  operand = spread_inputs(x, matrix, m_spread);
  if (has_bf16_products() && onednn::has_fast_products(DType::bf16, true)) {
    return by_unpacked<bfloat16>(matrix, m_unpacked, multiply);
  }
  by_unpacked<float>(matrix, m_unpacked, multiply);
}

}  // namespace kvzap::linalg
