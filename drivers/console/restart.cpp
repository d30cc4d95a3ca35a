#include "console/restart.hpp"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace kvzap::driver {
namespace {

/// The first process sets it for the second. "blas" says that kvzap itself set
/// OPENBLAS_NUM_THREADS.
constexpr const char* marker = "KVZAP_RESTARTED";

void set_by_default(const char* name, const char* value) { setenv(name, value, 0); }

}  // namespace

void restart_with_settings([[maybe_unused]] char** argv) {
#if defined(__linux__) && defined(__GLIBC__)
  constexpr const char* blas_threads = "OPENBLAS_NUM_THREADS";
  if (const char* const restarted = std::getenv(marker)) {
    // set_blas_threads respects a number that the user has set.
    if (restarted == std::string_view("blas")) unsetenv(blas_threads);
    unsetenv(marker);
    return;
  }
  // libgomp's threads otherwise spin for milliseconds after each loop. Two cores of Zen 3, -t 2:
  // decode is 0.2 % slower with 400 spins and 5 % slower with 300. Beside a busy process a run
  // takes 1.3 times the CPU time of -t 1 with 400 spins, and 1.7 times with libgomp's 300,000.
  if (!std::getenv("OMP_WAIT_POLICY")) set_by_default("GOMP_SPINCOUNT", "400");
  // OpenBLAS' threads spin likewise; 2^15 cycles are 10 µs.
  set_by_default("OPENBLAS_THREAD_TIMEOUT", "15");
  // OpenBLAS starts threads while it is loaded. Each thread retries to allocate 128 MB until it
  // succeeds, and the process cannot end before that. It hung if memory was short.
  const bool is_ours = !std::getenv(blas_threads);
  set_by_default(blas_threads, "1");
  setenv(marker, is_ours ? "blas" : "user", 1);
  execv("/proc/self/exe", argv);
  if (is_ours) unsetenv(blas_threads);
  unsetenv(marker);
#endif
}

}  // namespace kvzap::driver
