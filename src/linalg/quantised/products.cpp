#include "linalg/quantised/products.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/byte_products.hpp"
#include "base/device_kernels.hpp"
#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/value_types.hpp"
#include "linalg/quantised/kernels.hpp"

namespace kvzap::linalg::quantised {
namespace {

/// A part of a matrix that one kernel reads: the outputs of a section, the inputs of a segment.
struct Piece {
  Panels panels;
  std::int64_t first, outputs;
  Segment segment;

  std::int64_t width() const { return segment.end - segment.begin; }
};

std::vector<Piece> pieces_of(const Matrix& weights) {
  std::vector<Piece> pieces;
  for (const Section& section : weights.sections()) {
    for (const Segment& segment : weights.segments()) {
      pieces.push_back({section.panels, section.first, section.outputs, segment});
    }
  }
  return pieces;
}

bool on_host() { return base::runs_on_host && !base::uses_device_kernels(); }

/// Unpacks outputs begin … end - 1 panel by panel, on the host's threads.
template <class Value, class Rows>
void unpack_by_panels(const Matrix& weights, std::int64_t begin, std::int64_t end,
                      const Rows& rows) {
  const std::int64_t inputs = weights.padded_inputs();
  base::host_for("kvzap::linear::unpack", weights.n_panels(), [&](std::int64_t i) {
    const auto [section, panel] = weights.panel(i);
    const std::int64_t output = section->first + panel * panel_outputs;
    const std::int64_t first = std::max(begin, output);
    const std::int64_t last =
        std::min({end, output + panel_outputs, section->first + section->outputs});
    if (first >= last) return;
    thread_local std::vector<float> values;
    values.resize(inputs * packed_outputs);
    unpack(section->panels, panel, values.data());
    for (const Segment& segment : weights.segments()) {
      for (std::int64_t n = first; n < last; ++n) {
        const float* const own = values.data() + segment.target * packed_outputs + (n - output);
        for (std::int64_t k = 0; k < segment.end - segment.begin; ++k) {
          rows(n - begin, segment.begin + k) = Value(own[k * packed_outputs]);
        }
      }
    }
  });
}

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

}  // namespace

bool prefers_blocks(std::int64_t rows, const Matrix& weights) {
  // With AVX2 products of bytes are faster than those of floats. On two cores of an AMD EPYC (Zen
  // 3) 512 rows of 1,024 inputs and 3,072 outputs take 22.7 ms and not 24.2 with Q8_0, 16.5 and not
  // 24.8 with Q4_K, 22.0 and not 24.7 with Q6_K.
  const bool always = !weights.has_floats() && base::simd_level() == base::SimdLevel::avx2 &&
                      base::byte_products() >= base::ByteProducts::avx2;
  constexpr std::int64_t few_rows = 32;
  return always || rows <= few_rows;
}

void multiply_blocks(const ConstFloats& x, const Matrix& weights, const ConstFloatVector& bias,
                     Kokkos::View<std::uint8_t*, MemorySpace>& buffer, const Floats& y) {
  constexpr std::int64_t most_at_once = 8 * most_rows;
  const std::int64_t rows = x.extent(0);
  if (rows > most_at_once) {
    for (std::int64_t m = 0; m < rows; m += most_at_once) {
      const auto some = std::make_pair(m, std::min(rows, m + most_at_once));
      multiply_blocks(Kokkos::subview(x, some, Kokkos::ALL), weights, bias, buffer,
                      Kokkos::subview(y, some, Kokkos::ALL));
    }
    return;
  }
  const std::int64_t inputs = weights.padded_inputs();
  const bool by_floats = weights.has_floats();
  base::reserve_scratch(buffer, rows * ByteRows::row_bytes(inputs, by_floats),
                        "kvzap::linear::bytes");
  const ByteRows target = ByteRows::at(buffer.data(), rows, inputs, by_floats);
  const auto& segments = weights.segments();
  const bool as_it_is = !by_floats && segments.size() == 1 && weights.inputs() == inputs;
  base::host_for("kvzap::linear::round_to_bytes", rows, inputs, [&, target](std::int64_t m) {
    if (as_it_is) return round_to_bytes(&x(m, 0), target.row(m));
    thread_local std::vector<float> buffer_of_row;
    if (!by_floats) buffer_of_row.resize(inputs);
    float* const padded = by_floats ? target.row(m).floats : buffer_of_row.data();
    std::fill_n(padded, inputs, 0.0f);
    for (const Segment& segment : segments) {
      std::copy_n(&x(m, segment.begin), segment.end - segment.begin, padded + segment.target);
    }
    if (!by_floats) round_to_bytes(padded, target.row(m));
  });
  const AddChunk add_chunk = add_chunk_in_use();
  // Panel after panel for the same rows, which stay in a second-level cache.
  const std::int64_t panels = weights.n_panels();
  const std::int64_t blocks = (rows + most_rows - 1) / most_rows;
  base::host_for("kvzap::linear::quantised", blocks * panels, panel_outputs * inputs,
                 [&, target](std::int64_t i) {
                   const auto [section, panel] = weights.panel(i % panels);
                   const std::int64_t output = section->first + panel * panel_outputs;
                   const std::int64_t m = i / panels * most_rows;
                   product(add_chunk, *section, panel, target.row(m),
                           static_cast<int>(std::min<std::int64_t>(most_rows, rows - m)),
                           bias.extent(0) > 0 ? &bias(output) : nullptr, &y(m, output),
                           y.stride(0));
                 });
}

void multiply_portably(const ExecutionSpace& exec, const ConstFloats& x, const Matrix& weights,
                       const ConstFloatVector& bias, const Floats& y) {
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  const std::int64_t rows = x.extent(0);
  const bool biased = bias.extent(0) > 0;
  for (const Piece& piece : pieces_of(weights)) {
    const Panels panels = piece.panels;
    const Segment columns = piece.segment;
    const std::int64_t first = piece.first;
    const bool adds = columns.begin > 0;
    Kokkos::parallel_for(
        "kvzap::linear::quantised", Team(exec, static_cast<int>(piece.outputs), Kokkos::AUTO),
        KOKKOS_LAMBDA(const typename Team::member_type& team) {
          const std::int64_t n = team.league_rank();
          for (std::int64_t m = 0; m < rows; ++m) {
            float sum = 0;
            Kokkos::parallel_reduce(
                Kokkos::TeamThreadRange(team, columns.end - columns.begin),
                [&](std::int64_t k, float& partial) {
                  partial += value_at(panels, n, columns.target + k) * x(m, columns.begin + k);
                },
                sum);
            Kokkos::single(Kokkos::PerTeam(team), [&] {
              const float before = adds ? y(m, first + n) : (biased ? bias(first + n) : 0.0f);
              y(m, first + n) = before + sum;
            });
          }
        });
  }
}

template <class Value>
void unpack_rows(const ExecutionSpace& exec, const Matrix& weights, std::int64_t begin,
                 const Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>& rows) {
  const std::int64_t end = begin + static_cast<std::int64_t>(rows.extent(0));
  if (on_host()) return unpack_by_panels<Value>(weights, begin, end, rows);
  for (const Piece& piece : pieces_of(weights)) {
    const std::int64_t first = std::max(begin, piece.first);
    const std::int64_t last = std::min(end, piece.first + piece.outputs);
    const std::int64_t width = piece.width();
    if (first >= last) continue;
    Kokkos::parallel_for(
        "kvzap::linear::unpack", Range(exec, 0, (last - first) * width),
        KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t output = first + i / width;
          const std::int64_t column = i % width;
          rows(output - begin, piece.segment.begin + column) =
              Value(value_at(piece.panels, output - piece.first, piece.segment.target + column));
        });
  }
}

