#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/decoder.hpp>
#include <kvzap/head_partition.hpp>

#include "detail/all_reduce.hpp"
#include "detail/device_kernels.hpp"
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

using HostRange =
    Kokkos::RangePolicy<Kokkos::DefaultHostExecutionSpace, Kokkos::IndexType<std::int64_t>>;
using Angles = Kokkos::View<const float***, Kokkos::LayoutRight, MemorySpace>;

// Kernels are in functions of their own: nvcc takes none inside private members.

/// h (token, hidden) = rows of this rank's part of the embedding, which begins at `first_token`, or
/// zeros for tokens of other ranks.
template <class Value>
void embed(const ExecutionSpace& exec, const Kokkos::View<const TokenId*, MemorySpace>& ids,
           const Kokkos::View<const Value**, Kokkos::LayoutRight, MemorySpace>& embedding,
           std::int64_t first_token, const Matrix& h) {
  const std::int64_t rows = embedding.extent(0);
  const std::int64_t hidden = h.extent(1);
  Kokkos::parallel_for(
      "kvzap::decoder::embed", Range(exec, 0, h.extent(0) * hidden), KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = ids(i / hidden) - first_token;
        const bool mine = row >= 0 && row < rows;
        h(i / hidden, i % hidden) = mine ? static_cast<float>(embedding(row, i % hidden)) : 0.0f;
      });
}

/// angles (token, dim / 2, 2) = cosine and sine of position times frequency.
void fill_angles(const ExecutionSpace& exec, std::int64_t tokens,
                 const Kokkos::View<const std::int64_t*, MemorySpace>& positions,
                 const ConstVector& frequencies,
                 const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>& angles) {
  const std::int64_t pairs = frequencies.extent(0);
  Kokkos::parallel_for(
      "kvzap::decoder::angles", Range(exec, 0, tokens), KOKKOS_LAMBDA(std::int64_t i) {
        for (std::int64_t d = 0; d < pairs; ++d) {
          const float angle = static_cast<float>(positions(i)) * frequencies(d);
          angles(i, d, 0) = detail::math::cos(angle);
          angles(i, d, 1) = detail::math::sin(angle);
        }
      });
}

/// Whether a step may call the host's own loops.
bool on_host() { return detail::runs_on_host && !detail::uses_device_kernels(); }

// Threads of a team that has one row, or one head of a token.
constexpr int row_threads = detail::runs_on_host ? 1 : 256;
constexpr int head_threads = detail::runs_on_host ? 1 : 64;
using Team = Kokkos::TeamPolicy<ExecutionSpace>;
using Member = typename Team::member_type;

/// output = input / sqrt(mean(input^2) + eps) * weight, row by row; (token, hidden).
void rms_norm(const ExecutionSpace& exec, const ConstMatrix& input, const ConstVector& weight,
              float eps, const Matrix& output) {
  const std::int64_t size = input.extent(1);
  if (on_host()) {
    Kokkos::parallel_for("kvzap::decoder::rms_norm", HostRange(0, input.extent(0)),
                         [=](std::int64_t i) {
                           detail::rms_norm(&input(i, 0), weight.data(), eps, &output(i, 0), size);
                         });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::decoder::rms_norm", Team(exec, static_cast<int>(input.extent(0)), row_threads),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t i = team.league_rank();
        float sum = 0;
        Kokkos::parallel_reduce(
            Kokkos::TeamThreadRange(team, size),
            [&](std::int64_t d, float& partial) { partial += input(i, d) * input(i, d); }, sum);
        const float factor = 1.0f / detail::math::sqrt(sum / static_cast<float>(size) + eps);
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, size), [&](std::int64_t d) {
          output(i, d) = input(i, d) * factor * weight(d);
        });
      });
}

