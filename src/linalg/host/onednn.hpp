// Dense products by oneDNN, where the build found it; on the host alone.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::detail::onednn {

/// Whether the build has oneDNN.
bool is_available();
/// Its version, "" without it.
const char* version();

/// Operands of y (m, n) = x (m, k) * W^T + bias, row after row.
template <class Value>
struct Product {
  std::int64_t m, n, k;
  const Value* x;
  std::int64_t x_stride;
  const Value* weights;         // (n, k), or as LinearWeights packs them (half: as bfloat16)
  std::int64_t weights_stride;  // 0: packed
  const float* bias;            // (n), or null
  float* y;
  std::int64_t y_stride;
};

/// Value: float, bfloat16 or half. Accumulates in float. Not for two threads at a time. Throws
/// Error if oneDNN refuses.
template <class Value>
void multiply(const Product<Value>& product);

/// Whether that takes a kernel made for the processor, not oneDNN's plain loops, and for half one
/// whose products the processor has in tiles: those of AVX512-FP16 alone widen both operands, and
/// are no faster than products of floats, which need not round x. False also where oneDNN has
/// nothing for such a product at all.
template <class Value>
bool has_fast_product(const Product<Value>& product);

/// Whether products with packed (else plain) weights of this type take such kernels. That depends
/// on the processor, on oneDNN's version, and on what ONEDNN_MAX_CPU_ISA in the environment lets it
/// use. Asked of oneDNN once.
template <class Value>
bool has_fast_products(bool packed);

/// c (m, n) = alpha * op(a) * op(b) + beta * c in float, row after row, by the kernels that oneDNN
/// has for a BLAS; op(a) (m, k) is the transpose of `a` if a_transposed. Nothing is kept. Throws
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

/// Plans (oneDNN's primitives, and what is copied for them) are kept, at most so many: those of the
/// products that were done last. A layer has about six products, each with the rows of a full block
/// of tokens, of a last block, and of decode steps, so that a run comes back to some dozens;
/// prompts of any length and a server's chunks would add six for each number of rows that ever
/// comes up. A plan takes some 40 kB, so oneDNN, which keeps 1,024 primitives beside ours, is told
/// to keep no more than this either (ONEDNN_PRIMITIVE_CACHE_CAPACITY in the environment says
/// otherwise): else a server grows by 50 MB in its first hour. One that is made anew costs 0.15 ms,
/// or 0.02 ms while oneDNN has its code: with hundreds of clients 0.2 % of the time of steps.
/// (Hence no rounding up of rows, with which the time of a product rises in proportion, at 17 rows
/// as at 500; and a primitive of oneDNN 2.6 for any number of rows has no fast kernel.)
inline constexpr std::int64_t max_plans = 128;

/// Plans kept now, how often one was looked up so far, and the most primitives that oneDNN keeps;
/// for tests.
struct CacheUse {
  std::int64_t plans, look_ups, most_primitives;
};
CacheUse cache_use();

}  // namespace kvzap::detail::onednn
