#include <algorithm>
#include <iterator>
#include <kvzap/core/array_view.hpp>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/host/packed_kernels.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/host/row_products.hpp"
#include "linalg/product.hpp"
#include "linalg/product_kinds.hpp"

namespace kvzap::linalg {
namespace {

// Widened weights of one panel: small enough to stay in the second-level cache.
constexpr std::int64_t panel_bytes = std::int64_t{1} << 20;
// The same size for packed weights. oneDNN reads them block by block, so a larger panel reads x
// fewer times.
constexpr std::int64_t packed_panel_bytes = std::int64_t{8} << 20;

// The kernel for a few rows on a device.
template <class Value>
void skinny(const ExecutionSpace& exec, const ConstMatrix& x, const WeightRows<Value>& weights,
            const Matrix& y) {
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  const std::int64_t rows = x.extent(0);
  const std::int64_t dim = x.extent(1);
  base::parallel_for(
      "kvzap::linear::skinny", Team(exec, weights.extent(0), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t n = team.league_rank();
        for (std::int64_t m = 0; m < rows; ++m) {
          float sum = 0;
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, dim),
              [&](std::int64_t k, float& partial) {
                partial += static_cast<float>(weights(n, k)) * x(m, k);
              },
              sum);
          Kokkos::single(Kokkos::PerTeam(team), [&] { y(m, n) = sum; });
        }
      });
}

template <class Value>
void widen_panel(const ExecutionSpace& exec, const WeightRows<Value>& weights, std::int64_t begin,
                 std::int64_t end, const Matrix& panel) {
  const std::int64_t dim = weights.extent(1);
  if constexpr (base::runs_on_host) {
    base::host_for("kvzap::linear::widen", end - begin, dim,
                   [=](std::int64_t n) { widen(&weights(begin + n, 0), &panel(n, 0), dim); });
  } else {
    base::parallel_for(
        "kvzap::linear::widen",
        Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {begin, 0}, {end, dim}),
        KOKKOS_LAMBDA(std::int64_t n, std::int64_t k) {
          panel(n - begin, k) = static_cast<float>(weights(n, k));
        });
  }
}

// Converts inputs for a product with weights of this type: bf16 weights need inputs rounded to
// bf16.
void copy_inputs(DType dtype, const float* source, float* target, std::int64_t count) {
  if (dtype == DType::bf16) return round_to_bf16(source, target, count);
  narrow(source, target, count);
}
void copy_inputs(DType /*dtype*/, const float* source, bfloat16* target, std::int64_t count) {
  narrow(source, target, count);
}

// Copies converted inputs x (m, k) to `target`: rows of `stride` values, padded with zeros.
template <class X>
void copy_rows(DType dtype, const ConstMatrix& x, std::int64_t stride, X* target) {
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = x.extent(1);
  base::host_for("kvzap::linear::copy", rows, inputs, [=](std::int64_t m) {
    X* row = target + m * stride;
    copy_inputs(dtype, &x(m, 0), row, inputs);
    std::fill(row + inputs, row + stride, X(0.0f));
  });
}

// Returns x for a product of floats. With bf16 weights x is rounded to bf16 and widened again.
ConstMatrix as_multiplied(const ExecutionSpace& exec, DType dtype, const ConstMatrix& x,
                          Vector& scratch) {
  if (dtype != DType::bf16) return x;
  const auto rows = static_cast<std::int64_t>(x.extent(0));
  const auto inputs = static_cast<std::int64_t>(x.extent(1));
  base::reserve_scratch(scratch, rows * inputs, "kvzap::linear::rounded");
  const Matrix rounded(scratch.data(), rows, inputs);
  base::parallel_for(
      "kvzap::linear::round",
      Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {0, 0}, {rows, inputs}),
      KOKKOS_LAMBDA(std::int64_t m, std::int64_t k) {
        rounded(m, k) = static_cast<float>(bfloat16(x(m, k)));
      });
  return rounded;
}

