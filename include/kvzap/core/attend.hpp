// Attention over ragged rows in the caller's own views: the portable reference. It runs on every
// execution space; attention.hpp has the fast kernels, for KVCache.
#pragma once

#include <cmath>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <kvzap/core/view_checks.hpp>
#include <limits>
#include <string>
#include <type_traits>

namespace kvzap {

/// Rows of KV heads of which each has its own number of rows, in the caller's views.
///
/// - As `compact` leaves them: keys and values (row, KV head, dim); bounds (KV head), the number of
///   rows of each head, which are its first.
/// - As `gather_kept` writes them: keys and values (row, dim); bounds (KV head + 1), as in
///   KeepList::offsets: bounds(0) is 0, and head h has rows bounds(h) … bounds(h + 1) - 1.
///
///     kvzap::RaggedRows rows{keys, values, lengths};
template <class Keys, class Values, class Bounds>
struct RaggedRows {
  static constexpr int rank = static_cast<int>(Keys::rank);
  static_assert(
      (rank == 2 || rank == 3) && rank == static_cast<int>(Values::rank),
      "kvzap::RaggedRows: keys and values are both (row, KV head, dim) or both (row, dim)");
  static_assert(Bounds::rank == 1 && std::is_integral_v<typename Bounds::non_const_value_type>,
                "kvzap::RaggedRows: bounds are integers, of rank 1");
  static_assert(base::reads_floats<Keys, Values>,
                "kvzap::RaggedRows: keys and values convert to float");

  Keys keys;
  Values values;
  Bounds bounds;

  std::int64_t heads() const {
    if (rank == 3) return static_cast<std::int64_t>(keys.extent(1));
    return bounds.extent(0) > 0 ? static_cast<std::int64_t>(bounds.extent(0)) - 1 : 0;
  }
  std::int64_t dim() const { return static_cast<std::int64_t>(keys.extent(rank - 1)); }

  KOKKOS_INLINE_FUNCTION std::int64_t begin(std::int64_t head) const {
    return rank == 3 ? 0 : static_cast<std::int64_t>(bounds(head));
  }
  KOKKOS_INLINE_FUNCTION std::int64_t end(std::int64_t head) const {
    return static_cast<std::int64_t>(bounds(rank == 3 ? head : head + 1));
  }
  KOKKOS_INLINE_FUNCTION float key(std::int64_t row, std::int64_t head, std::int64_t d) const {
    return at(keys, row, head, d);
  }
  KOKKOS_INLINE_FUNCTION float value(std::int64_t row, std::int64_t head, std::int64_t d) const {
    return at(values, row, head, d);
  }

 private:
  template <class View>
  KOKKOS_INLINE_FUNCTION static float at(const View& view, std::int64_t row,
                                         [[maybe_unused]] std::int64_t head, std::int64_t d) {
    if constexpr (rank == 3) {
      return static_cast<float>(view(row, head, d));
    } else {
      return static_cast<float>(view(row, d));
    }
  }
};
/// Deduces the types of the views.
template <class Keys, class Values, class Bounds>
RaggedRows(Keys, Values, Bounds) -> RaggedRows<Keys, Values, Bounds>;

/// How `attend` computes scores, and what a query sees.
struct AttendOptions {
  /// The last M rows of each head belong to the M query tokens: token i sees all but the rows of
  /// tokens i + 1 … M - 1. Otherwise every query sees every row.
  bool causal = false;
  /// Factor of the scores; 0: 1 / sqrt(dim).
  float scale = 0;
  /// If above 0, scaled scores s become soft_cap * tanh(s / soft_cap).
  float soft_cap = 0;
};

namespace attention {

/// The first head whose bounds do not fit the rows.
template <class Rows>
struct FindBadBounds {
  Rows rows;
  std::int64_t extent, fewest;

  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t head, std::int64_t& bad) const {
    const std::int64_t begin = rows.begin(head);
    const std::int64_t end = rows.end(head);
    // The first offset is 0: lengths in place of offsets would be read as offsets.
    const bool good =
        (head == 0 ? begin == 0 : begin >= 0) && end >= begin + fewest && end <= extent;
    if (!good && head < bad) bad = head;
  }
};

/// A team has one query head of one token. It reads the rows block by block, with an online
/// softmax. Sums are in the order of the rows, so the result does not depend on the size of the
/// team.
template <class Exec, class Queries, class Rows, class Output, class LogSumExp>
struct AttendHead {
  static constexpr int block_rows = 64;
  using Member = typename Kokkos::TeamPolicy<Exec>::member_type;
  using Scratch = Kokkos::View<float*, typename Exec::scratch_memory_space,
                               Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

