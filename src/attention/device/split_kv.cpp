#include "attention/device/split_kv.hpp"

#include "attention/cuda/tensor_cores.hpp"
#include "attention/device/split_parts.hpp"
#include "base/cuda/has_tensor_cores.hpp"
#include "base/launch.hpp"
#include "base/scratch.hpp"

namespace kvzap::attention {
namespace {

// Upload kernels write the table of spans, each with a part of it as its arguments.
constexpr int spans_in_upload = 6;
// Spans whose parts need more floats than this together take several launches.
constexpr std::int64_t most_floats = std::int64_t{16} << 20;
// Threads and lanes of a team on a device.
constexpr base::TeamShape merge_shape{16, 32};

/// Returns a bound on the parts of a head of up to `rows` rows.
std::int64_t parts_bound(std::int64_t rows) {
  return std::min<std::int64_t>(most_parts, (rows + split_block_rows - 1) / split_block_rows);
}

/// Bounds on the parts of a span's heads, and their numbers among the parts of a launch.
struct PartBounds {
  std::int64_t quantised, wide;

  PartBounds(const AttentionSpan& span, int heads) {
    std::int64_t longest = 0;
    for (int h = 0; h < heads; ++h) longest = std::max(longest, span.cached.bounds(h));
    const std::int64_t rows = span.cached.ring_rows() + span.new_rows;
    const bool packed = span.cached.format.quantised();
    quantised = packed ? parts_bound(longest) : 0;
    wide = packed ? parts_bound(rows) : parts_bound(longest + rows);
  }
  /// Returns the place of a span whose parts follow these numbers, and moves these past them.
  SplitSpan place(const AttentionSpan& span, int heads, std::int64_t& first_quantised,
                  std::int64_t& first_wide) const {
    SplitSpan at = place_of(span);
    at.first_wide = static_cast<std::int32_t>(first_wide);
    at.first_quantised = static_cast<std::int32_t>(first_quantised);
    at.wide_parts = static_cast<std::int16_t>(wide);
    at.quantised_parts = static_cast<std::int16_t>(quantised);
    first_wide += heads * wide;
    first_quantised += heads * quantised;
    return at;
  }
};

/// Returns a number of parts that suffices for many steps.
std::int64_t lasting(std::int64_t parts) { return parts > 0 ? parts + parts / 8 + 4 : 0; }
/// Returns the largest number that pad_plans keeps of an earlier step.
std::int64_t most_padded(std::int64_t parts) { return lasting(parts) + parts / 2 + 8; }

struct SpanUpload {
  SplitSpan spans[spans_in_upload];
  SplitSpan* target;

  KOKKOS_FUNCTION void operator()(int i) const { target[i] = spans[i]; }
};

/// The last kernel: one query head per team; league rank = (span, query head).
struct MergeParts {
  SplitSpans spans;
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
    const SplitSpan& span = spans[team.league_rank() / query_heads];
    const int head = query_head / group;
    const int g = query_head % group;
    const int quantised = parts_of(span.quantised_rows(head));
    const int parts = quantised + parts_of(span.wide_rows(head));
    const auto partial_of = [&](int part) {
      return part < quantised ? spans.partial(span, head, part, true)
                              : spans.partial(span, head, part - quantised, false);
    };
    const int threads = team.team_size();
    auto* const sums =
        static_cast<float*>(team.team_scratch(0).get_shmem_aligned(scratch_bytes, 16));
    float* const all = sums + threads * dim;  // (dim)
    float* const factors = all + dim;         // (part)
    float maximum = minus_infinity;
    Kokkos::parallel_reduce(
        Kokkos::TeamVectorRange(team, parts),
        [&](int part, float& most) {
          const float largest = partial_of(part)[group * dim + g];
          if (largest > most) most = largest;
        },
        Kokkos::Max<float>(maximum));
    const float shift = shift_of(maximum);
    float weight = 0;
    Kokkos::parallel_reduce(
        Kokkos::TeamVectorRange(team, parts),
        [&](int part, float& sum) {
          const float* const partial = partial_of(part);
          factors[part] = base::math::exp(partial[group * dim + g] - shift);
          sum += factors[part] * partial[group * dim + group + g];
        },
        weight);
    team.team_barrier();
    // Adds the values of parts to `all`.
    const auto add = [&](int first, int last, bool is_first) {
      const auto value_of = [&](int part) { return partial_of(part) + g * dim; };
      if (dim % 4 == 0) {
        add_parts<4>(team, first, last, factors, value_of, sums);
      } else {
        add_parts<1>(team, first, last, factors, value_of, sums);
      }
      team.team_barrier();
      Kokkos::parallel_for(Kokkos::TeamVectorRange(team, dim), [&](int d) {
        float sum = is_first ? 0.0f : all[d];
        for (int t = 0; t < threads; ++t) sum += sums[t * dim + d];
        all[d] = sum;
      });
      team.team_barrier();
    };
    if (quantised > 0) {
      add(0, quantised, true);
      Kokkos::parallel_for(Kokkos::TeamThreadRange(team, 1), [&](int) {
        linalg::rotate_row_back(linalg::LaneLoops{team}, all, dim);
      });
      team.team_barrier();
    }
    add(quantised, parts, quantised == 0);
    const float inverse = inverse_of(weight);
    float* const result =
        output + span.query * output_strides.row + query_head * output_strides.head;
    Kokkos::parallel_for(Kokkos::TeamVectorRange(team, dim),
                         [&](int d) { result[d * output_strides.dim] = all[d] * inverse; });
    if (lse) {
      Kokkos::single(Kokkos::PerTeam(team), [&] {
        lse[span.query * lse_row_stride + query_head * lse_head_stride] =
            log_sum_exp(maximum, weight);
      });
    }
  }

