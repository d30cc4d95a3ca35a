// The recurrence of a gated delta net on the host, compiled for several instruction sets as
// row_kernels.hpp is.
#pragma once

#include <cstdint>

namespace kvzap::linalg {

/// The tokens that one value head takes up. Rows of different tokens lie `stride` floats apart.
struct DeltaRows {
  const float* queries = nullptr;  // (token, key_dim), divided by sqrt(key_dim)
  const float* keys = nullptr;     // (token, key_dim)
  const float* values = nullptr;   // (token, value_dim)
  std::int64_t stride = 0;
  // (token), `rate_stride` floats apart. Null: the state adds k v^T, whatever it has of k.
  const float* strengths = nullptr;
  // (token, row of the state): rows lie `decay_step` floats apart, 1 or 0 (one decay of all rows).
  const float* decays = nullptr;
  std::int64_t rate_stride = 0;
  int decay_step = 0;
  float* outputs = nullptr;  // (token, value_dim)
  std::int64_t output_stride = 0;
  std::int64_t tokens = 0;
  int key_dim = 0, value_dim = 0;
};

/// Columns of a state that delta_rule takes at once: with 128 rows, half of an L1 cache of 32 KiB.
constexpr int delta_columns = 32;

/// Updates the columns first … first + count - 1 of a value head's state (key_dim, value_dim) with
/// each token in turn, from `before` to `after`, which may be the same, and writes these columns of
/// the outputs (DeltaNetConfig has the formula). count <= delta_columns. `room`: key_dim *
/// (delta_columns + 1) floats.
void delta_rule(const float* before, float* after, const DeltaRows& rows, int first, int count,
                float* room);

}  // namespace kvzap::linalg
