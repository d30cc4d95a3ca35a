// Answers from a context and questions: the steps that run, and the pruning of each.
#pragma once

#include <deque>
#include <filesystem>
#include <functional>
#include <kvzap/engine/continuation.hpp>
#include <kvzap/engine/engine.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap {

/// How one question is answered.
struct AnswerOptions : StopRules {
  /// A grammar counts on rank 0; other ranks may omit it.
  SamplingOptions sampling;
  /// Called on rank 0 with each new token, before on_token. Returns whether the answer ends with
  /// it. Null: it does not. It may be set on rank 0 alone.
  std::function<bool(TokenId)> ends_after;
  /// Called on every rank for each new token.
  std::function<void(TokenId)> on_token;
  /// Called while the question runs, with "question" (or "prefill" if the context runs with it) and
  /// tokens, as in Generator::prefill.
  ProgressCallback progress;
  /// Called before on_token with the logits (vocab_size) from which the token is drawn on rank 0,
  /// and with an empty vector elsewhere. It may be set on some ranks only. Greedy answers are
  /// faster without it, because no step then returns logits.
  std::function<void(const std::vector<float>&)> on_logits;
  /// The most tokens that a step checks at once: prompt lookup decoding (PromptLookup). 0: each
  /// step runs one token. The answer is the same, up to the order of sums in products. Nothing is
  /// drafted where Engine::why_no_drafts gives a reason.
  std::int64_t lookup = 0;
};

/// The tokens of an answer, the reason for its end, and its times.
struct Answer {
  std::vector<TokenId> tokens;
  StopReason stop_reason = StopReason::max_new_tokens;
  std::int64_t question_tokens = 0;
  double question_seconds = 0;  // 0 if the question ran before (resume_answer)
  double decode_seconds = 0;    // of the steps after the question, or after the answer resumed
  CacheReport pruned;           // before the first generated token, or before it resumed
  CacheReport cache;            // at the end
  DraftCounts drafts;           // of AnswerOptions::lookup, since the answer began or resumed
};

/// One sequence of an engine: prefill once, then answer any number of questions about the context.
/// All ranks make the same calls in the same order.
///
/// Between its steps a generator can be written to a file. Another generator, on any number of
/// ranks, continues from the file: with the rest of the context (prefill_rest), the current answer
/// (resume_answer) or another question (answer). A callback of the caller interrupts a generator at
/// such a point if it throws an exception on all ranks.
class Generator {
 public:
  /// Does not communicate.
  explicit Generator(std::unique_ptr<Engine> engine);
  /// Makes a generator with an engine of its own. Parameters and errors are those of
  /// Engine::create.
  static std::unique_ptr<Generator> create(std::shared_ptr<const Model> model,
                                           std::shared_ptr<Scorer> scorer,
                                           const CacheOptions& options, const Communicator& comm) {
    return std::make_unique<Generator>(
        Engine::create(std::move(model), std::move(scorer), options, comm));
  }

