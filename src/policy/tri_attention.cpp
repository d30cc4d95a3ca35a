#include <algorithm>
#include <cmath>

#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/row_protection.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;

using Doubles = Kokkos::View<double*, MemorySpace>;

// Rows whose magnitudes exist at the same time.
constexpr std::int64_t magnitude_rows = 1024;

/// RoPE's angles of the tokens (token, 2, pair): cosines and sines over RoPE's factor.
struct Turns {
  const float* values;
  std::int64_t pairs;
};

// centres (query head, head_dim) = mean of the queries before RoPE; lengths (query head, pair) =
// mean length of their pairs of dimensions.
void find_centres(const ExecutionSpace& exec, const TokenBlock& block, const Turns& turns,
                  const Matrix& centres, const Matrix& lengths) {
  const std::int64_t pairs = turns.pairs;
  const auto queries = block.queries;
  const std::int64_t count = block.count;
  Kokkos::parallel_for(
      "kvzap::tri_attention::centres", RowRange(exec, 0, lengths.size()),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / pairs;
        const std::int64_t d = i % pairs;
        double real = 0, imaginary = 0, length = 0;
        for (std::int64_t t = 0; t < count; ++t) {
          const double cosine = turns.values[t * 2 * pairs + d];
          const double sine = turns.values[t * 2 * pairs + pairs + d];
          const double x = queries(t, head, d);
          const double y = queries(t, head, d + pairs);
          const double a = x * cosine + y * sine;
          const double b = y * cosine - x * sine;
          real += a;
          imaginary += b;
          length += base::math::sqrt(a * a + b * b);
        }
        const auto n = static_cast<double>(count);
        centres(head, d) = static_cast<float>(real / n);
        centres(head, d + pairs) = static_cast<float>(imaginary / n);
        lengths(head, d) = static_cast<float>(length / n);
      });
}

/// Distances 1, 2, 4, … from the newest token.
struct Distances {
  std::int64_t newest;
  std::int64_t most;
  double rope_scale;
};

// means (pair, 2) = mean cosine and sine of RoPE's angles at these distances, times its factor.
void mean_turns(const ExecutionSpace& exec, const Distances& distances,
                const Kokkos::View<const float*, MemorySpace>& frequencies, const Doubles& means) {
  Kokkos::parallel_for(
      "kvzap::tri_attention::turns", RowRange(exec, 0, frequencies.extent(0)),
      KOKKOS_LAMBDA(std::int64_t d) {
        double cosine = 0, sine = 0;
        std::int64_t count = 0;
        for (std::int64_t distance = 1; distance <= distances.most; distance *= 2) {
          const double angle = static_cast<double>(distances.newest + distance) *
                               static_cast<double>(frequencies(d));
          cosine += base::math::cos(angle);
          sine += base::math::sin(angle);
          ++count;
        }
        means(2 * d) = distances.rope_scale * cosine / static_cast<double>(count);
        means(2 * d + 1) = distances.rope_scale * sine / static_cast<double>(count);
      });
}

// Turns each centre by mean_turns. Replaces the mean length by its excess over the centre's length,
// times RoPE's factor.
void look_ahead(const ExecutionSpace& exec, const Doubles& means, double rope_scale,
                const Matrix& centres, const Matrix& lengths) {
  const auto pairs = static_cast<std::int64_t>(lengths.extent(1));
  Kokkos::parallel_for(
      "kvzap::tri_attention::ahead", RowRange(exec, 0, lengths.size()),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t head = i / pairs;
        const std::int64_t d = i % pairs;
        const double cosine = means(2 * d), sine = means(2 * d + 1);
        const double x = centres(head, d), y = centres(head, d + pairs);
        centres(head, d) = static_cast<float>(x * cosine - y * sine);
        centres(head, d + pairs) = static_cast<float>(x * sine + y * cosine);
        lengths(head, d) =
            static_cast<float>(rope_scale * (lengths(head, d) - base::math::sqrt(x * x + y * y)));
      });
}

