#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/train.hpp>

#include "base/kokkos_compat.hpp"
#include "train/clock.hpp"
#include "train/lapack.hpp"
#include "train/normal_equations.hpp"
#include "train/pair_rows.hpp"
#include "train/quality.hpp"

namespace kvzap {
namespace {

using detail::Matrix;
using detail::NormalEquations;
using detail::Order;

// A block of pairs as it was read, and those of its rows that count.
template <class Value>
class RidgeBlocks {
 public:
  RidgeBlocks(const PairSource& source, int layer, const PairSplit& split)
      : m_source(source),
        m_layer(layer),
        m_split(split),
        m_block(std::min(detail::pairs_of_block(source.info()), source.info().pairs)),
        m_hidden(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::ridge::hidden"), m_block,
                 source.info().hidden_size),
        m_scores(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::ridge::scores"), m_block,
                 source.info().kv_heads),
        m_host_hidden(Kokkos::create_mirror_view(m_hidden)),
        m_host_scores(Kokkos::create_mirror_view(m_scores)) {}

  std::int64_t block() const { return m_block; }

  /// Reads pairs from `begin` on; `rows` are those of the wanted kind that are finite. Returns how
  /// many of that kind are not.
  std::int64_t read(std::int64_t begin, std::int64_t count, bool validation) {
    const std::int64_t inputs = m_host_hidden.extent(1), heads = m_host_scores.extent(1);
    rows.clear();
    m_source.read(m_layer, begin, count, m_host_hidden.data(), m_host_scores.data());
    std::int64_t dropped = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      if (m_split.is_validation[static_cast<std::size_t>(begin + i)] != validation) continue;
      if (detail::are_finite(&m_host_hidden(i, 0), inputs) &&
          detail::are_finite(&m_host_scores(i, 0), heads)) {
        rows.push_back(i);
      } else {
        ++dropped;
      }
    }
    return dropped;
  }

  /// What was read, where kernels run.
  void add_to(NormalEquations& equations, const ExecutionSpace& exec) {
    Kokkos::deep_copy(m_hidden, m_host_hidden);
    Kokkos::deep_copy(m_scores, m_host_scores);
    const Kokkos::View<std::int64_t*, MemorySpace> order(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::ridge::order"), rows.size());
    using Host = Kokkos::View<const std::int64_t*, Kokkos::HostSpace,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(order, Host(rows.data(), rows.size()));
    equations.add<Value>(exec, m_hidden, m_scores, order);
    detail::fence(exec, "kvzap::ridge: the next block takes this one's place");
  }

  const Value* hidden(std::int64_t row) const { return &m_host_hidden(row, 0); }
  const float* scores(std::int64_t row) const { return &m_host_scores(row, 0); }

  std::vector<std::int64_t> rows;

 private:
  using Hidden = Kokkos::View<Value**, Kokkos::LayoutRight, MemorySpace>;

  const PairSource& m_source;
  int m_layer;
  const PairSplit& m_split;
  std::int64_t m_block;
  Hidden m_hidden;
  Matrix m_scores;
  typename Hidden::HostMirror m_host_hidden;
  Matrix::HostMirror m_host_scores;
};

// Means of the first pairs that count: near enough to all pairs' to take them off.
template <class Value>
std::vector<float> ridge_shift(const RidgeBlocks<Value>& blocks, const PairsInfo& info) {
  constexpr std::size_t enough = 512;
  std::vector<double> sums(static_cast<std::size_t>(info.hidden_size + info.kv_heads));
  const std::size_t count = std::min(enough, blocks.rows.size());
  for (std::size_t r = 0; r < count; ++r) {
    const Value* const hidden = blocks.hidden(blocks.rows[r]);
    const float* const scores = blocks.scores(blocks.rows[r]);
    for (std::int64_t c = 0; c < info.hidden_size; ++c) sums[c] += static_cast<float>(hidden[c]);
    for (std::int64_t h = 0; h < info.kv_heads; ++h) sums[info.hidden_size + h] += scores[h];
  }
  std::vector<float> shift;
  shift.reserve(sums.size());
  for (const double sum : sums) {
    shift.push_back(static_cast<float>(sum / static_cast<double>(std::max<std::size_t>(count, 1))));
  }
  return shift;
}

// Scores that the surrogate predicts, in double: validation pairs are few.
template <class Value>
void ridge_predict(const SurrogateLayer& s, const Value* hidden, std::vector<float>& predicted) {
  for (std::int64_t h = 0; h < s.outputs; ++h) {
    constexpr int lanes = 16;
    double sums[lanes] = {};
    const float* const weight = s.weight1.data() + h * s.inputs;
    std::int64_t c = 0;
    for (; c + lanes <= s.inputs; c += lanes) {
      for (int j = 0; j < lanes; ++j) {
        sums[j] += static_cast<double>(static_cast<float>(hidden[c + j])) * weight[c + j];
      }
    }
    double total = s.bias1[h];
    for (; c < s.inputs; ++c) {
      total += static_cast<double>(static_cast<float>(hidden[c])) * weight[c];
    }
    for (const double sum : sums) total += sum;
    predicted.push_back(static_cast<float>(total));
  }
}

// Centres the sums in place and solves them.
void solve_ridge(NormalEquations& equations, const std::vector<float>& shift, double alpha,
                 int layer, TrainedLayer& trained) {
  SurrogateLayer& s = trained.surrogate;
  LayerReport& report = trained.report;
  const auto sums = equations.sums();
  const std::int64_t inputs = s.inputs, heads = s.outputs, columns = equations.columns();
  const double count = static_cast<double>(report.training);
  std::vector<double> means(static_cast<std::size_t>(columns));
  for (std::int64_t c = 0; c < columns; ++c) means[c] = sums(c, columns - 1) / count;
  for (std::int64_t i = 0; i < inputs; ++i) {
    for (std::int64_t j = i; j < columns - 1; ++j) sums(i, j) -= count * means[i] * means[j];
    sums(i, i) += alpha;
  }
  std::vector<double> weights(static_cast<std::size_t>(heads * inputs));
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < inputs; ++i) weights[h * inputs + i] = sums(i, inputs + h);
  }
  const std::vector<double> right = weights;
  const detail::CholeskyResult solved =
      detail::solve_cholesky(sums.data(), inputs, columns, weights.data(), heads);
  if (solved.failed_pivot > 0) {
    throw Error(fmt::format(
        "layer {}: X^T X + {} is not positive definite (pivot {} of {}): hidden states of {} pairs "
        "depend linearly on one another; a larger --ridge makes the system solvable",
        layer, alpha, solved.failed_pivot, inputs, report.training));
  }
  report.condition = solved.condition;

