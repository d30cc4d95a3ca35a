#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <kvzap/core/keep_list.hpp>
#include <kvzap/core/selection.hpp>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "base/team.hpp"
#include "cache/agree_on_memory.hpp"

namespace kvzap {
namespace {

// Three passes find the bits of a key, from the top. The first finds sign, exponent and two bits of
// the mantissa, for which a histogram of 8 KiB suffices.
constexpr int n_passes = 3;
constexpr std::array<int, n_passes> pass_shift = {21, 10, 0};
constexpr std::array<int, n_passes> pass_bits = {11, 11, 10};
constexpr int n_bins = 1 << 11;
// Most histograms that exist at the same time, one for each pool: 1 MiB.
constexpr std::size_t max_group_pools = 64;
// Rows that one work item reads. A work item on a host has its own histogram, which must not cost
// more than its rows. A device needs many work items.
constexpr std::int64_t host_tile_rows = 1 << 16;
constexpr std::int64_t device_tile_rows = 1 << 13;
// Threads that share a tile on a device.
constexpr int device_team_size = 256;

// Maps larger scores to larger keys and equal scores to equal keys. The largest key stands for
// scores that are not finite.
KOKKOS_INLINE_FUNCTION std::uint32_t key_of(float score) {
  return EvictionRule::is_finite(score) ? selection::key_of_finite(score) : selection::always;
}

float score_of(std::uint32_t key) {
  if (key == selection::always) return std::numeric_limits<float>::infinity();
  return base::bits_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// Rows of one segment that one work item reads.
struct Tile {
  const float* scores;
  std::int64_t stride;
  std::int32_t rows;
  std::int32_t slot;     // slot of its pool in the group
  std::int32_t segment;  // of this rank

  KOKKOS_INLINE_FUNCTION std::uint32_t key(std::int32_t row) const {
    return key_of(scores[row * stride]);
  }
};

using Tiles = Kokkos::View<Tile*, MemorySpace>;
using Keys = Kokkos::View<std::uint32_t*, MemorySpace>;
using Counts = Kokkos::View<std::int64_t*, MemorySpace>;
using Histograms = Kokkos::View<std::int64_t**, Kokkos::LayoutRight, MemorySpace>;
using Team = Kokkos::TeamPolicy<ExecutionSpace>;
using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// The digit that one pass counts. It counts keys whose bits in `mask` equal those of their pool's
// prefix.
struct Digit {
  std::uint32_t mask;
  int shift;
  std::uint32_t bins;

  explicit Digit(int pass)
      : mask(pass == 0 ? 0 : ~std::uint32_t{0} << pass_shift[pass - 1]),
        shift(pass_shift[pass]),
        bins(std::uint32_t{1} << pass_bits[pass]) {}

  KOKKOS_INLINE_FUNCTION bool counts(std::uint32_t key, std::uint32_t prefix) const {
    return ((key ^ prefix) & mask) == 0;
  }
  KOKKOS_INLINE_FUNCTION std::uint32_t bin(std::uint32_t key) const {
    return (key >> shift) & (bins - 1);
  }
};

// histograms(slot, digit) += keys of the tiles of that slot. Each work item has its own histogram.
void count_on_host(const ExecutionSpace& exec, const Tiles& tiles, const Keys& prefixes,
                   const Digit digit, const Histograms& histograms) {
  Kokkos::parallel_for(
      "kvzap::select_top::count", Range(exec, 0, static_cast<std::int64_t>(tiles.extent(0))),
      KOKKOS_LAMBDA(std::int64_t i) {
        const Tile tile = tiles(i);
        const std::uint32_t prefix = prefixes(tile.slot);
        std::uint32_t counts[n_bins] = {};
        for (std::int32_t row = 0; row < tile.rows; ++row) {
          const std::uint32_t key = tile.key(row);
          if (digit.counts(key, prefix)) ++counts[digit.bin(key)];
        }
        for (int bin = 0; bin < n_bins; ++bin) {
          if (counts[bin] != 0) {
            Kokkos::atomic_add(&histograms(tile.slot, bin), static_cast<std::int64_t>(counts[bin]));
          }
        }
      });
}

// Returns one team for each tile.
Team teams_of(const ExecutionSpace& exec, const Tiles& tiles) {
  const base::TeamShape shape = base::team_shape({device_team_size, 1});
  return Team(exec, static_cast<int>(tiles.extent(0)), shape.threads, shape.lanes);
}

// Does the same with teams; each has a histogram in its scratch memory.
void count_on_device(const ExecutionSpace& exec, const Tiles& tiles, const Keys& prefixes,
                     const Digit digit, const Histograms& histograms) {
  constexpr std::size_t scratch_bytes = n_bins * sizeof(std::uint32_t);
  Team policy = teams_of(exec, tiles);
  policy.set_scratch_size(0, Kokkos::PerTeam(scratch_bytes + 16));
  Kokkos::parallel_for(
      "kvzap::select_top::count", policy, KOKKOS_LAMBDA(const Team::member_type& team) {
        const Tile tile = tiles(team.league_rank());
        const std::uint32_t prefix = prefixes(tile.slot);
        auto* const counts =
            static_cast<std::uint32_t*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
        // Loops over threads and lanes. A loop over threads alone would count each key once per
        // lane.
        Kokkos::parallel_for(Kokkos::TeamVectorRange(team, int{n_bins}),
                             [&](int bin) { counts[bin] = 0; });
        team.team_barrier();  // before others count
        Kokkos::parallel_for(Kokkos::TeamVectorRange(team, tile.rows), [&](std::int32_t row) {
          const std::uint32_t key = tile.key(row);
          if (digit.counts(key, prefix)) {
            Kokkos::atomic_add(&counts[digit.bin(key)], std::uint32_t{1});
          }
        });
        team.team_barrier();  // all have counted
        Kokkos::parallel_for(Kokkos::TeamVectorRange(team, int{n_bins}), [&](int bin) {
          if (counts[bin] != 0) {
            Kokkos::atomic_add(&histograms(tile.slot, bin), static_cast<std::int64_t>(counts[bin]));
          }
        });
      });
}

// ties(segment) += keys of the segment's tiles that equal their pool's key.
void count_ties(const ExecutionSpace& exec, const Tiles& tiles, const Keys& keys,
                const Counts& ties) {
  Kokkos::parallel_for(
      "kvzap::select_top::count_ties", teams_of(exec, tiles),
      KOKKOS_LAMBDA(const Team::member_type& team) {
        const Tile tile = tiles(team.league_rank());
        const std::uint32_t key = keys(tile.slot);
        std::int64_t count = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, tile.rows),
            [&](std::int32_t row, std::int64_t& sum) { sum += tile.key(row) == key; }, count);
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          if (count != 0) Kokkos::atomic_add(&ties(tile.segment), count);
        });
      });
}

