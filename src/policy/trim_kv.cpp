#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <kvzap/model/safetensors.hpp>
#include <numeric>

#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "linalg/gemm.hpp"
#include "linalg/host/row_kernels.hpp"
#include "model/weights.hpp"
#include "parallel/rank_exchange.hpp"
#include "policy/new_scores.hpp"
#include "policy/registry.hpp"
#include "policy/row_math.hpp"
#include "policy/tensor_floats.hpp"

namespace kvzap::policy {
namespace {

using linalg::ConstVector;
using linalg::Matrix;
using linalg::Vector;

/// Rounds to 16 significant bits. A float product of the result and a whole number then determines
/// the result: rounding (product / number) again returns it.
KOKKOS_INLINE_FUNCTION float rounded_to_16_bits(float value) {
  const std::uint32_t word = base::float_bits(value);
  if ((word & 0x7f800000u) == 0x7f800000u) return value;
  const float result = base::bits_float((word + 0x7fu + ((word >> 8) & 1u)) & ~0xffu);
  // Smaller numbers may lose bits in products.
  return result > -1e-30f && result < 1e-30f ? 0.0f : result;
}

KOKKOS_INLINE_FUNCTION float log_sigmoid(float x) {
  const float tail = base::math::log1p(base::math::exp(x < 0 ? x : -x));
  return (x < 0 ? x : 0.0f) - tail;
}

// scores(head, token) = log_sigmoid(outputs(token, columns(head)) + bias(head))
void score_tokens(const ExecutionSpace& exec, const Matrix& outputs,
                  const Kokkos::View<const int*, MemorySpace>& columns, const ConstVector& bias,
                  const NewScores::View& scores) {
  const auto heads = static_cast<std::int64_t>(scores.extent(0));
  Kokkos::parallel_for(
      "kvzap::trim_kv::score",
      PolicyRange(exec, 0, heads * static_cast<std::int64_t>(scores.extent(1))),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads, head = i % heads;
        scores(head, token) =
            rounded_to_16_bits(log_sigmoid(outputs(token, columns(head)) + bias(head)));
      });
}

// values = silu(values + bias); an empty bias is 0
void activate(const ExecutionSpace& exec, const ConstVector& bias, const Matrix& values) {
  const auto columns = static_cast<std::int64_t>(values.extent(1));
  const bool has_bias = bias.size() > 0;
  if (base::machine().on_host()) {
    base::host_for("kvzap::trim_kv::silu", values.extent(0), columns * 8, [=](std::int64_t r) {
      for (std::int64_t c = 0; has_bias && c < columns; ++c) values(r, c) += bias(c);
      linalg::silu(&values(r, 0), columns);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::trim_kv::silu", PolicyRange(exec, 0, values.size()), KOKKOS_LAMBDA(std::int64_t i) {
        float& value = values(i / columns, i % columns);
        const float x = value + (has_bias ? bias(i % columns) : 0.0f);
        value = x / (1 + base::math::exp(-x));
      });
}

// scores(r) = age * log beta. Rows of earlier steps have this product for their age at that time.
void age(const ExecutionSpace& exec, const PolicyLayer::PositionView& positions,
         std::int64_t tokens_before, std::int64_t tokens, const HeadScores& scores) {
  Kokkos::parallel_for(
      "kvzap::trim_kv::age", PolicyRange(exec, 0, scores.extent(0)), KOKKOS_LAMBDA(std::int64_t r) {
        const std::int64_t position = positions(r);
        float log_beta = scores(r);
        if (position < tokens_before) {
          log_beta = rounded_to_16_bits(static_cast<float>(
              static_cast<double>(log_beta) / static_cast<double>(tokens_before + 1 - position)));
        }
        scores(r) = log_beta * static_cast<float>(tokens + 1 - position);
      });
}

/// Extents of the gates of a file.
struct GateShape {
  std::int64_t layers = 0;
  std::int64_t units = 0;  // of a hidden layer
  std::int64_t heads = 0;
  std::int64_t inputs = 0;
  bool is_deep = false;  // two hidden layers
};

std::string gate_name(std::int64_t layer) {
  return fmt::format("model.layers.{}.self_attn.retention_gate.", layer);
}

/// Throws if a value of the tensor is NaN or infinite.
void check_values(const TensorInfo& tensor) {
  const auto count = static_cast<std::int64_t>(tensor.bytes / size_of(tensor.dtype));
  constexpr std::int64_t part = 4096;
  float values[part];
  for (std::int64_t first = 0; first < count; first += part) {
    const std::int64_t some = std::min(part, count - first);
    floats_of(tensor, first, some, values);
    for (std::int64_t i = 0; i < some; ++i) {
      if (std::isfinite(values[i])) continue;
      throw Error(fmt::format("{}: tensor {}: value {} is {}; expected finite numbers", tensor.file,
                              tensor.name, first + i, values[i]));
    }
  }
}

/// Reads the extents, and checks names, shapes, types and values of all tensors.
GateShape checked_shape(const SafetensorsFolder& files, const std::string& path,
                        const PolicySetup& setup) {
  const ModelConfig& model = setup.config;
  const std::string first = gate_name(0);
  const TensorInfo* const linear1 = files.find(first + "linear1.weight");
  const TensorInfo* const bias = files.find(first + "bias");
  if (!linear1 || linear1->shape.size() != 2 || linear1->shape[0] < 1 || !bias ||
      bias->shape.size() != 1) {
    throw Error(
        fmt::format("{}: no matrix {}linear1.weight beside a vector {}bias; expected retention "
                    "gates of TRIM-KV (rg) or DBTrimKV (rg10)",
                    path, first, first));
  }
  GateShape shape;
  shape.units = linear1->shape[0];
  shape.inputs = linear1->shape[1];
  shape.heads = bias->shape[0];
  shape.is_deep = files.find(first + "linear3.weight") != nullptr;
  while (files.find(gate_name(shape.layers) + "linear1.weight")) ++shape.layers;
  const auto refuse = [&](const char* what, std::int64_t found, const char* field,
                          std::int64_t wanted) {
    if (found == wanted) return;
    throw Error(
        fmt::format("{}: gates of {} {}, but the model's {} is {}: they were made for another "
                    "model",
                    path, found, what, field, wanted));
  };
  refuse("KV heads", shape.heads, "num_key_value_heads", model.num_key_value_heads);
  refuse("inputs", shape.inputs, "hidden_size", model.attention_inputs());
  refuse("layers", shape.layers, "num_hidden_layers", model.num_hidden_layers);
  std::size_t known = 0;
  const auto check = [&](std::int64_t layer, const char* name, std::vector<std::int64_t> extents) {
    check_values(files.at(gate_name(layer) + name, extents));
    ++known;
  };
  for (std::int64_t l = 0; l < shape.layers; ++l) {
    check(l, "linear1.weight", {shape.units, shape.inputs});
    check(l, "linear1.bias", {shape.units});
    if (shape.is_deep) {
      check(l, "linear2.weight", {shape.units, shape.units});
      check(l, "linear2.bias", {shape.units});
    }
    check(l, shape.is_deep ? "linear3.weight" : "linear2.weight", {shape.heads, shape.units});
    check(l, "bias", {shape.heads});
  }
  if (files.names().size() != known) {
    throw Error(fmt::format("{}: {} tensors; expected the {} of {} retention gates", path,
                            files.names().size(), known, shape.layers));
  }
  return shape;
}

/// The gates of all layers. Ranks share the units of the first hidden layer and sum their outputs.
class Gates {
 public:
  Gates(const model::SafetensorsStore& store, const std::string& path, const PolicySetup& setup)
      : m_shape(checked_shape(store.files(), path, setup)), m_comm(setup.comm) {
    const model::WeightSource source(store, setup.dtype, WeightStorage::unpacked);
    const model::Ranges inputs = {{0, m_shape.inputs}}, units = {{0, m_shape.units}};
    const model::Ranges own = {even_range(m_shape.units, m_comm.size(), m_comm.rank())};
    for (std::int64_t l = 0; l < m_shape.layers; ++l) {
      const auto& heads = setup.partition.heads(static_cast<int>(l), m_comm.rank());
      model::Ranges rows;
      for (const int head : heads) rows.emplace_back(head, head + 1);
      const std::string name = gate_name(l);
      Layer layer;
      layer.first =
          source.linear({{name + "linear1.weight", m_shape.units, own}}, m_shape.inputs, inputs);
      layer.first_bias = source.vector({{name + "linear1.bias", m_shape.units, own}});
      const std::int64_t outputs = m_shape.is_deep ? m_shape.units : m_shape.heads;
      layer.second =
          source.linear({{name + "linear2.weight", outputs, {{0, outputs}}}}, m_shape.units, own);
      if (m_shape.is_deep) {
        layer.second_bias = source.vector({{name + "linear2.bias", m_shape.units, units}});
        layer.third =
            source.linear({{name + "linear3.weight", m_shape.heads, rows}}, m_shape.units, units);
      }
      layer.bias = source.vector({{name + "bias", m_shape.heads, rows}});
      layer.columns = columns_of(heads);
      m_layers.push_back(std::move(layer));
    }
  }

  /// Sets scores (head on this rank, token) to the log of beta. Collective.
  void score(const ExecutionSpace& exec, int layer_index, const linalg::ConstMatrix& hidden,
             const NewScores::View& scores) {
    const Layer& layer = m_layers.at(static_cast<std::size_t>(layer_index));
    const auto tokens = static_cast<std::int64_t>(hidden.extent(0));
    if (tokens == 0) return;
    const std::int64_t outputs = layer.second.outputs();
    base::reserve_scratch(m_outputs, tokens * outputs, "kvzap::trim_kv::outputs");
    const Matrix summed(m_outputs.data(), tokens, outputs);
    // All ranks take part in the sum, even a rank whose part has failed.
    std::exception_ptr failure;
    try {
      multiply(exec, layer, hidden, summed);
    } catch (...) {
      failure = std::current_exception();
    }
    m_exchange.sum(exec, m_comm, summed);
    if (failure) std::rethrow_exception(failure);
    if (scores.extent(0) == 0) return;
    if (!m_shape.is_deep) return score_tokens(exec, summed, layer.columns, layer.bias, scores);
    activate(exec, layer.second_bias, summed);
    const std::int64_t heads = layer.third.outputs();
    base::reserve_scratch(m_hidden, tokens * heads, "kvzap::trim_kv::hidden");
    const Matrix last(m_hidden.data(), tokens, heads);
    m_linear(exec, summed, layer.third, ConstVector(), last);
    score_tokens(exec, last, layer.columns, layer.bias, scores);
  }

 private:
  struct Layer {
    linalg::LinearWeights first, second, third;
    ConstVector first_bias, second_bias, bias;
    Kokkos::View<const int*, MemorySpace> columns;  // output of each head on this rank
  };

  // The third product has outputs for this rank's heads alone.
  Kokkos::View<const int*, MemorySpace> columns_of(const std::vector<int>& heads) const {
    const Kokkos::View<int*, MemorySpace> columns("kvzap::trim_kv::columns", heads.size());
    const auto host = Kokkos::create_mirror_view(columns);
    std::iota(host.data(), host.data() + host.size(), 0);
    if (!m_shape.is_deep) std::copy(heads.begin(), heads.end(), host.data());
    Kokkos::deep_copy(columns, host);
    return columns;
  }

  void multiply(const ExecutionSpace& exec, const Layer& layer, const linalg::ConstMatrix& hidden,
                const Matrix& summed) {
    const auto tokens = static_cast<std::int64_t>(hidden.extent(0));
    const std::int64_t units = layer.first.outputs();
    if (units == 0) return Kokkos::deep_copy(exec, summed, 0.0f);
    base::reserve_scratch(m_hidden, tokens * units, "kvzap::trim_kv::hidden");
    const Matrix activations(m_hidden.data(), tokens, units);
    m_linear(exec, hidden, layer.first, layer.first_bias, activations);
    activate(exec, ConstVector(), activations);
    m_linear(exec, activations, layer.second, ConstVector(), summed);
  }

  GateShape m_shape;
  Communicator m_comm;
  std::vector<Layer> m_layers;
  linalg::LinearMap m_linear;
  parallel::RankExchange m_exchange;
  Vector m_hidden, m_outputs;  // scratch
};

std::shared_ptr<Gates> load(const std::string& path, const PolicySetup& setup) {
  if (setup.config.activation != Activation::silu) {
    throw Error(
        "policy trim-kv: retention gates have the activation of their model, and only SiLU is "
        "known; the model has another one");
  }
  const model::SafetensorsStore store(SafetensorsFolder::open(path));
  return std::make_shared<Gates>(store, path, setup);
}

struct TrimKvParameters : PolicyParameters {
  std::string gates = file("gates", "", "safetensors file of the retention gates");
};

class TrimKv final : public Policy {
 public:
  explicit TrimKv(std::shared_ptr<Gates> gates) : m_gates(std::move(gates)) {}

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    // Hidden states exist only during a step, so later cuts need the scores of all tokens.
    needs.every_step = needs.accumulates = needs.ages = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    m_gates->score(layer.exec(), layer.layer(), packed_hidden(layer.exec(), block, m_hidden),
                   m_scores.block(layer, block));
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    m_scores.fill(layer, scores);
    const std::int64_t tokens = layer.extents().tokens;
    for (int h = 0; h < layer.heads(); ++h) {
      age(layer.exec(), layer.positions(h), tokens - layer.extents().new_tokens, tokens,
          scores_of(scores, h, 0, layer.rows(h)));
    }
  }

 private:
  std::shared_ptr<Gates> m_gates;
  NewScores m_scores;
  Vector m_hidden;  // scratch
};

}  // namespace

