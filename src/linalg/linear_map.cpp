#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/device_kernels.hpp"
#include "base/host_threads.hpp"
#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
#include "base/value_types.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/onednn.hpp"
#include "linalg/host/packed_avx2.hpp"
#include "linalg/host/packed_kernels.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/host/row_products.hpp"
#include "linalg/product.hpp"
#include "linalg/product_kinds.hpp"

namespace kvzap::linalg {
namespace {

template <class Value>
using Rows = typename LinearWeights<Value>::Rows;

// Widened weights of one panel: small enough to stay in the second-level cache.
constexpr std::int64_t panel_bytes = std::int64_t{1} << 20;
// The same size for packed weights. oneDNN reads them block by block, so a larger panel reads x
// fewer times.
constexpr std::int64_t packed_panel_bytes = std::int64_t{8} << 20;

// The kernel for a few rows on a device.
template <class Value>
void skinny(const ExecutionSpace& exec, const ConstMatrix& x, const Rows<Value>& weights,
            const Matrix& y) {
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  const std::int64_t rows = x.extent(0);
  const std::int64_t dim = x.extent(1);
  Kokkos::parallel_for(
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
void widen_panel(const ExecutionSpace& exec, const Rows<Value>& weights, std::int64_t begin,
                 std::int64_t end, const Matrix& panel) {
  const std::int64_t dim = weights.extent(1);
  if constexpr (base::runs_on_host) {
    base::host_for("kvzap::linear::widen", end - begin, dim,
                   [=](std::int64_t n) { widen(&weights(begin + n, 0), &panel(n, 0), dim); });
  } else {
    Kokkos::parallel_for(
        "kvzap::linear::widen",
        Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {begin, 0}, {end, dim}),
        KOKKOS_LAMBDA(std::int64_t n, std::int64_t k) {
          panel(n - begin, k) = static_cast<float>(weights(n, k));
        });
  }
}

// Converts inputs for a product with weights of type Value: bf16 weights need inputs rounded to
// bf16.
template <class Value, class X>
void copy_inputs(const float* source, X* target, std::int64_t count) {
  if constexpr (std::is_same_v<Value, bfloat16> && std::is_same_v<X, float>) {
    round_to_bf16(source, target, count);
  } else {
    narrow(source, target, count);
  }
}

// Copies converted inputs x (m, k) to `copy`: rows of `stride` values, padded with zeros.
template <class Value, class X>
void copy_rows(const ConstMatrix& x, std::int64_t stride, Kokkos::View<X*, MemorySpace>& copy) {
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = x.extent(1);
  base::reserve_scratch(copy, rows * stride, "kvzap::linear::copied");
  X* const target = copy.data();
  base::host_for("kvzap::linear::copy", rows, inputs, [=](std::int64_t m) {
    X* row = target + m * stride;
    copy_inputs<Value>(&x(m, 0), row, inputs);
    std::fill(row + inputs, row + stride, X(0.0f));
  });
}

// Returns x for a product of floats. With bf16 weights x is rounded to bf16 and widened again.
template <class Value>
ConstMatrix as_multiplied(const ExecutionSpace& exec, const ConstMatrix& x, Vector& scratch) {
  if constexpr (!std::is_same_v<Value, bfloat16>) return x;
  const auto rows = static_cast<std::int64_t>(x.extent(0));
  const auto inputs = static_cast<std::int64_t>(x.extent(1));
  base::reserve_scratch(scratch, rows * inputs, "kvzap::linear::rounded");
  const Matrix rounded(scratch.data(), rows, inputs);
  Kokkos::parallel_for(
      "kvzap::linear::round",
      Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {0, 0}, {rows, inputs}),
      KOKKOS_LAMBDA(std::int64_t m, std::int64_t k) {
        rounded(m, k) = static_cast<float>(bfloat16(x(m, k)));
      });
  return rounded;
}

// Widens plain rows of weights panel by panel.
template <class Value>
void by_panels(const ExecutionSpace& exec, const ConstMatrix& x, const Rows<Value>& weights,
               Vector& scratch, const Matrix& y) {
  const auto outputs = static_cast<std::int64_t>(weights.extent(0));
  const auto inputs = static_cast<std::int64_t>(weights.extent(1));
  const std::int64_t panel_rows = std::min<std::int64_t>(
      outputs, std::max<std::int64_t>(16, panel_bytes / (sizeof(float) * inputs)));
  base::reserve_scratch(scratch, panel_rows * inputs, "kvzap::linear::panel");
  for (std::int64_t begin = 0; begin < outputs; begin += panel_rows) {
    const std::int64_t end = std::min(begin + panel_rows, outputs);
    const Matrix panel(scratch.data(), end - begin, inputs);
    widen_panel<Value>(exec, weights, begin, end, panel);
    const Matrix columns = Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end));
    multiply_large(exec, Op::plain, x, Op::transposed, panel, 0, columns);
  }
}

