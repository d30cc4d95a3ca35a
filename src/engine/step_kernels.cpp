#include "engine/step_kernels.hpp"

#include <algorithm>
#include <kvzap/core/array_view.hpp>
#include <limits>

#include "attention/host/finite.hpp"
#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/soft_cap.hpp"
#include "base/team.hpp"
#include "linalg/host/row_kernels.hpp"
#include "linalg/quantised/products.hpp"

namespace kvzap::engine {
namespace {

using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using Team = Kokkos::TeamPolicy<ExecutionSpace>;
using Member = typename Team::member_type;

// Threads of a team that processes one row, or one head of a token.
constexpr int row_threads = 256;
constexpr int head_threads = 64;

Team teams_of(const ExecutionSpace& exec, std::int64_t count, int threads) {
  const base::TeamShape shape = base::team_shape({threads, 1});
  return Team(exec, static_cast<int>(count), shape.threads, shape.lanes);
}

// Keys of logits. The upper bits order as the floats do; the lower bits decrease with the token.
constexpr int token_bits = 31;
constexpr std::int64_t largest_token = (std::int64_t{1} << token_bits) - 1;
constexpr std::int64_t nan_key = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t no_key = std::numeric_limits<std::int64_t>::min();

KOKKOS_INLINE_FUNCTION std::int64_t key_of(float logit, std::int64_t token) {
  if (logit != logit) return nan_key;
  const std::uint32_t bits = base::float_bits(logit + 0.0f);  // -0 becomes 0
  const std::uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return (std::int64_t{ordered} << token_bits) | (largest_token - token);
}

}  // namespace

namespace {

// widen(row, target): a row of the table.
template <class Widen>
void embed_on_host(const Kokkos::View<const TokenId*, MemorySpace>& ids, std::int64_t first_token,
                   std::int64_t rows, const linalg::Matrix& h, const Widen& widen) {
  const std::int64_t hidden = h.extent(1);
  base::host_for("kvzap::step::embed", h.extent(0), hidden, [=](std::int64_t i) {
    const std::int64_t row = ids(i) - first_token;
    if (row >= 0 && row < rows) {
      widen(row, &h(i, 0));
    } else {
      std::fill_n(&h(i, 0), hidden, 0.0f);
    }
  });
}

template <class Value>
void embed_rows(const ExecutionSpace& exec, const Kokkos::View<const TokenId*, MemorySpace>& ids,
                const linalg::WeightRows<Value>& embedding, std::int64_t first_token,
                const linalg::Matrix& h) {
  const std::int64_t rows = embedding.extent(0);
  const std::int64_t hidden = h.extent(1);
  if (base::machine().on_host()) {
    return embed_on_host(ids, first_token, rows, h, [=](std::int64_t row, float* target) {
      linalg::widen(&embedding(row, 0), target, hidden);
    });
  }
  base::parallel_for(
      "kvzap::step::embed", Range(exec, 0, h.extent(0) * hidden), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = ids(i / hidden) - first_token;
        const bool mine = row >= 0 && row < rows;
        h(i / hidden, i % hidden) = mine ? static_cast<float>(embedding(row, i % hidden)) : 0.0f;
      });
}

}  // namespace

void embed(const ExecutionSpace& exec, const Kokkos::View<const TokenId*, MemorySpace>& ids,
           const linalg::LinearWeights& embedding, std::int64_t first_token,
           const linalg::Matrix& h) {
  if (embedding.quantised() != nullptr) {
    return linalg::quantised::look_up(exec, *embedding.quantised(), ids, first_token, h);
  }
  if (embedding.is_packed()) {
    return embed_on_host(
        ids, first_token, embedding.outputs(), h,
        [=](std::int64_t row, float* target) { linalg::unpack_row(embedding, row, target); });
  }
  with_value_type(embedding.dtype(), [&](auto zero) {
    embed_rows(exec, ids, embedding.rows<decltype(zero)>(), first_token, h);
  });
}

