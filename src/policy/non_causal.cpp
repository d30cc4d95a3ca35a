#include "policy/non_causal.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/host_threads.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using Floats = Kokkos::View<float*, MemorySpace>;

// The score that kvpress gives padded keys. It is not -infinity, so they take part in the softmax.
constexpr float padded_score = -1e-9f;

// copy (KV head, chunk, query head of the group, dim): sets the tokens from `place` on.
void copy_queries(const ExecutionSpace& exec, const TokenBlock::QueryView& queries, int group,
                  std::int64_t chunk, std::int64_t place, const Floats& copy) {
  const std::int64_t heads = queries.extent(1);
  const std::int64_t dim = queries.extent(2);
  Kokkos::parallel_for(
      "kvzap::policy::non_causal_queries", PolicyRange(exec, 0, queries.extent(0) * heads),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads;
        const std::int64_t head = i % heads;
        float* const row =
            &copy(((head / group * chunk + place + token) * group + head % group) * dim);
        for (std::int64_t d = 0; d < dim; ++d) row[d] = queries(token, head, d);
      });
}

// Turns products (query, key) into exponentials. inverse(query) is 1 over their sum, which includes
// `padded` further keys.
void exponentials(const ExecutionSpace& exec, const linalg::Matrix& products, std::int64_t padded,
                  const Floats& inverse) {
  const std::int64_t keys = products.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::policy::non_causal_softmax",
                   static_cast<std::int64_t>(products.extent(0)), [=](std::int64_t q) {
                     float* const row = &products(q, 0);
                     float largest = linalg::max_of(row, keys);
                     if (padded > 0) largest = std::max(largest, padded_score);
                     float sum = linalg::exp_shifted(row, keys, largest);
                     if (padded > 0) {
                       sum += static_cast<float>(padded) * std::exp(padded_score - largest);
                     }
                     inverse(q) = 1 / sum;
                   });
    return;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::policy::non_causal_softmax",
      Team(exec, static_cast<int>(products.extent(0)), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t q = team.league_rank();
        float largest = largest_of(team, &products(q, 0), keys);
        if (padded > 0 && largest < padded_score) largest = padded_score;
        auto sum = exponentials_of<float>(team, &products(q, 0), keys, largest);
        if (padded > 0) sum += static_cast<float>(padded) * base::math::exp(padded_score - largest);
        Kokkos::single(Kokkos::PerTeam(team), [&] { inverse(q) = 1 / sum; });
      });
}

// attention(first + key) = (sum over queries of their probabilities, + padded) / group
void sum_over_queries(const ExecutionSpace& exec, const linalg::Matrix& products,
                      const Floats& inverse, float padded, int group, std::int64_t first,
                      const Floats& attention) {
  const std::int64_t queries = products.extent(0);
  const std::int64_t keys = products.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::non_causal_sum",
      PolicyRange(exec, 0, (keys + columns_per_item - 1) / columns_per_item),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t begin = i * columns_per_item;
        const std::int64_t width =
            keys - begin < columns_per_item ? keys - begin : columns_per_item;
        float sums[columns_per_item];
        for (float& sum : sums) sum = 0;
        for (std::int64_t q = 0; q < queries; ++q) {
          const float factor = inverse(q);
          const float* const row = &products(q, begin);
          for (std::int64_t k = 0; k < width; ++k) sums[k] += factor * row[k];
        }
        for (std::int64_t k = 0; k < width; ++k) {
          attention(first + begin + k) = sums[k] / static_cast<float>(group) + padded;
        }
      });
}

// raw(i) = attention(first + i) * ||values(i)||
void times_norms(const ExecutionSpace& exec, const PolicyLayer::RowsView& values,
                 const Floats& attention, std::int64_t first, const Floats& raw) {
  const std::int64_t dim = values.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::non_causal_values", PolicyRange(exec, 0, values.extent(0)),
      KOKKOS_LAMBDA(std::int64_t i) { raw(i) = attention(first + i) * norm(&values(i, 0), dim); });
}

void pool_neighbours(const ExecutionSpace& exec, const Floats& raw, std::int64_t count, int head,
                     std::int64_t begin, const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::non_causal_pool", PolicyRange(exec, 0, count), KOKKOS_LAMBDA(std::int64_t i) {
        float sum = raw(i);
        if (i > 0) sum += raw(i - 1);
        if (i + 1 < count) sum += raw(i + 1);
        scores(head, begin + i) = sum / 3;
      });
}

