// How a generator takes the tokens of an answer, and steps that check drafts.
#include <kvzap/engine/generate.hpp>
#include <utility>

#include "engine/throw_not_finite.hpp"

namespace kvzap {

using engine::throw_not_finite;

// Appends a token to the answer. Rank 0 may know that the answer ends with it.
void Generator::take(TokenId token, const AnswerOptions& options) {
  m_answer->append(token);
  if (m_ends_by_text) {
    const Communicator& comm = m_engine->communicator();
    bool ends = m_answer->is_complete() ||
                (options.ends_after && comm.is_root() && options.ends_after(token));
    comm.broadcast(&ends, sizeof(ends), 0);
    m_answer->set_complete(ends);
  }
  if (options.on_token) options.on_token(token);
}

// Takes back the tokens of a draft that the answer does not have.
void Generator::take_back_draft() {
  if (!std::exchange(m_has_draft, false)) return;
  m_engine->take_back(m_sequence, m_engine->tokens(m_sequence) - m_tokens);
}

// Runs the answer's last token and a draft of those that follow, and draws tokens up to the first
// that is not the draft's. Returns false if there is no memory for the draft.
bool Generator::run_draft(const std::vector<TokenId>& draft, const AnswerOptions& options,
                          StepOutput after_each) {
  Continuation& said = *m_answer;
  std::vector<TokenId> tokens = {said.tokens().back()};
  tokens.insert(tokens.end(), draft.begin(), draft.end());
  const StepBatch batch(m_sequence, tokens, m_engine->rule(StepPart::draft), after_each,
                        said.draws(after_each, tokens.size()));
  StepResult result;
  try {
    result = std::move(m_engine->step(batch).front());
  } catch (const StepOutOfMemory&) {
    return false;
  }
  m_has_draft = true;
  std::int64_t accepted = 0;
  try {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const StepResult own = result.after(i, tokens.size());
      const TokenId token =
          after_each == StepOutput::all_logits ? draw(own, options) : said.draw(own);
      if (token < 0) throw_not_finite();
      const bool is_accepted = i < draft.size() && token == draft[i];
      accepted += is_accepted ? 1 : 0;
      ++m_tokens;
      take(token, options);
      // A snapshot within on_token has taken back the rest of the draft.
      if (!is_accepted || !m_has_draft || said.end(m_tokens)) break;
    }
  } catch (...) {
    take_back_draft();
    throw;
  }
  said.judge_draft(accepted);
  take_back_draft();
  return true;
}

}  // namespace kvzap
