#include <algorithm>
#include <cmath>
#include <map>

#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/torch_random.hpp"

namespace kvzap::policy {
namespace {

using Floats = Kokkos::View<float*, MemorySpace>;
using Total = Kokkos::View<double, MemorySpace>;

enum class Combination { key, value, mean, product };

Combination combination_of(const std::string& name) {
  if (name == "key") return Combination::key;
  if (name == "value") return Combination::value;
  return name == "kv-avg" ? Combination::mean : Combination::product;
}

// Dimensions of the random projection.
constexpr std::int64_t projected = 20;

void squared_norms(const ExecutionSpace& exec, const PolicyLayer::RowsView& rows,
                   const Floats& squares) {
  const std::int64_t dim = rows.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::cur_norms", PolicyRange(exec, 0, rows.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) { squares(r) = dot(&rows(r, 0), &rows(r, 0), dim); });
}

// Divides by the sum over windows of `window` rows; a window of zeros is unchanged.
void normalize_windows(const ExecutionSpace& exec, std::int64_t rows, std::int64_t window,
                       const Floats& squares) {
  Kokkos::parallel_for(
      "kvzap::policy::cur_windows", PolicyRange(exec, 0, (rows + window - 1) / window),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t end = (i + 1) * window < rows ? (i + 1) * window : rows;
        double sum = 0;
        for (std::int64_t r = i * window; r < end; ++r) sum += squares(r);
        if (sum == 0) return;
        for (std::int64_t r = i * window; r < end; ++r) {
          squares(r) = static_cast<float>(squares(r) / sum);
        }
      });
}

void combine(const ExecutionSpace& exec, Combination combination, const Floats& key,
             const Floats& value, const HeadScores& scores, const Total& total) {
  Kokkos::parallel_reduce(
      "kvzap::policy::cur_combine", PolicyRange(exec, 0, scores.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r, double& sum) {
        const float score = combination == Combination::key     ? key(r)
                            : combination == Combination::value ? value(r)
                            : combination == Combination::mean  ? 0.5f * (key(r) + value(r))
                                                                : key(r) * value(r);
        scores(r) = score;
        sum += score;
      },
      total);
}

void finish(const ExecutionSpace& exec, std::int64_t sink, const Total& total,
            const HeadScores& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::cur_finish", PolicyRange(exec, 0, scores.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        if (r < sink) {
          scores(r) = 1;
        } else if (total() != 0) {
          scores(r) = static_cast<float>(scores(r) / total());
        }
      });
}

/// The projection of each layer. Policies of several sequences share it.
class Projections {
 public:
  explicit Projections(std::uint32_t seed) : m_normals(seed) {}

  /// Returns (projected, head_dim): the transposed projection, the same for all heads, keys and
  /// values.
  linalg::Matrix of_layer(int layer, std::int64_t head_dim) {
    linalg::Matrix& projection = m_layers[layer];
    if (projection.extent(0) == 0) {
      const std::vector<float> normals = m_normals.draw(layer, head_dim * projected);
      projection = linalg::Matrix("kvzap::policy::cur_projection", projected, head_dim);
      const auto host = Kokkos::create_mirror_view(projection);
      for (std::int64_t d = 0; d < head_dim; ++d) {
        for (std::int64_t j = 0; j < projected; ++j) {
          host(j, d) = normals[d * projected + j] / std::sqrt(static_cast<float>(projected));
        }
      }
      Kokkos::deep_copy(projection, host);
    }
    return projection;
  }

 private:
  LayerNormals m_normals;
  std::map<int, linalg::Matrix> m_layers;
};

/// Estimates the leverage of a row in a CUR decomposition from norms. It divides k² = ||k||² and v²
/// = ||v||² each by its sum over the surrounding window of rows, multiplies them, and divides by
/// the sum over all rows of the head. The first `sink` rows have the score 1 (Sengupta, Chaudhary,
/// Chakraborty: "CurDKV", arXiv 2509.15038).
///
/// One pass over keys and values, (rows, head_dim) of each head; two floats per row. The random
/// projection adds 40 * head_dim operations and 20 floats per row.
///
/// Windows (on by default) are an addition of kvpress, which turns the paper's Gaussian projection
/// off by default; `random-leverage=on,local=off` is the paper's form. The random numbers are those
/// that kvpress draws after torch.manual_seed(seed). Windows and sinks count rows of the cache.
class Cur final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t sink = integer("sink", 4, {0, 1e9}, "first tokens that stay");
    std::string combination =
        text("leverage-type", "kv-product", {"key", "value", "kv-avg", "kv-product"},
             "the norms that count");
    bool projects = flag("random-leverage", false, "project rows by a random matrix first");
    bool local = flag("local", true, "divide by sums over windows");
    std::int64_t window = integer("window", 16, {1, 1e9}, "tokens of a window");
    std::int64_t seed = integer("seed", 0, {0, 4294967295.0}, "seed of the random matrix");
  };

  Cur(const Parameters& options, std::shared_ptr<Projections> projections)
      : m_options(options),
        m_projections(std::move(projections)),
        m_total("kvzap::policy::cur_total") {}

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const ExecutionSpace& exec = layer.exec();
    const Combination combination = combination_of(m_options.combination);
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t rows = layer.rows(h);
      if (rows == 0) continue;
      base::reserve_scratch(m_key, rows, "kvzap::policy::cur_keys");
      base::reserve_scratch(m_value, rows, "kvzap::policy::cur_values");
      if (combination != Combination::value) measure(layer, layer.keys(h), m_key);
      if (combination != Combination::key) measure(layer, layer.values(h), m_value);
      const HeadScores of_head = scores_of(scores, h, 0, rows);
      combine(exec, combination, m_key, m_value, of_head, m_total);
      finish(exec, m_options.sink, m_total, of_head);
    }
  }

 private:
  void measure(PolicyLayer& layer, const PolicyLayer::RowsView& rows, const Floats& squares) {
    const ExecutionSpace& exec = layer.exec();
    const std::int64_t count = rows.extent(0);
    if (m_options.projects) {
      base::reserve_scratch(m_projected, count * projected, "kvzap::policy::cur_projected");
      const linalg::Matrix output(m_projected.data(), count, projected);
      const linalg::Matrix projection =
          m_projections->of_layer(layer.layer(), layer.extents().head_dim);
      linalg::multiply_nt(exec, 1, rows, projection, 0, output);
      squared_norms(exec, output, squares);
    } else {
      squared_norms(exec, rows, squares);
    }
    if (m_options.local) normalize_windows(exec, count, m_options.window, squares);
  }

  Parameters m_options;
  std::shared_ptr<Projections> m_projections;
  Total m_total;
  Floats m_key;    // (row)
  Floats m_value;  // (row)
  Floats m_projected;
};

}  // namespace

PolicyInfo cur() {
  PolicyInfo info;
  info.name = "cur";
  info.paper = "CurDKV, arXiv 2509.15038";
  info.formula = "||k||^2 ||v||^2, each over its sum in a window";
  info.needs = "keys, values";
  info.cost = "O(rows * head_dim), two floats per row";
  info.scores_parts = true;
  info.make_with<Cur::Parameters>([](const auto& p, const PolicySetup&) {
    const auto projections = std::make_shared<Projections>(static_cast<std::uint32_t>(p.seed));
    return [=] { return std::make_unique<Cur>(p, projections); };
  });
  return info;
}

}  // namespace kvzap::policy