void look_up(const ExecutionSpace& exec, const Matrix& weights,
             const Kokkos::View<const TokenId*, MemorySpace>& ids, std::int64_t first,
             const Floats& y) {
  const std::int64_t outputs = weights.outputs();
  const std::int64_t count = y.extent(0);
  if (on_host()) {
    base::host_for("kvzap::linear::look_up", count, weights.inputs(), [&](std::int64_t i) {
      const std::int64_t row = ids(i) - first;
      if (row >= 0 && row < outputs) {
        weights.decode(row, 0, weights.inputs(), &y(i, 0));
      } else {
        std::fill_n(&y(i, 0), weights.inputs(), 0.0f);
      }
    });
    return;
  }
  for (const Piece& piece : pieces_of(weights)) {
    const std::int64_t width = piece.width();
    Kokkos::parallel_for(
        "kvzap::linear::look_up", Range(exec, 0, count * width), KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t column = i % width;
          const std::int64_t row = ids(i / width) - first;
          const bool is_here = row >= 0 && row < outputs;
          const std::int64_t own = row - piece.first;
          if (is_here && (own < 0 || own >= piece.outputs)) return;
          y(i / width, piece.segment.begin + column) =
              is_here ? value_at(piece.panels, own, piece.segment.target + column) : 0.0f;
        });
  }
}

void take_inputs(const ExecutionSpace& exec, const Matrix& weights, std::int64_t first,
                 const Floats& y) {
  const std::int64_t count = y.extent(0);
  for (const Piece& piece : pieces_of(weights)) {
    const std::int64_t begin = std::max(first, piece.segment.begin);
    const std::int64_t end = std::min(first + count, piece.segment.end);
    if (begin >= end) continue;
    Kokkos::parallel_for(
        "kvzap::linear::take_inputs", Range(exec, 0, (end - begin) * piece.outputs),
        KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t input = begin + i / piece.outputs;
          const std::int64_t output = i % piece.outputs;
          y(input - first, piece.first + output) =
              value_at(piece.panels, output, piece.segment.target + input - piece.segment.begin);
        });
  }
}

#define KVZAP_UNPACK_ROWS(Value)                                                \
  template void unpack_rows(const ExecutionSpace&, const Matrix&, std::int64_t, \
                            const Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>&);
KVZAP_FOR_EACH_VALUE(KVZAP_UNPACK_ROWS)
#undef KVZAP_UNPACK_ROWS

}  // namespace kvzap::linalg::quantised
