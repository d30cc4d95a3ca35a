#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/model/safetensors.hpp>

#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "model/weights.hpp"
#include "policy/new_scores.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/tensor_floats.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstVector;
using linalg::Matrix;
using linalg::Vector;
using Range = PolicyRange;
using ScoreView = Policy::ScoreView;

// The epsilon of torch's Qwen3RMSNorm.
constexpr float norm_epsilon = 1e-6f;

// Extents of a gate.
struct GateShape {
  std::int64_t heads = 0;  // of the model
  std::int64_t group = 0;  // queries per head
  std::int64_t dim = 0;    // dimensions of a query and a key
  std::int64_t sink = 0;   // learned keys beside the token's own
};

// Input of a gate's kernel, for this rank's heads.
struct GateViews {
  Matrix queries;              // (token, (head, query, dim))
  Matrix keys;                 // (token, (head, dim))
  ConstVector q_norm, k_norm;  // (dim)
  ConstVector base;            // (head, sink, dim)
  ConstVector bias;            // (head, query)
};

KOKKOS_INLINE_FUNCTION float inverse_norm(const float* values, int dim) {
  float sum = 0;
  for (int i = 0; i < dim; ++i) sum += values[i] * values[i];
  return 1.0f / base::math::sqrt(sum / static_cast<float>(dim) + norm_epsilon);
}

// scores(head, token) = mean over queries of 1 / (1 + sum over sinks of exp(base - own))
void score_gate(const ExecutionSpace& exec, const GateViews& views, const GateShape& shape,
                const ScoreView& scores) {
  const auto heads = static_cast<std::int64_t>(scores.extent(0));
  const int group = static_cast<int>(shape.group), dim = static_cast<int>(shape.dim);
  const int sink = static_cast<int>(shape.sink);
  const float scale = 1.0f / base::math::sqrt(static_cast<float>(dim));
  const Matrix queries = views.queries, keys = views.keys;
  const ConstVector q_norm = views.q_norm, k_norm = views.k_norm, bases = views.base;
  const ConstVector biases = views.bias;
  Kokkos::parallel_for(
      "kvzap::fastkvzip::score",
      Range(exec, 0, heads * static_cast<std::int64_t>(scores.extent(1))),
      KOKKOS_LAMBDA(std::int64_t item) {
        const std::int64_t token = item / heads, head = item % heads;
        const float* const key = &keys(token, head * dim);
        const float* const base = bases.data() + head * sink * dim;
        const float key_scale = scale * inverse_norm(key, dim);
        float score = 0;
        for (int g = 0; g < group; ++g) {
          const float* const query = &queries(token, (head * group + g) * dim);
          const float query_scale = inverse_norm(query, dim);
          float own = 0;
          for (int i = 0; i < dim; ++i) own += key[i] * k_norm(i) * (query[i] * q_norm(i));
          own = own * key_scale * query_scale + biases(head * group + g);
          float others = 0;
          for (int s = 0; s < sink; ++s) {
            float dot = 0;
            for (int i = 0; i < dim; ++i) dot += base[s * dim + i] * (query[i] * q_norm(i));
            others += base::math::exp(dot * scale * query_scale - own);
          }
          score += 1.0f / (1.0f + others);
        }
        scores(head, token) = score / static_cast<float>(group);
      });
}

// Returns the values for `heads` from a tensor whose first extent is the model's heads.
ConstVector of_heads(const TensorInfo& tensor, const std::vector<int>& heads, const char* label) {
  const std::size_t part =
      tensor.bytes / size_of(tensor.dtype) / static_cast<std::size_t>(tensor.shape[0]);
  const Vector device(Kokkos::view_alloc(Kokkos::WithoutInitializing, std::string(label)),
                      heads.size() * part);
  const auto host = Kokkos::create_mirror_view(device);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    floats_of(tensor, heads[h] * static_cast<std::int64_t>(part), static_cast<std::int64_t>(part),
              host.data() + h * part);
  }
  Kokkos::deep_copy(device, host);
  return device;
}

