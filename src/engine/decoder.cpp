#include <fmt/format.h>

#include <kvzap/engine/pruning.hpp>

#include "engine/decoder_shared.hpp"
#include "model/cache_layers.hpp"
#include "model/model_weights.hpp"
#include "model/step_block.hpp"

namespace kvzap {
namespace {

using engine::Outcome;
using linalg::Matrix;
using linalg::Vector;
using model::block_tokens;

Vector on_device(const std::vector<float>& frequencies) {
  Vector copy("kvzap::decoder::inverse_frequencies", frequencies.size());
  Kokkos::deep_copy(
      copy, Kokkos::View<const float*, Kokkos::HostSpace>(frequencies.data(), frequencies.size()));
  return copy;
}

CacheShape own_shape(const Model& model, int window, int page_rows, const PageFormat& format) {
  CacheShape shape =
      model::cache_shape(model.config(), model.partition(), model.rank(), window, page_rows);
  shape.format = format;
  if (model.weights().are_here()) return shape;
  for (StateShape& state : shape.states) state.heads = 0;  // a model that runs elsewhere keeps them
  return shape;
}

}  // namespace

Decoder::Decoder(const Model& model, Scorer* scorer, const Communicator& comm, int window,
                 int page_rows, MemoryMeter* meter, const PageFormat& format)
    : m_model(model),
      m_scorer(scorer),
      m_comm(comm),
      m_meter(meter),
      m_counted(budget_model(model.config(), size_of(model.dtype()), format)),
      m_cache(model.dtype(), own_shape(model, window, page_rows, format), meter),
      m_attention(model.dtype()),
      m_scratch(std::make_unique<Scratch>(model.dtype())),
      m_policies(std::make_unique<Policies>(model.dtype())),
      m_placement(
          std::make_unique<engine::PagePlacement>(model.partition(), comm, m_cache, meter)) {
  m_scratch->inverse_frequencies = on_device(rope_inverse_frequencies(model.config()));
  if (model.config().window_rope_theta) {
    m_scratch->window_frequencies =
        on_device(rope_inverse_frequencies(with_window_rope(model.config())));
  }
}

Decoder::~Decoder() = default;

Kokkos::View<const float*, MemorySpace> Decoder::inverse_frequencies() const {
  if (m_model.config().rope_depends_on_length()) {
    throw Error(
        fmt::format("decoder: with RoPE scaling of type {} frequencies depend on the length "
                    "of the text",
                    name_of(m_model.config().rope_scaling->type)));
  }
  return m_scratch->inverse_frequencies;
}

// Throws on every rank if any rank has failed. Collective.
void Decoder::agree_on_failure() { throw_if(m_comm.all_reduce_max(engine::outcome_of(m_failure))); }

void Decoder::throw_if(std::int64_t worst) {
  if (worst == Outcome::done) return;
  const std::exception_ptr failure = std::exchange(m_failure, nullptr);
  if (m_comm.size() == 1 && worst == Outcome::failed) std::rethrow_exception(failure);
  try {
    m_comm.agree([&] {
      if (failure) std::rethrow_exception(failure);
    });
  } catch (const AgreedError& error) {
    if (worst == Outcome::out_of_memory) throw StepOutOfMemory(error.what());
    throw;
  }
}

std::vector<StepResult> Decoder::step(const StepBatch& batch, const ProgressCallback& progress) {
  if (m_scratch->external) throw Error("decoder: begin_step has begun another step");
  begin(batch);
  or_cancel([&] {
    const std::int64_t count = batch.tokens().size();
    const int layers = static_cast<int>(m_model.config().num_hidden_layers);
    const std::int64_t block = block_tokens(m_model.config());
    const std::int64_t blocks = (count + block - 1) / block;
    place_rows(batch);
    embed();
    for (int l = 0; l < layers; ++l) {
      if (m_policies->any && is_pruned(l)) show_layer(batch, l);
      for (std::int64_t b = 0; b < blocks; ++b) {
        const Rows rows{b * block, std::min(count, (b + 1) * block)};
        if (m_model.config().layer(l).has_delta_net) {
          delta_net_block(batch, l, rows);
        } else {
          attention_block(batch, l, rows);
        }
        feed_forward_block(l, rows, blocks == 1);
        if (progress) locally([&] { progress("prefill", l * blocks + b + 1, layers * blocks); });
      }
      end_layer(batch, l);
    }
    output_head();
  });
  end(batch);
  return std::move(m_scratch->results);
}

void Decoder::begin_step(const StepBatch& batch) {
  if (m_scratch->external) throw Error("decoder: a step has begun already");
  if (m_comm.size() > 1) throw Error("decoder: an external model has one rank");
  if (std::any_of(batch.spans().begin(), batch.spans().end(),
                  [](const StepBatch::Span& span) { return span.output != StepOutput::none; })) {
    throw Error("decoder: an external model computes its own logits");
  }
  for (const StepBatch::Span& span : batch.spans()) {
    // The caller's keys have the order of the checkpoint.
    if (span.rule.policy && span.rule.policy->policy->needs().frequencies &&
        !m_model.config().rotates_halves()) {
      throw Error(
          "the policy turns queries or keys by RoPE's frequencies; expected a model whose RoPE "
          "rotates each dimension of a head with the one half a head away");
    }
  }
  begin(batch);
  m_scratch->external = batch;
  m_scratch->next_layer = 0;
  or_cancel([&] {
    place_positions(batch);
    skip_states();
  });
}

// Counts the tokens of the external step in layers that have no attention, up to the next that has.
void Decoder::skip_states() {
  int& layer = m_scratch->next_layer;
  for (; layer < static_cast<int>(m_model.config().num_hidden_layers); ++layer) {
    if (!m_cache.shape().has_state(layer)) return;
    for (const StepBatch::Span& span : m_scratch->external->spans()) {
      m_cache.count_tokens(span.sequence, layer, span.count);
    }
  }
}

void Decoder::attend(int layer, const std::vector<ExternalLayer>& spans) {
  const StepBatch& batch = external_batch();
  or_cancel([&] {
    if (layer != m_scratch->next_layer ||
        layer >= static_cast<int>(m_model.config().num_hidden_layers)) {
      throw Error(fmt::format("decoder: attention of layer {}; expected layer {} of {}", layer,
                              m_scratch->next_layer, m_model.config().num_hidden_layers));
    }
    check_layer(batch, layer, spans);
    take_sinks(spans);
    if (m_policies->any && is_pruned(layer)) {
      show_layer(batch, layer);
      for (std::size_t s = 0; s < spans.size(); ++s) {
        auto& shown = m_policies->layers[s];
        if (!shown) continue;
        shown->set_output_weights(spans[s].output_weights);
        shown->set_sinks(m_scratch->external_sinks);
      }
    }
    const std::int64_t count = batch.tokens().size();
    const std::int64_t block = block_tokens(m_model.config());
    for (std::int64_t begin = 0; begin < count; begin += block) {
      external_block(batch, layer, {begin, std::min(count, begin + block)}, spans);
    }
    end_layer(batch, layer);
    agree_on_failure();
    base::fence(m_scratch->exec, "kvzap::decoder: the caller reads the output");
  });
  ++m_scratch->next_layer;
  skip_states();
}

void Decoder::end_step() {
  const StepBatch& batch = external_batch();
  const int layers = static_cast<int>(m_model.config().num_hidden_layers);
  if (m_scratch->next_layer != layers) {
    throw Error(
        fmt::format("decoder: the step ends after {} of {} layers", m_scratch->next_layer, layers));
  }
  end(batch);
  m_scratch->external.reset();
}

void Decoder::cancel_step() {
  if (m_scratch->external) cancel();
}

const StepBatch& Decoder::external_batch() const {
  if (!m_scratch->external) throw Error("decoder: no step has begun");
  return *m_scratch->external;
}

// Reserves the step's memory and begins it in the cache. Collective.
void Decoder::begin(const StepBatch& batch) {
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
        // Kokkos' allocations throw runtime_error or bad_alloc, depending on its version.
        throw OutOfMemory(fmt::format("out of memory: a step ({})", error.what()), 0,
                          m_cache.pool().free_bytes());
      }
      begin_cache_step(batch);
      begun = true;
    });
    agree_on_failure();
  } catch (...) {
    release(begun);
    throw;
  }
  // After begin_step, only a span longer than the window can run out of memory, and only its step
  // lasts long enough for an early end to matter.
  m_scratch->agrees_often =
      m_policies->any ||
      std::any_of(batch.spans().begin(), batch.spans().end(),
                  [&](const StepBatch::Span& span) { return span.count > m_cache.shape().window; });
}

