// The order of kernels on different execution-space instances that use the same pages.
#pragma once

#include <kvzap/core/types.hpp>

#include "base/kokkos_compat.hpp"

namespace kvzap::cache {

/// Number of waits for another instance, for tests.
inline int instance_waits = 0;
/// Treats every instance as different, for tests: some backends have only one.
inline bool instances_differ = false;

/// Returns whether later kernels of `next` run after the kernels of `last` without a wait.
inline bool in_order(const ExecutionSpace& last, const ExecutionSpace& next) {
  return !instances_differ && base::same_instance(last, next);
}

/// Makes later kernels of `next` run after the kernels of `last`. Waits if necessary.
inline void follow(const ExecutionSpace& last, const ExecutionSpace& next, const char* name) {
  if (in_order(last, next)) return;
  ++instance_waits;
  base::fence(last, name);
}

}  // namespace kvzap::cache
