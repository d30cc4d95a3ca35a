// The only entry to matrix products. It chooses the library or kernel of each product.
#pragma once

#include <kvzap/core/types.hpp>

#include "linalg/linear_weights.hpp"
#include "linalg/product.hpp"
#include "linalg/rounded_rows.hpp"

namespace kvzap::linalg {

using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
using ConstMatrix = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
using Vector = Kokkos::View<float*, MemorySpace>;
using ConstVector = Kokkos::View<const float*, MemorySpace>;

// On hosts with AVX-512 oneDNN, if the build has it, computes products of a million terms or more.
// A BLAS or Kokkos Kernels computes the others.

/// c (m, n) = alpha * a (m, k) * b (n, k)^T + beta * c
void multiply_nt(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);
/// c (m, n) = alpha * a (m, k) * b (k, n) + beta * c
void multiply_nn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);
/// c (m, n) = alpha * a (k, m)^T * b (k, n) + beta * c
void multiply_tn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);

/// c (m, n) = op(a) (m, k) * op(b) (k, n) + beta * c, for products of millions of operations, as in
/// training. On hosts oneDNN computes them if the build has it: its kernels use the widest
/// instructions, also on processors that an older BLAS does not know. Otherwise the functions above
/// compute them.
enum class Op { plain, transposed };
void multiply_large(const ExecutionSpace& exec, Op op_a, const ConstMatrix& a, Op op_b,
                    const ConstMatrix& b, float beta, const Matrix& c);

/// False if the environment has KVZAP_PACK=off, for tests and comparisons. Throws Error for any
/// value other than on and off.
bool may_pack_weights();
/// Whether packing weights at load is worth it: on a host with AVX2 or NEON, or with AVX-512 and
/// oneDNN, if may_pack_weights().
bool packs_weights();

/// A map of many rows to at most this many outputs reads x in place and plain rows of weights. The
/// weights of such maps are not packed.
inline constexpr std::int64_t few_outputs = 16;

/// Allocates packed weights from large blocks on huge pages; a matrix of a few megabytes alone
/// would get few huge pages. A block lives as long as the weights in it.
class PackedAllocator {
 public:
  /// Returns room for `count` values of `value_bytes` bytes, at a multiple of 64 bytes. Throws
  /// Error if memory is exhausted.
  Bytes operator()(std::int64_t count, std::size_t value_bytes);

 private:
  Bytes m_block;
  std::int64_t m_used = 0;
};
/// Returns weights of extents (outputs, inputs) for pack_rows to fill.
LinearWeights packed_weights(PackedAllocator& allocator, DType dtype, std::int64_t outputs,
                             std::int64_t inputs);
/// Packs consecutive rows (n_rows, inputs) as the outputs begin .. begin + n_rows - 1 of `weights`,
/// whose type they have. begin must be a multiple of LinearWeights::block_outputs. So must n_rows,
/// unless these are the last rows. Hosts only.
void pack_rows(const void* rows, std::int64_t begin, std::int64_t n_rows,
               const LinearWeights& weights);
/// Writes the inputs of one output, widened, to `target`. Hosts only.
void unpack_row(const LinearWeights& weights, std::int64_t row, float* target);

/// What LinearMap::activated computes, and where it writes.
struct Activated {
  Epilogue epilogue = Epilogue::none;
  Kokkos::View<const bfloat16*, MemorySpace> bias;  // (n), or empty
  bfloat16* values = nullptr;                       // (m, n), other memory than that of x
};

/// y = x W^T + bias, as in torch.nn.Linear, accumulated in float for every type of W. An object
/// keeps scratch space and must not be used by two threads at a time.
///
/// With bf16 weights x is rounded to bf16 first, on every path, as in transformers. With f16
/// weights x stays float on most hosts. It is rounded to f16 where products keep the weights' type
/// (CUDA), and for many rows on a host whose processor multiplies tiles of f16 (AMX-FP16, by oneDNN
/// 3). A power of two first scales each row of x so that its largest value is near the largest of
/// f16. Then nothing overflows, and values down to 2^-28 of the row's largest keep 11 bits. Each
/// sum is off by at most 2^-11 of the sum of its terms' magnitudes.
///
/// With quantised weights a host rounds rows of x to bytes, in groups of 32 inputs: each x is off
/// by at most 1/254 of its group's largest magnitude. If other products are preferred for many rows
/// (quantised::prefers_blocks), it unpacks the weights to bf16 or f32, whichever is faster, and
/// rounds both operands to bf16 in the former case. A device unpacks them to their dtype, or reads
/// a few rows of x as float.
///
/// With weights of 8-bit floats and KVZAP_FP8=on, devices round 32 rows of x and more to such
/// floats too (float8_scales): each x is off by at most 1/16 of its value, or by 2^-10 of 1/448 of
/// the largest magnitude among the inputs that share its scale, whichever is more.
class LinearMap {
 public:
  /// x (m, k), weights (n, k), bias (n) or empty, y (m, n).
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x, const LinearWeights& weights,
                  const ConstVector& bias, const Matrix& y) {
    (*this)(exec, x, RoundedRows(), weights, bias, y);
  }
  /// The same for x that an earlier kernel has already rounded. `rounded`: x in the buffer that
  /// room_for_rounded returned for the weights' type, or empty.
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x, const RoundedRows& rounded,
                  const LinearWeights& weights, const ConstVector& bias, const Matrix& y);

  /// Returns rows of bf16: result.values = epilogue(x W^T + result.bias), in one launch, rounded
  /// once. Computes no product and returns empty rows unless products keep the type bf16 of these
  /// weights and the library has an algorithm.
  RoundedRows activated(const ExecutionSpace& exec, const ConstMatrix& x,
                        const RoundedRows& rounded, const LinearWeights& weights,
                        const Activated& result);

  /// Returns a buffer in which the kernel that makes x (m, k) can leave x rounded for weights of
  /// this type, so that no further kernel has to round it. Empty if products take x as float. Valid
  /// for one x at a time.
  RoundedRows room_for_rounded(DType dtype, std::int64_t m, std::int64_t k);

 private:
  RoundedRows in_type_of(const ExecutionSpace& exec, const ConstMatrix& x,
                         const RoundedRows& rounded, const LinearWeights& weights);
  void by_own_type(const ExecutionSpace& exec, const ConstMatrix& x, const RoundedRows& rounded,
                   const LinearWeights& weights, const ConstVector& bias, const Matrix& y);
  void by_quantised(const ExecutionSpace& exec, const ConstMatrix& x, const LinearWeights& weights,
                    const ConstVector& bias, const Matrix& y);
  bool by_float8(const ExecutionSpace& exec, const ConstMatrix& x, const LinearWeights& weights,
                 const ConstVector& bias, const Matrix& y);

  Vector m_panel;    // widened weights
  Vector m_widened;  // x, rounded to bf16 and widened again
  Vector m_copied;   // a few rows of x, padded
  Bytes m_rounded;   // x in 16 bits, padded; rows of f16 are scaled
  Bytes m_pairs;     // f16 weights in pairs of inputs
  Vector m_unscale;  // undoes the scaling of each row
  // Of products with quantised weights:
  Bytes m_bytes;     // rows of x in bytes
  Vector m_spread;   // x with zeros beside ranges of inputs
  Bytes m_unpacked;  // weights
  Vector m_scales;   // of rows of x in 8-bit floats, then of such weights
  Vector m_padded;   // y with padding rows
};

}  // namespace kvzap::linalg
