#include <fmt/format.h>

#include <algorithm>

#include "base/scratch.hpp"
#include "cache/agree_on_memory.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"

namespace kvzap::policy {
namespace {

using ComposeScores = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

struct KvComposeParameters : PolicyParameters {
  bool structured = flag("structured", true,
                         "all heads of a layer keep the same number of rows; off: all heads of all "
                         "layers compete");
  bool head_mean = flag("head-mean", true, "whether the mean over the heads is added to scores");
  std::int64_t chunk = integer("chunk", 1 << 24, {1, 1 << 24},
                               "tokens of the context that are read again at a time");
};

/// The queries of one member of each group: (token, KV head, dim).
TokenBlock member_of(const TokenBlock& block, int member, int group) {
  TokenBlock own = block;
  const auto& q = block.queries;
  own.queries =
      TokenBlock::QueryView(q.data() + member * q.stride(1),
                            Kokkos::LayoutStride(q.extent(0), q.stride(0), q.extent(1) / group,
                                                 q.stride(1) * group, q.extent(2), q.stride(2)));
  const auto& lse = block.log_sum_exp;
  own.log_sum_exp =
      LogSumExpView(lse.data() + member * lse.stride(1),
                    Kokkos::LayoutStride(lse.extent(0), lse.stride(0), lse.extent(1) / group,
                                         lse.stride(1) * group));
  return own;
}

// maxima(head * group + member, row) = max(itself, mass(head, row)); NaN stays NaN.
void take_maxima(const ExecutionSpace& exec, const PolicyLayer::MassView& mass, int member,
                 int group, const ComposeScores& maxima) {
  const auto rows = static_cast<std::int64_t>(maxima.extent(1));
  Kokkos::parallel_for(
      "kvzap::kvcompose::maxima",
      PolicyRange(exec, 0, static_cast<std::int64_t>(mass.extent(0)) * rows),
      KOKKOS_LAMBDA(std::int64_t i) {
        const float p = mass(i / rows, i % rows);
        float& most = maxima(i / rows * group + member, i % rows);
        if (p > most || p != p) most = p;
      });
}

// scores(head, row) = mean over the group of maxima(head * group + member, row)
void take_means(const ExecutionSpace& exec, const ComposeScores& maxima,
                const ComposeScores& scores) {
  const auto heads = static_cast<std::int64_t>(scores.extent(0));
  const auto rows = static_cast<std::int64_t>(scores.extent(1));
  const std::int64_t group = static_cast<std::int64_t>(maxima.extent(0)) / heads;
  Kokkos::parallel_for(
      "kvzap::kvcompose::means", PolicyRange(exec, 0, heads * rows), KOKKOS_LAMBDA(std::int64_t i) {
        float sum = 0;
        for (std::int64_t g = 0; g < group; ++g) sum += maxima(i / rows * group + g, i % rows);
        scores(i / rows, i % rows) = sum / static_cast<float>(group);
      });
}

// scores(head, row) += means(row)
void add_means(const ExecutionSpace& exec, const Kokkos::View<const float*, MemorySpace>& means,
               const ComposeScores& scores) {
  const auto rows = static_cast<std::int64_t>(scores.extent(1));
  Kokkos::parallel_for(
      "kvzap::kvcompose::add_means",
      PolicyRange(exec, 0, static_cast<std::int64_t>(scores.extent(0)) * rows),
      KOKKOS_LAMBDA(std::int64_t i) { scores(i / rows, i % rows) += means(i % rows); });
}

class KvCompose final : public Policy {
 public:
  explicit KvCompose(bool adds_mean) : m_adds_mean(adds_mean) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.log_sum_exp = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    const PolicyLayer::Extents& extents = layer.extents();
    m_layers.resize(std::max<std::size_t>(m_layers.size(), layer.layer() + 1));
    Layer& own = m_layers[layer.layer()];
    own.heads = extents.heads;
    m_kv_heads = extents.kv_heads;
    m_context = extents.tokens - extents.new_tokens;
    if (layer.heads() == 0) return;
    const int group = extents.group;
    if (own.maxima.data() == nullptr) {
      own.maxima = ComposeScores("kvzap::kvcompose::maxima", layer.heads() * group, m_context);
    }
    const std::int64_t columns = layer.most_rows() + extents.new_tokens;
    base::reserve_scratch(m_mass, layer.heads() * columns, "kvzap::kvcompose::mass");
    const ComposeScores mass(m_mass.data(), layer.heads(), columns);
    for (int member = 0; member < group; ++member) {
      Kokkos::deep_copy(layer.exec(), mass, 0.0F);
      layer.attention_mass(member_of(block, member, group), MassReduction::max, mass);
      take_maxima(layer.exec(), mass, member, group, own.maxima);
    }
  }

  void score(PolicyLayer& /*layer*/, const ScoreView& /*scores*/) override {
    throw Error("policy kvcompose: it scores only after the model has read the context again");
  }

  ComposeScores context_scores(const ExecutionSpace& exec, const Communicator& comm,
                               int layer) override {
    Layer& own = m_layers.at(layer);
    ComposeScores scores;
    HeadMeans means;
    cache::agree_on_memory(comm, [&] {
      scores =
          ComposeScores(Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::kvcompose::scores"),
                        own.heads.size(), m_context);
      if (!own.heads.empty()) take_means(exec, own.maxima, scores);
      base::fence(exec, "kvzap::kvcompose: maxima go");
      own.maxima = {};
      if (m_adds_mean) means = begin_means(exec, own.heads, scores);
    });
    if (m_adds_mean) add_mean_of_heads(exec, comm, means, scores);
    return scores;
  }

