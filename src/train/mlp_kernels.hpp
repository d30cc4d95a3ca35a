// Kernels of a training step on any backend. Matrices are row-major.
#pragma once

#include <cstdint>
#include <kvzap/core/array_view.hpp>

#include "linalg/gemm.hpp"
#include "train/host_loops.hpp"

namespace kvzap::train {

using Order = Kokkos::View<const std::int64_t*, MemorySpace>;
using Doubles = Kokkos::View<double*, MemorySpace>;

/// Sets row i of target (rows, columns) to row order(begin + i) of source, a matrix of consecutive
/// rows, converted to float.
void gather_rows(const ExecutionSpace& exec, const ConstArrayView& source, const Order& order,
                 std::int64_t begin, const linalg::Matrix& target);

/// With x = values + bias of the column, sets activation = gelu(x), exact as torch.nn.GELU(), and
/// values = gelu'(x).
void gelu_with_slope(const ExecutionSpace& exec, const linalg::Matrix& values,
                     const linalg::ConstVector& bias, const linalg::Matrix& activation);

/// Sets output (rows, heads) = (output + bias - scores of row order(i)) * factor, for bias (heads)
/// and scores (all, heads). Sets row_loss (rows) to the row's sum of squared differences.
void residual(const ExecutionSpace& exec, const linalg::Matrix& output,
              const linalg::ConstVector& bias, const linalg::ConstMatrix& scores,
              const Order& order, float factor, const Doubles& row_loss);

/// Computes values *= factors, both (rows, columns), and sums (columns), the products summed over
/// rows.
void times_with_sums(const ExecutionSpace& exec, const linalg::Matrix& values,
                     const linalg::ConstMatrix& factors, const linalg::Vector& sums);

/// Sets sums (columns) to values (rows, columns) summed over rows.
void sum_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& values,
              const linalg::Vector& sums);

/// Adds the bias of its column to each output.
void add_bias_rows(const ExecutionSpace& exec, const linalg::Matrix& output,
                   const linalg::ConstVector& bias);

/// Adds the first `count` of `values` to total(0), in order.
void add_sum(const ExecutionSpace& exec, const Doubles& values, std::int64_t count,
             const Doubles& total);

/// Sets partial(i) to the sum of squares of part i of `values`. Returns the number of parts, which
/// depends only on the length.
std::int64_t square_parts(const ExecutionSpace& exec, const linalg::ConstVector& values,
                          const Doubles& partial);
/// Number of parts of a vector of this length.
std::int64_t parts_of(std::int64_t length);

/// Parameters and AdamW's moments of their gradients.
struct AdamState {
  linalg::Vector parameters, first, second;
};

/// Returns the factor that scales a gradient down to the norm `clip` if it exceeds it, as
/// torch.nn.utils.clip_grad_norm_ does, in squares(0); clip <= 0 disables this. squares: result of
/// square_parts.
void clip_factor(const ExecutionSpace& exec, const Doubles& squares, std::int64_t n_parts,
                 double clip);
/// Takes one step of AdamW with the gradient times factor(0).
void adamw_step(const ExecutionSpace& exec, const AdamState& state,
                const linalg::ConstVector& gradient, const Doubles& factor, const AdamStep& step);

}  // namespace kvzap::train
