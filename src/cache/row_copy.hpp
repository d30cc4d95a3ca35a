// Bulk eviction on the host: scores become lists of kept rows, and rows are copied with prefetches
// and non-temporal stores.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvzap::cache {

/// Lists the scores that keep their pair, as EvictionRule::keeps does after the sink.
///
/// Scores 0 … n - 1 have the numbers first, first + 1, …. Writes the numbers of scores that are at
/// least `threshold`, NaN or infinite to `kept`, which has space for n. Adds the number of NaN and
/// infinite scores to non_finite. Returns the length of the list.
std::int64_t list_retained(const float* scores, std::int64_t n, float threshold, std::int32_t first,
                           std::int32_t* kept, std::int64_t& non_finite);

/// The code that moves rows on a host backend.
enum class RowPath {
  automatic,  // ordinary or streaming, by the number of bytes
  portable,   // the Kokkos kernels, as on a device
  ordinary,   // host loops row by row
  streaming   // host loops over lists of rows, with prefetches and non-temporal stores
};

RowPath row_path();
/// Sets the path, for tests and benchmarks. Do not call it while kernels run.
void set_row_path(RowPath path);

/// Rows are streamed from this number of bytes on. A decode step moves far fewer. A larger amount
/// would not stay in a near cache for the next reader.
inline constexpr std::int64_t streaming_bytes = std::int64_t{256} * 1024;

/// The prefetch distance of gather_rows, in rows.
inline constexpr int prefetch_rows = 12;

/// Copies rows[0] … rows[n - 1], of row_bytes each, to consecutive memory at `target`.
///
/// Prefetches up to rows[n - 1 + prefetch_rows], which must be an address too. With `stream` the
/// stores bypass the caches and are not ordered before stream_fence; row_bytes and `target` must
/// then be multiples of 16. The target may overlap rows that were copied before.
void gather_rows(const char* const* rows, std::int64_t n, char* target, std::size_t row_bytes,
                 bool stream);

/// Orders streamed stores before all later stores.
void stream_fence();

}  // namespace kvzap::cache
