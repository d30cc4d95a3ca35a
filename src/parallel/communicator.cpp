// Agreement of ranks on errors. communicator_mpi.cpp or communicator_serial.cpp communicates.
#include <fmt/format.h>

#include <kvzap/core/communicator.hpp>
#include <new>
#include <string>

#include "parallel/traffic.hpp"

namespace kvzap {

Traffic& parallel::traffic_of_process() {
  static Traffic traffic;
  return traffic;
}

void Communicator::agree(const std::function<void()>& local_work) const { agree(local_work, true); }

void Communicator::agree_on_root(const std::function<void()>& root_work) const {
  agree(
      is_root() ? root_work : [] {}, false);
}

void Communicator::agree(const std::function<void()>& local_work, bool all_work) const {
  std::string message;
  bool failed = false;
  try {
    local_work();
  } catch (const std::bad_alloc&) {
    failed = true;
    message = "out of memory";
  } catch (const std::exception& error) {
    failed = true;
    message = error.what();
  } catch (...) {
    failed = true;
    message = "unknown error";
  }
  // The lowest rank that failed is the maximum of the negated ranks.
  const int first = static_cast<int>(-all_reduce_max(std::int64_t{failed ? -m_rank : -m_size}));
  if (first == m_size) return;
  broadcast(message, first);
  if (m_size > 1 && all_work) {
    // Reports it if only some ranks failed: this points at a node, not at the input.
    const std::int64_t failures = all_reduce_sum(static_cast<std::int64_t>(failed));
    if (failures < m_size) message += fmt::format(" (on rank {} of {})", first, m_size);
  }
  throw AgreedError(message);
}

}  // namespace kvzap
