// SnapKV's scores, which PyramidKV uses too.
#pragma once

#include <kvzap/engine/policies.hpp>

namespace kvzap::policy {

struct SnapKvParameters : PolicyParameters {
  std::int64_t window = integer("window", 64, {1, 1 << 20}, "newest tokens whose queries count");
  std::int64_t kernel = integer("kernel", 5, {1, 1 << 20}, "number of rows that are pooled; odd");
  std::string pooling = text("pooling", "mean", {"mean", "max"}, "how rows are pooled");
};

/// Makes policies with SnapKV's scores. Throws Error if the kernel's width is even.
PolicyMaker make_snapkv(const SnapKvParameters& parameters, const PolicySetup& setup);

}  // namespace kvzap::policy
