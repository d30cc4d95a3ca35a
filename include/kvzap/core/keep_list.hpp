// Prunes keys and values in the caller's own views. Input: scores. Output: a list of the kept
// pairs, and compacted rows. For engines that have their own cache; KVCache prunes itself.
#pragma once

#include <cstdint>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/types.hpp>
#include <string>
#include <type_traits>

namespace kvzap {

/// The tokens that each KV head keeps, head after head. Head h keeps tokens(offsets(h)) …
/// tokens(offsets(h + 1) - 1), ascending.
template <class Space = MemorySpace>
struct KeepList {
  Kokkos::View<std::int64_t*, Space> offsets;  // (heads + 1)
  Kokkos::View<std::int64_t*, Space> tokens;   // (rows), index into the scores' second extent
  Kokkos::View<std::int32_t*, Space> heads;    // (rows), KV head of each row
  std::int64_t extent = 0;                     // number of tokens before pruning
  std::int64_t rows = 0;                       // kept rows, over all heads
  std::int64_t judged = 0;                     // pairs that the rule has judged
  std::int64_t non_finite = 0;  // judged pairs kept because the score is NaN or infinite
};

namespace cache {

inline void check_keep_list(bool good, const char* function, const std::string& message) {
  if (!good) throw Error(std::string(function) + ": " + message);
}

}  // namespace cache

/// Judges every pair of T tokens and lists the pairs that stay.
///
/// scores: (head, token), any layout, convertible to float. Token t is at position `first` + t,
/// which the rule's sink refers to. The last `window` tokens (or all T, if there are fewer) stay
/// unjudged. The number of heads and T may be 0.
///
/// Runs two kernels, and the host waits to read one count. Work is spread over (head, token), so
/// heads of very different lengths do not slow it down. Allocates the list.
///
/// Throws Error if `window` or `first` is negative.
template <class Exec, class Scores>
KeepList<typename Scores::memory_space> list_kept(const Exec& exec, const Scores& scores,
                                                  const EvictionRule& rule, std::int64_t window = 0,
                                                  std::int64_t first = 0) {
  using Space = typename Scores::memory_space;
  static_assert(Scores::rank == 2, "kvzap::list_kept: scores are (head, token)");
  static_assert(Kokkos::SpaceAccessibility<Exec, Space>::accessible,
                "kvzap::list_kept: the execution space cannot reach the scores");
  cache::check_keep_list(window >= 0, "list_kept",
                         "window is " + std::to_string(window) + "; expected 0 or more");
  cache::check_keep_list(first >= 0, "list_kept",
                         "first is " + std::to_string(first) + "; expected 0 or more");
  const auto heads = static_cast<std::int64_t>(scores.extent(0));
  const auto tokens = static_cast<std::int64_t>(scores.extent(1));
  const std::int64_t judged_tokens = tokens > window ? tokens - window : 0;
  using Flat = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;

  KeepList<Space> list;
  list.extent = tokens;
  if (rule.judges()) list.judged = heads * judged_tokens;
  Kokkos::parallel_reduce(
      "kvzap::list_kept::count", Flat(exec, 0, heads * tokens),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & rows, std::int64_t & non_finite) {
        const std::int64_t head = i / tokens;
        const std::int64_t token = i - head * tokens;
        const float score = static_cast<float>(scores(head, token));
        const bool judged = token < judged_tokens;
        rows += !judged || rule.keeps(score, first + token);
        non_finite += judged && rule.judges() && !EvictionRule::is_finite(score);
      },
      list.rows, list.non_finite);

