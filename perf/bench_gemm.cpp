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
linalg::LinearWeights plain_rows(DType dtype, std::int64_t outputs, std::int64_t inputs) {
  const linalg::Bytes bytes(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::perf::weights"),
      linalg::LinearWeights::bytes_of(linalg::WeightLayout::rows, dtype, outputs, inputs));
  if constexpr (base::runs_on_host) base::advise_huge_pages(bytes.data(), bytes.size());
  return {linalg::WeightLayout::rows, dtype, outputs, inputs, bytes};
}

template <class Value>
linalg::LinearWeights random_weights(const Shape& shape, linalg::PackedAllocator& allocate) {
  constexpr DType dtype = DTypeOf<Value>::value;
  const auto plain = plain_rows(dtype, shape.outputs, shape.inputs);
  const auto rows = plain.rows<Value>();
  const auto host = Kokkos::create_mirror_view(rows);
  std::minstd_rand draw;
  for (std::size_t i = 0; i < host.size(); ++i) {
    host.data()[i] = Value(4e-2f * (static_cast<float>(draw() & 0xffff) / 65536.0f - 0.5f));
  }
  if (linalg::packs_weights()) {
    const auto packed = linalg::packed_weights(allocate, dtype, shape.outputs, shape.inputs);
    linalg::pack_rows(host.data(), 0, shape.outputs, packed);
    return packed;
  }
  Kokkos::deep_copy(rows, host);
  return plain;
}

/// Copies the values to separate memory.
linalg::LinearWeights copy_of(const linalg::LinearWeights& weights,
                              linalg::PackedAllocator& allocate) {
  const auto copy =
      weights.is_packed()
          ? linalg::packed_weights(allocate, weights.dtype(), weights.outputs(), weights.inputs())
          : plain_rows(weights.dtype(), weights.outputs(), weights.inputs());
  Kokkos::deep_copy(copy.memory(), weights.memory());
  return copy;
}

/// Quantised weights with random codes and equal scales.
linalg::LinearWeights quantised_weights(const Shape& shape, const linalg::quantised::Format& format,
                                        linalg::PackedAllocator& allocate) {
  using linalg::quantised::Matrix;
  const auto matrix = std::make_shared<Matrix>(
      std::vector<Matrix::Part>{{&format, shape.outputs}},
      std::vector<std::pair<std::int64_t, std::int64_t>>{{0, shape.inputs}});
  const auto data = allocate(matrix->bytes(), 1);
  matrix->place(data);
  const auto host = Kokkos::create_mirror_view(data);
  std::minstd_rand draw;
  for (std::size_t i = 0; i < host.size(); ++i) host(i) = static_cast<std::uint8_t>(draw());
  const auto& section = matrix->sections().front();
  for (std::int64_t panel = 0; panel < section.n_panels(); ++panel) {
    const std::int64_t begin = panel * section.panels.panel_bytes();
    std::fill_n(host.data() + begin, section.panels.scales_size(), std::uint8_t{0x11});
  }
  Kokkos::deep_copy(data, host);
  return {DType::bf16, matrix};
}

/// Matrices of one shape that together have cycle_bytes; made at first use. Of `format`, if given.
template <class Value>
class Cycle {
 public:
  explicit Cycle(Shape shape, const linalg::quantised::Format* format = nullptr)
      : m_shape(std::move(shape)), m_format(format) {}

  const std::vector<linalg::LinearWeights>& matrices() {
    if (m_matrices.empty()) {
      m_matrices.push_back(make());
      const auto bytes = static_cast<std::int64_t>(m_matrices.front().bytes());
      const std::int64_t count = std::max<std::int64_t>(2, (cycle_bytes + bytes - 1) / bytes);
      while (static_cast<std::int64_t>(m_matrices.size()) < count) {
        m_matrices.push_back(m_format ? make() : copy_of(m_matrices.front(), m_allocator));
      }
    }
    return m_matrices;
  }
  const linalg::LinearWeights& next() { return matrices()[m_next++ % matrices().size()]; }
  void clear() {
    m_matrices.clear();
    m_allocator = {};
  }
  const Shape& shape() const { return m_shape; }

 private:
  linalg::LinearWeights make() {
    if constexpr (std::is_same_v<Value, bfloat16>) {
      if (m_format) return quantised_weights(m_shape, *m_format, m_allocator);
    }
    return random_weights<Value>(m_shape, m_allocator);
  }

  Shape m_shape;
  const linalg::quantised::Format* m_format;
  std::vector<linalg::LinearWeights> m_matrices;
  linalg::PackedAllocator m_allocator;
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
  const auto bytes = static_cast<double>(cycle.matrices().front().bytes());
  const bool is_decode = rows <= 16;
  const double per_iteration = is_decode ? static_cast<double>(cycle.matrices().size()) : 1;
  linear(exec, x, cycle.next(), linalg::ConstVector(), y);  // first call: the scratch memory grows
  const Yardstick limit(is_decode                                         ? Limit::read
                        : cycle.matrices().front().quantised() != nullptr ? Limit::byte_dots
                        : std::is_same_v<Value, bfloat16>                 ? Limit::gemm_bf16
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
               const std::vector<std::int64_t>& row_counts, std::string_view format = {}) {
  const ModelConfig config = ModelConfig::load(model_folder(options, name));
  for (const Shape& shape : shapes_of(config)) {
    const auto cycle =
        std::make_shared<Cycle<Value>>(shape, linalg::quantised::find_format(format));
    for (const std::int64_t rows : row_counts) {
      const bool is_decode = rows <= 16;
      const double flops = 2.0 * rows * shape.outputs * shape.inputs;
      const std::int64_t iterations =
          is_decode ? 2 : std::clamp<std::int64_t>(std::llround(2e10 / flops), 1, 20);
      const std::string title =
          fmt::format("gemm/{}/{}/{}/{}/rows:{}", is_decode ? "decode" : "prefill", name,
                      format.empty() ? name_of(DTypeOf<Value>::value) : format, shape.name, rows);
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
  for (const std::int64_t rows : {32, 64, 512}) all.push_back(rows);
  std::vector<std::int64_t> large = all;
  large.push_back(4096);
  if (options.quick) {
    add_model<bfloat16>(options, "Qwen3-0.6B", {1, 8, 512});
    add_model<float>(options, "Qwen3-0.6B", {1, 512});
    add_model<bfloat16>(options, "Qwen3-0.6B", {1, 8, 512}, "Q4_K");
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
  for (const char* format : {"Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "IQ4_NL", "MXFP4"}) {
    add_model<bfloat16>(options, "Qwen3-0.6B", {1, 2, 4, 8, 16, 32, 33, 64, 128, 512, 4096},
                        format);
  }
  add_model<bfloat16>(options, "Qwen3-8B", large, "Q8_0");
  add_model<bfloat16>(options, "Qwen3-8B", large, "Q4_K");
}

}  // namespace kvzap::perf
