#include "server/prefill_order.hpp"

#include <algorithm>
#include <tuple>

namespace kvzap::server {

std::shared_ptr<ClientShare> ClientShares::of(const std::string& client) {
  std::shared_ptr<ClientShare> least;
  for (auto place = m_shares.begin(); place != m_shares.end();) {
    const auto share = place->second.lock();
    if (!share) {
      place = m_shares.erase(place);
      continue;
    }
    if (place->first == client) return share;
    if (!least || share->served < least->served) least = share;
    ++place;
  }
  auto made = std::make_shared<ClientShare>();
  if (least) made->served = least->served;
  m_shares[client] = made;
  return made;
}

void PrefillOrder::sort(std::vector<Reader>& readers) const {
  const auto rank = [&](const Reader& one) {
    return std::make_tuple(!one.is_first, !is_short(one.fresh), one.served, one.left, one.id);
  };
  std::sort(readers.begin(), readers.end(),
            [&](const Reader& a, const Reader& b) { return rank(a) < rank(b); });
}

PrefillRows PrefillOrder::rows(const std::vector<Reader>& readers, std::int64_t rows) const {
  std::int64_t wanted = 0;
  bool has_others = false;
  for (const Reader& one : readers) {
    if (is_short(one.fresh)) {
      wanted += one.left;
    } else {
      has_others = true;
    }
  }
  if (!has_others) return {rows, 0};
  if (wanted == 0) return {0, rows};
  const std::int64_t half = std::max<std::int64_t>(1, rows / 2);
  const std::int64_t brief = std::min(wanted, half);
  return {half, std::min(std::max<std::int64_t>(1, rows - brief), std::max(brief, m_eighth))};
}

}  // namespace kvzap::server
