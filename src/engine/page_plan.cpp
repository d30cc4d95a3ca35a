#include "engine/page_plan.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvzap::engine {

void note_move(std::vector<PagesAway>& away, int owner, const PageMove& move) {
  if (move.from != owner) {
    away.back().pages -= move.pages;
    if (away.back().pages == 0) away.pop_back();
  }
  if (move.to == owner) return;
  if (!away.empty() && away.back().rank == move.to && away.back().first == move.first) {
    away.back().pages += move.pages;
  } else {
    away.push_back({move.to, move.first, move.pages});
  }
}

LayerPlan::LayerPlan(int ranks, std::int64_t page_rows, std::vector<HeadPages> heads)
    : m_page_rows(page_rows), m_heads(std::move(heads)), m_loads(ranks, 0) {
  for (const HeadPages& head : m_heads) {
    m_loads[head.owner] += head.rows;
    for (const PagesAway& run : head.away) m_loads[run.rank] += run.pages * page_rows;
  }
  m_mean =
      std::accumulate(m_loads.begin(), m_loads.end(), 0.0) / static_cast<double>(m_loads.size());
}

double LayerPlan::skew() const {
  if (m_mean <= 0) return 1;
  return static_cast<double>(*std::max_element(m_loads.begin(), m_loads.end())) / m_mean;
}

std::optional<PageMove> LayerPlan::next(double tolerance, std::int64_t most_pages) const {
  if (m_mean <= 0 || most_pages <= 0) return std::nullopt;
  const auto largest = std::max_element(m_loads.begin(), m_loads.end());
  const auto smallest = std::min_element(m_loads.begin(), m_loads.end());
  // A page less here and more there must be an improvement.
  if (static_cast<double>(*largest) <= (1 + tolerance) * m_mean ||
      *largest - *smallest < 2 * m_page_rows) {
    return std::nullopt;
  }
  const auto from = static_cast<int>(largest - m_loads.begin());
  const auto to = static_cast<int>(smallest - m_loads.begin());
  const double excess =
      std::min(static_cast<double>(*largest) - m_mean, m_mean - static_cast<double>(*smallest));
  const std::int64_t pages =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(excess) / m_page_rows);
  // Pages of another owner return first, if that is where there is room. Otherwise pages of the
  // rank's own heads leave, and then those of others.
  PageMove returning, leaving, passing;
  for (std::size_t h = 0; h < m_heads.size(); ++h) {
    const HeadPages& head = m_heads[h];
    if (head.owner == from && head.available > leaving.pages) {
      leaving = {h, from, to, 0, head.available};
    }
    const auto& away = head.away;
    if (away.empty() || away.back().rank != from || !head.remote_pages_may_move) continue;
    PageMove& move = head.owner == to ? returning : passing;
    if (away.back().pages > move.pages) {
      move = {h, from, to, away.back().first, away.back().pages};
    }
  }
  PageMove move = returning.pages > 0 ? returning : leaving.pages > 0 ? leaving : passing;
  if (move.pages == 0) return std::nullopt;
  move.pages = std::min({move.pages, pages, most_pages});
  const HeadPages& head = m_heads[move.head];
  if (head.owner == from) move.first = head.full - move.pages;
  return move;
}

void LayerPlan::apply(const PageMove& move) {
  HeadPages& head = m_heads[move.head];
  if (move.from == head.owner) {
    head.rows -= move.pages * m_page_rows;
    head.full -= move.pages;
    head.available -= move.pages;
  }
  if (move.to == head.owner) {
    head.rows += move.pages * m_page_rows;
    // The returned pages are among the last ones that no other sequence shares, or before these.
    if (move.first >= head.full - head.available) head.available += move.pages;
    head.full += move.pages;
  }
  note_move(head.away, head.owner, move);
  m_loads[move.from] -= move.pages * m_page_rows;
  m_loads[move.to] += move.pages * m_page_rows;
}

}  // namespace kvzap::engine