// Widens plain rows of weights panel by panel.
void by_panels(const ExecutionSpace& exec, const ConstMatrix& x, const LinearWeights& weights,
               Vector& scratch, const Matrix& y) {
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  const std::int64_t panel_rows = std::min<std::int64_t>(
      outputs, std::max<std::int64_t>(16, panel_bytes / (sizeof(float) * inputs)));
  base::reserve_scratch(scratch, panel_rows * inputs, "kvzap::linear::panel");
  for (std::int64_t begin = 0; begin < outputs; begin += panel_rows) {
    const std::int64_t end = std::min(begin + panel_rows, outputs);
    const Matrix panel(scratch.data(), end - begin, inputs);
    with_value_type(weights.dtype(), [&](auto zero) {
      widen_panel(exec, weights.rows<decltype(zero)>(), begin, end, panel);
    });
    const Matrix columns = Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end));
    multiply_large(exec, Op::plain, x, Op::transposed, panel, 0, columns);
  }
}

// Distance between rows of x of type `copied` for the kernels for a few rows: an odd number of
// cache lines. The extent of rows is often a power of two; at that distance rows would contend for
// the same sets of the first-level cache.
std::int64_t few_rows_stride(DType copied, DType dtype, std::int64_t inputs) {
  const auto line = static_cast<std::int64_t>(64 / size_of(copied));
  return ((LinearWeights::padded_inputs(dtype, inputs) + line - 1) / line | 1) * line;
}

// Multiplies a few rows of x by weights of either layout.
template <class Value, class X>
void few_rows(const X* x, std::int64_t x_stride, std::int64_t rows, const LinearWeights& weights,
              const Matrix& y) {
  // A multiple of the rows that the kernels for plain rows take at once.
  constexpr std::int64_t plain_block = 96;
  const bool packed = weights.is_packed();
  const std::int64_t block = packed ? LinearWeights::block_outputs : plain_block;
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  const std::int64_t padded = LinearWeights::padded_inputs(weights.dtype(), inputs);
  const Value* values = weights.values<Value>();
  const std::int64_t stride = packed ? padded : inputs;
  base::host_for(
      "kvzap::linear::few_rows", (outputs + block - 1) / block, block * inputs,
      [=](std::int64_t i) {
        const std::int64_t begin = i * block;
        const std::int64_t count = std::min(block, outputs - begin);
        if (packed) {
          return packed_product(RowSpan<const X>{x, x_stride, rows}, values + begin * stride,
                                padded, static_cast<int>(count), &y(0, begin), y.stride(0));
        }
        // The block stays in a second-level cache meanwhile.
        const std::int64_t parts = (rows + skinny_product_rows - 1) / skinny_product_rows;
        for (std::int64_t p = 0; p < parts; ++p) {
          const std::int64_t m = p * rows / parts;
          const std::int64_t n_rows = (p + 1) * rows / parts - m;
          skinny_product(RowSpan<const X>{x + m * x_stride, x_stride, n_rows},
                         RowSpan<const Value>{values + begin * stride, stride, count}, inputs,
                         &y(m, begin), y.stride(0));
        }
      });
}

