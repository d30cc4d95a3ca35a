// Dense products by oneDNN, if the build has it. Hosts only.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::linalg::onednn {

/// Whether the build has oneDNN.
bool is_available();
/// Returns oneDNN's version, or "" in a build without it.
const char* version();

/// Operands of y (m, n) = x (m, k) * W^T + bias, all row-major. Strides count values.
struct Product {
  DType dtype;  // of x and weights
  std::int64_t m, n, k;
  const void* x;
  std::int64_t x_stride;
  const void* weights;          // (n, k), or as LinearWeights packs them (f16: as bf16)
  std::int64_t weights_stride;  // 0: packed
  const float* bias;            // (n), or null
  float* y;
  std::int64_t y_stride;
};

/// Computes the product. Accumulates in float. Must not be called by two threads at a time. Throws
/// Error if oneDNN refuses.
void multiply(const Product& product);

/// Whether `product` takes a kernel made for the processor and not oneDNN's plain loops. For f16
/// the processor must also multiply tiles of f16: kernels for AVX512-FP16 alone widen both operands
/// and are no faster than products of floats, which need not round x. False if oneDNN has no kernel
/// at all.
bool has_fast_product(const Product& product);

/// Whether products with packed or plain weights of this type take such kernels. The answer depends
/// on the processor, on oneDNN's version, and on ONEDNN_MAX_CPU_ISA in the environment. The first
/// call asks oneDNN; later calls repeat its answer.
bool has_fast_products(DType dtype, bool packed);

/// c (m, n) = alpha * op(a) * op(b) + beta * c in float, row-major, by oneDNN's kernels for a BLAS.
/// op(a) (m, k) is the transpose of `a` if a_transposed; op(b) likewise. No plan is kept. Throws
/// Error if oneDNN refuses.
struct Gemm {
  std::int64_t m, n, k;
  float alpha;
  const float* a;
  std::int64_t a_stride;
  bool a_transposed;
  const float* b;
  std::int64_t b_stride;
  bool b_transposed;
  float beta;
  float* c;
  std::int64_t c_stride;
};
void multiply(const Gemm& gemm);

/// The most plans that are kept: those of the latest products. A plan is oneDNN's primitive and the
/// buffers for its operands. A layer has about six products, each with the rows of a full block of
/// tokens, of a last block and of decode steps. So a run reuses a few dozen plans. Prompts of any
/// length and a server's chunks would add six for each new number of rows.
///
/// A plan takes about 40 kB. By default oneDNN keeps 1,024 primitives, which grow a server by 50 MB
/// in its first hour. It is told to keep no more than this number, unless
/// ONEDNN_PRIMITIVE_CACHE_CAPACITY is set. A new plan costs 0.15 ms, or 0.02 ms while oneDNN has
/// its code: with hundreds of clients 0.2 % of the time of steps.
///
/// Rows are not rounded up to share plans: the time of a product is proportional to its rows, from
/// 17 to 500. A primitive of oneDNN 2.6 for any number of rows has no fast kernel.
inline constexpr std::int64_t max_plans = 128;

/// Plans kept now, look-ups so far, and the most primitives that oneDNN keeps; for tests.
struct CacheUse {
  std::int64_t plans, look_ups, most_primitives;
};
CacheUse cache_use();

}  // namespace kvzap::linalg::onednn