// Distance between rows of x for the kernels for a few rows: an odd number of cache lines. The
// extent of rows is often a power of two; at that distance rows would contend for the same sets of
// the first-level cache.
template <class Value, class X>
std::int64_t few_rows_stride(std::int64_t inputs) {
  constexpr std::int64_t line = 64 / sizeof(X);
  return ((LinearWeights<Value>::padded_inputs(inputs) + line - 1) / line | 1) * line;
}

// Multiplies a few rows of x by weights of either layout.
template <class X, class Value>
void few_rows(const X* x, std::int64_t x_stride, std::int64_t rows,
              const LinearWeights<Value>& weights, const Matrix& y) {
  // A multiple of the rows that the kernels for plain rows take at once.
  constexpr std::int64_t plain_block = 96;
  constexpr std::int64_t packed_block = LinearWeights<Value>::block_outputs;
  const bool packed = weights.is_packed();
  const std::int64_t block = packed ? packed_block : plain_block;
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  const std::int64_t padded = LinearWeights<Value>::padded_inputs(inputs);
  const Value* values = packed ? weights.packed().data() : weights.rows().data();
  const std::int64_t stride = packed ? padded : weights.rows().stride(0);
  base::host_for(
      "kvzap::linear::few_rows", (outputs + block - 1) / block, block * inputs,
      [=](std::int64_t i) {
        const std::int64_t begin = i * block;
        const std::int64_t count = std::min(block, outputs - begin);
        if (packed) {
          return packed_product(x, x_stride, static_cast<int>(rows), values + begin * stride,
                                padded, static_cast<int>(count), &y(0, begin), y.stride(0));
        }
        // The block stays in a second-level cache meanwhile.
        const std::int64_t parts = (rows + skinny_product_rows - 1) / skinny_product_rows;
        for (std::int64_t p = 0; p < parts; ++p) {
          const std::int64_t m = p * rows / parts;
          const auto n_rows = static_cast<int>((p + 1) * rows / parts - m);
          skinny_product(x + m * x_stride, x_stride, n_rows, values + begin * stride, stride, count,
                         inputs, &y(m, begin), y.stride(0));
        }
      });
}

// Copies a few rows of x as values of type X and multiplies them.
template <class Value, class X>
void by_few_rows(const ConstMatrix& x, Kokkos::View<X*, MemorySpace>& scratch,
                 const LinearWeights<Value>& weights, const Matrix& y) {
  const std::int64_t stride = few_rows_stride<Value, X>(weights.inputs());
  copy_rows<Value>(x, stride, scratch);
  few_rows(scratch.data(), stride, x.extent(0), weights, y);
}

