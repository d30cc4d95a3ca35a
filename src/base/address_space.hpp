// Checks for libraries that crash or wait forever if an allocation of theirs fails.
#pragma once

#include <cstddef>

namespace kvzap::base {

bool has_address_space(std::size_t bytes);

/// Throws Error if the system has no `bytes` of address space for `library`.
void expect_address_space(std::size_t bytes, const char* library);

/// Throws Error if the system refuses the threads that GNU's OpenMP starts for the calling thread's
/// next parallel region of `threads`; the run time itself would end the process. Starts and joins
/// as many threads if the calling thread has not yet had so many.
void expect_threads(int threads);

}  // namespace kvzap::base
