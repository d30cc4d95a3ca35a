// Writes snapshots. Each rank writes its own heads' rows directly to the file, in a separate thread
// if the host can read rows in place. Rank 0 writes everything else.
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <kvzap/engine/snapshot.hpp>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "files/crc32c.hpp"
#include "files/temporary_file.hpp"
#include "io/snapshot_describe.hpp"
#include "io/snapshot_heads.hpp"
#include "io/snapshot_structure.hpp"
#include "parallel/message.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using files::agree_on_file;
using files::FileDescriptor;
using files::system_error;
using files::TemporaryFile;
using io::HeadWork;
using io::n_row_kinds;
using io::SnapshotGroup;
using io::SnapshotHead;
using io::SnapshotLayout;
using io::SnapshotStructure;

/// Work of this rank in a separate thread. Its exception is stored.
class Worker {
 public:
  ~Worker() {
    m_stop = true;
    join();
  }
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  bool is_busy() const { return m_busy.load(std::memory_order_acquire); }
  const std::string& failure() const { return m_failure; }

  /// Set to cancel the work.
  using Stop = std::atomic<bool>;

  /// Begins work(stop). Without `in_thread` it returns when the work is done.
  void start(std::function<void(const Stop& stop)> work, bool in_thread) {
    m_work = std::move(work);
    if (in_thread) {
      m_busy = true;
      // Another thread handles signals.
      sigset_t all;
      sigset_t before;
      ::sigfillset(&all);
      for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
        ::sigdelset(&all, fault);
      }
      ::pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        m_thread = std::thread([this] {
          run();
          m_busy.store(false, std::memory_order_release);
        });
      } catch (const std::exception&) {  // no thread, or no memory for a thread
        m_busy = false;
        in_thread = false;
      }
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    if (!in_thread) run();
  }
  void join() {
    if (m_thread.joinable()) m_thread.join();
  }

 private:
  void run() {
    try {
      m_work(m_stop);
    } catch (const std::bad_alloc&) {
      m_failure = "out of memory";
    } catch (const std::exception& error) {
      m_failure = error.what();
    }
  }

  std::function<void(const Stop& stop)> m_work;
  std::thread m_thread;
  std::atomic<bool> m_busy{false};
  Stop m_stop{false};
  std::string m_failure;
};

class Writing final : public SnapshotWriting {
 public:
  Writing(const fs::path& file, const Communicator& comm, const SnapshotInfo& info,
          SnapshotLayout layout)
      : m_comm(comm), m_file(file), m_temporary(file, m_comm), m_layout(std::move(layout)) {
    m_queries = info.recent_queries;
  }

  /// Creates the file with everything but rows and checksums. Collective.
  void create(const SnapshotInfo& info) {
    const io::QuietHdf5 quiet;
    m_temporary.create();
    agree_on_file(m_comm, m_file, [&] { m_notes = m_temporary.remove_leftovers(); });
    agree_on_file(m_comm, m_file, [&] {
      m_descriptor = std::make_unique<FileDescriptor>(m_temporary.path(), O_RDWR | O_CLOEXEC);
      if (m_descriptor->get() < 0) throw system_error("cannot be opened", errno);
      m_places.assign(m_layout.groups.size() * n_row_kinds, -1);
      if (!m_comm.is_root()) return;
      // Compressed rows take less space; the amount is unknown.
      if (m_layout.compress == 0) {
        io::make_room(m_descriptor->get(), io::snapshot_bytes_at_most(m_layout, info));
      }
      m_structure = std::make_unique<SnapshotStructure>(m_layout, info);
      m_places = m_structure->places();
    });
    m_comm.broadcast(m_places.data(), m_places.size() * sizeof(std::int64_t), 0);
  }

  const SnapshotLayout& layout() const { return m_layout; }
  /// Returns the queries of a layer, or null if there are none.
  const SnapshotQueries* queries(int layer) const {
    return m_queries.empty() ? nullptr : &m_queries[layer];
  }

  /// Begins to write rows, in a thread if a thread may read them.
  void write_rows(std::vector<HeadWork> works, bool in_thread) {
    m_works = std::move(works);
    m_worker = std::make_unique<Worker>();
    m_worker->start(
        [this](const Worker::Stop& stop) {
          io::write_heads(m_layout, m_places, m_works, m_descriptor->get(), stop);
        },
        in_thread);
  }

