// Selects the pairs that stay, from scores in the caller's own views. For engines that have their
// own cache; KVCache prunes itself. compact.hpp moves the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <kvzap/core/eviction.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/core/view_checks.hpp>
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

/// Which pairs `select` keeps: by threshold, by budget or by both. Without either, every pair.
///
///     kvzap::SelectRule rule;
///     rule.threshold = -4;  // pairs that score below -4 are evicted …
///     rule.window = 128;    // … once 128 newer tokens exist
struct SelectRule : EvictionRule {
  /// Pairs of the last `window` tokens stay.
  std::int64_t window = 0;
  /// Position of token 0, to which `sink` refers.
  std::int64_t first = 0;
  /// Pairs that each KV head keeps at most, those of the largest scores; negative: no budget.
  std::int64_t budget = -1;
  /// Whether the heads compete for heads * budget pairs. Otherwise each head keeps its own number.
  bool pooled = false;

  KOKKOS_INLINE_FUNCTION bool has_budget() const { return judge && budget >= 0; }
};

namespace selection {

/// The order of scores as integers. Pairs that stay whatever they score have the largest key.
inline constexpr std::uint32_t always = 0xffffffffu;

KOKKOS_INLINE_FUNCTION std::uint32_t key_of_finite(float score) {
  const std::uint32_t bits = base::float_bits(score);
  if ((bits & 0x7fffffffu) == 0) return 0x80000000u;  // -0 is 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// The pairs of a call of `select`, one after the other: head after head, by token.
template <class Scores>
struct Pairs {
  Scores scores;  // (head, token)
  SelectRule rule;
  std::int64_t tokens, judged_tokens;

  KOKKOS_INLINE_FUNCTION std::int64_t head(std::int64_t i) const { return i / tokens; }
  KOKKOS_INLINE_FUNCTION std::int64_t token(std::int64_t i) const { return i % tokens; }
  KOKKOS_INLINE_FUNCTION std::int64_t pool(std::int64_t i) const {
    return rule.pooled ? 0 : head(i);
  }
  KOKKOS_INLINE_FUNCTION float score(std::int64_t i) const {
    return static_cast<float>(scores(head(i), token(i)));
  }
  KOKKOS_INLINE_FUNCTION std::uint32_t key(std::int64_t i) const {
    const std::int64_t at = token(i);
    const float value = score(i);
    const bool stays =
        at >= judged_tokens || rule.first + at < rule.sink || !EvictionRule::is_finite(value);
    return stays ? always : key_of_finite(value);
  }
};

/// The smallest key that stays in each pool, and how many of the pairs with this key stay. Four
/// passes find it, 8 bits at a time, from the top.
template <class Space>
struct Cuts {
  static constexpr int bins = 256;
  Kokkos::View<std::uint32_t*, Space> key;              // (pool)
  Kokkos::View<std::int64_t*, Space> places;            // (pool)
  Kokkos::View<std::int64_t*, Space> ties_before;       // (pool + 1): of the pools before
  Kokkos::View<std::int64_t* [bins], Space> histogram;  // (pool, bin)
};

/// Counts the pairs whose key begins as the pool's cut does by the next 8 bits.
template <class Scores, class Space>
struct CountKeys {
  Pairs<Scores> pairs;
  Cuts<Space> cuts;
  int shift;

  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t i) const {
    const std::uint32_t key = pairs.key(i);
    const std::int64_t pool = pairs.pool(i);
    if (shift < 24 && (key >> (shift + 8)) != cuts.key(pool)) return;
    Kokkos::atomic_add(&cuts.histogram(pool, (key >> shift) & 255u), std::int64_t{1});
  }
};

/// Takes the bin in which the last place lies.
template <class Space>
struct ChooseBin {
  Cuts<Space> cuts;

  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t pool) const {
    std::int64_t places = cuts.places(pool);
    int bin = Cuts<Space>::bins - 1;
    for (; bin > 0 && cuts.histogram(pool, bin) < places; --bin) {
      places -= cuts.histogram(pool, bin);
    }
    cuts.ties_before(pool + 1) = cuts.histogram(pool, bin);
    cuts.key(pool) = cuts.key(pool) << 8 | static_cast<std::uint32_t>(bin);
    cuts.places(pool) = places;
    for (int other = 0; other < Cuts<Space>::bins; ++other) cuts.histogram(pool, other) = 0;
  }
};