/// Per head: RMS norm if the model has one, then RoPE (Su et al., arXiv 2104.09864) in the layout
/// of transformers, where dimension d is rotated with d + dim / 2. In place; (token, heads * dim).
/// angles: (token, dim / 2, 2), cosine and sine.
void norm_and_rotate(const ExecutionSpace& exec, const Matrix& rows, int dim,
                     const ConstVector& norm_weight, float eps, const Angles& angles,
                     std::int64_t first) {
  const std::int64_t heads = rows.extent(1) / dim;
  if (heads == 0) return;
  const bool has_norm = norm_weight.extent(0) > 0;
  const int half_dim = dim / 2;
  if (on_host()) {
    Kokkos::parallel_for("kvzap::decoder::norm_and_rotate", HostRange(0, rows.extent(0)),
                         [=](std::int64_t token) {
                           for (std::int64_t h = 0; h < heads; ++h) {
                             float* x = &rows(token, h * dim);
                             if (has_norm) detail::rms_norm(x, norm_weight.data(), eps, x, dim);
                             detail::rotate(x, &angles(first + token, 0, 0), half_dim);
                           }
                         });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::decoder::norm_and_rotate",
      Team(exec, static_cast<int>(rows.extent(0) * heads), head_threads),
      KOKKOS_LAMBDA(const Member& team) {
        const std::int64_t token = team.league_rank() / heads;
        float* const x = &rows(token, team.league_rank() % heads * dim);
        float factor = 1;
        if (has_norm) {
          float sum = 0;
          Kokkos::parallel_reduce(
              Kokkos::TeamThreadRange(team, dim),
              [&](int d, float& partial) { partial += x[d] * x[d]; }, sum);
          factor = 1.0f / detail::math::sqrt(sum / static_cast<float>(dim) + eps);
        }
        Kokkos::parallel_for(Kokkos::TeamThreadRange(team, half_dim), [&](int d) {
          const float cosine = angles(first + token, d, 0);
          const float sine = angles(first + token, d, 1);
          const float low = x[d] * (has_norm ? factor * norm_weight(d) : 1.0f);
          const float high =
              x[d + half_dim] * (has_norm ? factor * norm_weight(d + half_dim) : 1.0f);
          x[d] = low * cosine - high * sine;
          x[d + half_dim] = high * cosine + low * sine;
        });
      });
}

void add(const ExecutionSpace& exec, const Matrix& target, const ConstMatrix& summand) {
  const std::int64_t columns = target.extent(1);
  if (on_host()) {
    Kokkos::parallel_for(
        "kvzap::decoder::add", HostRange(0, target.extent(0)),
        [=](std::int64_t i) { detail::add(&target(i, 0), &summand(i, 0), columns); });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::decoder::add", Range(exec, 0, target.size()), KOKKOS_LAMBDA(std::int64_t i) {
        target(i / columns, i % columns) += summand(i / columns, i % columns);
      });
}

void silu_times(const ExecutionSpace& exec, const Matrix& gate, const ConstMatrix& up) {
  const std::int64_t columns = gate.extent(1);
  if (on_host()) {
    Kokkos::parallel_for("kvzap::decoder::silu", HostRange(0, gate.extent(0)), [=](std::int64_t i) {
      detail::silu_times(&gate(i, 0), &up(i, 0), columns);
    });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::decoder::silu", Range(exec, 0, gate.size()), KOKKOS_LAMBDA(std::int64_t i) {
        float& x = gate(i / columns, i % columns);
        x = x / (1.0f + detail::math::exp(-x)) * up(i / columns, i % columns);
      });
}

/// target (row, column) = Value(source); contiguous.
template <class Value>
void store_rows(const ExecutionSpace& exec, const ConstMatrix& source, Value* target) {
  const std::int64_t columns = source.extent(1);
  if (on_host()) {
    Kokkos::parallel_for(
        "kvzap::decoder::store_rows", HostRange(0, source.extent(0)),
        [=](std::int64_t i) { detail::narrow(&source(i, 0), target + i * columns, columns); });
    return;
  }
  Kokkos::parallel_for(
      "kvzap::decoder::store_rows", Range(exec, 0, source.size()),
      KOKKOS_LAMBDA(std::int64_t i) { target[i] = Value(source(i / columns, i % columns)); });
}

}  // namespace

