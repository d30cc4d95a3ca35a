#include "parallel/nccl_ranks.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "parallel/traffic.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "parallel/nccl_calls.hpp"
#else
#include "parallel/nccl_emulated.hpp"
#endif

namespace kvzap::parallel {
namespace {

#if !defined(KOKKOS_ENABLE_CUDA)
using namespace nccl;  // NOLINT(google-build-using-namespace): NCCL's names
#endif

std::string failure(ncclResult_t result, const char* call, ncclComm_t comm) {
  const char* const details = ncclGetLastError(comm);
  const std::string text = details ? details : "";
  return fmt::format("NCCL: {} failed: {}{}{}", call, ncclGetErrorString(result),
                     text.empty() ? "" : "; ", text);
}

class Connected final : public NcclRanks {
 public:
  Connected(ncclComm_t comm, int rank, int size, int device)
      : m_comm(comm), m_rank(rank), m_size(size), m_device(device) {}
  ~Connected() override {
    if (m_comm == nullptr) return;
    nccl::select(m_device);
    ncclCommDestroy(m_comm);
  }
  Connected(const Connected&) = delete;
  Connected& operator=(const Connected&) = delete;

  void sum(const ExecutionSpace& exec, float* values, std::int64_t count) override {
    if (count == 0) return;
    begin_call();
    const auto n = static_cast<std::size_t>(count);
    const Counted counted(n * sizeof(float));
    check(ncclAllReduce(values, values, n, ncclFloat, ncclSum, m_comm, nccl::stream_of(exec)),
          "ncclAllReduce");
  }

  void all_gather(const ExecutionSpace& exec, const float* values, const Counts& counts,
                  float* all) override {
    const std::int64_t own = counts.at(m_rank);
    const Counted counted(static_cast<std::size_t>(own) * sizeof(float));
    trade(exec, {values, Counts(m_size, own), false}, all, counts);
  }

  void exchange(const ExecutionSpace& exec, const float* values, const Counts& sent, float* all,
                const Counts& received) override {
    const std::int64_t total = std::accumulate(sent.begin(), sent.end(), -sent.at(m_rank));
    const Counted counted(static_cast<std::size_t>(total) * sizeof(float));
    trade(exec, {values, sent, true}, all, received);
  }

  void wait(const ExecutionSpace& exec) override {
    constexpr int polls = 256;  // between two questions to NCCL
    if (m_comm == nullptr) return;
    for (int poll = 1; nccl::is_busy(exec); ++poll) {
      if (poll % polls == 0) throw_asynchronous();
    }
    throw_asynchronous();
  }

 private:
  struct Sent {
    const float* values;
    Counts counts;
    bool differ;  // whether each rank gets values of its own
  };

  void begin_call() {
    if (m_comm == nullptr) throw Error("NCCL: the ranks have been aborted after an error");
    nccl::select(m_device);
  }
  void check(ncclResult_t result, const char* call) {
    if (result != ncclSuccess) throw Error(failure(result, call, m_comm));
  }

  void trade(const ExecutionSpace& exec, const Sent& sent, float* all, const Counts& received) {
    begin_call();
    const auto stream = nccl::stream_of(exec);
    check(ncclGroupStart(), "ncclGroupStart");
    ncclResult_t result = ncclSuccess;
    const auto enqueue = [&](auto call, auto* values, std::int64_t count, int rank) {
      if (count == 0 || result != ncclSuccess) return;
      result = call(values, static_cast<std::size_t>(count), ncclFloat, rank, m_comm, stream);
    };
    const float* from = sent.values;
    for (int r = 0; r < m_size; ++r) {
      enqueue(&ncclSend, from, sent.counts.at(r), r);
      enqueue(&ncclRecv, all, received.at(r), r);
      if (sent.differ) from += sent.counts[r];
      all += received[r];
    }
    const ncclResult_t at_end = ncclGroupEnd();
    check(result, "ncclSend or ncclRecv");
    check(at_end, "ncclGroupEnd");
  }

  // Kernels of a communicator that is aborted end, so nothing waits for ranks that have vanished.
  void throw_asynchronous() {
    ncclResult_t found = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(m_comm, &found);
    if (result == ncclSuccess && (found == ncclSuccess || found == ncclInProgress)) return;
    const std::string text =
        failure(result == ncclSuccess ? found : result, "a call on the device", m_comm);
    ncclCommAbort(std::exchange(m_comm, nullptr));
    throw Error(text);
  }

  ncclComm_t m_comm;  // null after an asynchronous error
  int m_rank, m_size, m_device;
};

/// What ranks tell each other before they connect.
struct Place {
  std::int64_t is_wanted = 0;
  char device[120] = "";  // "" if unknown

