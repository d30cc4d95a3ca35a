// Eviction in bulk on the host: scores judged into lists of rows, rows prefetched from where they
// are and streamed to where they go.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvzap::detail {

/// Writes the numbers first, first + 1, … of those of `n` scores that keep their pair to `kept`,
/// which has room for n, and returns how many: scores of at least `threshold`, and those that are
/// NaN or infinite, which are added to non_finite (EvictionRule::keeps behind the sink).
std::int64_t list_retained(const float* scores, std::int64_t n, float threshold, std::int32_t first,
                           std::int32_t* kept, std::int64_t& non_finite);

/// How a cache moves rows on a host backend.
enum class RowPath {
  automatic,  // by the number of bytes
  portable,   // the Kokkos kernels, as on a device
  ordinary,   // host loops row by row
  streaming   // host loops over lists of rows, with prefetches and non-temporal stores
};

RowPath row_path();
/// Uses another path from now on, for tests and benchmarks; not while kernels run.
void set_row_path(RowPath path);

/// Bytes from which on rows are streamed: many more than a decode step moves, and so many that the
/// next reader would not find them in a cache near the core anyway.
inline constexpr std::int64_t streaming_bytes = std::int64_t{256} * 1024;

/// How many rows ahead gather_rows prefetches.
inline constexpr int prefetch_rows = 12;

/// Copies rows[0] … rows[n - 1], of row_bytes each, one after the other to `target`, prefetching
/// rows up to rows[n - 1 + prefetch_rows], which hence is an address too. With `stream` the stores
/// bypass the caches (they are not ordered before stream_fence), which needs row_bytes and `target`
/// to be multiples of 16. A target may lie in memory of rows that were copied before.
void gather_rows(const char* const* rows, std::int64_t n, char* target, std::size_t row_bytes,
                 bool stream);

/// Orders streamed stores before all that follow.
void stream_fence();

}  // namespace kvzap::detail
