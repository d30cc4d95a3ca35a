// A completion in progress.
#pragma once

#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/scheduler.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/stopwatch.hpp"
#include "http/connection.hpp"
#include "http/exchange.hpp"
#include "http/request_log.hpp"

namespace kvzap::driver {

/// Brings the answers of the scheduler to a connection, as a stream or as one reply. Made on a
/// worker's thread; all calls after `submit` come from the thread of connections.
class Answering final : public Answer, public std::enable_shared_from_this<Answering> {
 public:
  /// Called at the end with the status, and what the log adds to it.
  using Log = std::function<void(const Answering&, int status, const std::string& what)>;
  using Executor = boost::asio::any_io_executor;

  /// `drains`: whether the server is shutting down.
  Answering(server::ApiRequest request, const server::ServedModel& model, Executor executor,
            const std::atomic<bool>& drains, Log log);

  /// Submits all prompts, or none. Throws as server::Scheduler::submit does.
  void submit(server::Scheduler& scheduler);
  /// Begins to answer. If the connection has closed, cancels the request.
  void begin(std::shared_ptr<Connection> connection);
  void on_gone() override;
  void on_sent() override { update(); }

  /// Describes the request for the log: its number, tokens and times.
  AnswerFacts facts() const;
  const Request& request() const { return m_connection->request(); }

 private:
  void update();
  void take();
  void reply_whole();
  void stream();
  void write(const std::string& text);
  void end(int status, const std::string& what);
  void sign_later();
  int status_of(const server::RequestError& error) const;

  server::ApiRequest m_request;
  const server::ServedModel& m_model;
  Executor m_executor;
  const std::atomic<bool>& m_drains;
  Log m_log;
  std::shared_ptr<Exchange> m_exchange;
  std::vector<std::shared_ptr<server::Scheduler::Ticket>> m_tickets;  // one for each prompt
  std::unique_ptr<server::ReplyWriter> m_writer;
  std::shared_ptr<Connection> m_connection;  // until the answer has ended
  boost::asio::steady_timer m_timer;         // of a silent stream
  std::vector<Exchange::Event> m_events;     // that were not written yet
  std::vector<server::ReplyWriter::Whole> m_answers;
  std::vector<server::Ending> m_endings;
  std::vector<bool> m_has_begun;
  bool m_streams = false;    // the head of the stream is on its way
  bool m_has_ended = false;  // at least one answer
  base::Clock::time_point m_start = base::Clock::now();
  double m_first_seconds = -1;
};

}  // namespace kvzap::driver
