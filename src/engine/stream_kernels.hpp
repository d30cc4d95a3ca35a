// Kernels of parts around the usual ones of a layer: inputs of each layer, several residual
// streams, cut gates. Each has a form for hosts, row by row, and a form for devices.
#pragma once

#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>

#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// Two matrices of the same rows side by side, as `activate` takes gates and factors: gates (row,
/// column), then (projected (row, first + column) + table_scale * table (row, column)) * scale.
struct InputsOfLayer {
  linalg::ConstMatrix gates, projected, table;
  std::int64_t first = 0;
  float table_scale = 1, scale = 1;
};
void join_inputs(const ExecutionSpace& exec, const InputsOfLayer& inputs,
                 const linalg::Matrix& joined);

/// sums (row, 0) = sum over the first `columns` of x (row, column) - means (row, 0), or of its
/// square if `squares`. Without means (an empty view) they are 0.
void sum_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& x, std::int64_t columns,
              const linalg::ConstMatrix& means, bool squares, const linalg::Matrix& sums);

/// x (row, column) = max(0, x - means (row, 0) - cutoff * sqrt(variances (row, 0))), for the first
/// `columns`.
void cut_rows(const ExecutionSpace& exec, const linalg::Matrix& x, std::int64_t columns,
              const linalg::ConstMatrix& means, const linalg::ConstMatrix& variances, float cutoff);

/// x = tanh(x)
void tanh_rows(const ExecutionSpace& exec, const linalg::Matrix& x);

/// Rows of all residual streams, AltUpConfig::most_streams at most: row r of stream s is values[s *
/// stride + r * columns].
struct StreamRows {
  float* values = nullptr;
  std::int64_t stride = 0, streams = 0, rows = 0, columns = 0;

  KOKKOS_INLINE_FUNCTION float* at(std::int64_t stream, std::int64_t row) const {
    return values + stream * stride + row * columns;
  }
};
/// Each stream i adds the sum over j of factors (row, i * streams + j) times stream j; then h = the
/// stream `active`.
void mix_streams(const ExecutionSpace& exec, const StreamRows& streams,
                 const linalg::ConstMatrix& factors, std::int64_t active, const linalg::Matrix& h);

/// Each stream i adds (1 + factors (row, i)) (h - stream `active`); then h = that stream, times
/// scale (column) unless that is empty.
void correct_streams(const ExecutionSpace& exec, const StreamRows& streams,
                     const linalg::ConstMatrix& factors, std::int64_t active,
                     const linalg::ConstVector& scale, const linalg::Matrix& h);

/// x (row) *= sqrt(mean(like^2) / max(mean(x^2), 1e-5)), row by row.
void match_magnitude(const ExecutionSpace& exec, const linalg::ConstMatrix& like,
                     const linalg::Matrix& x);

}  // namespace kvzap::engine
