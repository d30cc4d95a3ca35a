// Order between execution-space instances that work on the same pages.
#pragma once

#include <kvzap/core/types.hpp>

#include "base/kokkos_compat.hpp"

namespace kvzap::detail {

/// How often one instance was waited for because another one took over, for tests.
inline int instance_waits = 0;
/// Lets every instance count as another one, for tests: some backends have only one.
inline bool instances_differ = false;

/// Whether what follows on `next` runs after what was launched on `last` anyway.
inline bool in_order(const ExecutionSpace& last, const ExecutionSpace& next) {
  return !instances_differ && same_instance(last, next);
}

/// Has what follows on `next` run after what was launched on `last`.
inline void follow(const ExecutionSpace& last, const ExecutionSpace& next, const char* name) {
  if (in_order(last, next)) return;
  ++instance_waits;
  fence(last, name);
}

}  // namespace kvzap::detail
