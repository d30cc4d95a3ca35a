#include "detail/gemm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "detail/bf16_kernels.hpp"
#include "detail/device_kernels.hpp"
#include "detail/huge_pages.hpp"
#include "detail/kokkos_compat.hpp"
#include "detail/onednn.hpp"
#include "detail/product.hpp"
#include "detail/row_kernels.hpp"
#include "detail/scratch.hpp"
#include "detail/simd.hpp"
#if !defined(KOKKOS_ENABLE_CUDA)
#include <KokkosBlas3_gemm.hpp>
#endif

namespace kvzap::detail {
namespace {

template <class Value>
using Rows = typename LinearWeights<Value>::Rows;

// Up to this many rows a product reads its weights at the speed of memory, and a gemm that packs
// them first would only be slower.
constexpr std::int64_t skinny_rows = 8;
// The same for packed weights.
constexpr std::int64_t skinny_rows_packed = 16;
// Widened weights of one panel: small enough to stay in the second-level cache.
constexpr std::int64_t panel_bytes = std::int64_t{1} << 20;

#if defined(KOKKOS_ENABLE_CUDA)
void gemm(const ExecutionSpace& exec, bool transposed, float alpha, const ConstMatrix& a,
          const ConstMatrix& b, float beta, const Matrix& c) {
  Product<float> product;
  product.m = c.extent(0);
  product.n = c.extent(1);
  product.k = a.extent(1);
  product.a = a.data();
  product.a_stride = a.stride(0);
  product.b = b.data();
  product.b_stride = b.stride(0);
  product.transposed = transposed;
  product.c = c.data();
  product.c_stride = c.stride(0);
  product.alpha = alpha;
  product.beta = beta;
  multiply(exec, product);
}
#else
// c (m, 1). Kokkos Kernels 4 turns such a product into a matrix-vector one that loses the stride of
// a column in a wider matrix.
void single_column(const ExecutionSpace& exec, bool transposed, float alpha, const ConstMatrix& a,
                   const ConstMatrix& b, float beta, const Matrix& c) {
  const std::int64_t dim = a.extent(1);
  Kokkos::parallel_for(
      "kvzap::gemm::single_column",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, c.extent(0)),
      KOKKOS_LAMBDA(std::int64_t m) {
        float sum = 0;
        for (std::int64_t k = 0; k < dim; ++k) sum += a(m, k) * (transposed ? b(0, k) : b(k, 0));
        c(m, 0) = alpha * sum + (beta == 0 ? 0 : beta * c(m, 0));
      });
}

// Kokkos Kernels 3.4 has no overload that takes an instance: its gemm runs on the default one,
// after what was launched there before.
void gemm(const ExecutionSpace& exec, bool transposed, float alpha, const ConstMatrix& a,
          const ConstMatrix& b, float beta, const Matrix& c) {
  if (c.extent(0) == 0 || c.extent(1) == 0) return;
  const char* const op_b = transposed ? "T" : "N";
  if (c.extent(1) == 1) return single_column(exec, transposed, alpha, a, b, beta, c);
#if KOKKOS_VERSION >= 40000
  KokkosBlas::gemm(exec, "N", op_b, alpha, a, b, beta, c);
#else
  fence(exec, "kvzap::gemm: the library's gemm does not run on the caller's instance");
  KokkosBlas::gemm("N", op_b, alpha, a, b, beta, c);
#endif
}
#endif

template <class Value>
void skinny(const ExecutionSpace& exec, const ConstMatrix& x, const Rows<Value>& weights,
            const Matrix& y) {
  const std::int64_t rows = x.extent(0);
  const std::int64_t dim = x.extent(1);
  const std::int64_t outputs = weights.extent(0);
  if constexpr (runs_on_host) {
    constexpr std::int64_t block = 64;
    Kokkos::parallel_for(
        "kvzap::linear::skinny",
        Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(0, (outputs + block - 1) / block),
        [=](std::int64_t i) {
          const std::int64_t begin = i * block;
          skinny_product(weights.data() + begin * weights.stride(0), weights.stride(0),
                         std::min(block, outputs - begin), x.data(), x.stride(0),
                         static_cast<int>(rows), dim, y.data() + begin, y.stride(0));
        });
  } else {
    using Team = Kokkos::TeamPolicy<ExecutionSpace>;
    Kokkos::parallel_for(
        "kvzap::linear::skinny", Team(exec, outputs, Kokkos::AUTO),
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
}

template <class Value>
void widen_panel(const ExecutionSpace& exec, const Rows<Value>& weights, std::int64_t begin,
                 std::int64_t end, const Matrix& panel) {
  const std::int64_t dim = weights.extent(1);
  if constexpr (runs_on_host) {
    Kokkos::parallel_for("kvzap::linear::widen",
                         Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(begin, end),
                         [=](std::int64_t n) { widen(&weights(n, 0), &panel(n - begin, 0), dim); });
  } else {
    Kokkos::parallel_for(
        "kvzap::linear::widen",
        Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(exec, {begin, 0}, {end, dim}),
        KOKKOS_LAMBDA(std::int64_t n, std::int64_t k) {
          panel(n - begin, k) = static_cast<float>(weights(n, k));
        });
  }
}

// Rounds x (m, k) to bf16 rows of `padded` values, with zeros behind the k-th.
void round_rows(const ConstMatrix& x, std::int64_t padded, bfloat16* rounded) {
  const std::int64_t inputs = x.extent(1);
  Kokkos::parallel_for("kvzap::linear::round",
                       Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(0, x.extent(0)),
                       [=](std::int64_t m) {
                         bfloat16* row = rounded + m * padded;
                         narrow(&x(m, 0), row, inputs);
                         std::fill(row + inputs, row + padded, bfloat16{0});
                       });
}

// The same in float.
void round_rows(const ExecutionSpace& exec, const ConstMatrix& x, const Matrix& rounded) {
  Kokkos::parallel_for(
      "kvzap::linear::round",
      Kokkos::MDRangePolicy<ExecutionSpace, Kokkos::Rank<2>>(
          exec, {0, 0},
          {static_cast<std::int64_t>(x.extent(0)), static_cast<std::int64_t>(x.extent(1))}),
      KOKKOS_LAMBDA(std::int64_t m, std::int64_t k) {
        rounded(m, k) = static_cast<float>(bfloat16(x(m, k)));
      });
}

// A few rows of x, rounded, by bf16 weights of either layout.
void skinny_bf16(const bfloat16* x, std::int64_t x_stride, std::int64_t rows,
                 const LinearWeights<bfloat16>& weights, const Matrix& y) {
  constexpr std::int64_t block = LinearWeights<bfloat16>::block_outputs;
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  const std::int64_t padded = LinearWeights<bfloat16>::padded_inputs(inputs);
  const bool packed = weights.is_packed();
  const bfloat16* values = packed ? weights.packed().data() : weights.rows().data();
  const std::int64_t stride = packed ? 0 : weights.rows().stride(0);
  Kokkos::parallel_for(
      "kvzap::linear::skinny_bf16",
      Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(0, (outputs + block - 1) / block),
      [=](std::int64_t i) {
        const std::int64_t begin = i * block;
        const std::int64_t count = std::min(block, outputs - begin);
        if (packed) {
          bf16_product_packed(x, x_stride, static_cast<int>(rows), values + begin * padded, padded,
                              static_cast<int>(count), &y(0, begin), y.stride(0));
        } else {
          bf16_product_rows(x, x_stride, static_cast<int>(rows), values + begin * stride, stride,
                            count, inputs, &y(0, begin), y.stride(0));
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
  onednn::Product<Value> product;
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

// Rows of x, rounded to bf16, without padding.
void round_rows(const ExecutionSpace& exec, const ConstMatrix& x,
                const Kokkos::View<bfloat16*, MemorySpace>& rounded) {
  const std::int64_t inputs = x.extent(1);
  Kokkos::parallel_for(
      "kvzap::linear::round",
      Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0,
                                                                           x.extent(0) * inputs),
      KOKKOS_LAMBDA(std::int64_t i) { rounded(i) = bfloat16(x(i / inputs, i % inputs)); });
}

// Rows of x, each times a power of two that brings its largest value to at least 2^14 and below
// 2^15, rounded to f16; unscale (rows) undoes it.
void round_rows(const ExecutionSpace& exec, const ConstMatrix& x,
                const Kokkos::View<half*, MemorySpace>& rounded, const Vector& unscale) {
  const std::int64_t inputs = x.extent(1);
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::linear::round", Team(exec, static_cast<int>(x.extent(0)), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t m = team.league_rank();
        float largest = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, inputs),
            [&](std::int64_t k, float& most) {
              const float size = math::fabs(x(m, k));
              if (size > most) most = size;
            },
            Kokkos::Max<float>(largest));
        const int exponent = static_cast<int>((float_bits(largest) >> 23) & 0xffu) - 127;
        // Infinity stays what it is.
        const int shift = exponent == 128 ? 0 : (exponent < -112 ? 126 : 14 - exponent);
        const float scale = bits_float(static_cast<std::uint32_t>(127 + shift) << 23);
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, inputs), [&](std::int64_t k) {
          rounded(m * inputs + k) = half(x(m, k) * scale);
        });
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          unscale(m) = bits_float(static_cast<std::uint32_t>(127 - shift) << 23);
        });
      });
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
        value = value * (scaled ? unscale(i / columns) : 1.0f) + (biased ? bias(i % columns) : 0.0f);
      });
}

