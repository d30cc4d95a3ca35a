#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/core/eviction.hpp>
#include <limits>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "base/simd.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"
#include "policy/output_norms.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using linalg::Matrix;
using linalg::Vector;
using KvzipRange = PolicyRange;

// Logits of a tile of queries: they fit in a second-level cache.
constexpr std::int64_t kvzip_tile_logits = std::int64_t{1} << 19;
constexpr std::int64_t kvzip_least_queries = 64;
// Columns that one work item reduces on a host.
constexpr std::int64_t kvzip_slice = 512;

/// Queries of one query head, in order, against all columns: the sinks, the chunk, and the rows of
/// the repeat up to the row of the last query.
struct KvzipTile {
  float* logits;        // (query, column), unscaled; exponentials later
  float* factors;       // (query): factors of the exponentials
  const float* scales;  // (query): factors of the probabilities
  std::int64_t queries;
  std::int64_t columns;
  std::int64_t seen;   // columns that the first query sees; each later query sees one more
  std::int64_t begin;  // first column of the chunk
  std::int64_t chunk;  // columns of the chunk
  float scaling;       // of logits
};

// packed(i, ·) = queries(first + i, head, ·)
void kvzip_pack(const ExecutionSpace& exec, const TokenBlock::QueryView& queries,
                std::int64_t first, std::int64_t head, const Matrix& packed) {
  const auto dim = static_cast<std::int64_t>(packed.extent(1));
  if (base::machine().on_host() && queries.stride(2) == 1) {
    const float* const source =
        queries.data() + first * queries.stride(0) + head * queries.stride(1);
    const auto stride = static_cast<std::int64_t>(queries.stride(0));
    float* const to = packed.data();
    base::host_for("kvzap::kvzip::pack", static_cast<std::int64_t>(packed.extent(0)),
                   [=](std::int64_t i) { std::copy_n(source + i * stride, dim, to + i * dim); });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::kvzip::pack", KvzipRange(exec, 0, static_cast<std::int64_t>(packed.extent(0)) * dim),
      KOKKOS_LAMBDA(std::int64_t i) {
        packed(i / dim, i % dim) = queries(first + i / dim, head, i % dim);
      });
}

// scales(i) = 1 / ||hidden(i, ·)||, or 1 without scaling.
void kvzip_scales(const ExecutionSpace& exec, const TokenBlock& block, bool by_norm,
                  const Vector& scales) {
  const auto hidden = block.hidden;
  const auto dim = static_cast<std::int64_t>(hidden.extent(1));
  Kokkos::parallel_for(
      "kvzap::kvzip::scales", KvzipRange(exec, 0, block.count), KOKKOS_LAMBDA(std::int64_t i) {
        if (!by_norm) {
          scales(i) = 1;
          return;
        }
        float sum = 0;
        if (hidden.stride(1) == 1) {
          sum = dot(&hidden(i, 0), &hidden(i, 0), dim);
        } else {
          for (std::int64_t d = 0; d < dim; ++d) sum += hidden(i, d) * hidden(i, d);
        }
        scales(i) = 1 / base::math::sqrt(sum);
      });
}

// target(first + r, ·) = rows(r, ·), rounded to the target's type.
template <class Value>
void kvzip_copy(const ExecutionSpace& exec, const PolicyLayer::RowsView& rows, std::int64_t first,
                const Kokkos::View<Value*, MemorySpace>& target) {
  const auto dim = static_cast<std::int64_t>(rows.extent(1));
  const auto count = static_cast<std::int64_t>(rows.extent(0));
  if (base::machine().on_host()) {
    const float* const source = rows.data();
    Value* const to = target.data() + first * dim;
    base::host_for("kvzap::kvzip::copy", count,
                   [=](std::int64_t r) { linalg::narrow(source + r * dim, to + r * dim, dim); });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::kvzip::copy", KvzipRange(exec, 0, count * dim), KOKKOS_LAMBDA(std::int64_t i) {
        target(first * dim + i) = static_cast<Value>(rows(i / dim, i % dim));
      });
}