/// Turns the number of ties of each pool into the number of those of the pools before.
template <class Space>
struct SumTies {
  using value_type = std::int64_t;
  Cuts<Space> cuts;

  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t pool, std::int64_t& ties,
                                         bool is_final) const {
    ties += cuts.ties_before(pool + 1);
    if (is_final) cuts.ties_before(pool + 1) = ties;
  }
};

template <class Exec, class Scores, class Space>
Cuts<Space> find_cuts(const Exec& exec, const Pairs<Scores>& pairs, std::int64_t heads) {
  using Range = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;
  const std::int64_t pools = pairs.rule.pooled ? 1 : heads;
  const std::int64_t heads_of_pool = pairs.rule.pooled ? heads : 1;
  Cuts<Space> cuts;
  cuts.key = Kokkos::View<std::uint32_t*, Space>("kvzap::select::key", pools);
  cuts.places = Kokkos::View<std::int64_t*, Space>("kvzap::select::places", pools);
  cuts.ties_before = Kokkos::View<std::int64_t*, Space>("kvzap::select::ties", pools + 1);
  cuts.histogram =
      Kokkos::View<std::int64_t * [Cuts<Space>::bins], Space>("kvzap::select::histogram", pools);
  Kokkos::deep_copy(exec, cuts.places, std::min(pairs.rule.budget, pairs.tokens) * heads_of_pool);
  for (int shift = 24; shift >= 0; shift -= 8) {
    Kokkos::parallel_for("kvzap::select::count_keys", Range(exec, 0, heads * pairs.tokens),
                         CountKeys<Scores, Space>{pairs, cuts, shift});
    Kokkos::parallel_for("kvzap::select::choose_bin", Range(exec, 0, pools),
                         ChooseBin<Space>{cuts});
  }
  Kokkos::parallel_scan("kvzap::select::sum_ties", Range(exec, 0, pools), SumTies<Space>{cuts});
  return cuts;
}

/// (head, token): whether the pair stays.
template <class Space>
using KeepFlags = Kokkos::View<bool**, Kokkos::LayoutRight, Space>;

/// Flags each pair. The scan counts the pairs with just the score of their pool's cut: the first of
/// them stay, in order of head and position.
template <class Scores, class Space>
struct FlagPairs {
  using value_type = std::int64_t;
  Pairs<Scores> pairs;
  Cuts<Space> cuts;
  KeepFlags<Space> flags;

  KOKKOS_INLINE_FUNCTION void operator()(std::int64_t i, std::int64_t& ties, bool is_final) const {
    const SelectRule& rule = pairs.rule;
    const std::int64_t token = pairs.token(i);
    const float score = pairs.score(i);
    bool stays = token >= pairs.judged_tokens || rule.keeps(score, rule.first + token);
    if (rule.has_budget()) {
      const std::uint32_t key = pairs.key(i);
      const std::int64_t pool = pairs.pool(i);
      const bool is_tie = key == cuts.key(pool);
      const bool has_place = is_tie && ties - cuts.ties_before(pool) < cuts.places(pool);
      stays = stays && (key == always || key > cuts.key(pool) || has_place);
      ties += is_tie;
    }
    if (is_final) flags(pairs.head(i), token) = stays;
  }
};

}  // namespace selection