void gather_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& source,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& rows,
                 const linalg::Matrix& target) {
  const std::int64_t columns = target.extent(1);
  if (base::machine().on_host()) {
    return base::host_for(
        "kvzap::step::gather_rows", target.extent(0), columns,
        [=](std::int64_t i) { std::copy_n(&source(rows(i), 0), columns, &target(i, 0)); });
  }
  base::parallel_for(
      "kvzap::step::gather_rows", Range(exec, 0, target.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        target(i / columns, i % columns) = source(rows(i / columns), i % columns);
      });
}

void fill_angles(const ExecutionSpace& exec, std::int64_t tokens,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& positions,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& tables,
                 const linalg::ConstMatrix& frequencies, float scale,
                 const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>& angles) {
  const std::int64_t pairs = frequencies.extent(1);
  const bool has_tables = tables.extent(0) > 0;
  const auto fill = KOKKOS_LAMBDA(std::int64_t i) {
    const std::int64_t token = i / pairs;
    const std::int64_t d = i % pairs;
    const std::int64_t table = has_tables ? tables(token) : 0;
    const float angle = static_cast<float>(positions(token)) * frequencies(table, d);
    if (frequencies(table, d) == 0) {
      angles(token, d, 0) = 1;
      angles(token, d, 1) = 0;
      return;
    }
    angles(token, d, 0) = base::math::cos(angle) * scale;
    angles(token, d, 1) = base::math::sin(angle) * scale;
  };
  if (base::machine().on_host()) {
    constexpr std::int64_t weight = 16;  // a sine and a cosine
    return base::host_for("kvzap::step::angles", tokens * pairs, weight, fill);
  }
  base::parallel_for("kvzap::step::angles", Range(exec, 0, tokens * pairs), fill);
}

namespace {

template <class Value>
void add_and_norm_by_teams(const ExecutionSpace& exec, const linalg::Matrix& h,
                           const linalg::ConstMatrix& summand, const RowNorm& norm,
                           const linalg::Matrix& x, const linalg::RowRounder<Value>& rounded) {
  const linalg::ConstVector weight = norm.weight, bias = norm.bias;
  const float eps = norm.eps;
  const bool centres = norm.type == NormType::layer;
  const bool has_bias = bias.extent(0) > 0;
  const std::int64_t size = h.extent(1);
  const bool adds = summand.extent(0) > 0;
  const bool norms = weight.extent(0) > 0;
  base::parallel_for(
      "kvzap::step::add_and_norm", teams_of(exec, h.extent(0), row_threads),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t i = team.league_rank();
        float sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, size),
            [&](std::int64_t d, float& partial) {
              const float value = h(i, d) + (adds ? summand(i, d) : 0.0f);
              h(i, d) = value;
              partial += value * value;
            },
            sum);
        float mean = 0;
        if (centres) {
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, size),
              [&](std::int64_t d, float& partial) { partial += h(i, d); }, mean);
          mean /= static_cast<float>(size);
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, size),
              [&](std::int64_t d, float& partial) {
                partial += (h(i, d) - mean) * (h(i, d) - mean);
              },
              sum);
        }
        const float factor = 1.0f / base::math::sqrt(sum / static_cast<float>(size) + eps);
        const auto normed = [&](std::int64_t d) {
          if (!norms) return h(i, d);
          const float value = (h(i, d) - mean) * factor * weight(d);
          return has_bias ? value + bias(d) : value;
        };
        // Before x, which may be h.
        rounded.store(team, i, size, normed);
        team.team_barrier();
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, size),
                             [&](std::int64_t d) { x(i, d) = normed(d); });
      });
}

}  // namespace

