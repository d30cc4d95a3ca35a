// Scores tokens with a KVzap surrogate in the caller's views, by Kokkos Kernels' GEMM. A surrogate
// that is read from a published folder, for all layers and ranks: kvzap/engine/surrogate.hpp.
#pragma once

#include <KokkosBlas3_gemm.hpp>
#include <algorithm>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <kvzap/core/view_checks.hpp>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace kvzap {

/// One layer's linear surrogate (arXiv 2601.07891, section 3) in the caller's views:
/// score = weight · hidden + bias.
///
///     kvzap::LinearSurrogate surrogate{weight, bias};
template <class Weight, class Bias>
struct LinearSurrogate {
  Weight weight;  // (KV head, hidden_size)
  Bias bias;      // (KV head)
};
/// Deduces the types of the views.
template <class Weight, class Bias>
LinearSurrogate(Weight, Bias) -> LinearSurrogate<Weight, Bias>;

/// One layer's 2-layer MLP with exact GELU (arXiv 2601.07891, section 3) in the caller's views:
/// score = weight · gelu(hidden_weight · hidden + hidden_bias) + bias.
template <class HiddenWeight, class HiddenBias, class Weight, class Bias>
struct MlpSurrogate {
  HiddenWeight hidden_weight;  // (unit, hidden_size)
  HiddenBias hidden_bias;      // (unit)
  Weight weight;               // (KV head, unit)
  Bias bias;                   // (KV head)
};
/// Deduces the types of the views.
template <class HiddenWeight, class HiddenBias, class Weight, class Bias>
MlpSurrogate(HiddenWeight, HiddenBias, Weight, Bias)
    -> MlpSurrogate<HiddenWeight, HiddenBias, Weight, Bias>;

namespace linalg {

template <class Exec, class Value>
using ColumnMajor =
    Kokkos::View<Value**, Kokkos::LayoutLeft, Kokkos::Device<Exec, typename Exec::memory_space>>;

/// A float matrix as BLAS takes it: column by column, or transposed.
template <class Exec>
struct BlasMatrix {
  ColumnMajor<Exec, const float> view;
  bool transposed = false;
};

/// Returns the matrix itself if BLAS can read it. Otherwise returns a copy in float.
template <class Exec, class Matrix>
BlasMatrix<Exec> blas_matrix(const Exec& exec, const Matrix& matrix) {
  const auto rows = static_cast<std::int64_t>(matrix.extent(0));
  const auto columns = static_cast<std::int64_t>(matrix.extent(1));
  if constexpr (std::is_same_v<typename Matrix::non_const_value_type, float>) {
    constexpr std::int64_t longest = std::numeric_limits<std::int32_t>::max();  // BLAS has int
    const auto strides = std::pair<std::int64_t, std::int64_t>(matrix.stride(0), matrix.stride(1));
    const auto in_place = [&](std::int64_t length, std::int64_t count, std::int64_t stride) {
      return ColumnMajor<Exec, const float>(
          Kokkos::subview(ColumnMajor<Exec, const float>(matrix.data(), stride, count),
                          std::pair<std::int64_t, std::int64_t>(0, length), Kokkos::ALL));
    };
    if (strides.first == 1 && strides.second >= rows && strides.second <= longest) {
      return {in_place(rows, columns, strides.second), false};
    }
    if (strides.second == 1 && strides.first >= columns && strides.first <= longest) {
      return {in_place(columns, rows, strides.first), true};
    }
  }
  const ColumnMajor<Exec, float> copy(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::score::widened"), columns, rows);
  using Policy =
      Kokkos::MDRangePolicy<Exec, Kokkos::Rank<2, Kokkos::Iterate::Right, Kokkos::Iterate::Right>,
                            Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_for(
      "kvzap::score::widen", Policy(exec, {std::int64_t{0}, std::int64_t{0}}, {rows, columns}),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t column) {
        copy(column, row) = static_cast<float>(matrix(row, column));
      });
  return {copy, true};
}

/// c (m, n) = a (m, k) · the transpose of b (n, k).
template <class Exec>
void blas_product(const Exec& exec, const BlasMatrix<Exec>& a, const BlasMatrix<Exec>& b,
                  const ColumnMajor<Exec, float>& c) {
  const char* const op_a = a.transposed ? "T" : "N";
  const char* const op_b = b.transposed ? "N" : "T";
#if KOKKOS_VERSION >= 40000
  KokkosBlas::gemm(exec, op_a, op_b, 1.0f, a.view, b.view, 0.0f, c);
#else
  // Kokkos Kernels 3.4 has no overload that takes an instance.
  exec.fence();
  KokkosBlas::gemm(op_a, op_b, 1.0f, a.view, b.view, 0.0f, c);
  Exec().fence();
#endif
}

template <class Exec>
ColumnMajor<Exec, float> column_major_scratch(const char* label, std::int64_t rows,
                                              std::int64_t columns) {
  return ColumnMajor<Exec, float>(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)), rows, columns);
}

