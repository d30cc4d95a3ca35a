// Responses that later requests continue or ask for.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace kvzap::server {

/// Keeps the most recently used responses within bounds. Thread-safe.
class ResponseStore {
 public:
  /// A stored response.
  struct Response {
    std::string body;      // the reply: JSON
    std::string messages;  // of its conversation, with the answer: JSON, an array
  };

  /// `most_bytes`: of all responses; `most_count`: of responses.
  ResponseStore(std::size_t most_bytes, std::size_t most_count)
      : m_most_bytes(most_bytes), m_most_count(most_count) {}

  /// Stores a response under a new id. Drops the least recently used ones beyond the bounds.
  void put(const std::string& id, Response response);
  /// Returns a response; none: it is unknown or was dropped.
  std::optional<Response> find(const std::string& id);
  /// Drops a response. Returns false if it is unknown.
  bool erase(const std::string& id);

 private:
  struct Entry {
    std::string id;
    Response response;
    std::size_t bytes() const;
  };

  bool drop(const std::string& id);

  std::size_t m_most_bytes, m_most_count;
  std::mutex m_mutex;
  std::list<Entry> m_entries;  // the last used one first
  std::map<std::string, std::list<Entry>::iterator> m_places;
  std::size_t m_bytes = 0;
};

}  // namespace kvzap::server
