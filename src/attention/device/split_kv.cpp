#include "attention/device/split_kv.hpp"

#include <cmath>

#include "attention/device/row_vector.hpp"
#include "base/scratch.hpp"
#include "base/soft_cap.hpp"
#include "base/team.hpp"
#include "base/value_types.hpp"

namespace kvzap::attention {

/// Sums of several rows and query heads.
template <int count>
struct PartialDots {
  float value[count];
  KOKKOS_INLINE_FUNCTION PartialDots() {
    for (float& v : value) v = 0;
  }
  KOKKOS_INLINE_FUNCTION PartialDots& operator+=(const PartialDots& other) {
    for (int i = 0; i < count; ++i) value[i] += other.value[i];
    return *this;
  }
};

}  // namespace kvzap::attention

template <int count>
struct Kokkos::reduction_identity<kvzap::attention::PartialDots<count>> {
  KOKKOS_FORCEINLINE_FUNCTION static kvzap::attention::PartialDots<count> sum() { return {}; }
};

namespace kvzap::attention {
namespace {

// Rows of a team at a time: few enough that few heads fill a device, and many enough that partial
// results are much smaller than the rows.
constexpr int split_block_rows = 128;
// Parts of a head: enough for a few heads to fill a device. Bounds the memory for parts.
constexpr int most_parts = 512;
// The most spans that a kernel's arguments describe. More spans are described by a table in device
// memory; upload kernels write it, each with a part of the table as its arguments.
constexpr int spans_in_arguments = 4;
constexpr int spans_in_upload = 6;
// Spans whose parts need more floats than this together take several launches.
constexpr std::int64_t most_floats = std::int64_t{16} << 20;
// Rows whose keys are multiplied at once, so that several loads are in flight.
constexpr int rows_at_once = 4;
// Threads and lanes of a team on a device.
constexpr int team_threads = 128;
constexpr base::TeamShape merge_shape{8, 32};

/// Returns the smallest power of two that is at least `count`, but at most 32.
int lanes_for(int count) {
  int lanes = 1;
  while (lanes < count && lanes < 32) lanes *= 2;
  return lanes;
}

/// Returns the rows of each part of a head of `rows` rows.
KOKKOS_INLINE_FUNCTION std::int64_t rows_of_part(std::int64_t rows) {
  const std::int64_t blocks = (rows + split_block_rows - 1) / split_block_rows;
  return (blocks + most_parts - 1) / most_parts * split_block_rows;
}
/// Returns a bound on the parts of a head of up to `rows` rows.
std::int64_t parts_bound(std::int64_t rows) {
  return std::min<std::int64_t>(most_parts, (rows + split_block_rows - 1) / split_block_rows);
}

/// The place of a span in memory.
template <class Value>
struct SplitSpan {
  const PageId* table;           // (head, page), row after row
  const std::int64_t* retained;  // (head)
  const Value* ring;
  std::int64_t first_new;
  std::int32_t table_stride;
  std::int32_t ring_rows;
  std::int32_t new_rows;
  std::int32_t query;
  std::int32_t parts;       // a bound for each head
  std::int32_t first_part;  // number of parts of all earlier spans of the launch

  KOKKOS_INLINE_FUNCTION std::int64_t rows(int head) const {
    return retained[head] + ring_rows + new_rows;
  }
};

/// The spans of a launch, as both kernels use them.
template <class Value>
struct SplitSpans {
  SplitSpan<Value> few[spans_in_arguments];
  const SplitSpan<Value>* many;  // replaces `few` unless null
  float* partials;
  std::int32_t count;
  std::int32_t heads, group, dim;

  KOKKOS_INLINE_FUNCTION const SplitSpan<Value>& operator[](int i) const {
    return many ? many[i] : few[i];
  }
  /// Returns the span of a part, which is counted over all spans and heads.
  KOKKOS_INLINE_FUNCTION int span_of(int part) const {
    int first = 0, last = count - 1;
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if ((*this)[middle].first_part <= part) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
  /// Returns a part's maximum (group), weight (group) and sums (group, dim).
  KOKKOS_INLINE_FUNCTION float* partial(std::int64_t part) const {
    return partials + part * group * (dim + 2);
  }
};

template <class Value>
struct SpanUpload {
  SplitSpan<Value> spans[spans_in_upload];
  SplitSpan<Value>* target;

