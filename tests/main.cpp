// Starts MPI and Kokkos around GoogleTest. On several ranks only rank 0 prints, and a failure on
// any rank fails the run.
#include <gtest/gtest.h>
#include <mpi.h>

#include <Kokkos_Core.hpp>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  ::testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  Kokkos::initialize();
  if (rank != 0) {
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
  int failed = RUN_ALL_TESTS();
  Kokkos::finalize();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