// Multiplies many rows of x by few rows of weights, with their roles exchanged. Reads x once, in
// memory order, and rounds it on the way if the weights are bf16.
template <class Value>
void by_few_outputs(const ConstMatrix& x, const WeightRows<Value>& weights, const ConstVector& bias,
                    Vector& scratch, const Matrix& y) {
  using Streamed = std::conditional_t<std::is_same_v<Value, bfloat16>, RoundedFloat, float>;
  constexpr std::int64_t block = 96;
  const std::int64_t outputs = weights.extent(0);
  const std::int64_t inputs = weights.extent(1);
  const std::int64_t stride = few_rows_stride(DType::f32, DTypeOf<Value>::value, inputs);
  base::reserve_scratch(scratch, outputs * stride, "kvzap::linear::panel");
  float* widened = scratch.data();
  for (std::int64_t n = 0; n < outputs; ++n) widen(&weights(n, 0), widened + n * stride, inputs);
  const std::int64_t rows = x.extent(0);
  base::host_for(
      "kvzap::linear::few_outputs", (rows + block - 1) / block, block * inputs,
      [=](std::int64_t i) {
        const std::int64_t begin = i * block;
        const std::int64_t count = std::min(block, rows - begin);
        float sums[few_outputs * block];
        const RowSpan<const Streamed> streamed{reinterpret_cast<const Streamed*>(&x(begin, 0)),
                                               static_cast<std::int64_t>(x.stride(0)), count};
        for (std::int64_t n = 0; n < outputs; n += skinny_product_rows) {
          const std::int64_t own = std::min<std::int64_t>(skinny_product_rows, outputs - n);
          skinny_product(RowSpan<const float>{widened + n * stride, stride, own}, streamed, inputs,
                         sums + n * block, block);
        }
        for (std::int64_t m = 0; m < count; ++m) {
          for (std::int64_t n = 0; n < outputs; ++n) {
            y(begin + m, n) = sums[n * block + m] + (bias.extent(0) > 0 ? bias(n) : 0.0f);
          }
        }
      });
}

void add_bias(const ExecutionSpace& exec, const ConstVector& bias, const Matrix& y) {
  base::parallel_for(
      "kvzap::linear::bias",
      Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(
          exec, {0, 0},
          {static_cast<std::int64_t>(y.extent(0)), static_cast<std::int64_t>(y.extent(1))}),
      KOKKOS_LAMBDA(std::int64_t m, std::int64_t n) { y(m, n) += bias(n); });
}

// x: of the weights' type.
void by_onednn(const void* x, std::int64_t x_stride, std::int64_t rows,
               const LinearWeights& weights, const ConstVector& bias, const Matrix& y) {
  onednn::Product product{};
  product.dtype = weights.dtype();
  product.m = rows;
  product.n = weights.outputs();
  product.k = weights.inputs();
  product.x = x;
  product.x_stride = x_stride;
  product.weights = weights.memory().data();
  product.weights_stride = weights.is_packed() ? 0 : weights.inputs();
  product.bias = bias.extent(0) > 0 ? bias.data() : nullptr;
  product.y = y.data();
  product.y_stride = y.stride(0);
  onednn::multiply(product);
}

// Widens packed weights panel by panel, in memory order, and multiplies them as packed floats.
template <class Value>
void by_packed_panels(const float* x, std::int64_t x_stride, std::int64_t rows,
                      const LinearWeights& weights, const ConstVector& bias, Vector& scratch,
                      const Matrix& y) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  // bf16 weights may have more padding after their inputs than floats.
  const std::int64_t source_padded = LinearWeights::padded_inputs(weights.dtype(), inputs);
  const std::int64_t padded = LinearWeights::padded_inputs(DType::f32, inputs);
  const std::int64_t block_bytes = block * padded * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t panel_outputs =
      std::min((outputs + block - 1) / block,
               std::max<std::int64_t>(1, packed_panel_bytes / block_bytes)) *
      block;
  base::reserve_scratch(scratch, panel_outputs * padded, "kvzap::linear::panel");
  for (std::int64_t begin = 0; begin < outputs; begin += panel_outputs) {
    const std::int64_t end = std::min(begin + panel_outputs, outputs);
    const Value* source = weights.values<Value>() + begin * source_padded;
    float* target = scratch.data();
    base::host_for("kvzap::linear::widen", (end - begin + block - 1) / block, block * padded,
                   [=](std::int64_t i) {
                     widen_block(source + i * block * source_padded, padded,
                                 target + i * block * padded);
                   });
    const LinearWeights panel(WeightLayout::packed, end - begin, inputs, scratch.data());
    by_onednn(
        x, x_stride, rows, panel,
        bias.extent(0) > 0 ? ConstVector(Kokkos::subview(bias, std::make_pair(begin, end))) : bias,
        Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end)));
  }
}