void add_and_norm(const ExecutionSpace& exec, const linalg::Matrix& h,
                  const linalg::ConstMatrix& summand, const RowNorm& norm, const linalg::Matrix& x,
                  const linalg::RoundedRows& rounded) {
  if (!base::machine().on_host()) {
    return with_value_type(rounded.dtype, [&](auto zero) {
      add_and_norm_by_teams(exec, h, summand, norm, x, linalg::RowRounder<decltype(zero)>(rounded));
    });
  }
  const linalg::ConstVector weight = norm.weight, bias = norm.bias;
  const float eps = norm.eps;
  const std::int64_t size = h.extent(1);
  const bool adds = summand.extent(0) > 0;
  const bool norms = weight.extent(0) > 0;
  base::host_for("kvzap::step::add_and_norm", h.extent(0), size, [=](std::int64_t i) {
    if (adds) linalg::add(&h(i, 0), &summand(i, 0), size);
    if (norms && norm.type == NormType::layer) {
      linalg::layer_norm(&h(i, 0), weight.data(), eps, &x(i, 0), size);
      if (bias.extent(0) > 0) linalg::add(&x(i, 0), bias.data(), size);
    } else if (norms) {
      linalg::rms_norm(&h(i, 0), weight.data(), eps, &x(i, 0), size);
    } else {
      std::copy_n(&h(i, 0), size, &x(i, 0));
    }
  });
}

void add(const ExecutionSpace& exec, const linalg::Matrix& h, const linalg::ConstMatrix& summand) {
  const std::int64_t columns = h.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::step::add", h.extent(0), columns,
                   [=](std::int64_t i) { linalg::add(&h(i, 0), &summand(i, 0), columns); });
    return;
  }
  base::parallel_for(
      "kvzap::step::add", Range(exec, 0, h.size()), KOKKOS_LAMBDA(std::int64_t i) {
        h(i / columns, i % columns) += summand(i / columns, i % columns);
      });
}

void add_positions(const ExecutionSpace& exec, const linalg::Matrix& h,
                   const linalg::ConstMatrix& table,
                   const Kokkos::View<const std::int64_t*, MemorySpace>& positions) {
  const std::int64_t columns = h.extent(1);
  if (base::machine().on_host()) {
    return base::host_for("kvzap::step::add_positions", h.extent(0), columns, [=](std::int64_t i) {
      linalg::add(&h(i, 0), &table(positions(i), 0), columns);
    });
  }
  base::parallel_for(
      "kvzap::step::add_positions", Range(exec, 0, h.size()), KOKKOS_LAMBDA(std::int64_t i) {
        h(i / columns, i % columns) += table(positions(i / columns), i % columns);
      });
}

void scale(const ExecutionSpace& exec, const linalg::Matrix& h, float factor) {
  scale_columns(exec, h, 0, h.extent(1), factor);
}

void scale_columns(const ExecutionSpace& exec, const linalg::Matrix& h, std::int64_t begin,
                   std::int64_t end, float factor) {
  const std::int64_t columns = end - begin;
  if (columns == 0) return;
  if (base::machine().on_host()) {
    base::host_for("kvzap::step::scale", h.extent(0), columns,
                   [=](std::int64_t i) { linalg::scale(&h(i, begin), columns, factor); });
    return;
  }
  base::parallel_for(
      "kvzap::step::scale", Range(exec, 0, h.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) { h(i / columns, begin + i % columns) *= factor; });
}

void soft_cap(const ExecutionSpace& exec, const linalg::Matrix& y, float cap) {
  const std::int64_t columns = y.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::step::soft_cap", y.extent(0), columns,
                   [=](std::int64_t i) { linalg::soft_cap(&y(i, 0), columns, cap); });
    return;
  }
  base::parallel_for(
      "kvzap::step::soft_cap", Range(exec, 0, y.size()), KOKKOS_LAMBDA(std::int64_t i) {
        float& value = y(i / columns, i % columns);
        value = base::soft_capped(value, cap);
      });
}

