#include "linalg/host/packed_kernels.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "base/vec.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/linear_weights.hpp"
#include "linalg/rounded_rows.hpp"

// Within a block of rows that a kernel works on, offsets fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace kvzap::linalg {
namespace {

constexpr int block_outputs = LinearWeights::block_outputs;

// One step of a product reads the inputs that a block stores together for all outputs: a pair of
// inputs in bf16, one input in other types.
template <class Value>
constexpr int step_inputs = std::is_same_v<Value, bfloat16> ? 2 : 1;

}  // namespace
}  // namespace kvzap::linalg

#define KVZAP_LEVEL_BODY "linalg/host/packed_kernels.inc"
#include "base/each_level.hpp"

namespace kvzap::linalg {
namespace {

// The kernel of the widest set in use. packed_gemm has blocks for 8 lanes.
#if KVZAP_X86
#define KVZAP_SELECT(...) \
  (base::machine().simd() >= base::SimdLevel::avx512 ? avx512::__VA_ARGS__ : avx2::__VA_ARGS__)
namespace many = avx2;
#else
#define KVZAP_SELECT(...) baseline::__VA_ARGS__
namespace many = baseline;
#endif

}  // namespace

bool has_packed_kernels() {
  return KVZAP_NEON || (KVZAP_X86 && base::machine().has(base::SimdLevel::avx2));
}

void packed_product([[maybe_unused]] RowSpan<const bfloat16> x,
                    [[maybe_unused]] const bfloat16* block,
                    [[maybe_unused]] std::int64_t padded_inputs, [[maybe_unused]] int outputs,
                    [[maybe_unused]] float* y, [[maybe_unused]] std::int64_t y_stride) {
#if KVZAP_X86
  avx512_bf16::product(x, block, padded_inputs, outputs, y, y_stride);
#elif KVZAP_NEON
  neon_bf16::product(x, block, padded_inputs, outputs, y, y_stride);
#endif
}

// Value is a type. NOLINTBEGIN(bugprone-macro-parentheses)
#define KVZAP_PACKED(Value)                                                                   \
  void packed_product(RowSpan<const float> x, const Value* block, std::int64_t padded_inputs, \
                      int outputs, float* y, std::int64_t y_stride) {                         \
    KVZAP_SELECT(product<float, Value>)(x, block, padded_inputs, outputs, y, y_stride);       \
  }                                                                                           \
  void packed_gemm(RowSpan<const float> x, const Value* block, std::int64_t padded_inputs,    \
                   int outputs, const float* bias, float* y, std::int64_t y_stride) {         \
    many::gemm(x, block, padded_inputs, outputs, bias, y, y_stride);                          \
  }
KVZAP_PACKED(float)
KVZAP_PACKED(half)
KVZAP_PACKED(bfloat16)
#undef KVZAP_PACKED

#define KVZAP_PACK_BLOCK(Value)                                                            \
  void pack_block(const Value* rows, std::int64_t stride, int n_rows, std::int64_t inputs, \
                  std::int64_t padded_inputs, Value* block) {                              \
    KVZAP_SELECT(pack_words<Value>)(rows, stride, n_rows, inputs, padded_inputs, block);   \
  }
KVZAP_PACK_BLOCK(bfloat16)
KVZAP_PACK_BLOCK(float)
#undef KVZAP_PACK_BLOCK
// NOLINTEND(bugprone-macro-parentheses)

void pack_block(const half* rows, std::int64_t stride, int n_rows, std::int64_t inputs,
                std::int64_t padded_inputs, half* block) {
  // A plain transposition suffices for the load. Its tiles stay in the first-level cache.
  for (std::int64_t begin = 0; begin < padded_inputs; begin += 32) {
    const std::int64_t end = std::min(padded_inputs, begin + 32);
    for (int n = 0; n < block_outputs; ++n) {
      for (std::int64_t k = begin; k < end; ++k) {
        block[k * block_outputs + n] = n < n_rows && k < inputs ? rows[n * stride + k] : half{0};
      }
    }
  }
}

void widen_block(const half* block, std::int64_t padded_inputs, float* target) {
  widen(block, target, padded_inputs * block_outputs);
}
void widen_block(const bfloat16* block, std::int64_t padded_inputs, float* target) {
  KVZAP_SELECT(widen_pairs<bfloat16>)(block, padded_inputs, target);
}
#undef KVZAP_SELECT

#if KVZAP_X86
KVZAP_TARGET_AVX512 void pair_block(const half* block, std::int64_t padded_inputs,
                                    std::int64_t paired_inputs, half* target) {
  const __m512i halves =
      _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                       37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high_halves = _mm512_add_epi16(halves, _mm512_set1_epi16(16));
  for (std::int64_t k = 0; k < padded_inputs; k += 2, block += 2 * block_outputs) {
    for (int n = 0; n < block_outputs; n += 32, target += 64) {
      const __m512i even = _mm512_loadu_si512(block + n);
      const __m512i odd = _mm512_loadu_si512(block + block_outputs + n);
      _mm512_storeu_si512(target, _mm512_permutex2var_epi16(even, halves, odd));
      _mm512_storeu_si512(target + 32, _mm512_permutex2var_epi16(even, high_halves, odd));
    }
  }
  std::fill_n(target, (paired_inputs - padded_inputs) * block_outputs, half{0});
}

KVZAP_TARGET_AVX512 float scale_to_half(const float* source, std::int64_t count, half* target) {
  const auto lanes = [](std::int64_t left) {
    return static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
  };
  const __m512 infinite = _mm512_set1_ps(__builtin_inff());
  __m512 most = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < count; i += 16) {
    const __m512 x = _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(count - i), source + i));
    most = _mm512_mask_max_ps(most, _mm512_cmp_ps_mask(x, infinite, _CMP_LT_OQ), most, x);
  }
  const int shift = half_shift(_mm512_reduce_max_ps(most));
  const __m512 factor = _mm512_set1_ps(power_of_two(shift));
  for (std::int64_t i = 0; i < count; i += 16) {
    const __mmask16 mask = lanes(count - i);
    const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, source + i), factor);
    _mm256_mask_storeu_epi16(target + i, mask,
                             _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return power_of_two(-shift);
}

#else
void pair_block(const half*, std::int64_t, std::int64_t, half*) {}
float scale_to_half(const float*, std::int64_t, half*) { return 1; }
#endif

}  // namespace kvzap::linalg

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
