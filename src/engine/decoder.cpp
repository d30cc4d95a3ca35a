#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/decoder.hpp>
#include <kvzap/head_partition.hpp>

#include "base/device_kernels.hpp"
#include "base/instantiate.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "engine/step_kernels.hpp"
#include "linalg/gemm.hpp"
#include "parallel/all_reduce.hpp"

namespace kvzap {
namespace {

using detail::ConstMatrix;
using detail::ConstVector;
using detail::Matrix;
using detail::Vector;

/// One token for each of different sequences. Throws Error otherwise.
void check_sequences(const std::vector<SequenceId>& sequences, const std::vector<TokenId>& tokens) {
  if (sequences.size() != tokens.size()) {
    throw Error(fmt::format("decoder: {} tokens for {} sequences; expected one for each",
                            tokens.size(), sequences.size()));
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (std::find(sequences.begin() + i + 1, sequences.end(), sequences[i]) != sequences.end()) {
      throw Error(fmt::format("decoder: sequence {} twice in one step", sequences[i]));
    }
  }
}

// Tokens whose activations exist at once. Enough to run the products at full rate, few enough that
// activations stay small beside weights and cache.
constexpr std::int64_t block_tokens = 512;

}  // namespace

template <class Value, PageOrder order>
struct Decoder<Value, order>::Scratch {
  // Grown on demand, kept between steps: no step of a length seen before allocates activations.
  std::vector<Vector> buffers = std::vector<Vector>(5);
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> angles;
  Kokkos::View<TokenId*, MemorySpace> ids;
  Kokkos::View<std::int64_t*, MemorySpace> positions;
  Vector inverse_frequencies;
  std::vector<typename Cache::Layer> cached;  // one layer of every sequence of the step
  // Keys and values of the step's tokens, one layer's: (token, head, dim).
  Kokkos::View<Value*, MemorySpace> new_keys, new_values;
  Vector chunk_scores;
  MeteredBytes chunk_bytes;
  Kokkos::View<std::int64_t*, MemorySpace> argmax;  // (output)
  detail::LinearMap linear;
  detail::RankSum rank_sum;

  Matrix matrix(int index, std::int64_t rows, std::int64_t columns) {
    Vector& buffer = buffers[index];
    detail::reserve_scratch(buffer, rows * columns, "kvzap::decoder::activations");
    return Matrix(buffer.data(), rows, columns);
  }

  void reserve_chunk(std::int64_t values, std::int64_t scores, MemoryMeter* meter) {
    if (static_cast<std::int64_t>(new_keys.extent(0)) < values) {
      release_chunk();
      detail::reserve_scratch(new_keys, values, "kvzap::decoder::new_keys");
      detail::reserve_scratch(new_values, values, "kvzap::decoder::new_values");
      chunk_bytes = MeteredBytes(meter, 2 * values * sizeof(Value));
    }
    detail::reserve_scratch(chunk_scores, scores, "kvzap::decoder::scores");
  }

  void release() {
    release_chunk();
    // Not = {}: Clang 14 would emit no destructor for these types.
    angles = decltype(angles)();
    ids = decltype(ids)();
    positions = decltype(positions)();
    for (Vector& buffer : buffers) buffer = {};
  }

  void release_chunk() {
    new_keys = {};
    new_values = {};
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
  return forward(&sequence, 1, tokens, rule, progress, nullptr);
}

template <class Value, PageOrder order>
TokenId Decoder<Value, order>::step_greedy(SequenceId sequence, const std::vector<TokenId>& tokens,
                                           const StepRule& rule, const ProgressCallback& progress) {
  std::vector<TokenId> argmax;
  forward(&sequence, 1, tokens, rule, progress, &argmax);
  return argmax.front();
}

template <class Value, PageOrder order>
std::vector<float> Decoder<Value, order>::decode(const std::vector<SequenceId>& sequences,
                                                 const std::vector<TokenId>& tokens,
                                                 const StepRule& rule) {
  check_sequences(sequences, tokens);
  return forward(sequences.data(), sequences.size(), tokens, rule, {}, nullptr);
}

template <class Value, PageOrder order>
std::vector<TokenId> Decoder<Value, order>::decode_greedy(const std::vector<SequenceId>& sequences,
                                                          const std::vector<TokenId>& tokens,
                                                          const StepRule& rule) {
  check_sequences(sequences, tokens);
  std::vector<TokenId> argmax;
  forward(sequences.data(), sequences.size(), tokens, rule, {}, &argmax);
  return argmax;
}

// Rows of the step are tokens: of one sequence, consecutive ones, or one of each of several.
template <class Value, PageOrder order>
std::vector<float> Decoder<Value, order>::forward(
    const SequenceId* sequences, std::size_t n_sequences, const std::vector<TokenId>& tokens,
    const StepRule& rule, const ProgressCallback& progress, std::vector<TokenId>* argmax) {
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
  detail::embed<Value>(exec, ids, m_model.embedding(), m_model.first_token(), h);
  scratch.rank_sum(exec, m_comm, h);

  // RoPE's angles, in float as transformers computes them.
  if (static_cast<std::int64_t>(scratch.angles.extent(0)) < count) {
    scratch.angles = decltype(scratch.angles)();
    scratch.angles = decltype(scratch.angles)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::decoder::angles"), count, dim / 2,
        2);
  }
  detail::fill_angles(exec, count, positions, scratch.inverse_frequencies, scratch.angles);

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
  // What a layer adds to the residual stream, if that is left to the next layer's first kernel.
  Matrix pending;
  for (int l = 0; l < layers; ++l) {
    const auto& weights = m_model.layer(l);
    const std::int64_t kv_heads = m_cache.shape().heads[l];
    const std::int64_t q_heads = kv_heads * group;
    const std::int64_t width = weights.gate_up.outputs() / 2;
    scratch.reserve_chunk(count * kv_heads * dim, rule.score ? count * kv_heads : 0, m_meter);
    using Rows = Kokkos::View<Value***, Kokkos::LayoutRight, MemorySpace>;
    const Rows keys(scratch.new_keys.data(), count, kv_heads, dim);
    const Rows values(scratch.new_values.data(), count, kv_heads, dim);
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
      auto rounded = scratch.linear.template room_for_rounded<Value>(m, hidden);
      detail::add_and_norm(exec, h_block, pending, weights.input_norm, eps, x, rounded);
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

      const Matrix qkv = scratch.matrix(2, m, (q_heads + 2 * kv_heads) * dim);
      scratch.linear(exec, x, rounded, weights.qkv, weights.qkv_bias, qkv);
      detail::qk_norm_and_rope(exec, qkv, dim, kv_heads, weights.q_norm, weights.k_norm, eps,
                               scratch.angles, begin, keys.data() + begin * kv_heads * dim,
                               values.data() + begin * kv_heads * dim);

      const Matrix a = scratch.matrix(3, m, q_heads * dim);
      using Queries = typename Attention<Value, order>::QueryView;
      using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
      const Queries queries(qkv.data(),
                            Kokkos::LayoutStride(m, qkv.extent(1), q_heads, dim, dim, 1));
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

      rounded = scratch.linear.template room_for_rounded<Value>(m, hidden);
      detail::add_and_norm(exec, h_block, x, weights.attention_norm, eps, x, rounded);
      const Matrix gate_up = scratch.matrix(4, m, 2 * width);
      scratch.linear(exec, x, rounded, weights.gate_up, weights.gate_up_bias, gate_up);
      rounded = scratch.linear.template room_for_rounded<Value>(m, width);
      const Matrix gated = scratch.matrix(2, m, width);  // q, k and v have been used
      detail::silu_times(exec, gate_up, gated, rounded);
      scratch.linear(exec, gated, rounded, weights.down, weights.down_bias, x);
      scratch.rank_sum(exec, m_comm, x);
      if (blocks == 1) {
        pending = x;  // which stays as it is until then
      } else {
        detail::add(exec, h_block, x);
      }
      if (progress) progress("prefill", l * blocks + begin / block_tokens + 1, layers * blocks);
    }

