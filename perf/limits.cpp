#include "limits.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <kvzap/core/types.hpp>
#include <numeric>
#include <vector>

#include "base/bytes.hpp"
#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/simd.hpp"
#include "common.hpp"
#include "device_limits.hpp"
#include "linalg/gemm.hpp"
#if KVZAP_X86
#include <immintrin.h>
#endif
#ifdef KVZAP_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#endif

#define KVZAP_PRODUCTS_BODY "byte_dots.inc"
#include "base/each_byte_products.hpp"

namespace kvzap::perf {
namespace {

constexpr std::int64_t gemm_m = LimitKernels::gemm_m, gemm_n = LimitKernels::gemm_n,
                       gemm_k = LimitKernels::gemm_k;
constexpr std::int64_t prefetch_floats = 1024;

// Eight running sums hide the latency of the additions. Prefetches bridge the ends of memory pages,
// at which the processor's prefetcher stops.
#if KVZAP_X86
KVZAP_TARGET_AVX512 float read_all_avx512(const float* values, std::int64_t count) {
  __m512 sums[8];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < count; i += 128) {
    for (int j = 0; j < 8; ++j) {
      _mm_prefetch(values + i + 16 * j + prefetch_floats, _MM_HINT_T1);
      sums[j] = _mm512_add_ps(sums[j], _mm512_load_ps(values + i + 16 * j));
    }
  }
  for (int j = 1; j < 8; ++j) sums[0] = _mm512_add_ps(sums[0], sums[j]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sums[0]);
  return std::accumulate(std::begin(lanes), std::end(lanes), 0.0f);
}
#endif

KVZAP_BODY float read_all_portable_body(const float* values, std::int64_t count) {
  float sums[128] = {};
  for (std::int64_t i = 0; i < count; i += 128) {
    for (int j = 0; j < 128; ++j) sums[j] += values[i + j];
  }
  return std::accumulate(std::begin(sums), std::end(sums), 0.0f);
}
KVZAP_KERNEL(float, read_all_portable, (const float* values, std::int64_t count), (values, count))

float read_all(const float* values, std::int64_t count) {
#if KVZAP_X86
  if (base::machine().has(base::SimdLevel::avx512)) return read_all_avx512(values, count);
#endif
  return read_all_portable(values, count);
}

#if KVZAP_X86
// Streaming stores do not read the lines that they write.
void stream_copy_baseline(const char* source, char* target, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    for (int j = 0; j < 64; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + j),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(source + i + j)));
    }
  }
  _mm_sfence();
}
KVZAP_TARGET_AVX512 void stream_copy_avx512(const char* source, char* target, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_load_si512(source + i));
  }
  _mm_sfence();
}
void stream_copy(const char* source, char* target, std::size_t bytes) {
  if (base::machine().has(base::SimdLevel::avx512)) {
    stream_copy_avx512(source, target, bytes);
  } else {
    stream_copy_baseline(source, target, bytes);
  }
}
#else
void stream_copy(const char* source, char* target, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}
#endif

/// Zeroed memory of the system. `huge`: in the largest pages that the system provides; reading
/// small ones is much slower with any kernel. `touch`: present from the start.
class SystemMemory {
 public:
  explicit SystemMemory(std::size_t bytes, bool huge, bool touch) : m_bytes(bytes) {
    m_data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m_data == MAP_FAILED) throw Error("limits: no memory for the working set");
#ifdef MADV_HUGEPAGE
    madvise(m_data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    if (touch) std::memset(m_data, 0, bytes);
  }
  ~SystemMemory() { munmap(m_data, m_bytes); }
  SystemMemory(const SystemMemory&) = delete;
  SystemMemory& operator=(const SystemMemory&) = delete;
  char* data() const { return static_cast<char*>(m_data); }

 private:
  void* m_data;
  std::size_t m_bytes;
};

template <class Work>
double seconds_of(const Work& work) {
  world_barrier();
  const double begin = now();
  work();
  return max_over_ranks(now() - begin);
}

