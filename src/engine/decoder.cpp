#include "engine/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvzap/engine/pruning.hpp>

#include "base/stopwatch.hpp"
#include "model/cache_layers.hpp"
#include "model/step_block.hpp"

namespace kvzap {
namespace {

using engine::is_scored;
using engine::range;

// The first layers that read all pages: in these, attention is spread over most of the context
// (Quest, arXiv 2406.10774).
constexpr int layers_with_all_pages = 2;

CacheShape own_shape(const Model& model, int window, int page_rows, const DecoderPages& pages) {
  CacheShape shape =
      model::cache_shape(model.config(), model.partition(), model.rank(), window, page_rows);
  shape.format = model::stored_format(model.config(), pages.format);
  if (!pages.read.all()) shape.bounds_from = layers_with_all_pages;
  if (model.weights().are_here()) return shape;
  for (StateShape& state : shape.states) state.heads = 0;  // a model that runs elsewhere keeps them
  return shape;
}

std::unique_ptr<engine::SharedHeadsBlock> shared_heads(const Model& model,
                                                       engine::PagePlacement& placement) {
  if (model.partition().n_ranks() == 1) return nullptr;
  return std::make_unique<engine::SharedHeadsBlock>(model, placement);
}

}  // namespace

Decoder::Decoder(const Model& model, Scorer* scorer, const Communicator& comm, int window,
                 int page_rows, MemoryMeter* meter, const DecoderPages& pages)
    : m_model(model),
      m_scorer(scorer),
      m_comm(comm),
      m_counted(budget_model(model.config(), size_of(model.dtype()), pages.format)),
      m_cache(model.dtype(), own_shape(model, window, page_rows, pages), meter),
      m_placement(model.partition(), comm, m_cache, meter),
      m_step(model, comm, m_cache, meter),
      m_policies(model.dtype(), m_counted),
      m_shared(shared_heads(model, m_placement)),
      m_attention(model, m_policies, m_shared.get(), pages.read) {
  const auto add_once = [&](engine::LayerBlock* block) {
    if (block == nullptr) return;
    if (std::find(m_blocks.begin(), m_blocks.end(), block) == m_blocks.end()) {
      m_blocks.push_back(block);
    }
  };
  const ModelConfig& config = model.config();
  std::vector<int> last_reader;  // of each layer's rows
  for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
    m_layers.push_back(blocks_of(config.layer(l)));
    add_once(m_layers.back().tokens);
    add_once(m_layers.back().channels);
    add_once(m_layers.back().beside);
    last_reader.push_back(l);
    last_reader[config.rows_of(l)] = l;
  }
  m_ends.resize(last_reader.size());
  for (std::size_t l = 0; l < last_reader.size(); ++l) {
    m_ends[last_reader[l]].push_back(static_cast<int>(l));
  }
  if (!model.weights().are_here()) return;
  if (config.experts && config.experts->have_dense_part()) add_once(&m_experts);
  if (config.layer_inputs)
    add_once((m_inputs = std::make_unique<engine::LayerInputsBlock>()).get());
  if (config.shared_blocks) add_once((m_joined = std::make_unique<engine::JoinedInputs>()).get());
  if (config.alt_up) add_once((m_alt_up = std::make_unique<engine::AltUpBlock>()).get());
}

// A new kind of layer has its line here.
auto Decoder::blocks_of(const LayerConfig& layer) -> LayerBlocks {
  LayerBlocks blocks{&m_attention, &m_feed_forward};
  switch (layer.mixing) {
    case TokenMixing::attention:
      break;
    case TokenMixing::delta_net:
      blocks.tokens = &m_delta_net;
      break;
    case TokenMixing::short_convolution:
      blocks.tokens = &m_short_convolution;
      break;
    case TokenMixing::state_space:
      blocks.tokens = &m_state_space;
      break;
    case TokenMixing::attention_and_state_space:
    case TokenMixing::attention_into_state_space:
      blocks.beside = &m_state_space;
      break;
    case TokenMixing::none:
      blocks.tokens = nullptr;
      break;
  }
  if (layer.has_experts && !m_model.config().experts->have_dense_part())
    blocks.channels = &m_experts;
  if (!layer.has_feed_forward) blocks.channels = nullptr;
  return blocks;
}

Kokkos::View<const float*, MemorySpace> Decoder::inverse_frequencies() const {
  if (m_model.config().rope_depends_on_length()) {
    throw Error(
        fmt::format("decoder: with RoPE scaling of type {} frequencies depend on the length "
                    "of the text",
                    name_of(m_model.config().rope_scaling->type)));
  }
  return m_attention.angles().inverse_frequencies();
}

