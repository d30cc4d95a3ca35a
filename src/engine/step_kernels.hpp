// Kernels of a decoder's step between products and attention. Each has a form for hosts, row by
// row, and a form for devices.
#pragma once

#include <kvzap/core/attention.hpp>
#include <kvzap/core/types.hpp>
#include <kvzap/model/model_config.hpp>

#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"
#include "model/model_weights.hpp"

namespace kvzap::engine {

using Angles = Kokkos::View<const float***, Kokkos::LayoutRight, MemorySpace>;

/// Sets h (token, hidden) to rows of this rank's part of the embedding, which begins at
/// `first_token`, or to zeros for tokens of other ranks.
void embed(const ExecutionSpace& exec, const Kokkos::View<const TokenId*, MemorySpace>& ids,
           const linalg::LinearWeights& embedding, std::int64_t first_token,
           const linalg::Matrix& h);

/// target (i, column) = source (rows(i), column), for each row of target.
void gather_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& source,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& rows,
                 const linalg::Matrix& target);

/// angles (token, dim / 2, 2) = cosine and sine of position times frequency, both times `scale`. A
/// frequency of 0 gives 1 and 0, which leaves a dimension as it is. Token t uses row tables(t) of
/// frequencies (table, dim / 2). Without tables (an empty view) all tokens use the first row.
void fill_angles(const ExecutionSpace& exec, std::int64_t tokens,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& positions,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& tables,
                 const linalg::ConstMatrix& frequencies, float scale,
                 const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>& angles);

/// A norm of rows of the residual stream, or none if `weight` is empty.
struct RowNorm {
  linalg::ConstVector weight;  // (hidden)
  float eps = 0;
  NormType type = NormType::rms;
  linalg::ConstVector bias = {};  // (hidden), or empty
};

inline RowNorm norm_of(const ModelConfig& config, const Model::Weights::Norm& norm) {
  return {norm.weight, static_cast<float>(config.rms_norm_eps), config.norm_type, norm.bias};
}

/// h (token, hidden) += summand, unless that is empty. Then x = h / sqrt(mean(h^2) + eps) * weight,
/// row by row (Zhang and Sennrich, arXiv 1910.07467), or x = h if weight is empty, and `rounded` =
/// x if it exists. NormType::layer: the same of h less its mean, plus bias. x may be the same as
/// summand or h.
void add_and_norm(const ExecutionSpace& exec, const linalg::Matrix& h,
                  const linalg::ConstMatrix& summand, const RowNorm& norm, const linalg::Matrix& x,
                  const linalg::RoundedRows& rounded);

/// h += summand
void add(const ExecutionSpace& exec, const linalg::Matrix& h, const linalg::ConstMatrix& summand);

/// h (token, hidden) += table (positions(token), hidden)
void add_positions(const ExecutionSpace& exec, const linalg::Matrix& h,
                   const linalg::ConstMatrix& table,
                   const Kokkos::View<const std::int64_t*, MemorySpace>& positions);

/// h *= factor
void scale(const ExecutionSpace& exec, const linalg::Matrix& h, float factor);

/// columns begin … end - 1 of h *= factor
void scale_columns(const ExecutionSpace& exec, const linalg::Matrix& h, std::int64_t begin,
                   std::int64_t end, float factor);

/// y = cap * tanh(y / cap)
void soft_cap(const ExecutionSpace& exec, const linalg::Matrix& y, float cap);

/// What happens to the heads of queries and keys between projection and attention. Row i of a block
/// uses row first + i of angles and query_scales.
struct HeadTransform {
  linalg::ConstVector q_norm, k_norm;  // weights (dim) of RMS norms of each head; or empty
  bool has_layer_norms = false;        // LayerNorms instead, with weights (head * dim)
  linalg::ConstVector q_bias, k_bias;  // of LayerNorms: (head * dim), or empty
  bool has_unit_norms = false;         // such norms without weights
  bool norms_values = false;           // the same of values
  bool rotates_before_norms = false;   // ModelConfig::rotates_before_norms
  float eps = 0;
  Angles angles;                     // (token, dim / 2, 2); empty: no RoPE
  linalg::ConstVector query_scales;  // (token), or empty
  std::int64_t first = 0;
};

