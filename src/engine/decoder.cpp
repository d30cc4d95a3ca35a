#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/decoder.hpp>
#include <map>
#include <new>
#include <numeric>

#include "base/device_kernels.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/stopwatch.hpp"
#include "base/value_types.hpp"
#include "engine/policy_layer.hpp"
#include "engine/step_kernels.hpp"
#include "linalg/gemm.hpp"
#include "parallel/all_reduce.hpp"

namespace kvzap {
namespace {

using detail::ConstMatrix;
using detail::ConstVector;
using detail::Matrix;
using detail::Vector;

// Tokens whose activations exist at once. Enough to run the products at full rate, few enough that
// activations stay small beside weights and cache.
constexpr std::int64_t block_tokens = 512;

/// What a step has come to, over ranks the worst.
enum Outcome : std::int64_t { done = 0, out_of_memory = 1, failed = 2 };

Outcome outcome_of(const std::exception_ptr& failure) {
  if (!failure) return done;
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  } catch (const OutOfMemory&) {
    return out_of_memory;
  } catch (...) {
    return failed;
  }
}

std::int64_t next_power_of_two(std::int64_t count) {
  std::int64_t power = 1;
  while (power < count) power *= 2;
  return power;
}

/// Whether the span's new pairs get scores, by the scorer or a policy.
bool is_scored(const StepRule& rule) {
  return rule.score || (rule.policy && rule.policy->scores_rows());
}

std::pair<std::int64_t, std::int64_t> range(std::int64_t begin, std::int64_t end) {
  return {begin, end};
}

}  // namespace

/// Rows of the step that go through a layer at once.
template <class Value>
struct Decoder<Value>::Rows {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t count() const { return end - begin; }
};

template <class Value>
struct Decoder<Value>::Scratch {
  // Buffers of activations. Grown on demand, kept between steps: no step of a length seen before
  // allocates any.
  enum Buffer { residual, normed, projected, attended, gates, last_rows, last_added, n_buffers };
  std::vector<Vector> buffers = std::vector<Vector>(n_buffers);
  Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> angles;
  Kokkos::View<TokenId*, MemorySpace> ids;
  Kokkos::View<std::int64_t*, MemorySpace> positions;
  Vector inverse_frequencies;  // of texts up to the original length, where that counts
  // (table, head_dim / 2): with RoPE that depends on the length of the text, beside the former
  // those of longer texts; (token): which one a token has. Empty with other models.
  Matrix frequency_tables;
  Kokkos::View<std::int64_t*, MemorySpace> tables;
  // Keys and values of the step's tokens, one layer's: (token, head, dim).
  Kokkos::View<Value*, MemorySpace> new_keys, new_values;
  Vector new_scores;  // (head, token)
  MeteredBytes new_bytes;
  detail::LinearMap linear;
  detail::RankSum rank_sum;
  std::vector<std::int64_t> logit_counts;  // of each rank

  // The step under way.
  ExecutionSpace exec;
  Matrix h;               // (token, hidden), the residual stream
  Matrix pending;         // what the last layer adds to it, if that is left to the next kernel
  bool scores = false;    // some span's tokens are scored
  bool deferred = false;  // the cache does not wait for its kernels in each layer
  std::vector<std::int64_t> first_positions;  // of each span
  std::vector<AttentionSpan<Value, engine_page_order>> attention_spans;
  std::vector<AppendSpan> append_spans;
  std::vector<SequenceId> sequences;
  // Outputs: rows of the last tokens of the spans that want one, those that want the argmax first.
  std::vector<std::int64_t> output_spans, output_rows;
  std::int64_t n_argmax = 0;
  Kokkos::View<std::int64_t*, MemorySpace> device_rows, argmax;
  std::vector<std::int64_t> argmax_keys;  // (output), and the step's outcome
  std::vector<float> local_logits, gathered_logits;
  std::vector<StepResult> results;

  Matrix matrix(Buffer index, std::int64_t rows, std::int64_t columns) {
    return Matrix(buffers[index].data(), rows, columns);
  }
  void reserve(Buffer index, std::int64_t count) {
    detail::reserve_scratch(buffers[index], count, "kvzap::decoder::activations");
  }

  void reserve_new_rows(std::int64_t values, std::int64_t n_scores, MemoryMeter* meter) {
    if (static_cast<std::int64_t>(new_keys.extent(0)) < values) {
      release_new_rows();
      detail::reserve_scratch(new_keys, values, "kvzap::decoder::new_keys");
      detail::reserve_scratch(new_values, values, "kvzap::decoder::new_values");
      new_bytes = MeteredBytes(meter, 2 * values * sizeof(Value));
    }
    detail::reserve_scratch(new_scores, n_scores, "kvzap::decoder::scores");
  }

  void release() {
    release_new_rows();
    // Not = {}: Clang 14 would emit no destructor for these types.
    angles = decltype(angles)();
    tables = decltype(tables)();
    ids = decltype(ids)();
    positions = decltype(positions)();
    h = Matrix();
    pending = Matrix();
    for (Vector& buffer : buffers) buffer = {};
  }

  void release_new_rows() {
    new_keys = {};
    new_values = {};
    new_scores = {};
    new_bytes = {};
  }
};

/// Spans of the step under way whose rules have a policy.
template <class Value>
struct Decoder<Value>::Policies {
  using Layer = detail::DecoderLayer<Value>;

