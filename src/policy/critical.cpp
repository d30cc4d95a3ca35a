#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
#include "linalg/gemm.hpp"
#include "policy/registry.hpp"
#include "policy/row_loops.hpp"
#include "policy/row_math.hpp"
#include "policy/segments.hpp"

namespace kvzap::policy {
namespace {

using linalg::Matrix;
using linalg::Vector;
using Range = PolicyRange;
using Flags = Kokkos::View<std::uint8_t**, Kokkos::LayoutRight, MemorySpace>;
using OpenRows = Kokkos::View<std::int64_t*, MemorySpace>;

constexpr float largest = std::numeric_limits<float>::max();
// Rows of values that are multiplied by W_O at a time.
constexpr std::int64_t critical_tile_rows = 512;

// norms[row] += scale * sum of |projected(row, :)|
KVZAP_BODY void add_magnitudes_body(const float* projected, std::int64_t columns, std::int64_t rows,
                                    float scale, float* norms) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const values = projected + row * columns;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < columns; ++i) sum += __builtin_fabsf(values[i]);
    norms[row] += scale * sum;
  }
}
KVZAP_KERNEL(void, add_magnitudes,
             (const float* projected, std::int64_t columns, std::int64_t rows, float scale,
              float* norms),
             (projected, columns, rows, scale, norms))

// norms(first + row) += scale * sum of |projected(row, :)|
void add_norms(const ExecutionSpace& exec, const Matrix& projected, std::int64_t first, float scale,
               const Vector& norms) {
  const auto rows = static_cast<std::int64_t>(projected.extent(0));
  const auto columns = static_cast<std::int64_t>(projected.extent(1));
  if (base::machine().on_host()) {
    constexpr std::int64_t slice = 64;
    base::host_for("kvzap::critical::norms", (rows + slice - 1) / slice, [=](std::int64_t i) {
      add_magnitudes(&projected(i * slice, 0), columns, std::min(slice, rows - i * slice), scale,
                     norms.data() + first + i * slice);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::critical::norms", Range(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t row) {
        float sum = 0;
        for (std::int64_t i = 0; i < columns; ++i) sum += base::math::fabs(projected(row, i));
        norms(first + row) += scale * sum;
      });
}

// open(i) = the i-th row without a flag. Returns their number. Waits for the instance.
std::int64_t find_open(const ExecutionSpace& exec, const Flags& flags, int head, std::int64_t rows,
                       const OpenRows& open) {
  std::int64_t count = 0;
  Kokkos::parallel_scan(
      "kvzap::critical::open", Range(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t & before, bool is_final) {
        if (flags(head, row) != 0) return;
        if (is_final) open(before) = row;
        ++before;
      },
      count);
  return count;
}

// score = (score + epsilon) * norm for each of `rows`. Scores that are not finite are unchanged.
void weigh(const ExecutionSpace& exec, const OpenRows& rows, std::int64_t count, float epsilon,
           const Vector& norms, int head, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::critical::weigh", Range(exec, 0, count), KOKKOS_LAMBDA(std::int64_t i) {
        float& score = scores(head, rows(i));
        if (!EvictionRule::is_finite(score)) return;
        const float weighed = (score + epsilon) * norms(i);
        // The product may overflow. An infinite score would never be evicted.
        score = weighed > largest ? largest : weighed < -largest ? -largest : weighed;
      });
}

// scores = largest where flagged and finite.
void mark(const ExecutionSpace& exec, const Flags& flags, int head, std::int64_t rows,
          const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::critical::mark", Range(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t row) {
        if (flags(head, row) != 0 && EvictionRule::is_finite(scores(head, row))) {
          scores(head, row) = largest;
        }
      });
}

std::int64_t count_flags(const ExecutionSpace& exec, const Flags& flags, int head,
                         std::int64_t rows) {
  std::int64_t count = 0;
  Kokkos::parallel_reduce(
      "kvzap::critical::count", Range(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t row, std::int64_t & sum) { sum += flags(head, row); }, count);
  return count;
}

// turned(i, d) = weights(d, i); bf16 holds them exactly.
void turn_weights(const ExecutionSpace& exec, const PolicyLayer::RowsView& weights,
                  const linalg::WeightRows<bfloat16>& turned) {
  const auto outputs = static_cast<std::int64_t>(turned.extent(0));
  const auto dim = static_cast<std::int64_t>(turned.extent(1));
  // Outputs of a cache line on a host; a column of `weights` alone would read one value of each.
  constexpr std::int64_t run = base::runs_on_host ? 16 : 1;
  Kokkos::parallel_for(
      "kvzap::critical::turn", Range(exec, 0, (outputs + run - 1) / run * dim),
      KOKKOS_LAMBDA(std::int64_t item) {
        const std::int64_t first = item / dim * run;
        const std::int64_t end = first + run < outputs ? first + run : outputs;
        const std::int64_t d = item % dim;
        for (std::int64_t i = first; i < end; ++i) {
          turned(i, d) = static_cast<bfloat16>(weights(d, i));
        }
      });
}

