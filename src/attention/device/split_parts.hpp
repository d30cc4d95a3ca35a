// The parts of heads that decode attention on a device works on, and the kernel that attends one.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/device/split_rows.hpp"
#include "attention/softmax.hpp"
#include "base/launch.hpp"
#include "base/soft_cap.hpp"
#include "base/team.hpp"
#include "linalg/device/lane_rows.hpp"

namespace kvzap::attention {

// Rows of a team at a time: few enough that few heads fill a device, and many enough that partial
// results are much smaller than the rows.
inline constexpr int split_block_rows = 128;
// Parts of a head: enough for a few heads to fill a device. Bounds the memory for parts.
inline constexpr int most_parts = 128;
// The most spans that a kernel's arguments describe. More spans are described by a table in device
// memory.
inline constexpr int spans_in_arguments = 4;
// Rows whose keys are multiplied at once, so that several loads are in flight.
inline constexpr int rows_at_once = 4;
// Lanes that share the dimensions of such rows.
inline constexpr int row_lanes = 4;
// Threads and lanes of a team on a device.
inline constexpr int team_threads = 128;

/// Returns the smallest power of two that is at least `count`, but at most 32.
inline int lanes_for(int count) {
  int lanes = 1;
  while (lanes < count && lanes < 32) lanes *= 2;
  return lanes;
}

/// Returns the rows of each part of a head of `rows` rows.
KOKKOS_INLINE_FUNCTION std::int64_t rows_of_part(std::int64_t rows) {
  const std::int64_t blocks = (rows + split_block_rows - 1) / split_block_rows;
  return (blocks + most_parts - 1) / most_parts * split_block_rows;
}
/// Returns the parts of a head of `rows` rows.
KOKKOS_INLINE_FUNCTION int parts_of(std::int64_t rows) {
  const std::int64_t own = rows_of_part(rows);
  return rows > 0 ? static_cast<int>((rows + own - 1) / own) : 0;
}

/// The spans of a launch, as all its kernels use them.
struct SplitSpans {
  SplitSpan few[spans_in_arguments];
  const SplitSpan* many;  // replaces `few` unless null
  float* partials;
  std::int32_t count;
  std::int32_t heads, group, dim;
  std::int32_t wide_parts;  // of all spans; quantised ones follow them in `partials`

  KOKKOS_INLINE_FUNCTION const SplitSpan& operator[](int i) const {
    return many ? many[i] : few[i];
  }
  /// Returns the span of a part, which is counted over the parts of its kind of all spans and
  /// heads.
  template <bool quantised>
  KOKKOS_INLINE_FUNCTION int span_of(int part) const {
    int first = 0, last = count - 1;
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      const SplitSpan& span = (*this)[middle];
      if ((quantised ? span.first_quantised : span.first_wide) <= part) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
  /// Returns the floats of a part: its sums (group, dim), maximum (group) and weight (group).
  /// Vectors of 16 bytes are aligned.
  KOKKOS_INLINE_FUNCTION static std::int64_t part_floats(int group, int dim) {
    return (std::int64_t{group} * (dim + 2) + 3) / 4 * 4;
  }
  /// Returns the results of a part of a head.
  KOKKOS_INLINE_FUNCTION float* partial(const SplitSpan& span, int head, int part,
                                        bool quantised) const {
    const std::int64_t index =
        quantised
            ? wide_parts + span.first_quantised + std::int64_t{head} * span.quantised_parts + part
            : span.first_wide + std::int64_t{head} * span.wide_parts + part;
    return partials + index * part_floats(group, dim);
  }
};

/// The rows of a part, given its number among the parts of its kind of all spans and heads. There
/// are none (begin >= end) where a head is shorter than its bound.
struct PartOfHead {
  int head, part;
  std::int64_t first_row;   // of this kind: wide rows follow quantised ones
  std::int64_t begin, end;  // counted from first_row

  KOKKOS_INLINE_FUNCTION PartOfHead(const SplitSpan& span, int rank, bool quantised) {
    const int parts = quantised ? span.quantised_parts : span.wide_parts;
    const int of_span = rank - (quantised ? span.first_quantised : span.first_wide);
    head = of_span / parts;
    part = of_span % parts;
    first_row = quantised ? 0 : span.quantised_rows(head);
    const std::int64_t rows = quantised ? span.quantised_rows(head) : span.wide_rows(head);
    const std::int64_t own = rows_of_part(rows);
    begin = part * own;
    end = begin + own < rows ? begin + own : rows;
  }
};

/// Team memory of AttendParts.
template <class Rows>
struct PartScratch {
  using Element = typename Rows::Element;
  using Note = typename Rows::Note;

