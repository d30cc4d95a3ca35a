#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/train.hpp>
#include <limits>

#include "base/kokkos_compat.hpp"
#include "base/stopwatch.hpp"
#include "train/layer_pairs.hpp"
#include "train/mlp_step.hpp"
#include "train/quality.hpp"
#include "train/random.hpp"

namespace kvzap {
namespace {

using linalg::Matrix;
using linalg::Vector;
using train::AdamStep;
using train::MlpStep;
using train::Order;

// torch.optim.AdamW's defaults.
constexpr double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;

void check_mlp(const MlpOptions& o, const PairsInfo& info) {
  const auto refuse = [](const char* what, auto value, const char* expected) {
    throw Error(fmt::format("training: {} is {}; expected {}", what, value, expected));
  };
  if (o.hidden < 0 || o.hidden > (std::int64_t{1} << 24)) {
    refuse("hidden", o.hidden, "1 to 16777216 units");
  }
  if (o.epochs < 1) refuse("epochs", o.epochs, "at least 1");
  if (!(o.learning_rate > 0 && std::isfinite(o.learning_rate))) {
    refuse("the learning rate", o.learning_rate, "a positive number");
  }
  if (o.batch < 1 || o.batch > (std::int64_t{1} << 24)) {
    refuse("batch", o.batch, "1 to 16777216 pairs");
  }
  if (!(o.weight_decay >= 0 && std::isfinite(o.weight_decay))) {
    refuse("the weight decay", o.weight_decay, "0 or more");
  }
  if (std::isnan(o.clip)) refuse("clip", o.clip, "a number");
  if (info.pairs < 1 || info.hidden_size < 1 || info.kv_heads < 1) {
    throw Error("training: there are no pairs to train on");
  }
}

std::int64_t hidden_units(const PairsInfo& info, const MlpOptions& o) {
  return o.hidden > 0 ? o.hidden : std::max<std::int64_t>(1, info.hidden_size / 8);
}

// Copies (count) of a view to host values and back.
std::vector<float> values_of(const Vector& view) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
  return {host.data(), host.data() + host.extent(0)};
}
template <class View, class Value>
void set_values(const View& view, const std::vector<Value>& values) {
  using Host =
      Kokkos::View<const Value*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  Kokkos::deep_copy(view, Host(values.data(), values.size()));
}

Kokkos::View<std::int64_t*, MemorySpace> order_view(const std::vector<std::int64_t>& rows) {
  Kokkos::View<std::int64_t*, MemorySpace> view(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::train::order"), rows.size());
  set_values(view, rows);
  return view;
}

}  // namespace

struct MlpTrainer::Impl {
  virtual ~Impl() = default;
  virtual State state() const = 0;
  virtual void restore(const State& state) = 0;
  virtual bool run_epoch(const StopRequest& stop, const LayerProgress& progress) = 0;
  virtual bool is_done() const = 0;
  virtual TrainedLayer result() = 0;
};

namespace {

class Trainer final : public MlpTrainer::Impl {
 public:
  Trainer(const PairSource& source, int layer, const PairSplit& split, const MlpOptions& options)
      : m_options(options),
        m_layer(layer),
        m_inputs(source.info().hidden_size),
        m_hidden(hidden_units(source.info(), options)),
        m_heads(source.info().kv_heads),
        m_pairs(train::read_layer(source, layer, split)),
        m_rows(std::min<std::int64_t>(
            options.batch,
            static_cast<std::int64_t>(std::max(m_pairs.training.size(), std::size_t{1})))),
        m_step(m_inputs, m_hidden, m_heads, m_rows) {
    if (m_pairs.training.empty()) {
      throw Error(
          fmt::format("layer {}: no training pairs are left: {} had a value that is not finite",
                      layer, m_pairs.dropped));
    }
    initialize();
    m_seconds = base::seconds_since(m_start);
    m_start = base::Clock::now();
  }

  MlpTrainer::State state() const override {
    MlpTrainer::State s;
    s.epoch = m_epoch;
    s.batch = m_batch;
    s.step = m_steps;
    s.loss = loss();
    s.seconds = m_seconds;
    s.epoch_mse = m_epoch_mse;
    s.parameters = values_of(m_step.parameters());
    s.first_moment = values_of(m_step.first_moment());
    s.second_moment = values_of(m_step.second_moment());
    return s;
  }

