// Loops over the elements of a row by the lanes of a warp, as linalg/device/lane_rows.hpp takes
// them.
#pragma once

#include "base/cuda/tiles.hpp"

namespace kvzap::attention::cuda {

/// Loops by the lanes of a warp.
struct WarpLoops {
  template <class Body>
  KVZAP_CUDA void each(int n, const Body& body) const {
    for (int i = base::cuda::lane_of_warp(); i < n; i += 32) body(i);
    base::cuda::wait_for_warp();
  }
};

}  // namespace kvzap::attention::cuda