GateShape shape_of(const SafetensorsFolder& files, const std::string& path,
                   const ModelConfig& model) {
  const auto extents = [&](const char* name, std::size_t rank) {
    const TensorInfo* const tensor = files.find(name);
    if (!tensor || tensor->shape.size() != rank ||
        std::find(tensor->shape.begin(), tensor->shape.end(), 0) != tensor->shape.end()) {
      throw Error(
          fmt::format("{}: no tensor {} of {} dimensions; expected gates of Fast KVzip as "
                      "LAYER.q_proj.weight, .q_proj.bias, .k_proj.weight, .q_norm.weight, "
                      ".k_norm.weight, .k_base and .b",
                      path, name, rank));
    }
    return tensor->shape;
  };
  const auto base = extents("0.k_base", 4);
  GateShape shape;
  shape.heads = base[0];
  shape.sink = base[2];
  shape.dim = base[3];
  shape.group = extents("0.b", 3)[2];
  const std::int64_t inputs = extents("0.q_proj.weight", 2)[1];
  const auto refuse = [&](const char* what, std::int64_t found, const char* field,
                          std::int64_t wanted) {
    if (found == wanted) return;
    throw Error(
        fmt::format("{}: gates of {} {}, but the model's {} is {}: they were made for "
                    "another model",
                    path, found, what, field, wanted));
  };
  refuse("KV heads", shape.heads, "num_key_value_heads", model.num_key_value_heads);
  refuse("inputs", inputs, "hidden_size", model.attention_inputs());
  std::int64_t layers = 0;
  while (files.find(fmt::format("{}.q_proj.weight", layers))) ++layers;
  refuse("layers", layers, "num_hidden_layers", model.num_hidden_layers);
  return shape;
}

// Gates of all layers, for this rank's heads.
class Gates {
 public:
  Gates(const model::SafetensorsStore& store, const std::string& path, const PolicySetup& setup)
      : m_shape(shape_of(store.files(), path, setup.config)) {
    const SafetensorsFolder& files = store.files();
    const model::WeightSource source(store, setup.dtype, WeightStorage::unpacked);
    const std::int64_t dim = m_shape.dim, group = m_shape.group;
    const model::Ranges inputs = {{0, setup.config.attention_inputs()}};
    const model::Ranges dims = {{0, dim}};
    for (int l = 0; l < static_cast<int>(setup.config.num_hidden_layers); ++l) {
      const auto& heads = setup.partition.heads(l, setup.comm.rank());
      model::Ranges of_queries, of_keys;
      for (const int head : heads) {
        of_queries.emplace_back(head * group * dim, (head + 1) * group * dim);
        of_keys.emplace_back(head * dim, (head + 1) * dim);
      }
      const std::string name = fmt::format("{}.", l);
      const std::int64_t queries = m_shape.heads * group * dim, keys = m_shape.heads * dim;
      Layer layer;
      layer.q = source.linear({{name + "q_proj.weight", queries, of_queries}},
                              setup.config.attention_inputs(), inputs);
      layer.q_bias = source.vector({{name + "q_proj.bias", queries, of_queries}});
      layer.k = source.linear({{name + "k_proj.weight", keys, of_keys}},
                              setup.config.attention_inputs(), inputs);
      layer.q_norm = source.vector({{name + "q_norm.weight", dim, dims}});
      layer.k_norm = source.vector({{name + "k_norm.weight", dim, dims}});
      layer.base = of_heads(files.at(name + "k_base", {m_shape.heads, 1, m_shape.sink, dim}), heads,
                            "kvzap::fastkvzip::base");
      layer.bias = of_heads(files.at(name + "b", {m_shape.heads, 1, group}), heads,
                            "kvzap::fastkvzip::bias");
      m_layers.push_back(std::move(layer));
    }
  }

  /// Sets scores (head on this rank, token) from hidden (token, hidden_size).
  void score(const ExecutionSpace& exec, int layer_index, const linalg::ConstMatrix& hidden,
             const ScoreView& scores) {
    if (scores.extent(0) == 0 || scores.extent(1) == 0) return;
    const Layer& layer = m_layers.at(static_cast<std::size_t>(layer_index));
    const auto tokens = static_cast<std::int64_t>(hidden.extent(0));
    base::reserve_scratch(m_queries, tokens * layer.q.outputs(), "kvzap::fastkvzip::queries");
    base::reserve_scratch(m_keys, tokens * layer.k.outputs(), "kvzap::fastkvzip::keys");
    const Matrix queries(m_queries.data(), tokens, layer.q.outputs());
    const Matrix keys(m_keys.data(), tokens, layer.k.outputs());
    m_linear(exec, hidden, layer.q, layer.q_bias, queries);
    m_linear(exec, hidden, layer.k, ConstVector(), keys);
    score_gate(exec, {queries, keys, layer.q_norm, layer.k_norm, layer.base, layer.bias}, m_shape,
               scores);
  }