// Rows begin … end - 1 have a score from this step.
struct Known {
  std::int64_t cached = 0;  // rows of earlier tokens
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

KOKKOS_INLINE_FUNCTION bool has_score(const Kokkos::View<const float*, MemorySpace>& stored,
                                      const Known& known, std::int64_t row) {
  if (row >= known.cached) return row >= known.begin && row < known.end;
  // Only NaN differs from itself.
  return row < static_cast<std::int64_t>(stored.extent(0)) && stored(row) == stored(row);
}

float take_stored(const ExecutionSpace& exec, const Kokkos::View<const float*, MemorySpace>& stored,
                  const Known& known, std::int64_t rows, int head,
                  const Policy::ScoreView& scores) {
  float largest = 0;
  Kokkos::parallel_reduce(
      "kvzap::policy::stored_scores", PolicyRange(exec, 0, rows),
      KOKKOS_LAMBDA(std::int64_t r, float& most) {
        if (!has_score(stored, known, r)) return;
        if (r < known.cached) scores(head, r) = stored(r);
        const float score = scores(head, r);
        if (score > most && score - score == 0) most = score;  // a finite score
      },
      Kokkos::Max<float>(largest));
  return largest;
}

void fill_missing(const ExecutionSpace& exec, const Kokkos::View<const float*, MemorySpace>& stored,
                  const Known& known, std::int64_t rows, int head, float score,
                  const Policy::ScoreView& scores) {
  Kokkos::parallel_for(
      "kvzap::policy::missing_scores", PolicyRange(exec, 0, rows), KOKKOS_LAMBDA(std::int64_t r) {
        if (!has_score(stored, known, r)) scores(head, r) = score;
      });
}

std::int64_t first_token(const PolicyLayer& layer) {
  return layer.extents().tokens - layer.extents().new_tokens;
}

// The row of a token of this step.
std::int64_t row_of(const PolicyLayer& layer, int head, std::int64_t position) {
  return layer.rows(head) - layer.extents().tokens + position;
}

}  // namespace

void ChunkAttention::observe(PolicyLayer& layer, const TokenBlock& block,
                             const TokenRange& tokens) {
  if (block.first == first_token(layer)) {
    m_layer = layer.layer();
    m_tokens = tokens;
    m_next = tokens.begin;
    base::reserve_scratch(m_attention, layer.heads() * std::max<std::int64_t>(0, tokens.count()),
                          "kvzap::policy::non_causal_attention");
  }
  const std::int64_t group = layer.extents().group;
  const std::int64_t dim = layer.extents().head_dim;
  base::reserve_scratch(m_queries, layer.heads() * m_chunk * group * dim,
                        "kvzap::policy::non_causal_queries");
  const std::int64_t end = std::min(block.first + block.count, m_tokens.end);
  while (m_next >= block.first && m_next < end) {
    const std::int64_t place = (m_next - m_tokens.begin) % m_chunk;
    const std::int64_t count = std::min(end - m_next, m_chunk - place);
    if (layer.heads() > 0) {
      const std::int64_t first = m_next - block.first;
      const auto of_chunk = std::make_pair(first, first + count);
      copy_queries(layer.exec(), Kokkos::subview(block.queries, of_chunk, Kokkos::ALL, Kokkos::ALL),
                   static_cast<int>(group), m_chunk, place, m_queries);
    }
    m_next += count;
    if (place + count == m_chunk || m_next == m_tokens.end) {
      finish_chunk(layer, m_next - place - count, place + count);
    }
  }
}

void ChunkAttention::finish_chunk(PolicyLayer& layer, std::int64_t begin, std::int64_t count) {
  const ExecutionSpace& exec = layer.exec();
  const std::int64_t group = layer.extents().group;
  const std::int64_t dim = layer.extents().head_dim;
  const std::int64_t queries = count * group;
  const std::int64_t padded = m_chunk - count;
  base::reserve_scratch(m_products, queries * count, "kvzap::policy::non_causal_products");
  base::reserve_scratch(m_inverse, queries, "kvzap::policy::non_causal_sums");
  const linalg::Matrix products(m_products.data(), queries, count);
  const float scale = m_scaled ? 1 / std::sqrt(static_cast<float>(dim)) : 1.0f;
  for (int h = 0; h < layer.heads(); ++h) {
    const auto keys = layer.keys(h, row_of(layer, h, begin), count);
    const linalg::ConstMatrix of_head(m_queries.data() + h * m_chunk * group * dim, queries, dim);
    linalg::multiply_nt(exec, scale, of_head, keys, 0, products);
    exponentials(exec, products, padded, m_inverse);
    // Padded queries give every key of the chunk the same attention.
    sum_over_queries(
        exec, products, m_inverse, static_cast<float>(padded) / static_cast<float>(m_chunk),
        static_cast<int>(group), h * m_tokens.count() + begin - m_tokens.begin, m_attention);
  }
}

