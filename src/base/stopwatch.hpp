// How long work takes.
#pragma once

#include <chrono>

namespace kvzap::detail {

/// Adds the seconds until its end to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : m_sum(sum) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    m_sum += std::chrono::duration<double>(std::chrono::steady_clock::now() - m_start).count();
  }

 private:
  double& m_sum;
  std::chrono::steady_clock::time_point m_start = std::chrono::steady_clock::now();
};

}  // namespace kvzap::detail
