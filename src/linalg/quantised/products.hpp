// y = x W^T + bias for quantised weights.
#pragma once

#include <kvzap/core/array_view.hpp>
#include <limits>
#include <string>

#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg::quantised {

/// Views as in gemm.hpp.
using Floats = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
using ConstFloats = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
using ConstFloatVector = Kokkos::View<const float*, MemorySpace>;

/// Stands for any number of rows.
inline constexpr std::int64_t any_rows = std::numeric_limits<std::int64_t>::max();
/// Returns up to how many rows of x this machine multiplies weights of integers by bytes, and does
/// not unpack them: 32, or any_rows.
std::int64_t most_rows_by_blocks();
/// Returns the kind of byte products and the rows that take them, such as "AVX2, up to 32 rows".
std::string byte_products_text();
/// Returns whether multiply_blocks is preferred to unpacking the weights for this many rows of x.
bool prefers_blocks(std::int64_t rows, const Matrix& weights);

/// target (padded_inputs) = a row of x in the order of panels, 0 beside its columns. Hosts only.
void spread_row(const float* x, const Matrix& weights, float* target);

/// Rows of x (m, inputs), rounded to bytes unless weights are floats of 8 bits. `buffer` keeps some
/// of them. A row of y depends on its row of x alone. Hosts only.
void multiply_blocks(const ConstFloats& x, const Matrix& weights, const ConstFloatVector& bias,
                     Kokkos::View<std::uint8_t*, MemorySpace>& buffer, const Floats& y);

/// The same with x in floats, by plain kernels that any device runs. Does not wait.
void multiply_portably(const ExecutionSpace& exec, const ConstFloats& x, const Matrix& weights,
                       const ConstFloatVector& bias, const Floats& y);

/// Writes the outputs from `begin` on as plain rows (outputs, inputs) without gaps. Does not wait.
void unpack_rows(const ExecutionSpace& exec, const Matrix& weights, std::int64_t begin,
                 const ArrayView& rows);

/// y(i) = row ids(i) - first of the weights, or zeros if there is none. Does not wait.
void look_up(const ExecutionSpace& exec, const Matrix& weights,
             const Kokkos::View<const TokenId*, MemorySpace>& ids, std::int64_t first,
             const Floats& y);

/// y(i, output) = W(output, first + i). Does not wait.
void take_inputs(const ExecutionSpace& exec, const Matrix& weights, std::int64_t first,
                 const Floats& y);

}  // namespace kvzap::linalg::quantised