  const Element** keys;    // (split_block_rows)
  const Element** values;  // (split_block_rows)
  Note* notes;             // (split_block_rows)
  float* queries;          // (heads at once, padded dim)
  float* scores;           // (heads at once, split_block_rows)
  float* maximum;          // (heads at once), so far
  float* weight;           // (heads at once)
  float* factor;           // (heads at once): of earlier weights and sums
  float* sums;             // (thread, heads at once, padded dim)
  float* dots;             // (heads at once, rows_at_once, items of score)

  static std::size_t bytes(int heads_at_once, int padded, int threads) {
    return split_block_rows * (2 * sizeof(const Element*) + sizeof(Note)) +
           sizeof(float) * heads_at_once *
               (std::size_t(padded) + split_block_rows * (1 + row_lanes) + 3 +
                std::size_t(threads) * padded);
  }
  KOKKOS_FUNCTION PartScratch(char* base, int heads_at_once, int padded) {
    keys = reinterpret_cast<const Element**>(base);
    values = keys + split_block_rows;
    notes = reinterpret_cast<Note*>(values + split_block_rows);
    queries = reinterpret_cast<float*>(notes + split_block_rows);
    scores = queries + std::int64_t{heads_at_once} * padded;
    dots = scores + std::int64_t{heads_at_once} * split_block_rows;
    maximum = dots + std::int64_t{heads_at_once} * split_block_rows * row_lanes;
    weight = maximum + heads_at_once;
    factor = weight + heads_at_once;
    sums = factor + heads_at_once;
  }
};

/// One part per team. Rows: WideRows, QuantisedCodes or AnyQuantisedCodes. G: query heads at once.
/// Sums of quantised parts remain rotated.
template <class Rows, int G>
struct AttendParts {
  SplitSpans spans;
  Rows rows;
  const float* queries;
  Strides query_strides;
  std::int32_t scratch_bytes;
  float soft_cap;       // 0: none
  std::int16_t padded;  // dim, to whole vectors

