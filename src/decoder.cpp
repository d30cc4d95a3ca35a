#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/decoder.hpp>

#include "detail/gemm.hpp"
#include "detail/kokkos_compat.hpp"
#include "detail/row_kernels.hpp"
#include "detail/scratch.hpp"

namespace kvzap {
namespace {

using detail::ConstMatrix;
using detail::ConstVector;
using detail::Matrix;
using detail::Vector;
using Range = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;

// Tokens whose activations exist at once. Enough to run the products at full rate, few enough that
// activations stay small beside weights and cache.
constexpr std::int64_t block_tokens = 512;

/// output = input / sqrt(mean(input^2) + eps) * weight, row by row; (token, hidden).
void rms_norm(const ExecutionSpace& exec, const ConstMatrix& input, const ConstVector& weight,
              float eps, const Matrix& output) {
  const std::int64_t size = input.extent(1);
  Kokkos::parallel_for(
      "kvzap::decoder::rms_norm", Range(exec, 0, input.extent(0)), KOKKOS_LAMBDA(std::int64_t i) {
        float sum = 0;
        for (std::int64_t d = 0; d < size; ++d) sum += input(i, d) * input(i, d);
        const float factor = 1.0f / detail::math::sqrt(sum / static_cast<float>(size) + eps);
        for (std::int64_t d = 0; d < size; ++d) output(i, d) = input(i, d) * factor * weight(d);
      });
}

/// Per head: RMS norm if the model has one, then RoPE (Su et al., arXiv 2104.09864) in the layout
/// of transformers, where dimension d is rotated with d + dim / 2. In place; (token, heads * dim).
/// angles: (token, dim / 2, 2), cosine and sine.
void norm_and_rotate(const ExecutionSpace& exec, const Matrix& rows, int dim,
                     const ConstVector& norm_weight, float eps,
                     const Kokkos::View<const float***, Kokkos::LayoutRight, MemorySpace>& angles,
                     std::int64_t first) {
  const std::int64_t heads = rows.extent(1) / dim;
  if (heads == 0) return;
  const bool has_norm = norm_weight.extent(0) > 0;
  const int half_dim = dim / 2;
  Kokkos::parallel_for(
      "kvzap::decoder::norm_and_rotate", Range(exec, 0, rows.extent(0) * heads),
      KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t token = i / heads;
        float* x = &rows(token, (i % heads) * dim);
        if (has_norm) {
          float sum = 0;
          for (int d = 0; d < dim; ++d) sum += x[d] * x[d];
          const float factor = 1.0f / detail::math::sqrt(sum / static_cast<float>(dim) + eps);
          for (int d = 0; d < dim; ++d) x[d] *= factor * norm_weight(d);
        }
        for (int d = 0; d < half_dim; ++d) {
          const float cosine = angles(first + token, d, 0);
          const float sine = angles(first + token, d, 1);
          const float low = x[d];
          const float high = x[d + half_dim];
          x[d] = low * cosine - high * sine;
          x[d + half_dim] = high * cosine + low * sine;
        }
      });
}

void add(const ExecutionSpace& exec, const Matrix& target, const ConstMatrix& summand) {
  const std::int64_t columns = target.extent(1);
  Kokkos::parallel_for(
      "kvzap::decoder::add", Range(exec, 0, target.extent(0)), KOKKOS_LAMBDA(std::int64_t i) {
        for (std::int64_t d = 0; d < columns; ++d) target(i, d) += summand(i, d);
      });
}

void silu_times(const ExecutionSpace& exec, const Matrix& gate, const ConstMatrix& up) {
  const std::int64_t columns = gate.extent(1);
  if constexpr (detail::runs_on_host) {
    Kokkos::parallel_for(
        "kvzap::decoder::silu",
        Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace>(0, gate.extent(0)),
        [=](std::int64_t i) { detail::silu_times(&gate(i, 0), &up(i, 0), columns); });
  } else {
    Kokkos::parallel_for(
        "kvzap::decoder::silu", Range(exec, 0, gate.size()), KOKKOS_LAMBDA(std::int64_t i) {
          float& x = gate(i / columns, i % columns);
          x = x / (1.0f + detail::math::exp(-x)) * up(i / columns, i % columns);
        });
  }
}

/// Sum over ranks, in place.
void all_reduce(const ExecutionSpace& exec, const Communicator& comm, const Matrix& values) {
  if (comm.size() == 1) return;
  detail::fence(exec, "kvzap::decoder: MPI reads what the instance wrote");
  auto host = Kokkos::create_mirror_view(values);
  Kokkos::deep_copy(host, values);
  comm.all_reduce_sum(host.data(), host.size());
  Kokkos::deep_copy(values, host);
}

}  // namespace

