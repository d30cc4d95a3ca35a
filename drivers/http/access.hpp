// Who may use the server: names of the server that clients use, origins of pages, keys.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/lru_cache.hpp"
#include "base/stopwatch.hpp"
#include "http/reply.hpp"
#include "http/request_parser.hpp"

namespace kvzap::driver {

/// Not thread-safe, except for `client_of` and `is_allowed_origin`.
class Access {
 public:
  /// `host`: the name that the server listens on. `is_loopback`: that this is an address of this
  /// machine alone. `allowed_hosts`: further names; none and with keys, or not on a loopback
  /// address: all names. `allowed_origins`: of other servers' pages that may use this one; "*":
  /// all.
  Access(std::vector<std::string> keys, std::string host, bool is_loopback,
         std::vector<std::string> allowed_hosts, std::vector<std::string> allowed_origins);

  /// Judges the names in the request. A page of another server could otherwise use this one through
  /// its reader's browser, also under a name of its own that leads to this machine (DNS rebinding).
  /// Returns the reply to a refused request.
  std::optional<Reply> judge_names(const Request& request) const;
  /// Whether a page of this origin may use the server although it is another one's.
  bool is_allowed_origin(const std::string& origin) const;
  /// Judges the key of a request. Too many wrong keys from one address get 429; a right key passes.
  std::optional<Reply> judge_key(const Request& request);
  /// Returns whose request it is: the number of its key, or, without a right one, the client's
  /// address (with IPv6: its network). From any thread.
  std::string client_of(const Request& request) const;

 private:
  /// The wrong keys that an address may still send.
  struct Guesses {
    double left;
    base::Clock::time_point since;
  };

  bool is_allowed(const std::string& name) const;
  std::size_t find_key(const std::string& key) const;

  std::vector<std::string> m_keys;
  std::string m_host;
  std::vector<std::string> m_names;    // in lower case
  std::vector<std::string> m_origins;  // in lower case
  bool m_is_restricted;
  base::LruCache<std::string, Guesses> m_guesses;
};

/// Returns whether two texts are equal, in a time that does not depend on where they differ.
bool equal_in_constant_time(const std::string& secret, const std::string& given);

}  // namespace kvzap::driver
