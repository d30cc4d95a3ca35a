// NCCL and nccl_calls.hpp for hosts, by MPI, so that tests run nccl_ranks.cpp without a device.
// Calls go through base::launch, so a LaunchGraph records them. Unlike NCCL, which then deadlocks,
// it ends a test whose ranks launch different calls, or record a call on some ranks alone.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/launch.hpp"
#include "parallel/traffic.hpp"

namespace kvzap::parallel::nccl {

enum ncclResult_t {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
  ncclInProgress
};
enum ncclDataType_t { ncclFloat };
enum ncclRedOp_t { ncclSum };

/// What tests set, and what they read.
struct Emulation {
  bool share_a_device = false;
  ncclResult_t of_id = ncclSuccess, of_init = ncclSuccess, of_call = ncclSuccess,
               asynchronous = ncclSuccess;
  int busy_polls = 0;  // how often the stream is busy from now on
  int communicators = 0, aborted = 0;
};
inline Emulation emulation;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated NCCL: %s\n", what);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}
inline void check_mpi(int code) {
  if (code != MPI_SUCCESS) fail("MPI has failed");
}

struct EmulatedComm {
  MPI_Comm ranks = MPI_COMM_NULL;
  std::int64_t recorded = 0;  // calls in LaunchGraphs so far
};
using ncclComm_t = EmulatedComm*;

struct ncclUniqueId {
  char internal[128];
};
struct EmulatedId {
  int world_rank, number;
};

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

inline int device_of(const ExecutionSpace&) { return 0; }
inline ExecutionSpace stream_of(const ExecutionSpace& exec) { return exec; }
inline void select(int) {}
inline std::string place_of(int) {
  return "emulated " + std::to_string(emulation.share_a_device ? 0 : world_rank());
}
inline bool is_busy(const ExecutionSpace&) {
  if (emulation.busy_polls > 0) --emulation.busy_polls;
  return emulation.busy_polls > 0;
}

inline ncclResult_t ncclGetVersion(int* version) {
  *version = 22809;
  return ncclSuccess;
}
inline const char* ncclGetErrorString(ncclResult_t) { return "emulated error"; }
inline const char* ncclGetLastError(ncclComm_t) { return "no details"; }
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* found) {
  *found = emulation.asynchronous;
  return ncclSuccess;
}

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static int number = 0;
  const EmulatedId own{world_rank(), ++number % 1000};
  std::memcpy(id->internal, &own, sizeof(own));
  return emulation.of_id;
}

// Rank 0 of the new communicator, whom the id names, hears from all others and tells them of each
// other.
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  EmulatedId of_id = {};
  std::memcpy(&of_id, id.internal, sizeof(of_id));
  const int tag = 5000 + of_id.number;
  std::vector<int> world_ranks(size);
  if (rank == 0) {
    world_ranks[0] = world_rank();
    for (int i = 1; i < size; ++i) {
      int pair[2];
      check_mpi(MPI_Recv(pair, 2, MPI_INT, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
      world_ranks[pair[0]] = pair[1];
    }
    for (int i = 1; i < size; ++i) {
      check_mpi(MPI_Send(world_ranks.data(), size, MPI_INT, world_ranks[i], tag, MPI_COMM_WORLD));
    }
  } else {
    const int pair[2] = {rank, world_rank()};
    check_mpi(MPI_Send(pair, 2, MPI_INT, of_id.world_rank, tag, MPI_COMM_WORLD));
    check_mpi(MPI_Recv(world_ranks.data(), size, MPI_INT, of_id.world_rank, tag, MPI_COMM_WORLD,
                       MPI_STATUS_IGNORE));
  }
  MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world));
  check_mpi(MPI_Group_incl(world, size, world_ranks.data(), &group));
  auto made = std::make_unique<EmulatedComm>();
  check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &made->ranks));
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  if (emulation.of_init != ncclSuccess) {
    MPI_Comm_free(&made->ranks);
    return emulation.of_init;
  }
  ++emulation.communicators;
  *comm = made.release();
  return ncclSuccess;
}

inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  MPI_Comm_free(&comm->ranks);
  delete comm;
  --emulation.communicators;
  return ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ++emulation.aborted;
  return ncclCommDestroy(comm);
}

/// The number of the recorded call that is being made; 0 if it is not recorded.
inline std::int64_t number_of_call(ncclComm_t comm) {
  return base::kept_launches != nullptr ? ++comm->recorded : 0;
}

/// Ends the program unless all ranks have come to the same call with the same count.
inline void check_alike(ncclComm_t comm, std::int64_t number, std::int64_t count) {
  std::int64_t most[] = {number, -number, count, -count};
  Communicator(comm->ranks).all_reduce_max(most, 4);
  if (most[0] != -most[1]) fail("ranks launch different recorded calls");
  if (most[2] != -most[3]) fail("ranks sum different numbers of values");
}

inline ncclResult_t ncclAllReduce(const float* from, float* to, std::size_t count, ncclDataType_t,
                                  ncclRedOp_t, ncclComm_t comm, const ExecutionSpace& stream) {
  if (emulation.of_call != ncclSuccess) return emulation.of_call;
  const std::int64_t number = number_of_call(comm);
  base::launch([=] {
    stream.fence();
    const Traffic before = traffic_of_process();
    check_alike(comm, number, static_cast<std::int64_t>(count));
    if (from != to) std::copy_n(from, count, to);
    Communicator(comm->ranks).all_reduce_sum(to, count);  // sleeps while it waits
    traffic_of_process() = before;
  });
  return ncclSuccess;
}

struct EmulatedMessage {
  const float* from;
  float* to;  // null: it is sent
  int count, rank;
};
/// Between ncclGroupStart and ncclGroupEnd.
struct EmulatedGroup {
  std::vector<EmulatedMessage> messages;
  ncclComm_t comm = nullptr;
  ExecutionSpace stream;
};
inline EmulatedGroup* emulated_group = nullptr;

inline ncclResult_t ncclGroupStart() {
  if (emulated_group != nullptr) fail("a group within a group");
  emulated_group = new EmulatedGroup;
  return ncclSuccess;
}

inline ncclResult_t add_message(const EmulatedMessage& message, ncclComm_t comm,
                                const ExecutionSpace& stream) {
  if (emulated_group == nullptr) fail("a message outside of a group");
  if (emulation.of_call != ncclSuccess) return emulation.of_call;
  emulated_group->messages.push_back(message);
  emulated_group->comm = comm;
  emulated_group->stream = stream;
  return ncclSuccess;
}
inline ncclResult_t ncclSend(const float* from, std::size_t count, ncclDataType_t, int rank,
                             ncclComm_t comm, const ExecutionSpace& stream) {
  return add_message({from, nullptr, static_cast<int>(count), rank}, comm, stream);
}
inline ncclResult_t ncclRecv(float* to, std::size_t count, ncclDataType_t, int rank,
                             ncclComm_t comm, const ExecutionSpace& stream) {
  return add_message({nullptr, to, static_cast<int>(count), rank}, comm, stream);
}

inline ncclResult_t ncclGroupEnd() {
  const EmulatedGroup group = *emulated_group;
  delete emulated_group;
  emulated_group = nullptr;
  if (group.messages.empty()) return ncclSuccess;
  base::launch([=] {
    group.stream.fence();
    std::vector<MPI_Request> requests;
    for (const EmulatedMessage& message : group.messages) {
      requests.emplace_back();
      const int code = message.to != nullptr
                           ? MPI_Irecv(message.to, message.count, MPI_FLOAT, message.rank, 0,
                                       group.comm->ranks, &requests.back())
                           : MPI_Isend(message.from, message.count, MPI_FLOAT, message.rank, 0,
                                       group.comm->ranks, &requests.back());
      check_mpi(code);
    }
    check_mpi(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE));
  });
  return ncclSuccess;
}

}  // namespace kvzap::parallel::nccl
