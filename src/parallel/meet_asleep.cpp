#include "parallel/meet_asleep.hpp"

#include <chrono>
#include <thread>

namespace kvzap::parallel {

#if KVZAP_HAVE_MPI
void meet_asleep(const Communicator& comm) {
  if (comm.size() == 1) return;
  const auto check = [](int code) {
    if (code != MPI_SUCCESS) throw Error("MPI_Ibarrier failed");
  };
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(comm.mpi(), &request));
  for (int met = 0;;) {
    check(MPI_Test(&request, &met, MPI_STATUS_IGNORE));
    if (met != 0) return;
    if (!comm.is_root()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}
#else
void meet_asleep(const Communicator&) {}
#endif

}  // namespace kvzap::parallel
