#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <kvzap/engine/surrogate.hpp>
#include <kvzap/model/safetensors.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/host_threads.hpp"
#include "base/kokkos_compat.hpp"
#include "base/launch.hpp"
#include "base/machine.hpp"
#include "base/scratch.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"
#include "model/model_folder.hpp"
#include "model/weights.hpp"
#include "parallel/rank_exchange.hpp"

namespace kvzap {
namespace {

/// The code defines a surrogate's computation; a config with other settings belongs to other code.
void check_kind(const nlohmann::json& json, const std::filesystem::path& file) {
  const auto expect = [&](const char* field, const nlohmann::json& wanted) {
    const auto found = json.find(field);
    if (found == json.end() || found->is_null() || *found == wanted) return;
    std::string text = found->dump(-1, ' ', true);
    constexpr std::size_t longest = 80;
    if (text.size() > longest) text = text.substr(0, longest) + "...";
    throw Error(
        fmt::format("{}: {}: expected {}, found {}", file.string(), field, wanted.dump(), text));
  };
  expect("architectures", nlohmann::json::array({"KVzapModel"}));
  expect("model_type", "kvzap");
  for (const char* field :
       {"activation", "activation_function", "hidden_act", "hidden_activation"}) {
    expect(field, "gelu");
  }
}

using linalg::ConstVector;
using linalg::Matrix;
using linalg::Vector;
using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

/// scores (selected output, token) = output (token, selection(selected output)) + its bias.
void select_heads(const ExecutionSpace& exec, const Matrix& output,
                  const Kokkos::View<const int*, MemorySpace>& selection, const ConstVector& bias,
                  const Scorer::ScoreView& scores) {
  const std::int64_t heads = scores.extent(0);
  base::parallel_for(
      "kvzap::surrogate::select", Range(exec, 0, heads * scores.extent(1)),
      KOKKOS_LAMBDA(std::int64_t i) {
        const int selected = selection(i % heads);
        scores(i % heads, i / heads) = output(i / heads, selected) + bias(selected);
      });
}

/// GELU in its exact form, x * Phi(x), as torch.nn.GELU computes it by default.
void gelu(const ExecutionSpace& exec, const Matrix& values) {
  const std::int64_t count = values.extent(1);
  if (base::machine().on_host()) {
    base::host_for("kvzap::surrogate::gelu", values.extent(0), count * 8,
                   [=](std::int64_t i) { linalg::gelu(&values(i, 0), count); });
    return;
  }
  base::parallel_for(
      "kvzap::surrogate::gelu", Range(exec, 0, values.size()), KOKKOS_LAMBDA(std::int64_t i) {
        float& x = values(i / count, i % count);
        x = 0.5f * x * (1.0f + base::math::erf(x * 0.70710678f));
      });
}

}  // namespace

struct Surrogate::Layers {
 public:
  Layers(const model::WeightStore& store, const ModelConfig& model, const HeadPartition& partition,
         int rank, DType dtype, std::int64_t hidden_dim, std::optional<Communicator> ranks)
      : m_is_mlp(hidden_dim > 0), m_ranks(m_is_mlp ? ranks : std::nullopt) {
    const model::WeightSource source(store, dtype, WeightStorage::unpacked);
    const std::int64_t outputs = model.num_key_value_heads;
    const model::Ranges all_inputs = {{0, model.attention_inputs()}};
    const model::Ranges all_outputs = {{0, outputs}};
    const model::Ranges units = {m_ranks ? even_range(hidden_dim, m_ranks->size(), m_ranks->rank())
                                         : std::pair(std::int64_t{0}, hidden_dim)};
    for (int l = 0; l < model.num_hidden_layers; ++l) {
      const auto& heads = partition.heads(l, rank);
      Layer layer;
      layer.heads = static_cast<std::int64_t>(heads.size());
      const Kokkos::View<int*, MemorySpace> selection(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::surrogate::selection"),
          heads.size());
      const auto host = Kokkos::create_mirror_view(selection);
      const std::string name = fmt::format("layers.{}", l);
      if (m_is_mlp) {
        std::copy(heads.begin(), heads.end(), host.data());
        layer.hidden_weight = source.linear({{name + ".0.weight", hidden_dim, units}},
                                            model.attention_inputs(), all_inputs);
        layer.hidden_bias = source.vector({{name + ".0.bias", hidden_dim, units}});
        layer.weight =
            source.linear({{name + ".2.weight", outputs, all_outputs}}, hidden_dim, units);
        layer.bias = source.vector({{name + ".2.bias", outputs, all_outputs}});
      } else {
        model::Ranges rows;
        for (int head : heads) rows.emplace_back(head, head + 1);
        std::iota(host.data(), host.data() + host.size(), 0);
        layer.weight = source.linear({{name + ".weight", outputs, rows}}, model.attention_inputs(),
                                     all_inputs);
        layer.bias = source.vector({{name + ".bias", outputs, rows}});
      }
      Kokkos::deep_copy(selection, host);
      layer.selection = selection;
      m_layers.push_back(std::move(layer));
    }
  }

  bool is_mlp() const { return m_is_mlp; }