struct CriticalParameters : PolicyParameters {
  double epsilon = number("epsilon", 1e-4, {0, 1e6}, "added to scores before that multiplication");
  double first = number("first", 0.5, {0, 1}, "share of the budget that scores alone decide");
};

struct CriticalOptions {
  bool in_bf16 = false;  // type of values and W_O
  double epsilon;
  double first;
  bool heads_compete = false;  // CriticalAda
  double safeguard = 0;        // for CriticalAda
};

class Critical final : public Policy {
 public:
  Critical(std::unique_ptr<Policy> inner, const CriticalOptions& options)
      : m_inner(std::move(inner)), m_options(options) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs = m_inner->needs();
    needs.budget = true;  // the first stage gets a fraction of it
    needs.output_weights = true;
    needs.accumulates = false;  // cached scores are its own
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_inner->observe(layer, block);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_inner->score(layer, scores);
    const Flags flags(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::critical::flags"),
                      layer.heads(), scores.extent(1));
    std::vector<std::int64_t> budgets;  // for heads that compete
    std::vector<std::int64_t> first;
    if (m_options.heads_compete) {
      Budget even;
      even.amount = Budget::Amount::keep_tokens;
      even.keep_tokens = std::max<std::int64_t>(1, layer.extents().keep);
      even.pool = Budget::Pool::layer;
      even.safeguard = m_options.safeguard;
      const Budget::Model model = {layer.extents().layers, layer.extents().kv_heads, 1};
      const ScoredLayer scored = {layer.layer(), layer.extents().heads, layer.extents().rows,
                                  scores, flags};
      even.choose(layer.exec(), layer.comm(), model, layer.extents().tokens, {scored});
      const std::int64_t safe = even.safe_rows(layer.extents().keep);
      for (int head = 0; head < layer.heads(); ++head) {
        budgets.push_back(count_flags(layer.exec(), flags, head, layer.rows(head)));
        first.push_back(std::max(std::min(safe, budgets.back()), first_rows(budgets.back())));
      }
    } else {
      const std::int64_t least = m_options.first > 0 ? 1 : 0;
      for (int head = 0; head < layer.heads(); ++head) {
        first.push_back(
            std::min(layer.rows(head), std::max(least, first_rows(layer.extents().keep))));
      }
    }
    select(layer, scores, first, flags);
    for (int head = 0; head < layer.heads(); ++head) {
      const std::int64_t rows = layer.rows(head);
      base::reserve_scratch(m_open, rows, "kvzap::critical::open");
      const std::int64_t count = find_open(layer.exec(), flags, head, rows, m_open);
      if (count > 0) {
        project(layer, head, count);
        weigh(layer.exec(), m_open, count, static_cast<float>(m_options.epsilon), m_norms, head,
              scores);
      }
      mark(layer.exec(), flags, head, rows, scores);
    }
    if (m_options.heads_compete) {
      select(layer, scores, budgets, flags);
      for (int head = 0; head < layer.heads(); ++head) {
        mark(layer.exec(), flags, head, layer.rows(head), scores);
      }
    }
    // Wait before the flags are freed.
    base::fence(layer.exec(), "kvzap::critical: scores are there");
  }

 private:
  std::int64_t first_rows(std::int64_t rows) const {
    return static_cast<std::int64_t>(static_cast<double>(rows) * m_options.first);
  }

  // flags = 1 for the best keep(head) rows of each head.
  static void select(PolicyLayer& layer, const ScoreView& scores,
                     const std::vector<std::int64_t>& keep, const Flags& flags) {
    std::vector<Segment> segments;
    for (int head = 0; head < layer.heads(); ++head) {
      Segment segment;
      segment.rows = layer.rows(head);
      segment.stride = static_cast<std::int64_t>(scores.stride(1));
      segment.scores = scores.data() + static_cast<std::int64_t>(scores.stride(0)) * head;
      segment.keep = flags.data() + static_cast<std::int64_t>(flags.stride(0)) * head;
      segments.push_back(segment);
    }
    select_alone(layer.exec(), keep, segments);
    judge(layer.exec(), segments);
  }

  // m_norms(i) = mean over the query heads of the group of the 1-norm of W_O v for the value v of
  // row m_open(i), i < rows.
  void project(PolicyLayer& layer, int head, std::int64_t rows) {
    const std::int64_t dim = layer.extents().head_dim;
    base::reserve_scratch(m_values, rows * dim, "kvzap::critical::values");
    const Matrix values(m_values.data(), rows, dim);
    gather_rows(layer.exec(), "kvzap::critical::gather", layer.values(head), m_open.data(), values);
    const std::int64_t hidden = layer.extents().hidden_size;
    const int group = layer.extents().group;
    base::reserve_scratch(m_norms, rows, "kvzap::critical::norms");
    base::reserve_scratch(m_projected, std::min(rows, critical_tile_rows) * hidden,
                          "kvzap::critical::projected");
    Kokkos::deep_copy(layer.exec(), m_norms, 0.0f);
    if (m_options.in_bf16) {
      base::reserve_scratch(m_turned, hidden * dim, "kvzap::critical::turned");
    }
    const linalg::WeightRows<bfloat16> turned(m_turned.data(), hidden, dim);
    for (int member = 0; member < group; ++member) {
      const PolicyLayer::RowsView weights = layer.output_weights(head * group + member);
      if (m_options.in_bf16) turn_weights(layer.exec(), weights, turned);
      for (std::int64_t begin = 0; begin < rows; begin += critical_tile_rows) {
        const std::int64_t count = std::min(critical_tile_rows, rows - begin);
        const linalg::ConstMatrix tile =
            Kokkos::subview(values, std::make_pair(begin, begin + count), Kokkos::ALL);
        const Matrix projected(m_projected.data(), count, hidden);
        if (m_options.in_bf16) {
          m_product(layer.exec(), tile, linalg::LinearWeights(turned), linalg::ConstVector(),
                    projected);
        } else {
          linalg::multiply_nn(layer.exec(), 1, tile, weights, 0, projected);
        }
        add_norms(layer.exec(), projected, begin, 1.0f / static_cast<float>(group), m_norms);
      }
    }
  }

  std::unique_ptr<Policy> m_inner;
  CriticalOptions m_options;
  OpenRows m_open;                                // scratch: rows that the first stage leaves
  Vector m_values;                                // scratch: their values
  Vector m_norms;                                 // scratch
  Vector m_projected;                             // scratch
  Kokkos::View<bfloat16*, MemorySpace> m_turned;  // scratch
  linalg::LinearMap m_product;
};

}  // namespace

