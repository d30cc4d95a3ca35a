// A context, questions about it and their answers, over one generator: what `kvzap run`, `kvzap
// chat` and Session have in common.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "session/answer_text.hpp"
#include "session/conversation_state.hpp"
#include "session/model_files.hpp"

namespace kvzap::session {

/// Thrown on every rank by AnswerOptions::on_token: the answer ends there.
struct Stopped {
  int reason = 0;  // not 0, such as a signal's number; `answer` returns it
};

/// All ranks make the same calls in the same order. Rank 0 alone has the texts of answers and what
/// `describe` sets.
class Conversation {
 public:
  /// The form of answers' texts on this rank.
  struct Texts {
    const Tokenizer* tokenizer = nullptr;  // null: no text, or the ids
    bool shows_ids = false;
  };

  /// `state`: questions and finished answers so far. `generator` outlives this object.
  Conversation(Generator& generator, Texts texts, ConversationState state);

  Generator& generator() const { return m_generator; }
  const ConversationState& state() const { return m_state; }
  const std::vector<AnsweredQuestion>& answers() const { return m_state.answers; }
  /// Returns whether a question has no finished answer.
  bool has_open_question() const { return m_state.answers.size() < m_state.questions.size(); }
  /// The answer that Stopped has ended; absent after another answer.
  const std::optional<AnsweredQuestion>& unfinished() const { return m_unfinished; }

  /// Sets the context's cache, for snapshots.
  void note_context(CacheReport report) { m_state.context = std::move(report); }
  void forget_context() { m_state.context.reset(); }

  /// Adds a question of these ids. The next `answer` is about the first question without one.
  void add_question(const std::string& text, const std::vector<TokenId>& ids);
  /// Takes the last question back, with its answer if it has one.
  void forget_last();
  void forget_questions();
  /// Draws the next answer. `on_text` receives its text in pieces: those of a token before on_token
  /// is called for it, and at the end a character that stayed incomplete. Notes the context if it
  /// is pruned with the question. Returns 0, or the reason of Stopped. Any other exception leaves
  /// the question open. The answer ends before the first text of `stops`; its tokens include that.
  int answer(AnswerOptions options, AnswerText::Sink on_text, std::vector<std::string> stops = {});
  /// Adds the unfinished answer to the finished ones.
  void keep_unfinished();

  /// Replaces everything by the conversation of a snapshot; see Generator::resume. The next
  /// `answer` continues an unfinished answer, unless other questions replace its question.
  void resume(const SnapshotReader& reader, ConversationState state, bool reusable);
  /// Returns whether the next `answer` continues an unfinished one.
  bool goes_on() const { return m_goes_on && m_generator.is_answering(); }
  /// Ends the questions without an answer. An answer that had begun is kept as interrupted.
  void end_open_question();

  /// Sets what snapshots say about model and pruning: `info` and hashes, see set_hashes. On rank 0.
  void describe(SnapshotInfo info, const std::string& policy, const ModelHashes& hashes,
                const Pruning& pruning, const PruningNames& names = plain_names());
  /// Returns the attributes of a snapshot that is written now. On rank 0.
  SnapshotInfo info() const;
  /// Returns the same without questions and answers. On rank 0.
  const SnapshotInfo& description() const { return m_info; }

 private:
  Generator& m_generator;
  Texts m_texts;
  ConversationState m_state;
  std::optional<AnsweredQuestion> m_unfinished;
  bool m_goes_on = false;  // the generator's answer is that of the open question
  SnapshotInfo m_info;
};

}  // namespace kvzap::session