  // Of each span of the step: null where the rule has no policy.
  std::vector<PolicyStep*> steps;
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<PolicyNeeds> needs;
  bool any = false;
  bool log_sum_exp = false;
  // Rows of spans that no policy has chosen from: what append takes.
  std::vector<AppendSpan> append_spans;
  detail::PolicyScratch<Value> scratch;

  /// After a step that has failed: also what it has left to choose by.
  void release() {
    layers.clear();
    scratch.release();
    for (PolicyStep* step : steps) {
      if (step) step->scores.clear();
    }
    steps.clear();
  }
};

template <class Value>
Decoder<Value>::Decoder(const Model<Value>& model, Scorer* scorer, const Communicator& comm,
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
      m_scratch(std::make_unique<Scratch>()),
      m_policies(std::make_unique<Policies>()) {
  const std::vector<float> frequencies = rope_inverse_frequencies(model.config());
  m_scratch->inverse_frequencies =
      Vector("kvzap::decoder::inverse_frequencies", frequencies.size());
  Kokkos::deep_copy(m_scratch->inverse_frequencies, Kokkos::View<const float*, Kokkos::HostSpace>(
                                                        frequencies.data(), frequencies.size()));
}

template <class Value>
Decoder<Value>::~Decoder() = default;

template <class Value>
Kokkos::View<const float*, MemorySpace> Decoder<Value>::inverse_frequencies() const {
  if (m_model.config().rope_depends_on_length()) {
    throw Error(
        fmt::format("decoder: with RoPE scaling of type {} frequencies depend on the length "
                    "of the text",
                    name_of(m_model.config().rope_scaling->type)));
  }
  return m_scratch->inverse_frequencies;
}

// Work of this rank alone. After an error in it the ranks go on side by side to where they next
// agree: a rank that left would let the others wait for it in a sum.
template <class Value>
template <class Work>
void Decoder<Value>::locally(const Work& work) {
  if (m_failure) return;
  try {
    work();
  } catch (...) {
    m_failure = std::current_exception();
  }
}

// Work that may communicate, and is therefore done after an error too, with whatever the buffers
// hold. Among several ranks its own errors end the program: whether the others wait is not known.
template <class Value>
template <class Work>
void Decoder<Value>::by_policy(const Work& work) {
  if (m_comm.size() == 1) return locally(work);
  work();
}

// Throws on all ranks if one of them has failed.
template <class Value>
void Decoder<Value>::agree_on_failure() {
  throw_if(m_comm.all_reduce_max(outcome_of(m_failure)));
}

template <class Value>
void Decoder<Value>::throw_if(std::int64_t worst) {
  if (worst == done) return;
  const std::exception_ptr failure = std::exchange(m_failure, nullptr);
  if (m_comm.size() == 1 && worst == failed) std::rethrow_exception(failure);
  try {
    m_comm.agree([&] {
      if (failure) std::rethrow_exception(failure);
    });
  } catch (const AgreedError& error) {
    if (worst == out_of_memory) throw StepOutOfMemory(error.what());
    throw;
  }
}

template <class Value>
std::vector<StepResult> Decoder<Value>::step(const StepBatch& batch,
                                             const ProgressCallback& progress) {
  check(batch);
  m_failure = nullptr;
  bool begun = false;
  try {
    locally([&] {
      try {
        reserve(batch);
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {
        // Kokkos' own allocations throw a runtime_error or bad_alloc, depending on its version.
        throw OutOfMemory(fmt::format("out of memory: a step ({})", error.what()), 0,
                          m_cache.pool().free_bytes());
      }
      begin_cache_step(batch);
      begun = true;
    });
    agree_on_failure();

    const std::int64_t count = batch.tokens().size();
    const int layers = static_cast<int>(m_model.config().num_hidden_layers);
    const std::int64_t blocks = (count + block_tokens - 1) / block_tokens;
    // Only spans longer than the window can run out of memory after begin_step, and only they last
    // long enough for an early end to matter.
    const bool agrees_often =
        m_policies->any ||
        std::any_of(batch.spans().begin(), batch.spans().end(), [&](const StepBatch::Span& span) {
          return span.count > m_cache.shape().window;
        });
    place_rows(batch);
    embed();
    for (int l = 0; l < layers; ++l) {
      if (m_policies->any) show_layer(batch, l);
      for (std::int64_t b = 0; b < blocks; ++b) {
        const Rows rows{b * block_tokens, std::min(count, (b + 1) * block_tokens)};
        attention_block(batch, l, rows);
        feed_forward_block(l, rows, blocks == 1);
        if (progress) locally([&] { progress("prefill", l * blocks + b + 1, layers * blocks); });
      }
      if (m_policies->any) apply_policies(batch, l);
      append(batch, l);
      if (agrees_often) agree_on_failure();
    }
    output_head();
  } catch (...) {
    if (begun) m_cache.cancel_step();
    m_scratch->release();
    m_policies->release();
    throw;
  }
  m_cache.end_step();
  m_policies->layers.clear();
  m_policies->steps.clear();
  m_scratch->pending = Matrix();
  if (static_cast<std::int64_t>(batch.tokens().size()) > block_tokens) {
    m_scratch->release();  // a long prefill's memory is not needed again
    m_policies->scratch.release();
  }
  return std::move(m_scratch->results);
}

/// Throws Error for what no rank can run.
template <class Value>
void Decoder<Value>::check(const StepBatch& batch) const {
  const ModelConfig& config = m_model.config();
  if (batch.spans().empty()) throw Error("decoder: a step needs at least one token");
  for (const StepBatch::Span& span : batch.spans()) {
    // Throws if there is no such sequence.
    const std::int64_t tokens = m_cache.tokens(span.sequence, 0) + span.count;
    if (config.sliding_window > 0 && tokens > config.sliding_window) {
      throw Error(
          fmt::format("decoder: the sequence would have {} tokens; expected at most "
                      "sliding_window ({}), beyond which attention is not supported",
                      tokens, config.sliding_window));
    }
    if (span.rule.score && !m_scorer) {
      throw Error("decoder: a step that scores needs a scorer");
    }
    if (span.rule.policy && span.rule.score) {
      throw Error("decoder: a span has either a policy or the scorer");
    }
    if (span.rule.policy && config.rope_depends_on_length() &&
        span.rule.policy->policy->needs().frequencies) {
      throw Error(fmt::format(
          "the policy turns queries or keys by RoPE's frequencies, which with RoPE scaling of type "
          "{} depend on the length of the text",
          name_of(config.rope_scaling->type)));
    }
    if (span.rule.policy && span.rule.policy->chooses && m_cache.tokens(span.sequence, 0) > 0) {
      throw Error("decoder: a policy chooses within a step only from a sequence's first rows");
    }
    for (std::int64_t i = 0; i < span.count; ++i) {
      const TokenId token = batch.tokens()[span.first + i];
      if (token < 0 || token >= config.vocab_size) {
        throw Error(fmt::format("token {} of the prompt is {}; expected an id in [0, {})", i, token,
                                config.vocab_size));
      }
    }
  }
}

// All memory that this step takes, but for scratch space of products and the kept rows of long
// spans.
template <class Value>
void Decoder<Value>::reserve(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const std::int64_t count = batch.tokens().size();
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t dim = config.head_dim;
  const std::int64_t m = std::min(count, block_tokens);
  const std::int64_t n_spans = batch.spans().size();
  scratch.scores = std::any_of(batch.spans().begin(), batch.spans().end(),
                               [](const StepBatch::Span& span) { return is_scored(span.rule); });
  begin_policies(batch);
  // A decode step on a device waits once, at its end, not in every layer.
  scratch.deferred = count == n_spans && detail::uses_device_kernels() && !m_policies->any;

  std::int64_t kv_heads = 0, projected = 0, attended = 0, gates = 0;
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    const std::int64_t own = m_cache.shape().heads[l];
    const std::int64_t gate_up = m_model.layer(l).gate_up.outputs();
    kv_heads = std::max(kv_heads, own);
    attended = std::max(attended, own * config.query_group() * dim);
    projected = std::max({projected, own * (config.query_group() + 2) * dim, gate_up / 2});
    gates = std::max(gates, gate_up);
  }

  scratch.output_spans.clear();
  scratch.output_rows.clear();
  for (const StepOutput wanted : {StepOutput::argmax, StepOutput::logits}) {
    for (std::int64_t s = 0; s < n_spans; ++s) {
      const StepBatch::Span& span = batch.spans()[s];
      if (span.output != wanted) continue;
      scratch.output_spans.push_back(s);
      scratch.output_rows.push_back(span.first + span.count - 1);
    }
    if (wanted == StepOutput::argmax) scratch.n_argmax = scratch.output_rows.size();
  }
  const std::int64_t outputs = scratch.output_rows.size();
  const std::int64_t n_logits = outputs - scratch.n_argmax;
  const std::int64_t local = m_model.output_head().outputs();

  scratch.reserve(Scratch::residual, count * hidden);
  scratch.reserve(Scratch::normed, m * hidden);
  scratch.reserve(Scratch::projected, std::max(m * projected, outputs * local));
  scratch.reserve(Scratch::attended, std::max(m * attended, outputs * hidden));
  scratch.reserve(Scratch::gates, m * gates);
  scratch.reserve_new_rows(count * kv_heads * dim, scratch.scores ? count * kv_heads : 0, m_meter);
  detail::reserve_scratch(scratch.ids, count, "kvzap::decoder::ids");
  detail::reserve_scratch(scratch.positions, count, "kvzap::decoder::positions");
  if (config.rope_depends_on_length()) {
    detail::reserve_scratch(scratch.tables, count, "kvzap::decoder::tables");
  }
  if (static_cast<std::int64_t>(scratch.angles.extent(0)) < count) {
    scratch.angles = decltype(scratch.angles)();
    scratch.angles = decltype(scratch.angles)(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::decoder::angles"), count, dim / 2,
        2);
  }
  if (!outputs_lie_together()) {
    scratch.reserve(Scratch::last_rows, outputs * hidden);
    scratch.reserve(Scratch::last_added, outputs * hidden);
    detail::reserve_scratch(scratch.device_rows, outputs, "kvzap::decoder::output_rows");
  }
  detail::reserve_scratch(scratch.argmax, scratch.n_argmax, "kvzap::decoder::argmax");
  scratch.argmax_keys.resize(scratch.n_argmax + 1);
  scratch.local_logits.resize(n_logits * local);
  if (m_comm.is_root()) {
    scratch.gathered_logits.resize(m_comm.size() > 1 ? n_logits * config.vocab_size : 0);
  }
  scratch.logit_counts.resize(m_comm.size());
  for (int r = 0; r < m_comm.size(); ++r) {
    const auto [begin, end] = even_range(config.vocab_size, m_comm.size(), r);
    scratch.logit_counts[r] = n_logits * (end - begin);
  }
  scratch.results.clear();
  scratch.results.resize(n_spans);
  for (std::int64_t o = scratch.n_argmax; o < outputs && m_comm.is_root(); ++o) {
    scratch.results[scratch.output_spans[o]].logits.resize(config.vocab_size);
  }
  scratch.rank_sum.reserve(m_comm, count * hidden);
  if (std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.rule.score; })) {
    m_scorer->reserve(m);
  }
  m_attention.reserve(attention_extents(batch, static_cast<int>(kv_heads)), m_attention_path);
  scratch.attention_spans.reserve(n_spans);
  scratch.append_spans.clear();
  scratch.sequences.clear();
  scratch.first_positions.clear();
  for (const StepBatch::Span& span : batch.spans()) {
    scratch.append_spans.push_back(
        {span.sequence, span.first, span.count, span.rule.eviction, is_scored(span.rule)});
    scratch.sequences.push_back(span.sequence);
    scratch.first_positions.push_back(m_cache.tokens(span.sequence, 0));
  }
}