/// Whether products run on operands of the weights' type, without waiting for `exec`.
bool keeps_type() {
  return has_product_library() || (runs_on_host && uses_device_kernels());
}

bool has_bf16_products() {
  return runs_on_host && has_bf16_kernels() && simd_level() >= SimdLevel::avx512_bf16;
}

}  // namespace

void multiply_nt(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, true, alpha, a, b, beta, c);
}

void multiply_nn(const ExecutionSpace& exec, float alpha, const ConstMatrix& a,
                 const ConstMatrix& b, float beta, const Matrix& c) {
  gemm(exec, false, alpha, a, b, beta, c);
}

template <class Value>
bool packs_weights() {
  if constexpr (!std::is_same_v<Value, bfloat16>) return false;
  const char* asked = std::getenv("KVZAP_PACK");
  return has_bf16_products() && onednn::is_available() && !keeps_type() &&
         !(asked && std::string_view(asked) == "off");
}

template <class Value>
LinearWeights<Value> PackedAllocator<Value>::operator()(std::int64_t outputs, std::int64_t inputs) {
  using Packed = typename LinearWeights<Value>::Packed;
  // What of a block is never used is never touched either, and takes address space alone.
  constexpr std::int64_t block_values = (std::int64_t{64} << 20) / sizeof(Value);
  constexpr std::int64_t alignment = huge_page_bytes / sizeof(Value);
  const std::int64_t size = LinearWeights<Value>::packed_size(outputs, inputs);
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
    if constexpr (runs_on_host) advise_huge_pages(m_block.data(), wanted * sizeof(Value));
    const auto address = reinterpret_cast<std::uintptr_t>(m_block.data());
    m_used = static_cast<std::int64_t>((huge_page_bytes - address % huge_page_bytes) %
                                       huge_page_bytes / sizeof(Value));
    if (m_used + size > wanted) m_used = 0;
  }
  const auto range = std::make_pair(m_used, m_used + size);
  m_used += size;  // a multiple of 4 KiB: every matrix starts on a cache line
  return {outputs, inputs, Kokkos::subview(m_block, range)};
}