// Multiplies many rows by f16 weights in the processor's tiles. Each row of x is scaled and
// rounded. Packed weights are rearranged to pairs of inputs, panel by panel.
void by_half_tiles(const ConstMatrix& x, const LinearWeights& weights, const ConstVector& bias,
                   Bytes& rounded, Vector& unscale, Bytes& pairs, const Matrix& y) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  const std::int64_t outputs = weights.outputs();
  const std::int64_t stride = LinearWeights::padded_inputs(DType::bf16, inputs);
  half* const values = base::scratch_of<half>(rounded, rows * stride, "kvzap::linear::rounded");
  base::reserve_scratch(unscale, rows, "kvzap::linear::unscale");
  float* const factors = unscale.data();
  base::host_for("kvzap::linear::copy", rows, inputs, [=](std::int64_t m) {
    half* const row = values + m * stride;
    factors[m] = scale_to_half(&x(m, 0), inputs, row);
    std::fill(row + inputs, row + stride, half{0});
  });
  onednn::Product product{};
  product.dtype = DType::f16;
  product.m = rows;
  product.n = outputs;
  product.k = inputs;
  product.x = values;
  product.x_stride = stride;
  product.y = y.data();
  product.y_stride = y.stride(0);
  if (!weights.is_packed()) {
    product.weights = weights.values<half>();
    product.weights_stride = inputs;
    onednn::multiply(product);
  } else {
    const std::int64_t padded = LinearWeights::padded_inputs(DType::f16, inputs);
    const std::int64_t block_bytes = block * stride * static_cast<std::int64_t>(sizeof(half));
    const std::int64_t blocks = (outputs + block - 1) / block;
    const std::int64_t panel_blocks =
        std::min(blocks, std::max<std::int64_t>(1, packed_panel_bytes / block_bytes));
    half* const panel =
        base::scratch_of<half>(pairs, panel_blocks * block * stride, "kvzap::linear::panel");
    for (std::int64_t first = 0; first < blocks; first += panel_blocks) {
      const std::int64_t count = std::min(panel_blocks, blocks - first);
      const half* const source = weights.values<half>() + first * block * padded;
      base::host_for("kvzap::linear::pair", count, block * stride, [=](std::int64_t i) {
        pair_block(source + i * block * padded, padded, stride, panel + i * block * stride);
      });
      product.n = std::min(count * block, outputs - first * block);
      product.weights = panel;
      product.y = y.data() + first * block;
      onednn::multiply(product);
    }
  }
  base::host_for("kvzap::linear::finish", rows, outputs, [=](std::int64_t m) {
    float* const row = &y(m, 0);
    for (std::int64_t n = 0; n < outputs; ++n) {
      row[n] = row[n] * factors[m] + (bias.extent(0) > 0 ? bias(n) : 0.0f);
    }
  });
}

