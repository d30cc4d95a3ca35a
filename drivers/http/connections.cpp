#include "http/connections.hpp"

#include <boost/asio/ip/address.hpp>

#include "http/connection.hpp"

namespace kvzap::driver {

Connections::List& Connections::list_of(const Place& place) {
  return place.client->second[static_cast<std::size_t>(place.kind)];
}

Connections::Place Connections::enter(Connection& connection, const std::string& address) {
  Place place;
  place.client = m_clients.try_emplace(network_of(address)).first;
  List& list = list_of(place);
  place.entry = list.insert(list.end(), &connection);
  ++m_size;
  return place;
}

void Connections::move(Place& place, Kind kind) {
  List& from = list_of(place);
  if (place.kind == Kind::served) --m_served;
  if (kind == Kind::served) ++m_served;
  place.kind = kind;
  List& to = list_of(place);
  to.splice(to.end(), from, place.entry);
}

void Connections::leave(Place& place) {
  list_of(place).erase(place.entry);
  --m_size;
  if (place.kind == Kind::served) --m_served;
  for (const List& list : place.client->second) {
    if (!list.empty()) return;
  }
  m_clients.erase(place.client);
}

std::vector<Connection*> Connections::all() const {
  std::vector<Connection*> all;
  all.reserve(m_size);
  for (const auto& [name, lists] : m_clients) {
    for (const List& list : lists) all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

Connection* Connections::next_to_end(double grace) const {
  Connection* best = nullptr;
  std::size_t most = 1;
  for (const auto& [name, lists] : m_clients) {
    const List& strangers = lists[0];
    const List& known = lists[1];
    const std::size_t count = strangers.size() + known.size();
    if (count < most) continue;
    Connection* first = nullptr;
    for (const List* const list : {&known, &strangers}) {
      if (!list->empty() && list->front()->waited() >= grace) first = list->front();
    }
    if (count > most || !best || (first && first->waited() > best->waited())) best = first;
    most = count;
  }
  return best;
}

Connection* Connections::slowest_body() const {
  Connection* slowest = nullptr;
  for (const auto& [name, lists] : m_clients) {
    for (Connection* const connection : lists[static_cast<std::size_t>(Kind::known)]) {
      if (!connection->has_large_body()) continue;
      if (!slowest || connection->body_end() < slowest->body_end()) slowest = connection;
    }
  }
  return slowest;
}

std::string network_of(const std::string& address) {
  boost::system::error_code code;
  const auto parsed = boost::asio::ip::make_address(address, code);
  if (code || !parsed.is_v6() || parsed.to_v6().is_v4_mapped()) return address;
  const auto bytes = parsed.to_v6().to_bytes();
  return std::string(bytes.begin(), bytes.begin() + 8);
}

}  // namespace kvzap::driver
