#include "commands/lab/eval_exchange.hpp"

#include <cstring>
#include <type_traits>
#include <utility>

namespace kvzap::driver {
namespace {

using Numbers = std::vector<std::int64_t>;

/// Appends values to an array of integers.
class Packer {
 public:
  void add(std::int64_t value) { m_numbers.push_back(value); }
  void add(double value) {
    std::int64_t bits = 0;
    static_assert(sizeof(bits) == sizeof(value));
    std::memcpy(&bits, &value, sizeof(bits));
    add(bits);
  }
  template <class Value>
  void add(const std::vector<Value>& values) {
    add(static_cast<std::int64_t>(values.size()));
    for (const Value& value : values) {
      if constexpr (std::is_integral_v<Value>) {
        add(static_cast<std::int64_t>(value));
      } else {
        add(value);
      }
    }
  }
  Numbers& numbers() { return m_numbers; }

 private:
  Numbers m_numbers;
};

/// Reads the values of a Packer in their order.
class Unpacker {
 public:
  explicit Unpacker(const Numbers& numbers) : m_numbers(numbers) {}

  void take(std::int64_t& value) { value = m_numbers.at(m_next++); }
  void take(TokenId& value) { value = static_cast<TokenId>(m_numbers.at(m_next++)); }
  void take(double& value) {
    const std::int64_t bits = m_numbers.at(m_next++);
    std::memcpy(&value, &bits, sizeof(value));
  }
  template <class Value>
  void take(std::vector<Value>& values) {
    std::int64_t count = 0;
    take(count);
    values.resize(static_cast<std::size_t>(count));
    for (Value& value : values) take(value);
  }

 private:
  const Numbers& m_numbers;
  std::size_t m_next = 0;
};

}  // namespace

void broadcast(std::vector<EvalJob>& jobs, const Communicator& comm) {
  Packer packer;
  if (comm.is_root()) {
    packer.add(static_cast<std::int64_t>(jobs.size()));
    for (const EvalJob& job : jobs) {
      packer.add(job.prompt);
      packer.add(job.file);
      packer.add(job.line);
      packer.add(std::int64_t{job.has_new_context});
      // The rank that answers another question about the same context has the context already.
      packer.add(job.has_new_context ? job.tokens.context : std::vector<TokenId>());
      packer.add(job.tokens.question);
      packer.add(job.tokens.continuation);
      packer.add(job.tokens.new_tokens);
    }
  }
  Numbers& numbers = packer.numbers();
  comm.broadcast(numbers, 0);
  if (comm.is_root()) return;
  Unpacker unpacker(numbers);
  std::int64_t size = 0;
  unpacker.take(size);
  jobs.assign(static_cast<std::size_t>(size), {});
  for (EvalJob& job : jobs) {
    std::int64_t has_new_context = 0;
    unpacker.take(job.prompt);
    unpacker.take(job.file);
    unpacker.take(job.line);
    unpacker.take(has_new_context);
    job.has_new_context = has_new_context != 0;
    unpacker.take(job.tokens.context);
    unpacker.take(job.tokens.question);
    unpacker.take(job.tokens.continuation);
    unpacker.take(job.tokens.new_tokens);
  }
}

std::vector<std::int64_t> packed(const std::vector<SettingAnswer>& answers) {
  Packer packer;
  packer.add(static_cast<std::int64_t>(answers.size()));
  for (const SettingAnswer& answer : answers) {
    packer.add(answer.tokens);
    for (const CacheReport* const cache : {&answer.pruned, &answer.cache}) {
      packer.add(cache->tokens);
      packer.add(cache->kept);
      packer.add(cache->full_bytes);
      packer.add(cache->live_bytes);
    }
    packer.add(answer.log_probabilities);
    packer.add(answer.prefill_seconds);
    packer.add(answer.decode_seconds);
  }
  return std::move(packer.numbers());
}

std::vector<SettingAnswer> unpacked(const std::vector<std::int64_t>& numbers) {
  Unpacker unpacker(numbers);
  std::int64_t size = 0;
  unpacker.take(size);
  std::vector<SettingAnswer> answers(static_cast<std::size_t>(size));
  for (SettingAnswer& answer : answers) {
    unpacker.take(answer.tokens);
    for (CacheReport* const cache : {&answer.pruned, &answer.cache}) {
      unpacker.take(cache->tokens);
      unpacker.take(cache->kept);
      unpacker.take(cache->full_bytes);
      unpacker.take(cache->live_bytes);
    }
    unpacker.take(answer.log_probabilities);
    unpacker.take(answer.prefill_seconds);
    unpacker.take(answer.decode_seconds);
  }
  return answers;
}

}  // namespace kvzap::driver
