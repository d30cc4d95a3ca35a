// Starts MPI and Kokkos around GoogleTest. On several ranks only rank 0 prints, and a failure on
// any rank fails the run.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <clocale>
#include <cstdlib>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/threads.hpp>
#include <locale>
#include <stdexcept>

#include "base/simd.hpp"
#include "parallel/mpi_session.hpp"

namespace {

// ctest takes this exit status for "skipped".
constexpr int skipped = 77;

/// Whether KVZAP_SIMD names an instruction set that this processor lacks; or, if
/// KVZAP_SIMD_NARROWER is set, the one that would be used anyway.
bool nothing_to_run() {
  const char* asked = std::getenv("KVZAP_SIMD");
  if (!asked) return false;
  const auto level = kvzap::base::simd_level_named(asked);
  if (!level) return false;
  const auto widest = kvzap::base::simd_level_of_processor();
  return !kvzap::base::processor_has(*level) ||
         (level == widest && std::getenv("KVZAP_SIMD_NARROWER"));
}

/// Sets the locale that KVZAP_TEST_LOCALE names for streams and C functions, as a host application
/// would. Returns whether this machine has it.
bool set_test_locale() {
  const char* const name = std::getenv("KVZAP_TEST_LOCALE");
  if (!name) return true;
  try {
    std::locale::global(std::locale(name));
    std::setlocale(LC_MESSAGES, "C");  // tests compare messages of the system
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (!set_test_locale()) {
    std::puts(
        "skipped: the machine lacks the locale of KVZAP_TEST_LOCALE; install the package "
        "'locales' and build again");
    return skipped;
  }
  if (nothing_to_run()) {
    std::puts(
        "skipped: the processor lacks the instruction set that KVZAP_SIMD names, or has no wider");
    return skipped;
  }
  const kvzap::parallel::MpiSession mpi(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  const auto comm = kvzap::Communicator::world();
  Kokkos::initialize();
  if (const char* threads = std::getenv("KVZAP_TEST_THREADS")) {
    kvzap::set_threads(std::atoi(threads));
  }
  if (!comm.is_root()) {
    // Failures on other ranks must be seen too; only the listing of tests is silenced.
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    struct Failures : ::testing::EmptyTestEventListener {
      void OnTestPartResult(const ::testing::TestPartResult& result) override {
        if (result.failed()) {
          std::fprintf(stderr, "%s:%d: %s\n", result.file_name() ? result.file_name() : "?",
                       result.line_number(), result.message());
        }
      }
    };
    listeners.Append(new Failures);
  }
  const int failed = RUN_ALL_TESTS();
  Kokkos::finalize();
  return static_cast<int>(comm.all_reduce_max(failed));
}
