// A decoder's kernels beside products and attention, in both forms, against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/sampler.hpp>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/machine.hpp"
#include "engine/step_kernels.hpp"

namespace {

using kvzap::bfloat16;
using kvzap::ExecutionSpace;
using kvzap::half;
using kvzap::MemorySpace;
using kvzap::TokenId;
namespace base = kvzap::base;
namespace engine = kvzap::engine;
namespace linalg = kvzap::linalg;
using linalg::Matrix;
using linalg::Vector;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

class Numbers {
 public:
  explicit Numbers(unsigned seed) : m_random(seed) {}
  float operator()() { return static_cast<float>(m_random() >> 8) * 0x1p-23f - 1.0f; }
  std::vector<float> operator()(std::int64_t count) {
    std::vector<float> numbers(count);
    for (float& number : numbers) number = (*this)();
    return numbers;
  }

 private:
  std::mt19937 m_random;
};

template <class View>
View on_device(const std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
  View view("view", rows, columns);
  const auto host = Kokkos::create_mirror_view(view);
  std::copy(values.begin(), values.end(), host.data());
  Kokkos::deep_copy(view, host);
  return view;
}

Vector on_device(const std::vector<float>& values) {
  Vector view("view", values.size());
  const auto host = Kokkos::create_mirror_view(view);
  std::copy(values.begin(), values.end(), host.data());
  Kokkos::deep_copy(view, host);
  return view;
}

template <class View>
auto on_host(const View& view) {
  Kokkos::fence();
  return Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, view);
}

/// Both forms where there are two, each with the state before it put back.
template <class Work>
void in_each_form(const Work& work) {
  const bool before = base::machine().on_device();
  for (const bool device : {false, true}) {
    base::machine().set_device(device);
    SCOPED_TRACE(base::machine().on_device() ? "device" : "host");
    work(base::machine().on_device());
  }
  base::machine().set_device(before);
}

/// Room for rounded rows where kernels of devices make them.
template <class Value>
struct Rounded {
  Kokkos::View<Value*, MemorySpace> values;
  Vector unscale;
  linalg::RoundedRows rows;

  Rounded(bool device, std::int64_t m, std::int64_t k) : values("values", m * k), unscale("u", m) {
    if (!device || std::is_same_v<Value, float>) return;
    rows = {kvzap::DTypeOf<Value>::value, values.data(), unscale.data()};
  }

  /// Each row must be what rounding `x` gives, up to half a unit of its last place.
  void expect(const std::vector<float>& x, std::int64_t k) const {
    if (!rows.exist()) return;
    const auto found = on_host(values);
    const auto factors = on_host(unscale);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float factor = linalg::RowRounder<Value>::is_scaled ? factors(i / k) : 1.0f;
      const float unit = std::is_same_v<Value, half> ? 0x1p-11f : 0x1p-8f;
      EXPECT_NEAR(static_cast<float>(found(i)) * factor, x[i], unit * std::fabs(x[i]) + 1e-7f);
    }
  }
};

template <class Value>
class StepKernels : public ::testing::Test {};
using ValueTypes = ::testing::Types<float, half, bfloat16>;
TYPED_TEST_SUITE(StepKernels, ValueTypes);

TYPED_TEST(StepKernels, AddAndNorm) {
  for (const std::int64_t size : {3, 48, 129}) {
    for (const int kind : {0, 1, 2, 3, 5}) {
      const bool adds = kind % 2 == 1, has_bias = kind == 5;
      const auto type = kind < 2 ? kvzap::NormType::rms : kvzap::NormType::layer;
      in_each_form([&](bool device) {
        constexpr std::int64_t tokens = 5;
        constexpr float eps = 1e-5f;
        Numbers numbers(7);
        const auto before = numbers(tokens * size), summand = numbers(tokens * size),
                   weight = numbers(size), bias = numbers(has_bias ? size : 0);
        const auto h = on_device<Matrix>(before, tokens, size);
        // The result takes the place of the summand, as in the decoder.
        const auto x = on_device<Matrix>(summand, tokens, size);
        const Rounded<TypeParam> rounded(device, tokens, size);
        engine::add_and_norm(ExecutionSpace{}, h, adds ? x : Matrix(),
                             {on_device(weight), eps, type, on_device(bias)}, x, rounded.rows);
        const auto new_h = on_host(h), new_x = on_host(x);
        std::vector<float> normed(tokens * size);
        for (std::int64_t t = 0; t < tokens; ++t) {
          double squares = 0, mean = 0;
          for (std::int64_t d = 0; d < size; ++d) {
            const std::int64_t i = t * size + d;
            const float sum = before[i] + (adds ? summand[i] : 0.0f);
            EXPECT_EQ(new_h(t, d), sum);
            mean += type == kvzap::NormType::layer ? sum / static_cast<double>(size) : 0;
          }
          for (std::int64_t d = 0; d < size; ++d) {
            squares += (new_h(t, d) - mean) * (new_h(t, d) - mean);
          }
          const double factor = 1 / std::sqrt(squares / static_cast<double>(size) + eps);
          for (std::int64_t d = 0; d < size; ++d) {
            const double expected =
                (new_h(t, d) - mean) * factor * weight[d] + (has_bias ? bias[d] : 0.0f);
            EXPECT_NEAR(new_x(t, d), expected, 2e-6);
            normed[t * size + d] = new_x(t, d);
          }
        }
        rounded.expect(normed, size);
      });
    }
  }
}