  using Element = typename Rows::Element;
  using Scratch = PartScratch<Rows>;
  static constexpr int width = Rows::width;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int rank = team.league_rank();
    const SplitSpan& span = spans[spans.template span_of<Rows::quantised>(rank)];
    const PartOfHead own_part(span, rank, Rows::quantised);
    const int head = own_part.head;
    const std::int64_t begin = own_part.begin, end = own_part.end;
    if (begin >= end) return;
    const Scratch scratch(
        static_cast<char*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16)), G, padded);
    const int group = spans.group;
    const int dim = spans.dim;
    float* const partial = spans.partial(span, head, own_part.part, Rows::quantised);
    const int threads = team.team_size();
    for (int first = 0; first < group; first += G) {
      const int own = group - first < G ? group - first : G;
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, G), [&](int g) {
        load_query(team, span, head * group + first + g, g, g < own, scratch);
      });
      for (std::int64_t row = begin; row < end; row += split_block_rows) {
        const int count =
            static_cast<int>(end - row < split_block_rows ? end - row : split_block_rows);
        int scattered = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamVectorRange(team, count),
            [&](int r, int& sum) {
              const bool is_whole = rows.find(span, head, dim, own_part.first_row + row + r,
                                              scratch.keys[r], scratch.values[r], scratch.notes[r]);
              if (!is_whole) ++sum;
            },
            scattered);
        // All threads see the queries and the addresses of rows.
        team.team_barrier();
        if (scattered == 0) {
          attend<true>(team, own, count, row == begin, scratch);
        } else {
          attend<false>(team, own, count, row == begin, scratch);
        }
        // The sums are complete; their inputs may be overwritten.
        team.team_barrier();
      }
      for (int g = 0; g < own; ++g) {
        Kokkos::parallel_for(Kokkos::TeamVectorRange(team, padded), [&](int i) {
          if (i == 0) {
            partial[group * dim + first + g] = scratch.maximum[g];
            partial[group * dim + group + first + g] = scratch.weight[g];
          }
          float sum = 0;
          for (int t = 0; t < threads; ++t) sum += scratch.sums[(t * G + g) * padded + i];
          const int d = rows.template dim_of<true>(i, dim);
          if (d < dim) partial[(first + g) * dim + d] = sum;
        });
      }
      // The next query heads overwrite the inputs of these results.
      team.team_barrier();
    }
  }

  /// Writes a query to team memory in the order of the keys' vectors, rotated for quantised rows;
  /// or zeros if there is none.
  KOKKOS_INLINE_FUNCTION void load_query(const base::TeamMember& team, const SplitSpan& span,
                                         int query_head, int g, bool exists,
                                         const Scratch& scratch) const {
    const int dim = spans.dim;
    const linalg::LaneLoops loops{team};
    const float* const source =
        queries + span.query * query_strides.row + query_head * query_strides.head;
    float* const target = scratch.queries + g * padded;
    if constexpr (Rows::quantised) {
      float* const row = scratch.sums + g * padded;  // not in use yet
      loops.each(dim, [&](int d) { row[d] = exists ? source[d * query_strides.dim] : 0.0f; });
      linalg::rotate_row(loops, row, dim);
      loops.each(padded, [&](int i) {
        const int d = rows.template dim_of<false>(i, dim);
        target[i] = d < dim ? row[d] : 0.0f;
      });
    } else {
      loops.each(padded, [&](int d) {
        target[d] = exists && d < dim ? source[d * query_strides.dim] : 0.0f;
      });
    }
  }

  /// Adds `count` rows to maximum, weight and sums. whole: every row is a sequence of aligned
  /// vectors. is_first: there were none before.
  template <bool whole>
  KOKKOS_INLINE_FUNCTION void attend(const base::TeamMember& team, int own, int count,
                                     bool is_first, const Scratch& scratch) const {
    score<whole>(team, count, scratch);
    team.team_barrier();
    weigh(team, own, count, is_first, scratch);
    team.team_barrier();
    add_values<whole>(team, own, count, is_first, scratch);
  }

  /// Computes scores: row_lanes lanes share the dimensions of rows_at_once rows, and lanes add the
  /// parts of a row's dot products.
  template <bool whole>
  KOKKOS_FORCEINLINE_FUNCTION void score(const base::TeamMember& team, int count,
                                         const Scratch& scratch) const {
    const int vectors = padded / width;
    const int blocks = (count + rows_at_once - 1) / rows_at_once;
    constexpr int stride = split_block_rows / rows_at_once * row_lanes;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, blocks * row_lanes), [&](int item) {
      const int first = item / row_lanes * rows_at_once;
      const Element* rows_of_item[rows_at_once];
      int numbers[rows_at_once];
      for (int i = 0; i < rows_at_once; ++i) {
        numbers[i] = first + i < count ? first + i : count - 1;
        rows_of_item[i] = scratch.keys[numbers[i]];
      }
      float dots[G][rows_at_once] = {};
      for (int v = item % row_lanes; v < vectors; v += row_lanes) {
        float key[rows_at_once][width];
        for (int i = 0; i < rows_at_once; ++i) {
          rows.template load<whole, false>(rows_of_item[i], scratch.notes[numbers[i]], v, spans.dim,
                                           key[i]);
        }
        for (int g = 0; g < G; ++g) {
          float query[width];
          load_floats<width>(scratch.queries + g * padded + v * width, query);
          for (int e = 0; e < width; ++e) {
            for (int i = 0; i < rows_at_once; ++i) dots[g][i] += query[e] * key[i][e];
          }
        }
      }
      for (int g = 0; g < G; ++g) {
        for (int i = 0; i < rows_at_once; ++i) {
          scratch.dots[(g * rows_at_once + i) * stride + item] = dots[g][i];
        }
      }
    });
    team.team_barrier();
    const float scaling = 1.0f / base::math::sqrt(static_cast<float>(spans.dim));
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, G * split_block_rows), [&](int item) {
      const int g = item / split_block_rows, r = item % split_block_rows;
      if (r >= count) return;
      float dots[row_lanes];
      load_floats<row_lanes>(scratch.dots + (g * rows_at_once + r % rows_at_once) * stride +
                                 r / rows_at_once * row_lanes,
                             dots);
      const float s =
          (dots[0] + dots[1] + (dots[2] + dots[3])) * scaling * Rows::key_factor(scratch.notes[r]);
      scratch.scores[item] = soft_cap > 0 ? base::soft_capped(s, soft_cap) : s;
    });
  }

  /// Turns scores into weights relative to the part's largest score so far.
  KOKKOS_FORCEINLINE_FUNCTION void weigh(const base::TeamMember& team, int own, int count,
                                         bool is_first, const Scratch& scratch) const {
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own), [&](int g) {
      float* const scores = scratch.scores + g * split_block_rows;
      float before = minus_infinity;
      if (!is_first) before = scratch.maximum[g];
      const float weight_before = is_first ? 0.0f : scratch.weight[g];
      float maximum = minus_infinity;
      Kokkos::parallel_reduce(
          Kokkos::ThreadVectorRange(team, count),
          [&](int r, float& most) {
            if (scores[r] > most) most = scores[r];
          },
          Kokkos::Max<float>(maximum));
      if (before > maximum) maximum = before;
      const float shift = shift_of(maximum);
      float weight = 0;
      Kokkos::parallel_reduce(
          Kokkos::ThreadVectorRange(team, count),
          [&](int r, float& sum) {
            const float own_weight = base::math::exp(scores[r] - shift);
            sum += own_weight;
            scores[r] = own_weight * Rows::value_factor(scratch.notes[r]);
          },
          weight);
      Kokkos::single(Kokkos::PerThread(team), [&] {
        const float factor = base::math::exp(before - shift);
        scratch.maximum[g] = maximum;
        scratch.weight[g] = is_first ? weight : weight_before * factor + weight;
        scratch.factor[g] = factor;
      });
    });
  }

  /// Adds weighted values: thread t of T takes rows t, t + T, t + 2 T …, each lane some dimensions.
  template <bool whole>
  KOKKOS_FORCEINLINE_FUNCTION void add_values(const base::TeamMember& team, int own, int count,
                                              bool is_first, const Scratch& scratch) const {
    const int vectors = padded / width;
    const int threads = team.team_size();
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
      Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, vectors), [&](int v) {
        float sums[G][width];
        for (int g = 0; g < G; ++g) {
          const float* const before = scratch.sums + (t * G + g) * padded + v * width;
          for (int e = 0; e < width; ++e) {
            sums[g][e] = is_first || g >= own ? 0.0f : before[e] * scratch.factor[g];
          }
        }
        const auto add = [&](int r) {
          float value[width];
          rows.template load<whole, true>(scratch.values[r], scratch.notes[r], v, spans.dim, value);
          for (int g = 0; g < G; ++g) {
            const float weight = g < own ? scratch.scores[g * split_block_rows + r] : 0.0f;
            for (int e = 0; e < width; ++e) sums[g][e] += weight * value[e];
          }
        };
        int r = t;
        for (; r + 3 * threads < count; r += 4 * threads) {
          add(r);
          add(r + threads);
          add(r + 2 * threads);
          add(r + 3 * threads);
        }
        for (; r < count; r += threads) add(r);
        for (int g = 0; g < G; ++g) {
          for (int e = 0; e < width; ++e) {
            scratch.sums[(t * G + g) * padded + v * width + e] = sums[g][e];
          }
        }
      });
    });
  }
};

