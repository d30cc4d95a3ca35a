#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/model/safetensors.hpp>
#include <memory>

#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "policy/query_statistics.hpp"
#include "policy/registry.hpp"
#include "policy/row_products.hpp"
#include "policy/row_protection.hpp"
#include "policy/tensor_floats.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstMatrix;
using linalg::Matrix;

// Rows whose products with the covariances of a group exist at the same time.
constexpr std::int64_t expected_tile_rows = 512;

struct ExpectedParameters : PolicyParameters {
  std::int64_t future_positions = integer("future-positions", 512, {1, 1 << 24},
                                          "future positions over which RoPE is averaged");
  std::int64_t sink = integer("sink", 4, {0, 1 << 30},
                              "first positions: they stay and are excluded from statistics");
  bool has_covariance = flag("covariance", true, "whether to use the queries' covariance");
  bool has_vnorm = flag("vnorm", true, "whether scores are multiplied by |v|");
  double epsilon = number("epsilon", 0, {0, 1e6}, "added to scores before that multiplication");
  std::int64_t history =
      integer("history", 256, {1, 1 << 20},
              "newest tokens that give the statistics while the model generates");
  std::string statistics =
      file("statistics", "none",
           "safetensors file with query_mean and query_cov; none: from this sequence");
};

/// Query statistics from a file, as kvpress' ExpectedAttentionStats saves them.
class QueryStatisticsFile {
 public:
  QueryStatisticsFile(const std::string& file, const ModelConfig& config)
      : m_tensors(SafetensorsFolder::open(file)),
        m_heads(config.num_attention_heads),
        m_dim(config.head_dim),
        m_mean(m_tensors.at("query_mean", {config.num_hidden_layers, m_heads, m_dim})),
        m_covariance(m_tensors.at("query_cov", {config.num_hidden_layers, m_heads, m_dim, m_dim})) {
  }

  /// Reads the query heads of the layer's KV heads on this rank.
  void read(const PolicyLayer& layer, const Matrix& means,
            const QueryStatistics::Covariances& covariances) const {
    const auto host_means = Kokkos::create_mirror_view(means);
    const auto host_covariances = Kokkos::create_mirror_view(covariances);
    const int group = layer.extents().group;
    for (int h = 0; h < layer.heads(); ++h) {
      for (int g = 0; g < group; ++g) {
        const std::int64_t local = std::int64_t{h} * group + g;
        const std::int64_t head =
            layer.layer() * m_heads + std::int64_t{layer.extents().heads[h]} * group + g;
        floats_of(m_mean, head * m_dim, m_dim, host_means.data() + local * m_dim);
        if (covariances.size() == 0) continue;
        floats_of(m_covariance, head * m_dim * m_dim, m_dim * m_dim,
                  host_covariances.data() + local * m_dim * m_dim);
      }
    }
    Kokkos::deep_copy(layer.exec(), means, host_means);
    Kokkos::deep_copy(layer.exec(), covariances, host_covariances);
    base::fence(layer.exec(), "kvzap::expected_attention: the copies on the host end here");
  }

 private:
  SafetensorsFolder m_tensors;
  std::int64_t m_heads;
  std::int64_t m_dim;
  const TensorInfo& m_mean;
  const TensorInfo& m_covariance;
};

// forms (d, group * d): covariance / (2 d) of each query head of KV head `head`, side by side. The
// lower left quarter of each is added to the upper right one. k' F k stays the same, and the lower
// left quarter needs no multiplication.
void fill_forms(const ExecutionSpace& exec, const QueryStatistics::Covariances& covariances,
                int head, int group, const Matrix& forms) {
  const std::int64_t first = static_cast<std::int64_t>(head) * group;
  const auto dim = static_cast<std::int64_t>(forms.extent(0));
  const float by = 0.5f / static_cast<float>(dim);
  Kokkos::parallel_for(
      "kvzap::expected_attention::forms", RowRange(exec, 0, group * dim * dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t g = i / (dim * dim);
        const std::int64_t row = i / dim % dim;
        const std::int64_t column = i % dim;
        float form = covariances(first + g, row, column);
        if (row < dim / 2 && column >= dim / 2) form += covariances(first + g, column, row);
        forms(row, g * dim + column) = by * form;
      });
}