template <class Value, PageOrder order>
struct Decoder<Value, order>::Scratch {
  // Grown on demand, kept between steps: no step of a length seen before allocates activations.
  std::vector<Vector> buffers = std::vector<Vector>(8);
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> angles;
  Vector inverse_frequencies;
  // Keys and values of the step's tokens, one layer's: (token, head, dim).
  Kokkos::View<Value*, MemorySpace> chunk_keys, chunk_values;
  Vector chunk_scores;
  MeteredBytes chunk_bytes;
  detail::LinearMap linear;

  Matrix matrix(int index, std::int64_t rows, std::int64_t columns) {
    Vector& buffer = buffers[index];
    detail::reserve_scratch(buffer, rows * columns, "kvzap::decoder::activations");
    return Matrix(buffer.data(), rows, columns);
  }

  void reserve_chunk(std::int64_t values, std::int64_t scores, MemoryMeter* meter) {
    if (static_cast<std::int64_t>(chunk_keys.extent(0)) < values) {
      release_chunk();
      detail::reserve_scratch(chunk_keys, values, "kvzap::decoder::chunk_keys");
      detail::reserve_scratch(chunk_values, values, "kvzap::decoder::chunk_values");
      chunk_bytes = MeteredBytes(meter, 2 * values * sizeof(Value));
    }
    detail::reserve_scratch(chunk_scores, scores, "kvzap::decoder::scores");
  }

  void release() {
    release_chunk();
    angles = {};
    for (Vector& buffer : buffers) buffer = {};
  }

  void release_chunk() {
    chunk_keys = {};
    chunk_values = {};
    chunk_scores = {};
    chunk_bytes = {};
  }
};

template <class Value, PageOrder order>
Decoder<Value, order>::Decoder(const Model<Value>& model, Scorer* scorer, const Communicator& comm,
                               int window, int page_rows, MemoryMeter* meter)
    : m_model(model),
      m_scorer(scorer),
      m_comm(comm),
      m_meter(meter),
      m_cache(
          [&] {
            CacheShape shape;
            for (int l = 0; l < model.partition().n_layers(); ++l) {
              shape.heads.push_back(
                  static_cast<int>(model.partition().heads(l, model.rank()).size()));
            }
            shape.head_dim = static_cast<int>(model.config().head_dim);
            shape.window = window;
            shape.page_rows = page_rows;
            return shape;
          }(),
          meter),
      m_scratch(std::make_unique<Scratch>()) {
  const std::vector<float> frequencies = rope_inverse_frequencies(model.config());
  m_scratch->inverse_frequencies =
      Vector("kvzap::decoder::inverse_frequencies", frequencies.size());
  Kokkos::deep_copy(m_scratch->inverse_frequencies, Kokkos::View<const float*, Kokkos::HostSpace>(
                                                        frequencies.data(), frequencies.size()));
}

template <class Value, PageOrder order>
Decoder<Value, order>::~Decoder() = default;