  /// Writes sums (thread, dim) of the weighted values of parts, `width` dimensions at once.
  template <int width, class ValueOf>
  KOKKOS_INLINE_FUNCTION void add_parts(const base::TeamMember& team, int first, int last,
                                        const float* factors, const ValueOf& value_of,
                                        float* sums) const {
    const int threads = team.team_size();
    const int dim = spans.dim;
    Kokkos::parallel_for(Kokkos::TeamThreadRange(team, threads), [&](int t) {
      Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, dim / width), [&](int v) {
        constexpr int at_once = 4;  // so that several loads are in flight
        float own[at_once][width] = {};
        for (int part = first + t; part < last; part += at_once * threads) {
          for (int i = 0; i < at_once; ++i) {
            const int which = part + i * threads;
            if (which >= last) break;
            float value[width];
            load_floats<width>(value_of(which) + v * width, value);
            for (int e = 0; e < width; ++e) own[i][e] += factors[which] * value[e];
          }
        }
        for (int e = 0; e < width; ++e) {
          sums[t * dim + v * width + e] = own[0][e] + own[1][e] + (own[2][e] + own[3][e]);
        }
      });
    });
  }
};

void attend_rows(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t quantised_parts,
                 const CachedLayer& cached, const AttentionCall& call) {
  const Strides strides = strides_of(call.queries);
  const bool by_tensor_cores =
      call.path != AttentionPath::split_kv && base::cuda::has_tensor_cores();
  if (quantised_parts > 0 &&
      !(by_tensor_cores &&
        tensor_cores::attend_quantised_parts(exec, spans, quantised_parts, cached, call))) {
    attend_quantised_parts(exec, spans, quantised_parts,
                           {cached.format, cached.addresses.data(), cached.page_rows},
                           call.queries.data(), strides, call.soft_cap);
  }
  if (by_tensor_cores && tensor_cores::attend_wide_parts(exec, spans, cached, call)) return;
  with_value_type(call.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    attend_groups(exec, spans, spans.wide_parts, wide_rows_of<Value>(cached, call),
                  call.queries.data(), strides, call.soft_cap);
  });
}

void merge_parts(const ExecutionSpace& exec, const SplitSpans& spans, const AttentionCall& call) {
  MergeParts merge{spans,
                   call.output.data(),
                   call.wants_lse() ? call.lse.data() : nullptr,
                   strides_of(call.output),
                   static_cast<std::int64_t>(call.lse.stride(0)),
                   static_cast<std::int64_t>(call.lse.stride(1)),
                   0};
  static_assert(sizeof(merge) <= base::most_arguments, "Kokkos would wait");
  const auto bytes = [&](int threads) {
    return sizeof(float) * ((threads + 1) * call.dim + 2 * most_parts);
  };
  const base::TeamPolicy policy = base::team_policy(
      exec, std::int64_t{spans.count} * call.kv_heads * call.group, merge_shape, merge, bytes);
  merge.scratch_bytes = bytes(policy.team_size());
  base::parallel_for("kvzap::attention::merge", policy, merge);
}

}  // namespace

