#include "server/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parallel/meet_asleep.hpp"

namespace kvzap::server {
namespace {

// Numbers of the first broadcast, the length among them: 8 KiB.
constexpr std::size_t first_numbers = 1024;

std::int64_t bits_of(double value) {
  std::int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

double double_of(std::int64_t bits) {
  double value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

class Reader {
 public:
  explicit Reader(const std::vector<std::int64_t>& message) : m_message(message) {}
  std::int64_t next() {
    if (m_place >= m_message.size()) throw Error("a plan of rank 0 ends too early");
    return m_message[m_place++];
  }
  int next_int() { return static_cast<int>(next()); }
  std::size_t next_count() {
    const std::int64_t count = next();
    if (count < 0 || static_cast<std::size_t>(count) > m_message.size() - m_place) {
      throw Error(fmt::format("a plan of rank 0 counts {} things", count));
    }
    return static_cast<std::size_t>(count);
  }
  bool is_at_end() const { return m_place == m_message.size(); }

 private:
  const std::vector<std::int64_t>& m_message;
  std::size_t m_place = 0;
};

void append(std::vector<std::int64_t>& message, const std::vector<int>& values) {
  message.push_back(static_cast<std::int64_t>(values.size()));
  message.insert(message.end(), values.begin(), values.end());
}

std::vector<int> read_ints(Reader& reader) {
  std::vector<int> values(reader.next_count());
  for (int& value : values) value = reader.next_int();
  return values;
}

}  // namespace

bool Setting::operator==(const Setting& other) const {
  const bool same_threshold =
      threshold == other.threshold || (std::isnan(threshold) && std::isnan(other.threshold));
  return prune == other.prune && same_threshold && evict_ratio == other.evict_ratio;
}

std::vector<std::int64_t> Plan::encode() const {
  std::vector<std::int64_t> message;
  message.push_back((trims ? 1 : 0) | (sleeps ? 2 : 0) | (ends ? 4 : 0));
  append(message, reports);
  append(message, frees);
  message.push_back(static_cast<std::int64_t>(creates.size()));
  for (const Create& create : creates) {
    message.insert(message.end(),
                   {create.handle, create.source, static_cast<std::int64_t>(create.setting.prune),
                    bits_of(create.setting.threshold), bits_of(create.setting.evict_ratio)});
  }
  message.push_back(static_cast<std::int64_t>(spans.size()));
  for (const PlannedSpan& span : spans) {
    message.insert(
        message.end(),
        {span.handle, static_cast<std::int64_t>(span.part), static_cast<std::int64_t>(span.output),
         span.ends_context ? 1 : 0, span.keep_as, static_cast<std::int64_t>(span.tokens.size())});
    message.insert(message.end(), span.tokens.begin(), span.tokens.end());
  }
  return message;
}

Plan Plan::decode(const std::vector<std::int64_t>& message) {
  Reader reader(message);
  Plan plan;
  const std::int64_t flags = reader.next();
  plan.trims = (flags & 1) != 0;
  plan.sleeps = (flags & 2) != 0;
  plan.ends = (flags & 4) != 0;
  plan.reports = read_ints(reader);
  plan.frees = read_ints(reader);
  plan.creates.resize(reader.next_count());
  for (Create& create : plan.creates) {
    create.handle = reader.next_int();
    create.source = reader.next_int();
    create.setting.prune = static_cast<PruneMode>(reader.next());
    create.setting.threshold = static_cast<float>(double_of(reader.next()));
    create.setting.evict_ratio = double_of(reader.next());
  }
  plan.spans.resize(reader.next_count());
  for (PlannedSpan& span : plan.spans) {
    span.handle = reader.next_int();
    span.part = static_cast<StepPart>(reader.next());
    span.output = static_cast<StepOutput>(reader.next());
    span.ends_context = reader.next() != 0;
    span.keep_as = reader.next_int();
    span.tokens.resize(reader.next_count());
    for (TokenId& token : span.tokens) token = static_cast<TokenId>(reader.next());
  }
  if (!reader.is_at_end()) throw Error("a plan of rank 0 goes on behind its end");
  return plan;
}

void share(Plan& plan, const Communicator& comm) {
  if (comm.size() == 1) return;
  std::vector<std::int64_t> message;
  if (comm.is_root()) message = plan.encode();
  std::vector<std::int64_t> first(first_numbers, 0);
  if (comm.is_root()) {
    first[0] = static_cast<std::int64_t>(message.size());
    const std::size_t count = std::min(message.size(), first_numbers - 1);
    std::copy_n(message.begin(), count, first.begin() + 1);
  }
  comm.broadcast(first.data(), first.size() * sizeof(std::int64_t), 0);
  const auto size = static_cast<std::size_t>(first[0]);
  const std::size_t taken = std::min(size, first_numbers - 1);
  message.resize(size);
  if (!comm.is_root()) std::copy_n(first.begin() + 1, taken, message.begin());
  if (size > taken) {
    comm.broadcast(message.data() + taken, (size - taken) * sizeof(std::int64_t), 0);
  }
  if (!comm.is_root()) plan = Plan::decode(message);
}

Executor::Executor(Engine& engine, const Setting& standard, Settings settings, TraitsOf traits)
    : m_engine(engine),
      m_standard(standard),
      m_settings(std::move(settings)),
      m_traits(std::move(traits)) {}

void Executor::create(const Plan::Create& create) {
  Sequence sequence;
  if (create.source >= 0) {
    const Sequence& source = m_sequences.at(create.source);
    sequence = {m_engine.fork(source.id), source.setting};
  } else {
    sequence = {m_engine.add_sequence(), create.setting};
    if (!(create.setting == m_standard)) {
      try {
        m_engine.set_pruning(sequence.id, m_settings(create.setting));
      } catch (...) {
        m_engine.free_sequence(sequence.id);
        throw;
      }
    }
  }
  m_sequences[create.handle] = sequence;
}

void Executor::free(int handle) {
  m_engine.free_sequence(m_sequences.at(handle).id);
  m_sequences.erase(handle);
}

StepRule Executor::rule_of(const PlannedSpan& span) const {
  return m_engine.rule(m_sequences.at(span.handle).id, span.part);
}

void Executor::step(const Plan& plan, Outcome& outcome) {
  m_batch.clear();
  for (const PlannedSpan& span : plan.spans) {
    m_batch.add(m_sequences.at(span.handle).id, span.tokens, rule_of(span), span.output);
  }
  try {
    outcome.results = m_engine.step(m_batch);
  } catch (const StepOutOfMemory&) {
    outcome.out_of_memory = true;
    return;
  } catch (const AgreedError& error) {
    // A policy's cut behind the step has failed: which layers have been cut nobody knows.
    outcome.failure = error.what();
    for (const PlannedSpan& span : plan.spans) {
      free(span.handle);
      outcome.lost.push_back(span.handle);
      if (span.keep_as >= 0) outcome.not_kept.push_back(span.keep_as);
    }
    return;
  }
  for (const PlannedSpan& span : plan.spans) {
    const Sequence& sequence = m_sequences.at(span.handle);
    try {
      if (span.ends_context && span.part == StepPart::held) m_engine.judge_context(sequence.id);
      if (span.ends_context && span.part != StepPart::held) m_engine.end_context(sequence.id);
    } catch (const AgreedError&) {
      free(span.handle);
      outcome.lost.push_back(span.handle);
      if (span.keep_as >= 0) outcome.not_kept.push_back(span.keep_as);
      continue;
    }
    if (span.keep_as < 0) continue;
    try {
      create({span.keep_as, span.handle, {}});
    } catch (const AgreedOutOfMemory&) {
      outcome.not_kept.push_back(span.keep_as);
    }
  }
}

Outcome Executor::operator()(const Plan& plan) {
  Outcome outcome;
  if (!plan.reports.empty()) {
    std::vector<SequenceId> ids;
    for (const int handle : plan.reports) ids.push_back(m_sequences.at(handle).id);
    outcome.reports = m_engine.reports(ids);
  }
  for (const int handle : plan.frees) free(handle);
  if (plan.trims) m_engine.trim();
  for (const Plan::Create& wanted : plan.creates) {
    try {
      create(wanted);
    } catch (const AgreedOutOfMemory&) {
      outcome.not_made.push_back(wanted.handle);
    }
  }
  if (!plan.spans.empty() && outcome.not_made.empty()) step(plan, outcome);
  return outcome;
}

void Executor::follow() {
  const Communicator& comm = m_engine.communicator();
  for (Plan plan; !plan.ends;) {
    if (plan.sleeps) detail::meet_asleep(comm);
    share(plan, comm);
    (*this)(plan);
  }
}

}  // namespace kvzap::server
