// The moves of pages that balance the ranks of a layer. They depend on numbers of rows alone, so
// every rank plans the same moves, and perf/replay_placement.cpp plans them for ranks that do not
// exist.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvzap::engine {

/// Pages of a head that lie on `rank` and were taken out of the owner's list in front of its page
/// `first`, after all earlier runs of the head.
struct PagesAway {
  int rank = 0;
  std::int64_t first = 0;
  std::int64_t pages = 0;
};

/// A KV head of one sequence in a layer.
struct HeadPages {
  int owner = 0;
  std::int64_t rows = 0;              // with the owner, in pages and ring
  std::int64_t full = 0;              // full pages with the owner
  std::int64_t available = 0;         // the last of these that no other sequence shares
  bool remote_pages_may_move = true;  // false: another sequence may share the pages of `away`
  std::vector<PagesAway> away;        // oldest move first
};

/// A move of neighbouring pages between two ranks.
struct PageMove {
  std::size_t head = 0;  // place in the list of heads
  int from = 0, to = 0;
  std::int64_t first = 0;  // in the owner's list
  std::int64_t pages = 0;
};

/// Updates the pages of a head of `owner` that lie on other ranks.
void note_move(std::vector<PagesAway>& away, int owner, const PageMove& move);

/// Plans the moves of one layer, one by one.
class LayerPlan {
 public:
  /// heads: the KV heads of all sequences. page_rows: rows of a page.
  LayerPlan(int ranks, std::int64_t page_rows, std::vector<HeadPages> heads);

  /// Returns the rows of each rank.
  const std::vector<std::int64_t>& loads() const { return m_loads; }
  /// Returns the largest rank's rows divided by the mean; 1 without rows.
  double skew() const;
  const std::vector<HeadPages>& heads() const { return m_heads; }

  /// Returns the next move, of up to `most_pages` pages: from the rank with most rows to the one
  /// with fewest. Returns nothing if no rank has more than (1 + tolerance) times the mean, if a
  /// page makes no improvement, or if no page of the largest rank may move.
  std::optional<PageMove> next(double tolerance, std::int64_t most_pages) const;
  /// Updates the plan after a move.
  void apply(const PageMove& move);

 private:
  std::int64_t m_page_rows;
  std::vector<HeadPages> m_heads;
  std::vector<std::int64_t> m_loads;
  double m_mean = 0;
};

}  // namespace kvzap::engine
