#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/lab/collect.hpp>

#include "base/kokkos_compat.hpp"
#include "engine/watching.hpp"
#include "model/safetensors_writer.hpp"
#include "policy/query_statistics.hpp"

namespace kvzap {
namespace {

using policy::QueryStatistics;
using Range = policy::PolicyRange;

/// Moments of one layer's query heads on this rank.
struct Moments {
  /// (query head, head_dim)
  Kokkos::View<double**, Kokkos::LayoutRight, MemorySpace> mean;
  /// Sums of products around the mean: (query head, head_dim, head_dim).
  Kokkos::View<double***, Kokkos::LayoutRight, MemorySpace> products;
};

// Merges `count` queries with this mean and covariance (over count) into moments of `before`
// queries (Chan, Golub, LeVeque 1983):
//   products += count C + before count / (before + count) delta delta^T
//   mean += count / (before + count) delta, delta = their mean - mean
void merge_moments(const ExecutionSpace& exec, double before, double count,
                   const QueryStatistics::Means& mean,
                   const QueryStatistics::Covariances& covariance, const Moments& moments) {
  const auto heads = static_cast<std::int64_t>(mean.extent(0));
  const auto dim = static_cast<std::int64_t>(mean.extent(1));
  const double share = count / (before + count);
  const auto of_mean = moments.mean;
  const auto products = moments.products;
  Kokkos::parallel_for(
      "kvzap::query_moments::products", Range(exec, 0, heads * dim),
      KOKKOS_LAMBDA(const std::int64_t i) {
        const std::int64_t head = i / dim;
        const std::int64_t row = i % dim;
        const double delta = static_cast<double>(mean(head, row)) - of_mean(head, row);
        const double weight = before * share * delta;
        for (std::int64_t d = 0; d < dim; ++d) {
          products(head, row, d) +=
              count * static_cast<double>(covariance(head, row, d)) +
              weight * (static_cast<double>(mean(head, d)) - of_mean(head, d));
        }
      });
  Kokkos::parallel_for(
      "kvzap::query_moments::mean", Range(exec, 0, heads * dim),
      KOKKOS_LAMBDA(const std::int64_t i) {
        double& of_all = of_mean(i / dim, i % dim);
        of_all += share * (static_cast<double>(mean(i / dim, i % dim)) - of_all);
      });
}

/// Collects the queries of one text, layer by layer.
class QueryWatcher final : public Policy {
 public:
  /// before: queries that the moments already include.
  QueryWatcher(std::int64_t before, std::int64_t count, QueryStatistics& of_text,
               const std::vector<Moments>& moments)
      : m_before(before), m_count(count), m_of_text(of_text), m_moments(moments) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.frequencies = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_of_text.observe(layer, block);
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_of_text.finish(layer);
    if (m_count > 0) {
      merge_moments(layer.exec(), static_cast<double>(m_before), static_cast<double>(m_count),
                    m_of_text.means(), m_of_text.covariances(), m_moments.at(layer.layer()));
    }
    engine::keep_first_row(layer.exec(), scores);
  }

 private:
  std::int64_t m_before;
  std::int64_t m_count;
  QueryStatistics& m_of_text;
  const std::vector<Moments>& m_moments;
};

std::int64_t counted(const std::vector<TokenId>& ids, std::int64_t sink) {
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(ids.size()) - sink);
}

// Broadcasts the tokens of rank 0's text. Collective.
std::vector<TokenId> share_ids(const std::vector<CollectText>& texts, std::int64_t index,
                               const Communicator& comm) {
  std::vector<TokenId> ids;
  if (comm.is_root()) ids = texts.at(static_cast<std::size_t>(index)).ids;
  comm.broadcast(ids, 0);
  return ids;
}

// Adds this rank's values, by query head, to `all` (query head of the model, value) as float.
template <class View>
void place(const View& values, const std::vector<int>& kv_heads, std::int64_t group,
           std::int64_t size, double by, std::vector<float>& all) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), values);
  for (std::size_t h = 0; h < kv_heads.size(); ++h) {
    const double* const source = host.data() + static_cast<std::int64_t>(h) * group * size;
    float* const target = all.data() + kv_heads[h] * group * size;
    for (std::int64_t i = 0; i < group * size; ++i) target[i] = static_cast<float>(by * source[i]);
  }
}

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

