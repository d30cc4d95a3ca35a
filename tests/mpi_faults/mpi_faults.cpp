// Kills one rank at one of its calls of MPI, to show how the other ranks end. Preload it with
// LD_PRELOAD. KVZAP_MPI_FAULT has the form "RANK CALL N before" or "RANK CALL N after": rank RANK
// dies before or after its N-th call of MPI_Send or MPI_Recv with bytes, as pages are sent, and
// says so on stderr.
#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace {

void reach(const std::string& call, int count, const std::string& phase) {
  const char* const fault = std::getenv("KVZAP_MPI_FAULT");
  int rank = 0, dying_rank = -1, dying_count = 0;
  std::string dying_call, dying_phase;
  std::istringstream(fault ? fault : "") >> dying_rank >> dying_call >> dying_count >> dying_phase;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != dying_rank || call != dying_call || count != dying_count || phase != dying_phase) {
    return;
  }
  std::fprintf(stderr, "mpi_faults: rank %d dies %s call %d of %s\n", rank, phase.c_str(), count,
               call.c_str());
  ::kill(::getpid(), SIGKILL);
}

}  // namespace

// Replaces a function of MPI, whose own form is PMPI_….
#define KVZAP_WATCH(call, parameters, arguments)    \
  int call parameters {                             \
    static int count = 0;                           \
    if (type != MPI_BYTE) return P##call arguments; \
    reach(#call, ++count, "before");                \
    const int code = P##call arguments;             \
    reach(#call, count, "after");                   \
    return code;                                    \
  }

KVZAP_WATCH(MPI_Send,
            (const void* data, int n, MPI_Datatype type, int rank, int tag, MPI_Comm comm),
            (data, n, type, rank, tag, comm))
KVZAP_WATCH(MPI_Recv,
            (void* data, int n, MPI_Datatype type, int rank, int tag, MPI_Comm comm,
             MPI_Status* status),
            (data, n, type, rank, tag, comm, status))
