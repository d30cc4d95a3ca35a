#include "attention/device/split_kv.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/device/row_vector.hpp"
#include "base/instantiate.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"

namespace kvzap::detail {

/// Sums that belong to different rows and query heads.
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

}  // namespace kvzap::detail

template <int count>
struct Kokkos::reduction_identity<kvzap::detail::PartialDots<count>> {
  KOKKOS_FORCEINLINE_FUNCTION static kvzap::detail::PartialDots<count> sum() { return {}; }
};

namespace kvzap::detail {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Rows of a part: few, so that few heads fill a device, and many enough that what a part leaves
// behind is small beside its rows.
constexpr int part_rows = 128;
// Sequences whose whereabouts fit into one kernel's arguments. (Kokkos passes large ones through a
// buffer, for which it waits.)
constexpr int most_sequences = 4;
// Rows whose keys are multiplied at once, so that several loads are on their way.
constexpr int rows_at_once = 4;
// Threads of a team on a device.
constexpr int team_threads = runs_on_host ? 1 : 128;

using Policy = Kokkos::TeamPolicy<ExecutionSpace>;
using Member = typename Policy::member_type;

/// The largest power of two up to 32 that `count` needs.
int lanes_for(int count) {
  int lanes = 1;
  while (lanes < count && lanes < 32) lanes *= 2;
  return runs_on_host ? 1 : lanes;
}

KOKKOS_INLINE_FUNCTION float shift_of(float maximum) {
  return maximum == minus_infinity ? 0.0f : maximum;
}

/// What both kernels know: where everything lies.
template <class Value>
struct SplitKVProblem {
  struct Sequence {
    const PageId* table;           // (head, page), row after row
    const std::int64_t* retained;  // (head)
    const Value* ring;
    std::int32_t table_stride;
    std::int32_t tokens;
  };
  struct Strides {
    std::int64_t row, head, dim;
  };

  Sequence sequences[most_sequences];
  const std::uintptr_t* addresses;  // by page id
  const float* queries;
  const Value* new_keys;
  const Value* new_values;
  float* output;
  float* partials;
  Strides query_strides, output_strides, new_strides;
  std::int64_t new_rows;
  int heads, group, dim, window, page_rows;
  int parts;  // no head has more
  bool by_token;

  KOKKOS_INLINE_FUNCTION std::int64_t ring_rows(const Sequence& sequence) const {
    return sequence.tokens < window ? sequence.tokens : window;
  }
  KOKKOS_INLINE_FUNCTION std::int64_t rows(const Sequence& sequence, int head) const {
    return sequence.retained[head] + ring_rows(sequence) + new_rows;
  }
  /// Of a part: maximum (group), weight (group), sums (group, dim).
  KOKKOS_INLINE_FUNCTION float* partial(int sequence, int head, std::int64_t part) const {
    return partials + ((std::int64_t{sequence} * heads + head) * parts + part) * group * (dim + 2);
  }

  struct Row {
    const Value* key;
    const Value* value;
    std::int64_t dim_stride;
  };
  /// Row `row` of a head: pages, then ring, then the sequence's rows of the chunk.
  KOKKOS_INLINE_FUNCTION Row row_at(int b, int head, std::int64_t row) const {
    const Sequence& sequence = sequences[b];
    const std::int64_t retained = sequence.retained[head];
    const std::int64_t cached = retained + ring_rows(sequence);
    if (row >= cached) {
      const std::int64_t offset =
          (b * new_rows + row - cached) * new_strides.row + head * new_strides.head;
      return {new_keys + offset, new_values + offset, new_strides.dim};
    }
    const Value* base = sequence.ring + std::int64_t{2} * head * window * dim;
    std::int64_t slot = row - retained;
    int capacity = window;
    if (row < retained) {
      const PageId page =
          sequence.table[std::int64_t{head} * sequence.table_stride + row / page_rows];
      base = reinterpret_cast<const Value*>(addresses[page]);
      slot = row % page_rows;
      capacity = page_rows;
    }
    const Value* key = base + slot * (by_token ? dim : 1);
    return {key, key + std::int64_t{capacity} * dim, by_token ? 1 : capacity};
  }
};

/// Team memory of the first kernel.
template <class Value>
struct PartScratch {
  const Value** keys;         // (part_rows)
  const Value** values;       // (part_rows)
  std::int64_t* dim_strides;  // (part_rows)
  float* queries;             // (heads at once, padded dim)
  float* scores;              // (heads at once, part_rows)
  float* sums;                // (thread, heads at once, padded dim)

