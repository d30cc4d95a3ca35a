// One step of the transformer: it runs new tokens through all layers and appends their pairs to the
// cache.
#pragma once

#include <exception>
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
#include <vector>

namespace kvzap {

namespace engine {
class ValueBuffer;
class PagePlacement;
struct HeadTransform;
}  // namespace engine

/// The forward pass of decoders over a ragged cache, for one rank's share of the heads. ModelConfig
/// describes the decoder; the pass does not depend on the family. Every rank must call step with
/// the same arguments.
class Decoder {
 public:
  using Cache = KVCache;

  /// Makes a decoder with an empty cache of this `window` and `page_rows`. `scorer` may be null;
  /// then no step may score. `meter` counts the memory of the cache and may be null. model, scorer
  /// and meter must outlive the decoder.
  Decoder(const Model& model, Scorer* scorer, const Communicator& comm, int window, int page_rows,
          MemoryMeter* meter = nullptr, const PageFormat& format = {});
  ~Decoder();

  /// Runs the batch's tokens through the model, layer by layer, and appends their pairs to the
  /// cache. Returns one result for each span.
  ///
  /// In each layer the tokens of a span attend causally to one another, and to the rows in their
  /// sequence's cache. Then their pairs are appended under the span's rule. If the rule has a
  /// policy, the policy scores the rows; if the policy also chooses, only the rows that stay are
  /// stored. Beside the cache, keys and values of the step's tokens exist for one layer at a time.
  /// Other spans change the result of a span only through the order of sums in products.
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
  engine::PagePlacement& placement() { return *m_placement; }
  const engine::PagePlacement& placement() const { return *m_placement; }
  Cache& cache() { return m_cache; }
  const Cache& cache() const { return m_cache; }
  const Model& model() const { return m_model; }
  /// Returns the sizes from which budgets compute their counts.
  const Budget::Model& counted() const { return m_counted; }
  const Communicator& communicator() const { return m_comm; }
  void set_observer(StepObserver* observer) { m_observer = observer; }
  void set_attention_path(AttentionPath path) { m_attention_path = path; }
  /// Returns the seconds of all steps so far.
  const PruneSeconds& seconds() const { return m_seconds; }
  /// Returns RoPE's inverse frequencies (head_dim / 2): the angle of dimensions (i, i + head_dim/2)
  /// per position. Throws Error if they depend on the length of the text
  /// (ModelConfig::rope_depends_on_length).
  Kokkos::View<const float*, MemorySpace> inverse_frequencies() const;

 private:
  struct Scratch;
  struct Rows;
  struct Policies;
  struct Shared;
  using Activations = Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace>;

  void check(const StepBatch& batch) const;
  void begin(const StepBatch& batch);
  void end_layer(const StepBatch& batch, int layer);
  void end(const StepBatch& batch);
  void cancel();
  void release(bool has_begun);
  const StepBatch& external_batch() const;
  void skip_states();
  void check_layer(const StepBatch& batch, int layer,
                   const std::vector<ExternalLayer>& spans) const;
  void take_sinks(const std::vector<ExternalLayer>& spans);
  Kokkos::View<float*, MemorySpace> sinks_of(int layer) const;
  void external_block(const StepBatch& batch, int layer, const Rows& rows,
                      const std::vector<ExternalLayer>& spans);
  void reserve(const StepBatch& batch);
  void plan(const StepBatch& batch);
  void reserve_layers(const StepBatch& batch);
  void reserve_experts(std::int64_t tokens);
  void reserve_outputs();
  void begin_cache_step(const StepBatch& batch);
  void place_positions(const StepBatch& batch);
  void place_rows(const StepBatch& batch);
  void choose_frequencies(const StepBatch& batch);
  void place_window_angles(std::int64_t count);
  void place_query_scales(const StepBatch& batch);
  void embed();
  Activations enter_layer(int layer, const Rows& rows);
  Rows read_rows(int layer, const Rows& rows) const;
  void map_attended(int layer, const Rows& rows, std::int64_t columns, const Activations& x);
  void attention_block(const StepBatch& batch, int layer, const Rows& rows);
  void show_input(const StepBatch& batch, int layer, const Rows& rows, const Activations& x);
  void score(const StepBatch& batch, int layer, const Rows& rows, const Activations& x);
  void project_heads(const StepBatch& batch, int layer, const Rows& rows, const Activations& x);
  void norm_query_rows(int layer, const Activations& qkv);
  void attend_rows(const StepBatch& batch, int layer, const Rows& rows);
  void delta_net_block(const StepBatch& batch, int layer, const Rows& rows);
  void finish_part(const Activations& y, const Kokkos::View<float*, MemorySpace>& norm);
  void feed_forward_block(int layer, const Rows& rows, bool is_whole);
  Activations use_experts(int layer, const Activations& x);
  void begin_policies(const StepBatch& batch);
  void reserve_scores(const StepBatch::Span& span);
  void show_layer(const StepBatch& batch, int layer);
  void observe(const StepBatch& batch, int layer, const Rows& rows);
  void apply_policies(const StepBatch& batch, int layer);
  void append(const StepBatch& batch, int layer);
  void output_head();
  void gather_logits();

