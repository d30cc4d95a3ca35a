// All connections of a server, and which of them makes room for a further one.
#pragma once

#include <array>
#include <cstddef>
#include <list>
#include <map>
#include <string>
#include <vector>

namespace kvzap::driver {

class Connection;

/// The connections by client: one address, with IPv6 a network of 64 bits. Not thread-safe.
class Connections {
 public:
  /// `stranger`: its client has sent no request to an API path that was accepted by its head, with
  /// a right key if the server has keys. `known`: the client has sent one, and the server waits for
  /// more bytes or for the client to read. `served`: the server works for it.
  enum class Kind { stranger, known, served };

 private:
  using List = std::list<Connection*>;
  using Client = std::array<List, 3>;  // by kind, the longest wait first
  using Clients = std::map<std::string, Client>;

 public:
  /// The place of one connection.
  class Place {
    friend Connections;
    Clients::iterator client;
    Kind kind = Kind::stranger;
    List::iterator entry;
  };

  Place enter(Connection& connection, const std::string& address);
  /// Puts a connection after the others of this kind.
  void move(Place& place, Kind kind);
  void leave(Place& place);

  std::size_t size() const { return m_size; }
  std::size_t served() const { return m_served; }
  std::vector<Connection*> all() const;
  /// Returns the connection to end for a further one, or null. It belongs to the client with most
  /// connections that the server waits for. Strangers come first, then the longest wait. A
  /// connection that has waited for less than `grace` seconds stays.
  Connection* next_to_end(double grace) const;
  /// Returns the large body that arrives most slowly, or null if none is arriving.
  Connection* slowest_body() const;

 private:
  static List& list_of(const Place& place);

  Clients m_clients;
  std::size_t m_size = 0, m_served = 0;
};

/// Returns what identifies a client: its address, or the first 64 bits of an address of IPv6.
std::string network_of(const std::string& address);

}  // namespace kvzap::driver
