#include "http/answering.hpp"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <iterator>
#include <utility>

namespace kvzap::driver {
namespace {

using base::seconds_since;

// Between comments in a silent stream, so that proxies keep it open.
constexpr auto sign_every = std::chrono::seconds(15);

}  // namespace

Answering::Answering(server::ApiRequest request, const server::ServedModel& model,
                     Executor executor, const std::atomic<bool>& drains, Log log)
    : m_request(std::move(request)),
      m_model(model),
      m_executor(std::move(executor)),
      m_drains(drains),
      m_log(std::move(log)),
      m_timer(m_executor),
      m_answers(static_cast<std::size_t>(m_request.answers())),
      m_endings(m_answers.size()),
      m_has_begun(m_answers.size()) {}

void Answering::submit(server::Scheduler& scheduler) {
  m_exchange = std::make_shared<Exchange>(m_request, m_model,
                                          [weak = weak_from_this(), executor = m_executor] {
                                            boost::asio::post(executor, [weak] {
                                              if (const auto self = weak.lock()) self->update();
                                            });
                                          });
  std::vector<server::Scheduler::Submission> submissions;
  int first = 0;
  for (auto& generation : m_request.generations) {
    submissions.push_back({std::move(generation),
                           std::make_shared<PromptListener>(m_exchange, first, m_request.choices)});
    first += m_request.choices;
  }
  m_tickets = scheduler.submit(std::move(submissions));
  m_request.generations.clear();
  const auto seconds = std::chrono::system_clock::now().time_since_epoch();
  m_writer =
      server::ReplyWriter::make(m_request, m_model, m_tickets.front()->id(),
                                std::chrono::duration_cast<std::chrono::seconds>(seconds).count());
}

void Answering::begin(std::shared_ptr<Connection> connection) {
  m_connection = std::move(connection);
  if (m_connection->is_closed()) return on_gone();
  m_connection->set_answer(shared_from_this());
  if (m_request.streams) sign_later();
  update();
}

void Answering::on_gone() {
  if (m_connection) end(gone, "the client has disconnected");
}

/// Takes and writes what the scheduler has, if the connection has sent what there was before.
void Answering::update() {
  if (!m_connection || !m_connection->has_sent()) return;
  take();
  if (m_request.streams) {
    stream();
  } else {
    reply_whole();
  }
}

void Answering::take() {
  m_events = m_exchange->take();
  for (const Exchange::Event& event : m_events) {
    if (m_first_seconds < 0 && !event.progress) m_first_seconds = seconds_since(m_start);
    if (!event.ending) continue;
    m_endings[static_cast<std::size_t>(event.choice)] = *event.ending;
    m_has_ended = true;
  }
}

void Answering::reply_whole() {
  for (Exchange::Event& event : m_events) {
    auto& answer = m_answers[static_cast<std::size_t>(event.choice)];
    answer.text += event.text;
    std::move(event.tokens.begin(), event.tokens.end(), std::back_inserter(answer.tokens));
    if (!event.embedding.empty()) answer.embedding = std::move(event.embedding);
    if (event.ending) answer.ending = *event.ending;
  }
  const auto error = m_exchange->error();
  if (!error && !m_exchange->is_done()) return;
  Reply reply;
  if (error) {
    reply = error_reply(status_of(*error), error->what, error->field);
  } else {
    reply.body = m_writer->body(m_answers);
  }
  const auto connection = m_connection;
  end(reply.status, error ? error->what : "");
  connection->reply(std::move(reply));
}

void Answering::stream() {
  const auto error = m_exchange->error();
  if (error && !m_streams && m_events.empty()) {
    const auto connection = m_connection;
    const int status = status_of(*error);
    end(status, error->what);
    return connection->reply(error_reply(status, error->what, error->field));
  }
  std::string text;
  for (const Exchange::Event& event : m_events) {
    const auto choice = static_cast<std::size_t>(event.choice);
    if (!m_has_begun[choice]) {
      m_has_begun[choice] = true;
      text += m_writer->begin(event.choice);
    }
    if (event.progress) text += m_writer->progress(event.choice, *event.progress);
    if (!event.text.empty() || !event.tokens.empty()) {
      text += m_writer->piece(event.choice, event.text, event.tokens);
    }
    if (event.ending) text += m_writer->end(event.choice, *event.ending);
  }
  const bool is_over = error || m_exchange->is_done();
  if (error) {
    text += m_writer->failure(error->what);
  } else if (is_over) {
    text += m_writer->finish(m_endings);
  }
  if (!text.empty()) write(text);
  if (!is_over) return;
  const auto connection = m_connection;
  end(error ? status_of(*error) : ok, error ? error->what : "");
  connection->end_stream();
}

void Answering::write(const std::string& text) {
  if (!m_streams) {
    m_streams = true;
    Reply head;
    head.type = "text/event-stream";
    head.fields = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
    m_connection->begin_stream(head);
  }
  m_connection->send(text);
  sign_later();
}

void Answering::sign_later() {
  m_timer.expires_after(sign_every);
  m_timer.async_wait([weak = weak_from_this()](boost::system::error_code code) {
    const auto self = weak.lock();
    if (code || !self || !self->m_connection) return;
    if (!self->m_connection->has_sent()) return self->sign_later();
    self->write(self->m_writer->sign());
  });
}

/// 503 asks the client to try elsewhere: a server that shuts down has not failed.
int Answering::status_of(const server::RequestError& error) const {
  if (!error.is_servers) return bad_request;
  return m_drains ? unavailable : server_error;
}

/// Ends the request. If an answer failed or nobody reads it, its other prompts are not needed.
void Answering::end(int status, const std::string& what) {
  if (status != ok) {
    for (const auto& ticket : m_tickets) ticket->cancel();
  }
  m_timer.cancel();
  m_log(*this, status, what);
  m_connection.reset();
}

AnswerFacts Answering::facts() const {
  AnswerFacts facts;
  facts.request = m_tickets.front()->id();
  if (m_has_ended) {
    facts.tokens = m_writer->count(m_endings);
    facts.evict_ratio = m_endings.front().evict_ratio;
    facts.first_seconds = m_first_seconds;
  }
  facts.total_seconds = seconds_since(m_start);
  return facts;
}

}  // namespace kvzap::driver
