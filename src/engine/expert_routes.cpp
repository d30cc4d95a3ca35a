#include "engine/expert_routes.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "base/host_threads.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "linalg/host/row_kernels.hpp"

namespace kvzap::engine {
namespace {

/// Calls work(i) for 0 <= i < n, each of `weight` elements.
template <class Work>
void for_each_row(const char* label, const ExecutionSpace& exec, std::int64_t n,
                  std::int64_t weight, const Work& work) {
  if (base::machine().on_host()) return base::host_for(label, n, weight, work);
  base::parallel_for(
      label, Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(exec, 0, n),
      work);
}

using Chosen = Kokkos::View<std::int64_t**, Kokkos::LayoutRight, MemorySpace>;

/// Chooses the experts of a token.
struct ChooseExperts {
  linalg::Matrix scores;   // (token, expert): the logits at first
  linalg::Matrix ranking;  // (token, expert)
  linalg::Matrix group_scores;
  linalg::ConstVector correction, bias, expert_scales;
  Chosen chosen;
  linalg::Matrix weights;
  std::int64_t groups_per_token;
  bool by_softmax, normalises;
  bool ranks_logits;  // not scores, of which large ones round to 1
  bool ranks_groups_by_best;
  float scale, mixer_margin;

  // A score that is taken, one of a group that is left out, and the group that is chosen.
  static constexpr float taken = -HUGE_VALF;
  static constexpr float left_out = -FLT_MAX;
  static constexpr float chosen_group = HUGE_VALF;

  KOKKOS_FUNCTION void operator()(std::int64_t token) const {
    const auto experts = static_cast<std::int64_t>(scores.extent(1));
    for (std::int64_t e = 0; e < experts; ++e) {
      if (bias.extent(0) > 0) scores(token, e) += bias(e);
      if (ranks_logits) ranking(token, e) = scores(token, e);
    }
    if (mixer_margin == 0) score(token, experts);
    for (std::int64_t e = 0; e < experts; ++e) {
      const float own = ranks_logits ? ranking(token, e) : scores(token, e);
      const float value = own + (correction.extent(0) > 0 ? correction(e) : 0.0f);
      // Not a number must not stop the choice; the output then shows it.
      ranking(token, e) = value >= -FLT_MAX ? value : -FLT_MAX;
    }
    if (group_scores.extent(1) > 1) leave_groups(token, experts);
    const auto count = static_cast<std::int64_t>(chosen.extent(1));
    float sum = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t best = take_largest(&ranking(token, 0), experts);
      chosen(token, j) = best;
      weights(token, j) = mixer_margin > 0 ? mixed(token, best, experts) : scores(token, best);
      sum += weights(token, j);
    }
    const float factor = normalises ? scale / sum : scale;
    for (std::int64_t j = 0; j < count; ++j) {
      weights(token, j) *= factor;
      if (expert_scales.extent(0) > 0) weights(token, j) *= expert_scales(chosen(token, j));
    }
  }

 private:
  KOKKOS_FUNCTION void score(std::int64_t token, std::int64_t experts) const {
    if (!by_softmax) {
      for (std::int64_t e = 0; e < experts; ++e) {
        scores(token, e) = 1.0f / (1.0f + base::math::exp(-scores(token, e)));
      }
      return;
    }
    float largest = scores(token, 0);
    for (std::int64_t e = 1; e < experts; ++e) {
      largest = scores(token, e) > largest ? scores(token, e) : largest;
    }
    float sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      scores(token, e) = base::math::exp(scores(token, e) - largest);
      sum += scores(token, e);
    }
    for (std::int64_t e = 0; e < experts; ++e) scores(token, e) /= sum;
  }

