// Products of 8-bit floats (e4m3) on a device: rows of x are rounded to such floats, too.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

#include "base/kokkos_compat.hpp"
#include "linalg/quantised/matrix.hpp"

namespace kvzap::linalg {

/// Inputs that share a scale in blocks.
inline constexpr int float8_block = 128;
/// The largest value of e4m3.
inline constexpr float float8_most = 448;

/// Returns the nearest e4m3, of two the even one; +-448 beyond that, and its NaN for NaN.
KOKKOS_INLINE_FUNCTION std::uint8_t e4m3_code(float value) {
  const std::uint32_t bits = base::float_bits(value);
  const std::uint32_t sign = bits >> 24 & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t code = 0;
  if (magnitude > 0x7f800000u) {
    code = 0x7fu;
  } else if (magnitude >= base::float_bits(float8_most)) {
    code = 0x7eu;
  } else if (magnitude < base::float_bits(0x1p-6f)) {
    // A subnormal: the addition rounds to a multiple of 2^-9.
    code = base::float_bits(base::bits_float(magnitude) + 0x1p14f) - base::float_bits(0x1p14f);
  } else {
    code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<std::uint8_t>(sign | code);
}

/// Returns the value of a code of e4m3, NaN included.
KOKKOS_INLINE_FUNCTION float e4m3_or_nan(std::uint8_t code) {
  if ((code & 0x7fu) == 0x7fu) return base::bits_float(0x7fc00000u);
  return quantised::e4m3_value(static_cast<std::int8_t>(code));
}

/// What has a scale of its own.
enum class Float8Scales {
  none,    // this machine multiplies no 8-bit floats
  blocks,  // 128 inputs of a row: compute capability 9.0
  rows     // all inputs of a row: 8.9 and newer
};

/// Room for rows of e4m3, `inputs` each without gaps, whole blocks. Inputs block * l ... of row i
/// are multiplied by scales[l * rows + i]: cuBLASLt reads scales in this order.
struct Float8Rows {
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
  std::int64_t rows = 0, inputs = 0;
  std::int64_t block = float8_block;  // or inputs

  static std::int64_t padded(std::int64_t rows) { return (rows + 15) / 16 * 16; }
  std::int64_t n_scales() const { return inputs / block * rows; }
};

/// c (m, n) = a b^T, a (m, k) and b (n, k). With a scale for each row c is the product of the codes
/// alone: its factors come after the sums. The numbers of rows are multiples of 16. Pointers, and
/// the distance between rows of c, are multiples of 16 bytes.
struct Float8Product {
  Float8Rows a, b;
  float* c = nullptr;
  std::int64_t c_stride = 0;

  bool has_blocks() const { return a.block < a.inputs; }
};

/// Bytes of weights that are copied at once. Most matrices fit: parts of outputs would leave
/// multiprocessors idle. Tests lower it.
inline std::int64_t float8_copied_bytes = std::int64_t{64} << 20;

/// Whether the environment has KVZAP_FP8=on. Throws Error for any value other than on and off.
bool wants_float8();
/// How products of many rows with weights of e4m3 round x to e4m3, too, with KVZAP_FP8=on: in
/// blocks on CUDA devices of compute capability 9.0, whose library has scales for them; by rows on
/// other devices from 8.9 on, if each output has one scale. The kernels of devices on hosts round
/// such weights' x by rows and others' in blocks, for tests.
Float8Scales float8_scales(const ExecutionSpace& exec, const quantised::Matrix& weights);

/// Whether multiply() takes this product: cuBLASLt may lack an algorithm for it.
bool has_float8_product(const ExecutionSpace& exec, const Float8Product& product);
/// Computes the product on `exec` without waiting. Elsewhere than on CUDA a plain kernel does.
void multiply(const ExecutionSpace& exec, const Float8Product& product);

/// Rounds x (m, target.inputs), and makes further rows zero. The largest of the inputs that share a
/// scale becomes 448. A NaN or an infinity makes its row of products NaN.
void round_to_float8(const ExecutionSpace& exec,
                     const Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>& x,
                     const Float8Rows& target);

/// Copies the outputs from `begin` on, codes of e4m3, as rows; further rows become zero. Inputs are
/// those of panels.
void copy_float8(const ExecutionSpace& exec, const quantised::Matrix& weights, std::int64_t begin,
                 const Float8Rows& target);

}  // namespace kvzap::linalg