std::size_t SplitKV::scratch_bytes(const AttentionExtents& extents) {
  const std::int64_t part = SplitSpans::part_floats(extents.group, extents.head_dim);
  // Every head of a span gets space for the parts of the span's longest head.
  // Quantised rows and the wide rows after them share no part.
  const int kinds = extents.format.quantised() ? 2 : 1;
  const std::int64_t longest = std::min<std::int64_t>(
      (extents.longest_single + split_block_rows - 1) / split_block_rows + kinds - 1,
      kinds * most_parts);
  const std::int64_t head_parts = std::min(
      extents.single_rows / split_block_rows + kinds * extents.spans, extents.spans * longest);
  const std::int64_t all = extents.kv_heads * head_parts * part;
  const std::int64_t one = extents.kv_heads * longest * part;
  const bool needs_table = extents.spans > spans_in_arguments;
  return sizeof(float) * std::min(all, std::max(one, most_floats)) +
         (needs_table ? extents.spans * sizeof(SplitSpan) : 0);
}

void SplitKV::reserve(const AttentionExtents& extents) {
  const std::size_t table =
      extents.spans > spans_in_arguments ? extents.spans * sizeof(SplitSpan) : 0;
  base::reserve_scratch(m_table, static_cast<std::int64_t>(table), "kvzap::attention::split_spans");
  base::reserve_scratch(m_partials,
                        static_cast<std::int64_t>((scratch_bytes(extents) - table) / sizeof(float)),
                        "kvzap::attention::partials");
}

void SplitKV::operator()(const ExecutionSpace& exec, const std::vector<Span>& spans,
                         const AttentionCall& call) {
  const std::int64_t part_size = SplitSpans::part_floats(call.group, call.dim);
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
    std::int64_t quantised_parts = 0, wide_parts = 0;
    int count = 0;
    int end = begin;
    while (end < n_spans && same_cache(spans[end], spans[begin])) {
      const PartBounds bounds(spans[end], call.kv_heads);
      const std::int64_t own = call.kv_heads * (bounds.quantised + bounds.wide);
      if (count > 0 && (quantised_parts + wide_parts + own) * part_size > most_floats) break;
      quantised_parts += call.kv_heads * bounds.quantised;
      wide_parts += call.kv_heads * bounds.wide;
      ++count;
      end = next_single(end + 1);
    }
    const auto room = static_cast<std::int64_t>(m_partials.extent(0));
    const std::int64_t needed = (quantised_parts + wide_parts) * part_size;
    if (needed > room) {
      // At least doubles the space: heads grow in every step, and an allocation waits for the
      // device.
      base::reserve_scratch(m_partials, std::max(needed, std::min(2 * room, most_floats)),
                            "kvzap::attention::partials");
    }
    SplitSpans launch{};
    launch.partials = m_partials.data();
    launch.count = count;
    launch.heads = call.kv_heads;
    launch.group = call.group;
    launch.dim = call.dim;
    launch.wide_parts = static_cast<std::int32_t>(wide_parts);
    SplitSpan* table = nullptr;
    if (count > spans_in_arguments) {
      const auto bytes = static_cast<std::int64_t>(sizeof(SplitSpan));
      const auto old = static_cast<std::int64_t>(m_table.extent(0)) / bytes;
      if (count > old) {
        base::reserve_scratch(m_table, bytes * std::max<std::int64_t>(count, 2 * old),
                              "kvzap::attention::split_spans");
      }
      table = reinterpret_cast<SplitSpan*>(m_table.data());
    }
    SpanUpload upload{};
    static_assert(sizeof(upload) <= base::most_arguments, "Kokkos would wait");
    std::int64_t first_wide = 0, first_quantised = 0;
    int i = 0;
    for (int s = begin; s < end; s = next_single(s + 1), ++i) {
      const Span& span = spans[s];
      const SplitSpan at =
          PartBounds(span, call.kv_heads).place(span, call.kv_heads, first_quantised, first_wide);
      if (!table) {
        launch.few[i] = at;
        continue;
      }
      upload.spans[i % spans_in_upload] = at;
      if (i % spans_in_upload == spans_in_upload - 1 || i == count - 1) {
        const int first = i / spans_in_upload * spans_in_upload;
        upload.target = table + first;
        base::parallel_for("kvzap::attention::split_spans",
                           Kokkos::RangePolicy<ExecutionSpace>(exec, 0, i + 1 - first), upload);
      }
    }
    launch.many = table;

    attend_rows(exec, launch, quantised_parts, spans[begin].cached, call);
    merge_parts(exec, launch, call);
    begin = end;
  }
}

bool SplitKV::can_plan(const AttentionExtents& extents) {
  const std::int64_t rows = extents.single_rows / std::max(1, extents.kv_heads);
  const std::int64_t lists = (extents.format.quantised() ? 2 : 1) * extents.spans;
  const std::int64_t needed = std::min(rows / split_block_rows + lists, lists * most_parts);
  const std::int64_t parts = most_padded(needed);
  // Numbers of parts have 16 bits.
  return parts < (std::int64_t{1} << 15) &&
         extents.kv_heads * parts * SplitSpans::part_floats(extents.group, extents.head_dim) <=
             most_floats;
}