/// Lists the pairs whose flag is not 0: the choice of a rule of your own.
///
/// flags: (head, token), any layout, convertible to bool. The number of heads and T may be 0.
///
/// A reduction and a scan, spread over (head, token); the host waits to read the counts. Allocates
/// the list.
template <class Exec, class Flags>
KeepList<typename Flags::memory_space> list_flagged(const Exec& exec, const Flags& flags) {
  using Space = typename Flags::memory_space;
  static_assert(Flags::rank == 2, "kvzap::list_flagged: flags are (head, token)");
  static_assert(base::reaches<Exec, Flags>,
                "kvzap::list_flagged: the execution space cannot access the flags");
  const auto heads = static_cast<std::int64_t>(flags.extent(0));
  const auto tokens = static_cast<std::int64_t>(flags.extent(1));
  using Flat = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;

  KeepList<Space> list;
  list.extent = tokens;
  Kokkos::parallel_reduce(
      "kvzap::list_flagged::count", Flat(exec, 0, heads * tokens),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & rows) {
        rows += static_cast<bool>(flags(i / tokens, i % tokens));
      },
      list.rows);

  const auto uninitialized = [&](const char* label) {
    return Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label));
  };
  list.offsets = Kokkos::View<std::int64_t*, Space>("kvzap::list_flagged::offsets", heads + 1);
  list.tokens =
      Kokkos::View<std::int64_t*, Space>(uninitialized("kvzap::list_flagged::tokens"), list.rows);
  list.heads =
      Kokkos::View<std::int32_t*, Space>(uninitialized("kvzap::list_flagged::heads"), list.rows);
  const auto offsets = list.offsets;
  const auto kept_tokens = list.tokens;
  const auto kept_heads = list.heads;
  Kokkos::parallel_scan(
      "kvzap::list_flagged::fill", Flat(exec, 0, heads * tokens),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & row, bool is_final) {
        const std::int64_t head = i / tokens;
        const std::int64_t token = i - head * tokens;
        const bool keeps = static_cast<bool>(flags(head, token));
        if (is_final && keeps) {
          kept_tokens(row) = token;
          kept_heads(row) = static_cast<std::int32_t>(head);
        }
        row += keeps;
        if (is_final && token == tokens - 1) offsets(head + 1) = row;
      });
  return list;
}

/// Judges every pair of T tokens and lists the pairs that stay.
///
/// scores: (head, token), any layout, any memory space that `exec` can access, values that convert
/// to float. Token t is at position rule.first + t. The number of heads and T may be 0.
///
/// - A threshold evicts the pairs that score below it.
/// - A budget keeps the pairs of the largest scores. Pairs of the window and of sinks, and those
///   whose score is NaN or infinite, take the first places. They stay even if they are more than
///   the budget. Ties stay in order of head and position.
/// - With both, a pair must pass both.
///
/// Work is spread over (head, token), so heads of very different lengths do not slow it down. The
/// host waits to read the counts. Allocates the list, and scratch memory of one byte for each pair
/// and, with a budget, 2 kB for each head.
///
/// Throws Error if rule.window or rule.first is negative.
template <class Exec, class Scores>
KeepList<typename Scores::memory_space> select(const Exec& exec, const Scores& scores,
                                               const SelectRule& rule) {
  using Space = typename Scores::memory_space;
  static_assert(Scores::rank == 2, "kvzap::select: scores are (head, token)");
  static_assert(base::reads_floats<Scores>, "kvzap::select: scores convert to float");
  static_assert(base::reaches<Exec, Scores>,
                "kvzap::select: the execution space cannot access the scores");
  base::expect(rule.window >= 0, "select",
               "rule.window is " + std::to_string(rule.window) + "; expected 0 or more");
  base::expect(rule.first >= 0, "select",
               "rule.first is " + std::to_string(rule.first) + "; expected 0 or more");
  const auto heads = static_cast<std::int64_t>(scores.extent(0));
  const auto tokens = static_cast<std::int64_t>(scores.extent(1));
  const std::int64_t judged_tokens = tokens > rule.window ? tokens - rule.window : 0;
  using Flat = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;

  const selection::Pairs<Scores> pairs{scores, rule, tokens, judged_tokens};
  selection::Cuts<Space> cuts;
  if (rule.has_budget()) cuts = selection::find_cuts<Exec, Scores, Space>(exec, pairs, heads);
  const selection::KeepFlags<Space> flags(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::select::flags"), heads, tokens);
  Kokkos::parallel_scan("kvzap::select::flag", Flat(exec, 0, heads * tokens),
                        selection::FlagPairs<Scores, Space>{pairs, cuts, flags});
  auto list = list_flagged(exec, flags);
  if (!rule.judges() && !rule.has_budget()) return list;
  list.judged = heads * judged_tokens;
  Kokkos::parallel_reduce(
      "kvzap::select::count_non_finite", Flat(exec, 0, heads * tokens),
      KOKKOS_LAMBDA(std::int64_t i, std::int64_t & count) {
        count += pairs.token(i) < judged_tokens && !EvictionRule::is_finite(pairs.score(i));
      },
      list.non_finite);
  return list;
}

}  // namespace kvzap