    if (m_observer && rule.score) m_observer->scores(l, first, scores);
    const std::int64_t each = count / static_cast<std::int64_t>(n_sequences);
    for (std::size_t i = 0; i < n_sequences; ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * each;
      const auto rows = std::make_pair(begin, begin + each);
      typename Cache::ScoresView new_scores = scores;
      if (rule.score) new_scores = Kokkos::subview(scores, Kokkos::ALL, rows);
      const auto appended_keys = Kokkos::subview(keys, rows, Kokkos::ALL, Kokkos::ALL);
      const auto appended_values = Kokkos::subview(values, rows, Kokkos::ALL, Kokkos::ALL);
      if (deferred) {
        m_cache.append_deferred(exec, sequences[i], l, appended_keys, appended_values, new_scores,
                                rule.eviction);
      } else {
        count_append(m_cache.append(exec, sequences[i], l, appended_keys, appended_values,
                                    new_scores, rule.eviction));
      }
    }
  }
  scratch.cached.clear();

  // Output head: each rank's part of the vocabulary, gathered on rank 0, for the last token of each
  // sequence.
  const std::int64_t outputs = n_sequences;
  const std::int64_t local = m_model.output_head().outputs();
  const Matrix last = Kokkos::subview(h, std::make_pair(count - outputs, count), Kokkos::ALL);
  if (pending.extent(0) > 0) {
    pending = Kokkos::subview(pending, std::make_pair(count - outputs, count), Kokkos::ALL);
  }
  const Matrix x = scratch.matrix(3, outputs, hidden);
  const Matrix y = scratch.matrix(2, outputs, local);
  const auto rounded = scratch.linear.template room_for_rounded<Value>(outputs, hidden);
  detail::add_and_norm(exec, last, pending, m_model.final_norm(), eps, x, rounded);
  scratch.linear(exec, x, rounded, m_model.output_head(), ConstVector(), y);
  std::vector<float> logits;
  if (argmax) {
    // The tokens alone leave the device.
    detail::reserve_scratch(scratch.argmax, outputs, "kvzap::decoder::argmax");
    const auto found = Kokkos::subview(scratch.argmax, std::make_pair(std::int64_t{0}, outputs));
    detail::argmax(exec, y, m_model.first_token(), found);
    std::vector<std::int64_t> keys(outputs);
    detail::fence(exec, "kvzap::decoder: the host reads the tokens");
    Kokkos::deep_copy(Kokkos::View<std::int64_t*, Kokkos::HostSpace>(keys.data(), outputs), found);
    m_comm.all_reduce_max(keys.data(), keys.size());
    argmax->resize(outputs);
    std::transform(keys.begin(), keys.end(), argmax->begin(), detail::token_of_key);
  } else {
    detail::fence(exec, "kvzap::decoder: MPI reads the logits");
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, y);
    logits = m_comm.gather(host.data(), outputs * local, 0);
    if (many && m_comm.size() > 1 && m_comm.is_root()) logits = rows_of_ranks(logits, outputs);
  }
  for (std::size_t i = 0; deferred && i < n_sequences; ++i) {
    count_append(m_cache.collect(sequences[i]));
  }
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

#define KVZAP_INSTANTIATE(Value, order) template class Decoder<Value, order>;
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