// Multiplies many rows by packed weights without a library.
template <class Value>
void by_packed_gemm(const ConstMatrix& x, const LinearWeights& weights, const ConstVector& bias,
                    Vector& scratch, const Matrix& y) {
  constexpr std::int64_t block = LinearWeights::block_outputs;
  constexpr std::int64_t slice = gemm_inputs;
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  const std::int64_t outputs = weights.outputs();
  const DType dtype = weights.dtype();
  const std::int64_t padded = LinearWeights::padded_inputs(dtype, inputs);
  const std::int64_t slice_stride = rows * slice;
  base::reserve_scratch(scratch, (padded + slice - 1) / slice * slice_stride,
                        "kvzap::linear::copied");
  float* const copy = scratch.data();
  base::host_for("kvzap::linear::copy", rows, padded, [=](std::int64_t m) {
    for (std::int64_t k = 0; k < padded; k += slice) {
      float* const row = copy + k / slice * slice_stride + m * slice;
      const std::int64_t valid = std::clamp<std::int64_t>(inputs - k, 0, slice);
      if (valid > 0) copy_inputs(dtype, &x(m, k), row, valid);
      std::fill(row + valid, row + std::min(slice, padded - k), 0.0f);
    }
  });
  const Value* const values = weights.values<Value>();
  const std::int64_t blocks = (outputs + block - 1) / block;
  const std::int64_t row_blocks = (rows + gemm_rows - 1) / gemm_rows;
  // One group of rows passes over all blocks in turn, because the weights are the smaller stream.
  base::host_for("kvzap::linear::packed_gemm", row_blocks * blocks, [=](std::int64_t i) {
    const std::int64_t m = i / blocks * rows / row_blocks;
    const std::int64_t end = (i / blocks + 1) * rows / row_blocks;
    const std::int64_t n = i % blocks * block;
    packed_gemm(RowSpan<const float>{copy + m * slice, slice_stride, end - m}, values + n * padded,
                padded, static_cast<int>(std::min(block, outputs - n)),
                bias.extent(0) > 0 ? &bias(n) : nullptr, &y(m, n), y.stride(0));
  });
}

template <class Value>
void round_rows(const ExecutionSpace& exec, const ConstMatrix& x,
                const RowRounder<Value>& rounded) {
  const std::int64_t inputs = x.extent(1);
  if constexpr (RowRounder<Value>::is_scaled) {
    using Team = Kokkos::TeamPolicy<ExecutionSpace>;
    base::parallel_for(
        "kvzap::linear::round", Team(exec, static_cast<int>(x.extent(0)), Kokkos::AUTO),
        KOKKOS_LAMBDA(const typename Team::member_type& team) {
          const std::int64_t m = team.league_rank();
          rounded.store(team, m, inputs, [&](std::int64_t k) { return x(m, k); });
        });
  } else {
    base::parallel_for(
        "kvzap::linear::round",
        Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                             x.extent(0) * inputs),
        KOKKOS_LAMBDA(std::int64_t i) { rounded.values[i] = Value(x(i / inputs, i % inputs)); });
  }
}

// y (m, n) = y * unscale (m) + bias (n); either may be empty.
void finish_rows(const ExecutionSpace& exec, const ConstVector& unscale, const ConstVector& bias,
                 const Matrix& y) {
  const bool scaled = unscale.extent(0) > 0;
  const bool biased = bias.extent(0) > 0;
  if (!scaled && !biased) return;
  const std::int64_t columns = y.extent(1);
  base::parallel_for(
      "kvzap::linear::finish",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                           y.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        float& value = y(i / columns, i % columns);
        value =
            value * (scaled ? unscale(i / columns) : 1.0f) + (biased ? bias(i % columns) : 0.0f);
      });
}

// Whether the processor multiplies tiles of f16.
bool has_half_tiles() {
  return has_packed_products() && base::machine().has(base::SimdLevel::amx_fp16);
}

