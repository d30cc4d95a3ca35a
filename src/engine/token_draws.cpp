#include "engine/token_draws.hpp"

#include <algorithm>
#include <cmath>

#include "base/host_threads.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "base/team.hpp"
#include "engine/draw_token.hpp"

namespace kvzap::engine {
namespace {

using base::TeamMember;

constexpr int chunk = 2048;  // tokens that a team sorts
constexpr int run = 32;      // weights that a thread sums, one after the other
constexpr int sorting_threads = 256, drawing_threads = 128;
constexpr std::int64_t most_bytes = std::int64_t{64} << 20;
constexpr std::int64_t token_bytes = sizeof(std::uint32_t) + sizeof(std::uint16_t) + sizeof(double);

std::int64_t chunks_of(std::int64_t vocabulary) { return (vocabulary + chunk - 1) / chunk; }

// Returns the number of rows whose chunks are sorted by one launch.
std::int64_t rows_at_once(std::int64_t rows, std::int64_t vocabulary) {
  const std::int64_t row_bytes = chunks_of(vocabulary) * chunk * token_bytes;
  return std::min(rows, std::max<std::int64_t>(1, most_bytes / row_bytes));
}

// Keys order as logits do. NaN is above all.
constexpr std::uint32_t key_of_infinity = 0xff800000u, key_of_minus_infinity = 0x007fffffu;

KOKKOS_INLINE_FUNCTION std::uint32_t key_of(float logit) {
  if (logit != logit) return 0xffffffffu;
  const std::uint32_t bits = base::float_bits(logit + 0.0f);  // -0 becomes 0
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

KOKKOS_INLINE_FUNCTION double logit_of(std::uint32_t key) {
  return base::bits_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

// Of a token with this key, relative to one with key `largest`, which is finite.
KOKKOS_INLINE_FUNCTION double weight_of(std::uint32_t key, std::uint32_t largest,
                                        double temperature) {
  if (key == largest) return 1;
  if (key <= key_of_minus_infinity) return 0;
  return base::math::exp((logit_of(key) - logit_of(largest)) / temperature);
}

// The rows of one launch. Pointers instead of views keep the arguments of kernels short.
struct Chunks {
  const TokenDraws::Row* rows;  // (slot)
  std::int64_t vocabulary;
  int chunks;
  std::uint32_t* keys;  // (slot, chunk, place): the largest first
  std::uint16_t* places;
  double* sums;  // of weights relative to the chunk's largest

  KOKKOS_INLINE_FUNCTION std::int64_t first(int slot, int of) const {
    return (std::int64_t{slot} * chunks + of) * chunk;
  }
  KOKKOS_INLINE_FUNCTION int count(int of) const {
    const std::int64_t rest = vocabulary - std::int64_t{of} * chunk;
    return rest < chunk ? static_cast<int>(rest) : chunk;
  }
};

// Sorts size = 2^n entries, the smallest first: Batcher's bitonic network.
KOKKOS_INLINE_FUNCTION void sort(const TeamMember& team, std::uint64_t* entries, int size) {
  for (int width = 2; width <= size; width *= 2) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
      Kokkos::parallel_for(Kokkos::TeamVectorRange(team, size / 2), [&](int pair) {
        const int a = ((pair & ~(distance - 1)) << 1) | (pair & (distance - 1));
        const int b = a + distance;
        const std::uint64_t of_a = entries[a], of_b = entries[b];
        if ((of_a > of_b) != ((a & width) == 0)) return;
        entries[a] = of_b;
        entries[b] = of_a;
      });
      team.team_barrier();
    }
  }
}

// Replaces weights by their sums up to each, in an order that `size` decides. ends: a number for
// each run.
KOKKOS_INLINE_FUNCTION void sum(const TeamMember& team, double* weights, double* ends, int size) {
  const int runs = (size + run - 1) / run;
  Kokkos::parallel_for(Kokkos::TeamVectorRange(team, runs), [&](int r) {
    const int end = (r + 1) * run < size ? (r + 1) * run : size;
    double total = 0;
    for (int i = r * run; i < end; ++i) weights[i] = total += weights[i];
    ends[r] = total;
  });
  team.team_barrier();
  Kokkos::single(Kokkos::PerTeam(team), [&] {
    for (int r = 1; r < runs; ++r) ends[r] += ends[r - 1];
  });
  team.team_barrier();
  Kokkos::parallel_for(Kokkos::TeamVectorRange(team, size), [&](int i) {
    if (i >= run) weights[i] += ends[i / run - 1];
  });
  team.team_barrier();
}

// A team for each chunk of each row.
void sort_chunks(const ExecutionSpace& exec, std::int64_t rows, const Chunks& all,
                 const linalg::ConstMatrix& logits) {
  int size = 1;
  while (size < chunk && size < all.vocabulary) size *= 2;
  const float* const first_logit = logits.data();
  const auto stride = static_cast<std::int64_t>(logits.stride(0));
  const std::size_t bytes =
      size * (sizeof(std::uint64_t) + sizeof(double)) + (size + run - 1) / run * sizeof(double);
  const auto kernel = KOKKOS_LAMBDA(const TeamMember& team) {
    const int slot = team.league_rank() / all.chunks, of = team.league_rank() % all.chunks;
    const TokenDraws::Row own = all.rows[slot];
    const float* const values = first_logit + own.row * stride + std::int64_t{of} * chunk;
    const int count = all.count(of);
    auto* const entries =
        static_cast<std::uint64_t*>(team.team_scratch(0).get_shmem_aligned(bytes, 16));
    auto* const weights = reinterpret_cast<double*>(entries + size);
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, size), [&](int i) {
      const std::uint64_t upper = i < count ? ~key_of(values[i]) : ~0u;
      entries[i] = upper << 32 | static_cast<std::uint32_t>(i);
    });
    team.team_barrier();
    sort(team, entries, size);
    const auto largest = ~static_cast<std::uint32_t>(entries[0] >> 32);
    const std::int64_t first = all.first(slot, of);
    const bool has_weights =
        own.draw.temperature > 0 && largest > key_of_minus_infinity && largest < key_of_infinity;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, size), [&](int i) {
      const auto key = ~static_cast<std::uint32_t>(entries[i] >> 32);
      weights[i] = has_weights && i < count ? weight_of(key, largest, own.draw.temperature) : 0;
      if (i >= count) return;
      all.keys[first + i] = key;
      all.places[first + i] = static_cast<std::uint16_t>(entries[i]);
    });
    team.team_barrier();
    sum(team, weights, weights + size, size);
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, count),
                         [&](int i) { all.sums[first + i] = weights[i]; });
  };
  base::parallel_for("kvzap::step::sort_chunks",
                     base::team_policy(exec, rows * all.chunks, {sorting_threads, 1}, kernel,
                                       [=](int) { return bytes; }),
                     kernel);
}