/// values (unit, token) becomes gelu(values + bias): x * Phi(x), as torch.nn.GELU computes it.
template <class Exec, class Bias>
void add_bias_and_gelu(const Exec& exec, const ColumnMajor<Exec, float>& values, const Bias& bias) {
  const auto units = static_cast<std::int64_t>(values.extent(0));
  const auto tokens = static_cast<std::int64_t>(values.extent(1));
  Kokkos::parallel_for(
      "kvzap::score::gelu",
      Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, units * tokens),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t unit = i % units;
        const float x = values(unit, i / units) + static_cast<float>(bias(unit));
        values(unit, i / units) = 0.5f * x * (1.0f + base::math::erf(x * 0.70710678f));
      });
}

/// scores (head, first + token) = product (head, token) + the head's bias.
template <class Exec, class Bias, class Scores>
void write_scores(const Exec& exec, const ColumnMajor<Exec, float>& product, const Bias& bias,
                  const Scores& scores, std::int64_t first) {
  using Score = typename Scores::value_type;
  const auto heads = static_cast<std::int64_t>(product.extent(0));
  const auto tokens = static_cast<std::int64_t>(product.extent(1));
  Kokkos::parallel_for(
      "kvzap::score::write",
      Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, heads * tokens),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i % heads;
        scores(head, first + i / heads) =
            static_cast<Score>(product(head, i / heads) + static_cast<float>(bias(head)));
      });
}

/// The last layer of a surrogate, for the tokens from `first` on: b is (token, input).
template <class Exec, class Bias, class Scores>
void score_tokens(const Exec& exec, const BlasMatrix<Exec>& weight, const Bias& bias,
                  const BlasMatrix<Exec>& b, const Scores& scores, std::int64_t first,
                  std::int64_t tokens) {
  const auto product = column_major_scratch<Exec>(
      "kvzap::score::product", static_cast<std::int64_t>(bias.extent(0)), tokens);
  blas_product(exec, weight, b, product);
  write_scores(exec, product, bias, scores, first);
  exec.fence();  // the scratch memory goes
}

/// Calls work(hidden states of a block, its first token, number of tokens) for blocks of tokens
/// whose scratch, `floats` for each token, stays below 64 MB.
template <class Exec, class Hidden, class Work>
void for_blocks_of_tokens(const Exec& exec, const Hidden& hidden, std::int64_t floats,
                          const Work& work) {
  constexpr std::int64_t most_floats = std::int64_t{1} << 24;
  const auto tokens = static_cast<std::int64_t>(hidden.extent(0));
  const std::int64_t block = std::max<std::int64_t>(
      1, most_floats / (floats + static_cast<std::int64_t>(hidden.extent(1))));
  for (std::int64_t first = 0; first < tokens; first += block) {
    const std::int64_t count = std::min(block, tokens - first);
    const auto part = Kokkos::subview(
        hidden, std::pair<std::int64_t, std::int64_t>(first, first + count), Kokkos::ALL);
    work(blas_matrix(exec, part), first, count);
  }
}

}  // namespace linalg