// Up to this many rows, a product reads its weights at nearly the speed of memory, and a gemm would
// be slower.
//
// With AMX oneDNN's tiles read packed bf16 weights faster even for one row: on a core of a Xeon
// (Sapphire Rapids) at 21 GB/s, the kernel at 17, and 16 rows take 0.29 ms and not 1.1.
//
// With AVX2 plain rows of weights pay up to three passes over a block in the second-level cache: on
// two cores of an AMD EPYC (Zen 3) a decode step of one layer and the output head of Qwen3-0.6B
// takes 72 ms and not 91 for 16 sequences, about the same for 24 and 32, and more for 64.
//
// With AVX-512 groups of rows that share slices of packed weights reach the rate of arithmetic. On
// a core of an AMD EPYC (Zen 5) they take 0.77, 0.84, 0.89 and 0.97 of oneDNN's time for 32, 48, 64
// and 128 rows.
std::int64_t few_rows_limit(const LinearWeights& weights) {
  constexpr std::int64_t most_separate_rows = 16;  // in groups that share no slices
  const bool packed = weights.is_packed();
  if (packed && weights.dtype() == DType::bf16 && base::machine().has(base::SimdLevel::amx_bf16) &&
      onednn::has_fast_products(DType::bf16, true)) {
    return 0;
  }
  const base::Machine& machine = base::machine();
  if (packed) {
    const bool shares = machine.has(base::SimdLevel::avx512);
    return shares && !machine.has(base::SimdLevel::amx_bf16) ? packed_product_rows
                                                             : most_separate_rows;
  }
  return machine.simd() == base::SimdLevel::avx2 ? 3 * skinny_product_rows : skinny_product_rows;
}

/// The kernel or library that multiplies x by the weights.
enum class Route {
  own_type,        ///< a product whose operands have the weights' type
  few_outputs,     ///< weights and x exchange roles
  few_bf16_rows,   ///< a few rows of x, rounded to bf16
  few_rows,        ///< a few rows of x as floats
  bf16_products,   ///< oneDNN, on bf16
  half_tiles,      ///< oneDNN, on rows scaled to f16
  packed_gemm,     ///< the project's own gemm of packed weights
  packed_panels,   ///< oneDNN, on packed weights widened panel by panel
  float_products,  ///< oneDNN, on floats
  skinny,          ///< a few rows on a device
  gemm,            ///< the BLAS of Kokkos Kernels
  panels,          ///< the same, on plain weights widened panel by panel
};

/// A product whose route is chosen.
struct RouteCase {
  const LinearWeights& weights;
  bool few_rows;

  bool is(DType dtype) const { return weights.dtype() == dtype; }
  bool packed() const { return weights.is_packed(); }
};

/// The routes, best first, and when they fit. The first that fits is taken.
struct RouteRule {
  Route route;
  bool (*fits)(const RouteCase&);
};
constexpr RouteRule route_rules[] = {
    {Route::own_type, [](const RouteCase&) { return keeps_type(); }},
    {Route::skinny, [](const RouteCase& c) { return !base::runs_on_host && c.few_rows; }},
    {Route::few_bf16_rows,
     [](const RouteCase& c) { return c.few_rows && c.is(DType::bf16) && has_bf16_products(); }},
    {Route::few_rows, [](const RouteCase& c) { return c.few_rows; }},
    {Route::few_outputs,
     [](const RouteCase& c) {
       return base::runs_on_host && !c.packed() && c.weights.outputs() <= few_outputs;
     }},
    {Route::bf16_products,
     [](const RouteCase& c) {
       return base::runs_on_host && c.is(DType::bf16) && has_bf16_products() &&
              onednn::has_fast_products(DType::bf16, c.packed());
     }},
    {Route::half_tiles,
     [](const RouteCase& c) {
       return base::runs_on_host && c.is(DType::f16) && has_half_tiles() &&
              onednn::has_fast_products(DType::f16, c.packed());
     }},
    {Route::packed_gemm,
     [](const RouteCase& c) {
       return c.packed() && (base::machine().simd() <= base::SimdLevel::avx2 ||
                             !onednn::has_fast_products(DType::f32, true));
     }},
    {Route::packed_panels, [](const RouteCase& c) { return c.packed() && !c.is(DType::f32); }},
    {Route::float_products,
     [](const RouteCase& c) {
       return base::runs_on_host && c.is(DType::f32) && onednn::is_available();
     }},
    {Route::gemm, [](const RouteCase& c) { return c.is(DType::f32); }},
    {Route::panels, [](const RouteCase&) { return true; }},
};