  void score(const ExecutionSpace& exec, int layer_index, const Scorer::InputView& hidden,
             const Scorer::ScoreView& scores) {
    const Layer& layer = m_layers.at(layer_index);
    const std::int64_t tokens = hidden.extent(0);
    if (static_cast<std::int64_t>(scores.extent(0)) != layer.heads ||
        static_cast<std::int64_t>(scores.extent(1)) != tokens) {
      throw Error(fmt::format("surrogate: scores are ({}, {}); expected ({}, {}) = (head, token)",
                              scores.extent(0), scores.extent(1), layer.heads, tokens));
    }
    if (tokens == 0) return;
    reserve(tokens);
    const Matrix output(m_output.data(), tokens, layer.weight.outputs());
    if (m_is_mlp && m_ranks && m_ranks->size() > 1) {
      // All ranks take part in the sum, even a rank whose part has failed.
      std::exception_ptr failure;
      try {
        multiply(exec, layer, hidden, output);
      } catch (...) {
        failure = std::current_exception();
      }
      m_exchange.sum(exec, *m_ranks, output);
      if (failure) std::rethrow_exception(failure);
    } else {
      multiply(exec, layer, hidden, output);
    }
    select_heads(exec, output, layer.selection, layer.bias, scores);
  }

  void reserve(std::int64_t tokens) {
    std::int64_t outputs = 0, units = 0;
    for (const Layer& layer : m_layers) {
      outputs = std::max(outputs, layer.weight.outputs());
      if (m_is_mlp) units = std::max(units, layer.hidden_weight.outputs());
    }
    base::reserve_scratch(m_output, tokens * outputs, "kvzap::surrogate::output");
    base::reserve_scratch(m_hidden, tokens * units, "kvzap::surrogate::hidden");
    if (m_ranks) m_exchange.reserve(*m_ranks, tokens * outputs, 0);
  }

 private:
  struct Layer {
    std::int64_t heads = 0;               // on this rank
    linalg::LinearWeights hidden_weight;  // (hidden units of this rank, input_dim), MLP only
    ConstVector hidden_bias;              // (hidden units of this rank), MLP only
    // MLP: (all KV heads, hidden units of this rank); linear: (heads of this rank, input_dim).
    linalg::LinearWeights weight;
    ConstVector bias;                                 // one for each output of weight
    Kokkos::View<const int*, MemorySpace> selection;  // output of each head of this rank
  };

  void multiply(const ExecutionSpace& exec, const Layer& layer, const Scorer::InputView& hidden,
                const Matrix& output) {
    if (!m_is_mlp) return m_linear(exec, hidden, layer.weight, ConstVector(), output);
    const Matrix activation(m_hidden.data(), hidden.extent(0), layer.hidden_weight.outputs());
    m_linear(exec, hidden, layer.hidden_weight, layer.hidden_bias, activation);
    gelu(exec, activation);
    m_linear(exec, activation, layer.weight, ConstVector(), output);
  }

  bool m_is_mlp;
  std::optional<Communicator> m_ranks;
  std::vector<Layer> m_layers;
  linalg::LinearMap m_linear;
  parallel::RankExchange m_exchange;
  Vector m_hidden;  // scratch
  Vector m_output;  // scratch
};

Surrogate::Surrogate(std::unique_ptr<Layers> layers) : m_layers(std::move(layers)) {}
Surrogate::Surrogate(Surrogate&&) noexcept = default;
Surrogate& Surrogate::operator=(Surrogate&&) noexcept = default;
Surrogate::~Surrogate() = default;

Surrogate Surrogate::load(const std::filesystem::path& folder, const ModelConfig& model,
                          const HeadPartition& partition, int rank, DType dtype,
                          std::optional<Communicator> ranks) {
  const auto file = folder / "config.json";
  model::check_folder(folder, "a surrogate's folder: config.json and model.safetensors");
  const auto json = files::read_json_object(file);
  check_kind(json, file);
  const files::JsonField fields(json, file.string());
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const auto expect = [&](const char* field, std::int64_t wanted, const char* of_model) {
    const std::int64_t found = fields.member(field).integer(1, most);
    if (found != wanted) {
      throw Error(
          fmt::format("{}: field {} is {}, but the model's {} is {}: the surrogate was made "
                      "for another model",
                      file.string(), field, found, of_model, wanted));
    }
  };
  expect("input_dim", model.attention_inputs(),
         model.shared_blocks ? "size of attention's input" : "hidden_size");
  expect("output_dim", model.num_key_value_heads, "num_key_value_heads");
  expect("n_modules", model.num_hidden_layers, "num_hidden_layers");

  const files::JsonField hidden = fields.member("hidden_dim");
  const std::int64_t hidden_dim = hidden.is_null() ? 0 : hidden.integer(1, most);
  const model::SafetensorsStore store(SafetensorsFolder::open(folder));
  return Surrogate(
      std::make_unique<Layers>(store, model, partition, rank, dtype, hidden_dim, ranks));
}

void Surrogate::score(const ExecutionSpace& exec, int layer, const PositionView& /*positions*/,
                      const InputView& hidden, const ScoreView& scores) {
  m_layers->score(exec, layer, hidden, scores);
}

void Surrogate::reserve(std::int64_t tokens) { m_layers->reserve(tokens); }

std::string Surrogate::kind() const { return m_layers->is_mlp() ? "mlp" : "linear"; }

}  // namespace kvzap