TYPED_TEST(StepKernels, TransformHeads) {
  struct Case {
    int dim;
    std::int64_t q_heads, kv_heads;
    bool q_norm, k_norm, turns, scales, has_unit_norms = false, rotates_before_norms = false;
    bool has_layer_norms = false, has_biases = false;
  };
  for (const Case& c :
       {Case{64, 4, 2, true, true, true, false}, Case{80, 5, 5, false, false, true, true},
        Case{6, 3, 1, false, true, false, true}, Case{128, 0, 0, false, false, true, false},
        Case{64, 2, 1, false, false, true, true, true},
        Case{48, 4, 2, true, true, true, false, false, true},
        Case{48, 4, 2, false, false, true, false, true, true},
        Case{64, 3, 2, true, true, true, true, false, false, true},
        Case{20, 4, 2, true, true, false, false, false, false, true, true}}) {
    in_each_form([&](bool) {
      constexpr std::int64_t tokens = 3, first = 2;
      constexpr float eps = 1e-6f;
      const std::int64_t heads = c.q_heads + 2 * c.kv_heads;
      const int half_dim = c.dim / 2;
      Numbers numbers(9);
      const auto before = numbers(tokens * heads * c.dim);
      const std::int64_t q_norms = c.has_layer_norms ? c.q_heads : 1;
      const std::int64_t k_norms = c.has_layer_norms ? c.kv_heads : 1;
      const auto q_norm = numbers(c.q_norm ? q_norms * c.dim : 0);
      const auto k_norm = numbers(c.k_norm ? k_norms * c.dim : 0);
      const auto q_bias = numbers(c.has_biases ? q_norms * c.dim : 0);
      const auto k_bias = numbers(c.has_biases ? k_norms * c.dim : 0);
      const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> angles(
          "angles", first + tokens, half_dim, 2);
      const auto host_angles = Kokkos::create_mirror_view(angles);
      for (std::int64_t t = 0; t < first + tokens; ++t) {
        for (int d = 0; d < half_dim; ++d) {
          const float angle = 3 * numbers();
          const float stretch = c.rotates_before_norms ? 1.5f : 1.0f;
          host_angles(t, d, 0) = stretch * std::cos(angle);
          host_angles(t, d, 1) = stretch * std::sin(angle);
        }
      }
      Kokkos::deep_copy(angles, host_angles);
      const auto qkv = on_device<Matrix>(before, tokens, heads * c.dim);
      const std::int64_t kv_size = c.kv_heads * c.dim;
      const Kokkos::View<TypeParam*, MemorySpace> keys("keys", tokens * kv_size),
          values("values", tokens * kv_size);
      engine::HeadTransform transform;
      transform.q_norm = on_device(q_norm);
      transform.k_norm = on_device(k_norm);
      transform.has_layer_norms = c.has_layer_norms;
      transform.q_bias = on_device(q_bias);
      transform.k_bias = on_device(k_bias);
      transform.eps = eps;
      transform.has_unit_norms = c.has_unit_norms;
      transform.rotates_before_norms = c.rotates_before_norms;
      if (c.turns) transform.angles = angles;
      const auto scales = numbers(first + tokens);
      if (c.scales) transform.query_scales = on_device(scales);
      transform.first = first;
      engine::transform_heads(ExecutionSpace{}, qkv, c.dim, c.kv_heads, transform, keys, values);
      const auto new_q = on_host(qkv);
      const auto new_k = on_host(keys), new_v = on_host(values);
      const double unit = std::is_same_v<TypeParam, float>  ? 2e-6
                          : std::is_same_v<TypeParam, half> ? 0x1p-10
                                                            : 0x1p-7;
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t head = 0; head < c.q_heads + c.kv_heads; ++head) {
          const bool is_query = head < c.q_heads;
          const auto& norm = is_query ? q_norm : k_norm;
          const auto& bias = is_query ? q_bias : k_bias;
          const std::int64_t own = is_query ? head : head - c.q_heads;
          const std::int64_t place_of_norm = c.has_layer_norms ? own * c.dim : 0;
          std::vector<double> x(c.dim);
          for (int d = 0; d < c.dim; ++d) x[d] = before[(t * heads + head) * c.dim + d];
          const auto rotate = [&] {
            for (int d = 0; d < half_dim && c.turns; ++d) {
              const double cosine = host_angles(first + t, d, 0);
              const double sine = host_angles(first + t, d, 1);
              const double low = x[d], high = x[d + half_dim];
              x[d] = low * cosine - high * sine;
              x[d + half_dim] = high * cosine + low * sine;
            }
          };
          if (c.rotates_before_norms) rotate();
          if (c.has_layer_norms) {
            const double mean = std::accumulate(x.begin(), x.end(), 0.0) / c.dim;
            for (double& value : x) value -= mean;
          }
          double squares = 0;
          for (const double value : x) squares += value * value;
          for (int d = 0; d < c.dim && (!norm.empty() || c.has_unit_norms); ++d) {
            x[d] *= (norm.empty() ? 1 : norm[place_of_norm + d]) / std::sqrt(squares / c.dim + eps);
            if (c.has_biases) x[d] += bias[place_of_norm + d];
          }
          if (!c.rotates_before_norms) rotate();
          for (int d = 0; d < c.dim; ++d) {
            double expected = x[d];
            if (is_query && c.scales) expected *= scales[first + t];
            if (is_query) {
              EXPECT_NEAR(new_q(t, head * c.dim + d), expected, 2e-6);
            } else {
              const std::int64_t place = t * kv_size + (head - c.q_heads) * c.dim + d;
              EXPECT_NEAR(static_cast<float>(new_k(place)), expected,
                          unit * (1 + std::fabs(expected)));
            }
          }
        }
        for (std::int64_t i = 0; i < kv_size; ++i) {
          const std::int64_t source = (t * heads + c.q_heads + c.kv_heads) * c.dim + i;
          EXPECT_EQ(static_cast<float>(new_v(t * kv_size + i)),
                    static_cast<float>(TypeParam(before[source])));
        }
      }
    });
  }
}