// Turns logits into exp(logit - maximum) for the columns that a query sees, and computes its
// factor: scale / sum of all. Columns after the chunk that the query does not see are left
// unchanged.
void kvzip_exponentials(const ExecutionSpace& exec, const KvzipTile& tile) {
  if (base::machine().on_host()) {
    base::fence(exec, "kvzap::kvzip: host kernels read logits");
    base::host_for("kvzap::kvzip::exp", tile.queries, [=](std::int64_t q) {
      float* const logits = tile.logits + q * tile.columns;
      const std::int64_t count = tile.seen + q;
      const float sum =
          linalg::exp_shifted(logits, count, linalg::max_of(logits, count), tile.scaling);
      tile.factors[q] = tile.scales[q] / sum;
    });
    return;
  }
  using Team = Kokkos::TeamPolicy<ExecutionSpace>;
  Kokkos::parallel_for(
      "kvzap::kvzip::exp", Team(exec, static_cast<int>(tile.queries), Kokkos::AUTO),
      KOKKOS_LAMBDA(const typename Team::member_type& team) {
        const std::int64_t q = team.league_rank();
        float* const logits = tile.logits + q * tile.columns;
        const std::int64_t count = tile.seen + q;
        const float largest = largest_of(team, logits, count);
        const auto sum = exponentials_of<float>(team, logits, count, largest, tile.scaling);
        Kokkos::single(Kokkos::PerTeam(team), [&] { tile.factors[q] = tile.scales[q] / sum; });
      });
}

// largest[c] = max over queries of factors[q] * values[q * stride + c]; NaN stays NaN.
KVZAP_BODY void kvzip_maxima_body(const float* values, std::int64_t stride, const float* factors,
                                  std::int64_t queries, std::int64_t count, float* largest) {
  float most[kvzip_slice];
  for (std::int64_t c = 0; c < count; ++c) most[c] = largest[c];
  for (std::int64_t q = 0; q < queries; ++q) {
    const float* const row = values + q * stride;
    const float factor = factors[q];
    for (std::int64_t c = 0; c < count; ++c) {
      const float p = factor * row[c];
      most[c] = most[c] >= p ? most[c] : (most[c] != most[c] ? most[c] : p);
    }
  }
  for (std::int64_t c = 0; c < count; ++c) largest[c] = most[c];
}
KVZAP_KERNEL(void, kvzip_maxima,
             (const float* values, std::int64_t stride, const float* factors, std::int64_t queries,
              std::int64_t count, float* largest),
             (values, stride, factors, queries, count, largest))

// largest(c) = max over queries of factor * exponential, for the chunk's columns.
void kvzip_reduce(const ExecutionSpace& exec, const KvzipTile& tile, float* largest) {
  if (base::machine().on_host()) {
    base::host_for("kvzap::kvzip::maxima", (tile.chunk + kvzip_slice - 1) / kvzip_slice,
                   [=](std::int64_t slice) {
                     const std::int64_t first = slice * kvzip_slice;
                     kvzip_maxima(tile.logits + tile.begin + first, tile.columns, tile.factors,
                                  tile.queries, std::min(kvzip_slice, tile.chunk - first),
                                  largest + first);
                   });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::kvzip::maxima", KvzipRange(exec, 0, tile.chunk), KOKKOS_LAMBDA(std::int64_t c) {
        float most = largest[c];
        for (std::int64_t q = 0; q < tile.queries; ++q) {
          const float p = tile.factors[q] * tile.logits[q * tile.columns + tile.begin + c];
          if (p > most || p != p) most = p;
          if (most != most) break;
        }
        largest[c] = most;
      });
}

