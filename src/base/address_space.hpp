// Checks for libraries that crash or wait forever if an allocation of theirs fails.
#pragma once

#include <cstddef>

namespace kvzap::base {

bool has_address_space(std::size_t bytes);

/// Throws Error if the system has no `bytes` of address space for `library`.
void expect_address_space(std::size_t bytes, const char* library);

}  // namespace kvzap::base