// magnitudes(r, pair) = length of each pair of dimensions of a key
void key_magnitudes(const ExecutionSpace& exec, const ConstMatrix& keys, const Matrix& magnitudes) {
  const auto pairs = static_cast<std::int64_t>(magnitudes.extent(1));
  Kokkos::parallel_for(
      "kvzap::tri_attention::magnitudes", RowRange(exec, 0, magnitudes.size()),
      KOKKOS_LAMBDA(std::int64_t i) {
        const float x = keys(i / pairs, i % pairs);
        const float y = keys(i / pairs, i % pairs + pairs);
        magnitudes(i / pairs, i % pairs) = base::math::sqrt(x * x + y * y);
      });
}

// moments (query head of the group, 2): mean and 1 / deviation of a query head's scores.
void find_moments(const ExecutionSpace& exec, const Matrix& values, const Doubles& moments) {
  const auto rows = static_cast<std::int64_t>(values.extent(1));
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::tri_attention::moments", Team(exec, static_cast<int>(values.extent(0)), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const int g = team.league_rank();
        const auto n = static_cast<double>(rows);
        double sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, rows),
            [&](std::int64_t r, double& partial) { partial += values(g, r); }, sum);
        const double mean = sum / n;
        double squares = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, rows),
            [&](std::int64_t r, double& partial) {
              partial += (values(g, r) - mean) * (values(g, r) - mean);
            },
            squares);
        Kokkos::single(Kokkos::PerTeam(team), [&] {
          const double deviation = base::math::sqrt(squares / n);
          moments(2 * g) = mean;
          moments(2 * g + 1) = 1 / (deviation < 1e-6 ? 1e-6 : deviation);
        });
      });
}

void largest_of_group(const ExecutionSpace& exec, const Matrix& values, const Doubles& moments,
                      const HeadScores& scores) {
  const auto group = static_cast<std::int64_t>(values.extent(0));
  Kokkos::parallel_for(
      "kvzap::tri_attention::scores", RowRange(exec, 0, values.extent(1)),
      KOKKOS_LAMBDA(std::int64_t r) {
        double most = (values(0, r) - moments(0)) * moments(1);
        for (std::int64_t g = 1; g < group; ++g) {
          const double other = (values(g, r) - moments(2 * g)) * moments(2 * g + 1);
          if (other > most) most = other;
        }
        scores(r) = static_cast<float>(most);
      });
}