  Queries queries;
  Rows rows;
  Output output;
  LogSumExp lse;
  std::int64_t heads, group, dim, tokens;
  float scale, soft_cap;
  bool causal, wants_lse;

  std::size_t scratch_bytes() const {
    return Scratch::shmem_size(block_rows) + Scratch::shmem_size(static_cast<std::size_t>(dim));
  }

  KOKKOS_INLINE_FUNCTION float score(std::int64_t token, std::int64_t head,
                                     std::int64_t row) const {
    float sum = 0;
    for (std::int64_t d = 0; d < dim; ++d) {
      sum += static_cast<float>(queries(token, head, d)) * rows.key(row, head / group, d);
    }
    sum *= scale;
    return soft_cap > 0 ? soft_cap * base::math::tanh(sum * (1.0f / soft_cap)) : sum;
  }

  KOKKOS_INLINE_FUNCTION void operator()(const Member& team) const {
    const std::int64_t token = team.league_rank() / heads;
    const std::int64_t head = team.league_rank() % heads;
    const std::int64_t kv_head = head / group;
    const std::int64_t end = rows.end(kv_head) - (causal ? tokens - 1 - token : 0);
    const int width = static_cast<int>(dim);
    const Scratch weights(team.team_scratch(0), block_rows);
    const Scratch sums(team.team_scratch(0), width);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    // Every thread computes these from the same scratch memory.
    float maximum = -infinity, total = 0;
    bool is_number = true;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, width), [&](int d) { sums(d) = 0; });
    for (std::int64_t first = rows.begin(kv_head); first < end; first += block_rows) {
      const int count = static_cast<int>(end - first < block_rows ? end - first : block_rows);
      team.team_barrier();
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, count),
                           [&](int r) { weights(r) = score(token, head, first + r); });
      team.team_barrier();
      const float before = maximum;
      for (int r = 0; r < count; ++r) {
        is_number = is_number && weights(r) < infinity;
        if (weights(r) > maximum) maximum = weights(r);
      }
      // Scores that are all -infinity have weight 0, not NaN.
      const float shift = maximum == -infinity ? 0.0f : maximum;
      const float shrink = before == -infinity ? 0.0f : base::math::exp(before - shift);
      team.team_barrier();
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, count),
                           [&](int r) { weights(r) = base::math::exp(weights(r) - shift); });
      team.team_barrier();
      total *= shrink;
      for (int r = 0; r < count; ++r) total += weights(r);
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, width), [&](int d) {
        float sum = sums(d) * shrink;
        for (int r = 0; r < count; ++r) sum += weights(r) * rows.value(first + r, kv_head, d);
        sums(d) = sum;
      });
    }
    team.team_barrier();
    // A score that is NaN or +infinity leaves no weights.
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const float factor = !is_number ? nan : total == 0 ? 0.0f : 1.0f / total;
    using Result = typename Output::value_type;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, width), [&](int d) {
      output(token, head, d) = static_cast<Result>(sums(d) * factor);
    });
    if (wants_lse && team.team_rank() == 0) {
      const float result = total == 0 ? -infinity : maximum + base::math::log(total);
      lse(token, head) = static_cast<typename LogSumExp::value_type>(is_number ? result : nan);
    }
  }
};

}  // namespace attention

/// Softmax attention of M query tokens over rows of which each KV head has its own number.
///
/// queries: (M, query head, dim), unscaled, after RoPE. Query head q reads KV head q / group, where
/// group = query heads / KV heads.
/// rows: keys and values of each KV head; see RaggedRows.
/// output: (M, query head, dim).
/// lse: (M, query head), natural logarithm of the sum of exp over the scores that a query sees; an
/// empty view if it is not needed.
///
/// Views have any layout, any memory space that `exec` can access, and values that convert to float
/// and, where they are written, from float. Sums are in float. NaN, infinite scores and queries
/// that see no row have the results that Attention documents.
///
/// One team computes one query head of one token, in team scratch memory of dim + 64 floats.
/// Computes asynchronously, after it has waited for a check of rows.bounds. Allocates nothing.
///
/// Throws Error if extents do not fit each other, or bounds do not fit the rows (with `causal`: if
/// a head has fewer than M rows).
template <class Exec, class Queries, class Rows, class Output,
          class LogSumExp = Kokkos::View<float**, typename Exec::memory_space>>
