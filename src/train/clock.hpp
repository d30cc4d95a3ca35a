// Seconds for reports of training.
#pragma once

#include <chrono>

namespace kvzap::detail {

/// Since it was made.
class Clock {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - m_start).count();
  }

 private:
  std::chrono::steady_clock::time_point m_start = std::chrono::steady_clock::now();
};

}  // namespace kvzap::detail