  /// The weight of an expert in ExpertsConfig::mixer_margin's sense, once it is taken.
  KOKKOS_FUNCTION float mixed(std::int64_t token, std::int64_t best, std::int64_t experts) const {
    const float largest = scores(token, best);
    float sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      const float own = scores(token, e), size = own < 0 ? -own : own;
      const bool is_far = (largest - own) / (size > largest ? size : largest) > mixer_margin;
      const bool is_left = e == best || ranking(token, e) != taken;
      if (is_left && !is_far) sum += base::math::exp(own - largest);
    }
    return 1.0f / sum;
  }

  /// Ranks the experts of groups that are not chosen below all others.
  KOKKOS_FUNCTION void leave_groups(std::int64_t token, std::int64_t experts) const {
    const auto groups = static_cast<std::int64_t>(group_scores.extent(1));
    const std::int64_t size = experts / groups;
    for (std::int64_t g = 0; g < groups; ++g) {
      float first = -FLT_MAX, second = -FLT_MAX;
      for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
        const float value = ranking(token, e);
        if (value > first) {
          second = first;
          first = value;
        } else if (value > second) {
          second = value;
        }
      }
      const float of_group = ranks_groups_by_best ? first : first + second;
      group_scores(token, g) = of_group >= -FLT_MAX ? of_group : -FLT_MAX;
    }
    for (std::int64_t i = 0; i < groups_per_token; ++i) {
      std::int64_t best = -1;
      for (std::int64_t g = 0; g < groups; ++g) {
        if (group_scores(token, g) == chosen_group) continue;
        if (best < 0 || group_scores(token, g) > group_scores(token, best)) best = g;
      }
      group_scores(token, best) = chosen_group;
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      if (group_scores(token, e / size) != chosen_group) ranking(token, e) = left_out;
    }
  }

  KOKKOS_FUNCTION static std::int64_t take_largest(float* values, std::int64_t count) {
    std::int64_t best = -1;
    for (std::int64_t i = 0; i < count; ++i) {
      if (values[i] != taken && (best < 0 || values[i] > values[best])) best = i;
    }
    values[best] = taken;
    return best;
  }
};

}  // namespace

void ExpertRoutes::reserve(const ExpertsConfig& config, std::int64_t tokens) {
  m_experts = config.routes();
  const std::int64_t choices = tokens * config.per_token;
  base::reserve_scratch(m_logits, tokens * m_experts, "kvzap::experts::logits");
  base::reserve_scratch(m_ranking, tokens * m_experts, "kvzap::experts::ranking");
  base::reserve_scratch(m_group_scores, tokens * config.groups, "kvzap::experts::group_scores");
  base::reserve_scratch(m_chosen, choices, "kvzap::experts::chosen");
  base::reserve_scratch(m_chosen_weights, choices, "kvzap::experts::chosen_weights");
  base::reserve_scratch(m_rows, choices, "kvzap::experts::rows");
  base::reserve_scratch(m_weights, choices, "kvzap::experts::weights");
  m_begin.reserve(static_cast<std::size_t>(m_experts) + 1);
}

linalg::Matrix ExpertRoutes::logits(std::int64_t tokens) const {
  return linalg::Matrix(m_logits.data(), tokens, m_experts);
}

void ExpertRoutes::choose(const ExecutionSpace& exec, const ExpertsConfig& config,
                          std::int64_t tokens, const Learned& learned) {
  const std::int64_t per_token = config.per_token;
  const ChooseExperts choose_one = {
      logits(tokens),
      linalg::Matrix(m_ranking.data(), tokens, m_experts),
      linalg::Matrix(m_group_scores.data(), tokens, config.groups),
      learned.correction,
      learned.bias,
      learned.scales,
      Chosen(m_chosen.data(), tokens, per_token),
      linalg::Matrix(m_chosen_weights.data(), tokens, per_token),
      config.groups_per_token,
      config.scores == ExpertsConfig::Scores::softmax,
      config.normalises,
      config.scales_input || config.ranks_logits || config.mixer_margin > 0,
      config.ranks_groups_by_best,
      static_cast<float>(config.scale),
      static_cast<float>(config.mixer_margin)};
  for_each_row("kvzap::experts::choose", exec, tokens, m_experts * per_token, choose_one);
}