  const auto uninitialized = [&](const char* label) {
    return Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label));
  };
  list.offsets = Kokkos::View<std::int64_t*, Space>("kvzap::list_kept::offsets", heads + 1);
  list.tokens =
      Kokkos::View<std::int64_t*, Space>(uninitialized("kvzap::list_kept::tokens"), list.rows);
  list.heads =
      Kokkos::View<std::int32_t*, Space>(uninitialized("kvzap::list_kept::heads"), list.rows);
  const auto offsets = list.offsets;
  const auto kept_tokens = list.tokens;
  const auto kept_heads = list.heads;
  Kokkos::parallel_scan(
      "kvzap::list_kept::fill", Flat(exec, 0, heads * tokens),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & row, bool is_final) {
        const std::int64_t head = i / tokens;
        const std::int64_t token = i - head * tokens;
        const bool keeps = token >= judged_tokens ||
                           rule.keeps(static_cast<float>(scores(head, token)), first + token);
        if (is_final && keeps) {
          kept_tokens(row) = token;
          kept_heads(row) = static_cast<std::int32_t>(head);
        }
        row += keeps;
        if (is_final && token == tokens - 1) offsets(head + 1) = row;
      });
  return list;
}

/// Copies the kept rows of keys (or values) to consecutive rows.
///
/// rows: (token, head, dim). kept_rows: (kept row, dim), with list.rows rows. The views may have
/// any two layouts, have one value type and must not overlap. Head h's rows are
/// kept_rows(list.offsets(h) … list.offsets(h + 1) - 1, ·), in order of position. Asynchronous on
/// `exec`.
///
/// Throws Error on extents that do not fit the list or each other.
template <class Exec, class Space, class Rows, class KeptRows>
void gather_kept(const Exec& exec, const KeepList<Space>& list, const Rows& rows,
                 const KeptRows& kept_rows) {
  static_assert(Rows::rank == 3, "kvzap::gather_kept: rows are (token, head, dim)");
  static_assert(KeptRows::rank == 2, "kvzap::gather_kept: kept_rows are (kept row, dim)");
  static_assert(std::is_same_v<typename Rows::non_const_value_type, typename KeptRows::value_type>,
                "kvzap::gather_kept: both views have the same value type, the target not const");
  static_assert(Kokkos::SpaceAccessibility<Exec, Space>::accessible &&
                    Kokkos::SpaceAccessibility<Exec, typename Rows::memory_space>::accessible &&
                    Kokkos::SpaceAccessibility<Exec, typename KeptRows::memory_space>::accessible,
                "kvzap::gather_kept: the execution space cannot reach all views");
  const auto extent = static_cast<std::int64_t>(rows.extent(0));
  const auto dim = static_cast<std::int64_t>(rows.extent(2));
  const auto heads = static_cast<std::int64_t>(rows.extent(1));
  const auto listed = static_cast<std::int64_t>(list.offsets.extent(0)) - 1;
  cache::check_keep_list(extent == list.extent && heads == listed, "gather_kept",
                         "rows are of " + std::to_string(extent) + " tokens and " +
                             std::to_string(heads) + " heads; the list is of " +
                             std::to_string(list.extent) + " and " + std::to_string(listed));
  cache::check_keep_list(static_cast<std::int64_t>(kept_rows.extent(0)) == list.rows &&
                             static_cast<std::int64_t>(kept_rows.extent(1)) == dim,
                         "gather_kept",
                         "kept_rows are " + std::to_string(kept_rows.extent(0)) + " x " +
                             std::to_string(kept_rows.extent(1)) + "; expected " +
                             std::to_string(list.rows) + " x " + std::to_string(dim));
  if (list.rows == 0 || dim == 0) return;
  const auto tokens = list.tokens;
  const auto of_head = list.heads;
  // Keeps the dimensions of a row together, in a cache line or in the threads of a warp.
  using Policy =
      Kokkos::MDRangePolicy<Exec, Kokkos::Rank<2, Kokkos::Iterate::Right, Kokkos::Iterate::Right>,
                            Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_for(
      "kvzap::gather_kept::copy",
      Policy(exec, {std::int64_t{0}, std::int64_t{0}}, {list.rows, dim}),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t d) {
        kept_rows(row, d) = rows(tokens(row), of_head(row), d);
      });
}

}  // namespace kvzap
