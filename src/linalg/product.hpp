// Matrix products of a device. Operands keep the type in which they are stored.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::linalg {

/// c (m, n) = alpha * a * b + beta * c, `batch` times. All matrices are row-major.
struct Product {
  DType dtype = DType::f32;  // of a and b
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;    // (k, m) if a_transposed, else (m, k)
  std::int64_t a_stride = 0;  // elements from one row to the next; b_stride and c_stride likewise
  bool a_transposed = false;
  const void* b = nullptr;  // (n, k) if transposed, else (k, n)
  std::int64_t b_stride = 0;
  bool transposed = false;
  float* c = nullptr;
  std::int64_t c_stride = 0;
  float alpha = 1;
  float beta = 0;
  std::int64_t batch = 1;
  std::int64_t a_step = 0;  // elements from one product of the batch to the next
  std::int64_t b_step = 0;
  std::int64_t c_step = 0;
};

/// Computes the product on `exec` without waiting; sums are accumulated in float. On CUDA cuBLAS
/// computes it: 16-bit operands use the tensor cores, float ones do not (no TF32). Elsewhere a
/// plain kernel does. With k = 0, c = beta * c. Throws Error if the library refuses.
void multiply(const ExecutionSpace& exec, const Product& product);

/// Whether a vendor's library computes these products.
bool has_product_library();

}  // namespace kvzap::linalg
