// Matrix products of a device. Operands keep the type in which they are stored.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>

namespace kvzap::linalg {

/// What a product applies to its sums after it has added the bias.
enum class Epilogue { none, relu, gelu_tanh };

/// c (m, n) = alpha * a * b + beta * c, `batch` times. All matrices are row-major. With a bias or
/// an epilogue, which take one product without batch: c = epilogue(alpha * a * b + bias).
struct Product {
  DType dtype = DType::f32;  // of a and b
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;    // (k, m) if a_transposed, else (m, k)
  std::int64_t a_stride = 0;  // elements from one row to the next; b_stride and c_stride likewise
  bool a_transposed = false;
  const void* b = nullptr;  // (n, k) if transposed, else (k, n)
  std::int64_t b_stride = 0;
  bool transposed = false;
  void* c = nullptr;
  DType c_dtype = DType::f32;  // or bf16, for products of bf16
  std::int64_t c_stride = 0;
  float alpha = 1;
  float beta = 0;
  std::int64_t batch = 1;
  std::int64_t a_step = 0;  // elements from one product of the batch to the next
  std::int64_t b_step = 0;
  std::int64_t c_step = 0;
  const void* bias = nullptr;  // (n), of the type of c; or null
  Epilogue epilogue = Epilogue::none;

  bool is_fused() const { return bias != nullptr || epilogue != Epilogue::none; }
};

/// Computes the product on `exec` without waiting; sums are accumulated in float. On CUDA cuBLAS
/// computes it, cuBLASLt with a bias or an epilogue: 16-bit operands use the tensor cores, float
/// ones do not (no TF32). Elsewhere a plain kernel does. With k = 0, which takes neither bias nor
/// epilogue, c = beta * c. Throws Error if the library refuses.
void multiply(const ExecutionSpace& exec, const Product& product);

/// Whether multiply() takes this product, which has a bias or an epilogue: cuBLASLt may lack an
/// algorithm for it. The plain kernel takes all.
bool has_fused_product(const ExecutionSpace& exec, const Product& product);

/// Whether a vendor's library computes these products.
bool has_product_library();

}  // namespace kvzap::linalg