// The first tokens of a row, in the order of its logits.
struct Prefix {
  double weight;
  std::int64_t count;
};

// Numbers of tokens of each chunk, in a team's scratch memory, and what they are summed with.
struct ChunkNumbers {
  double *factors, *weights;
  std::int32_t *low, *high, *end, *middle, *counts, *token;

  static KOKKOS_INLINE_FUNCTION std::size_t bytes(int chunks, int padded) {
    return (chunks + padded) * sizeof(double) +
           (std::size_t{4} * chunks + padded + 1) * sizeof(std::int32_t);
  }
  KOKKOS_INLINE_FUNCTION ChunkNumbers(void* memory, int chunks, int padded)
      : factors(static_cast<double*>(memory)),
        weights(factors + chunks),
        low(reinterpret_cast<std::int32_t*>(weights + padded)),
        high(low + chunks),
        end(high + chunks),
        middle(end + chunks),
        counts(middle + chunks),
        token(counts + padded) {}
};

// A row as its team sees it. `numbers.end` says which tokens the filters have left so far.
struct SortedRow {
  const TeamMember& team;
  const std::uint32_t* keys;
  const std::uint16_t* places;
  const double* sums;
  int chunks, padded;
  double temperature;
  std::uint32_t largest;
  ChunkNumbers numbers;

