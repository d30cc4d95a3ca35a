// From a context and questions to answers: which steps run, what each of them prunes.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/engine.hpp>
#include <kvzap/sampler.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

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
  CacheReport pruned;         // before the first generated token
  CacheReport cache;          // at the end
};

/// One sequence of an engine: prefill once, then answer any number of questions about the context.
/// All ranks make the same calls in the same order.
class Generator {
 public:
  /// Does not communicate.
  explicit Generator(std::unique_ptr<Engine> engine);
  /// With an engine of its own, as Engine::create.
  template <class Value>
  static std::unique_ptr<Generator> create(std::shared_ptr<const Model<Value>> model,
                                           std::shared_ptr<Scorer> scorer,
                                           const CacheOptions& options, const Communicator& comm) {
    return std::make_unique<Generator>(
        Engine::create<Value>(std::move(model), std::move(scorer), options, comm));
  }

  /// Runs the context and prunes. With `reusable`, its state is kept so that every answer starts
  /// from it; otherwise only one question may follow. Called once.
  void prefill(const std::vector<TokenId>& context, bool reusable,
               const ProgressCallback& progress = {});
  /// Runs the question (possibly empty: the answer then continues the context) and generates.
  Answer answer(const std::vector<TokenId>& question, const AnswerOptions& options);

  CacheReport report() { return m_engine->report(m_sequence); }
  void write_snapshot(const std::filesystem::path& file, const std::string& model_name) {
    m_engine->write_snapshot(file, model_name, m_sequence);
  }
  std::vector<std::int64_t> positions(int layer, int head_on_rank) {
    return m_engine->positions(m_sequence, layer, head_on_rank);
  }
  void set_observer(StepObserver* observer) { m_engine->set_observer(observer); }
  void set_attention_path(AttentionPath path) { m_engine->set_attention_path(path); }
  Engine& engine() { return *m_engine; }

 private:
  void trim();

  std::unique_ptr<Engine> m_engine;
  SequenceId m_sequence = -1;  // until prefill
  std::unique_ptr<Engine::Checkpoint> m_checkpoint;
  std::vector<float> m_context_logits;
  int m_answers = 0;
};

}  // namespace kvzap