#ifdef KVZAP_HAVE_ONEDNN
// c = a * b with b in the layout that oneDNN prefers.
class Product {
 public:
  explicit Product(dnnl::memory::data_type type)
      : m_engine(dnnl::engine::kind::cpu, 0), m_stream(m_engine) {
    using Memory = dnnl::memory;
    const auto any = Memory::format_tag::any;
    const auto ab = Memory::format_tag::ab;
    const Memory::desc a({gemm_m, gemm_k}, type, ab);
    const Memory::desc b({gemm_k, gemm_n}, type, any);
    const Memory::desc c({gemm_m, gemm_n}, Memory::data_type::f32, ab);
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc description(m_engine, a, b, c);
#else
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), m_engine);
#endif
    m_product = dnnl::matmul(description);
    // Uses ones, because operands of zeros or denormals might run at another speed.
    const auto ones = [&](const Memory::desc& desc) {
      Memory memory(desc, m_engine);
      if (type == Memory::data_type::bf16) {
        auto* values = static_cast<bfloat16*>(memory.get_data_handle());
        std::fill_n(values, desc.get_size() / sizeof(bfloat16), bfloat16(1.0f));
      } else {
        auto* values = static_cast<float*>(memory.get_data_handle());
        std::fill_n(values, desc.get_size() / sizeof(float), 1.0f);
      }
      return memory;
    };
    m_arguments = {{DNNL_ARG_SRC, ones(description.src_desc())},
                   {DNNL_ARG_WEIGHTS, ones(description.weights_desc())},
                   {DNNL_ARG_DST, Memory(description.dst_desc(), m_engine)}};
  }
  void run() {
    m_product.execute(m_stream, m_arguments);
    m_stream.wait();
  }

 private:
  dnnl::engine m_engine;
  dnnl::stream m_stream;
  dnnl::matmul m_product;
  std::unordered_map<int, dnnl::memory> m_arguments;
};

/// Returns nothing if oneDNN has no such product for the processor, or for its instruction-set
/// limit.
std::unique_ptr<Product> bf16_product() {
  try {
    return std::make_unique<Product>(dnnl::memory::data_type::bf16);
  } catch (const dnnl::error& error) {
    if (error.status != dnnl_unimplemented) throw;
    return nullptr;
  }
}
#endif

}  // namespace

struct LimitKernels::Buffers {
  SystemMemory memory{working_set, true, true};
  std::unique_ptr<SystemMemory> small_pages;
#ifdef KVZAP_HAVE_ONEDNN
  Product f32{dnnl::memory::data_type::f32};
  std::unique_ptr<Product> bf16 = bf16_product();
#else
  linalg::Matrix a{"kvzap::perf::a", gemm_m, gemm_k};
  linalg::Matrix b{"kvzap::perf::b", gemm_n, gemm_k};
  linalg::Matrix c{"kvzap::perf::c", gemm_m, gemm_n};
#endif
};

LimitKernels::LimitKernels() {
  if (base::machine().on_host())
    m_buffers = std::make_unique<Buffers>();
  else
    m_device = std::make_unique<DeviceLimits>();
  gemm_f32();  // the first product of a shape is compiled
  gemm_bf16();
}
LimitKernels::~LimitKernels() = default;

double LimitKernels::read() {
  if (m_device) return seconds_of([&] { m_device->read(); });
  return seconds_of([&] {
    benchmark::DoNotOptimize(read_all(reinterpret_cast<const float*>(m_buffers->memory.data()),
                                      working_set / sizeof(float)));
  });
}

double LimitKernels::read_small_pages() {
  if (!m_buffers->small_pages) {
    m_buffers->small_pages = std::make_unique<SystemMemory>(working_set, false, true);
  }
  return seconds_of([&] {
    benchmark::DoNotOptimize(
        read_all(reinterpret_cast<const float*>(m_buffers->small_pages->data()),
                 working_set / sizeof(float)));
  });
}

double LimitKernels::copy() {
  if (m_device) return seconds_of([&] { m_device->copy(); });
  char* data = m_buffers->memory.data();
  return seconds_of([&] { stream_copy(data, data + working_set / 2, working_set / 2); });
}

double LimitKernels::fresh() {
  // The memory was not touched before, so the time includes the system's zeroing of pages, as when
  // weights are loaded.
  const SystemMemory target(working_set / 2, true, false);
  return seconds_of([&] { std::memcpy(target.data(), m_buffers->memory.data(), working_set / 2); });
}

bool LimitKernels::has_onednn() {
#ifdef KVZAP_HAVE_ONEDNN
  return true;
#else
  return false;
#endif
}