// scores(head, begin + c) = max(itself, largest(member, c) * norms(member, c)), over all members.
// Without norms, uses `largest` alone.
void kvzip_merge(const ExecutionSpace& exec, const Matrix& largest, const Matrix& norms,
                 bool has_norms, int head, std::int64_t begin, const Matrix& scores) {
  const auto group = static_cast<std::int64_t>(largest.extent(0));
  Kokkos::parallel_for(
      "kvzap::kvzip::merge", KvzipRange(exec, 0, static_cast<std::int64_t>(largest.extent(1))),
      KOKKOS_LAMBDA(std::int64_t c) {
        float most = scores(head, begin + c);
        for (std::int64_t g = 0; g < group; ++g) {
          const float p = has_norms ? largest(g, c) * norms(g, c) : largest(g, c);
          if (p > most || p != p) most = p;
          if (most != most) break;
        }
        scores(head, begin + c) = most;
      });
}

// Returns the largest finite score.
float kvzip_largest(const ExecutionSpace& exec, const Matrix& scores) {
  float largest = -std::numeric_limits<float>::infinity();
  const auto columns = static_cast<std::int64_t>(scores.extent(1));
  Kokkos::parallel_reduce(
      "kvzap::kvzip::largest", KvzipRange(exec, 0, static_cast<std::int64_t>(scores.size())),
      KOKKOS_LAMBDA(std::int64_t i, float& most) {
        const float score = scores(i / columns, i % columns);
        if (score > most && EvictionRule::is_finite(score)) most = score;
      },
      Kokkos::Max<float>(largest));
  return largest;
}

struct KvzipParameters : PolicyParameters {
  bool layerwise = flag("layerwise", false, "every layer keeps the same number of rows");
  std::int64_t sink =
      integer("sink", 4, {0, 1 << 24},
              "first tokens: the repeat attends to them, and they stay before all others");
  std::int64_t chunk = integer("chunk", 2048, {1, 1 << 24}, "tokens repeated at a time");
};

struct KvzipOptions {
  bool plus = false;
  std::int64_t sink = 4;
  DType dtype = DType::f32;
};