/// At most what this step's calls of attention have, as if nothing had been evicted.
template <class Value>
AttentionExtents Decoder<Value>::attention_extents(const StepBatch& batch, int kv_heads) const {
  const ModelConfig& config = m_model.config();
  AttentionExtents extents;
  extents.kv_heads = kv_heads;
  extents.group = static_cast<int>(config.query_group());
  extents.head_dim = static_cast<int>(config.head_dim);
  extents.spans = batch.spans().size();
  extents.tokens = std::min<std::int64_t>(batch.tokens().size(), block_tokens);
  std::int64_t all = 0;
  for (const StepBatch::Span& span : batch.spans()) {
    const std::int64_t rows = m_cache.tokens(span.sequence, 0) + span.count;
    all += rows;
    extents.longest_single = std::max(extents.longest_single, rows);
  }
  // Not more room every few tokens, but twice as much now and then.
  extents.longest_single = next_power_of_two(extents.longest_single);
  extents.single_rows = kv_heads * next_power_of_two(all);
  return extents;
}

/// Whether the rows of the outputs are consecutive, as they are for one span and for single tokens.
template <class Value>
bool Decoder<Value>::outputs_lie_together() const {
  const auto& rows = m_scratch->output_rows;
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

template <class Value>
void Decoder<Value>::begin_cache_step(const StepBatch& batch) {
  std::vector<StepSpan> spans;
  spans.reserve(batch.spans().size());
  for (const StepBatch::Span& span : batch.spans()) spans.push_back({span.sequence, span.count});
  m_cache.begin_step(m_scratch->exec, spans);
}

// Token ids and positions, and with these RoPE's angles, in float as transformers computes them.
template <class Value>
void Decoder<Value>::place_rows(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const std::int64_t count = batch.tokens().size();
  locally([&] {
    const auto host_ids = Kokkos::create_mirror_view(scratch.ids);
    const auto host_positions = Kokkos::create_mirror_view(scratch.positions);
    std::copy(batch.tokens().begin(), batch.tokens().end(), host_ids.data());
    for (std::size_t s = 0; s < batch.spans().size(); ++s) {
      const StepBatch::Span& span = batch.spans()[s];
      std::int64_t* const own = host_positions.data() + span.first;
      std::iota(own, own + span.count, scratch.first_positions[s]);
    }
    Kokkos::deep_copy(scratch.ids, host_ids);
    Kokkos::deep_copy(scratch.positions, host_positions);
    ConstMatrix frequencies(scratch.inverse_frequencies.data(), 1,
                            scratch.inverse_frequencies.extent(0));
    Kokkos::View<const std::int64_t*, MemorySpace> tables;
    if (m_model.config().rope_depends_on_length()) {
      choose_frequencies(batch);
      frequencies = scratch.frequency_tables;
      tables = scratch.tables;
    }
    detail::fill_angles(scratch.exec, count, scratch.positions, tables, frequencies,
                        m_model.config().rope_attention_factor(), scratch.angles);
  });
  scratch.h = scratch.matrix(Scratch::residual, count, m_model.config().hidden_size);
  scratch.pending = Matrix();
}

// Which frequencies each span's tokens are turned by: those of the length its sequence has when the
// step is over.
template <class Value>
void Decoder<Value>::choose_frequencies(const StepBatch& batch) {
  Scratch& scratch = *m_scratch;
  const ModelConfig& config = m_model.config();
  const RopeScaling& scaling = *config.rope_scaling;
  const auto host_tables = Kokkos::create_mirror_view(scratch.tables);
  std::map<std::int64_t, std::int64_t> table_of_length = {{0, 0}};
  std::vector<float> rows = rope_inverse_frequencies(config);
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    std::int64_t length = scratch.first_positions[s] + span.count;
    if (length <= scaling.original_max_position_embeddings) length = 0;
    // All longer texts have the same.
    if (length > 0 && scaling.type == RopeType::longrope) {
      length = scaling.original_max_position_embeddings + 1;
    }
    const auto [entry, is_new] =
        table_of_length.emplace(length, static_cast<std::int64_t>(table_of_length.size()));
    if (is_new) {
      const std::vector<float> row = rope_inverse_frequencies(config, length);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    std::fill_n(host_tables.data() + span.first, span.count, entry->second);
  }
  Kokkos::deep_copy(scratch.tables, host_tables);
  const std::int64_t pairs = config.head_dim / 2;
  const auto count = static_cast<std::int64_t>(rows.size()) / pairs;
  if (static_cast<std::int64_t>(scratch.frequency_tables.extent(0)) != count) {
    scratch.frequency_tables = Matrix("kvzap::decoder::frequency_tables", count, pairs);
  }
  Kokkos::deep_copy(scratch.frequency_tables,
                    Kokkos::View<const float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                        rows.data(), count, pairs));
}

