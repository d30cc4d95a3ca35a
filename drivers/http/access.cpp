#include "http/access.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/ip/address.hpp>
#include <cmath>
#include <utility>

#include "files/ascii.hpp"
#include "files/quote.hpp"
#include "http/connections.hpp"
#include "http/http_server.hpp"

namespace kvzap::driver {
namespace {

// Wrong keys that an address may send at once, and per second from then on.
constexpr double most_guesses = 20, guess_rate = 0.2;
// Addresses whose guesses are counted.
constexpr std::size_t counted_addresses = 4096;

/// Returns the key that a request gives, or nothing.
std::optional<std::string> given_key(const Request& request) {
  const std::string& given = request.field("authorization");
  if (given.empty()) {
    const std::string& key = request.field("x-api-key");
    return key.empty() ? std::nullopt : std::optional(key);
  }
  const std::string scheme = "bearer ";
  if (files::lower_case(given.substr(0, scheme.size())) != scheme) return {};
  return given.substr(given.find_first_not_of(' ', scheme.size() - 1));
}

}  // namespace

std::string server_name(const std::string& text) {
  const bool is_bare = std::count(text.begin(), text.end(), ':') > 1 && text.front() != '[';
  return host_in(is_bare ? "[" + text + "]" : text);
}

bool is_origin(const std::string& text) {
  const std::size_t place = text.find("://");
  if (text == "*") return true;
  if (place == std::string::npos || place == 0) return false;
  const std::string authority = text.substr(place + 3);
  return authority.find_first_of("/?#@ ") == std::string::npos && !host_in(authority).empty();
}

bool equal_in_constant_time(const std::string& secret, const std::string& given) {
  // The time depends on the length of the given text alone.
  unsigned difference = secret.size() == given.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const char of_secret = secret.empty() ? '\0' : secret[i % secret.size()];
    difference |= static_cast<unsigned char>(of_secret ^ given[i]);
  }
  return difference == 0;
}

Access::Access(std::vector<std::string> keys, std::string host, bool is_loopback,
               std::vector<std::string> allowed_hosts, std::vector<std::string> allowed_origins)
    : m_keys(std::move(keys)),
      m_host(std::move(host)),
      m_is_restricted((is_loopback && m_keys.empty()) || !allowed_hosts.empty()),
      m_guesses(counted_addresses) {
  m_names = {"localhost", server_name(m_host)};
  for (const std::string& name : allowed_hosts) m_names.push_back(server_name(name));
  for (const std::string& origin : allowed_origins) m_origins.push_back(files::lower_case(origin));
}

bool Access::is_allowed(const std::string& name) const {
  boost::system::error_code code;
  const auto address = boost::asio::ip::make_address(name, code);
  return (!code && address.is_loopback()) ||
         std::find(m_names.begin(), m_names.end(), name) != m_names.end();
}

bool Access::is_allowed_origin(const std::string& origin) const {
  const std::string lower = files::lower_case(origin);
  return !origin.empty() && std::any_of(m_origins.begin(), m_origins.end(), [&](const auto& one) {
    return one == "*" || one == lower;
  });
}

std::optional<Reply> Access::judge_names(const Request& request) const {
  if (m_is_restricted && !request.authority.empty() && !is_allowed(request.host)) {
    return error_reply(
        forbidden,
        fmt::format("the request is for the host {}; expected localhost, {} or a name in "
                    "--allowed-hosts",
                    files::in_quotes(request.authority), m_host));
  }
  const std::string& origin = request.field("origin");
  const std::size_t place = origin.find("://");
  if (origin.empty() || is_allowed_origin(origin)) return {};
  if (place == std::string::npos ||
      files::lower_case(origin.substr(place + 3)) != files::lower_case(request.authority)) {
    return error_reply(forbidden,
                       "the request comes from a page of another server; --allowed-origin admits "
                       "its origin");
  }
  return {};
}

/// Returns the place of a key among those of the server, or their number. Compares all.
std::size_t Access::find_key(const std::string& key) const {
  std::size_t found = m_keys.size();
  for (std::size_t i = 0; i < m_keys.size(); ++i) {
    if (equal_in_constant_time(m_keys[i], key)) found = i;
  }
  return found;
}

std::string Access::client_of(const Request& request) const {
  const auto key = given_key(request);
  const std::size_t place = key ? find_key(*key) : m_keys.size();
  if (place < m_keys.size()) return fmt::format("key {}", place);
  return network_of(request.client);
}

std::optional<Reply> Access::judge_key(const Request& request) {
  if (m_keys.empty()) return {};
  const auto refusal = [] {
    Reply reply =
        error_reply(unauthorized,
                    "missing or invalid API key; expected Authorization: Bearer KEY or x-api-key: "
                    "KEY",
                    "", "invalid_api_key");
    reply.fields["WWW-Authenticate"] = "Bearer";
    return reply;
  };
  const auto key = given_key(request);
  if (!key) return refusal();
  // Guesses from an address do not lock out its other clients.
  if (find_key(*key) < m_keys.size()) return {};
  const auto now = base::Clock::now();
  Guesses& guesses = m_guesses.get(network_of(request.client), [&] {
    return Guesses{most_guesses, now};
  });
  const double seconds = std::chrono::duration<double>(now - guesses.since).count();
  guesses = {std::min(most_guesses, guesses.left + guess_rate * seconds), now};
  if (guesses.left < 1) {
    Reply reply = error_reply(too_many, "too many requests with a wrong API key from this address");
    reply.fields["Retry-After"] =
        std::to_string(static_cast<int>(std::ceil((1 - guesses.left) / guess_rate)));
    return reply;
  }
  guesses.left -= 1;
  return refusal();
}

}  // namespace kvzap::driver