// Gathers the ranks' heads on rank 0. Collective.
void gather_moments(const std::vector<Moments>& moments, const ModelConfig& config,
                    const HeadPartition& partition, const Communicator& comm,
                    QueryMoments& result) {
  const std::int64_t dim = config.head_dim;
  const std::int64_t group = config.num_attention_heads / config.num_key_value_heads;
  const double by = 1 / static_cast<double>(result.queries - 1);
  // Each head belongs to one rank. The others add zeros, which is exact.
  std::vector<float> mean, covariance;
  comm.agree([&] {
    mean.resize(static_cast<std::size_t>(config.num_attention_heads * dim));
    covariance.resize(mean.size() * static_cast<std::size_t>(dim));
    if (!comm.is_root()) return;
    result.mean.reserve(mean.size() * moments.size());
    result.covariance.reserve(covariance.size() * moments.size());
  });
  for (std::size_t l = 0; l < moments.size(); ++l) {
    const std::vector<int>& heads = partition.heads(static_cast<int>(l), comm.rank());
    std::fill(mean.begin(), mean.end(), 0.0F);
    std::fill(covariance.begin(), covariance.end(), 0.0F);
    place(moments[l].mean, heads, group, dim, 1, mean);
    place(moments[l].products, heads, group, dim * dim, by, covariance);
    comm.all_reduce_sum(mean.data(), mean.size());
    comm.all_reduce_sum(covariance.data(), covariance.size());
    comm.agree_on_root([&] {
      if (!all_finite(mean) || !all_finite(covariance)) {
        throw Error(fmt::format(
            "the queries of layer {} are not all finite numbers, or their squares are not; "
            "expected a value type that holds them, such as f32",
            l));
      }
      result.mean.insert(result.mean.end(), mean.begin(), mean.end());
      result.covariance.insert(result.covariance.end(), covariance.begin(), covariance.end());
    });
  }
}

}  // namespace

QueryMoments collect_query_moments(const std::shared_ptr<const Model>& model,
                                   const std::vector<CollectText>& texts, std::int64_t sink,
                                   const Communicator& comm, const std::function<bool()>& stop,
                                   const ProgressCallback& progress) {
  const ModelConfig& config = model->config();
  const std::int64_t group = config.num_attention_heads / config.num_key_value_heads;
  auto total = static_cast<std::int64_t>(texts.size());
  comm.agree_on_root([&] {
    std::int64_t queries = 0;
    for (const CollectText& text : texts) queries += counted(text.ids, sink);
    if (queries < 2) {
      throw Error(fmt::format(
          "texts have {} tokens after the first {} of each; a covariance needs at least 2", queries,
          sink));
    }
  });
  comm.broadcast(&total, sizeof(total), 0);

  std::vector<Moments> moments;
  comm.agree([&] {
    for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
      const auto heads =
          static_cast<std::int64_t>(model->partition().heads(l, comm.rank()).size()) * group;
      Moments of_layer;
      of_layer.mean = decltype(of_layer.mean)("kvzap::query_moments::mean", heads, config.head_dim);
      of_layer.products = decltype(of_layer.products)("kvzap::query_moments::products", heads,
                                                      config.head_dim, config.head_dim);
      moments.push_back(of_layer);
    }
  });
  // Without a history: every text is one step.
  QueryStatistics of_text(true, sink, 0);
  QueryMoments result;
  std::vector<TokenId> ids;
  const CacheOptions options =
      engine::watching_options("query statistics", [&]() -> std::unique_ptr<Policy> {
        return std::make_unique<QueryWatcher>(result.queries, counted(ids, sink), of_text, moments);
      });
  std::unique_ptr<Engine> engine;
  comm.agree([&] { engine = Engine::create(model, nullptr, options, comm); });

  while (result.texts < total && !result.stopped) {
    ids = share_ids(texts, result.texts, comm);
    if (progress) progress("texts", result.texts, total);
    const SequenceId sequence = engine->add_sequence();
    engine->step(StepBatch(sequence, ids, engine->rule(StepPart::context), StepOutput::none));
    engine->free_sequence(sequence);
    ++result.texts;
    result.queries += counted(ids, sink);
    result.tokens += static_cast<std::int64_t>(ids.size());
    result.stopped = comm.all_reduce_max(stop && stop() ? std::int64_t{1} : std::int64_t{0}) != 0;
  }
  result.stopped = result.stopped && result.texts < total;
  if (progress) progress("texts", result.texts, total);
  if (!result.stopped) gather_moments(moments, config, model->partition(), comm, result);
  return result;
}

void write_query_moments(const std::filesystem::path& file, const QueryMoments& moments,
                         const ModelConfig& config,
                         const std::map<std::string, std::string>& metadata) {
  const std::int64_t layers = config.num_hidden_layers;
  const std::int64_t heads = config.num_attention_heads;
  const std::int64_t dim = config.head_dim;
  model::write_safetensors(
      file,
      {{"query_mean", "F32", {layers, heads, dim}, moments.mean.data()},
       {"query_cov", "F32", {layers, heads, dim, dim}, moments.covariance.data()}},
      metadata, "query statistics");
}

}  // namespace kvzap