  static std::size_t bytes(int heads_at_once, int padded, int threads) {
    return part_rows * (2 * sizeof(const Value*) + sizeof(std::int64_t)) +
           sizeof(float) * heads_at_once *
               (std::size_t(padded) + part_rows + std::size_t(threads) * padded);
  }
  KOKKOS_FUNCTION PartScratch(char* base, int heads_at_once, int padded) {
    keys = reinterpret_cast<const Value**>(base);
    values = keys + part_rows;
    dim_strides = reinterpret_cast<std::int64_t*>(values + part_rows);
    queries = reinterpret_cast<float*>(dim_strides + part_rows);
    scores = queries + std::int64_t{heads_at_once} * padded;
    sums = scores + std::int64_t{heads_at_once} * part_rows;
  }
};

/// One part per team: league rank = (sequence, head, part). G: query heads at once.
template <class Value, int G>
struct AttendParts {
  SplitKVProblem<Value> p{};
  int padded = 0;  // dim, to whole vectors of 16 bytes
  std::size_t scratch_bytes = 0;

  static constexpr int width = RowVector<Value>::width;

  KOKKOS_FUNCTION void operator()(const Member& team) const {
    const int part = team.league_rank() % p.parts;
    const int head = team.league_rank() / p.parts % p.heads;
    const int b = team.league_rank() / p.parts / p.heads;
    const std::int64_t rows = p.rows(p.sequences[b], head);
    const std::int64_t begin = std::int64_t{part} * part_rows;
    if (begin >= rows) return;
    const int count = static_cast<int>(rows - begin < part_rows ? rows - begin : part_rows);
    const PartScratch<Value> scratch(
        static_cast<char*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16)), G, padded);
    int scattered = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, count),
        [&](int r, int& sum) {
          const auto row = p.row_at(b, head, begin + r);
          scratch.keys[r] = row.key;
          scratch.values[r] = row.value;
          scratch.dim_strides[r] = row.dim_stride;
          if (row.dim_stride != 1 || !is_vector_aligned(row.key) || !is_vector_aligned(row.value)) {
            ++sum;
          }
        },
        scattered);
    if (scattered == 0 && p.dim % width == 0) {
      attend<true>(team, b, head, part, count, scratch);
    } else {
      attend<false>(team, b, head, part, count, scratch);
    }
  }

  /// whole: every row is a sequence of aligned vectors.
  template <bool whole>
  KOKKOS_INLINE_FUNCTION void attend(const Member& team, int b, int head, int part, int count,
                                     const PartScratch<Value>& scratch) const {
    const int vectors = padded / width;
    const float scaling = 1.0f / math::sqrt(static_cast<float>(p.dim));
    float* const partial = p.partial(b, head, part);
    const auto load = [&](const Value* row, int r, int v, float* target) {
      if constexpr (whole) {
        RowVector<Value>::load(row + v * width, target);
      } else {
        const std::int64_t stride = scratch.dim_strides[r];
        for (int e = 0; e < width; ++e) {
          const int d = v * width + e;
          target[e] = d < p.dim ? static_cast<float>(row[d * stride]) : 0.0f;
        }
      }
    };
    for (int first = 0; first < p.group; first += G) {
      const int own = p.group - first < G ? p.group - first : G;
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, G), [&](int g) {
        Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, padded), [&](int d) {
          scratch.queries[g * padded + d] =
              g < own && d < p.dim ? p.queries[b * p.query_strides.row +
                                               (head * p.group + first + g) * p.query_strides.head +
                                               d * p.query_strides.dim]
                                   : 0.0f;
        });
      });
      team.team_barrier();

      // Scores: a thread has some rows, its lanes their dimensions.
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
                                     load(scratch.keys[r], r, v, key[i]);
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
                                   scratch.scores[g * part_rows + r0 + i] =
                                       dots.value[g * rows_at_once + i] * scaling;
                                 }
                               }
                             });
                           });
      team.team_barrier();

      // Weights, relative to the part's largest score.
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own), [&](int g) {
        float* const scores = scratch.scores + g * part_rows;
        float maximum = minus_infinity;
        Kokkos::parallel_reduce(
            Kokkos::ThreadVectorRange(team, count),
            [&](int r, float& most) {
              if (scores[r] > most) most = scores[r];
            },
            Kokkos::Max<float>(maximum));
        const float shift = shift_of(maximum);
        float weight = 0;
        Kokkos::parallel_reduce(
            Kokkos::ThreadVectorRange(team, count),
            [&](int r, float& sum) {
              scores[r] = math::exp(scores[r] - shift);
              sum += scores[r];
            },
            weight);
        Kokkos::single(Kokkos::PerThread(team), [&] {
          partial[first + g] = maximum;
          partial[p.group + first + g] = weight;
        });
      });
      team.team_barrier();

      // Weighted sums: every thread takes each so-manieth row, every lane its dimensions.
      const int threads = team.team_size();
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
        Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, vectors), [&](int v) {
          float sums[G][width];
          for (int g = 0; g < G; ++g) {
            for (int e = 0; e < width; ++e) sums[g][e] = 0;
          }
          const auto add = [&](int r) {
            float value[width];
            load(scratch.values[r], r, v, value);
            for (int g = 0; g < G; ++g) {
              const float weight = g < own ? scratch.scores[g * part_rows + r] : 0.0f;
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
      team.team_barrier();
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, own), [&](int g) {
        Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, p.dim), [&](int d) {
          float sum = 0;
          for (int t = 0; t < threads; ++t) sum += scratch.sums[(t * G + g) * padded + d];
          partial[2 * p.group + (first + g) * p.dim + d] = sum;
        });
      });
      team.team_barrier();
    }
  }
};

