// One step of the transformer: it runs new tokens through all layers and appends their pairs to the
// cache.
#pragma once

#include <kvzap/core/attention.hpp>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/budget.hpp>
#include <kvzap/engine/external_layer.hpp>
#include <kvzap/engine/scorer.hpp>
#include <kvzap/engine/step_batch.hpp>
#include <kvzap/engine/step_observer.hpp>
#include <kvzap/model/model.hpp>
#include <memory>
#include <optional>
#include <vector>

#include "engine/alt_up_block.hpp"
#include "engine/attention_block.hpp"
#include "engine/delta_net_block.hpp"
#include "engine/embedding_block.hpp"
#include "engine/experts_block.hpp"
#include "engine/feed_forward_block.hpp"
#include "engine/joined_inputs.hpp"
#include "engine/layer_inputs_block.hpp"
#include "engine/output_block.hpp"
#include "engine/page_placement.hpp"
#include "engine/policy_block.hpp"
#include "engine/recorded_steps.hpp"
#include "engine/shared_heads_block.hpp"
#include "engine/short_convolution_block.hpp"
#include "engine/state_space_block.hpp"
#include "engine/step.hpp"

namespace kvzap {

/// How pages store rows, and how many of them steps of one token read (CacheOptions).
struct DecoderPages {
  PageFormat format = {};
  ReadPages read = {};
};

/// The forward pass of decoders over a ragged cache, for one rank's share of the heads: a loop over
/// layers, each with a token mixer and a channel mixer. ModelConfig describes the decoder; the pass
/// does not depend on the family. Every rank must call step with the same arguments.
class Decoder {
 public:
  using Cache = KVCache;

  /// Makes a decoder with an empty cache of this `window` and `page_rows`. `scorer` may be null;
  /// then no step may score. `meter` counts the memory of the cache and may be null. model, scorer
  /// and meter must outlive the decoder.
  Decoder(const Model& model, Scorer* scorer, const Communicator& comm, int window, int page_rows,
          MemoryMeter* meter = nullptr, const DecoderPages& pages = {});
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  /// Runs the batch's tokens through the model, layer by layer, and appends their pairs to the
  /// cache. Returns one result for each span.
  ///
  /// In each layer the tokens of a span attend causally to one another, and to the rows in their
  /// sequence's cache. Then their pairs are appended under the span's rule. If the rule has a
  /// policy, the policy scores the rows; if the policy also chooses, only the rows that stay are
  /// stored. Beside the cache, keys and values of the step's tokens exist for one layer at a time.
  /// Those that later layers read (LayerConfig::rows_of) exist, and their layer is not pruned,
  /// until the last of these layers has run. Other spans change the result of a span only through
  /// the order of sums in products.
  ///
  /// Memory for all layers is reserved before the first one. The exception is the kept rows of
  /// spans longer than the window, whose number is known only layer by layer. After an error on any
  /// rank, the sequences are in their state before the step, on every rank.
  ///
  /// Collective. Throws StepOutOfMemory if a rank runs out of memory. Throws Error for an empty
  /// batch, for a token id outside the vocabulary, and for a span that scores without a scorer.
  /// Throws Error for a policy that uses RoPE's frequencies if these depend on the length of the
  /// text.
  std::vector<StepResult> step(const StepBatch& batch, const ProgressCallback& progress = {});

  /// Begins a step of a model that runs outside of the library. The caller computes everything but
  /// attention: after begin_step it calls `attend` once for each layer, in order, then end_step.
  /// The ids of the batch's tokens are not used, and no span has an output. Attention, scoring,
  /// pruning and memory are those of `step`. The model has one rank, and may be of
  /// Model::without_weights. Throws as `step` does, and Error within another step.
  void begin_step(const StepBatch& batch);
  /// Appends the step's pairs of a layer, writes the output of their attention, and prunes the
  /// layer. spans: of each span of the batch. Waits. After an error the sequences are in their
  /// state before the step, and there is no step any more. Throws the errors of `step`, and Error
  /// for arrays that do not fit or that the step needs and lacks (see needs_hidden).
  void attend(int layer, const std::vector<ExternalLayer>& spans);
  /// Ends the step. Throws Error unless all layers have run; the step then continues.
  void end_step();
  /// Ends a step of begin_step, if there is one, and returns its sequences to their state before.
  void cancel_step();
  /// Returns whether the step of begin_step scores by ExternalLayer::hidden.
  bool needs_hidden() const;

  /// Returns the placement of the cache's pages on ranks. Rows of a sequence that lie on other
  /// ranks than their heads' owners take part in attention alone: recall them before a step with a
  /// policy, or before other uses of the cache.
  engine::PagePlacement& placement() { return m_placement; }
  const engine::PagePlacement& placement() const { return m_placement; }
  Cache& cache() { return m_cache; }
  const Cache& cache() const { return m_cache; }
  const Model& model() const { return m_model; }
  /// Returns the sizes from which budgets compute their counts.
  const Budget::Model& counted() const { return m_counted; }
  const Communicator& communicator() const { return m_comm; }
  void set_observer(StepObserver* observer) { m_observer = observer; }
  void set_attention_path(AttentionPath path) {
    m_attention.set_path(path);
    m_recorded.clear();
  }
  /// Returns whether a step can draw tokens (StepOutput::drawn): with one rank, and a vocabulary of
  /// at most 2^20 tokens.
  bool draws_tokens() const;
  /// Returns the seconds of all steps so far. Those of repeated steps are not known.
  const PruneSeconds& seconds() const { return m_step.seconds; }
  /// Returns how many steps so far were launches recorded before (base::LaunchGraph).
  std::int64_t repeated_steps() const { return m_repeated_steps; }
  /// Returns RoPE's inverse frequencies (head_dim / 2): the angle of dimensions (i, i + head_dim/2)
  /// per position. Throws Error if they depend on the length of the text
  /// (ModelConfig::rope_depends_on_length).
  Kokkos::View<const float*, MemorySpace> inverse_frequencies() const;