 private:
  struct Layer {
    std::vector<int> heads;  // (head on this rank): index of each head in the model
    ComposeScores maxima;    // (query head on this rank, position)
  };
  /// Memory of the mean over all heads of a layer.
  struct HeadMeans {
    std::vector<double> all;  // (head of the model, row): this rank's scores, 0 for other heads
    Kokkos::View<float*, MemorySpace> means;  // (row)
    Kokkos::View<float*, MemorySpace>::host_mirror_type host;
  };

  HeadMeans begin_means(const ExecutionSpace& exec, const std::vector<int>& heads,
                        const ComposeScores& scores) const {
    HeadMeans begun;
    begun.means = Kokkos::View<float*, MemorySpace>("kvzap::kvcompose::mean_of_heads", m_context);
    begun.host = Kokkos::create_mirror_view(begun.means);
    begun.all.assign(static_cast<std::size_t>(m_kv_heads * m_context), 0.0);
    const auto host = Kokkos::create_mirror_view(scores);
    Kokkos::deep_copy(exec, host, scores);
    base::fence(exec, "kvzap::kvcompose: ranks exchange scores");
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::int64_t row = 0; row < m_context; ++row) {
        begun.all[static_cast<std::size_t>(heads[h] * m_context + row)] = host(h, row);
      }
    }
    return begun;
  }

  /// Ranks exchange each head's scores, so that every rank adds them in the same order.
  void add_mean_of_heads(const ExecutionSpace& exec, const Communicator& comm, HeadMeans& begun,
                         const ComposeScores& scores) const {
    comm.all_reduce_sum(begun.all.data(), begun.all.size());
    for (std::int64_t row = 0; row < m_context; ++row) {
      float sum = 0;
      for (int head = 0; head < m_kv_heads; ++head) {
        sum += static_cast<float>(begun.all[static_cast<std::size_t>(head * m_context + row)]);
      }
      begun.host(row) = sum / static_cast<float>(m_kv_heads);
    }
    Kokkos::deep_copy(exec, begun.means, begun.host);
    add_means(exec, begun.means, scores);
    base::fence(exec, "kvzap::kvcompose: the means go");
  }

  bool m_adds_mean;
  int m_kv_heads = 1;
  std::int64_t m_context = 0;
  std::vector<Layer> m_layers;
  Kokkos::View<float*, MemorySpace> m_mass;  // scratch
};

}  // namespace

/// KVCompose (Akulov et al., arXiv 2509.05165), as in kvpress. After the context, the model reads
/// the context's tokens once more, behind the cache. With p the softmax probabilities of these
/// queries over all rows that they see,
///   a(query head, row) = max over the queries of p,
///   s(head, row) = mean over the group of a, plus the mean over the layer's heads of that.
/// Each head keeps its rows with the largest s. All heads of a layer keep the same number: the k-th
/// best rows of its heads are one composite token, whose score is their mean. Of all layers'
/// composite tokens floor(layers * rows * (1 - ratio)) stay, see composite_rows. With
/// structured=off, all heads of all layers compete.
///
/// Shapes: a is (query head, row), tile by tile (PolicyLayer::attention_mass). With chunk=N the
/// model reads N tokens at a time, and their rows are freed before the next N: less memory, and
/// queries that do not see the chunks before their own.
///
/// Deviations: kvpress' options of the aggregations (mean for max, max for mean), of norms of
/// values and of a least number of rows are left out. With structured=off kvpress keeps floor(rows
/// of the model * (1 - ratio)), kvzap evicts floor(rows * ratio), which may be one row more.
///
/// Cost: a second prefill over the cache of the first, and the product of its queries with all keys
/// once more; 4 bytes for each row and query head, beside the full cache and the rows of a chunk.
PolicyInfo kvcompose() {
  PolicyInfo info;
  info.name = "kvcompose";
  info.paper = "KVCompose, arXiv 2509.05165";
  info.formula = "mean over the group of the largest p of the context, read again";
  info.needs = "the context, read again by the model";
  info.cost = "about 3 prefills; 4 bytes a row and query head, a full cache and a chunk";
  info.scores_again = false;
  info.repeats_context = true;
  info.repeats_without_words = true;
  info.repeat_chunk = "chunk";
  info.make_with<KvComposeParameters>([](const auto& p, const PolicySetup&) {
    return [adds_mean = p.head_mean] { return std::make_unique<KvCompose>(adds_mean); };
  });
  info.set_up_with<KvComposeParameters>(
      [](PolicyChoice& choice, const auto& p, const PolicySetup&) {
        if (!choice.budget.has_amount()) {
          throw Error(
              "policy kvcompose keeps a share of all pairs, whatever their scores: give an evict "
              "ratio, "
              "a number of tokens or a size, and no threshold");
        }
        choice.repeat.chunk = p.chunk;
        choice.repeat.is_bare = true;
        choice.budget.pool = Budget::Pool::model;
        choice.budget.safeguard = 0;
        choice.budget.is_composite = p.structured;
        choice.budget.counts_pools = !p.structured;
      });
  return info;
}

}  // namespace kvzap::policy
