// Products of rows of f32 with panels of 8-bit floats, and their values. Such codes have no common
// step, so neither x nor the products become integers.
#include <cstring>

#include "base/simd.hpp"
#include "linalg/quantised/kernels.hpp"

// Within a group, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg::quantised {
namespace {

/// values[output] = the code of one input, as e4m3_value.
KVZAP_BODY void widen_codes(const std::uint8_t* codes, float (&values)[panel_outputs]) {
  std::int8_t bytes[panel_outputs];
  std::memcpy(bytes, codes, sizeof(bytes));
#pragma omp simd
  for (int o = 0; o < panel_outputs; ++o) values[o] = e4m3_value(bytes[o]);
}

template <int Rows>
KVZAP_BODY void add_rows(const Chunk& chunk, const ByteRows& x, float* sums) {
  for (std::int64_t g = 0; g < chunk.count; ++g) {
    const std::uint8_t* const codes = chunk.codes + g * code_bytes(CodeKind::float8);
    const float* const own = x.floats + (chunk.first + g) * group_inputs;
    const float* const scale = chunk.coefficients + g * panel_outputs;
    float partial[Rows][panel_outputs] = {};
    for (int i = 0; i < group_inputs; ++i) {
      if (i % 4 == 0) __builtin_prefetch(codes + i * panel_outputs + prefetch_bytes, 0, 2);
      float values[panel_outputs];
      widen_codes(codes + i * panel_outputs, values);
      for (int m = 0; m < Rows; ++m) {
        const float by = own[m * x.inputs + i];
#pragma omp simd
        for (int o = 0; o < panel_outputs; ++o) partial[m][o] += by * values[o];
      }
    }
    for (int m = 0; m < Rows; ++m) {
#pragma omp simd
      for (int o = 0; o < panel_outputs; ++o)
        sums[m * panel_outputs + o] += scale[o] * partial[m][o];
    }
  }
}

KVZAP_BODY void add_chunk_float8_body(const Chunk& chunk, const ByteRows& x, int n_rows,
                                      float* sums) {
  int m = 0;
  for (; n_rows - m >= 4; m += 4) add_rows<4>(chunk, x.row(m), sums + m * panel_outputs);
  for (; n_rows - m >= 2; m += 2) add_rows<2>(chunk, x.row(m), sums + m * panel_outputs);
  if (m < n_rows) add_rows<1>(chunk, x.row(m), sums + m * panel_outputs);
}

KVZAP_BODY void unpack_chunk_float8_body(const Chunk& chunk, float* target) {
  for (std::int64_t i = 0; i < chunk.count * group_inputs; ++i) {
    const float* const scale = chunk.coefficients + i / group_inputs * panel_outputs;
    float values[panel_outputs];
    widen_codes(chunk.codes + i * panel_outputs, values);
#pragma omp simd
    for (int o = 0; o < panel_outputs; ++o) target[i * packed_outputs + o] = scale[o] * values[o];
  }
}

}  // namespace

KVZAP_KERNEL(void, add_chunk_float8,
             (const Chunk& chunk, const ByteRows& x, int n_rows, float* sums),
             (chunk, x, n_rows, sums))
KVZAP_KERNEL(void, unpack_chunk_float8, (const Chunk& chunk, float* target), (chunk, target))

}  // namespace kvzap::linalg::quantised

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