/// One query head per team: league rank = (sequence, query head).
template <class Value>
struct MergeParts {
  SplitKVProblem<Value> p{};
  std::size_t scratch_bytes = 0;

  KOKKOS_FUNCTION void operator()(const Member& team) const {
    const int query_heads = p.heads * p.group;
    const int query_head = team.league_rank() % query_heads;
    const int b = team.league_rank() / query_heads;
    const int head = query_head / p.group;
    const int g = query_head % p.group;
    const int parts = static_cast<int>((p.rows(p.sequences[b], head) + part_rows - 1) / part_rows);
    const int threads = team.team_size();
    auto* const sums =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    float maximum = minus_infinity;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, parts),
        [&](int part, float& most) {
          const float own = p.partial(b, head, part)[g];
          if (own > most) most = own;
        },
        Kokkos::Max<float>(maximum));
    const float shift = shift_of(maximum);
    float weight = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamThreadRange(team, parts),
        [&](int part, float& sum) {
          const float* const partial = p.partial(b, head, part);
          sum += math::exp(partial[g] - shift) * partial[p.group + g];
        },
        weight);
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
      Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, p.dim), [&](int d) {
        float sum = 0;
        for (int part = t; part < parts; part += threads) {
          const float* const partial = p.partial(b, head, part);
          sum += math::exp(partial[g] - shift) * partial[2 * p.group + g * p.dim + d];
        }
        sums[t * p.dim + d] = sum;
      });
    });
    team.team_barrier();
    // No rows, or none that weighs anything: zero, not NaN. A NaN stays one.
    const float inverse = weight == 0 ? 0.0f : 1.0f / weight;
    float* const output = p.output + b * p.output_strides.row + query_head * p.output_strides.head;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, p.dim), [&](int d) {
      float sum = 0;
      for (int t = 0; t < threads; ++t) sum += sums[t * p.dim + d];
      output[d * p.output_strides.dim] = sum * inverse;
    });
  }
};