// Multiplies many rows of x by few rows of weights, with their roles exchanged. Reads x once, in
// memory order, and rounds it on the way if the weights are bf16.
template <class Value>
void by_few_outputs(const ConstMatrix& x, const Rows<Value>& weights, const ConstVector& bias,
                    Vector& scratch, const Matrix& y) {
  using Streamed = std::conditional_t<std::is_same_v<Value, bfloat16>, RoundedFloat, float>;
  constexpr std::int64_t block = 96;
  const std::int64_t outputs = weights.extent(0);
  const std::int64_t inputs = weights.extent(1);
  const std::int64_t stride = few_rows_stride<Value, float>(inputs);
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
        for (std::int64_t n = 0; n < outputs; n += skinny_product_rows) {
          skinny_product(widened + n * stride, stride,
                         static_cast<int>(std::min<std::int64_t>(skinny_product_rows, outputs - n)),
                         reinterpret_cast<const Streamed*>(&x(begin, 0)), x.stride(0), count,
                         inputs, sums + n * block, block);
        }
        for (std::int64_t m = 0; m < count; ++m) {
          for (std::int64_t n = 0; n < outputs; ++n) {
            y(begin + m, n) = sums[n * block + m] + (bias.extent(0) > 0 ? bias(n) : 0.0f);
          }
        }
      });
}

void add_bias(const ExecutionSpace& exec, const ConstVector& bias, const Matrix& y) {
  Kokkos::parallel_for(
      "kvzap::linear::bias",
      Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(
          exec, {0, 0},
          {static_cast<std::int64_t>(y.extent(0)), static_cast<std::int64_t>(y.extent(1))}),
      KOKKOS_LAMBDA(std::int64_t m, std::int64_t n) { y(m, n) += bias(n); });
}

template <class Value>
void by_onednn(const Value* x, std::int64_t x_stride, std::int64_t rows,
               const LinearWeights<Value>& weights, const ConstVector& bias, const Matrix& y) {
  onednn::Product<Value> product{};
  product.m = rows;
  product.n = weights.outputs();
  product.k = weights.inputs();
  product.x = x;
  product.x_stride = x_stride;
  product.weights = weights.is_packed() ? weights.packed().data() : weights.rows().data();
  product.weights_stride = weights.is_packed() ? 0 : weights.rows().stride(0);
  product.bias = bias.extent(0) > 0 ? bias.data() : nullptr;
  product.y = y.data();
  product.y_stride = y.stride(0);
  onednn::multiply(product);
}

// Widens packed weights panel by panel, in memory order, and multiplies them as packed floats.
template <class Value>
void by_packed_panels(const float* x, std::int64_t x_stride, std::int64_t rows,
                      const LinearWeights<Value>& weights, const ConstVector& bias, Vector& scratch,
                      const Matrix& y) {
  constexpr std::int64_t block = LinearWeights<Value>::block_outputs;
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  // bf16 weights may have more padding behind their inputs than floats.
  const std::int64_t source_padded = LinearWeights<Value>::padded_inputs(inputs);
  const std::int64_t padded = LinearWeights<float>::padded_inputs(inputs);
  const std::int64_t block_bytes = block * padded * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t panel_outputs =
      std::min((outputs + block - 1) / block,
               std::max<std::int64_t>(1, packed_panel_bytes / block_bytes)) *
      block;
  base::reserve_scratch(scratch, panel_outputs * padded, "kvzap::linear::panel");
  for (std::int64_t begin = 0; begin < outputs; begin += panel_outputs) {
    const std::int64_t end = std::min(begin + panel_outputs, outputs);
    const Value* source = weights.packed().data() + begin * source_padded;
    float* target = scratch.data();
    base::host_for("kvzap::linear::widen", (end - begin + block - 1) / block, block * padded,
                   [=](std::int64_t i) {
                     widen_block(source + i * block * source_padded, padded,
                                 target + i * block * padded);
                   });
    const LinearWeights<float> panel(end - begin, inputs, scratch);
    by_onednn(
        x, x_stride, rows, panel,
        bias.extent(0) > 0 ? ConstVector(Kokkos::subview(bias, std::make_pair(begin, end))) : bias,
        Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end)));
  }
}

