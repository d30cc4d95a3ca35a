// The error of a model whose logits are not finite.
#pragma once

#include <kvzap/core/communicator.hpp>

namespace kvzap::engine {

/// Call it on all ranks.
[[noreturn]] inline void throw_not_finite() {
  throw AgreedError(
      "the logits are not finite: weights or activations overflow (try dtype "
      "bf16 or f32, or check the checkpoint)");
}

}  // namespace kvzap::engine