  template <class Work>
  KOKKOS_INLINE_FUNCTION void for_each_chunk(const Work& work) const {
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, chunks), work);
    team.team_barrier();
  }

  // Sums the first ends(c) tokens of each chunk, by a tree over the chunks.
  KOKKOS_INLINE_FUNCTION Prefix first(const std::int32_t* ends) const {
    double* const weights = numbers.weights;
    std::int32_t* const counts = numbers.counts;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, padded), [&](int c) {
      const std::int32_t count = c < chunks ? ends[c] : 0;
      counts[c] = count;
      weights[c] = count > 0 ? numbers.factors[c] * sums[c * chunk + count - 1] : 0;
    });
    team.team_barrier();
    for (int half = padded / 2; half > 0; half /= 2) {
      Kokkos::parallel_for(Kokkos::TeamVectorRange(team, half), [&](int c) {
        weights[c] += weights[c + half];
        counts[c] += counts[c + half];
      });
      team.team_barrier();
    }
    const Prefix all{weights[0], counts[0]};
    team.team_barrier();  // before the next sums
    return all;
  }

  // Returns the number of a chunk's tokens, between low and high, of which is_before(key) holds.
  template <class IsBefore>
  KOKKOS_INLINE_FUNCTION std::int32_t search(int c, std::int32_t low, std::int32_t high,
                                             const IsBefore& is_before) const {
    while (low < high) {
      const std::int32_t middle = (low + high) / 2;
      if (is_before(keys[c * chunk + middle])) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Ends the row with its first token for which reaches(the tokens up to it) holds, or its last.
  // Returns the token.
  template <class Reaches>
  KOKKOS_INLINE_FUNCTION std::int32_t cut(const Reaches& reaches) const {
    const ChunkNumbers& n = numbers;
    for_each_chunk([&](int c) {
      n.low[c] = 0;
      n.high[c] = n.end[c];
    });
    // The tokens above `without` do not reach it; those from `with` on do.
    std::uint32_t with = largest, without = largest + 1;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, chunks),
        [&](int c, std::uint32_t& least) {
          if (n.end[c] == 0) return;
          const std::uint32_t key = keys[c * chunk + n.end[c] - 1];
          if (key < least) least = key;
        },
        Kokkos::Min<std::uint32_t>(with));
    Prefix low{0, 0}, high = first(n.high);
    while (without - with > 1 && high.count - low.count > 1) {
      const std::uint32_t key = with + (without - with) / 2;
      for_each_chunk([&](int c) {
        n.middle[c] =
            search(c, n.low[c], n.high[c], [&](std::uint32_t other) { return other >= key; });
      });
      const Prefix middle = first(n.middle);
      const bool is_enough = reaches(middle);
      for_each_chunk([&](int c) { (is_enough ? n.high : n.low)[c] = n.middle[c]; });
      (is_enough ? with : without) = key;
      (is_enough ? high : low) = middle;
    }
    // One token is left, or some that are equal, of which the smaller ids are first.
    const double weight = weight_of(with, largest, temperature);
    std::int64_t least = 1, most = high.count - low.count;
    while (least < most) {
      const std::int64_t middle = (least + most) / 2;
      const bool is_enough =
          reaches({low.weight + static_cast<double>(middle) * weight, low.count + middle});
      (is_enough ? most : least) = is_enough ? middle : middle + 1;
    }
    Kokkos::single(Kokkos::PerTeam(team), [&] {
      std::int64_t left = least;
      for (int c = 0; c < chunks; ++c) {
        const std::int32_t equal = n.high[c] - n.low[c];
        const std::int32_t taken = equal < left ? equal : static_cast<std::int32_t>(left);
        n.end[c] = n.low[c] + taken;
        if (taken > 0) *n.token = c * chunk + places[c * chunk + n.end[c] - 1];
        left -= taken;
      }
    });
    team.team_barrier();
    return *n.token;
  }
};

// Applies the filters in draw_token's order, and draws.
KOKKOS_INLINE_FUNCTION std::int32_t draw_of(const SortedRow& row, const TokenDraw& draw,
                                            std::int64_t vocabulary) {
  if (draw.temperature == 0) return row.cut([](const Prefix& tokens) { return tokens.count > 0; });
  if (draw.top_k > 0 && draw.top_k < vocabulary) {
    row.cut([&](const Prefix& tokens) { return tokens.count >= draw.top_k; });
  }
  const std::int32_t* const end = row.numbers.end;
  if (draw.top_p < 1) {
    const double enough = draw.top_p * row.first(end).weight;
    row.cut([&](const Prefix& tokens) { return tokens.weight >= enough; });
  }
  if (draw.min_p > 0) {
    row.for_each_chunk([&](int c) {
      row.numbers.end[c] = row.search(c, 0, end[c], [&](std::uint32_t key) {
        return weight_of(key, row.largest, draw.temperature) >= draw.min_p;
      });
    });
  }
  const double target = draw.uniform * row.first(end).weight;
  return row.cut([&](const Prefix& tokens) { return tokens.weight > target; });
}