/// Turns the projections qkv (token, (query heads + 2 KV heads) * dim) into queries, keys and
/// values. Every head of q and k, and of v with norms_values, gets its norm. Then RoPE (Su et al.,
/// arXiv 2104.09864) rotates dimension d with d + dim / 2, as in transformers. q is changed in
/// place. keys, values: (token, KV head, dim), one after the other. Without an array for values,
/// qkv has none.
void transform_heads(const ExecutionSpace& exec, const linalg::Matrix& qkv, int dim,
                     std::int64_t kv_heads, const HeadTransform& transform, const ArrayView& keys,
                     const ArrayView& values);

/// sums (token, 2) = sums of squares of the queries, the first q_columns of qkv, and of the keys,
/// the next k_columns; 0 without keys.
void sum_squares(const ExecutionSpace& exec, const linalg::Matrix& qkv, std::int64_t q_columns,
                 std::int64_t k_columns, const linalg::Matrix& sums);

/// RMS norms of the queries and of the keys of a token as a whole.
struct TokenNorms {
  linalg::ConstVector q, k;             // this rank's part of the weights
  std::int64_t q_size = 1, k_size = 1;  // columns over all ranks
  float eps = 0;
};

/// Norms the first q and the next k columns of qkv. sums: sum_squares over all ranks.
void norm_rows(const ExecutionSpace& exec, const linalg::Matrix& qkv,
               const linalg::ConstMatrix& sums, const TokenNorms& norms);

/// x = min(max(x, -limit), limit). NaN stays.
void clamp(const ExecutionSpace& exec, const linalg::Matrix& x, float limit);

/// The same by ModelConfig::qkv_limit, if there is one.
inline void clamp_qkv(const ExecutionSpace& exec, const ModelConfig& config,
                      const linalg::Matrix& x) {
  if (config.qkv_limit > 0) clamp(exec, x, static_cast<float>(config.qkv_limit));
}

/// What a feed-forward part makes of its first product.
struct ActivationRule {
  Activation activation = Activation::silu;
  float limit = 0;  // ModelConfig::gate_limit
  bool has_gate = true;
  linalg::Xielu xielu = {};
  float output_limit = 0;  // LayerConfig::dense_limit or experts_limit; needs a gate
};

/// gated (token, width) = activation(gate) * up of gate_up (token, 2 * width), by the formulas
/// of Activation and with output_limit; without a gate activation(up) of gate_up (token, width). If
/// `rounded` exists it receives the result, and the content of `gated` is unspecified.
void activate(const ExecutionSpace& exec, const linalg::ConstMatrix& gate_up,
              const linalg::Matrix& gated, const linalg::RoundedRows& rounded,
              const ActivationRule& rule = {});

/// Adds a sink to the softmax of each query head, a score without a value: attended (token, head,
/// dim) *= exp(lse) / (exp(lse) + exp(sink)), and lse (token, head) = log(exp(lse) + exp(sink)).
void add_sinks(const ExecutionSpace& exec, const linalg::ConstVector& sinks,
               const LogSumExpView& lse,
               const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>& attended);

/// keys (row) = a number that increases with the largest logit of y (row, token) and, for equal
/// logits, decreases with the token. So the largest key over ranks identifies the token: see
/// token_of_key. The rows' first token is `first_token`.
void argmax(const ExecutionSpace& exec, const linalg::ConstMatrix& y, std::int64_t first_token,
            const Kokkos::View<std::int64_t*, MemorySpace>& keys);

/// Returns the token of a key, or -1 if a logit was NaN or the largest is not finite.
TokenId token_of_key(std::int64_t key);

}  // namespace kvzap::engine
