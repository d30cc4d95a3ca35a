// A map of bounded size that drops its least recently used entries.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <utility>

namespace kvzap::base {

/// Not thread-safe.
template <class Key, class Value>
class LruCache {
 public:
  /// `capacity` (at least 1): the largest number of entries.
  explicit LruCache(std::size_t capacity) : m_capacity(capacity) {}

  std::size_t size() const { return m_entries.size(); }

  /// Returns the value of `key`; if there is none, inserts the result of `make()`. The reference is
  /// valid until the next call. If `make` throws, nothing changes.
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
  using Entries = std::list<std::pair<Key, Value>>;  // most recently used first

  std::size_t m_capacity;
  Entries m_entries;
  std::map<Key, typename Entries::iterator> m_places;
};

}  // namespace kvzap::base