  /// Runs the context and prunes it. With `reusable` the generator keeps the context's state, and
  /// every answer starts from it; otherwise only one question may follow. With
  /// PruneMoment::question nothing runs yet: every answer runs the context together with its
  /// question. Call it once, or again after an error of a step, which leaves no sequence.
  ///
  /// `after_chunk` is called at each point that allows begin_snapshot: after each step of the
  /// context and at its end. After the last step it is called only if the policy then has the model
  /// repeat the context. If it throws, the context keeps the tokens that have run, and prefill_rest
  /// continues.
  ///
  /// Throws AgreedError if the logits at the end of the context are not finite; with `after_chunk`
  /// also at the end of any chunk. In this case weights or activations overflow, and so do rows of
  /// the cache.
  void prefill(const std::vector<TokenId>& context, bool reusable,
               const ProgressCallback& progress = {},
               const std::function<void()>& after_chunk = {});
  /// Runs the rest of the context, if there is one.
  void prefill_rest(const ProgressCallback& progress = {},
                    const std::function<void()>& after_chunk = {});
  /// Appends tokens to the context for prefill_rest, as one or more chunks of sparse prefill.
  /// Discards the current answer. Throws Error and changes nothing if Engine::check_more_context
  /// throws, if the state of the context was discarded, or if there are no tokens.
  void append_context(const std::vector<TokenId>& more);
  /// Runs the question and generates. With an empty question the answer continues the context.
  /// Throws Error if the context has not run completely, and for a second question without a kept
  /// state of the context.
  Answer answer(const std::vector<TokenId>& question, const AnswerOptions& options);
  /// Continues the current answer, or an ended one if `options` allow more tokens. The result has
  /// all tokens of the answer; on_token and on_logits receive only new ones. With the same seed in
  /// options.sampling the random numbers continue; otherwise they start again. Throws Error without
  /// an answer.
  Answer resume_answer(const AnswerOptions& options);
  /// Makes the question and its answer part of the context, followed by `more`: at least one token,
  /// such as the chat template's text between an answer and the next message. The next answer
  /// starts from there; the earlier state is discarded.
  ///
  /// Runs the answer's last token, which has not run yet, and `more`, and judges them as a
  /// question. `with_last_token` = false omits the last token (a stop id that the template does not
  /// have). May follow an interrupted answer. Throws Error and changes nothing without an answer,
  /// without tokens, and with PruneMoment::question, which runs the whole context with each
  /// question.
  void keep_answer(const std::vector<TokenId>& more, bool with_last_token = true);
  /// Keeps the state at the end of the context for `go_back`, beside the states of earlier calls,
  /// and discards the oldest until `most` are left. A state is a copy of the rings, and of
  /// recurrent states of the model. With decode_every it also keeps the pages that later cuts
  /// change. With several ranks, rows of a sequence with such a state stay on the ranks where they
  /// are. Collective. Throws Error unless the context has run and no answer has begun, and with
  /// PruneMoment::question; throws AgreedOutOfMemory.
  void keep_state(std::size_t most = 1);
  /// Returns to the newest state of keep_state and discards it, whatever has run since: answers,
  /// keep_answer, or a step that failed. Throws Error without one.
  void go_back();
  /// The number of states to which the generator can go back. `resume` and `reset` discard all.
  std::size_t kept_states() const { return m_kept.size(); }
  /// Discards everything that has run. The state is that before prefill.
  void reset();