 private:
  struct Layer {
    linalg::LinearWeights q, k;
    ConstVector q_bias, q_norm, k_norm, base, bias;
  };

  GateShape m_shape;
  std::vector<Layer> m_layers;
  linalg::LinearMap m_linear;
  Vector m_queries, m_keys;  // scratch
};

std::shared_ptr<Gates> load(const std::string& path, const PolicySetup& setup) {
  const model::SafetensorsStore store(SafetensorsFolder::open(path));
  return std::make_shared<Gates>(store, path, setup);
}

// The gates' scores of rows that score() set to 1 because they were the newest. In a later step
// they are no longer the newest. Indexed by position, so that a step may start again after a
// failure or from a checkpoint.
struct Protected {
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>
      gates;  // (head, position - first); NaN if none
  std::int64_t first = 0;
};

// Makes room for positions from `first` to `end` - 1, and keeps the contents.
void grow(const ExecutionSpace& exec, std::int64_t heads, std::int64_t first, std::int64_t end,
          Protected& rows) {
  const auto known = static_cast<std::int64_t>(rows.gates.extent(1));
  if (known == 0) rows.first = first;
  first = std::min(first, rows.first);
  end = std::max(end, rows.first + known);
  if (first == rows.first && end == rows.first + known) return;
  // Grows by half, so that steps of one token do not copy all scores each time.
  const std::int64_t columns = std::max(end - first, known + known / 2);
  const decltype(rows.gates) gates("kvzap::fastkvzip::protected", heads, columns);
  Kokkos::deep_copy(exec, gates, std::nanf(""));
  if (known > 0) {
    const auto begin = rows.first - first;
    Kokkos::deep_copy(exec,
                      Kokkos::subview(gates, Kokkos::ALL, std::make_pair(begin, begin + known)),
                      rows.gates);
    base::fence(exec, "kvzap::fastkvzip: the smaller copy goes");
  }
  rows.gates = gates;
  rows.first = first;
}

// Removes the positions from `begin` to `end` - 1.
void forget(const ExecutionSpace& exec, std::int64_t begin, std::int64_t end,
            const Protected& rows) {
  const auto gates = rows.gates;
  begin = std::max<std::int64_t>(0, begin - rows.first);
  const std::int64_t count = std::max<std::int64_t>(0, end - rows.first - begin);
  const float nan = std::nanf("");
  Kokkos::parallel_for(
      "kvzap::fastkvzip::forget",
      Range(exec, 0, static_cast<std::int64_t>(gates.extent(0)) * count),
      KOKKOS_LAMBDA(std::int64_t i) { gates(i / count, begin + i % count) = nan; });
}

// Restores the gates' scores of a head's rows, and protects those at positions before `sink` and
// from `newest` on.
void protect(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions, int head,
             const Protected& rows, std::int64_t sink, std::int64_t newest,
             const ScoreView& scores) {
  const auto gates = rows.gates;
  const std::int64_t first = rows.first;
  Kokkos::parallel_for(
      "kvzap::fastkvzip::protect", Range(exec, 0, static_cast<std::int64_t>(positions.extent(0))),
      KOKKOS_LAMBDA(std::int64_t row) {
        const std::int64_t position = positions(row);
        float score = scores(head, row);
        if (position >= first) {
          float& gate = gates(head, position - first);
          if (gate == gate) score = gate;
          if (position >= newest) {
            gate = score;
            score = 1;
          }
        }
        scores(head, row) = position < sink ? 1.0f : score;
      });
}

struct FastKvzipParameters : PolicyParameters {
  std::string gates = file("gates", "", "safetensors file of the gates");
  bool layerwise = flag("layerwise", false, "every layer keeps the same number of rows");
  std::int64_t sink = integer("sink", 4, {0, 1 << 24}, "first tokens that stay");
  std::int64_t window =
      integer("window", 4096, {1, 1 << 24}, "newest tokens that stay, of 32000 tokens or more");
  double window_ratio =
      number("window-ratio", 0.02, {0, 1}, "share of newest tokens that stay, below 32000 tokens");
};