  std::vector<std::int64_t> words() const {
    std::vector<std::int64_t> words(sizeof(Place) / sizeof(std::int64_t));
    std::memcpy(words.data(), this, sizeof(Place));
    return words;
  }
};

// The boot of the machine tells nodes apart, as in NCCL, which containers of a node share.
Place own_place(int device) {
  Place place;
  place.is_wanted = NcclRanks::is_wanted() ? 1 : 0;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const std::string of_device = nccl::place_of(device);
  if (!of_device.empty()) (boot + " " + of_device).copy(place.device, sizeof(place.device) - 1);
  return place;
}

/// Why the ranks at these places cannot connect: a line for the user, "" for no such reason.
std::string obstacle(const std::vector<std::vector<std::int64_t>>& places) {
  std::map<std::string, std::size_t> ranks;
  for (std::size_t r = 0; r < places.size(); ++r) {
    Place place;
    std::memcpy(static_cast<void*>(&place), places[r].data(), sizeof(Place));
    if (place.device[0] == '\0') return fmt::format("CUDA does not name the device of rank {}", r);
    const auto [other, is_new] = ranks.emplace(place.device, r);
    if (!is_new) {
      return fmt::format("ranks {} and {} share a device, which NCCL refuses", other->second, r);
    }
  }
  return "";
}

void note(const Communicator& comm, const std::string& reason) {
  static bool is_noted = false;
  if (comm.is_root() && !is_noted) {
    std::fprintf(stderr, "kvzap: note: ranks exchange values of devices by MPI: %s\n",
                 reason.c_str());
  }
  is_noted = true;
}

/// Returns null on all ranks if NCCL is not to be used. Collective.
std::unique_ptr<NcclRanks> connect(const Communicator& comm, int device) {
  const auto places = comm.all_gather(own_place(device).words());
  for (const auto& place : places) {
    if (place.front() == 0) return nullptr;
  }
  if (const std::string reason = obstacle(places); !reason.empty()) {
    note(comm, reason);
    return nullptr;
  }
  nccl::select(device);
  struct {
    ncclUniqueId id;
    ncclResult_t result;
  } root = {};
  if (comm.is_root()) root.result = ncclGetUniqueId(&root.id);
  std::string text;
  if (root.result != ncclSuccess) text = failure(root.result, "ncclGetUniqueId", nullptr);
  comm.broadcast(&root, sizeof(root), 0);
  ncclComm_t connected = nullptr;
  if (root.result == ncclSuccess) {
    const ncclResult_t result = ncclCommInitRank(&connected, comm.size(), root.id, comm.rank());
    if (result != ncclSuccess) {
      text = failure(result, "ncclCommInitRank", nullptr);
      connected = nullptr;
    }
  }
  const bool fails = comm.all_reduce_max(connected == nullptr ? 1 : 0) != 0;
  if (!fails) return std::make_unique<Connected>(connected, comm.rank(), comm.size(), device);
  if (connected != nullptr) ncclCommAbort(connected);
  note(comm, text.empty() ? "NCCL: another rank cannot connect" : text);
  return nullptr;
}

/// All communicators that have asked, with null for those that use MPI.
std::map<std::pair<MPI_Comm, int>, std::unique_ptr<NcclRanks>>& registry() {
  // Never destroyed: CUDA may end before.
  static auto* const all = new std::map<std::pair<MPI_Comm, int>, std::unique_ptr<NcclRanks>>;
  return *all;
}

extern "C" int forget_nccl_ranks(MPI_Comm comm, int, void*, void*) {
  for (auto i = registry().begin(); i != registry().end();) {
    i = i->first.first == comm ? registry().erase(i) : std::next(i);
  }
  return MPI_SUCCESS;
}

// NCCL's communicators end with MPI's, and at the latest with Kokkos.
void forget_in_time(MPI_Comm comm) {
  static const int key = [] {
    Kokkos::push_finalize_hook([] { registry().clear(); });
    int created = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, forget_nccl_ranks, &created, nullptr);
    return created;
  }();
  void* ignored = nullptr;
  int is_set = 0;
  MPI_Comm_get_attr(comm, key, &ignored, &is_set);
  if (is_set == 0 && MPI_Comm_set_attr(comm, key, nullptr) != MPI_SUCCESS) {
    throw Error("MPI_Comm_set_attr failed");
  }
}

}  // namespace

std::string NcclRanks::version() {
  int version = 0;
  ncclGetVersion(&version);
  return fmt::format("{}.{}.{}{}", version / 10000, version / 100 % 100, version % 100,
                     is_wanted() ? "" : ", off (KVZAP_NCCL)");
}

NcclRanks* NcclRanks::known(const Communicator& comm, const ExecutionSpace& exec) {
  if (comm.size() == 1) return nullptr;
  const auto found = registry().find({comm.mpi(), nccl::device_of(exec)});
  return found == registry().end() ? nullptr : found->second.get();
}

NcclRanks* NcclRanks::of(const Communicator& comm, const ExecutionSpace& exec) {
  if (comm.size() == 1) return nullptr;
  const std::pair<MPI_Comm, int> key(comm.mpi(), nccl::device_of(exec));
  const auto found = registry().find(key);
  if (found != registry().end()) return found->second.get();
  auto made = connect(comm, key.second);
  forget_in_time(comm.mpi());
  return (registry()[key] = std::move(made)).get();
}

}  // namespace kvzap::parallel