Route choose_route(std::int64_t rows, const LinearWeights& weights) {
  const RouteCase product{weights, rows <= few_rows_limit(weights)};
  const auto* const rule =
      std::find_if(std::begin(route_rules), std::end(route_rules),
                   [&](const RouteRule& candidate) { return candidate.fits(product); });
  return rule->route;
}

/// x W^T, both operands in the type of the weights. `rounded`: x, unless that type is float.
Product own_product(const ConstMatrix& x, const RoundedRows& rounded,
                    const LinearWeights& weights) {
  Product product;
  product.dtype = weights.dtype();
  product.m = x.extent(0);
  product.n = weights.outputs();
  product.k = weights.inputs();
  product.a_stride = weights.inputs();
  if (product.dtype == DType::f32) {
    product.a = x.data();
    product.a_stride = x.stride(0);
  } else {
    product.a = rounded.values;
  }
  product.b = weights.memory().data();
  product.b_stride = weights.inputs();
  product.transposed = true;
  return product;
}

}  // namespace

RoundedRows LinearMap::room_for_rounded(DType dtype, std::int64_t m, std::int64_t k) {
  RoundedRows room;
  room.dtype = dtype;
  if (!keeps_type() || dtype == DType::f32) return room;
  room.values = base::scratch_of<std::uint16_t>(m_rounded, m * k, "kvzap::linear::rounded");
  if (dtype == DType::f16) {
    base::reserve_scratch(m_unscale, m, "kvzap::linear::unscale");
    room.unscale = m_unscale.data();
  }
  return room;
}

RoundedRows LinearMap::in_type_of(const ExecutionSpace& exec, const ConstMatrix& x,
                                  const RoundedRows& rounded, const LinearWeights& weights) {
  if (rounded.exist()) return rounded;
  RoundedRows operand;
  with_value_type(weights.dtype(), [&](auto zero) {
    using Value = decltype(zero);
    if constexpr (!std::is_same_v<Value, float>) {
      operand = room_for_rounded(weights.dtype(), x.extent(0), weights.inputs());
      round_rows(exec, x, RowRounder<Value>(operand));
    }
  });
  return operand;
}

void LinearMap::by_own_type(const ExecutionSpace& exec, const ConstMatrix& x,
                            const RoundedRows& rounded, const LinearWeights& weights,
                            const ConstVector& bias, const Matrix& y) {
  const RoundedRows operand = in_type_of(exec, x, rounded, weights);
  Product product = own_product(x, operand, weights);
  product.c = y.data();
  product.c_stride = y.stride(0);
  ConstVector unscale, added = bias;
  if (operand.unscale != nullptr) {
    unscale = ConstVector(operand.unscale, x.extent(0));
  } else if (bias.extent(0) > 0) {
    product.bias = bias.data();
    if (has_fused_product(exec, product)) {
      added = {};
    } else {
      product.bias = nullptr;
    }
  }
  multiply(exec, product);
  finish_rows(exec, unscale, added, y);
}

RoundedRows LinearMap::activated(const ExecutionSpace& exec, const ConstMatrix& x,
                                 const RoundedRows& rounded, const LinearWeights& weights,
                                 const Activated& result) {
  const bool fits = keeps_type() && weights.dtype() == DType::bf16 &&
                    weights.quantised() == nullptr && x.extent(0) > 0 && weights.outputs() > 0 &&
                    weights.inputs() > 0;
  if (!fits) return {};
  Product product = own_product(x, in_type_of(exec, x, rounded, weights), weights);
  product.c = result.values;
  product.c_dtype = DType::bf16;
  product.c_stride = weights.outputs();
  product.bias = result.bias.data();
  product.epilogue = result.epilogue;
  if (!has_fused_product(exec, product)) return {};
  multiply(exec, product);
  RoundedRows rows;
  rows.dtype = DType::bf16;
  rows.values = result.values;
  return rows;
}

