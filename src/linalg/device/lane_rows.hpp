// Rotates, packs and unpacks rows on a device: each thread of a team has a row in team memory, and
// its vector lanes share the dimensions. All lanes of a thread call these functions. Loops:
// LaneLoops, or another type with its each().
#pragma once

#include "base/team.hpp"
#include "linalg/pack_row.hpp"

template <>
struct Kokkos::reduction_identity<kvzap::linalg::LevelProducts> {
  KOKKOS_FORCEINLINE_FUNCTION static kvzap::linalg::LevelProducts sum() { return {}; }
};

namespace kvzap::linalg {

/// Loops by the vector lanes of a thread. Sums do not have the order of PlainLoops.
struct LaneLoops {
  const base::TeamMember& team;

  template <class Body>
  KOKKOS_INLINE_FUNCTION void each(int n, const Body& body) const {
    Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, n), body);
    base::fence_lanes();
  }
  template <class Sum, class Body>
  KOKKOS_INLINE_FUNCTION Sum sum(int n, const Body& body) const {
    Sum sum{};
    Kokkos::parallel_reduce(
        Kokkos::ThreadVectorRange(team, n), [&](int i, Sum& all) { all += body(i); },
        Kokkos::Sum<Sum>(sum));
    return sum;
  }
  template <class Body>
  KOKKOS_INLINE_FUNCTION float largest(int n, const Body& body) const {
    float largest = 0;
    Kokkos::parallel_reduce(
        Kokkos::ThreadVectorRange(team, n),
        [&](int i, float& most) { most = body(i) > most ? body(i) : most; },
        Kokkos::Max<float>(largest));
    return largest;
  }
};

/// Walsh-Hadamard transforms of the blocks of a row, without their factor.
template <class Loops>
KOKKOS_INLINE_FUNCTION void transform_row(const Loops& loops, float* row, const RowTurn& turn) {
  for (int bit = 0; 1 << bit < turn.block; ++bit) {
    const int half = 1 << bit;
    loops.each(turn.dim / 2, [&](int i) {
      float* const a = row + ((i >> bit << (bit + 1)) | (i & (half - 1)));
      const float sum = a[0] + a[half];
      a[half] = a[0] - a[half];
      a[0] = sum;
    });
  }
}

/// Mixes the blocks of a row: subtracts from each twice their mean.
template <class Loops>
KOKKOS_INLINE_FUNCTION void reflect_row(const Loops& loops, float* row, const RowTurn& turn) {
  const int blocks = turn.blocks();
  if (blocks == 1) return;
  loops.each(turn.block, [&](int i) {
    float sum = 0;
    for (int b = 0; b < blocks; ++b) sum += row[b * turn.block + i];
    const float twice = 2.0f / static_cast<float>(blocks) * sum;
    for (int b = 0; b < blocks; ++b) row[b * turn.block + i] -= twice;
  });
}

/// Rotates a row (dim) in place, as linalg::rotate_row does.
template <class Loops>
KOKKOS_INLINE_FUNCTION void rotate_row(const Loops& loops, float* row, int dim) {
  const RowTurn turn = RowTurn::of(dim);
  const float root = turn.root();
  loops.each(dim, [&](int d) { row[d] *= RowTurn::sign(d) * root; });
  transform_row(loops, row, turn);
  reflect_row(loops, row, turn);
}

/// Rotates a row back in place, as linalg::rotate_row_back does.
template <class Loops>
KOKKOS_INLINE_FUNCTION void rotate_row_back(const Loops& loops, float* row, int dim) {
  const RowTurn turn = RowTurn::of(dim);
  reflect_row(loops, row, turn);
  transform_row(loops, row, turn);
  const float root = turn.root();
  loops.each(dim, [&](int d) { row[d] *= RowTurn::sign(d) * root; });
}

/// Packs the row whose dimension d is at(d), as linalg::pack_row does. row: space for dim floats.
template <class Element>
KOKKOS_INLINE_FUNCTION void pack_row(const LaneLoops& loops, RowType type, const Element& at,
                                     int dim, float* row, std::uint8_t* codes, bfloat16* scale) {
  loops.each(dim, [&](int d) { row[d] = at(d); });
  rotate_row(loops, row, dim);
  const bfloat16 found = pack_rotated_row(
      type, [&](int d) { return row[d]; }, dim, codes, loops);
  Kokkos::single(Kokkos::PerThread(loops.team), [&] { *scale = found; });
}

/// Writes row `index` of a page, rotated back, to `row` (dim), as linalg::unpack_row does.
KOKKOS_INLINE_FUNCTION void unpack_row(const LaneLoops& loops, const QuantisedRows& rows,
                                       std::int64_t index, float* row) {
  const float scale = rows.scales[index];
  loops.each(rows.dim,
             [&](int d) { row[d] = scale * static_cast<float>(rows.level_at(index, d)); });
  rotate_row_back(loops, row, rows.dim);
}

}  // namespace kvzap::linalg
