#include "linalg/quantised/products.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "base/byte_products.hpp"
#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/quantised/kernels.hpp"

namespace kvzap::linalg::quantised {
namespace {

/// Unpacks outputs begin … end - 1 panel by panel, on the host's threads.
template <class Value, class Rows>
void unpack_by_panels(const Matrix& weights, std::int64_t begin, std::int64_t end,
                      const Rows& rows) {
  const std::int64_t inputs = weights.padded_inputs();
  const Places places = weights.places();
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
    for (std::int64_t n = first; n < last; ++n) {
      const float* const own = values.data() + (n - output);
      for (std::int64_t k = 0; k < weights.inputs(); ++k) {
        rows(n - begin, k) = Value(own[places(k) * packed_outputs]);
      }
    }
  });
}

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// Those of answers. More rows pay for unpacked weights, or need the accuracy of rests: without
// these, x in bytes raises the perplexity of SmolLM2-135M (Q4_1) by 0.33 %.
constexpr std::int64_t few_rows = 32;

/// Up to how many rows products of bytes are preferred to unpacking the weights.
struct BlocksRule {
  bool (*fits)(base::SimdLevel level, base::ByteProducts products);
  std::int64_t most_rows;
};
constexpr BlocksRule blocks_rules[] = {
    // Nothing else multiplies unpacked weights as fast as their bytes.
    {[](base::SimdLevel, base::ByteProducts) { return !onednn::is_available(); }, any_rows},
    // On two cores of an AMD EPYC (Zen 3) 512 rows of 1,024 inputs and 3,072 outputs take 17.5 ms
    // with Q8_0, 13.6 with Q4_K and 19.8 with Q6_K; unpacked to floats 24.2 to 24.8, on another
    // day.
    {[](base::SimdLevel level, base::ByteProducts products) {
       return level == base::SimdLevel::avx2 && products >= base::ByteProducts::avx2;
     },
     any_rows},
    // By AVX512-VNNI on a core of an AMD EPYC (Zen 5), 33 to 4,096 rows of all types take 0.55 to
    // 0.87 of the time of unpacking to bf16, without rests.
    {[](base::SimdLevel level, base::ByteProducts products) {
       return level <= base::SimdLevel::avx512_bf16 && products == base::ByteProducts::avx512_vnni;
     },
     any_rows},
    // (AMX, NEON: not measured.)
    {[](base::SimdLevel, base::ByteProducts) { return true; }, few_rows},
};

RowsAs rows_as(std::int64_t rows, const Matrix& weights, const AddChunk& add_chunk) {
  if (weights.has_floats()) return RowsAs::floats;
  return rows > few_rows && add_chunk.takes_rests ? RowsAs::bytes_and_rests : RowsAs::bytes;
}

}  // namespace

std::int64_t most_rows_by_blocks() {
  const base::SimdLevel level = base::machine().simd();
  const base::ByteProducts products = base::byte_products();
  const auto* const rule =
      std::find_if(std::begin(blocks_rules), std::end(blocks_rules),
                   [&](const BlocksRule& candidate) { return candidate.fits(level, products); });
  return rule->most_rows;
}

std::string byte_products_text() {
  const std::int64_t most = most_rows_by_blocks();
  return std::string(base::name_of(base::byte_products())) +
         (most == any_rows ? ", any number of rows" : ", up to " + std::to_string(most) + " rows");
}

bool prefers_blocks(std::int64_t rows, const Matrix& weights) {
  return rows <= (weights.has_floats() ? few_rows : most_rows_by_blocks());
}

void spread_row(const float* x, const Matrix& weights, float* target) {
  if (weights.is_in_order()) {
    std::copy_n(x, weights.inputs(), target);
    return;
  }
  const Places places = weights.places();
  std::fill_n(target, weights.padded_inputs(), 0.0f);
  for (std::int64_t k = 0; k < weights.inputs(); ++k) target[places(k)] = x[k];
}

void multiply_blocks(const ConstFloats& x, const Matrix& weights, const ConstFloatVector& bias,
                     Kokkos::View<std::uint8_t*, MemorySpace>& buffer, const Floats& y) {
  constexpr std::int64_t most_at_once = 8 * most_rows;
  const std::int64_t rows = x.extent(0);
  if (rows > most_at_once) {
    const std::int64_t parts = (rows + most_at_once - 1) / most_at_once;
    for (std::int64_t part = 0; part < parts; ++part) {
      const auto some = std::make_pair(rows * part / parts, rows * (part + 1) / parts);
      multiply_blocks(Kokkos::subview(x, some, Kokkos::ALL), weights, bias, buffer,
                      Kokkos::subview(y, some, Kokkos::ALL));
    }
    return;
  }
  const std::int64_t inputs = weights.padded_inputs();
  const AddChunk add_chunk = add_chunk_in_use();
  const RowsAs as = rows_as(rows, weights, add_chunk);
  const bool by_floats = as == RowsAs::floats;
  const std::int64_t row_bytes = ByteRows::row_bytes(inputs, as);
  base::reserve_scratch(buffer, rows * row_bytes, "kvzap::linear::bytes");
  // Blocks of equally many rows, whose sums stay in a first-level cache.
  const std::int64_t blocks = (rows + most_rows - 1) / most_rows;
  const std::int64_t block_rows = (rows + 4 * blocks - 1) / (4 * blocks) * 4;
  const auto block_of = [=, data = buffer.data()](std::int64_t block) {
    const std::int64_t m = block * block_rows;
    return ByteRows::at(data + m * row_bytes, std::min(block_rows, rows - m), inputs, as);
  };
  const bool as_it_is = !by_floats && weights.is_in_order();
  base::host_for("kvzap::linear::round_to_bytes", rows, inputs, [&, block_of](std::int64_t m) {
    const ByteRows target = block_of(m / block_rows).row(m % block_rows);
    if (as_it_is) return round_to_bytes(&x(m, 0), target);
    thread_local std::vector<float> buffer_of_row;
    if (!by_floats) buffer_of_row.resize(inputs);
    float* const padded = by_floats ? target.floats : buffer_of_row.data();
    spread_row(&x(m, 0), weights, padded);
    if (!by_floats) round_to_bytes(padded, target);
  });
  if (as == RowsAs::bytes_and_rests) {
    base::host_for("kvzap::linear::list_rests", blocks, block_rows * inputs,
                   [=](std::int64_t block) { list_rests(block_of(block)); });
  }
  const int together = by_floats ? 1 : add_chunk.panels_at_once(block_rows);
  // All rows for the same panels, so that memory is read once for them. On a core of an AMD EPYC
  // (Zen 5) 768 rows with 4,096 inputs and 12,288 outputs of Q8_0 then take 104 ms and not 107.
  const std::int64_t panels = weights.n_panels(together);
  base::host_for("kvzap::linear::quantised", blocks * panels, together * panel_outputs * inputs,
                 [&, block_of](std::int64_t i) {
                   const auto [section, panel] = weights.panel(i / blocks, together);
                   const std::int64_t output = section->first + panel * panel_outputs;
                   const std::int64_t m = i % blocks * block_rows;
                   const RowSpan<float> sums{&y(m, output), static_cast<std::int64_t>(y.stride(0)),
                                             std::min(block_rows, rows - m)};
                   product(add_chunk, *section, panel, together, block_of(i % blocks),
                           bias.extent(0) > 0 ? &bias(output) : nullptr, sums);
                 });
}

