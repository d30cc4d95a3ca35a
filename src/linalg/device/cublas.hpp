// Matrix products by cuBLAS, on the stream of a Kokkos instance.
#pragma once

#include "linalg/device/float8.hpp"
#include "linalg/product.hpp"

namespace kvzap::linalg::cublas {

#if defined(KOKKOS_ENABLE_CUDA)
inline constexpr bool is_available = true;

/// The same as linalg::multiply, for k > 0: by cuBLASLt with a bias or an epilogue, else by cuBLAS,
/// which has kernels of its own for a row of a. Throws Error if the library refuses.
void multiply(const Kokkos::Cuda& exec, const Product& product);
/// Whether cuBLASLt has an algorithm for a product with a bias or an epilogue. The first call for a
/// size asks its heuristics, which takes the host tens of microseconds; the answer is kept.
bool has_algorithm(const Kokkos::Cuda& exec, const Product& product);

/// What has a scale in products of 8-bit floats of the device and this cuBLASLt.
Float8Scales float8_scales(const Kokkos::Cuda& exec);
/// The same for such products.
bool has_algorithm(const Kokkos::Cuda& exec, const Float8Product& product);
void multiply(const Kokkos::Cuda& exec, const Float8Product& product);
#else
inline constexpr bool is_available = false;
#endif

}  // namespace kvzap::linalg::cublas