  /// Begins to write the sequence to a file; see Engine::begin_snapshot. Call it from after_chunk,
  /// from AnswerOptions::on_token, or between the functions above. Sets token_ids, context_tokens
  /// and logits of `info`, and its own names in `state` and `further`. If answers start from one
  /// context, the file has the state of the context, too. With decode_every that state is not a
  /// part of the sequence. The file then has it instead of the sequence, and the current answer
  /// must be requested again. Throws Error before prefill, and after a step that failed halfway.
  std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                  SnapshotInfo info,
                                                  const SnapshotOptions& options);
  /// Writes the sequence and returns when the file is complete; see Engine::write_snapshot.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file, SnapshotInfo info,
                                          const SnapshotOptions& options);
  /// Does the same for callers that know only the model's name.
  std::vector<std::string> write_snapshot(const std::filesystem::path& file,
                                          const std::string& model_name);
  /// Continues from a file instead of a prefill. Replaces everything that ran before, which stays
  /// if this fails. `reusable`: as in `prefill`, for a file that has, or will have, the state of
  /// the context. Collective. Throws the errors of Engine::resume, and AgreedError for a file that
  /// begin_snapshot did not write.
  void resume(const SnapshotReader& reader, bool reusable);

  /// The whole context, and the number of its tokens that have run. (With PruneMoment::question it
  /// runs with each question and counts as run.)
  const std::vector<TokenId>& context() const { return m_context; }
  std::int64_t context_run() const { return m_context_run; }
  /// Whether the whole context has run.
  bool is_context_done() const { return m_phase != Phase::empty && m_phase != Phase::context; }
  /// Whether an answer has begun and not ended.
  bool is_answering() const { return m_phase == Phase::answering && !m_has_ended; }
  /// Whether the answer's last token ends it, also before that is noted: within on_token.
  bool is_answer_complete() const;
  /// Question and tokens of the current answer, or of the last one.
  const std::vector<TokenId>& question() const { return m_question; }
  const std::vector<TokenId>& answered() const;

  /// Returns an empty report until a sequence has run.
  CacheReport report() { return m_sequence >= 0 ? m_engine->report(m_sequence) : CacheReport(); }
  std::vector<std::int64_t> positions(int layer, int head_on_rank) {
    return m_engine->positions(m_sequence, layer, head_on_rank);
  }
  /// Does the same as Engine::scores.
  std::vector<std::vector<float>> scores(int layer) { return m_engine->scores(m_sequence, layer); }
  /// Does the same as Engine::scores_of_rank.
  std::vector<float> scores_of_rank(int layer) {
    return m_engine->scores_of_rank(m_sequence, layer);
  }
  /// Does the same as Engine::gather_pages.
  void gather_pages() {
    if (m_sequence >= 0) m_engine->gather_pages(m_sequence);
  }
  void set_observer(StepObserver* observer) { m_engine->set_observer(observer); }
  void set_attention_path(AttentionPath path) { m_engine->set_attention_path(path); }
  Engine& engine() { return *m_engine; }
  /// The sequence of the last answer, or of the context.
  SequenceId sequence() const { return m_sequence; }

 private:
  /// The part that has run. Files store its number.
  enum class Phase : int {
    empty = 0,
    context = 1,  // some of the context
    ready = 2,    // the context
    answering = 3
  };
  struct SnapshotParts;
  /// A state of keep_state.
  struct KeptState {
    std::unique_ptr<Engine::Checkpoint> checkpoint;  // of the sequence, or absent
    SequenceId fork = -1;                            // of the sequence, or -1
    std::size_t context = 0;                         // its tokens
    std::vector<float> logits;
  };

  void discard_oldest_state();
  void trim();
  void forget();
  bool runs_whole() const;
  void run_context(const ProgressCallback& progress, const std::function<void()>& after_chunk);
  void check_finite(const std::vector<float>& logits) const;
  void keep_context();
  void check_whole() const;
  void check_context_is_kept() const;
  void begin_answer();
  void forget_answer();
  TokenId draw(const StepResult& result, const AnswerOptions& options);
  void take(TokenId token, const AnswerOptions& options);
  bool run_draft(const std::vector<TokenId>& draft, const AnswerOptions& options,
                 StepOutput after_each);
  void take_back_draft();
  Answer generate(const AnswerOptions& options, const std::vector<TokenId>& earlier);
  std::vector<StepResult> run_whole(const std::vector<TokenId>& question, StepOutput output,
                                    const ProgressCallback& progress);
  SnapshotParts snapshot_parts(SnapshotInfo info);
  template <class Write>
  auto with_parts(SnapshotInfo info, const Write& write);

  std::unique_ptr<Engine> m_engine;
  Phase m_phase = Phase::empty;
  bool m_is_reusable = false;
  SequenceId m_sequence = -1;  // until prefill
  SequenceId m_pristine = -1;  // the sequence of the context; every answer is a fork of it
  std::vector<TokenId> m_context;
  std::int64_t m_context_run = 0;
  std::unique_ptr<Engine::Checkpoint> m_checkpoint;
  std::vector<float> m_context_logits;
  std::deque<KeptState> m_kept;
  // Describes the sequence as of its last completed step. A step that fails halfway leaves more
  // tokens.
  std::int64_t m_tokens = 0;
  bool m_has_draft = false;  // whether the sequence may have tokens of a draft beyond these
  std::vector<TokenId> m_question;
  std::optional<Continuation> m_answer;  // if one has begun
  bool m_has_ended = false;              // whether the answer has ended
  bool m_ends_by_text = false;           // rank 0 decides after each token
  std::uint64_t m_seed = 0;              // the seed with which the answer began
};

}  // namespace kvzap
