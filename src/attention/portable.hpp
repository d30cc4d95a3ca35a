// Attention by plain loops on any backend: the reference for the other implementations.
#pragma once

#include "attention/call.hpp"

namespace kvzap::attention {

/// A two-pass softmax for each (query token, query head) of one span, in float. Does not wait for
/// the kernels.
void attend_portable(const ExecutionSpace& exec, const AttentionSpan& span,
                     const AttentionCall& call);

}  // namespace kvzap::attention