template <class Value, PageOrder order>
std::vector<float> Decoder<Value, order>::step(SequenceId sequence,
                                               const std::vector<TokenId>& tokens,
                                               const StepRule& rule,
                                               const ProgressCallback& progress) {
  const ModelConfig& config = m_model.config();
  const std::int64_t count = tokens.size();
  const std::int64_t hidden = config.hidden_size;
  const int dim = static_cast<int>(config.head_dim);
  const std::int64_t group = config.query_group();
  const float eps = static_cast<float>(config.rms_norm_eps);
  if (count == 0) throw Error("decoder: a step needs at least one token");
  if (rule.score && !m_scorer) throw Error("decoder: a step that scores needs a scorer");
  for (std::int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= config.vocab_size) {
      throw Error(fmt::format("token {} of the prompt is {}; expected an id in [0, {})", i,
                              tokens[i], config.vocab_size));
    }
  }
  const ExecutionSpace exec;
  Scratch& scratch = *m_scratch;
  const std::int64_t first = m_cache.tokens(sequence, 0);

  // Embed: each rank fills the rows of its part of the vocabulary, the sum brings them together.
  const Matrix h = scratch.matrix(0, count, hidden);  // (token, hidden), the residual stream
  {
    Kokkos::View<TokenId*, MemorySpace> ids("kvzap::decoder::ids", count);
    Kokkos::deep_copy(ids, Kokkos::View<const TokenId*, Kokkos::HostSpace>(tokens.data(), count));
    const auto embedding = m_model.embedding();
    const std::int64_t first_token = m_model.first_token();
    const std::int64_t rows = embedding.extent(0);
    Kokkos::parallel_for(
        "kvzap::decoder::embed", Range(exec, 0, count), KOKKOS_LAMBDA(std::int64_t i) {
          const std::int64_t row = ids(i) - first_token;
          const bool mine = row >= 0 && row < rows;
          for (std::int64_t d = 0; d < hidden; ++d) {
            h(i, d) = mine ? static_cast<float>(embedding(row, d)) : 0.0f;
          }
        });
    all_reduce(exec, m_comm, h);
  }

  // RoPE's angles, in float as transformers computes them.
  if (static_cast<std::int64_t>(scratch.angles.extent(0)) < count) {
    scratch.angles = {};
    scratch.angles = decltype(scratch.angles)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::decoder::angles"), count, dim / 2,
        2);
  }
  {
    const auto angles = scratch.angles;
    const auto frequencies = scratch.inverse_frequencies;
    Kokkos::parallel_for(
        "kvzap::decoder::angles", Range(exec, 0, count), KOKKOS_LAMBDA(std::int64_t i) {
          for (int d = 0; d < dim / 2; ++d) {
            const float angle = static_cast<float>(first + i) * frequencies(d);
            angles(i, d, 0) = detail::math::cos(angle);
            angles(i, d, 1) = detail::math::sin(angle);
          }
        });
  }

  const int layers = static_cast<int>(config.num_hidden_layers);
  const std::int64_t blocks = (count + block_tokens - 1) / block_tokens;
  for (int l = 0; l < layers; ++l) {
    const auto& weights = m_model.layer(l);
    const std::int64_t kv_heads = m_cache.shape().heads[l];
    const std::int64_t q_heads = kv_heads * group;
    const std::int64_t width = weights.gate.extent(0);
    scratch.reserve_chunk(count * kv_heads * dim, rule.score ? count * kv_heads : 0, m_meter);
    using Rows = Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>;
    const Rows keys(scratch.chunk_keys.data(), count, kv_heads, dim);
    const Rows values(scratch.chunk_values.data(), count, kv_heads, dim);
    const Matrix scores(scratch.chunk_scores.data(), rule.score ? kv_heads : 0,
                        rule.score ? count : 0);  // (head, token)

    for (std::int64_t begin = 0; begin < count; begin += block_tokens) {
      const std::int64_t end = std::min(count, begin + block_tokens);
      const std::int64_t m = end - begin;
      const auto block = std::make_pair(begin, end);
      const Matrix h_block = Kokkos::subview(h, block, Kokkos::ALL);

      const Matrix x = scratch.matrix(1, m, hidden);
      rms_norm(exec, h_block, weights.input_norm, eps, x);
      if (m_observer) m_observer->attention_input(l, first + begin, x);
      if (rule.score) {
        m_scorer->score(exec, l, first + begin, x, Kokkos::subview(scores, Kokkos::ALL, block));
      }

      const Matrix q = scratch.matrix(2, m, q_heads * dim);
      const Matrix k = scratch.matrix(3, m, kv_heads * dim);
      const Matrix v = scratch.matrix(4, m, kv_heads * dim);
      scratch.linear(exec, x, detail::WeightMatrix<Value>(weights.q), weights.q_bias, q);
      scratch.linear(exec, x, detail::WeightMatrix<Value>(weights.k), weights.k_bias, k);
      scratch.linear(exec, x, detail::WeightMatrix<Value>(weights.v), weights.v_bias, v);
      norm_and_rotate(exec, q, dim, weights.q_norm, eps, scratch.angles, begin);
      norm_and_rotate(exec, k, dim, weights.k_norm, eps, scratch.angles, begin);
      Kokkos::parallel_for(
          "kvzap::decoder::store_rows", Range(exec, 0, m), KOKKOS_LAMBDA(std::int64_t i) {
            for (std::int64_t d = 0; d < kv_heads * dim; ++d) {
              keys(begin + i, d / dim, d % dim) = Value(k(i, d));
              values(begin + i, d / dim, d % dim) = Value(v(i, d));
            }
          });

      const Matrix a = scratch.matrix(5, m, q_heads * dim);
      using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
      const auto seen = std::make_pair(std::int64_t{0}, end);
      m_attention(exec, m_cache.layer(sequence, l), Heads(q.data(), m, q_heads, dim),
                  Kokkos::subview(keys, seen, Kokkos::ALL, Kokkos::ALL),
                  Kokkos::subview(values, seen, Kokkos::ALL, Kokkos::ALL),
                  Heads(a.data(), m, q_heads, dim), m_attention_path);

      scratch.linear(exec, a, detail::WeightMatrix<Value>(weights.o), weights.o_bias, x);
      all_reduce(exec, m_comm, x);
      add(exec, h_block, x);

      rms_norm(exec, h_block, weights.attention_norm, eps, x);
      const Matrix gate = scratch.matrix(6, m, width);
      const Matrix up = scratch.matrix(7, m, width);
      scratch.linear(exec, x, detail::WeightMatrix<Value>(weights.gate), weights.gate_bias, gate);
      scratch.linear(exec, x, detail::WeightMatrix<Value>(weights.up), weights.up_bias, up);
      silu_times(exec, gate, up);
      scratch.linear(exec, gate, detail::WeightMatrix<Value>(weights.down), weights.down_bias, x);
      all_reduce(exec, m_comm, x);
      add(exec, h_block, x);
      if (progress) progress("prefill", l * blocks + begin / block_tokens + 1, layers * blocks);
    }

    if (m_observer && rule.score) m_observer->scores(l, first, scores);
    const AppendCounts counts =
        m_cache.append(exec, sequence, l, keys, values, scores, rule.eviction);
    m_counts.judged += counts.judged;
    m_counts.evicted += counts.evicted;
    m_counts.non_finite += counts.non_finite;
  }

  // Output head: each rank's part of the vocabulary, gathered on rank 0.
  const std::int64_t local = m_model.output_head().extent(0);
  const Matrix last = Kokkos::subview(h, std::make_pair(count - 1, count), Kokkos::ALL);
  const Matrix x = scratch.matrix(1, 1, hidden);
  const Matrix y = scratch.matrix(2, 1, local);
  rms_norm(exec, last, m_model.final_norm(), eps, x);
  scratch.linear(exec, x, detail::WeightMatrix<Value>(m_model.output_head()), ConstVector(), y);
  detail::fence(exec, "kvzap::decoder: MPI reads the logits");
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, y);
  std::vector<float> logits = m_comm.gather(host.data(), local, 0);
  if (count > block_tokens) scratch.release();  // a long prefill's memory is not needed again
  return logits;
}

template class Decoder<float, PageOrder::token_major>;
template class Decoder<float, PageOrder::dim_major>;
template class Decoder<half, PageOrder::token_major>;
template class Decoder<half, PageOrder::dim_major>;
template class Decoder<bfloat16, PageOrder::token_major>;
template class Decoder<bfloat16, PageOrder::dim_major>;

}  // namespace kvzap
