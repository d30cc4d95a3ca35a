// Moves the kept rows of a caller's own views: to the front of each head, or into another view.
#pragma once

#include <cstdint>
#include <kvzap/core/keep_list.hpp>
#include <kvzap/core/view_checks.hpp>
#include <string>
#include <type_traits>

namespace kvzap {

namespace cache {

/// Moves the kept rows of a head to its front, ascending. A work item has some dimensions of one
/// head. It reads row j from token t(j) >= j, and t ascends, so it overwrites no row that it still
/// has to read. No other work item touches these dimensions. So neither order nor a copy matter.
template <class Rows, class Space>
struct MoveToFront {
  Rows rows;  // (token, head, dim) or (head, token)
  Kokkos::View<const std::int64_t*, Space> offsets, tokens;
  std::int64_t items;  // per head
  std::int64_t width;  // dimensions of an item

  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t head = i / items;
    const std::int64_t begin = offsets(head);
    const std::int64_t end = offsets(head + 1);
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = tokens(row);
      if (token == row - begin) continue;
      if constexpr (static_cast<int>(Rows::rank) == 2) {
        rows(head, row - begin) = rows(head, token);
      } else {
        const auto dim = static_cast<std::int64_t>(rows.extent(2));
        const std::int64_t first = i % items * width;
        const std::int64_t last = first + width < dim ? first + width : dim;
        for (std::int64_t d = first; d < last; ++d) {
          rows(row - begin, head, d) = rows(token, head, d);
        }
      }
    }
  }
};

template <class Exec, class Space, class Rows>
void move_to_front(const Exec& exec, const KeepList<Space>& list, const Rows& rows) {
  constexpr int rank = static_cast<int>(Rows::rank);
  static_assert(rank == 2 || rank == 3,
                "kvzap::compact: arrays are (token, head, dim) or (head, token)");
  static_assert(!std::is_const_v<typename Rows::value_type>,
                "kvzap::compact: arrays are not const");
  static_assert(base::reaches<Exec, Rows> && Kokkos::SpaceAccessibility<Exec, Space>::accessible,
                "kvzap::compact: the execution space cannot access the list and all arrays");
  const auto heads = static_cast<std::int64_t>(list.offsets.extent(0)) - 1;
  std::int64_t items = 1, width = 1;
  if constexpr (rank == 2) {
    base::expect_extents("compact", "an array", "(head, token) of the list", rows,
                         {heads, list.extent});
  } else {
    const auto dim = static_cast<std::int64_t>(rows.extent(2));
    base::expect_extents("compact", "an array", "(token, head, dim) of the list", rows,
                         {list.extent, heads, dim});
    // Neighbouring threads of a device have neighbouring dimensions; a thread of a host has cache
    // lines of its own.
    constexpr bool is_host = Kokkos::SpaceAccessibility<Exec, Kokkos::HostSpace>::accessible;
    width = is_host ? 64 : 1;
    items = (dim + width - 1) / width;
  }
  Kokkos::parallel_for(
      "kvzap::compact::move",
      Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, heads * items),
      MoveToFront<Rows, Space>{rows, list.offsets, list.tokens, items, width});
}

}  // namespace cache

/// Moves the kept rows of each head to its front, in place, and returns the number of rows of each
/// head, (head).
///
/// arrays: keys, values and any others, (token, head, dim) with any dim, or (head, token), such as
/// scores and positions. Any layouts, memory spaces that `exec` can access and value types. In
/// each, rows 0 … length(h) - 1 of head h are then the kept ones, in order of position. Later rows
/// keep values that mean nothing.
///
/// Asynchronous on `exec`. Allocates the lengths. Head h takes as long as its rows, whatever the
/// other heads have: work is spread over (head, dim).
///
/// Throws Error if an array's extents do not fit the list.
template <class Exec, class Space, class... Arrays>
Kokkos::View<std::int64_t*, Space> compact(const Exec& exec, const KeepList<Space>& list,
                                           const Arrays&... arrays) {
  static_assert(sizeof...(Arrays) > 0, "kvzap::compact: at least one array");
  (cache::move_to_front(exec, list, arrays), ...);
  const auto heads = static_cast<std::int64_t>(list.offsets.extent(0)) - 1;
  const Kokkos::View<std::int64_t*, Space> lengths("kvzap::compact::lengths", heads);
  const auto offsets = list.offsets;
  Kokkos::parallel_for(
      "kvzap::compact::lengths",
      Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, heads),
      KOKKOS_LAMBDA(std::int64_t head) { lengths(head) = offsets(head + 1) - offsets(head); });
  return lengths;
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
  static_assert(
      base::reaches<Exec, Rows, KeptRows> && Kokkos::SpaceAccessibility<Exec, Space>::accessible,
      "kvzap::gather_kept: the execution space cannot access all views");
  const auto dim = static_cast<std::int64_t>(rows.extent(2));
  const auto heads = static_cast<std::int64_t>(list.offsets.extent(0)) - 1;
  base::expect_extents("gather_kept", "rows", "(token, head, dim) of the list", rows,
                       {list.extent, heads, dim});
  base::expect_extents("gather_kept", "kept_rows", "(kept row, dim)", kept_rows, {list.rows, dim});
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