// Prunes a layer whose attention is complete, and appends its rows.
void Decoder::end_layer(const StepBatch& batch, int layer) {
  if (m_policies->any && is_pruned(layer)) apply_policies(batch, layer);
  append(batch, layer);
  if (m_scratch->agrees_often) agree_on_failure();
}

void Decoder::end(const StepBatch& batch) {
  m_cache.end_step();
  m_policies->layers.clear();
  m_policies->steps.clear();
  m_scratch->pending = Matrix();
  if (static_cast<std::int64_t>(batch.tokens().size()) > block_tokens(m_model.config())) {
    m_scratch->release();  // only a long prefill needs that much memory
    if (m_shared) m_shared->release();
    m_policies->scratch.release();
  }
}

// Runs a part of a step that has begun. An error cancels the step.
template <class Work>
void Decoder::or_cancel(const Work& work) {
  try {
    work();
  } catch (...) {
    cancel();
    throw;
  }
}

void Decoder::cancel() {
  m_scratch->external.reset();
  release(true);
}

void Decoder::release(bool has_begun) {
  if (has_begun) m_cache.cancel_step();
  m_scratch->release();
  if (m_shared) m_shared->release();
  m_policies->release();
}

// Throws Error for a batch that no rank can run.
void Decoder::check(const StepBatch& batch) const {
  const ModelConfig& config = m_model.config();
  if (batch.spans().empty()) throw Error("decoder: a step needs at least one token");
  for (const StepBatch::Span& span : batch.spans()) {
    // Throws if the sequence does not exist.
    m_cache.tokens(span.sequence, 0);
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

}  // namespace kvzap
