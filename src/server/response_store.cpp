#include <kvzap/server/response_store.hpp>
#include <utility>

namespace kvzap::server {
namespace {

// Of an entry beside its texts.
constexpr std::size_t entry_bytes = 512;

}  // namespace

std::size_t ResponseStore::Entry::bytes() const {
  return entry_bytes + response.body.size() + response.messages.size();
}

void ResponseStore::put(const std::string& id, Response response) {
  Entry entry{id, std::move(response)};
  const std::lock_guard<std::mutex> lock(m_mutex);
  if (entry.bytes() > m_most_bytes) return;
  m_bytes += entry.bytes();
  m_entries.push_front(std::move(entry));
  m_places[id] = m_entries.begin();
  while (m_bytes > m_most_bytes || m_entries.size() > m_most_count) drop(m_entries.back().id);
}

std::optional<ResponseStore::Response> ResponseStore::find(const std::string& id) {
  const std::lock_guard<std::mutex> lock(m_mutex);
  const auto found = m_places.find(id);
  if (found == m_places.end()) return {};
  m_entries.splice(m_entries.begin(), m_entries, found->second);
  return found->second->response;
}

bool ResponseStore::erase(const std::string& id) {
  const std::lock_guard<std::mutex> lock(m_mutex);
  return drop(id);
}

/// Needs the mutex.
bool ResponseStore::drop(const std::string& id) {
  const auto found = m_places.find(id);
  if (found == m_places.end()) return false;
  const auto entry = found->second;
  m_bytes -= entry->bytes();
  m_places.erase(found);
  m_entries.erase(entry);
  return true;
}

}  // namespace kvzap::server