/// CriticalKV (arXiv 2502.03805) over the scores of any policy, as in kvpress. In each head, the
/// best max(1, floor(first * budget)) rows stay by their scores alone and get the largest float.
/// The others get (score + epsilon) * mean over the group's query heads of the 1-norm of W_O v.
///
/// With `ada` (kvpress' CriticalAdaKVPress), a head's budget is the number of rows that it would
/// keep if heads competed by the policy's scores, with ada's safeguard. The first stage gets its
/// fraction of this budget, and the second stage fills it. With `global`, the first stage gets its
/// fraction of the even budget.
///
/// Cost: the output projection of the rows that the first stage leaves; a copy of a head's values
/// and 512 * hidden_size floats.
ModifierInfo critical() {
  ModifierInfo info;
  info.name = "critical";
  info.paper = "CriticalKV, arXiv 2502.03805";
  info.effect = "a second stage multiplies scores by the 1-norm of W_O v";
  info.apply_with<CriticalParameters>([](PolicyChoice& choice, const auto& p,
                                         const PolicySetup& setup) {
    if (!choice.budget.has_amount()) {
      throw Error(
          "critical has no meaning with a threshold: its first stage is a share of a budget; give "
          "an evict ratio, a number of tokens or a size");
    }
    if (choice.make()->needs().every_step) {
      choice.why_once = "it continues from its earlier scores, which critical replaces";
    }
    CriticalOptions options{setup.dtype == DType::bf16, p.epsilon, p.first};
    if (choice.budget.pool == Budget::Pool::layer) {
      if (choice.budget.counts_pools) {
        throw Error(
            fmt::format("critical has no meaning here: the budget of policy {} is of whole "
                        "layers; add ada, whose heads compete by kvpress' counts",
                        choice.info->name));
      }
      options.heads_compete = true;
      options.safeguard = choice.budget.safeguard;
      // The scores include the safeguard.
      choice.budget.safeguard = 0;
    }
    choice.scores_are_marked = true;
    choice.scorer = nullptr;
    choice.make = [inner = choice.make, options] {
      return std::make_unique<Critical>(inner(), options);
    };
  });
  return info;
}

}  // namespace kvzap::policy