void LinearMap::operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                           const RoundedRows& rounded, const LinearWeights& weights,
                           const ConstVector& bias, const Matrix& y) {
  const DType dtype = weights.dtype();
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  if (rows == 0 || weights.outputs() == 0) return;
  if (weights.quantised() != nullptr && inputs > 0) return by_quantised(exec, x, weights, bias, y);
  if (inputs == 0) {
    // A gemm with k = 0 does not write its result.
    base::launch([=] { Kokkos::deep_copy(exec, y, 0.0f); });
    if (bias.extent(0) > 0) add_bias(exec, bias, y);
    return;
  }
  if (weights.is_packed() && (keeps_type() || !has_packed_products())) {
    throw Error("linear map: packed weights need the kernels they were packed for");
  }
  const Route route = choose_route(rows, weights);
  if (base::runs_on_host && route != Route::own_type) {
    base::fence(exec, "kvzap::linear: host kernels read what the instance wrote");
  }
  const auto copied = [&](std::int64_t stride) {
    base::reserve_scratch(m_copied, rows * stride, "kvzap::linear::copied");
    copy_rows(dtype, x, stride, m_copied.data());
    return m_copied.data();
  };
  const auto rounded_to_bf16 = [&](std::int64_t stride) {
    auto* const copy =
        base::scratch_of<bfloat16>(m_rounded, rows * stride, "kvzap::linear::copied");
    copy_rows(dtype, x, stride, copy);
    return copy;
  };
  switch (route) {
    case Route::own_type:
      return by_own_type(exec, x, rounded, weights, bias, y);
    case Route::few_outputs:
      return with_value_type(dtype, [&](auto zero) {
        by_few_outputs(x, weights.rows<decltype(zero)>(), bias, m_panel, y);
      });
    case Route::few_bf16_rows: {
      const std::int64_t stride = few_rows_stride(DType::bf16, dtype, inputs);
      few_rows<bfloat16>(rounded_to_bf16(stride), stride, rows, weights, y);
      break;
    }
    case Route::few_rows: {
      const std::int64_t stride = few_rows_stride(DType::f32, dtype, inputs);
      const float* const copy = copied(stride);
      with_value_type(dtype,
                      [&](auto zero) { few_rows<decltype(zero)>(copy, stride, rows, weights, y); });
      break;
    }
    case Route::bf16_products: {
      const std::int64_t stride = LinearWeights::padded_inputs(dtype, inputs);
      return by_onednn(rounded_to_bf16(stride), stride, rows, weights, bias, y);
    }
    case Route::half_tiles:
      return by_half_tiles(x, weights, bias, m_rounded, m_unscale, m_pairs, y);
    case Route::packed_gemm:
      return with_value_type(
          dtype, [&](auto zero) { by_packed_gemm<decltype(zero)>(x, weights, bias, m_copied, y); });
    case Route::packed_panels: {
      if (dtype == DType::f16) {
        return by_packed_panels<half>(x.data(), x.stride(0), rows, weights, bias, m_panel, y);
      }
      const std::int64_t stride = few_rows_stride(DType::f32, dtype, inputs);
      return by_packed_panels<bfloat16>(copied(stride), stride, rows, weights, bias, m_panel, y);
    }
    case Route::float_products:
      return by_onednn(x.data(), x.stride(0), rows, weights, bias, y);
    case Route::skinny:
      with_value_type(dtype, [&](auto zero) {
        skinny(exec, as_multiplied(exec, dtype, x, m_widened), weights.rows<decltype(zero)>(), y);
      });
      break;
    case Route::gemm:
      multiply_nt(exec, 1, x, weights.rows<float>(), 0, y);
      break;
    case Route::panels:
      by_panels(exec, as_multiplied(exec, dtype, x, m_widened), weights, m_panel, y);
      break;
  }
  if (bias.extent(0) > 0) add_bias(exec, bias, y);
}

}  // namespace kvzap::linalg
