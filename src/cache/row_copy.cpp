#include "cache/row_copy.hpp"

#include <cstring>
#include <kvzap/core/eviction.hpp>

#include "base/simd.hpp"
#if KVZAP_X86
#include <immintrin.h>
#endif

namespace kvzap::cache {
namespace {

RowPath current_path = RowPath::automatic;

constexpr std::size_t line_bytes = 64;

KVZAP_BODY void prefetch_row([[maybe_unused]] const char* row,
                             [[maybe_unused]] std::size_t row_bytes) {
#if defined(__GNUC__)
  // Prefetches into the second-level cache: the first one is too small for a dozen rows of keys and
  // values.
  for (std::size_t b = 0; b < row_bytes; b += line_bytes) __builtin_prefetch(row + b, 0, 2);
#endif
}

void gather_stored(const char* const* rows, std::int64_t n, char* target, std::size_t row_bytes) {
  for (std::int64_t i = 0; i < n; ++i) {
    prefetch_row(rows[i + prefetch_rows], row_bytes);
    std::memcpy(target + i * row_bytes, rows[i], row_bytes);
  }
}

KVZAP_BODY std::int64_t list_one_by_one(const float* scores, std::int64_t n, float threshold,
                                        std::int32_t first, std::int32_t* kept,
                                        std::int64_t& non_finite) {
  const EvictionRule rule{threshold, 0, true};
  std::int64_t n_kept = 0;
  std::int64_t odd = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    kept[n_kept] = first + static_cast<std::int32_t>(i);
    n_kept += rule.keeps(scores[i], i) ? 1 : 0;
    odd += EvictionRule::is_finite(scores[i]) ? 0 : 1;
  }
  non_finite += odd;
  return n_kept;
}

#if KVZAP_X86
KVZAP_TARGET_AVX512 std::int64_t list_retained_avx512(const float* scores, std::int64_t n,
                                                      float threshold, std::int32_t first,
                                                      std::int32_t* kept,
                                                      std::int64_t& non_finite) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  const __m512 limit = _mm512_set1_ps(threshold);
  __m512i numbers =
      _mm512_add_epi32(_mm512_set1_epi32(first),
                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  std::int64_t n_kept = 0;
  std::int64_t odd_scores = 0;
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 score = _mm512_loadu_ps(scores + i);
    const __mmask16 odd =
        _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(score), exponent), exponent);
    const __mmask16 keep = odd | _mm512_cmp_ps_mask(score, limit, _CMP_GE_OQ);
    // Writes all sixteen. This is safe, because at most one number per score has been listed.
    _mm512_storeu_si512(kept + n_kept, _mm512_maskz_compress_epi32(keep, numbers));
    n_kept += __builtin_popcount(keep);
    odd_scores += __builtin_popcount(odd);
    numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(16));
  }
  non_finite += odd_scores;
  return n_kept + list_one_by_one(scores + i, n - i, threshold,
                                  first + static_cast<std::int32_t>(i), kept + n_kept, non_finite);
}

void gather_streamed_sse2(const char* const* rows, std::int64_t n, char* target,
                          std::size_t row_bytes) {
  for (std::int64_t i = 0; i < n; ++i) {
    prefetch_row(rows[i + prefetch_rows], row_bytes);
    for (std::size_t b = 0; b < row_bytes; b += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + b),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + b)));
    }
    target += row_bytes;
  }
}

// Copies whole cache lines.
KVZAP_TARGET_AVX512 void gather_streamed_avx512(const char* const* rows, std::int64_t n,
                                                char* target, std::size_t row_bytes) {
  for (std::int64_t i = 0; i < n; ++i) {
    prefetch_row(rows[i + prefetch_rows], row_bytes);
    for (std::size_t b = 0; b < row_bytes; b += line_bytes) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + b), _mm512_loadu_si512(rows[i] + b));
    }
    target += row_bytes;
  }
}
#endif

}  // namespace

std::int64_t list_retained(const float* scores, std::int64_t n, float threshold, std::int32_t first,
                           std::int32_t* kept, std::int64_t& non_finite) {
#if KVZAP_X86
  if (base::machine().has(base::SimdLevel::avx512)) {
    return list_retained_avx512(scores, n, threshold, first, kept, non_finite);
  }
#endif
  return list_one_by_one(scores, n, threshold, first, kept, non_finite);
}

RowPath row_path() { return current_path; }
void set_row_path(RowPath path) { current_path = path; }

void gather_rows(const char* const* rows, std::int64_t n, char* target, std::size_t row_bytes,
                 [[maybe_unused]] bool stream) {
#if KVZAP_X86
  if (stream) {
    const bool whole_lines =
        row_bytes % line_bytes == 0 && reinterpret_cast<std::uintptr_t>(target) % line_bytes == 0;
    if (whole_lines && base::machine().has(base::SimdLevel::avx512)) {
      gather_streamed_avx512(rows, n, target, row_bytes);
    } else {
      gather_streamed_sse2(rows, n, target, row_bytes);
    }
    return;
  }
#endif
  gather_stored(rows, n, target, row_bytes);
}

void stream_fence() {
#if KVZAP_X86
  _mm_sfence();
#endif
}

}  // namespace kvzap::cache
