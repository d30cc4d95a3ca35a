// A map of bounded size that forgets what has not been asked for the longest.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <utility>

namespace kvzap::detail {

/// Not for two threads at a time.
template <class Key, class Value>
class LruCache {
 public:
  /// `capacity` (at least 1): the most entries that it holds.
  explicit LruCache(std::size_t capacity) : m_capacity(capacity) {}

  std::size_t size() const { return m_entries.size(); }

  /// The value of `key`; if it is not there, what `make()` returns becomes it. Valid until the next
  /// call. If `make` throws, nothing has changed.
  template <class Make>
  Value& get(const Key& key, Make make) {
    const auto found = m_places.find(key);
    if (found != m_places.end()) {
      m_entries.splice(m_entries.begin(), m_entries, found->second);
      return found->second->second;
    }
    m_entries.emplace_front(key, make());
    try {
      m_places.emplace(key, m_entries.begin());
    } catch (...) {
      m_entries.pop_front();
      throw;
    }
    if (m_entries.size() > m_capacity) {
      m_places.erase(m_entries.back().first);
      m_entries.pop_back();
    }
    return m_entries.front().second;
  }

 private:
  using Entries = std::list<std::pair<Key, Value>>;  // the last one that was asked for comes first

  std::size_t m_capacity;
  Entries m_entries;
  std::map<Key, typename Entries::iterator> m_places;
};

}  // namespace kvzap::detail
