// The scheduler's files of kept states: reads the state of a new prompt, and writes new states
// while steps run.
#include <algorithm>
#include <chrono>
#include <utility>

#include "server/scheduler_impl.hpp"

namespace kvzap::server {
namespace {

// After a failure, such as a full disk, nothing is written for this time.
constexpr std::chrono::seconds pause_after_failure{60};
// Between looks at a file that is being written while there is no other work.
constexpr std::chrono::milliseconds look_when_idle{2};

}  // namespace

/// Reads the longest stored state of a prompt into the tree, if that saves enough tokens. Other
/// sequences wait meanwhile.
void Scheduler::Impl::restore(const Sequence& sequence, const Plan& plan) {
  PrefixStore* const store = m_options.store;
  if (!store || !keeps_states(sequence) || sequence.request().prompt_logprobs) return;
  const Job& job = *sequence.job;
  const GenerationRequest& request = sequence.request();
  const std::string kind = store->kind_of(*request.pruning, sequence.page_format());
  const auto begin = job.key.begin() + static_cast<std::ptrdiff_t>(job.key_begin);
  const auto found =
      store->find(kind, {begin, job.key.end()}, longest_start(job.key) - job.key_begin);
  if (!found) return;
  const std::int64_t there = std::max(best_start(job).length - job.key_begin, std::int64_t{0});
  if (found->length - there < least_shared_tokens) return;
  const auto wanted = static_cast<std::size_t>(found->state.bytes) /
                      static_cast<std::size_t>(m_executor.engine().communicator().size());
  while (m_executor.engine().options().kv_limit > 0 && m_executor.engines().free_bytes() < wanted &&
         free_prefix()) {
    Plan ahead;
    ahead.frees = take_frees(plan);
    if (!ahead.frees.empty()) carry_out(ahead);
  }
  Plan reads;
  std::optional<Pruning> own = request.pruning;
  if (own == m_executor.standard()) own.reset();
  const int handle = new_handle();
  reads.creates.push_back(
      {handle, -1, std::move(own), sequence.page_format(), -1, found->state.file.string()});
  const Outcome outcome = carry_out(reads);
  if (!outcome.not_made.empty()) return;  // no memory: the prompt runs
  if (!outcome.not_read.empty()) {
    return store->refuse(found->state, outcome.not_read.begin()->second);
  }
  store->note_used(found->state);
  PrefixKey key(job.key.begin(), begin);
  key.insert(key.end(), found->state.key.begin(), found->state.key.end());
  keep(key, handle, job.key_begin + found->state.whole_from);
  const std::lock_guard<std::mutex> lock(m_mutex);
  ++m_counts.prefixes_restored;
}

/// Notes that the state of a sequence, which the tree keeps under a handle, shall get a file.
void Scheduler::Impl::note_to_store(const Sequence& sequence, int handle) {
  PrefixStore* const store = m_options.store;
  if (!store) return;
  const GenerationRequest& request = sequence.request();
  const std::int64_t begin = sequence.job->key_begin;
  const PrefixKey key(sequence.key.begin() + static_cast<std::ptrdiff_t>(begin),
                      sequence.key.end());
  if (!store->wants(store->kind_of(*request.pruning, sequence.page_format()), key)) return;
  const std::int64_t whole_from = std::max(sequence.whole_from - begin, std::int64_t{0});
  m_to_store.push_back(
      {handle, store->place_for(*request.pruning, sequence.page_format(), key, whole_from)});
}

bool Scheduler::Impl::has_to_store() const {
  return m_storing || (!m_to_store.empty() && base::Clock::now() >= m_store_from);
}

/// Lets a plan begin a file, or continue with one.
void Scheduler::Impl::plan_files(Plan& plan) {
  if (!has_to_store()) return;
  if (m_storing) {
    plan.advances = true;
    return;
  }
  PrefixStore& store = *m_options.store;
  const auto is_wanted = [&] {
    const StoredPrefix& state = m_to_store.front().place.state;
    return store.wants(state.kind, state.key);
  };
  while (!m_to_store.empty() && !is_wanted()) m_to_store.pop_front();
  if (m_to_store.empty()) return;
  const ToStore& next = m_to_store.front();
  plan.stores = PlannedFile{next.handle, next.place.state.file.string(),
                            std::make_shared<const SnapshotInfo>(next.place.info)};
  m_storing = next.place.state;
  m_to_store.pop_front();
}

void Scheduler::Impl::take_stored(const Plan& plan, const Outcome& outcome) {
  if (!m_storing || !(plan.stores || plan.advances)) return;
  for (const std::string& note : outcome.store_notes) m_options.store->warn(note);
  if (!outcome.store_failure.empty()) {
    m_options.store->warn(outcome.store_failure);
    m_store_from = base::Clock::now() + pause_after_failure;
    m_storing.reset();
  } else if (outcome.has_stored) {
    m_options.store->note_written(*m_storing);
    m_storing.reset();
    const std::lock_guard<std::mutex> lock(m_mutex);
    ++m_counts.prefixes_stored;
  }
}

/// Writes while there is no other work. Returns whether there is something to write.
bool Scheduler::Impl::store_when_idle() {
  if (!has_to_store()) return false;
  Plan plan;
  plan_files(plan);
  if (!m_storing) return false;
  carry_out(plan);
  if (m_storing) {
    std::unique_lock<std::mutex> lock(m_mutex);
    m_work.wait_for(lock, look_when_idle, [&] { return !m_submitted.empty() || m_is_stopping; });
  }
  limit_prefixes();
  note_counts();
  return true;
}

/// Writes all states that still lack a file, unless the server has to stop at once.
void Scheduler::Impl::finish_storing() {
  for (bool goes_on = true; goes_on;) {
    {
      const std::lock_guard<std::mutex> lock(m_mutex);
      if (m_is_stopping) return;
    }
    goes_on = store_when_idle();
  }
}

}  // namespace kvzap::server