 private:
  /// Null: the layer has none.
  struct LayerBlocks {
    engine::TokenMixer* tokens;
    engine::ChannelMixer* channels;
    // Adds its output to that of `tokens`, or reads this (ModelConfig::shared_blocks).
    engine::TokenMixer* beside = nullptr;
  };

  LayerBlocks blocks_of(const LayerConfig& layer);
  void run_layers(const ProgressCallback& progress);
  bool can_plan() const;
  bool all_can_plan() const;
  void plan();
  std::vector<std::int64_t> planned_shape();
  std::vector<std::int64_t> plan_with_ranks();
  bool record(engine::RecordedSteps::Recorded& recorded);
  void run_planned();
  void run_plans();
  void check(const StepBatch& batch) const;
  void begin(const StepBatch& batch);
  void reserve();
  void begin_cache_step();
  void end_layers(int after);
  void end_layer(int layer);
  const std::vector<AppendSpan>& appended_to(int layer) const {
    return m_step.is_pruned(layer) ? m_pruned_spans : m_ring_spans;
  }
  void append(int layer);
  void count_tokens(int layer, const std::vector<AppendSpan>& spans);
  void end();
  void cancel();
  void undo(bool has_begun);
  void release();
  template <class Work>
  void or_cancel(const Work& work);

  void pass_layer(int layer, const engine::RowRange& rows);
  void pass_shared_layer(int layer, const engine::RowRange& rows);
  linalg::Matrix join_input(int layer, const engine::RowRange& rows);
  void leave_layer(int layer, const engine::RowRange& rows, const linalg::Matrix& y);
  void enter_layer(int layer, const engine::RowRange& rows, const linalg::Matrix& x);
  void mix_tokens(int layer, const engine::RowRange& rows, const linalg::Matrix& x,
                  const linalg::Matrix& y);
  void count_tokens(int layer, const engine::RowRange& rows);
  bool counts_tokens(int layer) const;
  void show_layer(int layer);
  void show_input(int layer, const engine::RowRange& rows, const linalg::Matrix& x);
  void score(int layer, const engine::RowRange& rows, const linalg::Matrix& x);
  void mix_channels(int layer, const engine::RowRange& rows, const linalg::Matrix& of_tokens,
                    linalg::Matrix& y);
  linalg::Matrix join_experts(int layer, const engine::RowRange& rows, const linalg::Matrix& x);
  void add_experts(int layer, const linalg::Matrix& h, const linalg::Matrix& y);
  void complete(const linalg::Matrix& y, const Model::Weights::Norm& norm);
  void finish(const linalg::Matrix& y, const Model::Weights::Norm& norm);
  void keep_normed(const linalg::Matrix& h, const linalg::Matrix& normed, double factor);

  void require_step() const;
  void skip_states();
  void check_layer(int layer, const std::vector<ExternalLayer>& spans) const;
  bool has_sinks(int layer) const;
  void take_sinks(int layer, const std::vector<ExternalLayer>& spans);
  void attend(int layer, const engine::RowRange& rows, const std::vector<ExternalLayer>& spans);

  const Model& m_model;
  Scorer* m_scorer;
  Communicator m_comm;
  Budget::Model m_counted;
  Cache m_cache;
  engine::PagePlacement m_placement;
  StepObserver* m_observer = nullptr;

  engine::Step m_step;
  engine::EmbeddingBlock m_embedding;
  engine::PolicyBlock m_policies;
  std::unique_ptr<engine::SharedHeadsBlock> m_shared;  // null with one rank
  engine::AttentionBlock m_attention;
  engine::DeltaNetBlock m_delta_net;
  engine::ShortConvolutionBlock m_short_convolution;
  engine::StateSpaceBlock m_state_space;
  engine::FeedForwardBlock m_feed_forward;
  engine::ExpertsBlock m_experts;
  std::unique_ptr<engine::LayerInputsBlock> m_inputs;  // null: the model has no such inputs
  std::unique_ptr<engine::AltUpBlock> m_alt_up;        // null: the model has one residual stream
  std::unique_ptr<engine::JoinedInputs> m_joined;      // null: the model has no shared blocks
  engine::OutputBlock m_output;
  std::vector<LayerBlocks> m_layers;
  // (layer): those that end after it, itself or an earlier one whose rows it is the last to read.
  std::vector<std::vector<int>> m_ends;
  std::vector<engine::LayerBlock*> m_blocks;  // of all layers, each once
  linalg::Vector m_parallel;                  // output of a mixer beside another one
  linalg::Vector m_of_experts;                // (token, hidden_size): joins the next layer's

  // Spans whose rows the cache appends: in layers that are pruned, and in others. A policy that
  // chooses stores its rows itself.
  std::vector<AppendSpan> m_pruned_spans, m_ring_spans;
  bool m_agrees_often = false;  // after each layer
  // A shape is recorded when it comes a second time: the first time, memory is taken.
  engine::RecordedSteps m_recorded;
  engine::ShapeNumbers m_shape_numbers;
  std::int64_t m_repeated_steps = 0;
  int m_refusals = 0;                   // recordings that failed
  std::optional<StepBatch> m_external;  // of begin_step, until end_step
  int m_next_layer = 0;                 // of m_external
  // Sinks of the current layer of m_external.
  linalg::Vector m_external_sinks;
};

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

}  // namespace kvzap
