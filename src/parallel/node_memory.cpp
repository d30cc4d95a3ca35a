#include "parallel/node_memory.hpp"

#if KVZAP_HAVE_MPI
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <kvzap/core/types.hpp>
#include <memory>
#include <thread>

#include "base/kokkos_compat.hpp"
#include "base/stopwatch.hpp"

namespace kvzap::parallel {
namespace {

// Ranks with equal work wait a few microseconds for each other. Longer sleeps would delay them.
constexpr std::chrono::microseconds spins_for{50}, first_sleep{20}, longest_sleep{200};

void check(int code, const char* call) {
  if (code != MPI_SUCCESS) throw Error(fmt::format("{} failed", call));
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// While it exists, this thread's sleeps end on time. Linux otherwise adds up to 50 µs: beside a
/// busy process, two ranks that are not bound to cores took 9.6 s instead of 7.8 s.
class ExactSleep {
 public:
#ifdef __linux__
  ExactSleep() : m_before(::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) { set(1000); }
  ~ExactSleep() {
    if (m_before > 0) set(m_before);
  }

 private:
  static void set(int nanoseconds) { ::prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0); }
  int m_before;
#else
  ExactSleep() {}
#endif
 public:
  ExactSleep(const ExactSleep&) = delete;
  ExactSleep& operator=(const ExactSleep&) = delete;
};

bool is_on_one_node(MPI_Comm comm, int rank, int size) {
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node),
        "MPI_Comm_split_type");
  int on_node = 0;
  check(MPI_Comm_size(node, &on_node), "MPI_Comm_size");
  check(MPI_Comm_free(&node), "MPI_Comm_free");
  return on_node == size;
}

/// Returns memory of `bytes` zeros that all ranks map, or null on all ranks. It has no name in any
/// file system, so a killed rank leaves nothing behind.
void* share_memory([[maybe_unused]] MPI_Comm comm, [[maybe_unused]] int rank,
                   [[maybe_unused]] std::size_t bytes) {
#ifdef __linux__
  struct Place {
    std::int64_t process, descriptor, device, inode;
  };
  const auto place_of = [](int file) {
    struct stat status = {};
    if (file < 0 || ::fstat(file, &status) != 0) return Place{-1, -1, -1, -1};
    return Place{::getpid(), file, static_cast<std::int64_t>(status.st_dev),
                 static_cast<std::int64_t>(status.st_ino)};
  };
  int file = -1;
  Place place = {};
  if (rank == 0) {
    file = ::memfd_create("kvzap", MFD_CLOEXEC);
    if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0) place = place_of(file);
  }
  check(MPI_Bcast(&place, sizeof(place), MPI_BYTE, 0, comm), "MPI_Bcast");
  if (rank != 0) {
    file = ::open(fmt::format("/proc/{}/fd/{}", place.process, place.descriptor).c_str(),
                  O_RDWR | O_CLOEXEC);
  }
  // Another container numbers its processes differently.
  const Place found = place_of(file);
  void* memory = MAP_FAILED;
  if (place.process > 0 && found.device == place.device && found.inode == place.inode) {
    memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  int all_share = memory != MAP_FAILED ? 1 : 0;
  check(MPI_Allreduce(MPI_IN_PLACE, &all_share, 1, MPI_INT, MPI_MIN, comm), "MPI_Allreduce");
  if (file >= 0) ::close(file);
  if (all_share != 0) return memory;
  if (memory != MAP_FAILED) ::munmap(memory, bytes);
#endif
  return nullptr;
}

extern "C" int forget_node_memory(MPI_Comm, int, void* memory, void*) {
  delete static_cast<NodeMemory*>(memory);
  return MPI_SUCCESS;
}

}  // namespace

NodeMemory* NodeMemory::of(MPI_Comm comm) {
  // An attribute of the communicator, so that copies of its handle share the memory and MPI
  // releases the memory with the communicator.
  static const int key = [] {
    int created = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, forget_node_memory, &created, nullptr),
          "MPI_Comm_create_keyval");
    return created;
  }();
  void* known = nullptr;
  int is_known = 0;
  check(MPI_Comm_get_attr(comm, key, &known, &is_known), "MPI_Comm_get_attr");
  if (is_known != 0) return static_cast<NodeMemory*>(known);
  std::unique_ptr<NodeMemory> made(make(comm));
  check(MPI_Comm_set_attr(comm, key, made.get()), "MPI_Comm_set_attr");
  return made.release();
}

NodeMemory* NodeMemory::make(MPI_Comm comm) {
  int rank = 0, size = 0;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  if (!base::runs_on_host || size > NodeMemory::most_ranks || !is_on_one_node(comm, rank, size))
    return nullptr;
  void* const memory =
      share_memory(comm, rank, static_cast<std::size_t>(size) * sizeof(NodeMemory::Rank));
  // The system's zeros are the initial numbers of meetings.
  return memory ? new NodeMemory(comm, static_cast<Rank*>(memory), rank, size) : nullptr;
}

NodeMemory::~NodeMemory() { ::munmap(m_ranks, static_cast<std::size_t>(m_size) * sizeof(Rank)); }

void NodeMemory::broadcast(char* data, std::size_t bytes, int root) {
  for (std::size_t begin = 0; begin < bytes; begin += buffer_bytes) {
    const std::size_t piece = std::min(buffer_bytes, bytes - begin);
    if (m_rank == root) std::memcpy(next_buffer(root), data + begin, piece);
    meet();
    if (m_rank != root) std::memcpy(data + begin, buffer(root), piece);
  }
}

void NodeMemory::meet() {
  ++m_meetings;
  m_ranks[m_rank].meetings.store(m_meetings, std::memory_order_release);
  for (int r = 0; r < m_size; ++r) wait_for(r);
}

bool NodeMemory::has_met(int rank) const {
  // A difference, because the number wraps around.
  const std::uint32_t ahead = m_ranks[rank].meetings.load(std::memory_order_acquire) - m_meetings;
  return ahead <= 1;
}

void NodeMemory::wait_for(int rank) const {
  constexpr int spins = 64;  // between two looks at the clock
  const auto start = base::Clock::now();
  do {
    for (int i = 0; i < spins; ++i) {
      if (has_met(rank)) return;
      relax();
    }
  } while (base::Clock::now() - start < spins_for);
  const ExactSleep exact;
  for (auto sleep = first_sleep; !has_met(rank); sleep = std::min(2 * sleep, longest_sleep)) {
    std::this_thread::sleep_for(sleep);
    // MPI may have messages of this rank to complete, for which the other rank waits.
    int ignored = 0;
    check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, m_comm, &ignored, MPI_STATUS_IGNORE),
          "MPI_Iprobe");
  }
}

}  // namespace kvzap::parallel
#endif