// Norms of whole rows of queries and keys, of which two ranks hold a part each.
TEST(StepKernelsOfRows, NormRows) {
  in_each_form([&](bool) {
    constexpr std::int64_t tokens = 3, q_size = 12, k_size = 8, v_size = 8;
    constexpr float eps = 1e-5f;
    Numbers numbers(5);
    const auto queries = numbers(tokens * q_size), keys = numbers(tokens * k_size);
    const auto q_norm = numbers(q_size), k_norm = numbers(k_size);
    std::vector<Matrix> parts;
    Matrix sums("sums", tokens, 2);
    const auto host_sums = Kokkos::create_mirror_view(sums);
    for (const std::int64_t first : {0, 1}) {
      std::vector<float> row;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto* const q = &queries[t * q_size + first * q_size / 2];
        const auto* const k = &keys[t * k_size + first * k_size / 2];
        row.insert(row.end(), q, q + q_size / 2);
        row.insert(row.end(), k, k + k_size / 2);
        row.insert(row.end(), v_size / 2, 7.0f);
      }
      parts.push_back(on_device<Matrix>(row, tokens, (q_size + k_size + v_size) / 2));
      const Matrix own("own", tokens, 2);
      engine::sum_squares(ExecutionSpace{}, parts.back(), q_size / 2, k_size / 2, own);
      const auto host_own = on_host(own);
      for (std::int64_t i = 0; i < 2 * tokens; ++i) host_sums.data()[i] += host_own.data()[i];
    }
    Kokkos::deep_copy(sums, host_sums);
    for (const std::int64_t part : {0, 1}) {
      const auto half_of = [&](const std::vector<float>& all) {
        const auto count = static_cast<std::int64_t>(all.size()) / 2;
        return on_device({all.begin() + part * count, all.begin() + (part + 1) * count});
      };
      engine::norm_rows(ExecutionSpace{}, parts[part], sums,
                        {half_of(q_norm), half_of(k_norm), q_size, k_size, eps});
      const auto found = on_host(parts[part]);
      const auto expect = [&](const std::vector<float>& x, const std::vector<float>& norm,
                              std::int64_t t, std::int64_t column) {
        const auto size = static_cast<std::int64_t>(norm.size());
        double squares = 0;
        for (std::int64_t d = 0; d < size; ++d) squares += x[t * size + d] * x[t * size + d];
        for (std::int64_t d = 0; d < size / 2; ++d) {
          const std::int64_t whole = part * size / 2 + d;
          EXPECT_NEAR(found(t, column + d),
                      x[t * size + whole] * norm[whole] / std::sqrt(squares / size + eps), 2e-6);
        }
      };
      for (std::int64_t t = 0; t < tokens; ++t) {
        expect(queries, q_norm, t, 0);
        expect(keys, k_norm, t, q_size / 2);
        EXPECT_EQ(found(t, (q_size + k_size) / 2), 7.0f);
      }
    }
  });
}