namespace {

template <class Value>
void transform_heads_on_host(const linalg::Matrix& qkv, int dim, std::int64_t kv_heads,
                             const HeadTransform& t, Value* keys, Value* values) {
  const std::int64_t heads = qkv.extent(1) / dim;
  const std::int64_t q_heads = heads - (values ? 2 : 1) * kv_heads;
  const std::int64_t kv_size = kv_heads * dim;
  const bool turns = t.angles.extent(0) > 0;
  const bool scales = t.query_scales.extent(0) > 0;
  base::host_for(
      "kvzap::step::transform_heads", qkv.extent(0), heads * dim, [=](std::int64_t token) {
        float* const row = &qkv(token, 0);
        for (std::int64_t h = 0; h < q_heads + kv_heads; ++h) {
          float* const head = row + h * dim;
          const linalg::ConstVector& norm = h < q_heads ? t.q_norm : t.k_norm;
          const linalg::ConstVector& bias = h < q_heads ? t.q_bias : t.k_bias;
          const std::int64_t first = (h < q_heads ? h : h - q_heads) * dim;
          const auto rotate = [&] {
            if (turns) linalg::rotate(head, &t.angles(t.first + token, 0, 0), dim / 2);
          };
          if (t.rotates_before_norms) rotate();
          if (t.has_layer_norms) {
            linalg::layer_norm(head, norm.data() + first, t.eps, head, dim);
            if (bias.extent(0) > 0) linalg::add(head, bias.data() + first, dim);
          } else if (norm.extent(0) > 0 || t.has_unit_norms) {
            linalg::rms_norm(head, t.has_unit_norms ? nullptr : norm.data(), t.eps, head, dim);
          }
          if (!t.rotates_before_norms) rotate();
        }
        for (std::int64_t h = q_heads + kv_heads; t.norms_values && h < heads; ++h) {
          linalg::rms_norm(row + h * dim, nullptr, t.eps, row + h * dim, dim);
        }
        if (scales) linalg::scale(row, q_heads * dim, t.query_scales(t.first + token));
        linalg::narrow(row + q_heads * dim, keys + token * kv_size, kv_size);
        if (!values) return;
        linalg::narrow(row + (q_heads + kv_heads) * dim, values + token * kv_size, kv_size);
      });
}

template <class Value>
void transform_typed(const ExecutionSpace& exec, const linalg::Matrix& qkv, int dim,
                     std::int64_t kv_heads, const HeadTransform& transform, Value* keys,
                     Value* values) {
  const std::int64_t heads = qkv.extent(1) / dim;
  const std::int64_t q_heads = heads - (values ? 2 : 1) * kv_heads;
  const std::int64_t kv_size = kv_heads * dim;
  const int half_dim = dim / 2;
  if (heads == 0) return;
  if (base::machine().on_host())
    return transform_heads_on_host(qkv, dim, kv_heads, transform, keys, values);
  const HeadTransform t = transform;
  const bool turns = t.angles.extent(0) > 0;
  const bool scales = t.query_scales.extent(0) > 0;
  base::parallel_for(
      "kvzap::step::transform_heads", teams_of(exec, qkv.extent(0) * heads, head_threads),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t token = team.league_rank() / heads;
        const std::int64_t head = team.league_rank() % heads;
        float* const x = &qkv(token, head * dim);
        const std::int64_t kv_head =
            head < q_heads + kv_heads ? head - q_heads : head - q_heads - kv_heads;
        const std::int64_t target = token * kv_size + kv_head * dim;  // place in keys and values
        if (head >= q_heads + kv_heads) {
          float of_value = 1;
          if (t.norms_values) {
            float sum = 0;
            Kokkos::parallel_reduce(
                Kokkos::TeamThreadRange(team, dim),
                [&](int d, float& partial) { partial += x[d] * x[d]; }, sum);
            of_value = 1.0f / base::math::sqrt(sum / static_cast<float>(dim) + t.eps);
          }
          Kokkos::parallel_for(Kokkos::TeamThreadRange(team, dim),
                               [&](int d) { values[target + d] = Value(x[d] * of_value); });
          return;
        }
        const linalg::ConstVector& norm = head < q_heads ? t.q_norm : t.k_norm;
        const linalg::ConstVector& bias = head < q_heads ? t.q_bias : t.k_bias;
        const bool has_norm = norm.extent(0) > 0 || t.has_unit_norms;
        const bool has_bias = bias.extent(0) > 0;
        const std::int64_t first =
            t.has_layer_norms ? (head < q_heads ? head : head - q_heads) * dim : 0;
        const auto weight = [&](int d) { return t.has_unit_norms ? 1.0f : norm(first + d); };
        float mean = 0;
        if (t.has_layer_norms) {
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, dim), [&](int d, float& partial) { partial += x[d]; },
              mean);
          mean /= static_cast<float>(dim);
        }
        // The square of the factor by which RoPE stretches a dimension before the norm.
        const auto stretch = [&](int d) {
          if (!turns || !t.rotates_before_norms) return 1.0f;
          const float* const angle = &t.angles(t.first + token, d % half_dim, 0);
          return angle[0] * angle[0] + angle[1] * angle[1];
        };
        float factor = 1;
        if (has_norm) {
          float sum = 0;
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, dim),
              [&](int d, float& partial) { partial += (x[d] - mean) * (x[d] - mean) * stretch(d); },
              sum);
          factor = 1.0f / base::math::sqrt(sum / static_cast<float>(dim) + t.eps);
        }
        const float query_scale = scales ? t.query_scales(t.first + token) : 1.0f;
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, half_dim), [&](int d) {
          const int e = d + half_dim;
          const float cosine = turns ? t.angles(t.first + token, d, 0) : 1.0f;
          const float sine = turns ? t.angles(t.first + token, d, 1) : 0.0f;
          const float of_low = has_norm ? factor * weight(d) : 1.0f;
          const float of_high = has_norm ? factor * weight(e) : 1.0f;
          const bool last = t.rotates_before_norms;
          const float low_bias = has_bias ? bias(first + d) : 0.0f;
          const float high_bias = has_bias ? bias(first + e) : 0.0f;
          const float low = last ? x[d] : (x[d] - mean) * of_low + low_bias;
          const float high = last ? x[e] : (x[e] - mean) * of_high + high_bias;
          const float new_low = (low * cosine - high * sine) * (last ? of_low : 1.0f);
          const float new_high = (high * cosine + low * sine) * (last ? of_high : 1.0f);
          if (head < q_heads) {
            x[d] = new_low * query_scale;
            x[e] = new_high * query_scale;
          } else {
            keys[target + d] = Value(new_low);
            keys[target + e] = Value(new_high);
          }
        });
      });
}

}  // namespace

