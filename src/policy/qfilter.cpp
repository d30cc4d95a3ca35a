#include <kvzap/model/safetensors.hpp>

#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/tensor_floats.hpp"

namespace kvzap::policy {
namespace {

/// (layer, KV head of the model, head_dim), one after the other.
using Filters = Kokkos::View<const float*, MemorySpace>;

Filters load(const std::string& file, const ModelConfig& config) {
  const auto folder = SafetensorsFolder::open(file);
  const TensorInfo& tensor = folder.at(
      "q_filters", {config.num_hidden_layers, config.num_key_value_heads, config.head_dim});
  const std::size_t count = tensor.bytes / size_of(tensor.dtype);
  const Kokkos::View<float*, MemorySpace> filters("kvzap::policy::qfilter", count);
  const auto host = Kokkos::create_mirror_view(filters);
  floats_of(tensor, 0, static_cast<std::int64_t>(count), host.data());
  Kokkos::deep_copy(filters, host);
  return filters;
}

void negative_products(const ExecutionSpace& exec, const PolicyLayer::RowsView& keys,
                       const Filters& filters, std::int64_t filter, int head,
                       const Policy::ScoreView& scores) {
  const std::int64_t dim = keys.extent(1);
  Kokkos::parallel_for(
      "kvzap::policy::qfilter", PolicyRange(exec, 0, keys.extent(0)),
      KOKKOS_LAMBDA(std::int64_t r) {
        scores(head, r) = -dot(&keys(r, 0), &filters(filter * dim), dim);
      });
}

/// The queries of a head point in one direction, and keys in that direction get attention. The
/// score of a row is minus the product of its key, after RoPE, with the head's filter, a direction
/// learned from queries (Godey et al.: "Q-Filters", arXiv 2503.02812).
///
/// One pass over the keys, (rows, head_dim) of each head. Extra memory only for the filters,
/// (layers, KV heads, head_dim). They are in `filters`, a safetensors file as published for a model
/// (nthngdy/*_qfilt), under the name q_filters.
///
/// kvpress rounds filters to the model's type. Here they are floats, like the keys that policies
/// see.
class QFilter final : public Policy {
 public:
  explicit QFilter(Filters filters) : m_filters(std::move(filters)) {}

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    for (int h = 0; h < layer.heads(); ++h) {
      const std::int64_t filter =
          static_cast<std::int64_t>(layer.layer()) * layer.extents().kv_heads +
          layer.extents().heads[h];
      negative_products(layer.exec(), layer.keys(h), m_filters, filter, h, scores);
    }
  }

 private:
  Filters m_filters;
};

struct QFilterParameters : PolicyParameters {
  std::string filters =
      file("filters", "", "safetensors file with q_filters (layers, KV heads, head_dim)");
};

}  // namespace

PolicyInfo qfilter() {
  PolicyInfo info;
  info.name = "qfilter";
  info.paper = "Q-Filters, arXiv 2503.02812";
  info.formula = "-(f . k)";
  info.needs = "keys, learned filters";
  info.cost = "O(rows * head_dim), no extra memory";
  info.judges_tokens = true;
  info.scores_parts = true;
  info.make_with<QFilterParameters>([](const auto& p, const PolicySetup& setup) {
    const Filters filters = load(p.filters, setup.config);
    return [filters] { return std::make_unique<QFilter>(filters); };
  });
  return info;
}

}  // namespace kvzap::policy