// Each rank fills the rows of its part of the vocabulary, the sum brings them together.
template <class Value>
void Decoder<Value>::embed() {
  Scratch& scratch = *m_scratch;
  locally([&] {
    detail::embed<Value>(scratch.exec, scratch.ids, m_model.embedding(), m_model.first_token(),
                         scratch.h);
  });
  scratch.rank_sum(scratch.exec, m_comm, scratch.h);
}

// Calls visit(span, first row, end row) for the part of each span that lies among `rows`.
template <class Value>
template <class Visit>
void Decoder<Value>::for_each_span(const StepBatch& batch, const Rows& rows, const Visit& visit) {
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    const std::int64_t begin = std::max(rows.begin, span.first);
    const std::int64_t end = std::min(rows.end, span.first + span.count);
    if (begin < end) visit(s, begin, end);
  }
}

// Scores of the rows from the first to the last one of spans that are scored: one call, whatever
// the number of sequences.
template <class Value>
void Decoder<Value>::score(const StepBatch& batch, int layer, const Rows& rows, const Matrix& x) {
  Scratch& scratch = *m_scratch;
  std::int64_t begin = rows.end, end = rows.begin;
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t first, std::int64_t last) {
    if (!batch.spans()[s].rule.score) return;
    begin = std::min(begin, first);
    end = std::max(end, last);
  });
  if (begin >= end) return;
  const auto own = range(begin, end);
  const Matrix scores = new_scores(batch, layer);
  // Not by `locally`: a scorer that communicates has to be called on all ranks.
  const detail::Stopwatch watch(m_seconds.scoring);
  try {
    m_scorer->score(scratch.exec, layer, Kokkos::subview(scratch.positions, own),
                    Kokkos::subview(x, range(begin - rows.begin, end - rows.begin), Kokkos::ALL),
                    Kokkos::subview(scores, Kokkos::ALL, own));
  } catch (...) {
    if (!m_failure) m_failure = std::current_exception();
  }
}