  KOKKOS_FUNCTION void operator()(int i) const { target[i] = spans[i]; }
};

struct Strides {
  std::int64_t row, head, dim;
};

/// Team memory of the first kernel.
template <class Value>
struct PartScratch {
  const Value** keys;         // (split_block_rows)
  const Value** values;       // (split_block_rows)
  std::int64_t* dim_strides;  // (split_block_rows)
  float* queries;             // (heads at once, padded dim)
  float* scores;              // (heads at once, split_block_rows)
  float* maximum;             // (heads at once), so far
  float* weight;              // (heads at once)
  float* factor;              // (heads at once): of earlier weights and sums
  float* sums;                // (thread, heads at once, padded dim)

  static std::size_t bytes(int heads_at_once, int padded, int threads) {
    return split_block_rows * (2 * sizeof(const Value*) + sizeof(std::int64_t)) +
           sizeof(float) * heads_at_once *
               (std::size_t(padded) + split_block_rows + 3 + std::size_t(threads) * padded);
  }
  KOKKOS_FUNCTION PartScratch(char* base, int heads_at_once, int padded) {
    keys = reinterpret_cast<const Value**>(base);
    values = keys + split_block_rows;
    dim_strides = reinterpret_cast<std::int64_t*>(values + split_block_rows);
    queries = reinterpret_cast<float*>(dim_strides + split_block_rows);
    scores = queries + std::int64_t{heads_at_once} * padded;
    maximum = scores + std::int64_t{heads_at_once} * split_block_rows;
    weight = maximum + heads_at_once;
    factor = weight + heads_at_once;
    sums = factor + heads_at_once;
  }
};

/// The first kernel: one part per team. G: query heads at once.
template <class Value, int G>
struct AttendParts {
  SplitSpans<Value> spans;
  const std::uintptr_t* addresses;  // by page id
  const float* queries;
  const Value* new_keys;
  const Value* new_values;
  Strides query_strides, new_strides;
  std::int32_t window, page_rows;
  std::int32_t scratch_bytes;
  float soft_cap;       // 0: none
  std::int16_t padded;  // dim, to whole vectors of 16 bytes
  bool by_token;

  static constexpr int width = RowVector<Value>::width;