/// Launches AttendParts for `parts` parts, with up to G query heads at once.
template <int G, class Rows>
void attend_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                  const Rows& rows, const float* queries, const Strides& query_strides,
                  float soft_cap) {
  constexpr int width = Rows::width;
  const int vectors = (spans.dim + width - 1) / width;
  const int padded = vectors * width;
  if constexpr (G > 1) {
    if (PartScratch<Rows>::bytes(G, padded, 1) > base::team_scratch_limit()) {
      return attend_parts<G / 2>(exec, spans, parts, rows, queries, query_strides, soft_cap);
    }
  }
  AttendParts<Rows, G> kernel{
      spans, rows, queries, query_strides, 0, soft_cap, static_cast<std::int16_t>(padded)};
  static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
  const int lanes = lanes_for(vectors);
  const auto bytes = [&](int threads) { return PartScratch<Rows>::bytes(G, padded, threads); };
  const auto policy = base::team_policy<base::SmallTeamPolicy>(
      exec, parts, {std::max(1, team_threads / lanes), lanes}, kernel, bytes);
  kernel.scratch_bytes = static_cast<std::int32_t>(bytes(policy.team_size()));
  base::parallel_for(
      Rows::quantised ? "kvzap::attention::split_quantised" : "kvzap::attention::split", policy,
      kernel);
}

/// Launches AttendParts so that it reads each row once for up to 8 query heads of its group.
template <class Rows>
void attend_groups(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                   const Rows& rows, const float* queries, const Strides& query_strides,
                   float soft_cap) {
  const auto launch = [&](auto heads) {
    attend_parts<decltype(heads)::value>(exec, spans, parts, rows, queries, query_strides,
                                         soft_cap);
  };
  if (spans.group == 1) {
    launch(std::integral_constant<int, 1>());
  } else if (spans.group == 2) {
    launch(std::integral_constant<int, 2>());
  } else if (spans.group <= 4) {
    launch(std::integral_constant<int, 4>());
  } else {
    launch(std::integral_constant<int, 8>());
  }
}

struct QuantisedPages {
  PageFormat format;
  const std::uintptr_t* addresses;
  int page_rows;
};

/// Attends the parts of quantised rows; their type decides the kernel.
void attend_quantised_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                            const QuantisedPages& pages, const float* queries,
                            const Strides& query_strides, float soft_cap);

}  // namespace kvzap::attention