// Multiplies many rows by f16 weights in the processor's tiles. Each row of x is scaled and
// rounded. Packed weights are rearranged to pairs of inputs, panel by panel.
void by_half_tiles(const ConstMatrix& x, const LinearWeights<half>& weights,
                   const ConstVector& bias, Kokkos::View<half*, MemorySpace>& rounded,
                   Vector& unscale, Kokkos::View<half*, MemorySpace>& pairs, const Matrix& y) {
  constexpr std::int64_t block = LinearWeights<half>::block_outputs;
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  const std::int64_t outputs = weights.outputs();
  const std::int64_t stride = LinearWeights<bfloat16>::padded_inputs(inputs);
  base::reserve_scratch(rounded, rows * stride, "kvzap::linear::rounded");
  base::reserve_scratch(unscale, rows, "kvzap::linear::unscale");
  half* const values = rounded.data();
  float* const factors = unscale.data();
  base::host_for("kvzap::linear::copy", rows, inputs, [=](std::int64_t m) {
    half* const row = values + m * stride;
    factors[m] = scale_to_half(&x(m, 0), inputs, row);
    std::fill(row + inputs, row + stride, half{0});
  });
  onednn::Product<half> product{};
  product.m = rows;
  product.n = outputs;
  product.k = inputs;
  product.x = values;
  product.x_stride = stride;
  product.y = y.data();
  product.y_stride = y.stride(0);
  if (!weights.is_packed()) {
    product.weights = weights.rows().data();
    product.weights_stride = weights.rows().stride(0);
    onednn::multiply(product);
  } else {
    const std::int64_t padded = LinearWeights<half>::padded_inputs(inputs);
    const std::int64_t block_bytes = block * stride * static_cast<std::int64_t>(sizeof(half));
    const std::int64_t blocks = (outputs + block - 1) / block;
    const std::int64_t panel_blocks =
        std::min(blocks, std::max<std::int64_t>(1, packed_panel_bytes / block_bytes));
    base::reserve_scratch(pairs, panel_blocks * block * stride, "kvzap::linear::panel");
    half* const panel = pairs.data();
    for (std::int64_t first = 0; first < blocks; first += panel_blocks) {
      const std::int64_t count = std::min(panel_blocks, blocks - first);
      const half* const source = weights.packed().data() + first * block * padded;
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
void by_packed_gemm(const ConstMatrix& x, const LinearWeights<Value>& weights,
                    const ConstVector& bias, Vector& scratch, const Matrix& y) {
  constexpr std::int64_t block = LinearWeights<Value>::block_outputs;
  constexpr std::int64_t slice = avx2::gemm_inputs;
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  const std::int64_t outputs = weights.outputs();
  const std::int64_t padded = LinearWeights<Value>::padded_inputs(inputs);
  const std::int64_t slice_stride = rows * slice;
  base::reserve_scratch(scratch, (padded + slice - 1) / slice * slice_stride,
                        "kvzap::linear::copied");
  float* const copy = scratch.data();
  base::host_for("kvzap::linear::copy", rows, padded, [=](std::int64_t m) {
    for (std::int64_t k = 0; k < padded; k += slice) {
      float* const row = copy + k / slice * slice_stride + m * slice;
      const std::int64_t valid = std::clamp<std::int64_t>(inputs - k, 0, slice);
      if (valid > 0) copy_inputs<Value>(&x(m, k), row, valid);
      std::fill(row + valid, row + std::min(slice, padded - k), 0.0f);
    }
  });
  const Value* const values = weights.packed().data();
  const std::int64_t blocks = (outputs + block - 1) / block;
  const std::int64_t row_blocks = (rows + avx2::gemm_rows - 1) / avx2::gemm_rows;
  // One group of rows passes over all blocks in turn, because the weights are the smaller stream.
  base::host_for("kvzap::linear::packed_gemm", row_blocks * blocks, [=](std::int64_t i) {
    const std::int64_t m = i / blocks * rows / row_blocks;
    const std::int64_t end = (i / blocks + 1) * rows / row_blocks;
    const std::int64_t n = i % blocks * block;
    avx2::packed_gemm(copy + m * slice, slice_stride, end - m, values + n * padded, padded,
                      static_cast<int>(std::min(block, outputs - n)),
                      bias.extent(0) > 0 ? &bias(n) : nullptr, &y(m, n), y.stride(0));
  });
}

template <class Value>
void round_rows(const ExecutionSpace& exec, const ConstMatrix& x,
                const RoundedRows<Value>& rounded) {
  const std::int64_t inputs = x.extent(1);
  if constexpr (RoundedRows<Value>::is_scaled) {
    using Team = Kokkos::TeamPolicy<ExecutionSpace>;
    Kokkos::parallel_for(
        "kvzap::linear::round", Team(exec, static_cast<int>(x.extent(0)), Kokkos::AUTO),
        KOKKOS_LAMBDA(const typename Team::member_type& team) {
          const std::int64_t m = team.league_rank();
          rounded.store(team, m, inputs, [&](std::int64_t k) { return x(m, k); });
        });
  } else {
    Kokkos::parallel_for(
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
  Kokkos::parallel_for(
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
  return base::runs_on_host && has_packed_kernels() &&
         base::simd_level() >= base::SimdLevel::amx_fp16;
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
template <class Value>
std::int64_t few_rows_limit(const LinearWeights<Value>& weights) {
  if constexpr (std::is_same_v<Value, bfloat16>) {
    if (weights.is_packed() && base::simd_level() >= base::SimdLevel::amx_bf16 &&
        onednn::has_fast_products<Value>(true)) {
      return 0;
    }
  }
  if (weights.is_packed()) return packed_product_rows;
  return base::simd_level() == base::SimdLevel::avx2 ? 3 * skinny_product_rows
                                                     : skinny_product_rows;
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

template <class Value>
Route choose_route(std::int64_t rows, const LinearWeights<Value>& weights) {
  constexpr bool is_float = std::is_same_v<Value, float>;
  constexpr bool is_bf16 = std::is_same_v<Value, bfloat16>;
  constexpr bool is_half = std::is_same_v<Value, half>;
  constexpr Route by_blas = is_float ? Route::gemm : Route::panels;
  const bool packed = weights.is_packed();
  const bool few = rows <= few_rows_limit(weights);
  if (keeps_type()) return Route::own_type;
  if (!base::runs_on_host) return few ? Route::skinny : by_blas;
  if (few) return is_bf16 && has_bf16_products() ? Route::few_bf16_rows : Route::few_rows;
  const bool can_stream = !is_bf16 || base::simd_level() >= base::SimdLevel::avx2;
  if (weights.outputs() <= few_outputs && !packed && can_stream) return Route::few_outputs;
  if constexpr (is_bf16) {
    if (has_bf16_products() && onednn::has_fast_products<Value>(packed)) {
      return Route::bf16_products;
    }
  }
  if constexpr (is_half) {
    if (has_half_tiles() && onednn::has_fast_products<Value>(packed)) return Route::half_tiles;
  }
  if (packed) {
    if (base::simd_level() == base::SimdLevel::avx2 || !onednn::has_fast_products<float>(true)) {
      return Route::packed_gemm;
    }
    if (!is_float) return Route::packed_panels;
  }
  return is_float && onednn::is_available() ? Route::float_products : by_blas;
}

}  // namespace

bool may_pack_weights() {
  const char* asked = std::getenv("KVZAP_PACK");
  const std::string_view name = asked ? asked : "";
  if (name.empty() || name == "on") return true;
  if (name == "off") return false;
  throw Error(fmt::format("KVZAP_PACK is \"{}\"; expected on or off", name));
}

template <class Value>
bool packs_weights() {
  // AVX-512 needs oneDNN for many rows; without it, plain rows are as fast.
  return may_pack_weights() && has_packed_products() &&
         (base::simd_level() == base::SimdLevel::avx2 || onednn::is_available()) && !keeps_type();
}

template <class Value>
auto PackedAllocator<Value>::operator()(std::int64_t size) -> Packed {
  // Unused parts of a block are never touched and take only address space.
  constexpr std::int64_t block_values = (std::int64_t{64} << 20) / sizeof(Value);
  constexpr std::int64_t alignment = base::huge_page_bytes / sizeof(Value);
  constexpr std::int64_t line = 64 / sizeof(Value);
  size = (size + line - 1) / line * line;
  if (m_used + size > static_cast<std::int64_t>(m_block.extent(0))) {
    const std::int64_t wanted = std::max(block_values, size + alignment);
    try {
      m_block = {};
      m_block =
          Packed(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::weights::packed"), wanted);
    } catch (const std::exception&) {
      throw Error(
          fmt::format("out of memory: no room for {} weights of {} bytes", wanted, sizeof(Value)));
    }
    if constexpr (base::runs_on_host)
      base::advise_huge_pages(m_block.data(), wanted * sizeof(Value));
    const auto address = reinterpret_cast<std::uintptr_t>(m_block.data());
    m_used = static_cast<std::int64_t>((base::huge_page_bytes - address % base::huge_page_bytes) %
                                       base::huge_page_bytes / sizeof(Value));
    if (m_used + size > wanted) m_used = 0;
  }
  const auto range = std::make_pair(m_used, m_used + size);
  m_used += size;  // every matrix starts on a cache line
  return Kokkos::subview(m_block, range);
}

template <class Value>
void pack_rows(const Value* rows, std::int64_t begin, std::int64_t n_rows,
               const LinearWeights<Value>& weights) {
  constexpr std::int64_t block = LinearWeights<Value>::block_outputs;
  const std::int64_t inputs = weights.inputs();
  const std::int64_t padded = LinearWeights<Value>::padded_inputs(inputs);
  for (std::int64_t i = 0; i < n_rows; i += block) {
    pack_block(rows + i * inputs, inputs, static_cast<int>(std::min(block, n_rows - i)), inputs,
               padded, weights.packed().data() + (begin + i) * padded);
  }
}

template <class Value>
RoundedRows<Value> LinearMap::room_for_rounded(std::int64_t m, std::int64_t k) {
  RoundedRows<Value> room;
  if (!keeps_type()) return room;
  if constexpr (std::is_same_v<Value, bfloat16>) {
    base::reserve_scratch(m_bf16, m * k, "kvzap::linear::rounded");
    room.values = m_bf16.data();
  } else if constexpr (std::is_same_v<Value, half>) {
    base::reserve_scratch(m_half, m * k, "kvzap::linear::rounded");
    base::reserve_scratch(m_unscale, m, "kvzap::linear::unscale");
    room.values = m_half.data();
    room.unscale = m_unscale.data();
  }
  return room;
}

template <class Value>
void LinearMap::by_own_type(const ExecutionSpace& exec, const ConstMatrix& x,
                            const RoundedRows<Value>& rounded, const LinearWeights<Value>& weights,
                            const ConstVector& bias, const Matrix& y) {
  Product<Value> product;
  product.m = x.extent(0);
  product.n = weights.outputs();
  product.k = weights.inputs();
  product.a_stride = weights.inputs();
  ConstVector unscale;
  if constexpr (std::is_same_v<Value, float>) {
    product.a = x.data();
    product.a_stride = x.stride(0);
  } else {
    RoundedRows<Value> operand = rounded;
    if (!rounded.exist()) {
      operand = room_for_rounded<Value>(product.m, product.k);
      round_rows(exec, x, operand);
    }
    product.a = operand.values;
    if constexpr (RoundedRows<Value>::is_scaled) unscale = ConstVector(operand.unscale, product.m);
  }
  product.b = weights.rows().data();
  product.b_stride = weights.rows().stride(0);
  product.transposed = true;
  product.c = y.data();
  product.c_stride = y.stride(0);
  multiply(exec, product);
  finish_rows(exec, unscale, bias, y);
}

template <class Value>
void LinearMap::operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                           const RoundedRows<Value>& rounded, const LinearWeights<Value>& weights,
                           const ConstVector& bias, const Matrix& y) {
  constexpr bool is_float = std::is_same_v<Value, float>;
  constexpr bool is_bf16 = std::is_same_v<Value, bfloat16>;
  constexpr bool is_half = std::is_same_v<Value, half>;
  const std::int64_t rows = x.extent(0);
  const std::int64_t inputs = weights.inputs();
  if (rows == 0 || weights.outputs() == 0) return;
  if (weights.quantised() != nullptr && inputs > 0) {
    return by_quantised<Value>(exec, x, *weights.quantised(), bias, y);
  }
  if (inputs == 0) {
    Kokkos::deep_copy(exec, y, 0.0f);  // a gemm with k = 0 does not write its result
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
  // The routes under `if constexpr` exist only for that type.
  switch (route) {
    case Route::own_type:
      return by_own_type(exec, x, rounded, weights, bias, y);
    case Route::few_outputs:
      return by_few_outputs<Value>(x, weights.rows(), bias, m_panel, y);
    case Route::few_bf16_rows:
      if constexpr (is_bf16) by_few_rows(x, m_bf16, weights, y);
      break;
    case Route::few_rows:
      by_few_rows(x, m_copied, weights, y);
      break;
    case Route::bf16_products:
      if constexpr (is_bf16) {
        const std::int64_t stride = LinearWeights<Value>::padded_inputs(inputs);
        copy_rows<Value>(x, stride, m_bf16);
        return by_onednn(m_bf16.data(), stride, rows, weights, bias, y);
      }
      break;
    case Route::half_tiles:
      if constexpr (is_half) {
        return by_half_tiles(x, weights, bias, m_half, m_unscale, m_pairs, y);
      }
      break;
    case Route::packed_gemm:
      return by_packed_gemm(x, weights, bias, m_copied, y);
    case Route::packed_panels:
      if constexpr (is_half) {
        return by_packed_panels(x.data(), x.stride(0), rows, weights, bias, m_panel, y);
      } else if constexpr (is_bf16) {
        const std::int64_t stride = few_rows_stride<Value, float>(inputs);
        copy_rows<Value>(x, stride, m_copied);
        return by_packed_panels(m_copied.data(), stride, rows, weights, bias, m_panel, y);
      }
      break;
    case Route::float_products:
      if constexpr (is_float) {
        return by_onednn(x.data(), x.stride(0), rows, weights, bias, y);
      }
      break;
    case Route::skinny:
      skinny<Value>(exec, as_multiplied<Value>(exec, x, m_widened), weights.rows(), y);
      break;
    case Route::gemm:
      if constexpr (is_float) multiply_nt(exec, 1, x, weights.rows(), 0, y);
      break;
    case Route::panels:
      by_panels<Value>(exec, as_multiplied<Value>(exec, x, m_widened), weights.rows(), m_panel, y);
      break;
  }
  if (bias.extent(0) > 0) add_bias(exec, bias, y);
}

#define KVZAP_LINEAR(Value)                                                                       \
  template bool packs_weights<Value>();                                                           \
  template class PackedAllocator<Value>;                                                          \
  template void pack_rows(const Value*, std::int64_t, std::int64_t, const LinearWeights<Value>&); \
  template RoundedRows<Value> LinearMap::room_for_rounded(std::int64_t, std::int64_t);            \
  template void LinearMap::operator()(const ExecutionSpace&, const ConstMatrix&,                  \
                                      const RoundedRows<Value>&, const LinearWeights<Value>&,     \
                                      const ConstVector&, const Matrix&);
KVZAP_FOR_EACH_VALUE(KVZAP_LINEAR)
#undef KVZAP_LINEAR
template class PackedAllocator<std::uint8_t>;

}  // namespace kvzap::linalg