template <class Value>
void pack_rows(const Value* rows, std::int64_t begin, std::int64_t n_rows,
               const LinearWeights<Value>& weights) {
  constexpr std::int64_t block = LinearWeights<Value>::block_outputs;
  const std::int64_t inputs = weights.inputs();
  const std::int64_t padded = LinearWeights<Value>::padded_inputs(inputs);
  if constexpr (std::is_same_v<Value, bfloat16>) {
    for (std::int64_t i = 0; i < n_rows; i += block) {
      bf16_pack_block(rows + i * inputs, inputs, static_cast<int>(std::min(block, n_rows - i)),
                      inputs, padded, weights.packed().data() + (begin + i) * padded);
    }
  }
}

template <class Value>
void LinearMap::operator()(const ExecutionSpace& exec, const ConstMatrix& x,
                           const LinearWeights<Value>& weights, const ConstVector& bias,
                           const Matrix& y) {
  const std::int64_t rows = x.extent(0);
  const std::int64_t outputs = weights.outputs();
  const std::int64_t inputs = weights.inputs();
  if (rows == 0 || outputs == 0) return;
  if (inputs == 0) {
    Kokkos::deep_copy(exec, y, 0.0f);  // a gemm with no inner extent leaves its result as it was
    if (bias.extent(0) > 0) add_bias(exec, bias, y);
    return;
  }
  if (keeps_type()) {
    Product<Value> product;
    product.m = rows;
    product.n = outputs;
    product.k = inputs;
    product.a_stride = inputs;
    ConstVector unscale;
    if constexpr (std::is_same_v<Value, bfloat16>) {
      reserve_scratch(m_bf16, rows * inputs, "kvzap::linear::rounded");
      round_rows(exec, x, m_bf16);
      product.a = m_bf16.data();
    } else if constexpr (std::is_same_v<Value, half>) {
      reserve_scratch(m_half, rows * inputs, "kvzap::linear::rounded");
      reserve_scratch(m_unscale, rows, "kvzap::linear::unscale");
      round_rows(exec, x, m_half, m_unscale);
      product.a = m_half.data();
      unscale = m_unscale;
    } else {
      product.a = x.data();
      product.a_stride = x.stride(0);
    }
    product.b = weights.rows().data();
    product.b_stride = weights.rows().stride(0);
    product.transposed = true;
    product.c = y.data();
    product.c_stride = y.stride(0);
    multiply(exec, product);
    finish_rows(exec, unscale, bias, y);
    return;
  }
  if constexpr (runs_on_host) {
    fence(exec, "kvzap::linear: host kernels read what the instance wrote");
    if constexpr (std::is_same_v<Value, bfloat16>) {
      if (has_bf16_products()) {
        const bool few = rows <= (weights.is_packed() ? skinny_rows_packed : skinny_rows);
        if (few || onednn::is_available()) {
          const std::int64_t padded = LinearWeights<Value>::padded_inputs(inputs);
          reserve_scratch(m_bf16, rows * padded, "kvzap::linear::rounded");
          round_rows(x, padded, m_bf16.data());
          if (!few) return by_onednn(m_bf16.data(), padded, rows, weights, bias, y);
          skinny_bf16(m_bf16.data(), padded, rows, weights, y);
          if (bias.extent(0) > 0) add_bias(exec, bias, y);
          return;
        }
      }
    }
    if constexpr (std::is_same_v<Value, float>) {
      if (rows > skinny_rows && onednn::is_available()) {
        return by_onednn(x.data(), x.stride(0), rows, weights, bias, y);
      }
    }
  }
  if (weights.is_packed()) {
    throw Error("linear map: packed weights need the instruction set they were packed for");
  }
  ConstMatrix input = x;
  if constexpr (std::is_same_v<Value, bfloat16>) {
    reserve_scratch(m_widened, rows * inputs, "kvzap::linear::rounded");
    const Matrix rounded(m_widened.data(), rows, inputs);
    round_rows(exec, x, rounded);
    input = rounded;
  }
  if (rows <= skinny_rows) {
    skinny<Value>(exec, input, weights.rows(), y);
  } else if constexpr (std::is_same_v<Value, float>) {
    multiply_nt(exec, 1, input, weights.rows(), 0, y);
  } else {
    const std::int64_t panel_rows = std::min<std::int64_t>(
        outputs, std::max<std::int64_t>(16, panel_bytes / (sizeof(float) * inputs)));
    reserve_scratch(m_panel, panel_rows * inputs, "kvzap::linear::panel");
    for (std::int64_t begin = 0; begin < outputs; begin += panel_rows) {
      const std::int64_t end = std::min(begin + panel_rows, outputs);
      const Matrix panel(m_panel.data(), end - begin, inputs);
      widen_panel<Value>(exec, weights.rows(), begin, end, panel);
      const Matrix columns = Kokkos::subview(y, Kokkos::ALL, std::make_pair(begin, end));
      multiply_nt(exec, 1, input, panel, 0, columns);
    }
  }
  if (bias.extent(0) > 0) add_bias(exec, bias, y);
}

#define KVZAP_LINEAR(Value)                                                                       \
  template bool packs_weights<Value>();                                                           \
  template class PackedAllocator<Value>;                                                          \
  template void pack_rows(const Value*, std::int64_t, std::int64_t, const LinearWeights<Value>&); \
  template void LinearMap::operator()(const ExecutionSpace&, const ConstMatrix&,                  \
                                      const LinearWeights<Value>&, const ConstVector&,            \
                                      const Matrix&);
KVZAP_LINEAR(float)
KVZAP_LINEAR(half)
KVZAP_LINEAR(bfloat16)
#undef KVZAP_LINEAR

}  // namespace kvzap::detail