void transform_heads(const ExecutionSpace& exec, const linalg::Matrix& qkv, int dim,
                     std::int64_t kv_heads, const HeadTransform& transform, const ArrayView& keys,
                     const ArrayView& values) {
  with_value_type(keys.dtype, [&](auto zero) {
    using Value = decltype(zero);
    transform_typed(exec, qkv, dim, kv_heads, transform, keys.values<Value>(),
                    values.values<Value>());
  });
}

void sum_squares(const ExecutionSpace& exec, const linalg::Matrix& qkv, std::int64_t q_columns,
                 std::int64_t k_columns, const linalg::Matrix& sums) {
  base::parallel_for(
      "kvzap::step::sum_squares", teams_of(exec, 2 * qkv.extent(0), row_threads),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t token = team.league_rank() / 2;
        const bool of_keys = team.league_rank() % 2 == 1;
        const std::int64_t begin = of_keys ? q_columns : 0;
        float sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, begin, of_keys ? q_columns + k_columns : q_columns),
            [&](std::int64_t d, float& partial) { partial += qkv(token, d) * qkv(token, d); }, sum);
        Kokkos::single(Kokkos::PerTeam(team), [&] { sums(token, of_keys ? 1 : 0) = sum; });
      });
}

void norm_rows(const ExecutionSpace& exec, const linalg::Matrix& qkv,
               const linalg::ConstMatrix& sums, const TokenNorms& norms) {
  const linalg::ConstVector q_norm = norms.q, k_norm = norms.k;
  const std::int64_t q_size = norms.q_size, k_size = norms.k_size;
  const float eps = norms.eps;
  const std::int64_t q_columns = q_norm.extent(0);
  const std::int64_t columns = q_columns + static_cast<std::int64_t>(k_norm.extent(0));
  base::parallel_for(
      "kvzap::step::norm_rows", Range(exec, 0, qkv.extent(0) * columns),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / columns;
        const std::int64_t d = i % columns;
        const bool of_keys = d >= q_columns;
        const float mean =
            sums(token, of_keys ? 1 : 0) / static_cast<float>(of_keys ? k_size : q_size);
        const float weight = of_keys ? k_norm(d - q_columns) : q_norm(d);
        qkv(token, d) *= weight / base::math::sqrt(mean + eps);
      });
}

