#include "http/exchange.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvzap::driver {

Exchange::Exchange(const server::ApiRequest& request, const server::ServedModel& model,
                   std::function<void()> wake)
    : m_stop_ids(request.generations.front().stop_ids),
      m_lists_ends(request.generations.front().prompt_logprobs),
      m_reports_progress(request.reports_progress),
      m_open(request.answers()),
      m_texts(static_cast<std::size_t>(request.answers())),
      m_wake(std::move(wake)) {
  if (!model.tokenizer) return;
  for (auto& text : m_texts) text.emplace(*model.tokenizer, request);
}

void Exchange::on_progress(int choice, const server::PromptProgress& progress) {
  if (!m_reports_progress) return;
  Event event;
  event.choice = choice;
  event.progress = progress;
  std::unique_lock<std::mutex> lock(m_mutex);
  // A client that reads slowly gets the newest alone.
  const auto older = std::find_if(m_events.begin(), m_events.end(), [&](const Event& other) {
    return other.choice == choice && other.progress;
  });
  if (older == m_events.end()) {
    m_events.push_back(std::move(event));
  } else {
    *older = std::move(event);
  }
  wake(std::move(lock));
}

bool Exchange::on_token(int choice, TokenId token, const server::TokenLogprobs* logprobs) {
  if (std::find(m_stop_ids.begin(), m_stop_ids.end(), token) != m_stop_ids.end()) {
    if (m_lists_ends && logprobs) {
      Event event;
      event.choice = choice;
      event.tokens.push_back({token, logprobs->logprob, logprobs->top});
      add(std::move(event));
    }
    return true;
  }
  auto& text = m_texts[static_cast<std::size_t>(choice)];
  Event event;
  event.choice = choice;
  event.text = text ? text->append(token) : std::to_string(token) + " ";
  if (logprobs) event.tokens.push_back({token, logprobs->logprob, logprobs->top});
  const bool goes_on = !text || !text->has_stopped();
  if (!event.text.empty() || !event.tokens.empty()) add(std::move(event));
  return goes_on;
}

void Exchange::on_prompt(int choice, const std::vector<TokenId>& tokens,
                         const std::vector<std::optional<server::TokenLogprobs>>& logprobs) {
  Event event;
  event.choice = choice;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    constexpr float none = std::numeric_limits<float>::quiet_NaN();
    const auto& of = logprobs[i];
    event.tokens.push_back({tokens[i], of ? of->logprob : none,
                            of ? of->top : std::vector<std::pair<TokenId, float>>()});
  }
  add(std::move(event));
}

void Exchange::on_embedding(int choice, std::vector<float> vector) {
  Event event;
  event.choice = choice;
  event.embedding = std::move(vector);
  add(std::move(event));
}

void Exchange::on_end(int choice, const server::Ending& ending) {
  auto& text = m_texts[static_cast<std::size_t>(choice)];
  Event event;
  event.choice = choice;
  if (text) event.text = text->finish();
  event.ending = ending;
  if (text) event.ending->stop = text->found();
  add(std::move(event));
}

void Exchange::on_error(const server::RequestError& error) {
  std::unique_lock<std::mutex> lock(m_mutex);
  m_error = error;
  wake(std::move(lock));
}

std::vector<Exchange::Event> Exchange::take() {
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_has_woken = false;
  std::vector<Event> events;
  events.swap(m_events);
  for (const Event& event : events) m_open -= event.ending ? 1 : 0;
  return events;
}

std::optional<server::RequestError> Exchange::error() const {
  const std::lock_guard<std::mutex> lock(m_mutex);
  return m_error;
}

void Exchange::add(Event event) {
  std::unique_lock<std::mutex> lock(m_mutex);
  m_events.push_back(std::move(event));
  wake(std::move(lock));
}

void Exchange::wake(std::unique_lock<std::mutex> lock) {
  const bool is_first = !std::exchange(m_has_woken, true);
  lock.unlock();
  if (is_first) m_wake();
}

}  // namespace kvzap::driver