template <class Value, PageOrder order>
struct Decoder<Value, order>::Scratch {
  // Grown on demand, kept between steps: no step of a length seen before allocates activations.
  std::vector<Vector> buffers = std::vector<Vector>(8);
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> angles;
  Kokkos::View<TokenId*, MemorySpace> ids;
  Kokkos::View<std::int64_t*, MemorySpace> positions;
  Vector inverse_frequencies;
  std::vector<typename Cache::Layer> cached;  // one layer of every sequence of the step
  // Keys and values of the step's tokens, one layer's: (token, head, dim).
  Kokkos::View<Value*, MemorySpace> chunk_keys, chunk_values;
  Vector chunk_scores;
  MeteredBytes chunk_bytes;
  detail::LinearMap linear;
  detail::RankSum rank_sum;

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
    // Not = {}: Clang 14 would emit no destructor for these types.
    ids = decltype(ids)();
    positions = decltype(positions)();
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
  return forward(&sequence, 1, tokens, rule, progress);
}

template <class Value, PageOrder order>
std::vector<float> Decoder<Value, order>::decode(const std::vector<SequenceId>& sequences,
                                                 const std::vector<TokenId>& tokens,
                                                 const StepRule& rule) {
  if (sequences.size() != tokens.size()) {
    throw Error(fmt::format("decoder: {} tokens for {} sequences; expected one for each",
                            tokens.size(), sequences.size()));
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (std::find(sequences.begin() + i + 1, sequences.end(), sequences[i]) != sequences.end()) {
      throw Error(fmt::format("decoder: sequence {} twice in one step", sequences[i]));
    }
  }
  return forward(sequences.data(), sequences.size(), tokens, rule, {});
}