/// Keys or values of the step's tokens in a layer: (token, head, dim).
template <class Value>
auto Decoder<Value>::new_rows(const Kokkos::View<Value*, MemorySpace>& rows, const StepBatch& batch,
                              int layer) const -> NewRows {
  return NewRows(rows.data(), batch.tokens().size(), m_cache.shape().heads[layer],
                 m_model.config().head_dim);
}

/// (head, token) of a layer.
template <class Value>
auto Decoder<Value>::new_scores(const StepBatch& batch, int layer) const -> Activations {
  const bool exist = m_scratch->scores;
  return Activations(m_scratch->new_scores.data(), exist ? m_cache.shape().heads[layer] : 0,
                     exist ? batch.tokens().size() : 0);
}

// norm → score → q, k, v → norm and RoPE → attention → o → sum over ranks
template <class Value>
void Decoder<Value>::attention_block(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.layer(layer);
  const float eps = static_cast<float>(config.rms_norm_eps);
  const std::int64_t m = rows.count();
  const int dim = static_cast<int>(config.head_dim);
  const std::int64_t kv_heads = m_cache.shape().heads[layer];
  const std::int64_t q_heads = kv_heads * config.query_group();
  const Matrix h = Kokkos::subview(scratch.h, range(rows.begin, rows.end), Kokkos::ALL);
  const Matrix x = scratch.matrix(Scratch::normed, m, config.hidden_size);
  auto rounded = decltype(scratch.linear.template room_for_rounded<Value>(1, 1))();
  locally([&] {
    rounded = scratch.linear.template room_for_rounded<Value>(m, config.hidden_size);
    detail::add_and_norm(exec, h, scratch.pending, weights.input_norm, eps, x, rounded);
    if (!m_observer) return;
    for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const StepBatch::Span& span = batch.spans()[s];
      m_observer->attention_input(
          span.sequence, layer, scratch.first_positions[s] + begin - span.first,
          Kokkos::subview(x, range(begin - rows.begin, end - rows.begin), Kokkos::ALL));
    });
  });
  if (scratch.scores) score(batch, layer, rows, x);

  locally([&] {
    const NewRows keys = new_rows(scratch.new_keys, batch, layer);
    const NewRows values = new_rows(scratch.new_values, batch, layer);
    const Matrix qkv = scratch.matrix(Scratch::projected, m, (q_heads + 2 * kv_heads) * dim);
    scratch.linear(exec, x, rounded, weights.qkv, weights.qkv_bias, qkv);
    detail::qk_norm_and_rope(exec, qkv, dim, kv_heads, weights.q_norm, weights.k_norm, eps,
                             scratch.angles, rows.begin, keys.data() + rows.begin * kv_heads * dim,
                             values.data() + rows.begin * kv_heads * dim);

    const Matrix a = scratch.matrix(Scratch::attended, m, q_heads * dim);
    using Queries = typename Attention<Value, engine_page_order>::QueryView;
    using Heads = Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace>;
    const Queries queries(qkv.data(), Kokkos::LayoutStride(m, qkv.extent(1), q_heads, dim, dim, 1));
    const Heads attended(a.data(), m, q_heads, dim);
    scratch.attention_spans.clear();
    for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
      const StepBatch::Span& span = batch.spans()[s];
      scratch.attention_spans.push_back({m_cache.layer(span.sequence, layer), begin - rows.begin,
                                         end - begin, span.first, end - span.first});
    });
    LogSumExpView lse;
    if (m_policies->log_sum_exp) {
      const Matrix kept(m_policies->scratch.lse.data(), m, q_heads);
      lse = kept;
    }
    m_attention(exec, scratch.attention_spans, queries, keys, values, attended, m_attention_path,
                lse);
  });
  // Before the next product takes the place of the hidden states.
  if (m_policies->any) observe(batch, layer, rows);
  locally([&] {
    scratch.linear(exec, scratch.matrix(Scratch::attended, m, q_heads * dim), weights.o,
                   weights.o_bias, x);
  });
  scratch.rank_sum(exec, m_comm, x);
}

