// A completion in progress, and the counters that connections share.
#pragma once

#include <atomic>
#include <cstdint>
#include <kvzap/server/protocol.hpp>
#include <kvzap/server/scheduler.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/stopwatch.hpp"
#include "http/exchange.hpp"
#include "http/socket_server.hpp"

namespace kvzap::driver {

/// Adds to a shared counter and subtracts the sum in its destructor.
class Counted {
 public:
  explicit Counted(std::atomic<std::int64_t>& counter) : m_counter(counter) {}
  ~Counted() { m_counter -= m_by; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  /// Returns the counter after the addition.
  std::int64_t add(std::int64_t by) {
    m_by += by;
    return m_counter += by;
  }

 private:
  std::atomic<std::int64_t>& m_counter;
  std::int64_t m_by = 0;
};

/// The state of a completion, from its request to its last byte.
struct Answering {
  Answering(server::ApiRequest of, const server::ServedModel& model,
            std::atomic<std::int64_t>& counter)
      : request(std::move(of)),
        counted(counter),
        exchange(std::make_shared<Exchange>(request, model)),
        endings(static_cast<std::size_t>(request.answers())),
        has_begun(endings.size()) {
    counted.add(1);
  }

  /// Submits all prompts, or none. Throws as server::Scheduler::submit does.
  void submit(server::Scheduler& scheduler) {
    std::vector<server::Scheduler::Submission> submissions;
    int first = 0;
    for (auto& generation : request.generations) {
      submissions.push_back(
          {std::move(generation), std::make_shared<PromptListener>(exchange, first)});
      first += request.choices;
    }
    tickets = scheduler.submit(std::move(submissions));
    request.generations.clear();
  }
  void cancel() {
    for (const auto& ticket : tickets) ticket->cancel();
  }
  /// Returns the error of a prompt. Without its answer the other prompts are not needed.
  std::optional<std::string> error() {
    auto found = exchange->error();
    if (found) cancel();
    return found;
  }

  bool take() {
    events = exchange->take();
    for (const Exchange::Event& event : events) {
      if (first_seconds < 0) first_seconds = base::seconds_since(start);
      if (!event.ending) continue;
      endings[static_cast<std::size_t>(event.choice)] = *event.ending;
      has_ended = true;
    }
    return !events.empty();
  }

  server::ApiRequest request;
  Counted counted;
  std::shared_ptr<Exchange> exchange;
  std::vector<std::shared_ptr<server::Scheduler::Ticket>> tickets;  // one for each prompt
  std::optional<server::ReplyWriter> writer;
  Socket socket = Socket(-1);
  std::vector<Exchange::Event> events;
  std::vector<server::Ending> endings;
  bool has_ended = false;  // at least one of them
  std::vector<bool> has_begun;
  std::string method_and_path, client;
  base::Clock::time_point start = base::Clock::now();
  base::Clock::time_point last_sign = base::Clock::now();
  double first_seconds = -1;
};

}  // namespace kvzap::driver