  /// Does the same if rank 0 compresses them. Collective.
  void compress_rows(std::vector<HeadWork> works, const HeadPartition& partition) {
    const io::QuietHdf5 quiet;
    m_checksums.resize(m_layout.groups.size());
    auto buffer = io::piece_buffer(m_layout);
    char* const bytes = static_cast<char*>(static_cast<void*>(buffer.data()));
    auto work = works.begin();
    for (int group = 0; group < static_cast<int>(m_layout.groups.size()); ++group) {
      const int layer = group % m_layout.n_layers();
      const auto kinds = m_layout.kinds(group);
      m_checksums[group].assign(kinds.size() * static_cast<std::size_t>(m_layout.n_kv_heads), 0);
      std::string failure;  // on rank 0
      for (int head = 0; head < m_layout.n_kv_heads; ++head) {
        int owner = 0;
        for (int rank = 0; rank < m_comm.size(); ++rank) {
          const auto& heads = partition.heads(layer, rank);
          if (std::binary_search(heads.begin(), heads.end(), head)) owner = rank;
        }
        std::shared_ptr<const SnapshotHead> rows;
        agree_on_file(m_comm, m_file, [&] {
          if (!failure.empty()) throw Error(failure);
          if (m_comm.rank() == owner) rows = (work++)->rows();
        });
        for (std::size_t k = 0; k < kinds.size(); ++k) {
          std::uint32_t& crc =
              m_checksums[group][k * static_cast<std::size_t>(m_layout.n_kv_heads) + head];
          const auto take = [&](std::int64_t first, std::int64_t count) {
            const std::int64_t length = count * m_layout.row_bytes(group, kinds[k]);
            if (m_comm.rank() == owner) rows->copy(kinds[k], first, count, bytes);
            m_comm.broadcast(bytes, static_cast<std::size_t>(length), owner);
            if (!m_comm.is_root() || !failure.empty()) return;
            crc = files::crc32c(bytes, static_cast<std::size_t>(length), crc);
            try {
              m_structure->write_rows(
                  group, kinds[k], m_layout.first_row(group, kinds[k], head) + first, count, bytes);
            } catch (const std::exception& error) {
              failure = error.what();
            }
          };
          io::each_piece(m_layout, group, kinds[k], head, take);
        }
      }
      agree_on_file(m_comm, m_file, [&] {
        if (!failure.empty()) throw Error(failure);
        if (m_comm.is_root()) m_structure->move_rows(group, m_descriptor->get());
      });
    }
    m_worker = std::make_unique<Worker>();
  }

  bool advance() override {
    if (m_stage == Stage::done) return true;
    const std::int64_t is_busy = m_worker && m_worker->is_busy() ? 1 : 0;
    if (m_comm.all_reduce_max(is_busy) > 0) return false;
    next();
    return m_stage == Stage::done;
  }

  void finish() override {
    while (m_stage != Stage::done) next();
  }

  std::int64_t file_bytes() const override {
    return m_stage == Stage::done ? m_file_bytes : std::int64_t{0};
  }
  const std::vector<std::string>& notes() const override { return m_notes; }

 private:
  enum class Stage { rows, checks, done, failed };

  // Waits for the work of this stage, and begins the next one. Collective.
  void next() {
    const io::QuietHdf5 quiet;
    try {
      switch (m_stage) {
        case Stage::rows:
          join();
          complete();
          m_worker = std::make_unique<Worker>();
          m_worker->start([this](const Worker::Stop& stop) { check(stop); }, true);
          m_stage = Stage::checks;
          return;
        case Stage::checks:
          join();
          m_descriptor.reset();
          m_temporary.move_to_target();
          m_stage = Stage::done;
          m_works.clear();
          return;
        case Stage::done:
          return;
        case Stage::failed:
          throw AgreedError(m_failure);
      }
    } catch (const std::exception& error) {
      m_stage = Stage::failed;
      m_failure = error.what();
      throw;
    }
  }

  void join() {
    m_worker->join();
    agree_on_file(m_comm, m_file, [&] {
      if (!m_worker->failure().empty()) throw Error(m_worker->failure());
    });
  }

  // Rank 0 writes checksums, and everything but rows.
  void complete() {
    const auto all = parallel::all_gather(m_comm, m_works);
    agree_on_file(m_comm, m_file, [&] {
      if (!m_comm.is_root()) return;
      if (m_layout.compress == 0) take_checksums(all);
      for (int group = 0; group < static_cast<int>(m_checksums.size()); ++group) {
        m_structure->set_checksums(group, m_checksums[group]);
      }
      m_file_bytes = m_structure->write(m_descriptor->get());
      m_structure.reset();
    });
    m_comm.broadcast(&m_file_bytes, sizeof(m_file_bytes), 0);
  }

  void take_checksums(const std::vector<std::vector<HeadWork>>& all) {
    const auto heads = static_cast<std::size_t>(m_layout.n_kv_heads);
    for (int group = 0; group < static_cast<int>(m_layout.groups.size()); ++group) {
      m_checksums.emplace_back(m_layout.kinds(group).size() * heads, 0);
    }
    for (const std::vector<HeadWork>& of_rank : all) {
      for (const HeadWork& work : of_rank) {
        for (std::size_t k = 0; k < work.crcs.size(); ++k) {
          m_checksums[work.group].at(k * heads + work.head) = work.crcs[k];
        }
      }
    }
  }