bool ChunkAttention::is_complete(const PolicyLayer& layer, const TokenRange& tokens) const {
  return m_layer == layer.layer() && m_tokens.begin == tokens.begin && m_tokens.end == tokens.end &&
         m_next == tokens.end;
}

std::vector<RowPart> ChunkAttention::parts(const PolicyLayer& layer) const {
  std::vector<RowPart> parts;
  parts.reserve(layer.heads());
  for (int h = 0; h < layer.heads(); ++h) {
    parts.push_back({row_of(layer, h, m_tokens.begin), m_tokens.count()});
  }
  return parts;
}

void ChunkAttention::scores(PolicyLayer& layer, const Policy::ScoreView& scores) {
  const std::int64_t count = m_tokens.count();
  base::reserve_scratch(m_raw, count, "kvzap::policy::non_causal_raw");
  for (int h = 0; h < layer.heads(); ++h) {
    const std::int64_t begin = row_of(layer, h, m_tokens.begin);
    times_norms(layer.exec(), layer.values(h, begin, count), m_attention, h * count, m_raw);
    pool_neighbours(layer.exec(), m_raw, count, h, begin, scores);
  }
}

void complete_scores(PolicyLayer& layer, const TokenRange& scored,
                     const Policy::ScoreView& scores) {
  std::vector<Known> known;
  double largest = -std::numeric_limits<double>::infinity();
  for (int h = 0; h < layer.heads(); ++h) {
    known.push_back({layer.rows(h) - layer.extents().new_tokens, row_of(layer, h, scored.begin),
                     row_of(layer, h, scored.end)});
    const float of_head =
        take_stored(layer.exec(), layer.cached_scores(h), known[h], layer.rows(h), h, scores);
    largest = std::max<double>(largest, of_head);
  }
  layer.comm().all_reduce_max(&largest, 1);
  // All scores may be missing; then no maximum exists.
  if (largest <= std::numeric_limits<float>::lowest()) largest = 0;
  for (int h = 0; h < layer.heads(); ++h) {
    fill_missing(layer.exec(), layer.cached_scores(h), known[h], layer.rows(h), h,
                 static_cast<float>(largest), scores);
  }
}

namespace {

/// Keeps rows that get attention when all tokens of a chunk see one another. The score is the
/// softmax of the products of the chunk's queries and keys, after RoPE, summed over queries and
/// averaged over the group. It is multiplied by the norm of the row's value. Then it is averaged
/// over three neighbouring rows, and standardized over all heads of the layer (part of Chari and
/// Van Durme: "Compactor", arXiv 2507.08143).
///
/// Cost: 4 * chunk * head_dim operations per query. Memory: the queries of a chunk and its
/// products, (chunk, query heads, head_dim) and (chunk * group, chunk), and a float per row of the
/// step.
///
/// As in kvpress, products are not divided by sqrt(head_dim); `scaled=on` divides them. The last
/// chunk is padded with keys of score 0 and with queries that give each key the same attention.
/// kvpress scores only one prefill. Here, if more tokens follow, rows keep the score of their own
/// step, standardized among its rows. Tokens that arrived one by one have the largest score of all.
class NonCausal final : public Policy {
 public:
  struct Parameters : PolicyParameters {
    std::int64_t chunk =
        integer("chunk", 256, {1, 65536}, "tokens of a chunk, which see one another");
    bool scaled = flag("scaled", false, "divide products by sqrt(head_dim)");
  };

  explicit NonCausal(const Parameters& parameters)
      : m_attention(parameters.chunk, parameters.scaled) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    // The queries of a step exist only during the step.
    needs.every_step = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_attention.observe(layer, block, tokens_of(layer));
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    TokenRange tokens = tokens_of(layer);
    if (tokens.count() > 1 && m_attention.is_complete(layer, tokens)) {
      m_attention.scores(layer, scores);
      standardize(layer, m_attention.parts(layer), scores);
    } else {
      tokens.end = tokens.begin;
    }
    policy::complete_scores(layer, tokens, scores);
  }

 private:
  static TokenRange tokens_of(const PolicyLayer& layer) {
    const auto& extents = layer.extents();
    return {extents.tokens - extents.new_tokens, extents.tokens};
  }

  ChunkAttention m_attention;
};

}  // namespace

PolicyInfo non_causal() {
  PolicyInfo info;
  info.name = "non-causal";
  info.paper = "Compactor, arXiv 2507.08143";
  info.formula = "||v|| * sum over a chunk's queries of softmax(q . k)";
  info.needs = "queries, keys, values";
  info.cost = "O(rows * group * chunk * head_dim), queries of a chunk";
  info.make_class<NonCausal>();
  return info;
}

}  // namespace kvzap::policy