void ExpertRoutes::sort(const ExecutionSpace& exec, std::int64_t tokens, std::int64_t per_token) {
  const std::int64_t choices = tokens * per_token;
  base::fence(exec, "kvzap::experts: the host sorts tokens by expert");

  const auto all = std::make_pair(std::int64_t{0}, choices);
  const auto chosen =
      Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, Kokkos::subview(m_chosen, all));
  const auto chosen_weights = Kokkos::create_mirror_view_and_copy(
      Kokkos::HostSpace{}, Kokkos::subview(m_chosen_weights, all));
  const auto rows = Kokkos::create_mirror_view(Kokkos::subview(m_rows, all));
  const auto weights = Kokkos::create_mirror_view(Kokkos::subview(m_weights, all));
  m_begin.assign(static_cast<std::size_t>(m_experts) + 1, 0);
  for (std::int64_t i = 0; i < choices; ++i) ++m_begin[chosen(i) + 1];
  for (std::int64_t e = 0; e < m_experts; ++e) m_begin[e + 1] += m_begin[e];
  for (std::int64_t i = 0; i < choices; ++i) {
    const std::int64_t place = m_begin[chosen(i)]++;
    rows(place) = i / per_token;
    weights(place) = chosen_weights(i);
  }
  // Each begin has moved to the next one.
  std::copy_backward(m_begin.begin(), m_begin.end() - 1, m_begin.end());
  m_begin.front() = 0;
  Kokkos::deep_copy(Kokkos::subview(m_rows, all), rows);
  Kokkos::deep_copy(Kokkos::subview(m_weights, all), weights);
}

ExpertRoutes::Tokens ExpertRoutes::tokens_of(std::int64_t expert) const {
  const auto own = std::make_pair(m_begin[expert], m_begin[expert + 1]);
  return {Kokkos::subview(m_rows, own), Kokkos::subview(m_weights, own)};
}

void ExpertRoutes::release() { *this = ExpertRoutes(); }

void clear(const ExecutionSpace& exec, const linalg::Matrix& y) {
  base::launch([=] { Kokkos::deep_copy(exec, y, 0.0f); });
}

void add_weighted_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& x,
                       const ExpertRoutes::Tokens& tokens, const linalg::Matrix& y) {
  const std::int64_t columns = x.extent(1);
  const auto rows = tokens.rows;
  const auto weights = tokens.weights;
  const bool weighs = weights.extent(0) > 0;
  if (base::machine().on_host()) {
    return base::host_for("kvzap::experts::add", x.extent(0), columns, [=](std::int64_t i) {
      const float weight = weighs ? weights(i) : 1.0f;
      const float* const from = &x(i, 0);
      float* const to = &y(rows(i), 0);
      for (std::int64_t d = 0; d < columns; ++d) to[d] += weight * from[d];
    });
  }
  for_each_row(
      "kvzap::experts::add", exec, x.extent(0) * columns, 1, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / columns, d = i % columns;
        y(rows(row), d) += weighs ? weights(row) * x(row, d) : x(row, d);
      });
}

void add_choices(const ExecutionSpace& exec, const linalg::ConstMatrix& x,
                 const linalg::ConstVector& weights, const linalg::Matrix& y) {
  const std::int64_t columns = y.extent(1), choices = x.extent(0) / y.extent(0);
  const bool weighs = weights.extent(0) > 0;
  for_each_row(
      "kvzap::experts::add_choices", exec, y.extent(0) * columns, choices,
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / columns, d = i % columns;
        float sum = 0;
        for (std::int64_t c = token * choices; c < (token + 1) * choices; ++c) {
          sum += weighs ? weights(c) * x(c, d) : x(c, d);
        }
        y(token, d) += sum;
      });
}

void scale_rows(const ExecutionSpace& exec, const linalg::ConstVector& weights,
                const linalg::Matrix& y) {
  const std::int64_t columns = y.extent(1);
  for_each_row(
      "kvzap::experts::scale", exec, y.extent(0) * columns, 1,
      KOKKOS_LAMBDA(std::int64_t i) { y(i / columns, i % columns) *= weights(i / columns); });
}

void gate_rows(const ExecutionSpace& exec, const linalg::ConstMatrix& logits,
               const linalg::Matrix& y) {
  const std::int64_t columns = y.extent(1);
  for_each_row(
      "kvzap::experts::gate", exec, y.extent(0) * columns, 1, KOKKOS_LAMBDA(std::int64_t i) {
        y(i / columns, i % columns) /= 1.0f + base::math::exp(-logits(i / columns, 0));
      });
}

}  // namespace kvzap::engine