  struct Row {
    const Value* key;
    const Value* value;
    std::int64_t dim_stride;
  };
  /// Returns row `row` of a head: pages first, then ring, then the span's new rows.
  KOKKOS_INLINE_FUNCTION Row row_at(const SplitSpan<Value>& span, int head,
                                    std::int64_t row) const {
    const std::int64_t retained = span.retained[head];
    const std::int64_t cached = retained + span.ring_rows;
    if (row >= cached) {
      const std::int64_t offset =
          (span.first_new + row - cached) * new_strides.row + head * new_strides.head;
      return {new_keys + offset, new_values + offset, new_strides.dim};
    }
    const Value* base = span.ring + std::int64_t{2} * head * window * spans.dim;
    std::int64_t slot = row - retained;
    int capacity = window;
    if (row < retained) {
      const PageId page = span.table[std::int64_t{head} * span.table_stride + row / page_rows];
      base = reinterpret_cast<const Value*>(addresses[page]);
      slot = row % page_rows;
      capacity = page_rows;
    }
    const Value* key = base + slot * (by_token ? spans.dim : 1);
    return {key, key + std::int64_t{capacity} * spans.dim, by_token ? 1 : capacity};
  }

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int rank = team.league_rank();
    const SplitSpan<Value>& span = spans[spans.span_of(rank)];
    const int head = (rank - span.first_part) / span.parts;
    const std::int64_t part = (rank - span.first_part) % span.parts;
    const std::int64_t rows = span.rows(head);
    const std::int64_t begin = part * rows_of_part(rows);
    if (begin >= rows) return;
    const std::int64_t end = begin + rows_of_part(rows) < rows ? begin + rows_of_part(rows) : rows;
    const PartScratch<Value> scratch(
        static_cast<char*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16)), G, padded);
    const int group = spans.group;
    const int dim = spans.dim;
    float* const partial = spans.partial(rank);
    const int threads = team.team_size();
    for (int first = 0; first < group; first += G) {
      const int own = group - first < G ? group - first : G;
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, G), [&](int g) {
        Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, padded), [&](int d) {
          scratch.queries[g * padded + d] =
              g < own && d < dim
                  ? queries[span.query * query_strides.row +
                            (head * group + first + g) * query_strides.head + d * query_strides.dim]
                  : 0.0f;
        });
      });
      for (std::int64_t row = begin; row < end; row += split_block_rows) {
        const int count =
            static_cast<int>(end - row < split_block_rows ? end - row : split_block_rows);
        int scattered = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, count),
            [&](int r, int& sum) {
              const Row at = row_at(span, head, row + r);
              scratch.keys[r] = at.key;
              scratch.values[r] = at.value;
              scratch.dim_strides[r] = at.dim_stride;
              if (at.dim_stride != 1 || !is_vector_aligned(at.key) ||
                  !is_vector_aligned(at.value)) {
                ++sum;
              }
            },
            scattered);
        // All threads see the queries and the addresses of rows.
        team.team_barrier();
        if (scattered == 0 && dim % width == 0) {
          attend<true>(team, own, count, row == begin, scratch);
        } else {
          attend<false>(team, own, count, row == begin, scratch);
        }
        // The sums are complete; their inputs may be overwritten.
        team.team_barrier();
      }
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own), [&](int g) {
        Kokkos::single(Kokkos::PerThread(team), [&] {
          partial[first + g] = scratch.maximum[g];
          partial[group + first + g] = scratch.weight[g];
        });
        Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, dim), [&](int d) {
          float sum = 0;
          for (int t = 0; t < threads; ++t) sum += scratch.sums[(t * G + g) * padded + d];
          partial[2 * group + (first + g) * dim + d] = sum;
        });
      });
      // The next query heads overwrite the inputs of these results.
      team.team_barrier();
    }
  }

  /// Adds `count` rows to maximum, weight and sums. whole: every row is a sequence of aligned
  /// vectors. is_first: there were none before.
  template <bool whole>
  KOKKOS_INLINE_FUNCTION void attend(const base::TeamMember& team, int own, int count,
                                     bool is_first, const PartScratch<Value>& scratch) const {
    score<whole>(team, count, scratch);
    team.team_barrier();
    weigh(team, own, count, is_first, scratch);
    team.team_barrier();
    add_values<whole>(team, own, count, is_first, scratch);
  }

  /// Reads vector v of the r-th row as floats.
  template <bool whole>
  KOKKOS_FORCEINLINE_FUNCTION void load(const PartScratch<Value>& scratch, const Value* row, int r,
                                        int v, float* target) const {
    if constexpr (whole) {
      RowVector<Value>::load(row + v * width, target);
    } else {
      const std::int64_t stride = scratch.dim_strides[r];
      for (int e = 0; e < width; ++e) {
        const int d = v * width + e;
        target[e] = d < spans.dim ? static_cast<float>(row[d * stride]) : 0.0f;
      }
    }
  }

  /// Computes scores: a thread has some rows, its lanes their dimensions.
  template <bool whole>
  KOKKOS_FORCEINLINE_FUNCTION void score(const base::TeamMember& team, int count,
                                         const PartScratch<Value>& scratch) const {
    const int vectors = padded / width;
    const float scaling = 1.0f / base::math::sqrt(static_cast<float>(spans.dim));
    using Dots = PartialDots<G * rows_at_once>;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, (count + rows_at_once - 1) / rows_at_once),
                         [&](int block) {
                           const int r0 = block * rows_at_once;
                           Dots dots;
                           Kokkos::parallel_reduce(
                               Kokkos::ThreadVectorRange(team, vectors),
                               [&](int v, Dots& sum) {
                                 float key[rows_at_once][width];
                                 for (int i = 0; i < rows_at_once; ++i) {
                                   const int r = r0 + i < count ? r0 + i : count - 1;
                                   load<whole>(scratch, scratch.keys[r], r, v, key[i]);
                                 }
                                 for (int g = 0; g < G; ++g) {
                                   float query[width];
                                   for (int e = 0; e < width; ++e) {
                                     query[e] = scratch.queries[g * padded + v * width + e];
                                   }
                                   for (int i = 0; i < rows_at_once; ++i) {
                                     for (int e = 0; e < width; ++e) {
                                       sum.value[g * rows_at_once + i] += query[e] * key[i][e];
                                     }
                                   }
                                 }
                               },
                               Kokkos::Sum<Dots>(dots));
                           Kokkos::single(Kokkos::PerThread(team), [&] {
                             for (int g = 0; g < G; ++g) {
                               for (int i = 0; i < rows_at_once && r0 + i < count; ++i) {
                                 const float s = dots.value[g * rows_at_once + i] * scaling;
                                 scratch.scores[g * split_block_rows + r0 + i] =
                                     soft_cap > 0 ? base::soft_capped(s, soft_cap) : s;
                               }
                             }
                           });
                         });
  }

  /// Turns scores into weights relative to the part's largest score so far.
  KOKKOS_FORCEINLINE_FUNCTION void weigh(const base::TeamMember& team, int own, int count,
                                         bool is_first, const PartScratch<Value>& scratch) const {
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
            scores[r] = base::math::exp(scores[r] - shift);
            sum += scores[r];
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
                                              bool is_first,
                                              const PartScratch<Value>& scratch) const {
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
          load<whole>(scratch, scratch.values[r], r, v, value);
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

/// The second kernel: one query head per team; league rank = (span, query head).
template <class Value>
struct MergeParts {
  SplitSpans<Value> spans;
  float* output;
  float* lse;  // may be null
  Strides output_strides;
  std::int64_t lse_row_stride, lse_head_stride;
  std::size_t scratch_bytes;

  KOKKOS_FUNCTION void operator()(const base::TeamMember& team) const {
    const int group = spans.group;
    const int dim = spans.dim;
    const int query_heads = spans.heads * group;
    const int query_head = team.league_rank() % query_heads;
    const SplitSpan<Value>& span = spans[team.league_rank() / query_heads];
    const int head = query_head / group;
    const int g = query_head % group;
    const std::int64_t rows = span.rows(head);
    const std::int64_t own = rows_of_part(rows);
    const int parts = static_cast<int>((rows + own - 1) / own);
    const int first_part = span.first_part + head * span.parts;
    const int threads = team.team_size();
    auto* const sums =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    float maximum = minus_infinity;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, parts),
        [&](int part, float& most) {
          const float largest = spans.partial(first_part + part)[g];
          if (largest > most) most = largest;
        },
        Kokkos::Max<float>(maximum));
    const float shift = shift_of(maximum);
    float weight = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, parts),
        [&](int part, float& sum) {
          const float* const partial = spans.partial(first_part + part);
          sum += base::math::exp(partial[g] - shift) * partial[group + g];
        },
        weight);
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
      Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, dim), [&](int d) {
        float sum = 0;
        for (int part = t; part < parts; part += threads) {
          const float* const partial = spans.partial(first_part + part);
          sum += base::math::exp(partial[g] - shift) * partial[2 * group + g * dim + d];
        }
        sums[t * dim + d] = sum;
      });
    });
    team.team_barrier();
    const float inverse = inverse_of(weight);
    float* const result =
        output + span.query * output_strides.row + query_head * output_strides.head;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, dim), [&](int d) {
      float sum = 0;
      for (int t = 0; t < threads; ++t) sum += sums[t * dim + d];
      result[d * output_strides.dim] = sum * inverse;
    });
    if (lse) {
      Kokkos::single(Kokkos::PerTeam(team), [&] {
        lse[span.query * lse_row_stride + query_head * lse_head_stride] =
            log_sum_exp(maximum, weight);
      });
    }
  }
};

