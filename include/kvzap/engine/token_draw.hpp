// How one token is drawn from logits that no option changes.
#pragma once

#include <cstdint>

namespace kvzap {

/// The filters of SamplingOptions, in their ranges, and the random number of one draw.
struct TokenDraw {
  double temperature = 0;
  std::int64_t top_k = 0;
  double top_p = 1;
  double min_p = 0;
  double uniform = 0;  // in [0, 1)
};

}  // namespace kvzap