std::vector<StepResult> Decoder::step(const StepBatch& batch, const ProgressCallback& progress) {
  if (m_external) throw Error("decoder: begin_step has begun another step");
  begin(batch);
  std::vector<StepResult> results;
  or_cancel([&] {
    m_step.place_positions();
    for (engine::LayerBlock* const of_layers : m_blocks) of_layers->begin(m_step);
    m_embedding.begin(m_step);
    m_step.locally([&] { m_output.begin(m_step); });
    if (all_can_plan()) {
      run_planned();
      const int layers = static_cast<int>(m_layers.size());
      if (progress) m_step.locally([&] { progress("prefill", layers, layers); });
    } else {
      run_layers(progress);
    }
    results = m_output.run(m_step);
  });
  end();
  return results;
}

// Everything from the embedding to the output head.
void Decoder::run_layers(const ProgressCallback& progress) {
  const std::int64_t count = m_step.tokens();
  const int layers = static_cast<int>(m_layers.size());
  const std::int64_t block = model::block_tokens(m_model.config());
  const std::int64_t blocks = (count + block - 1) / block;
  m_embedding.run(m_step);
  if (m_inputs) m_step.locally([&] { m_inputs->take_embedding(m_step); });
  if (m_joined) m_step.locally([&] { m_joined->take_embedding(m_step); });
  if (m_alt_up) m_step.locally([&] { m_alt_up->make_streams(m_step); });
  for (int l = 0; l < layers; ++l) {
    if (m_policies.see(m_step, l)) show_layer(l);
    for (std::int64_t b = 0; b < blocks; ++b) {
      const engine::RowRange rows =
          m_step.passing_rows(l, {b * block, std::min(count, (b + 1) * block)});
      if (rows.count() > 0) pass_layer(l, rows);
      if (!progress) continue;
      m_step.locally([&] { progress("prefill", l * blocks + b + 1, layers * blocks); });
    }
    end_layers(l);
  }
  if (m_alt_up) m_step.locally([&] { m_alt_up->join_streams(m_step); });
  m_step.locally([&] { m_output.compute(m_step); });
}

// Reserves the step's memory and begins it in the cache. Collective.
void Decoder::begin(const StepBatch& batch) {
  check(batch);
  m_step.forget_failure();
  parallel::RankExchange::prepare(m_step.exec, m_comm);
  bool begun = false;
  try {
    m_step.locally([&] {
      try {
        m_step.begin(batch);
        reserve();
      } catch (const Error&) {
        throw;
      } catch (const std::exception& error) {
        // Kokkos' allocations throw runtime_error or bad_alloc, depending on its version.
        throw OutOfMemory(fmt::format("out of memory: a step ({})", error.what()), 0,
                          m_cache.pool().free_bytes());
      }
      begin_cache_step();
      begun = true;
    });
    m_step.agree_on_failure();
  } catch (...) {
    undo(begun);
    throw;
  }
  // After begin_step, only a span longer than the window can run out of memory, and only its step
  // lasts long enough for an early end to matter.
  m_agrees_often = m_step.has_policies || std::any_of(batch.spans().begin(), batch.spans().end(),
                                                      [&](const StepBatch::Span& span) {
                                                        return span.count > m_cache.shape().window;
                                                      });
}

// Reserves the memory of this step, except scratch space of products and the kept rows of long
// spans.
void Decoder::reserve() {
  m_policies.reserve(m_step, m_attention.angles().inverse_frequencies());
  m_step.reserve();
  // Before attention, which asks it for extents.
  if (m_shared) m_shared->reserve(m_step, m_policies.need_output_weights());
  for (engine::LayerBlock* const block : m_blocks) block->reserve(m_step);
  const auto& experts = m_model.config().experts;
  const bool has_both = std::any_of(m_layers.begin(), m_layers.end(), [](const LayerBlocks& layer) {
    return layer.beside != nullptr;
  });
  if (m_model.config().is_parallel || has_both || (experts && experts->beside_dense)) {
    base::reserve_scratch(m_parallel, m_step.most_rows() * m_model.config().hidden_size,
                          "kvzap::decoder::parallel");
  }
  if (experts && experts->joins_next) {
    base::reserve_scratch(m_of_experts, m_step.tokens() * m_model.config().hidden_size,
                          "kvzap::decoder::of_experts");
  }
  m_embedding.reserve(m_step);
  m_output.reserve(m_step);
  m_pruned_spans.clear();
  m_ring_spans.clear();
  bool scores = false;
  for (const StepBatch::Span& span : m_step.spans()) {
    m_ring_spans.push_back({span.sequence, span.first, span.count, {}, false});
    scores = scores || span.rule.score;
    if (span.rule.policy && span.rule.policy->chooses) continue;
    // Attention has appended all but the last token of a span that runs in turn.
    const std::int64_t before = m_step.runs_in_turn(span) ? span.count - 1 : 0;
    m_pruned_spans.push_back({span.sequence, span.first + before, span.count - before,
                              span.rule.eviction, is_scored(span.rule)});
  }
  if (scores) m_scorer->reserve(m_step.most_rows());
}