class Kvzip final : public Policy {
 public:
  Kvzip(const KvzipOptions& options, std::shared_ptr<OutputNorms> norms)
      : m_options(options), m_norms(std::move(norms)) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.output_weights = m_norms != nullptr;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    const PolicyLayer::Extents& extents = layer.extents();
    const ExecutionSpace& exec = layer.exec();
    const std::int64_t context = extents.tokens - extents.new_tokens;
    const std::int64_t begin = extents.repeats_begin;
    const std::int64_t chunk = extents.repeats_end - begin;
    const std::int64_t sink = std::min(m_options.sink, begin);
    const std::int64_t repeated = block.first + block.count - context;  // rows up to the last query
    const std::int64_t columns = sink + chunk + repeated;
    m_scores.resize(std::max<std::size_t>(m_scores.size(), layer.layer() + 1));
    Matrix& scores = m_scores[layer.layer()];
    if (scores.data() == nullptr && layer.heads() > 0) {
      scores = Matrix("kvzap::kvzip::scores", layer.heads(), context);
    }
    if (m_options.plus && block.first == context) find_norms(layer, begin, chunk);
    base::reserve_scratch(m_scales, block.count, "kvzap::kvzip::scales");
    kvzip_scales(exec, block, m_options.plus, m_scales);
    for (int head = 0; head < layer.heads(); ++head) {
      if (m_options.dtype == DType::bf16) {
        gather(layer, head, sink, repeated, m_rounded_keys);
        pass(layer, head, block, sink, columns, m_rounded_keys);
      } else {
        gather(layer, head, sink, repeated, m_keys);
        pass(layer, head, block, sink, columns, m_keys);
      }
      const Matrix largest(m_largest.data(), extents.group, chunk);
      kvzip_merge(exec, largest, norms_of(layer, head, chunk), m_options.plus, head, begin, scores);
    }
  }

  void score(PolicyLayer& /*layer*/, const ScoreView& /*scores*/) override {
    throw Error("policy kvzip: it scores only after the model has repeated the context");
  }

  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> context_scores(const ExecutionSpace& exec,
                                                                         const Communicator& comm,
                                                                         int layer) override {
    if (!m_has_first) {
      // The first positions get a higher score than all others.
      double largest = 0;
      for (const Matrix& scores : m_scores) {
        if (scores.size() > 0) largest = std::max<double>(largest, kvzip_largest(exec, scores));
      }
      comm.all_reduce_max(&largest, 1);
      for (const Matrix& scores : m_scores) {
        const std::int64_t first =
            std::min<std::int64_t>(m_options.sink, static_cast<std::int64_t>(scores.extent(1)));
        Kokkos::deep_copy(
            exec, Kokkos::subview(scores, Kokkos::ALL, std::make_pair(std::int64_t{0}, first)),
            static_cast<float>(largest) + 1);
      }
      m_has_first = true;
    }
    return m_scores.at(layer);
  }

 private:
  template <class Value>
  using Keys = Kokkos::View<Value*, MemorySpace>;

  /// Sets keys (column, head_dim) to the keys of the sinks, the chunk and the repeat.
  template <class Value>
  void gather(PolicyLayer& layer, int head, std::int64_t sink, std::int64_t repeated,
              Keys<Value>& keys) {
    const PolicyLayer::Extents& extents = layer.extents();
    const std::int64_t chunk = extents.repeats_end - extents.repeats_begin;
    const std::int64_t context = extents.tokens - extents.new_tokens;
    base::reserve_scratch(keys, (sink + chunk + repeated) * extents.head_dim, "kvzap::kvzip::keys");
    if (sink > 0) kvzip_copy(layer.exec(), layer.keys(head, 0, sink), 0, keys);
    kvzip_copy(layer.exec(), layer.keys(head, extents.repeats_begin, chunk), sink, keys);
    kvzip_copy(layer.exec(), layer.keys(head, context, repeated), sink + chunk, keys);
  }

  /// Sets m_largest (query head of the group, column of the chunk) to the largest probability,
  /// divided by ||h|| for KVzip+.
  template <class Value>
  void pass(PolicyLayer& layer, int head, const TokenBlock& block, std::int64_t sink,
            std::int64_t columns, const Keys<Value>& keys) {
    const ExecutionSpace& exec = layer.exec();
    const PolicyLayer::Extents& extents = layer.extents();
    const std::int64_t dim = extents.head_dim;
    const std::int64_t chunk = extents.repeats_end - extents.repeats_begin;
    const std::int64_t most =
        std::min(block.count, std::max(kvzip_least_queries, kvzip_tile_logits / columns));
    base::reserve_scratch(m_queries, most * dim, "kvzap::kvzip::queries");
    base::reserve_scratch(m_logits, most * columns, "kvzap::kvzip::logits");
    base::reserve_scratch(m_factors, most, "kvzap::kvzip::factors");
    base::reserve_scratch(m_largest, extents.group * chunk, "kvzap::kvzip::largest");
    Kokkos::deep_copy(exec, m_largest, 0.0f);
    const linalg::LinearWeights rows(linalg::WeightLayout::rows, columns, dim, keys.data());
    for (int member = 0; member < extents.group; ++member) {
      for (std::int64_t first = 0; first < block.count; first += most) {
        KvzipTile tile{};
        tile.queries = std::min(most, block.count - first);
        tile.columns = columns;
        tile.logits = m_logits.data();
        tile.factors = m_factors.data();
        tile.scales = m_scales.data() + first;
        tile.seen = columns - block.count + first + 1;
        tile.begin = sink;
        tile.chunk = chunk;
        tile.scaling = 1 / std::sqrt(static_cast<float>(dim));
        const Matrix packed(m_queries.data(), tile.queries, dim);
        kvzip_pack(exec, block.queries, first, std::int64_t{head} * extents.group + member, packed);
        m_product(exec, packed, rows, linalg::ConstVector(),
                  Matrix(tile.logits, tile.queries, columns));
        kvzip_exponentials(exec, tile);
        kvzip_reduce(exec, tile, m_largest.data() + member * chunk);
      }
    }
  }

  /// Computes the norms of the chunk's values, for all heads of the layer.
  void find_norms(PolicyLayer& layer, std::int64_t begin, std::int64_t chunk) {
    base::reserve_scratch(m_value_norms,
                          std::int64_t{layer.heads()} * layer.extents().group * chunk,
                          "kvzap::kvzip::norms");
    for (int head = 0; head < layer.heads(); ++head) {
      (*m_norms)(layer, head, begin, chunk, norms_of(layer, head, chunk));
    }
  }
  Matrix norms_of(const PolicyLayer& layer, int head, std::int64_t chunk) const {
    if (!m_options.plus) return {};
    const std::int64_t group = layer.extents().group;
    return Matrix(m_value_norms.data() + head * group * chunk, group, chunk);
  }

  KvzipOptions m_options;
  std::shared_ptr<OutputNorms> m_norms;
  std::vector<Matrix> m_scores;  // [layer] (head on this rank, position)
  bool m_has_first = false;      // whether the first positions have their scores
  // Scratch.
  linalg::LinearMap m_product;
  Keys<float> m_keys;
  Keys<bfloat16> m_rounded_keys;
  Vector m_queries, m_logits, m_factors, m_scales, m_largest;
  Vector m_value_norms;  // (head, query head of the group, column of the chunk)
};

