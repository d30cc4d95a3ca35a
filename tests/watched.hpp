// Whether a test runs under the sanitizers.
#pragma once

namespace kvzap::test {

/// Whether sanitizers watch each access and Kokkos checks each index (scripts/sanitize), which
/// takes twenty times as long. What they find shows on few cases as on many: tests with many cases
/// of the same code do fewer of them then; each piece of code is still run.
#if defined(KVZAP_SANITIZED)
inline constexpr bool watched = true;
#else
inline constexpr bool watched = false;
#endif

}  // namespace kvzap::test