  // Runs in a thread: uses neither HDF5 nor MPI.
  void check(const Worker::Stop& stop) {
    const FileDescriptor again(m_temporary.path(), O_RDONLY | O_CLOEXEC);
    if (again.get() < 0) throw system_error("the new file cannot be opened", errno);
    if (m_comm.is_root()) io::check_rest(again.get());
    io::check_heads(m_layout, m_places, m_works, again.get(), stop);
    // Uses the descriptor that was written to, because it receives every error.
    files::bring_to_disk(m_descriptor->get());
  }

  Communicator m_comm;
  fs::path m_file;
  TemporaryFile m_temporary;
  SnapshotLayout m_layout;
  std::vector<SnapshotQueries> m_queries;
  std::vector<std::string> m_notes;
  std::unique_ptr<SnapshotStructure> m_structure;  // on rank 0, which makes it
  std::vector<std::int64_t> m_places;
  std::vector<std::vector<std::uint32_t>> m_checksums;  // on rank 0; (group), (kind, head)
  std::vector<HeadWork> m_works;
  Stage m_stage = Stage::rows;
  std::int64_t m_file_bytes = 0;
  std::string m_failure;
  std::unique_ptr<FileDescriptor> m_descriptor;
  // Last, so that its thread ends before the members that it uses.
  std::unique_ptr<Worker> m_worker;
};

// Returns the options of rank 0. Collective.
SnapshotOptions common_options(const SnapshotOptions& options, const Communicator& comm) {
  SnapshotOptions common = options;
  parallel::broadcast(comm, 0, common.content, common.compress, common.dtype);
  return common;
}

using HostState = SnapshotHead::State;

// With more ranks than KV heads a layer's state is dealt to all ranks. The file has the part of
// each KV head with a checksum, so this function gathers the parts of this rank's KV heads, for
// each group. Otherwise returns empty views: ranks have these parts. Collective.
std::vector<HostState> gather_states(KVCache& cache, SequenceId sequence,
                                     const KVCache::Checkpoint* context,
                                     const SnapshotLayout& layout, const HeadPartition& partition,
                                     const Communicator& comm, const fs::path& file) {
  std::vector<HostState> gathered(layout.groups.size());
  if (!partition.deals_projections()) return gathered;
  cache::RowAccess access(cache);
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    const SnapshotGroup& of = layout.groups[group];
    if (of.state_values == 0) continue;
    const int layer = group % layout.n_layers();
    // State heads that rank `from` has of the KV head of rank `to`, which owns one at most.
    const auto heads_of = [&](int from, int to) {
      const auto own = partition.state_heads(layer, from, of.state_heads).front();
      const auto& kv_heads = partition.heads(layer, to);
      if (kv_heads.empty()) return std::make_pair(own.first, own.first);
      const auto part = state_heads_of(of.state_heads, layout.n_kv_heads, kv_heads.front());
      const std::int64_t begin = std::max(own.first, part.first);
      return std::make_pair(begin, std::max(begin, std::min(own.second, part.second)));
    };
    const auto values = [&](const std::pair<std::int64_t, std::int64_t>& heads) {
      return (heads.second - heads.first) * of.state_values;
    };
    std::vector<std::int64_t> sent, received;
    for (int rank = 0; rank < comm.size(); ++rank) {
      sent.push_back(values(heads_of(comm.rank(), rank)));
      received.push_back(values(heads_of(rank, comm.rank())));
    }
    const auto mine = std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
    const auto all = std::accumulate(received.begin(), received.end(), std::int64_t{0});
    // In the order of the ranks: a placement may give them the KV heads in any order.
    Kokkos::View<float*, Kokkos::HostSpace> packed, heads;
    agree_on_file(comm, file, [&] {
      packed = Kokkos::View<float*, Kokkos::HostSpace>("kvzap::snapshot::own_state", mine);
      heads = Kokkos::View<float*, Kokkos::HostSpace>("kvzap::snapshot::state", all);
      if (mine == 0) return;
      const auto own = Kokkos::create_mirror_view_and_copy(
          Kokkos::HostSpace{}, layout.is_of_context(group)
                                   ? access.state(*context, layer, 0, mine)
                                   : access.state(sequence, layer, 0, mine));
      const std::int64_t first =
          partition.state_heads(layer, comm.rank(), of.state_heads).front().first;
      float* to = packed.data();
      for (int rank = 0; rank < comm.size(); ++rank) {
        const auto part = heads_of(comm.rank(), rank);
        to = std::copy_n(own.data() + (part.first - first) * of.state_values, values(part), to);
      }
    });
    comm.exchange(packed.data(), sent, heads.data(), received);
    gathered[group] = heads;
  }
  return gathered;
}