// Rows of the step are tokens: of one sequence, consecutive ones, or one of each of several.
template <class Value, PageOrder order>
std::vector<float> Decoder<Value, order>::forward(const SequenceId* sequences,
                                                  std::size_t n_sequences,
                                                  const std::vector<TokenId>& tokens,
                                                  const StepRule& rule,
                                                  const ProgressCallback& progress) {
  const ModelConfig& config = m_model.config();
  const std::int64_t count = tokens.size();
  const std::int64_t hidden = config.hidden_size;
  const int dim = static_cast<int>(config.head_dim);
  const std::int64_t group = config.query_group();
  const float eps = static_cast<float>(config.rms_norm_eps);
  const bool many = n_sequences > 1;
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

  // Token ids and positions.
  detail::reserve_scratch(scratch.ids, count, "kvzap::decoder::ids");
  detail::reserve_scratch(scratch.positions, count, "kvzap::decoder::positions");
  const auto ids = scratch.ids;
  const auto positions = scratch.positions;
  {
    const auto host_ids = Kokkos::create_mirror_view(ids);
    const auto host_positions = Kokkos::create_mirror_view(positions);
    for (std::int64_t i = 0; i < count; ++i) {
      host_ids(i) = tokens[i];
      host_positions(i) =
          many ? m_cache.tokens(sequences[i], 0) : m_cache.tokens(sequences[0], 0) + i;
    }
    Kokkos::deep_copy(ids, host_ids);
    Kokkos::deep_copy(positions, host_positions);
  }
  const std::int64_t first = m_cache.tokens(sequences[0], 0);

  // Embed: each rank fills the rows of its part of the vocabulary, the sum brings them together.
  const Matrix h = scratch.matrix(0, count, hidden);  // (token, hidden), the residual stream
  {
    embed<Value>(exec, ids, m_model.embedding(), m_model.first_token(), h);
    scratch.rank_sum(exec, m_comm, h);
  }

  // RoPE's angles, in float as transformers computes them.
  if (static_cast<std::int64_t>(scratch.angles.extent(0)) < count) {
    scratch.angles = {};
    scratch.angles = decltype(scratch.angles)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::decoder::angles"), count, dim / 2,
        2);
  }
  { fill_angles(exec, count, positions, scratch.inverse_frequencies, scratch.angles); }

  // A decode step on a device waits once, at its end, not in every layer.
  const bool deferred =
      count == static_cast<std::int64_t>(n_sequences) && detail::uses_device_kernels();
  const auto count_append = [&](const AppendCounts& counts) {
    m_counts.judged += counts.judged;
    m_counts.evicted += counts.evicted;
    m_counts.non_finite += counts.non_finite;
  };
  const int layers = static_cast<int>(config.num_hidden_layers);
  const std::int64_t blocks = (count + block_tokens - 1) / block_tokens;
  for (int l = 0; l < layers; ++l) {
    const auto& weights = m_model.layer(l);
    const std::int64_t kv_heads = m_cache.shape().heads[l];
    const std::int64_t q_heads = kv_heads * group;
    const std::int64_t width = weights.gate.outputs();
    scratch.reserve_chunk(count * kv_heads * dim, rule.score ? count * kv_heads : 0, m_meter);
    using Rows = Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>;
    const Rows keys(scratch.chunk_keys.data(), count, kv_heads, dim);
    const Rows values(scratch.chunk_values.data(), count, kv_heads, dim);
    const Matrix scores(scratch.chunk_scores.data(), rule.score ? kv_heads : 0,
                        rule.score ? count : 0);  // (head, token)
    scratch.cached.clear();
    for (std::size_t i = 0; i < n_sequences; ++i) {
      scratch.cached.push_back(m_cache.layer(sequences[i], l));
    }

    for (std::int64_t begin = 0; begin < count; begin += block_tokens) {
      const std::int64_t end = std::min(count, begin + block_tokens);
      const std::int64_t m = end - begin;
      const auto block = std::make_pair(begin, end);
      const Matrix h_block = Kokkos::subview(h, block, Kokkos::ALL);

      const Matrix x = scratch.matrix(1, m, hidden);
      rms_norm(exec, h_block, weights.input_norm, eps, x);
      if (m_observer) m_observer->attention_input(l, first + begin, x);
      if (rule.score && !many) {
        m_scorer->score(exec, l, first + begin, x, Kokkos::subview(scores, Kokkos::ALL, block));
      } else if (rule.score) {
        for (std::int64_t i = 0; i < m; ++i) {
          const auto row = std::make_pair(i, i + 1);
          m_scorer->score(
              exec, l, m_cache.tokens(sequences[begin + i], l),
              Kokkos::subview(x, row, Kokkos::ALL),
              Kokkos::subview(scores, Kokkos::ALL, std::make_pair(begin + i, begin + i + 1)));
        }
      }

      const Matrix q = scratch.matrix(2, m, q_heads * dim);
      const Matrix k = scratch.matrix(3, m, kv_heads * dim);
      const Matrix v = scratch.matrix(4, m, kv_heads * dim);
      scratch.linear(exec, x, weights.q, weights.q_bias, q);
      scratch.linear(exec, x, weights.k, weights.k_bias, k);
      scratch.linear(exec, x, weights.v, weights.v_bias, v);
      norm_and_rotate(exec, q, dim, weights.q_norm, eps, scratch.angles, begin);
      norm_and_rotate(exec, k, dim, weights.k_norm, eps, scratch.angles, begin);
      store_rows(exec, k, keys.data() + begin * kv_heads * dim);
      store_rows(exec, v, values.data() + begin * kv_heads * dim);

      const Matrix a = scratch.matrix(5, m, q_heads * dim);
      using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
      const Heads queries(q.data(), m, q_heads, dim);
      const Heads attended(a.data(), m, q_heads, dim);
      if (many) {
        // Attention's list of sequences is that of the block.
        if (m < count) {
          scratch.cached.clear();
          for (std::int64_t i = begin; i < end; ++i) {
            scratch.cached.push_back(m_cache.layer(sequences[i], l));
          }
        }
        m_attention.decode(
            exec, scratch.cached, queries, Kokkos::subview(keys, block, Kokkos::ALL, Kokkos::ALL),
            Kokkos::subview(values, block, Kokkos::ALL, Kokkos::ALL), attended, m_attention_path);
      } else {
        const auto seen = std::make_pair(std::int64_t{0}, end);
        m_attention(exec, scratch.cached.front(), queries,
                    Kokkos::subview(keys, seen, Kokkos::ALL, Kokkos::ALL),
                    Kokkos::subview(values, seen, Kokkos::ALL, Kokkos::ALL), attended,
                    m_attention_path);
      }

      scratch.linear(exec, a, weights.o, weights.o_bias, x);
      scratch.rank_sum(exec, m_comm, x);
      add(exec, h_block, x);

      rms_norm(exec, h_block, weights.attention_norm, eps, x);
      const Matrix gate = scratch.matrix(6, m, width);
      const Matrix up = scratch.matrix(7, m, width);
      scratch.linear(exec, x, weights.gate, weights.gate_bias, gate);
      scratch.linear(exec, x, weights.up, weights.up_bias, up);
      silu_times(exec, gate, up);
      scratch.linear(exec, gate, weights.down, weights.down_bias, x);
      scratch.rank_sum(exec, m_comm, x);
      add(exec, h_block, x);
      if (progress) progress("prefill", l * blocks + begin / block_tokens + 1, layers * blocks);
    }

    if (m_observer && rule.score) m_observer->scores(l, first, scores);
    const std::int64_t each = count / static_cast<std::int64_t>(n_sequences);
    for (std::size_t i = 0; i < n_sequences; ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * each;
      const auto rows = std::make_pair(begin, begin + each);
      typename Cache::ScoresView new_scores = scores;
      if (rule.score) new_scores = Kokkos::subview(scores, Kokkos::ALL, rows);
      const auto new_keys = Kokkos::subview(keys, rows, Kokkos::ALL, Kokkos::ALL);
      const auto new_values = Kokkos::subview(values, rows, Kokkos::ALL, Kokkos::ALL);
      if (deferred) {
        m_cache.append_deferred(exec, sequences[i], l, new_keys, new_values, new_scores,
                                rule.eviction);
      } else {
        count_append(
            m_cache.append(exec, sequences[i], l, new_keys, new_values, new_scores, rule.eviction));
      }
    }
  }
  scratch.cached.clear();

  // Output head: each rank's part of the vocabulary, gathered on rank 0, for the last token of each
  // sequence.
  const std::int64_t outputs = n_sequences;
  const std::int64_t local = m_model.output_head().outputs();
  const Matrix last = Kokkos::subview(h, std::make_pair(count - outputs, count), Kokkos::ALL);
  const Matrix x = scratch.matrix(1, outputs, hidden);
  const Matrix y = scratch.matrix(2, outputs, local);
  rms_norm(exec, last, m_model.final_norm(), eps, x);
  scratch.linear(exec, x, m_model.output_head(), ConstVector(), y);
  detail::fence(exec, "kvzap::decoder: MPI reads the logits");
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, y);
  for (std::size_t i = 0; deferred && i < n_sequences; ++i) {
    count_append(m_cache.collect(sequences[i]));
  }
  std::vector<float> logits = m_comm.gather(host.data(), outputs * local, 0);
  if (many && m_comm.size() > 1 && m_comm.is_root()) logits = rows_of_ranks(logits, outputs);
  if (count > block_tokens) scratch.release();  // a long prefill's memory is not needed again
  return logits;
}

// Gathered rank by rank, each (outputs, its part of the vocabulary); wanted: (outputs, vocab_size).
template <class Value, PageOrder order>
std::vector<float> Decoder<Value, order>::rows_of_ranks(const std::vector<float>& gathered,
                                                        std::int64_t outputs) const {
  const std::int64_t vocabulary = m_model.config().vocab_size;
  std::vector<float> logits(gathered.size());
  const float* source = gathered.data();
  for (int r = 0; r < m_comm.size(); ++r) {
    const auto [begin, end] = even_range(vocabulary, m_comm.size(), r);
    for (std::int64_t i = 0; i < outputs; ++i) {
      std::copy_n(source, end - begin, logits.data() + i * vocabulary + begin);
      source += end - begin;
    }
  }
  return logits;
}

template class Decoder<float, PageOrder::token_major>;
template class Decoder<float, PageOrder::dim_major>;
template class Decoder<half, PageOrder::token_major>;
template class Decoder<half, PageOrder::dim_major>;
template class Decoder<bfloat16, PageOrder::token_major>;
template class Decoder<bfloat16, PageOrder::dim_major>;

}  // namespace kvzap
