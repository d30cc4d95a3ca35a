// Matrix products by cuBLAS, on the stream of a Kokkos instance.
#pragma once

#include "linalg/product.hpp"

namespace kvzap::linalg::cublas {

#if defined(KOKKOS_ENABLE_CUDA)
inline constexpr bool is_available = true;

/// The same as linalg::multiply, for k > 0. Throws Error if cuBLAS refuses.
void multiply(const Kokkos::Cuda& exec, const Product& product);
#else
inline constexpr bool is_available = false;
#endif

}  // namespace kvzap::linalg::cublas
