// Latencies by upper bounds, as Prometheus' histograms count them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace kvzap::server {

/// Counts seconds by upper bounds from 1 ms to 43 min. Not thread-safe.
class Histogram {
 public:
  /// vLLM's bounds for the time to the first token, which its dashboards expect.
  static constexpr std::array<double, 22> bounds = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                                    0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                                    20,    40,    80,   160,  640,  2560};

  void add(double seconds) {
    const auto bound = std::lower_bound(bounds.begin(), bounds.end(), seconds);
    ++m_counts[static_cast<std::size_t>(bound - bounds.begin())];
    m_sum += seconds;
  }
  /// Returns the number of values above bound `place - 1` and not above bound `place`; the last
  /// place, bounds.size(), has no upper bound.
  std::int64_t count(std::size_t place) const { return m_counts.at(place); }
  double sum() const { return m_sum; }

 private:
  std::array<std::int64_t, bounds.size() + 1> m_counts = {};
  double m_sum = 0;
};

}  // namespace kvzap::server