/// TriAttention (Mao et al., arXiv 2604.04921): queries before RoPE stay near a centre, so the
/// distance of a key decides how much attention it will get. With pairs of dimensions f as complex
/// numbers before RoPE, frequencies w_f, and the newest position t,
///
///   s_g(r) = mean over d = 1, 2, 4, … <= `distance` of
///              sum_f |E q_f| |k_f| cos(w_f (t + d - position(r)) + arg(E q_f) - arg(k_f))
///            + sum_f (E |q_f| - |E q_f|) |k_f|
///   s(r) = max over the query heads g of the group of (s_g(r) - mean) / standard deviation
///
/// Mean and deviation are those of s_g over the rows of the head. RoPE's factor multiplies both
/// sums twice. The first sum equals a product of the cached key with the centre, rotated to later
/// positions and averaged, so no key is rotated back.
///
/// Shapes: queries (history, query heads, head_dim), centres (query heads, head_dim). Cost per
/// query head: 3 rows head_dim operations, and a pass over the queries; memory O(rows), 1,024 rows'
/// magnitudes and the angles of `history` tokens.
///
/// The paper takes E q and E |q| from other texts, in advance. Here the newest `history` tokens of
/// the sequence give them. The paper keeps the prompt; here it competes. Each KV head chooses its
/// own rows, one of the variants of the authors' code.
class TriAttention final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t history =
        integer("history", 256, {1, 1 << 20}, "newest tokens whose queries give the centres");
    std::int64_t distance =
        integer("distance", 65536, {1, 1 << 30}, "largest distance of a later query");
  };

  explicit TriAttention(const Parameters& parameters) : m_parameters(parameters) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.recent = m_parameters.history;
    needs.frequencies = true;
    return needs;
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    find_queries(layer);
    const std::int64_t group = layer.extents().group;
    for (int h = 0; h < layer.heads(); ++h) {
      if (layer.rows(h) == 0) continue;
      const Matrix values = score_group(layer, h);
      base::reserve_scratch(m_moments, group * 2, "kvzap::tri_attention::moments");
      find_moments(layer.exec(), values, m_moments);
      largest_of_group(layer.exec(), values, m_moments, scores_of(scores, h, 0, layer.rows(h)));
    }
  }

 private:
  // Sets the centres of later queries of all query heads, and the lengths beside them.
  void find_queries(PolicyLayer& layer) {
    const ExecutionSpace& exec = layer.exec();
    const TokenBlock newest = layer.recent();
    const auto frequencies = layer.inverse_frequencies();
    const std::int64_t dim = layer.extents().head_dim;
    const std::int64_t heads = std::int64_t{layer.heads()} * layer.extents().group;
    base::reserve_scratch(m_turns, newest.count * dim, "kvzap::tri_attention::turns");
    base::reserve_scratch(m_centres, heads * dim, "kvzap::tri_attention::centres");
    base::reserve_scratch(m_lengths, heads * dim / 2, "kvzap::tri_attention::lengths");
    const Matrix centres(m_centres.data(), heads, dim);
    const Matrix lengths(m_lengths.data(), heads, dim / 2);
    const double rope_scale = layer.extents().rope_scale;
    fill_turns(exec, newest.first, 1, newest.count, frequencies, 1 / rope_scale, m_turns.data());
    find_centres(exec, newest, {m_turns.data(), dim / 2}, centres, lengths);
    base::reserve_scratch(m_means, dim, "kvzap::tri_attention::means");
    mean_turns(exec, {newest.first + newest.count - 1, m_parameters.distance, rope_scale},
               frequencies, m_means);
    look_ahead(exec, m_means, rope_scale, centres, lengths);
  }

  // Returns the scores (query head of the group, row) of a head.
  Matrix score_group(PolicyLayer& layer, int head) {
    const ExecutionSpace& exec = layer.exec();
    const std::int64_t group = layer.extents().group;
    const std::int64_t dim = layer.extents().head_dim;
    const std::int64_t rows = layer.rows(head);
    base::reserve_scratch(m_values, group * rows, "kvzap::tri_attention::values");
    base::reserve_scratch(m_magnitudes, magnitude_rows * dim / 2,
                          "kvzap::tri_attention::magnitudes");
    const ConstMatrix centres(m_centres.data() + head * group * dim, group, dim);
    const ConstMatrix lengths(m_lengths.data() + head * group * dim / 2, group, dim / 2);
    Matrix values(m_values.data(), group, rows);
    const PolicyLayer::RowsView keys = layer.keys(head);
    linalg::multiply_nt(exec, 1, centres, keys, 0, values);
    for (std::int64_t begin = 0; begin < rows; begin += magnitude_rows) {
      const std::int64_t end = std::min(rows, begin + magnitude_rows);
      const auto tile = std::make_pair(begin, end);
      const Matrix magnitudes(m_magnitudes.data(), end - begin, dim / 2);
      key_magnitudes(exec, Kokkos::subview(keys, tile, Kokkos::ALL), magnitudes);
      linalg::multiply_nt(exec, 1, lengths, magnitudes, 1,
                          Kokkos::subview(values, Kokkos::ALL, tile));
    }
    return values;
  }

  Parameters m_parameters;
  RowVector m_turns;       // (token, 2, pair)
  RowVector m_centres;     // (query head, head_dim)
  RowVector m_lengths;     // (query head, pair)
  RowVector m_values;      // (query head of the group, row)
  RowVector m_magnitudes;  // (row of a tile, pair)
  Doubles m_means;         // (pair, 2)
  Doubles m_moments;       // (query head of the group, 2)
};

}  // namespace

PolicyInfo tri_attention() {
  PolicyInfo info;
  info.name = "tri-attention";
  info.paper = "TriAttention, arXiv 2604.04921";
  info.formula =
      "attention of mean queries at later positions, by distance, plus the deviation of "
      "their lengths times |k|; largest z-score of the group";
  info.needs = "queries of the newest tokens, keys";
  info.cost = "time O((history + rows) d) per query head; memory O(rows)";
  info.make_class<TriAttention>();
  return info;
}

}  // namespace kvzap::policy