/// TRIM-KV (Bui et al., arXiv 2512.03324): a retention gate gives each row a share beta in (0, 1)
/// that remains of its worth after each further token. With the hidden state x that enters
/// attention, T tokens so far and a row's position p,
///
///   log beta = log_sigmoid(W_2 silu(W_1 x + b_1) + b),   score = (T + 1 - p) log beta
///
/// The order of rows changes with time, so a cut while the model generates judges all rows anew.
/// The gates of DBTrimKV (arXiv 2605.09649) have a second hidden layer, silu(W_2 … + b_2), and are
/// made for one budget over all layers: `+global`.
///
/// `gates`: the published weights (ngocbh/TrimKV-*, ngocbh/DBTrimKV-*), converted once by
///   tensors = torch.load("trimkv_weights.pth", map_location="cpu")
///   safetensors.torch.save_file({k: v.clone() for k, v in tensors.items()}, "gates.safetensors")
/// Layer l has model.layers.l.self_attn.retention_gate. linear1.weight (units, hidden_size),
/// linear1.bias (units), linear2.weight (KV heads, units) and bias (KV heads); with two hidden
/// layers linear2.weight (units, units), linear2.bias (units) and linear3.weight (KV heads, units).
///
/// Cost: a product of hidden states with hidden_size x units weights, shared by the ranks; a sum
/// over ranks of KV heads (two hidden layers: units) floats per token. Memory: 4 bytes for each row
/// of the step. The cache stores the scores. log beta has 16 significant bits, so that a later step
/// recovers it exactly from a score and the age at that time.
///
/// The age T + 1 - p is that of the authors' code; the paper counts T - p. The authors protect no
/// row (`--sink 0`); their cuts every `buffer_size` tokens are `--decode-every`. Their scores with
/// a key's norm or with several steps ahead, which are not their defaults, are left out, as are
/// gates of keys and values (rg2, rg3), of which none is published. kvpress has no such press.
PolicyInfo trim_kv() {
  PolicyInfo info;
  info.name = "trim-kv";
  info.paper = "TRIM-KV, arXiv 2512.03324; DBTrimKV, arXiv 2605.09649";
  info.formula = "age * log(beta), beta by a gate of the hidden state";
  info.needs = "hidden states; trained gates";
  info.cost = "a product of hidden states with the gates' hidden layer (hidden_size x 512)";
  info.make_with<TrimKvParameters>([](const auto& p, const PolicySetup& setup) {
    const std::shared_ptr<Gates> gates = load(p.gates, setup);
    return [=] { return std::make_unique<TrimKv>(gates); };
  });
  return info;
}

}  // namespace kvzap::policy