// products = keys * form, where form's lower left quarter counts as 0.
void multiply_form(const ExecutionSpace& exec, const ConstMatrix& keys, const Matrix& form,
                   const Matrix& products) {
  const auto dim = static_cast<std::int64_t>(keys.extent(1));
  const auto left = std::make_pair(std::int64_t{0}, dim / 2);
  const auto right = std::make_pair(dim / 2, dim);
  linalg::multiply_nn(exec, 1, Kokkos::subview(keys, Kokkos::ALL, left),
                      Kokkos::subview(form, left, left), 0,
                      Kokkos::subview(products, Kokkos::ALL, left));
  linalg::multiply_nn(exec, 1, keys, Kokkos::subview(form, Kokkos::ALL, right), 0,
                      Kokkos::subview(products, Kokkos::ALL, right));
}

// scores(r) = sum over the group of its factor * probabilities (group, row); if there are norms,
// (that sum + epsilon) * norms(r).
void write_scores(const ExecutionSpace& exec, const float* probabilities, const RowVector& factors,
                  int group, float epsilon, const RowVector& norms, const HeadScores& scores) {
  const auto rows = static_cast<std::int64_t>(scores.extent(0));
  const bool has_norms = norms.extent(0) > 0;
  Kokkos::parallel_for(
      "kvzap::expected_attention::scores", RowRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        float score = 0;
        for (int g = 0; g < group; ++g) score += factors(g) * probabilities[g * rows + r];
        if (has_norms) score = (score + epsilon) * norms(r);
        scores(r) = score;
      });
}