template <class Value, int G>
void attend_parts(const ExecutionSpace& exec, const SplitKVProblem<Value>& problem, int sequences) {
  constexpr int width = RowVector<Value>::width;
  const int vectors = (problem.dim + width - 1) / width;
  const int lanes = lanes_for(vectors);
  const int threads = std::max(1, team_threads / lanes);
  const std::size_t bytes = PartScratch<Value>::bytes(G, vectors * width, threads);
  const AttendParts<Value, G> kernel{problem, vectors * width, bytes};
  // Above this size a kernel's arguments go through a buffer that the host has to wait for.
  static_assert(sizeof(kernel) <= 384);
  const Policy policy(exec, sequences * problem.heads * problem.parts, threads, lanes);
  Kokkos::parallel_for("kvzap::attention::split",
                       Policy(policy).set_scratch_size(0, Kokkos::PerTeam(bytes + 16)), kernel);
}

}  // namespace

template <class Value, PageOrder order>
void SplitKV<Value, order>::operator()(const ExecutionSpace& exec, const Layer* cached,
                                       std::int64_t sequences, std::int64_t new_rows,
                                       const QueryView& queries, const RowsView& new_keys,
                                       const RowsView& new_values, const OutputView& output) {
  const Layer& any = cached[0];
  SplitKVProblem<Value> p{};
  p.addresses = any.addresses.data();
  p.new_rows = new_rows;
  p.heads = any.heads;
  p.group = static_cast<int>(queries.extent(1)) / any.heads;
  p.dim = any.head_dim;
  p.window = any.window;
  p.page_rows = any.page_rows;
  p.by_token = order == PageOrder::token_major;
  const auto strides_of = [](const auto& view) {
    return typename SplitKVProblem<Value>::Strides{static_cast<std::int64_t>(view.stride(0)),
                                                   static_cast<std::int64_t>(view.stride(1)),
                                                   static_cast<std::int64_t>(view.stride(2))};
  };
  p.query_strides = strides_of(queries);
  p.output_strides = strides_of(output);
  p.new_strides = strides_of(new_keys);
  for (std::int64_t begin = 0; begin < sequences; begin += most_sequences) {
    const int count = static_cast<int>(std::min<std::int64_t>(most_sequences, sequences - begin));
    std::int64_t longest = 0;
    for (int i = 0; i < count; ++i) {
      const Layer& layer = cached[begin + i];
      p.sequences[i] = {layer.page_table.data(), layer.retained.data(), layer.ring.data(),
                        static_cast<std::int32_t>(layer.page_table.stride(0)),
                        static_cast<std::int32_t>(layer.tokens)};
      for (int h = 0; h < layer.heads; ++h) {
        longest = std::max(longest, layer.bounds(h) + layer.ring_rows() + new_rows);
      }
    }
    p.parts = static_cast<int>((longest + part_rows - 1) / part_rows);
    p.queries = queries.data() + begin * p.query_strides.row;
    p.output = output.data() + begin * p.output_strides.row;
    p.new_keys = new_keys.data() + begin * new_rows * p.new_strides.row;
    p.new_values = new_values.data() + begin * new_rows * p.new_strides.row;
    const std::int64_t partial_size = std::int64_t{p.group} * (p.dim + 2);
    reserve_scratch(m_partials, most_sequences * std::int64_t{p.heads} * p.parts * partial_size,
                    "kvzap::attention::partials");
    p.partials = m_partials.data();

    if (p.group == 1) {
      attend_parts<Value, 1>(exec, p, count);
    } else if (p.group == 2) {
      attend_parts<Value, 2>(exec, p, count);
    } else if (p.group <= 4) {
      attend_parts<Value, 4>(exec, p, count);
    } else {
      attend_parts<Value, 8>(exec, p, count);
    }
    const int lanes = lanes_for(32);
    const int threads = runs_on_host ? 1 : 8;
    const std::size_t bytes = sizeof(float) * threads * p.dim;
    const MergeParts<Value> merge{p, bytes};
    const Policy policy(exec, count * p.heads * p.group, threads, lanes);
    Kokkos::parallel_for("kvzap::attention::merge",
                         Policy(policy).set_scratch_size(0, Kokkos::PerTeam(bytes + 16)), merge);
  }
}

#define KVZAP_INSTANTIATE(Value, order) template class SplitKV<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap::detail
