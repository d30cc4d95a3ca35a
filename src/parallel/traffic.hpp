// The traffic of this process, which all ways to communicate count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/core/communicator.hpp>

#include "base/stopwatch.hpp"

namespace kvzap::parallel {

Traffic& traffic_of_process();

/// Counts a call, and its time as long as the object exists.
class Counted {
 public:
  explicit Counted(std::size_t bytes) : m_watch(traffic_of_process().seconds) {
    ++traffic_of_process().calls;
    traffic_of_process().bytes += static_cast<std::int64_t>(bytes);
  }

 private:
  base::Stopwatch m_watch;
};

}  // namespace kvzap::parallel