/// Expected attention (Devoto et al., arXiv 2510.00636). Future queries resemble past ones and are
/// normally distributed before RoPE, so the attention that they will give a row can be computed.
///
///   s(r) = (mean over the group of softmax_r(mu . k_r / sqrt(d) + k_r' C k_r / (2 d)) + epsilon)
///          * |v_r|
///
/// mu and C are the mean and covariance of the queries before RoPE without the first `sink` tokens.
/// They are rotated by RoPE's rotation averaged over the next `future-positions` positions; d is
/// head_dim. Rows of the first `sink` positions are excluded and get the layer's largest score + 1.
/// Shapes: mu (query heads, head_dim), C (query heads, head_dim, head_dim). Cost per query head:
/// 1.5 tokens d^2 operations for the statistics and 1.5 rows d^2 for the scores; memory O(rows *
/// group + heads d^2).
///
/// In steps that add fewer than `history` tokens to a longer sequence, the statistics come from the
/// newest `history` tokens, as in kvpress' DecodingPress. There, however, the averaged rotation
/// begins at the number of those tokens; here it begins at the next token's position. kvpress also
/// excludes the first `sink` of the newest tokens.
///
/// With `statistics`, mu and C before RoPE come from a file (query_mean: layers, query heads, d;
/// query_cov: layers, query heads, d, d), as kvpress' ExpectedAttentionStats saves them. kvpress
/// rounds them to the model's type; this policy does not round them.
class ExpectedAttention final : public Policy {
 public:
  ExpectedAttention(const ExpectedParameters& parameters,
                    std::shared_ptr<const QueryStatisticsFile> file)
      : m_parameters(parameters),
        m_file(std::move(file)),
        m_statistics(parameters.has_covariance, parameters.sink, parameters.history) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = !m_file;
    needs.frequencies = true;
    needs.recent = m_file ? 1 : m_parameters.history;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    if (!m_file) m_statistics.observe(layer, block);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const ExecutionSpace& exec = layer.exec();
    prepare(layer);
    std::vector<Rows> protected_rows;
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t first = rows_before(layer, h, m_parameters.sink);
      protected_rows.emplace_back(0, first);
      const std::int64_t rows = layer.rows(h) - first;
      if (rows > 0) score_head(layer, h, first, rows, scores);
    }
    base::fence(exec, "kvzap::expected_attention: statistics of the next layer may follow");
    protect_rows(layer, scores, protected_rows);
  }

 private:
  // Sets the layer's mean and covariance of future queries.
  void prepare(PolicyLayer& layer) {
    const ExecutionSpace& exec = layer.exec();
    std::int64_t end = 0;
    if (m_file) {
      const TokenBlock newest = layer.recent();
      end = newest.first + newest.count;
      const auto& extents = layer.extents();
      const std::int64_t heads = std::int64_t{layer.heads()} * extents.group;
      const std::int64_t dim = extents.head_dim;
      if (static_cast<std::int64_t>(m_means.extent(0)) != heads) {
        m_means = Matrix("kvzap::expected_attention::means", heads, dim);
        if (m_parameters.has_covariance) {
          m_covariances = QueryStatistics::Covariances("kvzap::expected_attention::covariances",
                                                       heads, dim, dim);
        }
      }
      m_file->read(layer, m_means, m_covariances);
    } else {
      m_statistics.finish(layer);
      m_means = m_statistics.means();
      m_covariances = m_statistics.covariances();
      end = m_statistics.end();
    }
    m_rope.prepare(layer, end, m_parameters.future_positions);
    m_rope.turn(exec, m_means);
    if (m_parameters.has_covariance) m_rope.turn(exec, m_covariances);
  }

  void score_head(PolicyLayer& layer, int head, std::int64_t first, std::int64_t rows,
                  const ScoreView& scores) {
    const ExecutionSpace& exec = layer.exec();
    const int group = layer.extents().group;
    const std::int64_t dim = layer.extents().head_dim;
    const std::int64_t columns = group * dim;
    const float by = 1.0f / std::sqrt(static_cast<float>(dim));
    base::reserve_scratch(m_logits, group * rows, "kvzap::expected_attention::logits");
    base::reserve_scratch(m_factors, group, "kvzap::expected_attention::factors");
    Matrix forms;
    if (m_parameters.has_covariance) {
      base::reserve_scratch(m_forms, dim * columns, "kvzap::expected_attention::forms");
      base::reserve_scratch(m_products, expected_tile_rows * columns,
                            "kvzap::expected_attention::products");
      forms = Matrix(m_forms.data(), dim, columns);
      fill_forms(exec, m_covariances, head, group, forms);
    }
    const PolicyLayer::RowsView keys = layer.keys(head, first, rows);
    for (std::int64_t begin = 0; begin < rows; begin += expected_tile_rows) {
      const std::int64_t end = std::min(rows, begin + expected_tile_rows);
      const ConstMatrix tile = Kokkos::subview(keys, std::make_pair(begin, end), Kokkos::ALL);
      Matrix products;
      if (m_parameters.has_covariance) {
        products = Matrix(m_products.data(), end - begin, columns);
        for (int g = 0; g < group; ++g) {
          const auto of_head = std::make_pair(g * dim, (g + 1) * dim);
          multiply_form(exec, tile, Kokkos::subview(forms, Kokkos::ALL, of_head),
                        Kokkos::subview(products, Kokkos::ALL, of_head));
        }
      }
      for (int g = 0; g < group; ++g) {
        row_products(exec, tile, m_parameters.has_covariance ? products.data() + g * dim : nullptr,
                     columns, m_means.data() + (head * group + g) * dim, by,
                     m_logits.data() + g * rows + begin);
      }
    }
    soften(exec, m_logits.data(), rows, group, m_factors);
    if (m_parameters.has_vnorm) {
      base::reserve_scratch(m_norms, rows, "kvzap::expected_attention::norms");
      row_norms(exec, layer.values(head, first, rows), m_norms.data());
    }
    write_scores(exec, m_logits.data(), m_factors, group, static_cast<float>(m_parameters.epsilon),
                 m_norms, scores_of(scores, head, first, rows));
  }

  ExpectedParameters m_parameters;
  std::shared_ptr<const QueryStatisticsFile> m_file;
  QueryStatistics m_statistics;
  AverageRope m_rope;
  Matrix m_means;
  QueryStatistics::Covariances m_covariances;
  RowVector m_forms;     // (head_dim, query head of the group, head_dim)
  RowVector m_products;  // (row of a tile, query head of the group, head_dim)
  RowVector m_logits;    // (query head of the group, row)
  RowVector m_factors;   // (query head of the group)
  RowVector m_norms;     // (row)
};

}  // namespace

PolicyInfo expected_attention() {
  PolicyInfo info;
  info.name = "expected-attention";
  info.paper = "Expected Attention, arXiv 2510.00636";
  info.formula = "expected attention of normally distributed future queries, times |v|";
  info.needs = "all queries or their statistics from a file, keys, values";
  info.cost = "time O((tokens + rows) d^2) per query head; memory O(rows)";
  info.make_with<ExpectedParameters>([](const auto& p, const PolicySetup& setup) {
    std::shared_ptr<const QueryStatisticsFile> file;
    if (p.statistics != "none") {
      file = std::make_shared<QueryStatisticsFile>(p.statistics, setup.config);
    }
    return [=] { return std::make_unique<ExpectedAttention>(p, file); };
  });
  return info;
}

}  // namespace kvzap::policy
