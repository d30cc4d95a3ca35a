// Measures the duration of work.
#pragma once

#include <chrono>

namespace kvzap::base {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Adds the seconds until its destruction to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : m_sum(sum) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() { m_sum += seconds_since(m_start); }

 private:
  double& m_sum;
  Clock::time_point m_start = Clock::now();
};

}  // namespace kvzap::base