  void restore(const MlpTrainer::State& s) override {
    const auto size = static_cast<std::size_t>(m_step.size());
    if (s.parameters.size() != size || s.first_moment.size() != size ||
        s.second_moment.size() != size || s.epoch < 0 || s.epoch > m_options.epochs ||
        s.batch < 0 || s.batch >= batches() || s.step != s.epoch * batches() + s.batch ||
        static_cast<std::int64_t>(s.epoch_mse.size()) != s.epoch) {
      throw Error(fmt::format("layer {}: the checkpoint is not of this training", m_layer));
    }
    m_epoch = s.epoch;
    m_batch = s.batch;
    m_steps = s.step;
    m_seconds += s.seconds;
    m_epoch_mse = s.epoch_mse;
    set_values(m_step.parameters(), s.parameters);
    set_values(m_step.first_moment(), s.first_moment);
    set_values(m_step.second_moment(), s.second_moment);
    Kokkos::deep_copy(m_step.loss(), s.loss);
  }

  bool is_done() const override { return m_epoch >= m_options.epochs; }

  bool run_epoch(const StopRequest& stop, const LayerProgress& progress) override {
    if (is_done()) return true;
    const auto start = base::Clock::now();
    const double before = m_seconds;
    const ExecutionSpace exec;
    const std::int64_t rows = training();
    const Order order = epoch_order();
    const double pi = 3.14159265358979323846;
    const double rate = 0.5 * m_options.learning_rate *
                        (1 + std::cos(pi * static_cast<double>(m_epoch) / m_options.epochs));
    if (m_batch == 0) Kokkos::deep_copy(exec, m_step.loss(), 0.0);
    while (m_batch < batches()) {
      const std::int64_t begin = m_batch * m_options.batch;
      m_step.differentiate(exec, m_pairs.hidden(), m_pairs.scores, order, begin,
                           std::min(m_options.batch, rows - begin));
      ++m_steps;
      ++m_batch;
      m_step.update(exec, m_options.clip, adam_step(rate));
      if (progress) {
        // Batches are launched asynchronously, so a device has a few in its queue.
        progress(static_cast<double>(m_steps) /
                 (static_cast<double>(batches()) * m_options.epochs));
      }
      if (m_batch < batches() && stop && stop()) break;
    }
    const double sum = loss();  // waits for the device
    m_seconds = before + base::seconds_since(start);
    if (m_batch < batches()) return false;
    m_epoch_mse.push_back(sum / (static_cast<double>(rows) * static_cast<double>(m_heads)));
    if (!std::isfinite(m_epoch_mse.back())) {
      throw Error(
          fmt::format("layer {}: training diverged in epoch {}: the error is not finite; "
                      "a smaller learning rate may help",
                      m_layer, m_epoch + 1));
    }
    m_batch = 0;
    ++m_epoch;
    return true;
  }

  TrainedLayer result() override {
    const auto start = base::Clock::now();
    TrainedLayer trained;
    SurrogateLayer& s = trained.surrogate;
    s.inputs = m_inputs;
    s.hidden = m_hidden;
    s.outputs = m_heads;
    const std::vector<float> all = values_of(m_step.parameters());
    auto at = all.begin();
    const auto take = [&](std::vector<float>& part, std::int64_t count) {
      part.assign(at, at + count);
      at += count;
    };
    take(s.weight1, m_hidden * m_inputs);
    take(s.bias1, m_hidden);
    take(s.weight2, m_heads * m_hidden);
    take(s.bias2, m_heads);

    LayerReport& report = trained.report;
    report.layer = m_layer;
    report.training = training();
    report.dropped = m_pairs.dropped;
    report.epoch_mse = m_epoch_mse;
    report.training_mse =
        m_epoch_mse.empty() ? std::numeric_limits<double>::quiet_NaN() : m_epoch_mse.back();
    train::judge(m_pairs.validation_scores, predictions(), m_heads, report);
    report.seconds = m_seconds + base::seconds_since(start);
    return trained;
  }

 private:
  std::int64_t training() const { return static_cast<std::int64_t>(m_pairs.training.size()); }
  std::int64_t batches() const { return (training() + m_options.batch - 1) / m_options.batch; }

  double loss() const {
    double value = 0;
    Kokkos::deep_copy(value, Kokkos::subview(m_step.loss(), 0));
    return value;
  }