// A team for each row.
void draw_rows(const ExecutionSpace& exec, std::int64_t rows, const Chunks& all,
               std::int64_t* tokens) {
  int padded = 1;
  while (padded < all.chunks) padded *= 2;
  const std::size_t bytes = ChunkNumbers::bytes(all.chunks, padded);
  const auto kernel = KOKKOS_LAMBDA(const TeamMember& team) {
    const int slot = team.league_rank();
    const TokenDraws::Row own = all.rows[slot];
    const std::int64_t first = all.first(slot, 0);
    SortedRow row{
        team,
        all.keys + first,
        all.places + first,
        all.sums + first,
        all.chunks,
        padded,
        own.draw.temperature,
        0,
        ChunkNumbers(team.team_scratch(0).get_shmem_aligned(bytes, 16), all.chunks, padded)};
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, all.chunks),
        [&](int c, std::uint32_t& largest) {
          if (row.keys[c * chunk] > largest) largest = row.keys[c * chunk];
        },
        Kokkos::Max<std::uint32_t>(row.largest));
    std::int64_t token = -1;
    if (row.largest > key_of_minus_infinity && row.largest < key_of_infinity) {
      row.for_each_chunk([&](int c) {
        row.numbers.end[c] = all.count(c);
        row.numbers.factors[c] = weight_of(row.keys[c * chunk], row.largest, row.temperature);
      });
      token = draw_of(row, own.draw, all.vocabulary);
    }
    Kokkos::single(Kokkos::PerTeam(team), [&] { tokens[own.row] = token; });
  };
  base::parallel_for(
      "kvzap::step::draw_rows",
      base::team_policy(exec, rows, {drawing_threads, 1}, kernel, [=](int) { return bytes; }),
      kernel);
}

}  // namespace

void TokenDraws::reserve(std::int64_t rows, std::int64_t vocabulary) {
  m_count = rows;
  m_rows.reserve(rows, "kvzap::decoder::draws");
  if (base::machine().on_host() || rows == 0) return;
  const std::int64_t values = rows_at_once(rows, vocabulary) * chunks_of(vocabulary) * chunk;
  base::reserve_scratch(m_keys, values, "kvzap::decoder::draw_keys");
  base::reserve_scratch(m_places, values, "kvzap::decoder::draw_places");
  base::reserve_scratch(m_sums, values, "kvzap::decoder::draw_sums");
}

void TokenDraws::place(const ExecutionSpace& exec) const {
  if (base::machine().on_device() && m_count > 0) m_rows.copy(exec, m_count);
}

void TokenDraws::run(const ExecutionSpace& exec, const linalg::ConstMatrix& logits,
                     const Kokkos::View<std::int64_t*, MemorySpace>& tokens) const {
  const std::int64_t vocabulary = logits.extent(1);
  if (base::machine().on_host()) {
    const Row* const rows = m_rows.host();
    base::host_for("kvzap::step::draw", m_count, vocabulary, [=](std::int64_t i) {
      tokens(rows[i].row) = read_and_draw(&logits(rows[i].row, 0),
                                          static_cast<std::size_t>(vocabulary), rows[i].draw);
    });
    return;
  }
  const std::int64_t at_once = rows_at_once(m_count, vocabulary);
  for (std::int64_t begin = 0; begin < m_count; begin += at_once) {
    const std::int64_t count = std::min(at_once, m_count - begin);
    const Chunks all{m_rows.device().data() + begin,
                     vocabulary,
                     static_cast<int>(chunks_of(vocabulary)),
                     m_keys.data(),
                     m_places.data(),
                     m_sums.data()};
    sort_chunks(exec, count, all, logits);
    draw_rows(exec, count, all, tokens.data());
  }
}

}  // namespace kvzap::engine
