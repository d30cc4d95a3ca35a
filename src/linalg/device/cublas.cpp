#include "linalg/device/cublas.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

#include <cublasLt.h>
#include <cublas_v2.h>
#include <fmt/format.h>

#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "linalg/device/library_call.hpp"

namespace kvzap::linalg::cublas {
namespace {

// The size that NVIDIA recommends for Hopper. It is allocated once, so that no product allocates.
constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(fmt::format("cuBLAS: {} failed: {}", call, cublasGetStatusString(status)));
  }
}

cudaDataType_t type_of(DType dtype) {
  if (dtype == DType::f32) return CUDA_R_32F;
  return dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
}

// Since version 12.9 cuBLASLt has scales for blocks of 128 inputs.
constexpr bool has_block_scales = CUBLAS_VERSION >= 120900;

/// Descriptors of a call of cuBLASLt, in place: nothing is allocated.
class Descriptors {
 public:
  explicit Descriptors(const LibraryCall& call) {
    check(cublasLtMatmulDescInit(&m_product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "MatmulDescInit");
    set(CUBLASLT_MATMUL_DESC_TRANSA, call.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, call.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    const bool biased = call.bias != nullptr;
    cublasLtEpilogue_t epilogue = biased ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (call.epilogue == Epilogue::relu) {
      epilogue = biased ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    } else if (call.epilogue == Epilogue::gelu_tanh) {
      epilogue = biased ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    }
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (biased) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias);
    if (call.a_scales != nullptr) set_scales(call);
    place(call.a, call.is_float8, m_a);
    place(call.b, call.is_float8, m_b);
    place(call.d, false, m_d);
  }

  cublasLtMatmulDesc_t product() { return &m_product; }
  cublasLtMatrixLayout_t a() { return &m_a; }
  cublasLtMatrixLayout_t b() { return &m_b; }
  cublasLtMatrixLayout_t d() { return &m_d; }

 private:
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check(cublasLtMatmulDescSetAttribute(&m_product, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }
  void set_scales([[maybe_unused]] const LibraryCall& call) {
#if CUBLAS_VERSION >= 120900
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.a_scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.b_scales);
#endif
  }
  static void place(const StoredMatrix& matrix, bool is_float8,
                    cublasLtMatrixLayoutOpaque_t& layout) {
    check(cublasLtMatrixLayoutInit(&layout, is_float8 ? CUDA_R_8F_E4M3 : type_of(matrix.dtype),
                                   matrix.rows, matrix.columns, matrix.stride),
          "cublasLtMatrixLayoutInit");
  }

  cublasLtMatmulDescOpaque_t m_product = {};
  cublasLtMatrixLayoutOpaque_t m_a = {}, m_b = {}, m_d = {};
};

/// The algorithm that cuBLASLt's heuristics choose, or none.
std::optional<cublasLtMatmulAlgo_t> choose_algorithm(cublasLtHandle_t handle,
                                                     const LibraryCall& call) {
  Descriptors descriptors(choice_of(call));
  cublasLtMatmulPreferenceOpaque_t preference = {};
  check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes});
  const auto aligned = [](const void* data) {
    return static_cast<std::uint32_t>(alignment_of(data));
  };
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned(call.a_data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned(call.b_data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned(call.d_data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned(call.d_data));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, descriptors.product(), descriptors.a(), descriptors.b(), descriptors.d(),
      descriptors.d(), &preference, 1, &found, &count);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0) return {};
  if (found.state != CUBLAS_STATUS_SUCCESS) return {};
  return found.algo;
}

/// A cuBLAS handle for one stream, and the algorithms of its products with an epilogue.
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
  /// A handle of cuBLAS is one of cuBLASLt.
  cublasLtHandle_t lt() const { return reinterpret_cast<cublasLtHandle_t>(m_handle); }
  void* workspace() const { return m_workspace.data(); }

  const std::optional<cublasLtMatmulAlgo_t>& algorithm(const LibraryCall& call) {
    const std::lock_guard<std::mutex> lock(m_mutex);
    const LibraryKey key = key_of(call);
    const auto found = m_algorithms.find(key);
    if (found != m_algorithms.end()) return found->second;
    return m_algorithms.emplace(key, choose_algorithm(lt(), call)).first->second;
  }

 private:
  cublasHandle_t m_handle = nullptr;
  Kokkos::View<char*, Kokkos::CudaSpace> m_workspace;
  std::mutex m_mutex;
  std::map<LibraryKey, std::optional<cublasLtMatmulAlgo_t>> m_algorithms;
};