void clamp(const ExecutionSpace& exec, const linalg::Matrix& x, float limit) {
  const std::int64_t columns = x.extent(1);
  const auto clamp_one = KOKKOS_LAMBDA(std::int64_t i) {
    float& value = x(i / columns, i % columns);
    value = value > limit ? limit : (value < -limit ? -limit : value);
  };
  const auto count = static_cast<std::int64_t>(x.size());
  if (base::machine().on_host()) return base::host_for("kvzap::step::clamp", count, 1, clamp_one);
  base::parallel_for("kvzap::step::clamp", Range(exec, 0, count), clamp_one);
}

namespace {

void activate_row(const ActivationRule& rule, float* values, std::int64_t count) {
  switch (rule.activation) {
    case Activation::silu:
      return linalg::silu(values, count);
    case Activation::gelu_tanh:
      return linalg::gelu_tanh(values, count);
    case Activation::clamped_silu:
      return;  // always has a gate
    case Activation::gelu:
      return linalg::gelu(values, count);
    case Activation::relu2:
      return linalg::relu_squared(values, count);
    case Activation::xielu:
      return linalg::xielu(values, count, rule.xielu);
    case Activation::relu:
      return std::replace_if(
          values, values + count, [](float value) { return value < 0; }, 0.0f);
  }
}

void activate_on_host(const linalg::ConstMatrix& gate_up, const linalg::Matrix& gated,
                      const ActivationRule& rule) {
  const std::int64_t width = gated.extent(1);
  base::host_for("kvzap::step::activate", gated.extent(0), width, [=](std::int64_t i) {
    const float* const gate = &gate_up(i, 0);
    float* const target = &gated(i, 0);
    if (rule.has_gate && rule.output_limit == 0) {
      const float* const up = gate + width;
      if (rule.activation == Activation::silu) return linalg::silu_times(gate, up, target, width);
      if (rule.activation == Activation::gelu_tanh) {
        return linalg::gelu_tanh_times(gate, up, target, width);
      }
      if (rule.activation == Activation::clamped_silu) {
        return linalg::clamped_silu_times(gate, up, rule.limit, target, width);
      }
    }
    std::copy_n(gate, width, target);
    activate_row(rule, target, width);
    if (rule.output_limit > 0) {
      return linalg::multiply_limited(target, gate + width, rule.output_limit, width);
    }
    if (rule.has_gate) linalg::multiply(target, gate + width, width);
  });
}

KOKKOS_INLINE_FUNCTION float xielu_of(const linalg::Xielu& p, float x) {
  if (x > 0) return p.positive * x * x + p.slope * x;
  const float y = x > p.limit ? p.limit : x;
  return p.negative * (base::math::expm1(y) - x) + p.slope * x;
}

KOKKOS_INLINE_FUNCTION float activated(const ActivationRule& rule, float gate, float up) {
  const float limit = rule.limit;
  if (rule.activation == Activation::relu) return (gate < 0 ? 0.0f : gate) * up;
  if (rule.activation == Activation::relu2) return gate < 0 ? 0.0f : gate * gate * up;
  if (rule.activation == Activation::gelu) {
    return 0.5f * gate * (1.0f + base::math::erf(gate * 0.70710678f)) * up;
  }
  if (rule.activation == Activation::xielu) return xielu_of(rule.xielu, gate) * up;
  // GELU by tanh is a sigmoid: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
  float y = gate;
  if (rule.activation == Activation::gelu_tanh) {
    y = linalg::gelu_scale * (gate + linalg::gelu_cubic * gate * gate * gate);
  }
  if (rule.activation == Activation::clamped_silu) {
    gate = gate > limit ? limit : gate;
    up = (up > limit ? limit : (up < -limit ? -limit : up)) + 1.0f;
    y = linalg::clamped_silu_slope * gate;
  }
  return gate / (1.0f + base::math::exp(-y)) * up;
}

KOKKOS_INLINE_FUNCTION float limited(const ActivationRule& rule, float gate, float up) {
  const float limit = rule.output_limit;
  if (limit == 0) return activated(rule, gate, up);
  const float active = activated(rule, gate, 1.0f);
  return (active > limit ? limit : active) * (up > limit ? limit : (up < -limit ? -limit : up));
}

template <class Value>
void activate_on_device(const ExecutionSpace& exec, const linalg::ConstMatrix& gate_up,
                        const linalg::Matrix& gated, const linalg::RowRounder<Value>& rounded,
                        const ActivationRule& of_part) {
  const std::int64_t rows = gated.extent(0);
  const std::int64_t width = gated.extent(1);
  const ActivationRule rule = of_part;
  const auto value_at = KOKKOS_LAMBDA(std::int64_t i, std::int64_t d) {
    return limited(rule, gate_up(i, d), rule.has_gate ? gate_up(i, width + d) : 1.0f);
  };
  if (linalg::RowRounder<Value>::is_scaled && rounded.has_room()) {
    base::parallel_for(
        "kvzap::step::activate", teams_of(exec, rows, row_threads),
        KOKKOS_LAMBDA(const Member& team) {
          const std::int64_t i = team.league_rank();
          Kokkos::parallel_for(Kokkos::TeamThreadRange(team, width),
                               [&](std::int64_t d) { gated(i, d) = value_at(i, d); });
          team.team_barrier();
          rounded.store(team, i, width, [&](std::int64_t d) { return gated(i, d); });
        });
    return;
  }
  base::parallel_for(
      "kvzap::step::activate", Range(exec, 0, rows * width), KOKKOS_LAMBDA(std::int64_t i) {
        const float value = value_at(i / width, i % width);
        if (rounded.has_room()) {
          rounded.values[i] = Value(value);
        } else {
          gated(i / width, i % width) = value;
        }
      });
}

}  // namespace