  double squares = 0;
  s.weight1.resize(static_cast<std::size_t>(heads * inputs));
  s.bias1.resize(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) {
    const double mean = means[inputs + h];
    double bias = mean + shift[inputs + h];
    // |y - Xw|^2 = y.y - w.X^T y - alpha w.w, as (X^T X + alpha) w = X^T y
    double error = sums(inputs + h, inputs + h) - count * mean * mean;
    for (std::int64_t i = 0; i < inputs; ++i) {
      const double w = weights[h * inputs + i];
      bias -= w * (means[i] + shift[i]);
      error -= w * (right[h * inputs + i] + alpha * w);
      s.weight1[h * inputs + i] = static_cast<float>(w);
    }
    s.bias1[h] = static_cast<float>(bias);
    squares += std::max(error, 0.0);
  }
  report.training_mse = squares / (count * static_cast<double>(heads));
}

template <class Value>
std::optional<TrainedLayer> train_typed(const PairSource& source, int layer, const PairSplit& split,
                                        const RidgeOptions& options, const StopRequest& stop,
                                        const LayerProgress& progress) {
  const detail::Clock clock;
  const PairsInfo& info = source.info();
  const ExecutionSpace exec;
  TrainedLayer trained;
  trained.surrogate.inputs = info.hidden_size;
  trained.surrogate.outputs = info.kv_heads;
  LayerReport& report = trained.report;
  report.layer = layer;

  RidgeBlocks<Value> blocks(source, layer, split);
  std::optional<NormalEquations> equations;
  std::vector<float> shift;
  for (std::int64_t begin = 0; begin < info.pairs; begin += blocks.block()) {
    if (stop && stop()) return std::nullopt;
    const std::int64_t count = std::min(blocks.block(), info.pairs - begin);
    report.dropped += blocks.read(begin, count, false);
    if (!blocks.rows.empty()) {
      if (!equations) {
        shift = ridge_shift(blocks, info);
        equations.emplace(info.hidden_size, info.kv_heads, shift);
      }
      blocks.add_to(*equations, exec);
      report.training += static_cast<std::int64_t>(blocks.rows.size());
    }
    if (progress) {
      progress(0.95 * static_cast<double>(begin + count) / static_cast<double>(info.pairs));
    }
  }
  if (!equations) {
    throw Error(
        fmt::format("layer {}: no pair is left to train on: {} had a value that is not "
                    "finite",
                    layer, report.dropped));
  }
  solve_ridge(*equations, shift, options.alpha, layer, trained);
  equations.reset();

  // Blocks without validation pairs are not read again.
  std::vector<float> oracle, predicted;
  for (std::int64_t begin = 0; begin < info.pairs; begin += blocks.block()) {
    const std::int64_t count = std::min(blocks.block(), info.pairs - begin);
    const auto first = split.is_validation.begin() + begin;
    const auto last = first + count;
    const auto next = std::find(first, last, true);
    if (next == last) continue;
    if (stop && stop()) return std::nullopt;
    auto end = last;
    while (!*(end - 1)) --end;
    const std::int64_t skipped = next - first;
    report.dropped += blocks.read(begin + skipped, end - next, true);
    for (const std::int64_t row : blocks.rows) {
      oracle.insert(oracle.end(), blocks.scores(row), blocks.scores(row) + info.kv_heads);
      ridge_predict(trained.surrogate, blocks.hidden(row), predicted);
    }
  }
  detail::judge(oracle, predicted, info.kv_heads, report);
  report.seconds = clock.seconds();
  if (progress) progress(1);
  return trained;
}

}  // namespace

std::int64_t ridge_bytes(const PairsInfo& info) {
  const std::int64_t columns = info.hidden_size + info.kv_heads + 1;
  const auto pair = static_cast<std::int64_t>(size_of(info.dtype)) * info.hidden_size;
  return static_cast<std::int64_t>(sizeof(double)) * columns * columns +
         static_cast<std::int64_t>(sizeof(float)) * NormalEquations::block_rows * columns +
         std::min(detail::pairs_of_block(info), info.pairs) * pair;
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
  switch (info.dtype) {
    case DType::f32:
      return train_typed<float>(source, layer, split, options, stop, progress);
    case DType::f16:
      return train_typed<half>(source, layer, split, options, stop, progress);
    case DType::bf16:
      return train_typed<bfloat16>(source, layer, split, options, stop, progress);
  }
  throw Error("training: unknown value type");
}

}  // namespace kvzap