template <class View>
Strides strides_of(const View& view) {
  return {static_cast<std::int64_t>(view.stride(0)), static_cast<std::int64_t>(view.stride(1)),
          static_cast<std::int64_t>(view.stride(2))};
}

template <class Value, int G, PageOrder order>
void attend_parts(const ExecutionSpace& exec, const SplitSpans<Value>& spans, std::int64_t parts,
                  const CachedLayer<Value, order>& cached,
                  const AttentionCall<Value, order>& call) {
  constexpr int width = RowVector<Value>::width;
  const int vectors = (spans.dim + width - 1) / width;
  const int padded = vectors * width;
  if constexpr (G > 1) {
    if (PartScratch<Value>::bytes(G, padded, 1) > base::team_scratch_limit()) {
      return attend_parts<Value, G / 2>(exec, spans, parts, cached, call);
    }
  }
  AttendParts<Value, G> kernel{spans,
                               cached.addresses.data(),
                               call.queries.data(),
                               call.new_keys.data(),
                               call.new_values.data(),
                               strides_of(call.queries),
                               strides_of(call.new_keys),
                               cached.window,
                               cached.page_rows,
                               0,
                               call.soft_cap,
                               static_cast<std::int16_t>(padded),
                               order == PageOrder::token_major};
  static_assert(sizeof(kernel) <= base::most_arguments, "Kokkos would wait");
  const int lanes = lanes_for(vectors);
  const auto bytes = [&](int threads) { return PartScratch<Value>::bytes(G, padded, threads); };
  const base::TeamPolicy policy =
      base::team_policy(exec, parts, {std::max(1, team_threads / lanes), lanes}, kernel, bytes);
  kernel.scratch_bytes = static_cast<std::int32_t>(bytes(policy.team_size()));
  Kokkos::parallel_for("kvzap::attention::split", policy, kernel);
}

