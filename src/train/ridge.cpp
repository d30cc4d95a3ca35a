#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/train.hpp>

#include "base/kokkos_compat.hpp"
#include "base/stopwatch.hpp"
#include "linalg/host/row_kernels.hpp"
#include "train/lapack.hpp"
#include "train/normal_equations.hpp"
#include "train/pair_rows.hpp"
#include "train/quality.hpp"

namespace kvzap {
namespace {

using linalg::Matrix;
using train::NormalEquations;
using train::Order;

// A block of pairs, and the rows that are used.
class RidgeBlocks {
 public:
  RidgeBlocks(const PairSource& source, int layer, const PairSplit& split)
      : m_source(source),
        m_layer(layer),
        m_split(split),
        m_block(std::min(train::pairs_of_block(source.info()), source.info().pairs)),
        m_dtype(source.info().dtype),
        m_inputs(source.info().hidden_size),
        m_hidden(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::ridge::hidden"), m_block,
                 m_inputs * size_of(m_dtype)),
        m_scores(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::ridge::scores"), m_block,
                 source.info().kv_heads),
        m_host_hidden(Kokkos::create_mirror_view(m_hidden)),
        m_host_scores(Kokkos::create_mirror_view(m_scores)) {}

  std::int64_t block() const { return m_block; }

  /// Reads pairs from `begin` on. `rows` receives the finite pairs of the wanted kind. Returns how
  /// many pairs of that kind are not finite.
  std::int64_t read(std::int64_t begin, std::int64_t count, bool validation) {
    const std::int64_t heads = m_host_scores.extent(1);
    rows.clear();
    m_source.read(m_layer, begin, count, m_host_hidden.data(), m_host_scores.data());
    std::int64_t dropped = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (m_split.is_validation[static_cast<std::size_t>(begin + i)] != validation) continue;
      if (train::are_finite(m_dtype, &m_host_hidden(i, 0), m_inputs) &&
          train::are_finite(DType::f32, &m_host_scores(i, 0), heads)) {
        rows.push_back(i);
      } else {
        ++dropped;
      }
    }
    return dropped;
  }