// A segment as all ranks know it.
struct Place {
  std::int64_t order;
  int rank;
  std::int64_t segment;  // of that rank
};

struct Pool {
  std::vector<Place> places;  // by order
  std::int64_t rows = 0;
  std::int64_t keep = 0;
  bool is_shared = false;  // by ranks
  // Results of the passes: the key of the keep-th largest score, and the rank of that score among
  // the scores with that key.
  std::uint32_t key = 0;
  std::int64_t left = 0;
};

// Returns all pools, the same on every rank. Every rank throws the same error if the input does not
// fit.
std::vector<Pool> describe(const Communicator& comm, const std::vector<ScoreSegment>& mine,
                           const std::vector<std::int64_t>& keep_of_pool) {
  std::vector<std::int64_t> numbers = {static_cast<std::int64_t>(keep_of_pool.size())};
  numbers.insert(numbers.end(), keep_of_pool.begin(), keep_of_pool.end());
  for (const ScoreSegment& segment : mine) {
    for (const std::int64_t number :
         {segment.pool, segment.order, static_cast<std::int64_t>(segment.scores.extent(0))}) {
      numbers.push_back(number);
    }
  }
  const auto all = comm.all_gather(numbers);
  const auto n_pools = all[0][0];
  std::vector<Pool> pools(static_cast<std::size_t>(n_pools));
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::vector<std::int64_t>& theirs = all[rank];
    const auto asked_end = all[0].begin() + 1 + n_pools;
    if (theirs[0] != n_pools || !std::equal(all[0].begin(), asked_end, theirs.begin())) {
      throw AgreedError(
          fmt::format("select_top: the rows to keep on rank {} differ from those on rank 0", rank));
    }
    for (std::size_t i = 1 + static_cast<std::size_t>(n_pools); i < theirs.size(); i += 3) {
      const std::int64_t pool = theirs[i];
      if (pool < 0 || pool >= n_pools) {
        throw AgreedError(
            fmt::format("select_top: a segment of rank {} is in pool {}; expected one "
                        "of {}",
                        rank, pool, n_pools));
      }
      Pool& p = pools[static_cast<std::size_t>(pool)];
      p.is_shared = p.is_shared || (!p.places.empty() && p.places[0].rank != rank);
      const auto segment = static_cast<std::int64_t>(i - 1 - static_cast<std::size_t>(n_pools)) / 3;
      p.places.push_back({theirs[i + 1], rank, segment});
      p.rows += theirs[i + 2];
    }
  }
  for (std::size_t i = 0; i < pools.size(); ++i) {
    Pool& p = pools[i];
    p.keep = p.left = keep_of_pool[i];
    if (p.keep < 0 || p.keep > p.rows) {
      throw AgreedError(fmt::format("select_top: {} rows of pool {} should stay, but it has {}",
                                    p.keep, i, p.rows));
    }
    std::sort(p.places.begin(), p.places.end(),
              [](const Place& a, const Place& b) { return a.order < b.order; });
    for (std::size_t k = 1; k < p.places.size(); ++k) {
      if (p.places[k].order == p.places[k - 1].order) {
        throw AgreedError(fmt::format("select_top: two segments of pool {} have the order {}", i,
                                      p.places[k].order));
      }
    }
  }
  return pools;
}