/// What a feed-forward part makes of its gate and its up projection, as transformers computes it.
double activated(const engine::ActivationRule& rule, double gate, double up) {
  const double limit = rule.limit, output_limit = rule.output_limit;
  if (output_limit > 0) {
    engine::ActivationRule unlimited = rule;
    unlimited.output_limit = 0;
    return std::min(activated(unlimited, gate, 1), output_limit) *
           std::clamp(up, -output_limit, output_limit);
  }
  switch (rule.activation) {
    case kvzap::Activation::gelu:
      return 0.5 * gate * (1 + std::erf(gate / std::sqrt(2.0))) * up;
    case kvzap::Activation::relu:
      return gate > 0 ? gate * up : 0;
    case kvzap::Activation::relu2:
      return gate > 0 ? gate * gate * up : 0;
    case kvzap::Activation::xielu:
      return gate > 0 ? rule.xielu.positive * gate * gate + rule.xielu.slope * gate
                      : rule.xielu.negative *
                                (std::expm1(std::min<double>(gate, rule.xielu.limit)) - gate) +
                            rule.xielu.slope * gate;
    case kvzap::Activation::silu:
      return gate / (1 + std::exp(-gate)) * up;
    case kvzap::Activation::gelu_tanh:
      return 0.5 * gate *
             (1 + std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up;
    case kvzap::Activation::clamped_silu:
      gate = std::min(gate, limit);
      return (std::clamp(up, -limit, limit) + 1) * gate / (1 + std::exp(-1.702 * gate));
  }
  return 0;
}

TYPED_TEST(StepKernels, Activations) {
  using kvzap::Activation;
  constexpr float limit = 0.7f;
  std::vector<engine::ActivationRule> rules = {{Activation::clamped_silu, limit}};
  for (const auto activation : {Activation::silu, Activation::gelu_tanh, Activation::gelu,
                                Activation::relu2, Activation::relu}) {
    rules.push_back({activation});
    rules.push_back({activation, 0, false});
  }
  rules.push_back({Activation::xielu, 0, false, {0.8f, 1.3f, 0.5f, -1e-6f}});
  for (const auto activation : {Activation::silu, Activation::gelu}) {
    rules.push_back({activation, 0, true, {}, 0.3f});
  }
  for (const auto& rule : rules) {
    in_each_form([&](bool device) {
      constexpr std::int64_t tokens = 4, width = 67;
      const std::int64_t columns = rule.has_gate ? 2 * width : width;
      Numbers numbers(3);
      const auto before = numbers(tokens * columns);
      const auto gate_up = on_device<Matrix>(before, tokens, columns);
      const Rounded<TypeParam> rounded(device, tokens, width);
      const Matrix gated("gated", tokens, width);
      engine::activate(ExecutionSpace{}, gate_up, gated, rounded.rows, rule);
      std::vector<float> expected(tokens * width);
      for (std::int64_t i = 0; i < tokens * width; ++i) {
        const std::int64_t first = i / width * columns + i % width;
        const double up = rule.has_gate ? before[first + width] : 1.0f;
        expected[i] = static_cast<float>(activated(rule, before[first], up));
      }
      rounded.expect(expected, width);
      if (rounded.rows.exist()) return;
      const auto found = on_host(gated);
      for (std::int64_t i = 0; i < tokens * width; ++i) {
        EXPECT_NEAR(found(i / width, i % width), expected[i], 1e-6);
      }
    });
  }
}

TEST(StepKernelsOfRows, Clamp) {
  in_each_form([&](bool) {
    Numbers numbers(4);
    auto values = numbers(3 * 37);
    values[5] = nan_value;
    const auto x = on_device<Matrix>(values, 3, 37);
    engine::clamp(ExecutionSpace{}, x, 0.3f);
    const auto found = on_host(x);
    for (std::int64_t i = 0; i < 3 * 37; ++i) {
      if (i == 5) {
        EXPECT_TRUE(std::isnan(found.data()[i]));
      } else {
        EXPECT_EQ(found.data()[i], std::clamp(values[i], -0.3f, 0.3f));
      }
    }
  });
}

TEST(StepKernelsOfRows, SoftCap) {
  in_each_form([&](bool) {
    Numbers numbers(4);
    auto values = numbers(3 * 37);
    for (float& value : values) value *= 60;
    const auto y = on_device<Matrix>(values, 3, 37);
    engine::soft_cap(ExecutionSpace{}, y, 30);
    const auto found = on_host(y);
    for (std::int64_t i = 0; i < 3 * 37; ++i) {
      EXPECT_NEAR(found.data()[i], 30 * std::tanh(double{values[i]} / 30), 1e-5);
    }
  });
}

// Sinks take part in the softmax: as if each head saw one more row, whose value is 0.
TEST(StepKernelsOfRows, AddSinks) {
  in_each_form([&](bool) {
    constexpr std::int64_t tokens = 3, heads = 2, dim = 5;
    const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> attended("a", tokens, heads,
                                                                            dim);
    Kokkos::deep_copy(attended, 2.0f);
    const std::vector<float> sums = {0.5f, -3, 90, -infinity, -1, nan_value}, sinks = {-90, 1.5f};
    const auto lse = on_device<Matrix>(sums, tokens, heads);
    engine::add_sinks(ExecutionSpace{}, on_device(sinks), lse, attended);
    const auto output = on_host(attended);
    const auto found = on_host(lse);
    for (std::int64_t i = 0; i < tokens * heads; ++i) {
      const double own = sums[i], sink = sinks[i % heads];
      const double total = std::log(std::exp(own) + std::exp(sink));
      const double factor = std::exp(own - total);
      for (std::int64_t d = 0; d < dim; ++d) {
        if (std::isnan(own)) {
          EXPECT_TRUE(std::isnan(output(i / heads, i % heads, d)));
        } else {
          EXPECT_NEAR(output(i / heads, i % heads, d), 2 * factor, 1e-6);
        }
      }
      if (!std::isnan(own)) {
        EXPECT_NEAR(found(i / heads, i % heads), total, 1e-5);
      }
    }
  });
}

/// What the decoder makes of a row of logits that `ranks` ranks hold a part of each.
TokenId argmax(const std::vector<float>& logits, std::int64_t ranks) {
  const std::int64_t count = logits.size();
  std::int64_t most = std::numeric_limits<std::int64_t>::min();
  for (std::int64_t r = 0; r < ranks; ++r) {
    const std::int64_t begin = count * r / ranks, end = count * (r + 1) / ranks;
    const auto y =
        on_device<Matrix>({logits.begin() + begin, logits.begin() + end}, 1, end - begin);
    const Kokkos::View<std::int64_t*, MemorySpace> keys("keys", 1);
    engine::argmax(ExecutionSpace{}, y, begin, keys);
    most = std::max(most, on_host(keys)(0));
  }
  return engine::token_of_key(most);
}

TEST(Argmax, AgreesWithTheSampler) {
  kvzap::Sampler sampler({});
  Numbers numbers(5);
  for (int round = 0; round < 50; ++round) {
    auto logits = numbers(1 + round * 7);
    if (round % 3 == 0) {
      for (float& logit : logits) logit = -std::fabs(logit);  // none above zero
    }
    if (round % 4 == 1) logits.push_back(*std::max_element(logits.begin(), logits.end()));  // a tie
    if (round % 5 == 2) logits[logits.size() / 2] = -infinity;
    if (round % 7 == 6) logits[logits.size() / 3] = nan_value;
    if (round % 7 == 5) logits[logits.size() / 3] = -nan_value;
    if (round % 7 == 4) logits[logits.size() / 3] = infinity;
    for (const std::int64_t ranks : {1, 3}) {
      EXPECT_EQ(argmax(logits, ranks), sampler(logits)) << "round " << round;
    }
  }
  EXPECT_EQ(argmax({0.0f, -0.0f}, 1), 0);
  EXPECT_EQ(argmax({-0.0f, 0.0f}, 1), 0);
  EXPECT_EQ(argmax({-infinity, -infinity}, 2), -1);
  EXPECT_EQ(argmax({}, 1), -1);
}

}  // namespace