/// Predicts the log KVzip+ scores of T tokens of a layer: scores (KV head, token), which `select`
/// reads.
///
/// hidden: (token, hidden_size), the output of the layer's input norm, which enters attention.
/// Views have any layout, any memory space that `exec` can access, and values that convert to float
/// (float, half, bfloat16). Products and sums are in float, by KokkosBlas::gemm on `exec`: by a
/// BLAS or cuBLAS if Kokkos Kernels was built with it.
///
/// BLAS reads matrices of float in place if one of the two strides is 1. Other matrices are copied
/// to float, the surrogate's at every call: store it as float if you score single tokens. Allocates
/// scratch memory (at most 64 MB for tokens, and copies of weights) and waits for `exec`.
///
/// Throws Error if extents do not fit each other.
template <class Exec, class Hidden, class Weight, class Bias, class Scores>
void score(const Exec& exec, const Hidden& hidden, const LinearSurrogate<Weight, Bias>& surrogate,
           const Scores& scores) {
  static_assert(Hidden::rank == 2, "kvzap::score: hidden is (token, hidden_size)");
  static_assert(Scores::rank == 2, "kvzap::score: scores are (KV head, token)");
  static_assert(Weight::rank == 2 && Bias::rank == 1,
                "kvzap::score: weight is (KV head, hidden_size), bias is (KV head)");
  static_assert(base::reads_floats<Hidden, Weight, Bias>,
                "kvzap::score: values of hidden, weight and bias convert to float");
  static_assert(base::writes_floats<Scores>,
                "kvzap::score: scores are not const and convert from float");
  static_assert(base::reaches<Exec, Hidden, Weight, Bias, Scores>,
                "kvzap::score: the execution space cannot access all views");
  const auto tokens = static_cast<std::int64_t>(hidden.extent(0));
  const auto inputs = static_cast<std::int64_t>(hidden.extent(1));
  const auto heads = static_cast<std::int64_t>(surrogate.bias.extent(0));
  base::expect(inputs > 0, "score", "hidden has hidden_size 0; expected 1 or more");
  base::expect_extents("score", "weight", "(KV head, hidden_size)", surrogate.weight,
                       {heads, inputs});
  base::expect_extents("score", "scores", "(KV head, token)", scores, {heads, tokens});
  if (heads == 0 || tokens == 0) return;
  const auto weight = linalg::blas_matrix(exec, surrogate.weight);
  linalg::for_blocks_of_tokens(
      exec, hidden, heads,
      [&](const linalg::BlasMatrix<Exec>& block, std::int64_t first, std::int64_t count) {
        linalg::score_tokens(exec, weight, surrogate.bias, block, scores, first, count);
      });
}

/// The same with an MLP.
template <class Exec, class Hidden, class HiddenWeight, class HiddenBias, class Weight, class Bias,
          class Scores>
void score(const Exec& exec, const Hidden& hidden,
           const MlpSurrogate<HiddenWeight, HiddenBias, Weight, Bias>& surrogate,
           const Scores& scores) {
  static_assert(Hidden::rank == 2, "kvzap::score: hidden is (token, hidden_size)");
  static_assert(Scores::rank == 2, "kvzap::score: scores are (KV head, token)");
  static_assert(HiddenWeight::rank == 2 && HiddenBias::rank == 1,
                "kvzap::score: hidden_weight is (unit, hidden_size), hidden_bias is (unit)");
  static_assert(Weight::rank == 2 && Bias::rank == 1,
                "kvzap::score: weight is (KV head, unit), bias is (KV head)");
  static_assert(base::reads_floats<Hidden, HiddenWeight, HiddenBias, Weight, Bias>,
                "kvzap::score: values of hidden, weights and biases convert to float");
  static_assert(base::writes_floats<Scores>,
                "kvzap::score: scores are not const and convert from float");
  static_assert(base::reaches<Exec, Hidden, HiddenWeight, HiddenBias, Weight, Bias, Scores>,
                "kvzap::score: the execution space cannot access all views");
  const auto tokens = static_cast<std::int64_t>(hidden.extent(0));
  const auto inputs = static_cast<std::int64_t>(hidden.extent(1));
  const auto units = static_cast<std::int64_t>(surrogate.hidden_bias.extent(0));
  const auto heads = static_cast<std::int64_t>(surrogate.bias.extent(0));
  base::expect(inputs > 0, "score", "hidden has hidden_size 0; expected 1 or more");
  base::expect(units > 0, "score", "hidden_bias has 0 units; expected 1 or more");
  base::expect_extents("score", "hidden_weight", "(unit, hidden_size)", surrogate.hidden_weight,
                       {units, inputs});
  base::expect_extents("score", "weight", "(KV head, unit)", surrogate.weight, {heads, units});
  base::expect_extents("score", "scores", "(KV head, token)", scores, {heads, tokens});
  if (heads == 0 || tokens == 0) return;
  const auto hidden_weight = linalg::blas_matrix(exec, surrogate.hidden_weight);
  const auto weight = linalg::blas_matrix(exec, surrogate.weight);
  linalg::for_blocks_of_tokens(
      exec, hidden, units + heads,
      [&](const linalg::BlasMatrix<Exec>& block, std::int64_t first, std::int64_t count) {
        const auto activation =
            linalg::column_major_scratch<Exec>("kvzap::score::activation", units, count);
        linalg::blas_product(exec, hidden_weight, block, activation);
        linalg::add_bias_and_gelu(exec, activation, surrogate.hidden_bias);
        linalg::score_tokens(exec, weight, surrogate.bias, {activation, true}, scores, first,
                             count);
      });
}

}  // namespace kvzap