void activate(const ExecutionSpace& exec, const linalg::ConstMatrix& gate_up,
              const linalg::Matrix& gated, const linalg::RoundedRows& rounded,
              const ActivationRule& rule) {
  if (base::machine().on_host()) return activate_on_host(gate_up, gated, rule);
  with_value_type(rounded.dtype, [&](auto zero) {
    activate_on_device(exec, gate_up, gated, linalg::RowRounder<decltype(zero)>(rounded), rule);
  });
}

void add_sinks(const ExecutionSpace& exec, const linalg::ConstVector& sinks,
               const LogSumExpView& lse,
               const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>& attended) {
  const auto heads = static_cast<std::int64_t>(attended.extent(1));
  const auto dim = static_cast<std::int64_t>(attended.extent(2));
  const auto add_one = KOKKOS_LAMBDA(std::int64_t i) {
    const std::int64_t token = i / heads, head = i % heads;
    const float own = lse(token, head), sink = sinks(head);
    // A NaN stays; no row has any weight if lse is -infinity.
    const float largest = own > sink || own != own ? own : sink;
    const float total =
        largest + base::math::log(base::math::exp(own - largest) + base::math::exp(sink - largest));
    const float factor = base::math::exp(own - total);
    for (std::int64_t d = 0; d < dim; ++d) attended(token, head, d) *= factor;
    lse(token, head) = total;
  };
  const auto count = static_cast<std::int64_t>(attended.extent(0)) * heads;
  if (base::machine().on_host())
    return base::host_for("kvzap::step::add_sinks", count, dim, add_one);
  base::parallel_for("kvzap::step::add_sinks", Range(exec, 0, count), add_one);
}