void multiply_portably(const ExecutionSpace& exec, const ConstFloats& x, const Matrix& weights,
                       const ConstFloatVector& bias, const Floats& y) {
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  const Places places = weights.places();
  const bool biased = bias.extent(0) > 0;
  for (const Section& section : weights.sections()) {
    const Panels panels = section.panels;
    const std::int64_t first = section.first;
    base::parallel_for(
        "kvzap::linear::quantised", Team(exec, static_cast<int>(section.outputs), Kokkos::AUTO),
        KOKKOS_LAMBDA(const typename Team::member_type& team) {
          const std::int64_t n = team.league_rank();
          for (std::int64_t m = 0; m < rows; ++m) {
            float sum = 0;
            Kokkos::parallel_reduce(
                Kokkos::TeamThreadRange(team, inputs),
                [&](std::int64_t k, float& partial) {
                  partial += value_at(panels, n, places(k)) * x(m, k);
                },
                sum);
            Kokkos::single(Kokkos::PerTeam(team),
                           [&] { y(m, first + n) = (biased ? bias(first + n) : 0.0f) + sum; });
          }
        });
  }
}

namespace {

template <class Value>
void unpack_typed_rows(const ExecutionSpace& exec, const Matrix& weights, std::int64_t begin,
                       const Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>& rows) {
  const std::int64_t end = begin + static_cast<std::int64_t>(rows.extent(0));
  if (base::machine().on_host()) return unpack_by_panels<Value>(weights, begin, end, rows);
  const std::int64_t width = weights.inputs();
  const Places places = weights.places();
  for (const Section& section : weights.sections()) {
    const Panels panels = section.panels;
    const std::int64_t own = section.first;
    const std::int64_t first = std::max(begin, own);
    const std::int64_t last = std::min(end, own + section.outputs);
    if (first >= last) continue;
    base::parallel_for(
        "kvzap::linear::unpack", Range(exec, 0, (last - first) * width),
        KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t output = first + i / width;
          rows(output - begin, i % width) =
              Value(value_at(panels, output - own, places(i % width)));
        });
  }
}

}  // namespace

void unpack_rows(const ExecutionSpace& exec, const Matrix& weights, std::int64_t begin,
                 const ArrayView& rows) {
  with_value_type(rows.dtype, [&](auto zero) {
    using Value = decltype(zero);
    unpack_typed_rows(exec, weights, begin,
                      Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>(
                          rows.values<Value>(), rows.extents[0], rows.extents[2]));
  });
}

void look_up(const ExecutionSpace& exec, const Matrix& weights,
             const Kokkos::View<const TokenId*, MemorySpace>& ids, std::int64_t first,
             const Floats& y) {
  const std::int64_t outputs = weights.outputs();
  const std::int64_t count = y.extent(0);
  if (base::machine().on_host()) {
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
  const std::int64_t width = weights.inputs();
  const Places places = weights.places();
  for (const Section& section : weights.sections()) {
    const Panels panels = section.panels;
    const std::int64_t begin = section.first, own_outputs = section.outputs;
    base::parallel_for(
        "kvzap::linear::look_up", Range(exec, 0, count * width), KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t row = ids(i / width) - first;
          const bool is_here = row >= 0 && row < outputs;
          const std::int64_t own = row - begin;
          if (is_here && (own < 0 || own >= own_outputs)) return;
          y(i / width, i % width) = is_here ? value_at(panels, own, places(i % width)) : 0.0f;
        });
  }
}

void take_inputs(const ExecutionSpace& exec, const Matrix& weights, std::int64_t first,
                 const Floats& y) {
  const std::int64_t count = y.extent(0);
  const Places places = weights.places();
  for (const Section& section : weights.sections()) {
    const Panels panels = section.panels;
    const std::int64_t begin = section.first, outputs = section.outputs;
    base::parallel_for(
        "kvzap::linear::take_inputs", Range(exec, 0, count * outputs),
        KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t input = i / outputs, output = i % outputs;
          y(input, begin + output) = value_at(panels, output, places(first + input));
        });
  }
}

}  // namespace kvzap::linalg::quantised