  /// Adds the block, copied to kernel memory, to the equations.
  void add_to(NormalEquations& equations, const ExecutionSpace& exec) {
    Kokkos::deep_copy(m_hidden, m_host_hidden);
    Kokkos::deep_copy(m_scores, m_host_scores);
    const Kokkos::View<std::int64_t*, MemorySpace> order(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::ridge::order"), rows.size());
    using Host = Kokkos::View<const std::int64_t*, Kokkos::HostSpace,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(order, Host(rows.data(), rows.size()));
    equations.add(exec, {m_hidden.data(), m_dtype, {m_block, 1, m_inputs}, {m_inputs, m_inputs, 1}},
                  m_scores, order);
    base::fence(exec, "kvzap::ridge: the next block reuses this memory");
  }

  /// Returns the hidden state of a row. Valid until the next call.
  const float* hidden(std::int64_t row) const {
    m_wide.resize(static_cast<std::size_t>(m_inputs));
    with_value_type(m_dtype, [&](auto zero) {
      linalg::widen(reinterpret_cast<const decltype(zero)*>(&m_host_hidden(row, 0)), m_wide.data(),
                    m_inputs);
    });
    return m_wide.data();
  }
  const float* scores(std::int64_t row) const { return &m_host_scores(row, 0); }

  std::vector<std::int64_t> rows;

 private:
  using Hidden = Kokkos::View<char**, Kokkos::LayoutRight, MemorySpace>;  // (row, bytes)

  const PairSource& m_source;
  int m_layer;
  const PairSplit& m_split;
  std::int64_t m_block;
  DType m_dtype;
  std::int64_t m_inputs;
  Hidden m_hidden;
  Matrix m_scores;
  base::HostMirror<Hidden> m_host_hidden;
  base::HostMirror<Matrix> m_host_scores;
  mutable std::vector<float> m_wide;
};

// Returns the means of the first used pairs as the shift. They are close enough to the means of all
// pairs.
std::vector<float> ridge_shift(const RidgeBlocks& blocks, const PairsInfo& info) {
  constexpr std::size_t enough = 512;
  std::vector<double> sums(static_cast<std::size_t>(info.hidden_size + info.kv_heads));
  const std::size_t count = std::min(enough, blocks.rows.size());
  for (std::size_t r = 0; r < count; ++r) {
    const float* const hidden = blocks.hidden(blocks.rows[r]);
    const float* const scores = blocks.scores(blocks.rows[r]);
    for (std::int64_t c = 0; c < info.hidden_size; ++c) sums[c] += hidden[c];
    for (std::int64_t h = 0; h < info.kv_heads; ++h) sums[info.hidden_size + h] += scores[h];
  }
  std::vector<float> shift;
  shift.reserve(sums.size());
  for (const double sum : sums) {
    shift.push_back(static_cast<float>(sum / static_cast<double>(std::max<std::size_t>(count, 1))));
  }
  return shift;
}

// Computes the surrogate's predictions in double, which is cheap for the few validation pairs.
void ridge_predict(const SurrogateLayer& s, const float* hidden, std::vector<float>& predicted) {
  for (std::int64_t h = 0; h < s.outputs; ++h) {
    constexpr int lanes = 16;
    double sums[lanes] = {};
    const float* const weight = s.weight1.data() + h * s.inputs;
    std::int64_t c = 0;
    for (; c + lanes <= s.inputs; c += lanes) {
      for (int j = 0; j < lanes; ++j) {
        sums[j] += static_cast<double>(hidden[c + j]) * weight[c + j];
      }
    }
    double total = s.bias1[h];
    for (; c < s.inputs; ++c) {
      total += static_cast<double>(hidden[c]) * weight[c];
    }
    for (const double sum : sums) total += sum;
    predicted.push_back(static_cast<float>(total));
  }
}

// The solution in double, for hidden states and scores that were not shifted.
struct RidgeSolution {
  // Cholesky factor, of inputs
  Kokkos::View<double**, Kokkos::LayoutRight, Kokkos::HostSpace> factor;
  std::vector<double> means;       // (inputs + heads)
  std::vector<double> weights;     // (heads, inputs)
  std::vector<double> intercepts;  // (heads)
  double squares = 0;              // sum of squared errors over all heads
  train::CholeskyResult cholesky;
};

// Centres the sums in place and solves. On failure it sets only `cholesky`.
RidgeSolution solve_ridge(const NormalEquations& equations, std::int64_t inputs, std::int64_t heads,
                          double alpha, double count) {
  RidgeSolution s;
  s.factor = equations.sums();
  const auto& sums = s.factor;
  const std::int64_t columns = equations.columns();
  s.means.resize(static_cast<std::size_t>(columns - 1));
  for (std::int64_t c = 0; c < columns - 1; ++c) s.means[c] = sums(c, columns - 1) / count;
  for (std::int64_t i = 0; i < inputs; ++i) {
    for (std::int64_t j = i; j < columns - 1; ++j) sums(i, j) -= count * s.means[i] * s.means[j];
    sums(i, i) += alpha;
  }
  std::vector<double>& weights = s.weights;
  weights.resize(static_cast<std::size_t>(heads * inputs));
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < inputs; ++i) weights[h * inputs + i] = sums(i, inputs + h);
  }
  const std::vector<double> right = weights;
  s.cholesky = train::solve_cholesky(sums.data(), inputs, columns, weights.data(), heads);
  if (s.cholesky.failed_pivot > 0) return s;
  for (std::int64_t h = 0; h < heads; ++h) {
    const double mean = s.means[inputs + h];
    double intercept = mean;
    // |y - Xw|^2 = y.y - w.X^T y - alpha w.w, because (X^T X + alpha) w = X^T y
    double error = sums(inputs + h, inputs + h) - count * mean * mean;
    for (std::int64_t i = 0; i < inputs; ++i) {
      const double w = weights[h * inputs + i];
      intercept -= w * s.means[i];
      error -= w * (right[h * inputs + i] + alpha * w);
    }
    s.intercepts.push_back(intercept);
    s.squares += std::max(error, 0.0);
  }
  return s;
}

// Ridge regression of one layer. It may read the pairs several times.
class RidgeTraining {
 public:
  RidgeTraining(const PairSource& source, int layer, const PairSplit& split,
                const RidgeOptions& options, const StopRequest& stop, const LayerProgress& progress)
      : m_info(source.info()),
        m_split(split),
        m_alpha(options.alpha),
        m_stop(stop),
        m_progress(progress),
        m_blocks(source, layer, split) {
    m_trained.report.layer = layer;
  }

  std::optional<TrainedLayer> run() {
    const auto start = base::Clock::now();
    const std::int64_t inputs = m_info.hidden_size, heads = m_info.kv_heads;
    LayerReport& report = m_trained.report;
    std::optional<NormalEquations> equations = sum_up(false);
    if (!equations) return std::nullopt;
    RidgeSolution solution =
        solve_ridge(*equations, inputs, heads, m_alpha, static_cast<double>(report.training));
    if (!equations->is_double()) {
      const std::optional<bool> refined = refine(solution);
      if (!refined) return std::nullopt;
      if (!*refined) {
        solution = {};
        equations.reset();
        equations = sum_up(true);
        if (!equations) return std::nullopt;
        solution =
            solve_ridge(*equations, inputs, heads, m_alpha, static_cast<double>(report.training));
      }
    }
    equations.reset();
    if (solution.cholesky.failed_pivot > 0) {
      throw Error(fmt::format(
          "layer {}: X^T X + {} is not positive definite (pivot {} of {}): hidden "
          "states of {} pairs depend linearly on one another; a larger ridge makes "
          "the system solvable",
          report.layer, m_alpha, solution.cholesky.failed_pivot, inputs, report.training));
    }
    publish(solution);
    solution = {};
    if (!validate()) return std::nullopt;
    report.seconds = base::seconds_since(start);
    if (m_progress) m_progress(1);
    return std::move(m_trained);
  }

