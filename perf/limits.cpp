#include "limits.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <kvzap/types.hpp>
#include <vector>

#include "common.hpp"
#include "detail/gemm.hpp"
#include "detail/kokkos_compat.hpp"
#include "detail/simd.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef KVZAP_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#endif

namespace kvzap::perf {
namespace {

constexpr std::int64_t gemm_m = 1024, gemm_n = 2048, gemm_k = 2048;

// Sixteen floats that the compiler keeps in as many registers as the instruction set needs.
typedef float Lanes __attribute__((vector_size(64)));

// Eight running sums hide the latency of the additions.
KVZAP_BODY float read_all_body(const float* values, std::int64_t count) {
  Lanes sums[8] = {};
  const Lanes* lanes = reinterpret_cast<const Lanes*>(values);
  for (std::int64_t i = 0; i < count / 128; ++i) {
    for (int j = 0; j < 8; ++j) sums[j] += lanes[8 * i + j];
  }
  float sum = 0;
  for (int j = 0; j < 8; ++j) {
    for (int lane = 0; lane < 16; ++lane) sum += sums[j][lane];
  }
  return sum;
}
KVZAP_KERNEL(float, read_all, (const float* values, std::int64_t count), (values, count))

#if defined(__x86_64__)
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
  if (detail::simd_level() >= detail::SimdLevel::avx512) {
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

/// Pages of the system, as large as it gives them, zeroed and therefore present.
class Memory {
 public:
  explicit Memory(std::size_t bytes, bool touch = true) : m_bytes(bytes) {
    m_data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m_data == MAP_FAILED) throw Error("limits: no memory for the working set");
#ifdef MADV_HUGEPAGE
    madvise(m_data, bytes, MADV_HUGEPAGE);
#endif
    if (touch) std::memset(m_data, 0, bytes);
  }
  ~Memory() { munmap(m_data, m_bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
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
// c = a * b with b in the layout that oneDNN likes best.
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
    // Ones, since operands of zeros or denormals might run at another speed.
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
#endif

}  // namespace

struct LimitKernels::Buffers {
  Memory memory{working_set};
  std::vector<float> reduced;
#ifdef KVZAP_HAVE_ONEDNN
  Product f32{dnnl::memory::data_type::f32};
  Product bf16{dnnl::memory::data_type::bf16};
#else
  detail::Matrix a{"kvzap::perf::a", gemm_m, gemm_k};
  detail::Matrix b{"kvzap::perf::b", gemm_n, gemm_k};
  detail::Matrix c{"kvzap::perf::c", gemm_m, gemm_n};
#endif
};

LimitKernels::LimitKernels() : m_buffers(std::make_unique<Buffers>()) {
  gemm_f32();  // the first product of a shape is compiled
  gemm_bf16();
}
LimitKernels::~LimitKernels() = default;

double LimitKernels::read() {
  return seconds_of([&] {
    benchmark::DoNotOptimize(read_all(reinterpret_cast<const float*>(m_buffers->memory.data()),
                                      working_set / sizeof(float)));
  });
}

double LimitKernels::copy() {
  char* data = m_buffers->memory.data();
  return seconds_of([&] { stream_copy(data, data + working_set / 2, working_set / 2); });
}

double LimitKernels::fresh() {
  // Not touched before: the time has the system's zeroing of pages in it, as loading weights has.
  const Memory target(working_set / 2, false);
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
#ifdef KVZAP_HAVE_ONEDNN
  return seconds_of([&] { m_buffers->f32.run(); });
#else
  return seconds_of([&] {
    const ExecutionSpace exec;
    detail::multiply_nt(exec, 1, m_buffers->a, m_buffers->b, 0, m_buffers->c);
    detail::fence(exec, "kvzap::perf: time");
  });
#endif
}

double LimitKernels::gemm_bf16() {
#ifdef KVZAP_HAVE_ONEDNN
  return seconds_of([&] { m_buffers->bf16.run(); });
#else
  return gemm_f32();
#endif
}

double LimitKernels::all_reduce(std::size_t count, int times) {
  m_buffers->reduced.assign(count, 0.0f);
  return seconds_of([&] {
           for (int i = 0; i < times; ++i) {
             world().all_reduce_sum(m_buffers->reduced.data(), count);
           }
         }) /
         times;
}

const Limits& limits() {
  static const Limits measured = [] {
    LimitKernels kernels;
    const auto rate = [&](double work, double (LimitKernels::*pass)()) {
      double best = 1e30;
      for (int i = 0; i < 7; ++i) best = std::min(best, (kernels.*pass)());
      return world().size() * work / best;
    };
    constexpr double bytes = LimitKernels::working_set;
    return Limits{rate(bytes, &LimitKernels::read), rate(bytes, &LimitKernels::copy),
                  rate(bytes / 2, &LimitKernels::fresh),
                  rate(LimitKernels::gemm_flops, &LimitKernels::gemm_f32),
                  rate(LimitKernels::gemm_flops, &LimitKernels::gemm_bf16)};
  }();
  return measured;
}

}  // namespace kvzap::perf