void SplitKV::plan_calls(std::size_t calls) {
  m_planned.clear();
  m_planned.resize(calls);
  m_places.clear();
}

void SplitKV::plan(std::size_t number, const std::vector<Span>& spans, const AttentionCall& call) {
  Planned& planned = m_planned[number];
  planned.first = m_places.size();
  // What kernels read of a sequence is in m_places; the plan must not keep its memory.
  const CachedLayer& any = spans.front().cached;
  planned.cached.addresses = any.addresses;
  planned.cached.window = any.window;
  planned.cached.page_rows = any.page_rows;
  planned.cached.format = any.format;
  planned.call = call;
  std::int64_t first_quantised = 0, first_wide = 0;
  for (const Span& span : spans) {
    const PartBounds own(span, call.kv_heads);
    m_places.push_back(own.place(span, call.kv_heads, first_quantised, first_wide));
  }
  planned.quantised_parts = first_quantised;
  planned.spans.count = static_cast<std::int32_t>(spans.size());
  planned.spans.heads = call.kv_heads;
  planned.spans.group = call.group;
  planned.spans.dim = call.dim;
  planned.spans.wide_parts = static_cast<std::int32_t>(first_wide);
}

void SplitKV::Planned::pad(SplitSpan& last, std::int64_t quantised, std::int64_t wide) {
  last.quantised_parts = static_cast<std::int16_t>(last.quantised_parts + quantised);
  last.wide_parts = static_cast<std::int16_t>(last.wide_parts + wide);
  quantised_parts += spans.heads * quantised;
  spans.wide_parts += static_cast<std::int32_t>(spans.heads * wide);
}

// Gives all plans more parts than they need now, and the same ones as in the step before where
// these still suffice: so launches have one shape for hundreds of steps.
void SplitKV::pad_plans() {
  const auto needs = [](const Planned& planned) {
    const std::int64_t heads = std::max(1, planned.spans.heads);
    return Padded{planned.quantised_parts / heads, planned.spans.wide_parts / heads};
  };
  const auto suffices = [](std::int64_t padded, std::int64_t needed) {
    return padded >= needed && padded <= (needed > 0 ? most_padded(needed) : 0);
  };
  bool last = m_padded.size() == m_planned.size();
  for (std::size_t i = 0; last && i < m_planned.size(); ++i) {
    const Padded own = needs(m_planned[i]);
    last = suffices(m_padded[i].quantised, own.quantised) && suffices(m_padded[i].wide, own.wide);
  }
  if (!last) m_padded.clear();
  for (std::size_t i = 0; i < m_planned.size(); ++i) {
    const Padded own = needs(m_planned[i]);
    if (!last) m_padded.push_back({lasting(own.quantised), lasting(own.wide)});
    if (m_planned[i].spans.count == 0) continue;
    m_planned[i].pad(m_places[m_planned[i].first + m_planned[i].spans.count - 1],
                     m_padded[i].quantised - own.quantised, m_padded[i].wide - own.wide);
  }
}

void SplitKV::copy_plans(const ExecutionSpace& exec) {
  pad_plans();
  const auto count = static_cast<std::int64_t>(m_places.size());
  std::int64_t floats = 0;
  for (const Planned& planned : m_planned) {
    const std::int64_t parts = planned.spans.wide_parts + planned.quantised_parts;
    floats =
        std::max(floats, parts * SplitSpans::part_floats(planned.spans.group, planned.spans.dim));
  }
  base::reserve_scratch(m_partials, floats, "kvzap::attention::partials");
  m_staged_places.reserve(count, "kvzap::attention::places");
  for (Planned& planned : m_planned) {
    planned.spans.partials = m_partials.data();
    planned.spans.many = m_staged_places.device().data() + planned.first;
  }
  std::copy(m_places.begin(), m_places.end(), m_staged_places.host());
  m_staged_places.copy(exec, count);
}

void SplitKV::run_planned(const ExecutionSpace& exec, std::size_t number) {
  const Planned& planned = m_planned[number];
  if (planned.spans.count == 0) return;
  attend_rows(exec, planned.spans, planned.quantised_parts, planned.cached, planned.call);
  merge_parts(exec, planned.spans, planned.call);
}

void SplitKV::add_shape(std::vector<std::int64_t>& shape) const {
  for (const Planned& planned : m_planned) {
    shape.push_back(planned.spans.wide_parts);
    shape.push_back(planned.quantised_parts);
  }
}

}  // namespace kvzap::attention