// norm → gate, up → SiLU → down → sum over ranks
template <class Value>
void Decoder<Value>::feed_forward_block(int layer, const Rows& rows, bool is_whole) {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const ModelConfig& config = m_model.config();
  const auto& weights = m_model.layer(layer);
  const std::int64_t m = rows.count();
  const std::int64_t width = weights.gate_up.outputs() / 2;
  const Matrix h = Kokkos::subview(scratch.h, range(rows.begin, rows.end), Kokkos::ALL);
  const Matrix x = scratch.matrix(Scratch::normed, m, config.hidden_size);
  locally([&] {
    auto rounded = scratch.linear.template room_for_rounded<Value>(m, config.hidden_size);
    detail::add_and_norm(exec, h, x, weights.attention_norm,
                         static_cast<float>(config.rms_norm_eps), x, rounded);
    const Matrix gate_up = scratch.matrix(Scratch::gates, m, 2 * width);
    scratch.linear(exec, x, rounded, weights.gate_up, weights.gate_up_bias, gate_up);
    rounded = scratch.linear.template room_for_rounded<Value>(m, width);
    const Matrix gated = scratch.matrix(Scratch::projected, m, width);
    detail::silu_times(exec, gate_up, gated, rounded);
    scratch.linear(exec, gated, rounded, weights.down, weights.down_bias, x);
  });
  scratch.rank_sum(exec, m_comm, x);
  if (is_whole) {
    scratch.pending = x;  // which stays as it is until the next norm takes it along
  } else {
    locally([&] { detail::add(exec, h, x); });
  }
}

// Which spans have a policy, and what these ask for.
template <class Value>
void Decoder<Value>::begin_policies(const StepBatch& batch) {
  Policies& policies = *m_policies;
  policies.steps.clear();
  policies.layers.clear();
  policies.needs.clear();
  policies.append_spans.clear();
  policies.any = std::any_of(batch.spans().begin(), batch.spans().end(),
                             [](const StepBatch::Span& span) { return span.rule.policy; });
  policies.log_sum_exp = false;
  if (!policies.any) return;
  policies.append_spans.reserve(batch.spans().size());
  for (const StepBatch::Span& span : batch.spans()) {
    PolicyStep* const step = span.rule.policy;
    policies.steps.push_back(step);
    policies.needs.push_back(step ? step->policy->needs() : PolicyNeeds());
    policies.log_sum_exp = policies.log_sum_exp || policies.needs.back().log_sum_exp;
    policies.layers.emplace_back();
    if (!step) continue;
    policies.layers.back() = std::make_unique<typename Policies::Layer>(
        m_scratch->exec, m_comm, m_model, m_cache, policies.scratch,
        m_scratch->inverse_frequencies);
    step->scores.clear();
    reserve_scores(span);
  }
  if (policies.log_sum_exp) {
    const auto& heads = m_cache.shape().heads;
    const std::int64_t most = *std::max_element(heads.begin(), heads.end());
    detail::reserve_scratch(policies.scratch.lse,
                            std::min<std::int64_t>(batch.tokens().size(), block_tokens) * most *
                                m_model.config().query_group(),
                            "kvzap::policy::log_sum_exp");
  }
}

// What apply_policies writes: nothing is taken there, where ranks are between sums. Throws if the
// budget cannot be met, too.
template <class Value>
void Decoder<Value>::reserve_scores(const StepBatch::Span& span) {
  PolicyStep& step = *span.rule.policy;
  if (!step.scores_rows()) return;
  const auto model = detail::budget_model<Value>(m_model.config());
  const std::int64_t tokens = m_cache.tokens(span.sequence, 0) + step.closed_up + span.count;
  std::int64_t largest = 0;
  for (int l = 0; l < static_cast<int>(m_cache.shape().heads.size()); ++l) {
    if (step.budget && step.budget->has_amount()) step.budget->rows_per_head(model, l, tokens);
    const int heads = m_cache.shape().heads[l];
    std::int64_t most = 0;
    for (int h = 0; h < heads; ++h) {
      most = std::max(most, step.scores_all ? m_cache.rows(span.sequence, l, h) : 0);
    }
    if (heads > 0) most += span.count;
    largest = std::max(largest, heads * most);
    if (!step.keeps_scores) continue;
    detail::before_allocation(heads * most * sizeof(float));
    step.scores.emplace_back(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::policy::step_scores"), heads, most);
  }
  auto& scratch = m_policies->scratch;
  if (!step.keeps_scores) {
    detail::reserve_scratch(scratch.scores, largest, "kvzap::policy::scores");
  }
  if (step.chooses) detail::reserve_scratch(scratch.keep, largest, "kvzap::policy::keep");
}

template <class Value>
void Decoder<Value>::show_layer(const StepBatch& batch, int layer) {
  const NewRows keys = new_rows(m_scratch->new_keys, batch, layer);
  const NewRows values = new_rows(m_scratch->new_values, batch, layer);
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    if (!span.rule.policy) continue;
    const auto own = range(span.first, span.first + span.count);
    m_policies->layers[s]->show(*span.rule.policy, span.sequence, layer, span.count);
    m_policies->layers[s]->set_new_rows(Kokkos::subview(keys, own, Kokkos::ALL, Kokkos::ALL),
                                        Kokkos::subview(values, own, Kokkos::ALL, Kokkos::ALL));
  }
}