 private:
  // Passes every block with training pairs to `use`. Returns the number of dropped pairs, or
  // nothing if stopped. `begin` and `end` are the pass's range of the progress.
  template <class Use>
  std::optional<std::int64_t> for_training(double begin_share, double end_share, const Use& use) {
    std::int64_t dropped = 0;
    for (std::int64_t begin = 0; begin < m_info.pairs; begin += m_blocks.block()) {
      if (m_stop && m_stop()) return std::nullopt;
      const std::int64_t count = std::min(m_blocks.block(), m_info.pairs - begin);
      dropped += m_blocks.read(begin, count, false);
      if (!m_blocks.rows.empty()) use();
      if (m_progress) {
        const double done = static_cast<double>(begin + count) / static_cast<double>(m_info.pairs);
        m_progress(begin_share + (end_share - begin_share) * done);
      }
    }
    return dropped;
  }

  std::optional<NormalEquations> sum_up(bool always_double) {
    const ExecutionSpace exec;
    std::optional<NormalEquations> equations;
    std::int64_t training = 0;
    const auto dropped = for_training(0, 0.8, [&] {
      if (!equations) {
        if (m_shift.empty()) m_shift = ridge_shift(m_blocks, m_info);
        equations.emplace(m_info.hidden_size, m_info.kv_heads, m_shift, always_double);
      }
      m_blocks.add_to(*equations, exec);
      training += static_cast<std::int64_t>(m_blocks.rows.size());
    });
    if (!dropped) return std::nullopt;
    if (!equations) {
      throw Error(
          fmt::format("layer {}: no training pairs are left: {} had a value that is not "
                      "finite",
                      m_trained.report.layer, *dropped));
    }
    m_trained.report.training = training;
    m_trained.report.dropped = *dropped;
    return equations;
  }

  // Iterative refinement (Wilkinson) of the solution from float sums. Computes the residuals of the
  // normal equations in double from the pairs, and solves for the correction with the existing
  // factor. A pass costs 2 heads / inputs of the sums' operations, and reads the pairs again.
  // Returns whether it converged, or nothing if stopped.
  std::optional<bool> refine(RidgeSolution& s) {
    if (s.cholesky.failed_pivot > 0) return false;
    // A pass changes the weights by about their error and leaves about this fraction of it.
    constexpr double enough = 3e-3;
    constexpr int passes = 4;
    for (int pass = 0; pass < passes; ++pass) {
      const std::optional<double> change = refine_once(s);
      if (!change) return std::nullopt;
      if (*change <= enough) return true;
    }
    return false;
  }

