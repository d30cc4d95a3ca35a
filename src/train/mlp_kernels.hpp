// Kernels of a training step on any backend. Matrices are row-major.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "linalg/gemm.hpp"
#include "train/host_loops.hpp"

namespace kvzap::detail {

using Order = Kokkos::View<const std::int64_t*, MemorySpace>;
template <class Value>
using StoredRows = Kokkos::View<const Value**, Kokkos::LayoutRight, MemorySpace>;
using Doubles = Kokkos::View<double*, MemorySpace>;

/// target (rows, columns), row i = source row order(begin + i), widened.
template <class Value>
void gather_rows(const ExecutionSpace& exec, const StoredRows<Value>& source, const Order& order,
                 std::int64_t begin, const Matrix& target);

/// x = values + bias of the column: activation = gelu(x), exact as torch.nn.GELU(), and
/// values = gelu'(x).
void gelu_with_slope(const ExecutionSpace& exec, const Matrix& values, const ConstVector& bias,
                     const Matrix& activation);

/// output (rows, heads), bias (heads), scores (all, heads): output = (output + bias - scores of row
/// order(begin + i)) * factor; row_loss (rows) = the row's sum of squared differences.
void residual(const ExecutionSpace& exec, const Matrix& output, const ConstVector& bias,
              const ConstMatrix& scores, const Order& order, std::int64_t begin, float factor,
              const Doubles& row_loss);

/// values *= factors, both (rows, columns); sums (columns) = the products' sums over rows.
void times_with_sums(const ExecutionSpace& exec, const Matrix& values, const ConstMatrix& factors,
                     const Vector& sums);

/// sums (columns) of values (rows, columns), over rows.
void sum_rows(const ExecutionSpace& exec, const ConstMatrix& values, const Vector& sums);

/// output = output + bias of the column.
void add_bias_rows(const ExecutionSpace& exec, const Matrix& output, const ConstVector& bias);

/// total(0) += sum of the first `count` of `values`, in their order.
void add_sum(const ExecutionSpace& exec, const Doubles& values, std::int64_t count,
             const Doubles& total);

/// partial(i) = sum of squares of part i of `values`; returns the number of parts, which depends
/// only on the length.
std::int64_t square_parts(const ExecutionSpace& exec, const ConstVector& values,
                          const Doubles& partial);
/// Number of parts of a vector of this length.
std::int64_t parts_of(std::int64_t length);

/// One step of AdamW. Scales the gradient down to the norm `clip` if it is larger, as
/// torch.nn.utils.clip_grad_norm_ does; clip <= 0: never. squares: result of square_parts.
void adamw_step(const ExecutionSpace& exec, const Vector& parameters, const ConstVector& gradient,
                const Vector& first, const Vector& second, const Doubles& squares,
                std::int64_t n_parts, double clip, const AdamStep& step);

}  // namespace kvzap::detail
