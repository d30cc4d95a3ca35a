// Gates of attention's output.
#pragma once

#include <cstdint>

#include "linalg/gemm.hpp"

namespace kvzap::engine {

/// Which gate a column of the output has, and what it multiplies by.
struct GateRule {
  /// Column c has gate (skip + c) / dim.
  std::int64_t dim = 1;
  std::int64_t skip = 0;
  /// The softplus of the gate counts, not its sigmoid.
  bool is_softplus = false;
};

/// Multiplies y (row, column) by the sigmoid or softplus of gates (row, gate).
void apply_gates(const ExecutionSpace& exec, const linalg::ConstMatrix& gates, const GateRule& rule,
                 const linalg::Matrix& y);

}  // namespace kvzap::engine