// Pools that are processed together, and this rank's part of them.
struct Group {
  std::vector<Pool*> pools;
  std::vector<Tile> tiles;
  bool is_shared;
};

std::vector<Group> groups_of(std::vector<Pool>& pools, const std::vector<ScoreSegment>& mine,
                             int rank) {
  const std::int64_t tile_rows = base::machine().on_device() ? device_tile_rows : host_tile_rows;
  std::vector<Group> groups;
  // All ranks have the same shared groups, in the same order, followed by their own groups.
  for (const bool is_shared : {true, false}) {
    std::size_t room = 0;
    for (Pool& pool : pools) {
      if (pool.keep == 0 || pool.is_shared != is_shared) continue;
      if (!is_shared && pool.places[0].rank != rank) continue;
      if (room == 0) {
        groups.push_back({{}, {}, is_shared});
        room = max_group_pools;
      }
      --room;
      Group& group = groups.back();
      const auto slot = static_cast<std::int32_t>(group.pools.size());
      group.pools.push_back(&pool);
      for (const Place& place : pool.places) {
        if (place.rank != rank) continue;
        const auto& scores = mine[static_cast<std::size_t>(place.segment)].scores;
        const auto rows = static_cast<std::int64_t>(scores.extent(0));
        const auto stride = static_cast<std::int64_t>(scores.stride(0));
        for (std::int64_t row = 0; row < rows; row += tile_rows) {
          group.tiles.push_back({scores.data() + row * stride, stride,
                                 static_cast<std::int32_t>(std::min(tile_rows, rows - row)), slot,
                                 static_cast<std::int32_t>(place.segment)});
        }
      }
    }
  }
  return groups;
}

template <class View>
View uninitialized(const char* label, std::int64_t extent) {
  return View(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), extent);
}

// Memory of the passes, for the largest group.
struct Buffers {
  Histograms histograms;
  base::HostMirror<Histograms> host_histograms;
  Keys keys;
  base::HostMirror<Keys> host_keys;
  Tiles tiles;
  base::HostMirror<Tiles> host_tiles;
  Counts ties;  // of this rank's segments
  base::HostMirror<Counts> host_ties;

  Buffers(const std::vector<Group>& groups, std::int64_t segments) {
    std::size_t n_pools = 0, n_tiles = 0;
    for (const Group& group : groups) {
      n_pools = std::max(n_pools, group.pools.size());
      n_tiles = std::max(n_tiles, group.tiles.size());
    }
    if (n_tiles > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
      throw Error("select_top: too many scores");
    }
    histograms =
        Histograms(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::select_top::histograms"),
                   n_pools, n_bins);
    host_histograms = Kokkos::create_mirror_view(histograms);
    keys = uninitialized<Keys>("kvzap::select_top::keys", static_cast<std::int64_t>(n_pools));
    host_keys = Kokkos::create_mirror_view(keys);
    tiles = uninitialized<Tiles>("kvzap::select_top::tiles", static_cast<std::int64_t>(n_tiles));
    host_tiles = Kokkos::create_mirror_view(tiles);
    ties = uninitialized<Counts>("kvzap::select_top::ties", segments);
    host_ties = Kokkos::create_mirror_view(ties);
  }
};

