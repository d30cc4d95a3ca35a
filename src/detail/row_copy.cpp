#include "row_copy.hpp"

#include <cstring>

#include "simd.hpp"
#if KVZAP_X86
#include <immintrin.h>
#endif

namespace kvzap::detail {
namespace {

RowPath current_path = RowPath::automatic;

constexpr std::size_t line_bytes = 64;

KVZAP_BODY void prefetch_row([[maybe_unused]] const char* row,
                             [[maybe_unused]] std::size_t row_bytes) {
#if defined(__GNUC__)
  // Into the second-level cache: a dozen rows of keys and of values would crowd the first.
  for (std::size_t b = 0; b < row_bytes; b += line_bytes) __builtin_prefetch(row + b, 0, 2);
#endif
}

void gather_stored(const char* const* rows, std::int64_t n, char* target, std::size_t row_bytes) {
  for (std::int64_t i = 0; i < n; ++i) {
    prefetch_row(rows[i + prefetch_rows], row_bytes);
    std::memcpy(target + i * row_bytes, rows[i], row_bytes);
  }
}

#if KVZAP_X86
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

// Whole cache lines at a time.
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

RowPath row_path() { return current_path; }
void set_row_path(RowPath path) { current_path = path; }

void gather_rows(const char* const* rows, std::int64_t n, char* target, std::size_t row_bytes,
                 bool stream) {
#if KVZAP_X86
  if (stream) {
    const bool whole_lines =
        row_bytes % line_bytes == 0 && reinterpret_cast<std::uintptr_t>(target) % line_bytes == 0;
    if (whole_lines && simd_level() >= SimdLevel::avx512) {
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

}  // namespace kvzap::detail
