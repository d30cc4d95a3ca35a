// Carries the answers to one request, to all its prompts, from the scheduler's thread to the thread
// of connections.
#pragma once

#include <functional>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/request.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap::driver {

/// Turns tokens into text on the scheduler's thread, and queues the text for the connection.
class Exchange {
 public:
  /// New text or the end of one answer, or the progress of its prompt.
  struct Event {
    int choice = 0;
    std::string text;
    std::vector<server::TokenText> tokens;
    std::optional<server::Ending> ending;
    std::optional<server::PromptProgress> progress;
    std::vector<float> embedding = {};
  };

  /// `wake`: called on the scheduler's thread when there is something to take, once until `take`.
  Exchange(const server::ApiRequest& request, const server::ServedModel& model,
           std::function<void()> wake);

  /// As of a listener; `choice` is the number of an answer among those to all prompts.
  void on_progress(int choice, const server::PromptProgress& progress);
  bool on_token(int choice, TokenId token, const server::TokenLogprobs* logprobs);
  void on_prompt(int choice, const std::vector<TokenId>& tokens,
                 const std::vector<std::optional<server::TokenLogprobs>>& logprobs);
  void on_embedding(int choice, std::vector<float> vector);
  void on_end(int choice, const server::Ending& ending);
  void on_error(const server::RequestError& error);

  /// Takes the events since the last call.
  std::vector<Event> take();
  /// Whether all events were taken.
  bool is_done() const { return m_open == 0; }
  std::optional<server::RequestError> error() const;

 private:
  void add(Event event);
  void wake(std::unique_lock<std::mutex> lock);

  std::vector<TokenId> m_stop_ids;
  bool m_lists_ends;  // tokens that end answers have log probabilities
  bool m_reports_progress;
  int m_open;
  std::vector<std::optional<server::AnswerText>> m_texts;  // of the scheduler's thread
  mutable std::mutex m_mutex;
  std::function<void()> m_wake;
  bool m_has_woken = false;
  std::vector<Event> m_events;
  std::optional<server::RequestError> m_error;
};

/// Passes the answers to one prompt on to the exchange of its request.
class PromptListener final : public server::Listener {
 public:
  /// `first`: the number that answer 0 to the prompt has among all answers to the request.
  /// `choices`: the answers to the prompt.
  PromptListener(std::shared_ptr<Exchange> exchange, int first, int choices)
      : m_exchange(std::move(exchange)), m_first(first), m_choices(choices) {}

  void on_progress(int choice, const server::PromptProgress& progress) override {
    m_exchange->on_progress(m_first + choice, progress);
  }
  bool on_token(int choice, TokenId token, const server::TokenLogprobs* logprobs) override {
    return m_exchange->on_token(m_first + choice, token, logprobs);
  }
  void on_prompt(const std::vector<TokenId>& tokens,
                 const std::vector<std::optional<server::TokenLogprobs>>& logprobs) override {
    for (int choice = 0; choice < m_choices; ++choice) {
      m_exchange->on_prompt(m_first + choice, tokens, logprobs);
    }
  }
  void on_embedding(std::vector<float> vector) override {
    m_exchange->on_embedding(m_first, std::move(vector));
  }
  void on_end(int choice, const server::Ending& ending) override {
    m_exchange->on_end(m_first + choice, ending);
  }
  void on_error(const server::RequestError& error) override { m_exchange->on_error(error); }

 private:
  std::shared_ptr<Exchange> m_exchange;
  int m_first, m_choices;
};

}  // namespace kvzap::driver
