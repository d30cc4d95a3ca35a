// The linear maps of a layer, with the extents of one rank. Blocks of prefill are compared with the
// rate of matrix products, the few rows of decode with the bandwidth of reading the weights.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "common.hpp"
#include "linalg/gemm.hpp"

namespace kvzap::perf {
namespace {

// Weights that one pass reads, so that none remain in the caches from the pass before.
constexpr std::int64_t cycle_bytes = std::int64_t{256} << 20;

struct Shape {
  std::string name;
  std::int64_t outputs;
  std::int64_t inputs;
};

/// Returns the shapes as Model splits them over ranks. Of k and v, and of gate and up, which are
/// equal, it returns one.
std::vector<Shape> shapes_of(const ModelConfig& config) {
  const std::int64_t ranks = world().size();
  const std::int64_t q = config.num_attention_heads * config.head_dim / ranks;
  const std::int64_t kv = config.num_key_value_heads * config.head_dim / ranks;
  const std::int64_t intermediate = config.intermediate_size / ranks;
  const std::int64_t hidden = config.hidden_size;
  return {{"q", q, hidden},
          {"kv", kv, hidden},
          {"o", hidden, q},
          {"gate", intermediate, hidden},
          {"down", hidden, intermediate}};
}

/// Allocates on huge pages, as the model's loader does.
template <class Value>
typename linalg::LinearWeights<Value>::Rows plain_rows(std::int64_t outputs, std::int64_t inputs) {
  const typename linalg::LinearWeights<Value>::Rows rows(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::perf::weights"), outputs, inputs);
  if constexpr (base::runs_on_host) {
    base::advise_huge_pages(rows.data(), rows.size() * sizeof(Value));
  }
  return rows;
}

template <class Value>
linalg::LinearWeights<Value> random_weights(const Shape& shape,
                                            linalg::PackedAllocator<Value>& allocate) {
  const auto rows = plain_rows<Value>(shape.outputs, shape.inputs);
  const auto host = Kokkos::create_mirror_view(rows);
  std::minstd_rand draw;
  for (std::size_t i = 0; i < host.size(); ++i) {
    host.data()[i] = Value(4e-2f * (static_cast<float>(draw() & 0xffff) / 65536.0f - 0.5f));
  }
  if (linalg::packs_weights<Value>()) {
    const auto packed = allocate(shape.outputs, shape.inputs);
    linalg::pack_rows(host.data(), 0, shape.outputs, packed);
    return packed;
  }
  Kokkos::deep_copy(rows, host);
  return linalg::LinearWeights<Value>(rows);
}

/// Copies the values to separate memory.
template <class Value>
linalg::LinearWeights<Value> copy_of(const linalg::LinearWeights<Value>& weights,
                                     linalg::PackedAllocator<Value>& allocate) {
  if (weights.is_packed()) {
    const auto copy = allocate(weights.outputs(), weights.inputs());
    Kokkos::deep_copy(copy.packed(), weights.packed());
    return copy;
  }
  const auto rows = plain_rows<Value>(weights.outputs(), weights.inputs());
  Kokkos::deep_copy(rows, weights.rows());
  return linalg::LinearWeights<Value>(rows);
}

/// Matrices of one shape that together have cycle_bytes; made at first use.
template <class Value>
class Cycle {
 public:
  explicit Cycle(Shape shape) : m_shape(std::move(shape)) {}

  const std::vector<linalg::LinearWeights<Value>>& matrices() {
    if (m_matrices.empty()) {
      const std::int64_t bytes = m_shape.outputs * m_shape.inputs * sizeof(Value);
      const std::int64_t count = std::max<std::int64_t>(2, (cycle_bytes + bytes - 1) / bytes);
      m_matrices.push_back(random_weights<Value>(m_shape, m_allocator));
      while (static_cast<std::int64_t>(m_matrices.size()) < count) {
        m_matrices.push_back(copy_of(m_matrices.front(), m_allocator));
      }
    }
    return m_matrices;
  }
  const linalg::LinearWeights<Value>& next() { return matrices()[m_next++ % matrices().size()]; }
  void clear() {
    m_matrices.clear();
    m_allocator = {};
  }
  const Shape& shape() const { return m_shape; }

 private:
  Shape m_shape;
  std::vector<linalg::LinearWeights<Value>> m_matrices;
  linalg::PackedAllocator<Value> m_allocator;
  std::size_t m_next = 0;
};

template <class Value>
void run(benchmark::State& state, Cycle<Value>& cycle, std::int64_t rows) {
  const Shape& shape = cycle.shape();
  linalg::Matrix x("kvzap::perf::x", rows, shape.inputs);
  const linalg::Matrix y("kvzap::perf::y", rows, shape.outputs);
  Kokkos::deep_copy(x, 0.5f);
  linalg::LinearMap linear;
  const ExecutionSpace exec;
  const double products = static_cast<double>(rows) * shape.outputs * shape.inputs;
  const double bytes = static_cast<double>(shape.outputs) * shape.inputs * sizeof(Value);
  const bool is_decode = rows <= 16;
  const double per_iteration = is_decode ? static_cast<double>(cycle.matrices().size()) : 1;
  linear(exec, x, cycle.next(), linalg::ConstVector(), y);  // first call: the scratch memory grows
  const Yardstick limit(is_decode                         ? Limit::read
                        : std::is_same_v<Value, bfloat16> ? Limit::gemm_bf16
                                                          : Limit::gemm_f32);
  const double seconds =
      time_iterations(state,
                      [&] {
                        for (int i = 0; i < static_cast<int>(per_iteration); ++i) {
                          linear(exec, x, cycle.next(), linalg::ConstVector(), y);
                        }
                      }) /
      per_iteration;
  const int ranks = world().size();
  if (is_decode) {
    report_bytes(state, seconds, ranks * bytes, limit);
  } else {
    report_flops(state, seconds, ranks * 2 * products, limit);
  }
  state.SetLabel(fmt::format("{} x {} on each rank", shape.outputs, shape.inputs));
}

template <class Value>
void add_model(const Options& options, const std::string& name,
               const std::vector<std::int64_t>& row_counts) {
  const ModelConfig config = ModelConfig::load(model_folder(options, name));
  for (const Shape& shape : shapes_of(config)) {
    const auto cycle = std::make_shared<Cycle<Value>>(shape);
    for (const std::int64_t rows : row_counts) {
      const bool is_decode = rows <= 16;
      const double flops = 2.0 * rows * shape.outputs * shape.inputs;
      const std::int64_t iterations =
          is_decode ? 2 : std::clamp<std::int64_t>(std::llround(2e10 / flops), 1, 20);
      const std::string title =
          fmt::format("gemm/{}/{}/{}/{}/rows:{}", is_decode ? "decode" : "prefill", name,
                      name_of(DTypeOf<Value>::value), shape.name, rows);
      const bool is_last = rows == row_counts.back();
      const auto repetition = std::make_shared<int>(0);
      add(title, iterations, 5, [=](benchmark::State& state) {
        run(state, *cycle, rows);
        if (is_last && ++*repetition == repetitions_of(5)) cycle->clear();
      });
    }
  }
}

}  // namespace

void register_benchmarks(const Options& options) {
  const std::vector<std::int64_t> decode = {1, 2, 4, 8, 16};
  std::vector<std::int64_t> all = decode;
  all.push_back(512);
  std::vector<std::int64_t> large = all;
  large.push_back(4096);
  if (options.quick) {
    add_model<bfloat16>(options, "Qwen3-0.6B", {1, 8, 512});
    add_model<float>(options, "Qwen3-0.6B", {1, 512});
    return;
  }
  add_model<bfloat16>(options, "Qwen3-0.6B", large);
  add_model<bfloat16>(options, "Qwen3-8B", large);
  add_model<bfloat16>(options, "Llama-3.1-8B-Instruct", all);
  add_model<bfloat16>(options, "Qwen3-32B", all);
  add_model<float>(options, "Qwen3-0.6B", large);
  add_model<float>(options, "Qwen3-8B", all);
  add_model<half>(options, "Qwen3-0.6B", large);
  add_model<half>(options, "Qwen3-8B", all);
}

}  // namespace kvzap::perf