  // Returns the largest relative change of the weights over heads.
  std::optional<double> refine_once(RidgeSolution& s) {
    const std::int64_t inputs = m_info.hidden_size, heads = m_info.kv_heads;
    constexpr std::int64_t rows_at_once = 256;
    std::vector<double> z(static_cast<std::size_t>(rows_at_once * inputs));
    std::vector<double> errors(static_cast<std::size_t>(rows_at_once * heads));
    std::vector<double> right(s.weights.size()), sums(static_cast<std::size_t>(heads));
    double squares = 0;
    const auto done = for_training(0.8, 0.95, [&] {
      const auto total = static_cast<std::int64_t>(m_blocks.rows.size());
      for (std::int64_t begin = 0; begin < total; begin += rows_at_once) {
        const std::int64_t count = std::min(rows_at_once, total - begin);
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t row = m_blocks.rows[static_cast<std::size_t>(begin + i)];
          const float* const hidden = m_blocks.hidden(row);
          double* const target = z.data() + i * inputs;
          for (std::int64_t c = 0; c < inputs; ++c) {
            target[c] = static_cast<double>(hidden[c]) - m_shift[c];
          }
          for (std::int64_t h = 0; h < heads; ++h) {
            const double score = m_blocks.scores(row)[h];
            errors[i * heads + h] = score - m_shift[inputs + h] - s.intercepts[h];
          }
        }
        train::add_residuals(z.data(), count, inputs, s.weights.data(), heads, errors.data(),
                             right.data());
        for (std::int64_t i = 0; i < count; ++i) {
          for (std::int64_t h = 0; h < heads; ++h) {
            const double error = errors[i * heads + h];
            sums[h] += error;
            squares += error * error;
          }
        }
      }
    });
    if (!done) return std::nullopt;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < inputs; ++i) {
        right[h * inputs + i] -= m_alpha * s.weights[h * inputs + i] + s.means[i] * sums[h];
      }
    }
    train::solve_factored(s.factor.data(), inputs, static_cast<std::int64_t>(s.factor.extent(1)),
                          right.data(), heads);
    double change = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
      double largest_step = 0, largest = 0;
      double intercept = sums[h] / static_cast<double>(m_trained.report.training);
      for (std::int64_t i = 0; i < inputs; ++i) {
        const double step = right[h * inputs + i];
        s.weights[h * inputs + i] += step;
        intercept -= step * s.means[i];
        largest_step = std::max(largest_step, std::fabs(step));
        largest = std::max(largest, std::fabs(s.weights[h * inputs + i]));
      }
      s.intercepts[h] += intercept;
      if (largest_step > 0) change = std::max(change, largest_step / largest);
    }
    s.squares = squares;  // before this step, which changes them only in second order
    return change;
  }

  void publish(const RidgeSolution& solution) {
    const std::int64_t inputs = m_info.hidden_size, heads = m_info.kv_heads;
    SurrogateLayer& s = m_trained.surrogate;
    s.inputs = inputs;
    s.outputs = heads;
    for (std::int64_t h = 0; h < heads; ++h) {
      double bias = solution.intercepts[h] + m_shift[inputs + h];
      for (std::int64_t i = 0; i < inputs; ++i) {
        const double w = solution.weights[h * inputs + i];
        bias -= w * m_shift[i];
        s.weight1.push_back(static_cast<float>(w));
      }
      s.bias1.push_back(static_cast<float>(bias));
    }
    LayerReport& report = m_trained.report;
    report.condition = solution.cholesky.condition;
    report.training_mse =
        solution.squares / (static_cast<double>(report.training) * static_cast<double>(heads));
  }

  // Validates the result; skips blocks without validation pairs. Returns false if stopped.
  bool validate() {
    LayerReport& report = m_trained.report;
    std::vector<float> oracle, predicted;
    for (std::int64_t begin = 0; begin < m_info.pairs; begin += m_blocks.block()) {
      const std::int64_t count = std::min(m_blocks.block(), m_info.pairs - begin);
      const auto first = m_split.is_validation.begin() + begin;
      const auto last = first + count;
      const auto next = std::find(first, last, true);
      if (next == last) continue;
      if (m_stop && m_stop()) return false;
      auto end = last;
      while (!*(end - 1)) --end;
      const std::int64_t skipped = next - first;
      report.dropped += m_blocks.read(begin + skipped, end - next, true);
      for (const std::int64_t row : m_blocks.rows) {
        const float* const scores = m_blocks.scores(row);
        oracle.insert(oracle.end(), scores, scores + m_info.kv_heads);
        ridge_predict(m_trained.surrogate, m_blocks.hidden(row), predicted);
      }
    }
    train::judge(oracle, predicted, m_info.kv_heads, report);
    return true;
  }

  const PairsInfo& m_info;
  const PairSplit& m_split;
  double m_alpha;
  const StopRequest& m_stop;
  const LayerProgress& m_progress;
  RidgeBlocks m_blocks;
  std::vector<float> m_shift;  // (inputs + heads)
  TrainedLayer m_trained;
};

}  // namespace

std::int64_t ridge_bytes(const PairsInfo& info) {
  const std::int64_t columns = info.hidden_size + info.kv_heads + 1;
  const auto pair = static_cast<std::int64_t>(size_of(info.dtype)) * info.hidden_size;
  return static_cast<std::int64_t>(sizeof(double)) * columns * columns +
         static_cast<std::int64_t>(sizeof(double)) * NormalEquations::block_rows * columns +
         std::min(train::pairs_of_block(info), info.pairs) * pair;
}

std::optional<TrainedLayer> train_ridge(const PairSource& source, int layer, const PairSplit& split,
                                        const RidgeOptions& options, const StopRequest& stop,
                                        const LayerProgress& progress) {
  const PairsInfo& info = source.info();
  if (!(options.alpha >= 0 && std::isfinite(options.alpha))) {
    throw Error(fmt::format("training: ridge is {}; expected 0 or more", options.alpha));
  }
  if (info.pairs < 1 || info.hidden_size < 1 || info.kv_heads < 1) {
    throw Error("training: there are no pairs to train on");
  }
  return RidgeTraining(source, layer, split, options, stop, progress).run();
}

}  // namespace kvzap
