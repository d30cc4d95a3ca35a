// From a context and questions to answers: which steps run, what each of them prunes.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/communicator.hpp>
#include <kvzap/decoder.hpp>
#include <kvzap/head_partition.hpp>
#include <kvzap/model.hpp>
#include <kvzap/sampler.hpp>
#include <kvzap/scorer.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap {

/// Which pairs are judged.
enum class PruneMode {
  none,     // full cache
  prefill,  // those of the context, once, all but its last `window`
  always    // also those of questions and generated tokens, as they leave the window
};

/// How the context is processed.
enum class PrefillMode {
  dense,  // one step: every token attends to the whole context before it, then pairs are judged
  sparse  // in chunks: a chunk attends to what earlier chunks left in the cache, and to itself
};

/// As the program's option --prune has it.
std::string_view name_of(PruneMode mode);
/// As the program's option --prefill has it.
std::string_view name_of(PrefillMode mode);

/// How the cache of a generator is filled and pruned.
struct CacheOptions {
  PruneMode prune = PruneMode::none;
  PrefillMode prefill = PrefillMode::dense;
  /// Tokens of a chunk in sparse prefill.
  std::int64_t chunk = 2048;
  /// Log score below which a pair is evicted.
  float threshold = 0;
  /// Most recent tokens that are always kept.
  int window = 128;
  /// First positions that are always kept.
  std::int64_t sink = 0;
  /// Hand unused pool memory back to the system after the context and after each answer.
  bool trim = true;
  int page_rows = 64;
  PageOrder order = PageOrder::token_major;
};

/// State of the whole cache, over all ranks. Complete on every rank.
struct CacheReport {
  std::int64_t tokens = 0;                      // seen so far, kept or not
  std::vector<std::vector<std::int64_t>> kept;  // rows, [layer][KV head]
  std::int64_t non_finite_scores = 0;  // judged pairs kept because their score is no number
  // Bytes, summed over ranks.
  std::int64_t full_bytes = 0;       // keys and values, had none been evicted
  std::int64_t live_bytes = 0;       // keys and values of kept rows
  std::int64_t allocated_bytes = 0;  // pages, in use or free, and rings
  std::int64_t returned_bytes = 0;   // handed back to the system so far
  std::int64_t peak_allocated_bytes =
      0;  // most at any time, prefill's dense keys and values included

  /// Evicted pairs / pairs had none been evicted.
  double evict_ratio(int layer) const;
  /// Mean over layers.
  double evict_ratio() const;
};

/// How one question is answered.
struct AnswerOptions {
  std::int64_t max_new_tokens = 128;
  /// Generation ends with one of these, which is part of the answer's tokens.
  std::vector<TokenId> stop_ids;
  /// Positions that may be used at all; generation ends there. 0: no limit.
  std::int64_t max_tokens = 0;
  SamplingOptions sampling;
  /// Called on every rank for each new token.
  std::function<void(TokenId)> on_token;
  /// Called before that with the logits (vocab_size) that the token is drawn from, on rank 0; with
  /// none elsewhere. May be set on some ranks alone. Greedy answers are faster if none has it: then
  /// no step hands out logits.
  std::function<void(const std::vector<float>&)> on_logits;
};

/// Why an answer ends: an id of stop_ids, as many tokens as were asked for, or no position left.
enum class StopReason { stop_id, max_new_tokens, context_full };
/// "stop_id", "max_new_tokens" or "context_full".
std::string_view name_of(StopReason reason);

/// What the model said, why it stopped, and how long that took.
struct Answer {
  std::vector<TokenId> tokens;
  StopReason stop_reason = StopReason::max_new_tokens;
  std::int64_t question_tokens = 0;
  double question_seconds = 0;
  double decode_seconds = 0;  // of the steps after the question's
  CacheReport cache;          // at the end
};

/// A model with a cache: prefill once, then answer any number of questions about the context. All
/// ranks make the same calls in the same order.
class Generator {
 public:
  /// `scorer` (as a rule a Surrogate) is needed unless options.prune is none. Weights and cache are
  /// of type Value. Throws Error if an option is out of range.
  template <class Value>
  static std::unique_ptr<Generator> create(std::shared_ptr<const Model<Value>> model,
                                           std::shared_ptr<Scorer> scorer,
                                           const CacheOptions& options, const Communicator& comm);
  virtual ~Generator() = default;

  /// Runs the context and prunes. With `reusable`, its state is kept so that every answer starts
  /// from it; otherwise only one question may follow. Called once.
  virtual void prefill(const std::vector<TokenId>& context, bool reusable,
                       const ProgressCallback& progress = {}) = 0;
  /// Runs the question (possibly empty: the answer then continues the context) and generates.
  virtual Answer answer(const std::vector<TokenId>& question, const AnswerOptions& options) = 0;

  virtual CacheReport report() = 0;
  /// Writes keys, values and positions of all ranks to one HDF5 file; see snapshot.hpp.
  virtual void write_snapshot(const std::filesystem::path& file, const std::string& model_name) = 0;
  /// Positions of the rows that a head on this rank still has, ascending; for tests and analyses.
  virtual std::vector<std::int64_t> positions(int layer, int head_on_rank) = 0;
  virtual void set_observer(StepObserver* observer) = 0;
  virtual void set_attention_path(AttentionPath path) = 0;
};

}  // namespace kvzap
