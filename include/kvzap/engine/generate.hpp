// From a context and questions to answers: which steps run, what each of them prunes.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/sampler.hpp>
#include <memory>
#include <optional>
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
  /// As that of Generator::prefill, in tokens, while the question runs: "question", or "prefill"
  /// where the context runs with it.
  ProgressCallback progress;
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
  double question_seconds = 0;  // 0 if the question was run before (resume_answer)
  double decode_seconds = 0;    // of the steps after the question's, or since it went on
  CacheReport pruned;           // before the first generated token, or before it went on
  CacheReport cache;            // at the end
};

/// One sequence of an engine: prefill once, then answer any number of questions about the context.
/// All ranks make the same calls in the same order.
///
/// Between its steps a generator can be written to a file, and another one, on as many ranks or
/// others, goes on from there: with the rest of the context (prefill_rest), the answer under way
/// (resume_answer) or another question (answer). An exception that a callback of the caller throws
/// on all ranks interrupts it at such a point.
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
  /// from it; otherwise only one question may follow. With PruneMoment::question nothing runs yet:
  /// every answer runs the context together with its question. Called once, or after an error of a
  /// step, which leaves nothing behind.
  ///
  /// `after_chunk` is called where begin_snapshot may be: after each step of the context (of the
  /// last one only where the policy then has the model repeat the context), and at its end. If it
  /// throws, the context stays as far as it is, and prefill_rest goes on.
  ///
  /// Throws AgreedError if the logits at the context's end are not finite (with `after_chunk` also
  /// at that of any chunk): weights or activations overflow, and so do the cache's rows.
  void prefill(const std::vector<TokenId>& context, bool reusable,
               const ProgressCallback& progress = {},
               const std::function<void()>& after_chunk = {});
  /// Runs what is left of the context, if anything is.
  void prefill_rest(const ProgressCallback& progress = {},
                    const std::function<void()>& after_chunk = {});
  /// Adds to the context, for prefill_rest: a chunk of sparse prefill, or several, that begin where
  /// the context has ended so far. An answer under way is given up. Throws Error, and changes
  /// nothing, as Engine::check_more_context does, if the state of the context is no more, or for no
  /// tokens.
  void append_context(const std::vector<TokenId>& more);
  /// Runs the question (possibly empty: the answer then continues the context) and generates.
  /// Throws Error if the context is not all run, or if there was a question before and nothing has
  /// kept the state of the context.
  Answer answer(const std::vector<TokenId>& question, const AnswerOptions& options);
  /// Goes on with the answer under way, or with one that has ended if `options` allow for more. The
  /// answer has all of its tokens; on_token and on_logits get new ones alone. Random numbers go on
  /// where they were if options.sampling has the same seed, else they begin anew. Throws Error if
  /// there is none.
  Answer resume_answer(const AnswerOptions& options);
  /// The question and its answer become a part of the context, with `more` (at least one token, as
  /// what the chat template has between an answer and the next message) behind them: the next
  /// answer starts from there, and nothing goes back to the state before. Runs `more`, and before
  /// it the answer's last token, which has not been run so far, unless it is left out (a stop id
  /// that the template has not). These are judged as a question is. May follow an answer that was
  /// interrupted. Throws Error, and changes nothing, without an answer, for no tokens, and with
  /// PruneMoment::question, which runs all anew with each question.
  void keep_answer(const std::vector<TokenId>& more, bool with_last_token = true);
  /// Gives up everything that has been run: as before prefill.
  void reset();

  /// Begins to write the sequence, as it is, to a file; see Engine::begin_snapshot. May be called
  /// from after_chunk, AnswerOptions::on_token, and between the functions above. Fills info's
  /// token_ids, context_tokens, logits, and its own names in `state` and `further`. With answers
  /// that start from one context, the state of the context is written too; where it is not a part
  /// of the sequence (decode_every), in place of the sequence, and the answer under way is to be
  /// asked for again. Throws Error before prefill, and after a step that has failed halfway.
  std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                  SnapshotInfo info,
                                                  const SnapshotOptions& options);
  /// The same, and waits for it; see Engine::write_snapshot.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file, SnapshotInfo info,
                                          const SnapshotOptions& options);
  /// The same with nothing but the model's name.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file,
                                          const std::string& model_name);
  /// Goes on from a file, in place of prefill, and of whatever was run before, which stays if this
  /// fails. `reusable` is as there, where the file has the state of the context or is to have it.
  /// Collective. Throws what Engine::resume throws, and AgreedError if the file is not one of
  /// begin_snapshot.
  void resume(const SnapshotReader& reader, bool reusable);

  /// The context, whole, and how many of its tokens have been run. (With PruneMoment::question it
  /// runs with each question, and counts as run.)
  const std::vector<TokenId>& context() const { return m_context; }
  std::int64_t context_run() const { return m_context_run; }
  /// Whether prefill_rest has nothing to do.
  bool is_context_done() const { return m_phase != Phase::empty && m_phase != Phase::context; }
  /// Whether an answer has begun and not come to its end.
  bool is_answering() const { return m_phase == Phase::answering && !m_has_ended; }
  /// Question and tokens of the answer under way, or of the last one.
  const std::vector<TokenId>& question() const { return m_question; }
  const std::vector<TokenId>& answered() const { return m_answered; }

  /// Empty as long as no sequence has been run.
  CacheReport report() { return m_sequence >= 0 ? m_engine->report(m_sequence) : CacheReport(); }
  std::vector<std::int64_t> positions(int layer, int head_on_rank) {
    return m_engine->positions(m_sequence, layer, head_on_rank);
  }
  /// As Engine::scores.
  std::vector<std::vector<float>> scores(int layer) { return m_engine->scores(m_sequence, layer); }
  void set_observer(StepObserver* observer) { m_engine->set_observer(observer); }
  void set_attention_path(AttentionPath path) { m_engine->set_attention_path(path); }
  Engine& engine() { return *m_engine; }
  /// The sequence of the last answer, or of the context.
  SequenceId sequence() const { return m_sequence; }

 private:
  /// What has been run. In a file: its number.
  enum class Phase : int {
    empty = 0,
    context = 1,  // some of the context
    ready = 2,    // the context
    answering = 3
  };
  struct SnapshotParts;

  void trim();
  void forget();
  bool runs_whole() const;
  void run_context(const ProgressCallback& progress, const std::function<void()>& after_chunk);
  void check_finite(const std::vector<float>& logits) const;
  void keep_context();
  void check_whole() const;
  void check_context_is_kept() const;
  void begin_answer();
  Answer generate(const AnswerOptions& options, bool resumes);
  std::vector<StepResult> run_whole(const std::vector<TokenId>& question, StepOutput output,
                                    const ProgressCallback& progress);
  SnapshotParts snapshot_parts(SnapshotInfo info);
  template <class Write>
  auto with_parts(SnapshotInfo info, const Write& write);

  std::unique_ptr<Engine> m_engine;
  Phase m_phase = Phase::empty;
  bool m_is_reusable = false;
  SequenceId m_sequence = -1;  // until prefill
  SequenceId m_pristine = -1;  // the context's, of which every answer is a fork
  std::vector<TokenId> m_context;
  std::int64_t m_context_run = 0;
  std::unique_ptr<Engine::Checkpoint> m_checkpoint;
  std::vector<float> m_context_logits;
  // Of the sequence when what stands here was last all true; a step that fails halfway leaves more.
  std::int64_t m_tokens = 0;
  std::vector<TokenId> m_question;
  std::vector<TokenId> m_answered;
  bool m_has_ended = false;  // the answer
  std::optional<Sampler> m_sampler;
  std::uint64_t m_seed = 0;  // that it began with
};

}  // namespace kvzap