// Finds the keys of the pools, and the last tie that each pool keeps. Counts the ties of this
// rank's segments. Collective if the group is shared.
void find_keys(const ExecutionSpace& exec, const Communicator& comm, const Group& group,
               Buffers& buffers) {
  const auto slots = std::make_pair(std::size_t{0}, group.pools.size());
  const auto first_tiles = std::make_pair(std::size_t{0}, group.tiles.size());
  const auto histograms = Kokkos::subview(buffers.histograms, slots, Kokkos::ALL);
  const auto host_histograms = Kokkos::subview(buffers.host_histograms, slots, Kokkos::ALL);
  const auto keys = Kokkos::subview(buffers.keys, slots);
  const auto host_keys = Kokkos::subview(buffers.host_keys, slots);
  const auto tiles = Kokkos::subview(buffers.tiles, first_tiles);
  const auto host_tiles = Kokkos::subview(buffers.host_tiles, first_tiles);
  const bool has_tiles = !group.tiles.empty();
  std::copy(group.tiles.begin(), group.tiles.end(), host_tiles.data());
  Kokkos::deep_copy(exec, tiles, host_tiles);
  const auto send_keys = [&] {
    for (std::size_t slot = 0; slot < group.pools.size(); ++slot) {
      host_keys(slot) = group.pools[slot]->key;
    }
    Kokkos::deep_copy(exec, keys, host_keys);
  };
  for (int pass = 0; pass < n_passes; ++pass) {
    const Digit digit(pass);
    send_keys();
    Kokkos::deep_copy(exec, histograms, std::int64_t{0});
    if (has_tiles) {
      (base::machine().on_device() ? count_on_device : count_on_host)(exec, tiles, keys, digit,
                                                                      histograms);
    }
    Kokkos::deep_copy(exec, host_histograms, histograms);
    base::fence(exec, "kvzap::select_top: the host looks for the bins");
    if (group.is_shared) comm.all_reduce_sum(host_histograms.data(), host_histograms.size());
    for (std::size_t slot = 0; slot < group.pools.size(); ++slot) {
      Pool& pool = *group.pools[slot];
      auto bin = static_cast<int>(digit.bins) - 1;
      for (; host_histograms(slot, bin) < pool.left; --bin) pool.left -= host_histograms(slot, bin);
      pool.key |= static_cast<std::uint32_t>(bin) << pass_shift[pass];
    }
  }
  send_keys();
  if (has_tiles) count_ties(exec, tiles, keys, buffers.ties);
  // The next group overwrites the input of the kernels.
  base::fence(exec, "kvzap::select_top: tiles and keys are read");
}

}  // namespace

std::vector<Cutoff> select_top(const ExecutionSpace& exec, const Communicator& comm,
                               const std::vector<ScoreSegment>& mine,
                               const std::vector<std::int64_t>& keep_of_pool) {
  std::vector<Pool> pools = describe(comm, mine, keep_of_pool);
  std::vector<Group> groups;
  std::optional<Buffers> buffers;
  const auto take_memory = [&] {
    groups = groups_of(pools, mine, comm.rank());
    buffers.emplace(groups, static_cast<std::int64_t>(mine.size()));
  };
  if (comm.size() > 1) {
    cache::agree_on_memory(comm, take_memory);
  } else {
    take_memory();  // no other rank learns of its error
  }
  Kokkos::deep_copy(exec, buffers->ties, std::int64_t{0});
  for (const Group& group : groups) find_keys(exec, comm, group, *buffers);
  Kokkos::deep_copy(exec, buffers->host_ties, buffers->ties);
  base::fence(exec, "kvzap::select_top: the host deals out the ties");

  // Ties of every rank's segments, if another rank needs them.
  std::vector<std::int64_t> numbers(buffers->host_ties.data(),
                                    buffers->host_ties.data() + mine.size());
  const bool any_shared = std::any_of(pools.begin(), pools.end(), [](const Pool& pool) {
    return pool.is_shared && pool.keep != 0;
  });
  std::vector<std::vector<std::int64_t>> ties(static_cast<std::size_t>(comm.size()));
  if (any_shared) {
    ties = comm.all_gather(numbers);
  } else {
    ties[static_cast<std::size_t>(comm.rank())] = numbers;
  }
  std::vector<Cutoff> cutoffs(mine.size(), {std::numeric_limits<float>::infinity(), 0});
  for (const Pool& pool : pools) {
    if (pool.keep == 0 || pool.key == selection::always) continue;
    std::int64_t left = pool.left;
    for (const Place& place : pool.places) {
      const auto rank = static_cast<std::size_t>(place.rank);
      const auto segment = static_cast<std::size_t>(place.segment);
      if (!pool.is_shared && place.rank != comm.rank()) break;
      const std::int64_t stay = std::min(left, ties[rank][segment]);
      if (place.rank == comm.rank()) cutoffs[segment] = {score_of(pool.key), stay};
      left -= stay;
    }
  }
  return cutoffs;
}

}  // namespace kvzap