class FastKvzip final : public Policy {
 public:
  FastKvzip(std::shared_ptr<Gates> gates, const FastKvzipParameters& options)
      : m_gates(std::move(gates)), m_options(options) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    // Hidden states exist only during a step, so scoring again needs the scores of all tokens.
    needs.every_step = needs.accumulates = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_gates->score(layer.exec(), layer.layer(), packed_hidden(layer.exec(), block, m_hidden),
                   m_scores.block(layer, block));
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_scores.fill(layer, scores);
    const std::int64_t tokens = layer.extents().tokens;
    const std::int64_t newest = std::max<std::int64_t>(0, tokens - window_of(tokens));
    m_protected.resize(static_cast<std::size_t>(layer.extents().layers));
    Protected& rows = m_protected.at(static_cast<std::size_t>(layer.layer()));
    grow(layer.exec(), layer.heads(), newest, tokens, rows);
    // Another token may have had this position before.
    forget(layer.exec(), tokens - layer.extents().new_tokens, tokens, rows);
    for (int head = 0; head < layer.heads(); ++head) {
      protect(layer.exec(), layer.positions(head), head, rows, m_options.sink, newest, scores);
    }
  }

 private:
  static constexpr std::int64_t long_context = 32000;

  std::int64_t window_of(std::int64_t tokens) const {
    if (tokens >= long_context) return m_options.window;
    return std::max<std::int64_t>(
        1, static_cast<std::int64_t>(static_cast<double>(tokens) * m_options.window_ratio));
  }

  std::shared_ptr<Gates> m_gates;
  FastKvzipParameters m_options;
  NewScores m_scores;
  std::vector<Protected> m_protected;  // (layer)
  Vector m_hidden;                     // scratch
};

}  // namespace

/// Fast KVzip (arXiv 2601.17668): a gate for each KV head scores rows from the hidden state x that
/// enters attention. For each of its queries g it has q_g = norm(Q_g x + c_g). With k = norm(K x),
///   score = mean over g of 1 / (1 + sum over s of exp((b_s . q_g - k . q_g) / sqrt(d) - bias_g))
/// with learned keys b_s. The first `sink` positions and the newest rows get 1. The newest rows are
/// max(1, floor(T * window-ratio)) of T tokens, and `window` rows from 32000 tokens on. As in
/// kvpress, the heads of all layers compete and floor(rows * ratio) rows are evicted; with
/// layerwise=on the heads of a layer compete.
///
/// `gates`: the published weights, converted once by
///   layers = torch.load("q4_dim16_sink16.pt", weights_only=False)["module"]
///   tensors = {f"{i}.{k}": v.contiguous()
///              for i, layer in enumerate(layers) for k, v in layer.items()}
///   safetensors.torch.save_file(tensors, "gates.safetensors")
/// Shapes: q_proj (heads * g * d, hidden_size), k_proj (heads * d, hidden_size), k_base (heads, 1,
/// sinks, d), b (heads, 1, g).
///
/// Cost: products of hidden states with heads * (g + 1) * d outputs, and O(heads * g * sinks * d)
/// per token. Memory: 4 bytes for each row of the step and for each row that was among the newest
/// of a step.
PolicyInfo fastkvzip() {
  PolicyInfo info;
  info.name = "fastkvzip";
  info.paper = "Fast KVzip, arXiv 2601.17668";
  info.formula = "mean over queries of a sigmoid-like gate of the hidden state";
  info.needs = "hidden states; trained gates";
  info.cost = "a product of hidden states with KV heads x (queries + 1) x 16 outputs";
  info.layerwise = "layerwise";
  info.make_with<FastKvzipParameters>([](const auto& p, const PolicySetup& setup) {
    const std::shared_ptr<Gates> gates = load(p.gates, setup);
    return [=] { return std::make_unique<FastKvzip>(gates, p); };
  });
  info.set_up_with<FastKvzipParameters>(
      [](PolicyChoice& choice, const auto& p, const PolicySetup&) {
        if (!choice.budget.has_amount()) return;
        choice.budget.pool = p.layerwise ? Budget::Pool::layer : Budget::Pool::model;
        choice.budget.counts_pools = true;
        choice.budget.safeguard = 0;
      });
  return info;
}

}  // namespace kvzap::policy