  void initialize() {
    std::mt19937_64 random(train::seed_of(m_options.seed, train::RandomStream::initial,
                                          static_cast<std::uint64_t>(m_layer), 0));
    std::vector<float> values;
    values.reserve(static_cast<std::size_t>(m_step.size()));
    // torch.nn.Linear draws weights and biases uniformly within 1 / sqrt(inputs).
    const auto draw = [&](std::int64_t count, std::int64_t inputs) {
      const double bound = 1 / std::sqrt(static_cast<double>(inputs));
      for (std::int64_t i = 0; i < count; ++i) {
        values.push_back(static_cast<float>(bound * (2 * train::uniform(random) - 1)));
      }
    };
    draw(m_hidden * (m_inputs + 1), m_inputs);
    draw(m_heads * (m_hidden + 1), m_hidden);
    set_values(m_step.parameters(), values);
  }

  Order epoch_order() const {
    std::vector<std::int64_t> order =
        train::permutation(training(), train::seed_of(m_options.seed, train::RandomStream::order,
                                                      static_cast<std::uint64_t>(m_layer),
                                                      static_cast<std::uint64_t>(m_epoch)));
    for (std::int64_t& row : order) row = m_pairs.training[static_cast<std::size_t>(row)];
    return order_view(order);
  }

  AdamStep adam_step(double rate) const {
    const auto t = static_cast<double>(m_steps);
    AdamStep step{};
    step.decay = static_cast<float>(1 - rate * m_options.weight_decay);
    step.rate = static_cast<float>(rate / (1 - std::pow(beta1, t)));
    step.root = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, t)));
    step.beta1 = static_cast<float>(beta1);
    step.beta2 = static_cast<float>(beta2);
    step.epsilon = static_cast<float>(epsilon);
    return step;
  }

  std::vector<float> predictions() {
    const ExecutionSpace exec;
    const auto count = static_cast<std::int64_t>(m_pairs.validation.size());
    const Order order = order_view(m_pairs.validation);
    std::vector<float> all(static_cast<std::size_t>(count * m_heads));
    for (std::int64_t begin = 0; begin < count; begin += m_rows) {
      const std::int64_t rows = std::min(m_rows, count - begin);
      const linalg::ConstMatrix output = m_step.predict(exec, m_pairs.hidden(), order, begin, rows);
      const Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace,
                         Kokkos::MemoryTraits<Kokkos::Unmanaged>>
          target(all.data() + begin * m_heads, rows, m_heads);
      base::fence(exec, "kvzap::train: predictions");
      Kokkos::deep_copy(target, output);
    }
    return all;
  }

  base::Clock::time_point m_start = base::Clock::now();
  MlpOptions m_options;
  int m_layer;
  std::int64_t m_inputs, m_hidden, m_heads;
  train::LayerPairs m_pairs;
  std::int64_t m_rows;  // of the largest batch
  MlpStep m_step;
  std::int64_t m_epoch = 0, m_batch = 0, m_steps = 0;
  double m_seconds = 0;
  std::vector<double> m_epoch_mse;
};

}  // namespace

MlpTrainer::MlpTrainer(const PairSource& source, int layer, const PairSplit& split,
                       const MlpOptions& options) {
  check_mlp(options, source.info());
  m_impl = std::make_unique<Trainer>(source, layer, split, options);
}

MlpTrainer::~MlpTrainer() = default;
MlpTrainer::State MlpTrainer::state() const { return m_impl->state(); }
void MlpTrainer::restore(const State& state) { m_impl->restore(state); }
bool MlpTrainer::run_epoch(const StopRequest& stop, const LayerProgress& progress) {
  return m_impl->run_epoch(stop, progress);
}
bool MlpTrainer::is_done() const { return m_impl->is_done(); }
TrainedLayer MlpTrainer::result() { return m_impl->result(); }

std::int64_t MlpTrainer::bytes(const PairsInfo& info, const MlpOptions& options) {
  const auto pair = static_cast<std::int64_t>(size_of(info.dtype)) * info.hidden_size +
                    static_cast<std::int64_t>(sizeof(float)) * info.kv_heads;
  // The order of rows is in memory twice at the start of an epoch.
  const auto indices = static_cast<std::int64_t>(3 * sizeof(std::int64_t));
  return info.pairs * (pair + indices) +
         MlpStep::bytes(info.hidden_size, hidden_units(info, options), info.kv_heads,
                        std::min(options.batch, std::max<std::int64_t>(info.pairs, 1)));
}

}  // namespace kvzap
