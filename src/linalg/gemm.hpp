// The one door to matrix products: which library or kernel does the work is decided here.
#pragma once

#include <kvzap/core/linear_weights.hpp>
#include <kvzap/core/types.hpp>

#include "linalg/rounded_rows.hpp"

namespace kvzap::detail {

using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;
using ConstMatrix = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
using Vector = Kokkos::View<float*, MemorySpace>;
using ConstVector = Kokkos::View<const float*, MemorySpace>;

/// c (m, n) = alpha * a (m, k) * b (n, k)^T + beta * c
void multiply_nt(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);
/// c (m, n) = alpha * a (m, k) * b (k, n) + beta * c
void multiply_nn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);
/// c (m, n) = alpha * a (k, m)^T * b (k, n) + beta * c
void multiply_tn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c);

/// c (m, n) = op(a) (m, k) * op(b) (k, n) + beta * c for products of millions of operations, as
/// training has them: on hosts by oneDNN where the build has it, whose kernels use the widest
/// instructions of processors that an older BLAS does not know; else as above.
enum class Op { plain, transposed };
void multiply_large(const ExecutionSpace& exec, Op op_a, const ConstMatrix& a, Op op_b,
                    const ConstMatrix& b, float beta, const Matrix& c);

/// False where KVZAP_PACK=off is in the environment, for tests and comparisons. Throws Error for
/// any value but on and off.
bool may_pack_weights();
/// Whether weights of this type are worth packing at load: on a host with AVX2, or with AVX-512 and
/// oneDNN, if they may be packed at all.
template <class Value>
bool packs_weights();

/// Up to this many outputs a map of many rows goes over x as it lies, by plain rows of weights:
/// weights of such maps are not packed.
inline constexpr std::int64_t few_outputs = 16;

/// Hands out memory for packed weights from large blocks on huge pages, where a matrix of a few
/// megabytes alone would get few of them. A block lives as long as the weights in it.
template <class Value>
class PackedAllocator {
 public:
  /// Weights of extents (outputs, inputs), to be filled by pack_rows. Throws Error if memory is
  /// exhausted.
  LinearWeights<Value> operator()(std::int64_t outputs, std::int64_t inputs);

 private:
  typename LinearWeights<Value>::Packed m_block;
  std::int64_t m_used = 0;
};
/// Packs rows (n_rows, inputs), one after the other, as outputs begin .. begin + n_rows of
/// `weights`. begin is a multiple of LinearWeights::block_outputs, and so is n_rows unless these
/// are the last ones. Host alone.
template <class Value>
void pack_rows(const Value* rows, std::int64_t begin, std::int64_t n_rows,
               const LinearWeights<Value>& weights);

/// y = x W^T + bias as torch.nn.Linear has it, accumulated in float whatever W is stored in. With
/// bf16 weights x is rounded to bf16 first, on every path, as transformers has it. With f16 weights
/// x stays float on hosts. Where products keep the weights' type (on CUDA), or a host's processor
/// has those of tiles of f16 (AMX-FP16, by oneDNN 3) and there are many rows, every row of x is
/// rounded to f16 after a power of two has brought its largest value near the largest of f16, so
/// that nothing overflows and values down to 2^-28 of the row's largest keep 11 bits: each sum is
/// then off by at most 2^-11 of the sum of its terms' magnitudes. The object
/// keeps scratch space and is not for two threads at a time.
class LinearMap {
 public:
  /// x (m, k), weights (n, k), bias (n) or empty, y (m, n).
  template <class Value>
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                  const LinearWeights<Value>& weights, const ConstVector& bias, const Matrix& y) {
    (*this)(exec, x, RoundedRows<Value>(), weights, bias, y);
  }
  /// The same where kernels before have rounded x already: `rounded` is x in the room that
  /// room_for_rounded gave, or empty.
  template <class Value>
  void operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                  const RoundedRows<Value>& rounded, const LinearWeights<Value>& weights,
                  const ConstVector& bias, const Matrix& y);

  /// Where the kernel that makes x (m, k) may leave its rounded rows beside it, so that no further
  /// kernel has to round them; empty where products take x otherwise. Good for one x at a time.
  template <class Value>
  RoundedRows<Value> room_for_rounded(std::int64_t m, std::int64_t k);

 private:
  template <class Value>
  void by_own_type(const ExecutionSpace& exec, const ConstMatrix& x,
                   const RoundedRows<Value>& rounded, const LinearWeights<Value>& weights,
                   const ConstVector& bias, const Matrix& y);

  Vector m_panel;                               // widened weights
  Vector m_widened;                             // x, rounded to bf16 and widened again
  Vector m_copied;                              // a few rows of x, padded
  Kokkos::View<bfloat16*, MemorySpace> m_bf16;  // x, rounded and padded
  Kokkos::View<half*, MemorySpace> m_half;      // x, rounded, its rows scaled
  Kokkos::View<half*, MemorySpace> m_pairs;     // weights in pairs of inputs
  Vector m_unscale;                             // what undoes the scaling of each row
};

}  // namespace kvzap::detail
