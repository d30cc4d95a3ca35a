// Replaces the kernels of this folder in builds without CUDA, or for devices below 8.0.
#include "linalg/cuda/quantised_products.hpp"

namespace kvzap::linalg::tensor_cores {

bool has_vectors(const ConstMatrix&) { return false; }

bool multiply_quantised(const ExecutionSpace&, const ConstMatrix&, const quantised::Matrix&,
                        const ConstVector&, const Matrix&) {
  return false;
}

bool multiply_chosen(const ExecutionSpace&, const ConstMatrix&, const ChosenSection&,
                     const Matrix&) {
  return false;
}

}  // namespace kvzap::linalg::tensor_cores
