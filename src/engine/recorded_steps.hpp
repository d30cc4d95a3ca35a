// Recorded launches of decode steps, by the steps' shapes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <kvzap/core/communicator.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "base/launch_graph.hpp"

namespace kvzap::engine {

/// Keeps the graphs of the shapes that came last. A server's batch changes between a few sizes, and
/// each size comes back.
class RecordedSteps {
 public:
  /// Throws the error of base::LaunchGraph.
  RecordedSteps() { base::LaunchGraph::is_available(); }

  struct Recorded {
    base::LaunchGraph graph;
    Traffic traffic;  // of a launch, without its time
  };
  /// The graph of a shape is empty until something is recorded into it.
  struct Found {
    Recorded& recorded;
    bool came_before;
  };
  /// Finds or adds the shape, whose first number changes when memory moves: graphs of other first
  /// numbers are forgotten. The reference holds until the next call.
  Found find(std::vector<std::int64_t> shape) {
    const auto is_stale = [&](const Kept& kept) { return kept.shape.front() != shape.front(); };
    m_kept.erase(std::remove_if(m_kept.begin(), m_kept.end(), is_stale), m_kept.end());
    const auto same = std::find_if(m_kept.begin(), m_kept.end(),
                                   [&](const Kept& kept) { return kept.shape == shape; });
    const bool came_before = same != m_kept.end();
    if (came_before) {
      std::rotate(m_kept.begin(), same, same + 1);
    } else {
      if (m_kept.size() == most_shapes) m_kept.pop_back();
      m_kept.insert(m_kept.begin(), Kept{std::move(shape), std::make_unique<Recorded>()});
    }
    return {*m_kept.front().recorded, came_before};
  }
  void clear() { m_kept.clear(); }

 private:
  // A graph of 400 launches takes some MB of the host.
  static constexpr std::size_t most_shapes = 8;

  struct Kept {
    std::vector<std::int64_t> shape;
    std::unique_ptr<Recorded> recorded;
  };
  std::vector<Kept> m_kept;  // the last used first
};

/// Numbers for this rank's shapes, by which ranks tell each other that a shape has come before.
class ShapeNumbers {
 public:
  /// Returns the shape's number, or a new one if it is not among the last.
  std::int64_t of(const std::vector<std::int64_t>& shape) {
    const auto same = std::find_if(m_last.begin(), m_last.end(),
                                   [&](const auto& known) { return known.first == shape; });
    if (same != m_last.end()) {
      std::rotate(m_last.begin(), same, same + 1);
    } else {
      if (m_last.size() == most_shapes) m_last.pop_back();
      m_last.insert(m_last.begin(), {shape, ++m_count});
    }
    return m_last.front().second;
  }

 private:
  // More than RecordedSteps keeps: a shape of this rank goes with several of the others.
  static constexpr std::size_t most_shapes = 32;

  std::vector<std::pair<std::vector<std::int64_t>, std::int64_t>> m_last;  // the last used first
  std::int64_t m_count = 0;
};

}  // namespace kvzap::engine