  void plan_shared(const StepBatch& batch, std::int64_t m);
  void reserve_shared(const StepBatch& batch, std::int64_t m);
  bool is_split(std::size_t span, int layer) const;
  template <class Spans>
  void push_split(Spans& spans, const typename Spans::value_type& whole, int layer) const;
  bool is_shared(int layer) const;
  template <class Visit>
  void for_each_record(int layer, int source, int target, const Visit& visit) const;
  void plan_records(int layer);
  int most_remote_heads() const;
  void gather_projections(int layer, const Activations& computed, const Activations& qkv);
  void transform_remote_heads(int layer, const Rows& block, engine::HeadTransform transform);
  void attend_remote_heads(const StepBatch& batch, int layer, const Rows& rows);
  void merge_shared(int layer, std::int64_t m, const Activations& lse);
  std::int64_t attended_columns(int layer) const;
  bool shares_output_weights() const;
  ArrayView gather_output_weights(int layer);

  bool is_pruned(int layer) const { return m_cache.shape().has_pages(layer); }
  void reserve_joined(const StepBatch& batch, std::int64_t kv_heads);
  void list_spans(const StepBatch& batch, int layer, const Rows& rows);
  void list_window_spans(const StepBatch& batch, int layer, const Rows& rows);
  void list_chunk_spans(const StepBatch& batch, int layer, const Rows& rows);
  AttentionExtents attention_extents(const StepBatch& batch, int kv_heads) const;
  ArrayView new_rows(const engine::ValueBuffer& rows, const StepBatch& batch, int layer) const;
  Activations new_scores(const StepBatch& batch, int layer) const;
  bool outputs_lie_together() const;
  template <class Visit>
  static void for_each_span(const StepBatch& batch, const Rows& rows, const Visit& visit);

  template <class Work>
  void or_cancel(const Work& work);
  template <class Work>
  void locally(const Work& work);
  template <class Work>
  void by_policy(const Work& work);
  void agree_on_failure();
  void throw_if(std::int64_t worst);

  const Model& m_model;
  Scorer* m_scorer;
  Communicator m_comm;
  MemoryMeter* m_meter;
  Budget::Model m_counted;
  Cache m_cache;
  Attention m_attention;
  AttentionPath m_attention_path = AttentionPath::automatic;
  StepObserver* m_observer = nullptr;
  std::unique_ptr<Scratch> m_scratch;
  std::unique_ptr<Policies> m_policies;
  std::unique_ptr<engine::PagePlacement> m_placement;
  std::unique_ptr<Shared> m_shared;  // null with one rank
  PruneSeconds m_seconds;
  std::exception_ptr m_failure;  // of this rank, in the current step
};

}  // namespace kvzap