double LimitKernels::gemm_f32() {
  if (m_device) return seconds_of([&] { m_device->multiply(DType::f32); });
#ifdef KVZAP_HAVE_ONEDNN
  return seconds_of([&] { m_buffers->f32.run(); });
#else
  return seconds_of([&] {
    const ExecutionSpace exec;
    linalg::multiply_nt(exec, 1, m_buffers->a, m_buffers->b, 0, m_buffers->c);
    base::fence(exec, "kvzap::perf: time");
  });
#endif
}

double LimitKernels::gemm_bf16() {
  if (m_device) return seconds_of([&] { m_device->multiply(DType::bf16); });
#ifdef KVZAP_HAVE_ONEDNN
  if (!m_buffers->bf16) return gemm_f32();
  return seconds_of([&] { m_buffers->bf16->run(); });
#else
  return gemm_f32();
#endif
}

namespace {

constexpr std::int64_t byte_dot_steps = 4'000'000;

struct ByteDotsKernel {
  float (*run)(const std::uint8_t* bytes, std::int64_t steps);
  double flops_of_step;
};

ByteDotsKernel byte_dots_kernel() {
  switch (base::byte_products()) {
#if KVZAP_NEON
    case base::ByteProducts::neon_dot:
      return {neon_dot::run_dots, neon_dot::flops_of_step};
#elif KVZAP_X86
    case base::ByteProducts::avx2:
      return {avx2::run_dots, avx2::flops_of_step};
#if KVZAP_AVX_VNNI
    case base::ByteProducts::avx_vnni:
      return {avx_vnni::run_dots, avx_vnni::flops_of_step};
#endif
    case base::ByteProducts::avx512_vnni:
      return {avx512_vnni::run_dots, avx512_vnni::flops_of_step};
#endif
    default:
      return {portable::run_dots, portable::flops_of_step};
  }
}

}  // namespace

double LimitKernels::byte_dots() {
  alignas(64) std::uint8_t bytes[128];
  std::fill_n(bytes, 128, std::uint8_t{1});
  return seconds_of([&] {
    base::for_each_on_threads(base::host_threads(), [&](std::int64_t) {
      benchmark::DoNotOptimize(bytes);
      benchmark::DoNotOptimize(byte_dots_kernel().run(bytes, byte_dot_steps));
    });
  });
}

double LimitKernels::byte_dots_flops() {
  return byte_dot_steps * byte_dots_kernel().flops_of_step * base::host_threads();
}

double LimitKernels::all_reduce(std::size_t count, int times) {
  std::vector<float> reduced(count);
  return seconds_of([&] {
           for (int i = 0; i < times; ++i) world().all_reduce_sum(reduced.data(), count);
         }) /
         times;
}

namespace {

std::unique_ptr<LimitKernels> the_kernels;

// The work of one rank in a pass over a limit, and the pass.
struct Pass {
  double work;
  double (LimitKernels::*seconds)();
};

Pass pass_of(Limit limit) {
  constexpr double bytes = LimitKernels::working_set;
  if (!base::machine().on_host()) {
    if (limit == Limit::fresh) limit = Limit::copy;
    if (limit == Limit::byte_dots) limit = Limit::gemm_bf16;
  }
  switch (limit) {
    case Limit::read:
      return {bytes, &LimitKernels::read};
    case Limit::copy:
      return {bytes, &LimitKernels::copy};
    case Limit::fresh:
      return {bytes / 2, &LimitKernels::fresh};
    case Limit::gemm_f32:
      return {LimitKernels::gemm_flops, &LimitKernels::gemm_f32};
    case Limit::gemm_bf16:
      return {LimitKernels::gemm_flops, &LimitKernels::gemm_bf16};
    case Limit::byte_dots:
      return {LimitKernels::byte_dots_flops(), &LimitKernels::byte_dots};
  }
  throw Error("limits: no such limit");
}

}  // namespace

double measure_limit(Limit limit, int passes) {
  if (!the_kernels) the_kernels = std::make_unique<LimitKernels>();
  const Pass pass = pass_of(limit);
  double best = 1e30;
  for (int i = 0; i < passes; ++i) best = std::min(best, (the_kernels.get()->*pass.seconds)());
  return world().size() * pass.work / best;
}

void release_limits() { the_kernels.reset(); }

Yardstick::Yardstick(Limit limit) : m_limit(limit), m_before(measure_limit(limit, passes)) {}

double Yardstick::rate() const { return std::max(m_before, measure_limit(m_limit, passes)); }

}  // namespace kvzap::perf