void Decoder::begin_cache_step() {
  std::vector<StepSpan> spans;
  spans.reserve(m_step.spans().size());
  for (const StepBatch::Span& span : m_step.spans()) spans.push_back({span.sequence, span.count});
  m_cache.begin_step(m_step.exec, spans);
}

// Ends a layer, and those whose rows it was the last to read. Until then these are as they were
// before the step, so that all readers see the same rows, whatever their layer evicts.
void Decoder::end_layers(int after) {
  for (const int layer : m_ends[after]) end_layer(layer);
}

// Prunes a layer whose attention is complete, and appends its rows.
void Decoder::end_layer(int layer) {
  if (m_policies.see(m_step, layer)) m_policies.apply(m_step, layer);
  append(layer);
  if (m_agrees_often) m_step.agree_on_failure();
}

void Decoder::append(int layer) {
  const std::vector<StepBatch::Span>& spans = m_step.spans();
  const bool judges = std::any_of(spans.begin(), spans.end(), [](const StepBatch::Span& span) {
    return span.rule.eviction.judges();
  });
  double unjudged = 0;
  const base::Stopwatch watch(judges ? m_step.seconds.pruning : unjudged);
  m_step.locally([&] {
    for (std::size_t s = 0; m_observer && m_step.is_pruned(layer) && s < spans.size(); ++s) {
      if (!is_scored(spans[s].rule)) continue;
      m_observer->scores(spans[s].sequence, layer, m_step.first_positions[s],
                         m_step.new_scores(layer, spans[s].first, spans[s].first + spans[s].count));
    }
    if (m_step.is_planned) return m_cache.append_planned(m_step.exec, layer);
    const auto& appended = appended_to(layer);
    if (m_step.shares_rows(layer)) return count_tokens(layer, appended);
    if (appended.empty() || !m_cache.shape().keeps_rows(layer)) return;
    const ArrayView keys = m_step.new_keys(layer), values = m_step.new_values(layer);
    const linalg::Matrix scores = m_step.new_scores(layer);
    if (m_step.deferred) {
      m_cache.append_deferred(m_step.exec, appended, layer, keys, values, scores);
    } else {
      m_cache.append(m_step.exec, appended, layer, keys, values, scores);
    }
  });
}

// Counts the tokens of a layer that has no rows of its own.
void Decoder::count_tokens(int layer, const std::vector<AppendSpan>& spans) {
  for (const AppendSpan& span : spans) m_cache.count_tokens(span.sequence, layer, span.rows);
}

void Decoder::end() {
  m_cache.end_step();
  m_policies.end();
  m_step.pending = linalg::Matrix();
  // Only a long prefill needs that much memory.
  if (m_step.tokens() > model::block_tokens(m_model.config())) release();
}

void Decoder::release() {
  m_step.release();
  m_policies.release();
  if (m_shared) m_shared->release();
  for (engine::LayerBlock* const block : m_blocks) block->release();
  m_parallel = m_of_experts = {};
  m_embedding.release();
  m_output.release();
}

void Decoder::cancel() {
  m_external.reset();
  undo(true);
}

void Decoder::undo(bool has_begun) {
  base::fence(m_step.exec, "kvzap::decoder: a step has ended early");
  if (has_begun) m_cache.cancel_step();
  m_policies.cancel();
  release();
}

// Ranks have parts of the vocabulary.
bool Decoder::draws_tokens() const {
  return m_comm.size() == 1 && m_model.config().vocab_size <= engine::TokenDraws::most_tokens;
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
    if (!span.draws.empty() && !draws_tokens()) {
      throw Error(fmt::format(
          "decoder: a drawn token of {} ranks and {} tokens; expected one rank, and at most {}",
          m_comm.size(), config.vocab_size, engine::TokenDraws::most_tokens));
    }
    const std::int64_t end = m_cache.tokens(span.sequence, 0) + span.count;
    if (config.embeds_positions && end > config.max_position_embeddings) {
      throw Error(
          fmt::format("a text of {} tokens; expected at most {}, the positions that the "
                      "model's embedding has",
                      end, config.max_position_embeddings));
    }
    if (config.attention_top_k > 0 && end > config.attention_top_k) {
      throw Error(
          fmt::format("a text of {} tokens; expected at most {} (index_topk), because kvzap lacks "
                      "the indexer that chooses the tokens which longer texts see",
                      end, config.attention_top_k));
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