namespace {

void argmax_on_host(const linalg::ConstMatrix& y, std::int64_t first_token,
                    const Kokkos::View<std::int64_t*, MemorySpace>& keys) {
  // Parts of a row stay in the first-level cache for all that is asked of them.
  constexpr std::int64_t part = 4096;
  const std::int64_t count = y.extent(1);
  base::host_for("kvzap::step::argmax", y.extent(0), count, [=](std::int64_t row) {
    const float* const logits = &y(row, 0);
    float most = -std::numeric_limits<float>::infinity();
    std::int64_t in = 0;  // the part of the first logit of that size
    bool finite = true;
    for (std::int64_t i = 0; i < count && finite; i += part) {
      const std::int64_t n = std::min(part, count - i);
      finite = attention::all_finite(logits + i, n);
      const float largest = linalg::max_of(logits + i, n);
      if (largest > most) {
        most = largest;
        in = i;
      }
    }
    if (finite) {
      const float* const largest =
          std::find(logits + in, logits + std::min(count, in + part), most);
      keys(row) = key_of(*largest, first_token + (largest - logits));
      return;
    }
    keys(row) = no_key;
    for (std::int64_t i = 0; i < count; ++i) {
      keys(row) = std::max(keys(row), key_of(logits[i], first_token + i));
    }
  });
}

}  // namespace

void argmax(const ExecutionSpace& exec, const linalg::ConstMatrix& y, std::int64_t first_token,
            const Kokkos::View<std::int64_t*, MemorySpace>& keys) {
  const std::int64_t rows = y.extent(0);
  const std::int64_t count = y.extent(1);
  if (base::machine().on_host() && count > 0) return argmax_on_host(y, first_token, keys);
  // Splits a row into parts, so that one row also fills a device.
  constexpr std::int64_t part = 4096;
  const std::int64_t parts = (count + part - 1) / part;
  base::launch([=] { Kokkos::deep_copy(exec, keys, no_key); });
  if (rows * parts == 0) return;
  base::parallel_for(
      "kvzap::step::argmax", teams_of(exec, rows * parts, row_threads),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t row = team.league_rank() / parts;
        const std::int64_t begin = team.league_rank() % parts * part;
        const std::int64_t end = begin + part < count ? begin + part : count;
        std::int64_t most = no_key;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, begin, end),
            [&](std::int64_t i, std::int64_t& largest) {
              const std::int64_t own = key_of(y(row, i), first_token + i);
              if (own > largest) largest = own;
            },
            Kokkos::Max<std::int64_t>(most));
        Kokkos::single(Kokkos::PerTeam(team), [&] { Kokkos::atomic_fetch_max(&keys(row), most); });
      });
}

TokenId token_of_key(std::int64_t key) {
  if (key < 0 || key == nan_key) return -1;
  const auto ordered = static_cast<std::uint32_t>(key >> token_bits);
  const std::uint32_t bits = (ordered >> 31) != 0 ? ordered & 0x7fffffffu : ~ordered;
  const bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  return is_finite ? static_cast<TokenId>(largest_token - (key & largest_token)) : -1;
}

}  // namespace kvzap::engine
