#include "parallel/message.hpp"

#include <algorithm>
#include <cstring>

namespace kvzap::parallel {
namespace {

// Bytes of the first broadcast, the message's length included.
constexpr std::size_t first_bytes = 8192;

using Length = std::uint64_t;

}  // namespace

void MessageReader::copy(void* target, std::size_t bytes) {
  if (bytes > static_cast<std::size_t>(m_end - m_next)) fail();
  if (bytes > 0) std::memcpy(target, m_next, bytes);
  m_next += bytes;
}

void MessageReader::fail() {
  throw Error("a message from another rank has other fields: all ranks must run the same program");
}

void broadcast_message(const Communicator& comm, std::string& message, int root) {
  if (comm.size() == 1) return;
  char first[first_bytes] = {};
  constexpr std::size_t room = first_bytes - sizeof(Length);
  Length length = message.size();
  if (comm.rank() == root) {
    std::memcpy(first, &length, sizeof(length));
    std::copy_n(message.data(), std::min(message.size(), room), first + sizeof(length));
  }
  comm.broadcast(first, first_bytes, root);
  std::memcpy(&length, first, sizeof(length));
  const std::size_t taken = std::min<std::size_t>(length, room);
  message.resize(length);
  std::copy_n(first + sizeof(length), taken, message.data());
  if (length > taken) comm.broadcast(message.data() + taken, length - taken, root);
}

std::vector<std::string> all_gather_messages(const Communicator& comm, const std::string& message) {
  std::vector<std::int64_t> words(1 + (message.size() + sizeof(std::int64_t) - 1) /
                                          sizeof(std::int64_t));
  words[0] = static_cast<std::int64_t>(message.size());
  if (!message.empty()) std::memcpy(&words[1], message.data(), message.size());
  std::vector<std::string> messages;
  for (const std::vector<std::int64_t>& of_rank : comm.all_gather(words)) {
    messages.emplace_back(reinterpret_cast<const char*>(of_rank.data() + 1),
                          static_cast<std::size_t>(of_rank[0]));
  }
  return messages;
}

void all_reduce_sum(const Communicator& comm, const std::vector<std::int64_t*>& numbers) {
  std::vector<std::int64_t> sums;
  sums.reserve(numbers.size());
  for (const std::int64_t* const number : numbers) sums.push_back(*number);
  comm.all_reduce_sum(sums.data(), sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) *numbers[i] = sums[i];
}

}  // namespace kvzap::parallel