// Shows a block to the policies that ask for it, and keeps the queries of the newest tokens.
template <class Value>
void Decoder<Value>::observe(const StepBatch& batch, int layer, const Rows& rows) {
  Scratch& scratch = *m_scratch;
  const detail::Stopwatch watch(m_seconds.scoring);
  const std::int64_t m = rows.count();
  const std::int64_t kv_heads = m_cache.shape().heads[layer];
  const std::int64_t q_heads = kv_heads * m_model.config().query_group();
  const std::int64_t dim = m_model.config().head_dim;
  const std::int64_t columns = q_heads + 2 * kv_heads;
  const Matrix x = scratch.matrix(Scratch::normed, m, m_model.config().hidden_size);
  const Kokkos::View<const float***, Kokkos::LayoutRight, MemorySpace> qkv(
      scratch.buffers[Scratch::projected].data(), m, columns, dim);
  const Matrix lse(m_policies->scratch.lse.data(), m_policies->log_sum_exp ? m : 0, q_heads);
  for_each_span(batch, rows, [&](std::size_t s, std::int64_t begin, std::int64_t end) {
    PolicyStep* const step = m_policies->steps[s];
    if (!step) return;
    const PolicyNeeds& needs = m_policies->needs[s];
    const auto own = range(begin - rows.begin, end - rows.begin);
    TokenBlock block;
    block.first = scratch.first_positions[s] + begin - batch.spans()[s].first;
    block.count = end - begin;
    block.hidden = Kokkos::subview(x, own, Kokkos::ALL);
    block.queries = Kokkos::subview(qkv, own, range(0, q_heads), Kokkos::ALL);
    if (needs.log_sum_exp) block.log_sum_exp = Kokkos::subview(lse, own, Kokkos::ALL);
    if (step->recent) {
      locally([&] { step->recent->take(scratch.exec, layer, block); });
    }
    if (needs.blocks && !step->only_watches) {
      by_policy([&] { step->policy->observe(*m_policies->layers[s], block); });
    }
  });
}

// Scores, and where a policy chooses, which rows stay.
template <class Value>
void Decoder<Value>::apply_policies(const StepBatch& batch, int layer) {
  Scratch& scratch = *m_scratch;
  Policies& policies = *m_policies;
  const ExecutionSpace& exec = scratch.exec;
  const int heads = m_cache.shape().heads[layer];
  const Activations all_scores = new_scores(batch, layer);
  policies.append_spans.clear();
  detail::fence(exec, "kvzap::policy: only scoring is timed");
  for (std::size_t s = 0; s < batch.spans().size(); ++s) {
    const StepBatch::Span& span = batch.spans()[s];
    PolicyStep* const step = policies.steps[s];
    if (!step || !step->chooses) policies.append_spans.push_back(scratch.append_spans[s]);
    if (!step || !step->scores_rows()) continue;
    auto& shown = *policies.layers[s];
    const std::int64_t most = shown.most_rows();
    const auto own = range(span.first, span.first + span.count);
    const Activations scores = step->keeps_scores
                                   ? step->scores[layer]
                                   : Activations(policies.scratch.scores.data(), heads, most);
    {
      const detail::Stopwatch watch(m_seconds.scoring);
      by_policy([&] { step->policy->score(shown, scores); });
      locally([&] {
        for (int h = 0; h < heads; ++h) {
          const std::int64_t rows = shown.rows(h);
          Kokkos::deep_copy(exec, Kokkos::subview(all_scores, h, own),
                            Kokkos::subview(scores, h, range(rows - span.count, rows)));
        }
      });
      detail::fence(exec, "kvzap::policy: scoring is timed");
    }
    if (!step->chooses) continue;
    const detail::Stopwatch choosing(m_seconds.pruning);
    const decltype(ScoredLayer::keep) keep(policies.scratch.keep.data(), heads, most);
    const auto choose = [&] {
      const ScoredLayer scored = {layer, shown.extents().heads, shown.extents().rows, scores, keep};
      detail::choose_rows(
          exec, m_comm, *step->budget, detail::budget_model<Value>(m_model.config()),
          shown.extents().tokens + step->closed_up, span.rule.eviction.sink, {scored}, {scores});
    };
    if (detail::choice_communicates(*step->budget)) {
      by_policy(choose);
    } else {
      locally(choose);
    }
    // At once: the next span's choice takes the same room.
    locally([&] {
      const NewRows keys = new_rows(scratch.new_keys, batch, layer);
      const NewRows values = new_rows(scratch.new_values, batch, layer);
      m_cache.append_kept(exec, span.sequence, layer,
                          Kokkos::subview(keys, own, Kokkos::ALL, Kokkos::ALL),
                          Kokkos::subview(values, own, Kokkos::ALL, Kokkos::ALL),
                          Kokkos::subview(all_scores, Kokkos::ALL, own), keep);
    });
  }
}

