// One step of the transformer: new tokens through all layers, their pairs into the cache.
#pragma once

#include <kvzap/attention.hpp>
#include <kvzap/cache.hpp>
#include <kvzap/communicator.hpp>
#include <kvzap/model.hpp>
#include <kvzap/scorer.hpp>
#include <memory>
#include <vector>

namespace kvzap {

/// Sees what passes through a step: training data for surrogates, and tests. Called on every rank.
class StepObserver {
 public:
  using HiddenView = Kokkos::View<const float**, Kokkos::LayoutRight, MemorySpace>;
  using ScoresView = Kokkos::View<const float**, Kokkos::LayoutStride, MemorySpace>;
  virtual ~StepObserver() = default;
  /// hidden (token, hidden_size) enters attention of `layer`; its first row is the token at
  /// position `first`.
  virtual void attention_input(int /*layer*/, std::int64_t /*first*/,
                               const HiddenView& /*hidden*/) {}
  /// scores (head on this rank, token) of the step's tokens, from position `first` on.
  virtual void scores(int /*layer*/, std::int64_t /*first*/, const ScoresView& /*scores*/) {}
};

/// What is to happen to the pairs of a step's tokens and to those they push out of the ring.
struct StepRule {
  /// Score the new pairs with the scorer.
  bool score = false;
  /// Applied, after the step's attention, to every pair that leaves the ring.
  EvictionRule eviction;
};

/// The forward pass of Qwen3, Qwen2, Llama and Mistral decoders over a ragged cache, on one rank's
/// share of the heads. All ranks call step with the same arguments.
template <class Value, PageOrder order>
class Decoder {
 public:
  using Cache = KVCache<Value, order>;

  /// `window` and `page_rows` shape the cache. The scorer may be absent; then no step may score.
  /// model, scorer and meter outlive the decoder.
  Decoder(const Model<Value>& model, Scorer* scorer, const Communicator& comm, int window,
          int page_rows, MemoryMeter* meter = nullptr);
  ~Decoder();

  /// Runs `tokens` (not empty) through the model, layer by layer. In each layer they attend to what
  /// the sequence's cache holds and to one another causally; then their pairs are appended under
  /// `rule`. Beside the cache, keys and values of the step's tokens exist for one layer at a time.
  /// Returns the logits (vocab_size) after the last token on rank 0, nothing elsewhere.
  /// Throws Error for a token id outside the vocabulary.
  std::vector<float> step(SequenceId sequence, const std::vector<TokenId>& tokens,
                          const StepRule& rule, const ProgressCallback& progress = {});

  /// One new token for each of B different sequences, whose contexts may differ in length: the
  /// weights are read once for all of them. Otherwise as step. Returns the logits (B, vocab_size),
  /// row after row, on rank 0.
  std::vector<float> decode(const std::vector<SequenceId>& sequences,
                            const std::vector<TokenId>& tokens, const StepRule& rule);

  /// As step and decode, but returns the argmax next tokens (the smaller id of equal ones), on
  /// every rank, or -1 where a logit is NaN or the largest is not finite. The logits stay where
  /// they are: these tokens are all that a device sends back and that ranks exchange.
  TokenId step_greedy(SequenceId sequence, const std::vector<TokenId>& tokens, const StepRule& rule,
                      const ProgressCallback& progress = {});
  std::vector<TokenId> decode_greedy(const std::vector<SequenceId>& sequences,
                                     const std::vector<TokenId>& tokens, const StepRule& rule);

  Cache& cache() { return m_cache; }
  const Cache& cache() const { return m_cache; }
  const Model<Value>& model() const { return m_model; }
  const Communicator& communicator() const { return m_comm; }
  void set_observer(StepObserver* observer) { m_observer = observer; }
  void set_attention_path(AttentionPath path) { m_attention_path = path; }
  /// Sums over this rank's heads, layers and all steps so far.
  const AppendCounts& counts() const { return m_counts; }
  void set_counts(const AppendCounts& counts) { m_counts = counts; }

 private:
  struct Scratch;

  std::vector<float> forward(const SequenceId* sequences, std::size_t n_sequences,
                             const std::vector<TokenId>& tokens, const StepRule& rule,
                             const ProgressCallback& progress, std::vector<TokenId>* argmax);
  std::vector<float> rows_of_ranks(const std::vector<float>& gathered, std::int64_t outputs) const;

  const Model<Value>& m_model;
  Scorer* m_scorer;
  Communicator m_comm;
  MemoryMeter* m_meter;
  Cache m_cache;
  Attention<Value, order> m_attention;
  AttentionPath m_attention_path = AttentionPath::automatic;
  StepObserver* m_observer = nullptr;
  AppendCounts m_counts;
  std::unique_ptr<Scratch> m_scratch;
};

}  // namespace kvzap
