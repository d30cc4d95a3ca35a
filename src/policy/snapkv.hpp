// SnapKV's scores, which PyramidKV uses too.
#pragma once

#include <kvzap/engine/policies.hpp>

namespace kvzap::policy {

/// Returns the parameters window, kernel and pooling.
std::vector<PolicyParameter> snapkv_parameters();
/// Makes policies with SnapKV's scores. Throws Error if the kernel's width is even.
PolicyMaker make_snapkv(const PolicyArguments& arguments);

}  // namespace kvzap::policy