template <class Value>
void Decoder<Value>::append(const StepBatch& batch, int layer) {
  const bool judges =
      std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.rule.eviction.judge; });
  double unjudged = 0;
  const detail::Stopwatch watch(judges ? m_seconds.pruning : unjudged);
  locally([&] {
    Scratch& scratch = *m_scratch;
    const NewRows keys = new_rows(scratch.new_keys, batch, layer);
    const NewRows values = new_rows(scratch.new_values, batch, layer);
    const Activations scores = new_scores(batch, layer);
    if (m_observer) {
      for (std::size_t s = 0; s < batch.spans().size(); ++s) {
        const StepBatch::Span& span = batch.spans()[s];
        if (!is_scored(span.rule)) continue;
        m_observer->scores(
            span.sequence, layer, scratch.first_positions[s],
            Kokkos::subview(scores, Kokkos::ALL, range(span.first, span.first + span.count)));
      }
    }
    const auto& spans = m_policies->any ? m_policies->append_spans : scratch.append_spans;
    if (spans.empty()) return;
    if (scratch.deferred) {
      m_cache.append_deferred(scratch.exec, spans, layer, keys, values, scores);
    } else {
      m_cache.append(scratch.exec, spans, layer, keys, values, scores);
    }
  });
}

// Each rank's part of the vocabulary for the last token of every span that wants to know. Tokens
// leave a device alone; logits are gathered on rank 0.
template <class Value>
void Decoder<Value>::output_head() {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const ModelConfig& config = m_model.config();
  const std::int64_t outputs = scratch.output_rows.size();
  const std::int64_t n_argmax = scratch.n_argmax;
  const std::int64_t n_logits = outputs - n_argmax;
  const std::int64_t local = m_model.output_head().outputs();
  locally([&] {
    if (outputs == 0) return;
    Matrix last, added;
    if (outputs_lie_together()) {
      const auto rows = range(scratch.output_rows.front(), scratch.output_rows.front() + outputs);
      last = Kokkos::subview(scratch.h, rows, Kokkos::ALL);
      if (scratch.pending.extent(0) > 0) {
        added = Kokkos::subview(scratch.pending, rows, Kokkos::ALL);
      }
    } else {
      Kokkos::deep_copy(Kokkos::subview(scratch.device_rows, range(0, outputs)),
                        Kokkos::View<const std::int64_t*, Kokkos::HostSpace>(
                            scratch.output_rows.data(), outputs));
      last = scratch.matrix(Scratch::last_rows, outputs, config.hidden_size);
      detail::gather_rows(exec, scratch.h, scratch.device_rows, last);
      if (scratch.pending.extent(0) > 0) {
        added = scratch.matrix(Scratch::last_added, outputs, config.hidden_size);
        detail::gather_rows(exec, scratch.pending, scratch.device_rows, added);
      }
    }
    const Matrix x = scratch.matrix(Scratch::attended, outputs, config.hidden_size);
    const Matrix y = scratch.matrix(Scratch::projected, outputs, local);
    const auto rounded =
        scratch.linear.template room_for_rounded<Value>(outputs, config.hidden_size);
    detail::add_and_norm(exec, last, added, m_model.final_norm(),
                         static_cast<float>(config.rms_norm_eps), x, rounded);
    scratch.linear(exec, x, rounded, m_model.output_head(), ConstVector(), y);
    if (n_argmax > 0) {
      detail::argmax(exec, Kokkos::subview(y, range(0, n_argmax), Kokkos::ALL),
                     m_model.first_token(), Kokkos::subview(scratch.argmax, range(0, n_argmax)));
    }
    detail::fence(exec, "kvzap::decoder: the host reads tokens and logits");
    Kokkos::deep_copy(
        Kokkos::View<std::int64_t*, Kokkos::HostSpace>(scratch.argmax_keys.data(), n_argmax),
        Kokkos::subview(scratch.argmax, range(0, n_argmax)));
    if (n_logits > 0) {
      Kokkos::deep_copy(Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                            scratch.local_logits.data(), n_logits, local),
                        Kokkos::subview(y, range(n_argmax, outputs), Kokkos::ALL));
    }
  });
  if (scratch.deferred) locally([&] { m_cache.collect(scratch.sequences); });

  // Whether the step has come to its end everywhere travels with the tokens.
  scratch.argmax_keys[n_argmax] = outcome_of(m_failure);
  m_comm.all_reduce_max(scratch.argmax_keys.data(), n_argmax + 1);
  throw_if(scratch.argmax_keys[n_argmax]);
  for (std::int64_t o = 0; o < n_argmax; ++o) {
    scratch.results[scratch.output_spans[o]].argmax = detail::token_of_key(scratch.argmax_keys[o]);
  }
  if (n_logits > 0) gather_logits();
}

// Each rank has (output, its part of the vocabulary); wanted on rank 0: the vocabulary of each.
template <class Value>
void Decoder<Value>::gather_logits() {
  Scratch& scratch = *m_scratch;
  const std::int64_t vocabulary = m_model.config().vocab_size;
  const std::int64_t outputs = scratch.output_rows.size() - scratch.n_argmax;
  const float* source = scratch.local_logits.data();
  if (m_comm.size() > 1) {
    m_comm.gather(source, scratch.logit_counts, scratch.gathered_logits.data(), 0);
    source = scratch.gathered_logits.data();
  }
  if (!m_comm.is_root()) return;
  for (int r = 0; r < m_comm.size(); ++r) {
    const auto [begin, end] = even_range(vocabulary, m_comm.size(), r);
    for (std::int64_t o = 0; o < outputs; ++o) {
      const std::int64_t span = scratch.output_spans[scratch.n_argmax + o];
      std::copy_n(source, end - begin, scratch.results[span].logits.data() + begin);
      source += end - begin;
    }
  }
}

#define KVZAP_INSTANTIATE(Value) template class Decoder<Value>;
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