// Returns the rows of one head for one group of the file. On devices they are copied to the host
// when requested. state_first: where the head's part of the state begins, in this rank's values.
// gathered: that part, if ranks have gathered it.
std::function<std::shared_ptr<const SnapshotHead>()> rows_of_head(
    KVCache& cache, SequenceId sequence, const KVCache::Checkpoint* context, const Writing& writing,
    int group, int head, int local_head, std::int64_t state_first, const HostState& gathered) {
  const SnapshotLayout& layout = writing.layout();
  const bool is_of_context = layout.is_of_context(group);
  const int layer = group % layout.n_layers();
  const SnapshotGroup& of = layout.groups[group];
  const std::int64_t in_ring = of.ring_rows;
  const std::int64_t rows = of.offsets[head + 1] - of.offsets[head];
  const DType dtype = layout.dtype;
  const float* queries = nullptr;
  const std::int64_t dim = layout.head_dim;
  const int parts = static_cast<int>(of.row_dim) / cache.shape().dim(layer);
  cache::RowAccess access(cache);
  Kokkos::View<const float*, MemorySpace> state;  // keeps its memory alive
  if (of.state_values > 0 && gathered.size() == 0) {
    const std::int64_t count = layout.rows(group, io::RowKind::state, head);
    state = is_of_context ? access.state(*context, layer, state_first, count)
                          : access.state(sequence, layer, state_first, count);
  }
  if (const SnapshotQueries* all = writing.queries(layer); all && !is_of_context) {
    queries = all->values.data() + local_head * of.query_group * of.query_tokens * dim;
  }
  auto make = [=, quantised = of.quantised]() mutable {
    std::vector<cache::RawRows> raw;
    for (int part = local_head * parts; part < (local_head + 1) * parts; ++part) {
      raw.push_back(is_of_context ? access.raw_rows(*context, layer, part)
                                  : access.raw_rows(sequence, layer, part));
    }
    const std::int64_t skipped = raw.front().rows() - rows;
    auto made = std::make_shared<io::RawHead>(std::move(raw), skipped, in_ring, dtype, quantised);
    made->set_queries(queries, dim);
    made->set_state(gathered.size() > 0 ? gathered
                                        : HostState(Kokkos::create_mirror_view_and_copy(
                                              Kokkos::HostSpace{}, state)));
    return std::shared_ptr<const SnapshotHead>(made);
  };
  if constexpr (base::runs_on_host) {
    return [made = make()] { return made; };
  } else {
    return make;
  }
}

}  // namespace

std::unique_ptr<SnapshotWriting> begin_snapshot(const fs::path& file, KVCache& cache,
                                                SequenceId sequence, const HeadPartition& partition,
                                                const Communicator& comm, const SnapshotInfo& info,
                                                const SnapshotOptions& options,
                                                const KVCache::Checkpoint* context) {
  const SnapshotOptions common = common_options(options, comm);
  SnapshotLayout layout =
      io::describe_snapshot(file, cache, sequence, partition, comm, info, common, context);
  auto writing = std::make_unique<Writing>(file, comm, info, std::move(layout));
  writing->create(info);
  const auto states =
      gather_states(cache, sequence, context, writing->layout(), partition, comm, file);
  std::vector<HeadWork> works;
  agree_on_file(comm, file, [&] {
    const SnapshotLayout& made = writing->layout();
    for (int group = 0; group < static_cast<int>(made.groups.size()); ++group) {
      const auto& heads = partition.heads(group % made.n_layers(), comm.rank());
      std::int64_t state_first = 0;
      for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
        works.push_back({group,
                         heads[h],
                         rows_of_head(cache, sequence, context, *writing, group, heads[h], h,
                                      state_first, states[group]),
                         {}});
        state_first += made.rows(group, io::RowKind::state, heads[h]);
      }
    }
  });
  if (common.compress > 0) {
    writing->compress_rows(std::move(works), partition);
  } else {
    writing->write_rows(std::move(works), base::runs_on_host);
  }
  return writing;
}

std::vector<std::string> write_snapshot(const fs::path& file, KVCache& cache, SequenceId sequence,
                                        const HeadPartition& partition, const Communicator& comm,
                                        const SnapshotInfo& info, const SnapshotOptions& options) {
  const auto writing = begin_snapshot(file, cache, sequence, partition, comm, info, options);
  writing->finish();
  return writing->notes();
}

std::vector<std::string> check_snapshot_writable(const fs::path& file, const Communicator& comm) {
  TemporaryFile temporary(file, comm);
  temporary.create();
  std::vector<std::string> notes;
  agree_on_file(comm, file, [&] { notes = temporary.remove_leftovers(); });
  return notes;
}

}  // namespace kvzap
