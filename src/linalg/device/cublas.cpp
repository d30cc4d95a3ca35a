#include "linalg/device/cublas.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

#include <cublas_v2.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <mutex>

namespace kvzap::linalg::cublas {
namespace {

// The size that NVIDIA recommends for Hopper. It is allocated once, so that no product allocates.
constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(fmt::format("cuBLAS: {} failed: {}", call, cublasGetStatusString(status)));
  }
}

/// A cuBLAS handle for one stream.
class Handle {
 public:
  explicit Handle(cudaStream_t stream) {
    check(cublasCreate(&m_handle), "cublasCreate");
    m_workspace = Kokkos::View<char*, Kokkos::CudaSpace>(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::cublas::workspace"),
        workspace_bytes);
    // Set the stream first: setting it resets the library's workspace.
    check(cublasSetStream(m_handle, stream), "cublasSetStream");
    check(cublasSetWorkspace(m_handle, m_workspace.data(), workspace_bytes), "cublasSetWorkspace");
    check(cublasSetMathMode(m_handle, CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
    check(cublasSetPointerMode(m_handle, CUBLAS_POINTER_MODE_HOST), "cublasSetPointerMode");
  }
  ~Handle() { cublasDestroy(m_handle); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cublasHandle_t get() const { return m_handle; }

 private:
  cublasHandle_t m_handle = nullptr;
  Kokkos::View<char*, Kokkos::CudaSpace> m_workspace;
};

/// One handle for each stream, destroyed when Kokkos is finalized.
cublasHandle_t handle_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<cudaStream_t, Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(stream);
  if (found != handles.end()) return found->second.get();
  if (handles.empty()) {
    Kokkos::push_finalize_hook([] {
      const std::lock_guard<std::mutex> at_end(mutex);
      handles.clear();
    });
  }
  return handles.try_emplace(stream, stream).first->second.get();
}

int narrow(std::int64_t extent) {
  if (extent > std::numeric_limits<int>::max()) {
    throw Error(fmt::format("cuBLAS: an extent or stride of {} does not fit its int", extent));
  }
  return static_cast<int>(extent);
}

cudaDataType_t type_of(DType dtype) {
  if (dtype == DType::f32) return CUDA_R_32F;
  return dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
}

}  // namespace

// cuBLAS stores matrices by columns. Its (n, m) matrix is our (m, n), so the operands are
// exchanged.
void multiply(const Kokkos::Cuda& exec, const Product& p) {
  const cublasHandle_t handle = handle_of(exec.cuda_stream());
  const auto op_a = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const auto op_b = p.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int m = narrow(p.m), n = narrow(p.n), k = narrow(p.k);
  const int a_stride = narrow(p.a_stride), b_stride = narrow(p.b_stride),
            c_stride = narrow(p.c_stride);
  const cudaDataType_t type = type_of(p.dtype);
  if (p.batch == 1) {
    check(cublasGemmEx(handle, op_b, op_a, n, m, k, &p.alpha, p.b, type, b_stride, p.a, type,
                       a_stride, &p.beta, p.c, CUDA_R_32F, c_stride, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  } else {
    check(cublasGemmStridedBatchedEx(handle, op_b, op_a, n, m, k, &p.alpha, p.b, type, b_stride,
                                     p.b_step, p.a, type, a_stride, p.a_step, &p.beta, p.c,
                                     CUDA_R_32F, c_stride, p.c_step, narrow(p.batch),
                                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmStridedBatchedEx");
  }
}

}  // namespace kvzap::linalg::cublas

#endif