// Reads each row once for up to 8 query heads of its group.
template <class Value, PageOrder order>
void attend_groups(const ExecutionSpace& exec, const SplitSpans<Value>& spans, std::int64_t parts,
                   const CachedLayer<Value, order>& cached,
                   const AttentionCall<Value, order>& call) {
  if (call.group == 1) {
    attend_parts<Value, 1>(exec, spans, parts, cached, call);
  } else if (call.group == 2) {
    attend_parts<Value, 2>(exec, spans, parts, cached, call);
  } else if (call.group <= 4) {
    attend_parts<Value, 4>(exec, spans, parts, cached, call);
  } else {
    attend_parts<Value, 8>(exec, spans, parts, cached, call);
  }
}

template <class Value, PageOrder order>
void merge_parts(const ExecutionSpace& exec, const SplitSpans<Value>& spans,
                 const AttentionCall<Value, order>& call) {
  MergeParts<Value> merge{spans,
                          call.output.data(),
                          call.wants_lse() ? call.lse.data() : nullptr,
                          strides_of(call.output),
                          static_cast<std::int64_t>(call.lse.stride(0)),
                          static_cast<std::int64_t>(call.lse.stride(1)),
                          0};
  static_assert(sizeof(merge) <= base::most_arguments, "Kokkos would wait");
  const auto bytes = [&](int threads) { return sizeof(float) * threads * call.dim; };
  const base::TeamPolicy policy = base::team_policy(
      exec, std::int64_t{spans.count} * call.kv_heads * call.group, merge_shape, merge, bytes);
  merge.scratch_bytes = bytes(policy.team_size());
  Kokkos::parallel_for("kvzap::attention::merge", policy, merge);
}

}  // namespace

template <class Value, PageOrder order>
std::size_t SplitKV<Value, order>::scratch_bytes(const AttentionExtents& extents) {
  const std::int64_t part = std::int64_t{extents.group} * (extents.head_dim + 2);
  // Every head of a span gets space for the parts of the span's longest head.
  const std::int64_t head_parts = std::min(extents.single_rows / split_block_rows + extents.spans,
                                           extents.spans * parts_bound(extents.longest_single));
  const std::int64_t all = extents.kv_heads * head_parts * part;
  const std::int64_t one = extents.kv_heads * parts_bound(extents.longest_single) * part;
  const bool needs_table = extents.spans > spans_in_arguments;
  return sizeof(float) * std::min(all, std::max(one, most_floats)) +
         (needs_table ? extents.spans * sizeof(SplitSpan<Value>) : 0);
}

template <class Value, PageOrder order>
void SplitKV<Value, order>::reserve(const AttentionExtents& extents) {
  const std::size_t table =
      extents.spans > spans_in_arguments ? extents.spans * sizeof(SplitSpan<Value>) : 0;
  base::reserve_scratch(m_table, static_cast<std::int64_t>(table), "kvzap::attention::split_spans");
  base::reserve_scratch(m_partials,
                        static_cast<std::int64_t>((scratch_bytes(extents) - table) / sizeof(float)),
                        "kvzap::attention::partials");
}