/// One handle for each stream, destroyed when Kokkos is finalized.
Handle& handle_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<cudaStream_t, Handle> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(stream);
  if (found != handles.end()) return found->second;
  if (handles.empty()) {
    Kokkos::push_finalize_hook([] {
      const std::lock_guard<std::mutex> at_end(mutex);
      handles.clear();
    });
  }
  return handles.try_emplace(stream, stream).first->second;
}

int narrow(std::int64_t extent) {
  if (extent > std::numeric_limits<int>::max()) {
    throw Error(fmt::format("cuBLAS: an extent or stride of {} does not fit its int", extent));
  }
  return static_cast<int>(extent);
}

bool has_algorithm(const Kokkos::Cuda& exec, const LibraryCall& call) {
  return handle_of(exec.cuda_stream()).algorithm(call).has_value();
}

void multiply(const Kokkos::Cuda& exec, const LibraryCall& call) {
  Handle& handle = handle_of(exec.cuda_stream());
  const auto& algorithm = handle.algorithm(call);
  if (!algorithm) {
    throw Error(fmt::format("cuBLASLt: no algorithm for a product of {} × {} values", call.d.rows,
                            call.d.columns));
  }
  Descriptors descriptors(call);
  check(cublasLtMatmul(handle.lt(), descriptors.product(), &call.alpha, call.a_data,
                       descriptors.a(), call.b_data, descriptors.b(), &call.beta, call.d_data,
                       descriptors.d(), call.d_data, descriptors.d(), &*algorithm,
                       handle.workspace(), workspace_bytes, exec.cuda_stream()),
        "cublasLtMatmul");
}

}  // namespace

bool has_algorithm(const Kokkos::Cuda& exec, const Product& product) {
  return has_algorithm(exec, library_call(product));
}

bool has_algorithm(const Kokkos::Cuda& exec, const Float8Product& product) {
  return has_algorithm(exec, library_call(product));
}

Float8Scales float8_scales(const Kokkos::Cuda& exec) {
  const cudaDeviceProp& device = exec.cuda_device_prop();
  const int capability = 10 * device.major + device.minor;
  if (capability < 89) return Float8Scales::none;
  return has_block_scales && capability == 90 ? Float8Scales::blocks : Float8Scales::rows;
}

void multiply(const Kokkos::Cuda& exec, const Float8Product& product) {
  multiply(exec, library_call(product));
}

// cuBLAS stores matrices by columns. Its (n, m) matrix is our (m, n), so the operands are
// exchanged.
void multiply(const Kokkos::Cuda& exec, const Product& p) {
  if (p.is_fused()) return multiply(exec, library_call(p));
  const cublasHandle_t handle = handle_of(exec.cuda_stream()).get();
  const auto op_a = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const auto op_b = p.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int m = narrow(p.m), n = narrow(p.n), k = narrow(p.k);
  const int a_stride = narrow(p.a_stride), b_stride = narrow(p.b_stride),
            c_stride = narrow(p.c_stride);
  const cudaDataType_t type = type_of(p.dtype);
  if (p.batch == 1) {
    check(cublasGemmEx(handle, op_b, op_a, n, m, k, &p.alpha, p.b, type, b_stride, p.a, type,
                       a_stride, &p.beta, p.c, type_of(p.c_dtype), c_stride, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  } else {
    check(cublasGemmStridedBatchedEx(handle, op_b, op_a, n, m, k, &p.alpha, p.b, type, b_stride,
                                     p.b_step, p.a, type, a_stride, p.a_step, &p.beta, p.c,
                                     type_of(p.c_dtype), c_stride, p.c_step, narrow(p.batch),
                                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmStridedBatchedEx");
  }
}

}  // namespace kvzap::linalg::cublas

#endif