void attend(const Exec& exec, const Queries& queries, const Rows& rows, const Output& output,
            const AttendOptions& options = {}, const LogSumExp& lse = {}) {
  static_assert(Queries::rank == 3 && Output::rank == 3,
                "kvzap::attend: queries and output are (token, query head, dim)");
  static_assert(LogSumExp::rank == 2, "kvzap::attend: lse is (token, query head)");
  static_assert(base::reads_floats<Queries>, "kvzap::attend: queries convert to float");
  static_assert(base::writes_floats<Output, LogSumExp>,
                "kvzap::attend: output and lse are not const and convert from float");
  static_assert(base::reaches<Exec, Queries, Output, LogSumExp, decltype(rows.keys),
                              decltype(rows.values), decltype(rows.bounds)>,
                "kvzap::attend: the execution space cannot access all views");
  const auto tokens = static_cast<std::int64_t>(queries.extent(0));
  const auto heads = static_cast<std::int64_t>(queries.extent(1));
  const auto dim = static_cast<std::int64_t>(queries.extent(2));
  const std::int64_t kv_heads = rows.heads();
  const auto extent = static_cast<std::int64_t>(rows.keys.extent(0));
  if constexpr (Rows::rank == 3) {
    base::expect_extents("attend", "rows.keys", "(row, KV head, dim)", rows.keys,
                         {extent, kv_heads, dim});
    base::expect_extents("attend", "rows.values", "(row, KV head, dim)", rows.values,
                         {extent, kv_heads, dim});
    base::expect_extents("attend", "rows.bounds", "(KV head)", rows.bounds, {kv_heads});
  } else {
    base::expect_extents("attend", "rows.keys", "(row, dim)", rows.keys, {extent, dim});
    base::expect_extents("attend", "rows.values", "(row, dim)", rows.values, {extent, dim});
  }
  base::expect_extents("attend", "output", "(token, query head, dim)", output,
                       {tokens, heads, dim});
  const bool wants_lse = lse.size() > 0;
  if (wants_lse) {
    base::expect_extents("attend", "lse", "(token, query head)", lse, {tokens, heads});
  }
  base::expect(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, "attend",
               "queries have " + std::to_string(heads) + " heads; expected a multiple of the " +
                   std::to_string(kv_heads) + " KV heads");
  if (tokens == 0 || heads == 0 || dim == 0) return;
  base::expect(tokens <= std::numeric_limits<int>::max() / heads, "attend",
               "queries have " + std::to_string(tokens) + " tokens of " + std::to_string(heads) +
                   " heads; expected fewer than 2^31 together");

  std::int64_t bad = kv_heads;
  Kokkos::parallel_reduce(
      "kvzap::attend::check_bounds",
      Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, kv_heads),
      attention::FindBadBounds<Rows>{rows, extent, options.causal ? tokens : 0},
      Kokkos::Min<std::int64_t>(bad));
  base::expect(bad >= kv_heads, "attend",
               "rows.bounds of KV head " + std::to_string(bad) + " do not fit; expected " +
                   (Rows::rank == 3 ? "lengths of " : "offsets from 0 on, with heads of ") +
                   std::to_string(options.causal ? tokens : 0) + " … " + std::to_string(extent) +
                   " rows");

  using Functor = attention::AttendHead<Exec, Queries, Rows, Output, LogSumExp>;
  const float scale =
      options.scale != 0 ? options.scale : 1.0f / std::sqrt(static_cast<float>(dim));
  const Functor functor{queries,          rows,     output, lse,   heads,
                        heads / kv_heads, dim,      tokens, scale, options.soft_cap,
                        options.causal,   wants_lse};
  Kokkos::TeamPolicy<Exec> policy(exec, static_cast<int>(tokens * heads), Kokkos::AUTO);
  policy.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(functor.scratch_bytes())));
  Kokkos::parallel_for("kvzap::attend", policy, functor);
}

}  // namespace kvzap