PolicyInfo kvzip_info(bool plus) {
  PolicyInfo info;
  info.name = plus ? "kvzip-plus" : "kvzip";
  info.paper = plus ? "KVzip+: KVzap, arXiv 2601.07891" : "KVzip, arXiv 2505.23416";
  info.formula = plus ? "max over the repeat's queries of p ||W_O v|| / ||h||"
                      : "max over the repeat's queries of p";
  info.needs = "the context, repeated by the model";
  info.cost = "about 2 prefills; 4 bytes a row, a full cache and a chunk";
  info.layerwise = "layerwise";
  info.scores_again = false;
  info.repeats_context = true;
  info.repeat_chunk = "chunk";
  info.make_with<KvzipParameters>([plus](const auto& p, const PolicySetup& setup) {
    const KvzipOptions options{plus, p.sink, setup.dtype};
    const auto norms = std::make_shared<OutputNorms>();
    return [options, norms] { return std::make_unique<Kvzip>(options, norms); };
  });
  info.set_up_with<KvzipParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    if (!choice.budget.has_amount()) {
      throw Error(fmt::format(
          "policy {} keeps a share of all pairs, whatever their scores: give an evict ratio, a "
          "number of tokens or a size, and no threshold",
          choice.info->name));
    }
    choice.repeat.chunk = p.chunk;
    choice.budget.pool = p.layerwise ? Budget::Pool::layer : Budget::Pool::model;
    choice.budget.counts_pools = true;
    choice.budget.safeguard = 0;
  });
  return info;
}

}  // namespace

/// KVzip (arXiv 2505.23416), as in kvpress. After the context, the model repeats it in chunks (see
/// repeat_steps). The queries of a repeat attend, with their own softmax, to three groups of rows.
/// These are the first `sink` positions that precede the chunk, the chunk's rows, and the repeat
/// itself up to the query. Then
///   score = max of p over all positions of the repeat and all query heads of the group. The first
///   `sink` positions get the largest of all scores plus 1. Positions of a chat template's prefix
///   after them are not repeated and score 0. The heads of all layers compete, and floor(rows *
///   ratio) rows are evicted; with layerwise=on the heads of a layer compete.
///
/// Products are those of attention: they use bf16 values if the cache has them. Logits exist for a
/// few dozen queries at a time; scores take 4 bytes per row and head.
///
/// Cost: a forward pass over the repeat, and per query head a product of its queries with up to
/// sink + chunk + repeat keys.
PolicyInfo kvzip() { return kvzip_info(false); }

/// KVzip+ (KVzap, arXiv 2601.07891, equation 2, as in kvpress): the same as KVzip, with
///   score = max of p * ||W_O v|| / ||h||.
/// Here v is the pair's value, and W_O is the part of the output projection for the query head's
/// output. h is the input of attention at the repeat's position.
PolicyInfo kvzip_plus() { return kvzip_info(true); }

}  // namespace kvzap::policy
