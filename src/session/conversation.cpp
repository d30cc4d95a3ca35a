#include "session/conversation.hpp"

#include <algorithm>
#include <utility>

#include "base/stopwatch.hpp"
#include "session/recorded.hpp"

namespace kvzap::session {

Conversation::Conversation(Generator& generator, Texts texts, ConversationState state)
    : m_generator(generator), m_texts(texts), m_state(std::move(state)) {}

void Conversation::add_question(const std::string& text, const std::vector<TokenId>& ids) {
  m_state.texts.push_back(text);
  m_state.questions.push_back(ids);
}

void Conversation::forget_last() {
  if (!has_open_question()) m_state.answers.pop_back();
  m_state.texts.pop_back();
  m_state.questions.pop_back();
}

void Conversation::forget_questions() {
  m_state.texts.clear();
  m_state.questions.clear();
  m_state.answers.clear();
  m_unfinished.reset();
  m_goes_on = false;
}

int Conversation::answer(AnswerOptions options, AnswerText::Sink on_text,
                         std::vector<std::string> stops) {
  const std::size_t number = m_state.answers.size();
  const std::vector<TokenId>& ids = m_state.questions.at(number);
  AnsweredQuestion drawn;
  drawn.question = m_state.texts.at(number);
  m_unfinished.reset();
  const bool has_stops = !stops.empty();
  AnswerText text(m_texts.tokenizer, m_texts.shows_ids, std::move(on_text), std::move(stops));
  if (has_stops) {
    options.ends_after = [&](TokenId token) {
      text.append(token);
      return text.has_stopped();
    };
  }
  const bool waits =
      m_generator.engine().options().pruning.moment == PruneMoment::question && !m_state.context;
  options.on_token = [&, rest = std::move(options.on_token)](TokenId token) {
    if (!has_stops) text.append(token);
    // At the first token, because a resumed conversation cannot compute it again.
    if (waits && !m_state.context) note_context(m_generator.report());
    if (rest) rest(token);
  };
  const auto start = base::Clock::now();
  int stopped = 0;
  try {
    if (goes_on()) {
      for (const TokenId token : m_generator.answered()) text.append(token);
      drawn.answer = m_generator.resume_answer(options);
    } else {
      drawn.answer = m_generator.answer(ids, options);
    }
  } catch (const Stopped& stop) {
    stopped = stop.reason;
    drawn.is_interrupted = true;
    drawn.answer.tokens = m_generator.answered();
    drawn.answer.question_tokens = static_cast<std::int64_t>(ids.size());
    drawn.answer.decode_seconds = base::seconds_since(start);
    drawn.answer.cache = m_generator.report();
  }
  m_goes_on = false;
  text.finish();
  drawn.text = text.text();
  if (drawn.is_interrupted) {
    m_unfinished = std::move(drawn);
    return stopped;
  }
  if (waits && !m_state.context) note_context(drawn.answer.pruned);
  m_state.answers.push_back(std::move(drawn));
  return 0;
}

void Conversation::keep_unfinished() {
  m_state.answers.push_back(std::move(m_unfinished).value());
  m_unfinished.reset();
}

void Conversation::resume(const SnapshotReader& reader, ConversationState state, bool reusable) {
  m_generator.resume(reader, reusable);
  m_state = std::move(state);
  m_unfinished.reset();
  m_goes_on = has_open_question();
}

void Conversation::end_open_question() {
  m_goes_on = false;
  const std::size_t count = m_state.answers.size();
  const std::string text = count < m_state.texts.size() ? m_state.texts[count] : "";
  m_state.texts.resize(std::min(count, m_state.texts.size()));
  m_state.questions.resize(m_state.texts.size());
  if (!m_generator.is_answering()) return;
  AnsweredQuestion& ended = m_unfinished.emplace();
  ended.question = text;
  ended.is_from_snapshot = true;
  ended.is_interrupted = true;
  ended.answer.tokens = m_generator.answered();
  ended.answer.cache = m_generator.report();
  ended.answer.question_tokens = static_cast<std::int64_t>(m_generator.question().size());
  if (m_texts.tokenizer) ended.text = m_texts.tokenizer->decode(ended.answer.tokens);
  add_question(text, m_generator.question());
  keep_unfinished();
}

void Conversation::describe(SnapshotInfo info, const std::string& policy, const ModelHashes& hashes,
                            const Pruning& pruning, const PruningNames& names) {
  m_state.policy = policy;
  set_hashes(info, m_state, hashes, pruning, names);
  m_info = std::move(info);
}

SnapshotInfo Conversation::info() const {
  SnapshotInfo info = m_info;
  ConversationState state = m_state;
  // An answer without tokens (of at most 0) has not begun: a resumed conversation may draw it.
  while (!state.answers.empty() && state.answers.back().answer.tokens.empty()) {
    state.answers.pop_back();
  }
  info.run_state = to_json_text(state);
  return info;
}

}  // namespace kvzap::session