template <class Value, PageOrder order>
void SplitKV<Value, order>::operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                                       const AttentionCall<Value, order>& call) {
  const std::int64_t part_size = std::int64_t{call.group} * (call.dim + 2);
  const auto parts_of = [&](const Span& span) {
    std::int64_t longest = 0;
    for (int h = 0; h < call.kv_heads; ++h) longest = std::max(longest, span.cached.bounds(h));
    return parts_bound(longest + span.cached.ring_rows() + span.new_rows);
  };
  const auto same_cache = [](const Span& a, const Span& b) {
    return a.cached.addresses.data() == b.cached.addresses.data() &&
           a.cached.window == b.cached.window && a.cached.page_rows == b.cached.page_rows;
  };
  const auto n_spans = static_cast<int>(spans.size());
  const auto next_single = [&](int i) {
    while (i < n_spans && spans[i].queries != 1) ++i;
    return i;
  };
  for (int begin = next_single(0); begin < n_spans;) {
    // Takes spans while there is space for their parts.
    std::int64_t parts = 0;
    int count = 0;
    int end = begin;
    while (end < n_spans && same_cache(spans[end], spans[begin])) {
      const std::int64_t own = call.kv_heads * parts_of(spans[end]);
      if (count > 0 && (parts + own) * part_size > most_floats) break;
      parts += own;
      ++count;
      end = next_single(end + 1);
    }
    const auto room = static_cast<std::int64_t>(m_partials.extent(0));
    if (parts * part_size > room) {
      // At least doubles the space: heads grow in every step, and an allocation waits for the
      // device.
      base::reserve_scratch(m_partials,
                            std::max(parts * part_size, std::min(2 * room, most_floats)),
                            "kvzap::attention::partials");
    }
    SplitSpans<Value> launch{};
    launch.partials = m_partials.data();
    launch.count = count;
    launch.heads = call.kv_heads;
    launch.group = call.group;
    launch.dim = call.dim;
    SplitSpan<Value>* table = nullptr;
    if (count > spans_in_arguments) {
      const auto bytes = static_cast<std::int64_t>(sizeof(SplitSpan<Value>));
      const auto old = static_cast<std::int64_t>(m_table.extent(0)) / bytes;
      if (count > old) {
        base::reserve_scratch(m_table, bytes * std::max<std::int64_t>(count, 2 * old),
                              "kvzap::attention::split_spans");
      }
      table = reinterpret_cast<SplitSpan<Value>*>(m_table.data());
    }
    SpanUpload<Value> upload{};
    static_assert(sizeof(upload) <= base::most_arguments, "Kokkos would wait");
    std::int64_t first_part = 0;
    int i = 0;
    for (int s = begin; s < end; s = next_single(s + 1), ++i) {
      const Span& span = spans[s];
      const auto own = static_cast<std::int32_t>(parts_of(span));
      const SplitSpan<Value> at{span.cached.page_table.data(),
                                span.cached.retained.data(),
                                span.cached.ring.data(),
                                span.first_new,
                                static_cast<std::int32_t>(span.cached.page_table.stride(0)),
                                static_cast<std::int32_t>(span.cached.ring_rows()),
                                static_cast<std::int32_t>(span.new_rows),
                                static_cast<std::int32_t>(span.first_query),
                                own,
                                static_cast<std::int32_t>(first_part)};
      first_part += std::int64_t{call.kv_heads} * own;
      if (!table) {
        launch.few[i] = at;
        continue;
      }
      upload.spans[i % spans_in_upload] = at;
      if (i % spans_in_upload == spans_in_upload - 1 || i == count - 1) {
        const int first = i / spans_in_upload * spans_in_upload;
        upload.target = table + first;
        Kokkos::parallel_for("kvzap::attention::split_spans",
                             Kokkos::RangePolicy<ExecutionSpace>(exec, 0, i + 1 - first), upload);
      }
    }
    launch.many = table;

    attend_groups(exec, launch, parts, spans[begin].cached, call);
    merge_parts(exec, launch, call);
    begin = end;
  }
}

#define KVZAP_INSTANTIATE(Value, order) template class SplitKV<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::attention
