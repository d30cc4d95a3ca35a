// Snapshots written: by each rank its own heads' rows, straight into the file, in a thread of its
// own where the host can read rows where they lie; everything else by rank 0.
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/statvfs.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <kvzap/snapshot.hpp>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/crc32c.hpp"
#include "base/instantiate.hpp"
#include "io/snapshot_rows.hpp"
#include "io/snapshot_structure.hpp"
#include "io/temporary_file.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using detail::agree_on_file;
using detail::FileDescriptor;
using detail::n_row_kinds;
using detail::RowKind;
using detail::SnapshotGroup;
using detail::SnapshotHead;
using detail::SnapshotLayout;
using detail::SnapshotStructure;
using detail::system_error;
using detail::TemporaryFile;

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rows go into the file as they lie in memory, which is little-endian"
#endif

// Rows are gathered in a buffer that stays in the processor's cache, where their checksum is taken
// and from where the system copies them.
constexpr std::int64_t piece_bytes = std::int64_t{256} << 10;

// So many bytes written, the disk is told to begin.
constexpr std::int64_t flushed_bytes = std::int64_t{8} << 20;

// Whether taking space is writing it, as in memory: everything would be written twice.
bool is_in_memory([[maybe_unused]] int descriptor) {
#ifdef __linux__
  struct statfs system = {};
  if (::fstatfs(descriptor, &system) != 0) return false;
  return system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
#else
  return false;
#endif
}

// Finds out early, and cheaply, that there is no room; a full disk is an error later too.
void make_room(int descriptor, std::int64_t bytes) {
  if (!is_in_memory(descriptor)) return detail::reserve(descriptor, 0, bytes);
  struct statvfs status = {};
  int code = 0;
  if (::fstatvfs(descriptor, &status) == 0 &&
      static_cast<std::int64_t>(status.f_bavail) <
          bytes / static_cast<std::int64_t>(status.f_frsize)) {
    code = ENOSPC;
  } else if (::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    code = errno;
  }
  if (code != 0) throw system_error(fmt::format("no room for {} bytes", bytes), code);
}

/// What one rank does of one head.
struct HeadWork {
  int group = 0;
  int head = 0;  // of the model
  /// The rows, for as long as they are held.
  std::function<std::shared_ptr<const SnapshotHead>()> rows;
  /// (kind of the group)
  std::vector<std::uint32_t> crcs;
};

/// Tells the disk to begin with what was written, without waiting: an error shows in fsync.
class Flusher {
 public:
  explicit Flusher(int descriptor) : m_descriptor(descriptor) {}
  ~Flusher() { begin(); }
  Flusher(const Flusher&) = delete;
  Flusher& operator=(const Flusher&) = delete;
  void note(std::int64_t begin_of_new, std::int64_t bytes) {
    if (begin_of_new != m_end) begin();
    if (m_begin == m_end) m_begin = begin_of_new;
    m_end = begin_of_new + bytes;
    if (m_end - m_begin >= flushed_bytes) begin();
  }

 private:
  void begin() {
#if defined(__linux__) && defined(SYNC_FILE_RANGE_WRITE)
    if (m_end > m_begin) {
      const int ignored =
          ::sync_file_range(m_descriptor, m_begin, m_end - m_begin, SYNC_FILE_RANGE_WRITE);
      static_cast<void>(ignored);
    }
#endif
    m_begin = m_end = 0;
  }
  int m_descriptor;
  std::int64_t m_begin = 0, m_end = 0;
};

// Aligned for elements of any type.
std::vector<std::max_align_t> piece_buffer(const SnapshotLayout& layout) {
  const std::int64_t row =
      std::max(layout.row_bytes(RowKind::keys), layout.row_bytes(RowKind::recent_queries));
  return std::vector<std::max_align_t>(
      static_cast<std::size_t>(std::max(piece_bytes, row)) / sizeof(std::max_align_t) + 1);
}

// Calls work(first row, rows) piece by piece.
template <class Work>
void each_piece(const SnapshotLayout& layout, int group, RowKind kind, int head, const Work& work) {
  const std::int64_t rows = layout.rows(group, kind, head);
  const std::int64_t most = std::max<std::int64_t>(1, piece_bytes / layout.row_bytes(kind));
  for (std::int64_t first = 0; first < rows; first += most) {
    work(first, std::min(most, rows - first));
  }
}

std::int64_t place_of(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                      int group, RowKind kind, int head) {
  return places[static_cast<std::size_t>(group) * n_row_kinds + static_cast<std::size_t>(kind)] +
         layout.first_row(group, kind, head) * layout.row_bytes(kind);
}

/// A writing that was given up.
class Stopped : public Error {
 public:
  Stopped() : Error("given up") {}
};

void write_heads(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                 std::vector<HeadWork>& works, int descriptor, const std::atomic<bool>& stop) {
  auto buffer = piece_buffer(layout);
  char* const bytes = static_cast<char*>(static_cast<void*>(buffer.data()));
  Flusher flusher(descriptor);
  for (HeadWork& work : works) {
    const auto rows = work.rows();
    for (const RowKind kind : layout.kinds(work.group)) {
      std::uint32_t crc = 0;
      const std::int64_t place = place_of(layout, places, work.group, kind, work.head);
      each_piece(layout, work.group, kind, work.head, [&](std::int64_t first, std::int64_t count) {
        if (stop) throw Stopped();
        rows->copy(kind, first, count, bytes);
        const std::int64_t length = count * layout.row_bytes(kind);
        crc = detail::crc32c(bytes, static_cast<std::size_t>(length), crc);
        const std::int64_t begin = place + first * layout.row_bytes(kind);
        detail::write_fully(descriptor, bytes, length, begin);
        flusher.note(begin, length);
      });
      work.crcs.push_back(crc);
    }
  }
}

void check_heads(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                 const std::vector<HeadWork>& works, int descriptor,
                 const std::atomic<bool>& stop) {
  auto buffer = piece_buffer(layout);
  void* const bytes = buffer.data();
  for (const HeadWork& work : works) {
    std::size_t i = 0;
    for (const RowKind kind : layout.kinds(work.group)) {
      std::uint32_t crc = 0;
      const std::int64_t place = place_of(layout, places, work.group, kind, work.head);
      each_piece(layout, work.group, kind, work.head, [&](std::int64_t first, std::int64_t count) {
        if (stop) throw Stopped();
        const std::int64_t length = count * layout.row_bytes(kind);
        detail::read_fully(descriptor, bytes, length, place + first * layout.row_bytes(kind));
        crc = detail::crc32c(bytes, static_cast<std::size_t>(length), crc);
      });
      if (crc != work.crcs[i++]) {
        throw Error(fmt::format(
            "{}/{} of head {} reads differently from what was written: checksum {:08x}; expected "
            "{:08x}",
            layout.path(work.group), name_of(kind), work.head, crc, work.crcs[i - 1]));
      }
    }
  }
}

// Everything but uncompressed rows, by rank 0.
void check_rest(int descriptor) {
  const auto seal = detail::read_seal(descriptor);
  if (!seal) throw Error("reads differently from what was written: the seal is missing");
  std::vector<char> buffer(static_cast<std::size_t>(piece_bytes));
  for (const detail::SealedExtent& extent : seal->extents) {
    if (!extent.crc) continue;
    std::uint32_t crc = 0;
    for (std::int64_t at = 0; at < extent.bytes; at += piece_bytes) {
      const std::int64_t length = std::min(piece_bytes, extent.bytes - at);
      detail::read_fully(descriptor, buffer.data(), length, extent.begin + at);
      crc = detail::crc32c(buffer.data(), static_cast<std::size_t>(length), crc);
    }
    if (crc != *extent.crc) {
      throw Error(
          fmt::format("bytes {} to {} read differently from what was written: checksum {:08x}; "
                      "expected {:08x}",
                      extent.begin, extent.begin + extent.bytes, crc, *extent.crc));
    }
  }
}

void bring_to_disk(int descriptor) {
  int code = 0;
  do {
    code = ::fsync(descriptor) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != 0) throw system_error("cannot be brought to the disk", code);
}

/// Work of this rank in a thread of its own. What it throws is kept.
class Worker {
 public:
  ~Worker() {
    m_stop = true;
    join();
  }
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const std::atomic<bool>& stop() const { return m_stop; }
  bool is_busy() const { return m_busy.load(std::memory_order_acquire); }
  const std::string& failure() const { return m_failure; }

  /// Begins; without `in_thread` returns when it is done.
  void start(std::function<void()> work, bool in_thread) {
    m_work = std::move(work);
    if (in_thread) {
      m_busy = true;
      // Signals are for the thread that handles them.
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
      } catch (const std::system_error&) {
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
      m_work();
    } catch (const std::bad_alloc&) {
      m_failure = "out of memory";
    } catch (const std::exception& error) {
      m_failure = error.what();
    }
  }

  std::function<void()> m_work;
  std::thread m_thread;
  std::atomic<bool> m_busy{false};
  std::atomic<bool> m_stop{false};
  std::string m_failure;
};

class Writing final : public SnapshotWriting {
 public:
  Writing(const fs::path& file, const Communicator& comm, const SnapshotInfo& info,
          SnapshotLayout layout)
      : m_comm(comm), m_file(file), m_temporary(file, m_comm), m_layout(std::move(layout)) {
    m_queries = info.recent_queries;
  }

  /// Collective. The file with all that is not rows in it, but for checksums.
  void create(const SnapshotInfo& info) {
    const detail::QuietHdf5 quiet;
    m_temporary.create();
    agree_on_file(m_comm, m_file, [&] { m_notes = m_temporary.remove_leftovers(); });
    agree_on_file(m_comm, m_file, [&] {
      m_descriptor = std::make_unique<FileDescriptor>(m_temporary.path(), O_RDWR | O_CLOEXEC);
      if (m_descriptor->get() < 0) throw system_error("cannot be opened", errno);
      m_places.assign(m_layout.groups.size() * n_row_kinds, -1);
      if (!m_comm.is_root()) return;
      // Compressed rows take less, nobody knows how much.
      if (m_layout.compress == 0) {
        make_room(m_descriptor->get(), detail::snapshot_bytes_at_most(m_layout, info));
      }
      m_structure = std::make_unique<SnapshotStructure>(m_layout, info);
      m_places = m_structure->places();
    });
    m_comm.broadcast(m_places.data(), m_places.size() * sizeof(std::int64_t), 0);
  }

  const SnapshotLayout& layout() const { return m_layout; }
  /// Of a layer; null: none.
  const SnapshotQueries* queries(int layer) const {
    return m_queries.empty() ? nullptr : &m_queries[layer];
  }

  /// Rows begin to be written, by a thread if one may read them.
  void write_rows(std::vector<HeadWork> works, bool in_thread) {
    m_works = std::move(works);
    m_worker = std::make_unique<Worker>();
    m_worker->start(
        [this] { write_heads(m_layout, m_places, m_works, m_descriptor->get(), m_worker->stop()); },
        in_thread);
  }

  /// Collective: the same where rank 0 compresses them.
  void compress_rows(std::vector<HeadWork> works, const HeadPartition& partition) {
    const detail::QuietHdf5 quiet;
    m_checksums.resize(m_layout.groups.size());
    auto buffer = piece_buffer(m_layout);
    char* const bytes = static_cast<char*>(static_cast<void*>(buffer.data()));
    auto work = works.begin();
    for (int group = 0; group < static_cast<int>(m_layout.groups.size()); ++group) {
      const int layer = group % m_layout.n_layers();
      const auto kinds = m_layout.kinds(group);
      m_checksums[group].assign(kinds.size() * static_cast<std::size_t>(m_layout.n_kv_heads), 0);
      std::string failure;  // of rank 0
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
            const std::int64_t length = count * m_layout.row_bytes(kinds[k]);
            if (m_comm.rank() == owner) rows->copy(kinds[k], first, count, bytes);
            m_comm.broadcast(bytes, static_cast<std::size_t>(length), owner);
            if (!m_comm.is_root() || !failure.empty()) return;
            crc = detail::crc32c(bytes, static_cast<std::size_t>(length), crc);
            try {
              m_structure->write_rows(
                  group, kinds[k], m_layout.first_row(group, kinds[k], head) + first, count, bytes);
            } catch (const std::exception& error) {
              failure = error.what();
            }
          };
          each_piece(m_layout, group, kinds[k], head, take);
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

  // Collective: waits for this stage's work, and begins the next one.
  void next() {
    const detail::QuietHdf5 quiet;
    try {
      switch (m_stage) {
        case Stage::rows:
          join();
          complete();
          m_worker = std::make_unique<Worker>();
          m_worker->start([this] { check(); }, true);
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

  // Rank 0 writes checksums, and what is not rows.
  void complete() {
    std::vector<std::int64_t> mine;
    for (const HeadWork& work : m_works) {
      mine.insert(mine.end(), {work.group, work.head});
      mine.insert(mine.end(), work.crcs.begin(), work.crcs.end());
    }
    const auto all = m_comm.all_gather(mine);
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

  void take_checksums(const std::vector<std::vector<std::int64_t>>& all) {
    const auto heads = static_cast<std::size_t>(m_layout.n_kv_heads);
    for (int group = 0; group < static_cast<int>(m_layout.groups.size()); ++group) {
      m_checksums.emplace_back(m_layout.kinds(group).size() * heads, 0);
    }
    for (const std::vector<std::int64_t>& of_rank : all) {
      for (std::size_t i = 0; i < of_rank.size();) {
        const auto group = static_cast<std::size_t>(of_rank.at(i++));
        const auto head = static_cast<std::size_t>(of_rank.at(i++));
        const std::size_t kinds = m_checksums.at(group).size() / heads;
        for (std::size_t k = 0; k < kinds; ++k) {
          m_checksums[group].at(k * heads + head) = static_cast<std::uint32_t>(of_rank.at(i++));
        }
      }
    }
  }

  // In a thread: touches neither HDF5 nor MPI.
  void check() {
    const FileDescriptor again(m_temporary.path(), O_RDONLY | O_CLOEXEC);
    if (again.get() < 0) throw system_error("the new file cannot be opened", errno);
    if (m_comm.is_root()) check_rest(again.get());
    check_heads(m_layout, m_places, m_works, again.get(), m_worker->stop());
    // Of the descriptor that has written: it is the one that is told of every error.
    bring_to_disk(m_descriptor->get());
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
  // Last, so that its thread ends before anything that it uses.
  std::unique_ptr<Worker> m_worker;
};

template <class Value, PageOrder order>
void check_partition(const KVCache<Value, order>& cache, SequenceId sequence,
                     const HeadPartition& partition, const Communicator& comm) {
  const CacheShape& shape = cache.shape();
  if (partition.n_ranks() != comm.size()) {
    throw Error(fmt::format("the partition is for {} ranks; expected {}", partition.n_ranks(),
                            comm.size()));
  }
  if (partition.n_layers() != static_cast<int>(shape.heads.size())) {
    throw Error(fmt::format("the partition has {} layers; the cache has {}", partition.n_layers(),
                            shape.heads.size()));
  }
  for (int layer = 0; layer < partition.n_layers(); ++layer) {
    const std::size_t heads = partition.heads(layer, comm.rank()).size();
    if (heads != static_cast<std::size_t>(shape.heads[layer])) {
      throw Error(fmt::format("layer {}: the partition gives rank {} {} KV heads; its cache has {}",
                              layer, comm.rank(), heads, shape.heads[layer]));
    }
    if (cache.tokens(sequence, layer) != cache.tokens(sequence, 0)) {
      throw Error(fmt::format("layer {} has {} tokens, layer 0 has {}", layer,
                              cache.tokens(sequence, layer), cache.tokens(sequence, 0)));
    }
  }
}

// Query heads of each KV head.
template <class Value, PageOrder order>
std::int64_t query_group(const SnapshotQueries& queries, const KVCache<Value, order>& cache,
                         int layer) {
  const CacheShape& shape = cache.shape();
  const std::int64_t per_head = queries.tokens * shape.head_dim * shape.heads[layer];
  if (queries.tokens < 0) throw Error("recent queries: a negative number of tokens");
  if (per_head == 0) return 0;
  const auto found = static_cast<std::int64_t>(queries.values.size());
  if (found == 0 || found % per_head != 0) {
    throw Error(fmt::format(
        "recent queries of layer {} have {} values; expected a multiple of {} = tokens * head_dim "
        "* KV heads",
        layer, found, per_head));
  }
  return found / per_head;
}

constexpr const char* extent_names =
    "head_dim, window, page_rows, tokens, tokens of the context, whether there is a context, "
    "layers with recent queries, content";

// What a rank knows: the extents, in which all agree; sums; then layer by layer.
struct RankExtents {
  std::vector<std::int64_t> extents, sums, layers;
};

template <class Value, PageOrder order>
RankExtents own_extents(const KVCache<Value, order>& cache, SequenceId sequence,
                        const HeadPartition& partition, const Communicator& comm,
                        const SnapshotInfo& info, const SnapshotOptions& options,
                        const typename KVCache<Value, order>::Checkpoint* context) {
  check_partition(cache, sequence, partition, comm);
  const CacheShape& shape = cache.shape();
  const std::size_t n_layers = shape.heads.size();
  if (!info.recent_queries.empty() && info.recent_queries.size() != n_layers) {
    throw Error(fmt::format("recent queries of {} layers; expected {}", info.recent_queries.size(),
                            n_layers));
  }
  if (options.compress < 0 || options.compress > 9) {
    throw Error(fmt::format("the level of compression is {}; expected 0 to 9", options.compress));
  }
  RankExtents mine;
  mine.extents = {shape.head_dim,
                  shape.window,
                  shape.page_rows,
                  cache.tokens(sequence, 0),
                  context ? context->tokens.at(0) : std::int64_t{-1},
                  context ? 1 : 0,
                  static_cast<std::int64_t>(info.recent_queries.size()),
                  static_cast<std::int64_t>(options.content)};
  const AppendCounts& counts = cache.counts(sequence);
  mine.sums = {counts.judged, counts.evicted, counts.non_finite, 0, 0, 0};
  if (context) {
    mine.sums[3] = context->counts.judged;
    mine.sums[4] = context->counts.evicted;
    mine.sums[5] = context->counts.non_finite;
  }
  for (int layer = 0; layer < static_cast<int>(n_layers); ++layer) {
    SnapshotQueries queries;
    if (!info.recent_queries.empty()) {
      queries.first = info.recent_queries[layer].first;
      queries.tokens = info.recent_queries[layer].tokens;
    }
    mine.layers.insert(
        mine.layers.end(),
        {cache.ring_first(sequence, layer), queries.first, queries.tokens,
         queries.tokens == 0 ? 0 : query_group(info.recent_queries[layer], cache, layer),
         context ? context->ring_first.at(layer) : std::int64_t{0}});
    for (int head = 0; head < shape.heads[layer]; ++head) {
      mine.layers.push_back(cache.rows(sequence, layer, head));
      mine.layers.push_back(context ? cache.retained_rows(*context, layer, head) : 0);
    }
  }
  return mine;
}

std::string listed(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", number);
  }
  return text;
}

// Joins what all ranks know. Throws if this rank's extents are not rank 0's.
SnapshotLayout joined_layout(const std::vector<RankExtents>& all, const HeadPartition& partition,
                             int rank) {
  const RankExtents& root = all[0];
  const RankExtents& mine = all[rank];
  if (mine.extents != root.extents) {
    throw Error(fmt::format("{} are {}; on rank 0 they are {}", extent_names, listed(mine.extents),
                            listed(root.extents)));
  }
  SnapshotLayout layout;
  layout.head_dim = root.extents[0];
  layout.window = root.extents[1];
  layout.page_rows = root.extents[2];
  layout.tokens = root.extents[3];
  layout.context_tokens = root.extents[4];
  layout.has_context = root.extents[5] != 0;
  layout.has_queries = root.extents[6] != 0;
  layout.n_kv_heads = partition.n_kv_heads();
  std::vector<std::int64_t> sums(6, 0);
  for (const RankExtents& of : all) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of.sums.at(i);
  }
  layout.counts = {sums[0], sums[1], sums[2]};
  layout.context_counts = {sums[3], sums[4], sums[5]};
  const auto n_layers = static_cast<std::size_t>(partition.n_layers());
  const auto n_heads = static_cast<std::size_t>(partition.n_kv_heads());
  layout.groups.resize(n_layers * (layout.has_context ? 2 : 1));
  std::vector<std::size_t> next(all.size(), 0);
  for (std::size_t l = 0; l < n_layers; ++l) {
    SnapshotGroup& layer = layout.groups[l];
    layer.offsets.assign(n_heads + 1, 0);
    SnapshotGroup context;
    context.offsets.assign(n_heads + 1, 0);
    context.retained.assign(n_heads, 0);
    // Ranks whose heads lost a row of the ring have emptied theirs; others need not have. The file
    // has one ring for all, of which every head has every row.
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::vector<std::int64_t>& of = all[r].layers;
      const std::size_t at = next[r];
      layer.ring_first = std::max(layer.ring_first, of.at(at));
      context.ring_first = std::max(context.ring_first, of.at(at + 4));
      for (std::size_t i = 1; i < 4; ++i) {
        if (of.at(at + i) == all[0].layers.at(next[0] + i)) continue;
        throw Error(fmt::format(
            "layer {}: recent queries from position {} on, {} tokens, {} query heads of a KV head; "
            "on rank 0 {}, {}, {}",
            l, of.at(at + 1), of.at(at + 2), of.at(at + 3), all[0].layers.at(next[0] + 1),
            all[0].layers.at(next[0] + 2), all[0].layers.at(next[0] + 3)));
      }
    }
    layer.query_first = all[0].layers.at(next[0] + 1);
    layer.query_tokens = all[0].layers.at(next[0] + 2);
    layer.query_group = all[0].layers.at(next[0] + 3);
    const std::int64_t in_ring =
        std::min(layout.context_tokens - context.ring_first, layout.window);
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::vector<std::int64_t>& of = all[r].layers;
      const std::int64_t own_ring =
          std::min(layout.context_tokens - of.at(next[r] + 4), layout.window);
      next[r] += 5;
      for (const int head : partition.heads(static_cast<int>(l), static_cast<int>(r))) {
        layer.offsets[head + 1] = of.at(next[r]++);
        context.retained[head] = of.at(next[r]++) + own_ring - in_ring;
        context.offsets[head + 1] = in_ring;
      }
    }
    for (std::size_t h = 0; h < n_heads; ++h) {
      if (layout.has_context && context.retained[h] > layer.offsets[h + 1]) {
        throw Error(fmt::format(
            "layer {}, head {}: the state to cut back to has {} rows in pages; the sequence has {}",
            l, h, context.retained[h], layer.offsets[h + 1]));
      }
      layer.offsets[h + 1] += layer.offsets[h];
      context.offsets[h + 1] += context.offsets[h];
    }
    if (layout.has_context) layout.groups[n_layers + l] = std::move(context);
  }
  return layout;
}

// The file can keep rows of a context's ring that other ranks have emptied only where the sequence
// still has them, behind the rows that lie in pages.
template <class Value, PageOrder order>
void check_context(KVCache<Value, order>& cache, SequenceId sequence,
                   const typename KVCache<Value, order>::Checkpoint& context,
                   const HeadPartition& partition, const SnapshotLayout& layout, int rank) {
  for (int layer = 0; layer < layout.n_layers(); ++layer) {
    const SnapshotGroup& group = layout.groups[layout.n_layers() + layer];
    const auto& heads = partition.heads(layer, rank);
    for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
      const std::int64_t held = cache.retained_rows(context, layer, h);
      const std::int64_t more = group.retained[heads[h]] - held;
      if (more == 0) continue;
      const auto positions = cache.positions(sequence, layer, h);
      const std::int64_t first = layout.context_tokens - cache.ring_rows(context, layer);
      for (std::int64_t i = 0; i < more; ++i) {
        if (positions.at(held + i) == first + i) continue;
        throw Error(fmt::format(
            "layer {}, head {}: row {} of the state to cut back to is gone, and other ranks do not "
            "have it in a ring",
            layer, heads[h], first + i));
      }
    }
  }
}

// Collective.
template <class Value, PageOrder order>
SnapshotLayout describe(const fs::path& file, KVCache<Value, order>& cache, SequenceId sequence,
                        const HeadPartition& partition, const Communicator& comm,
                        const SnapshotInfo& info, const SnapshotOptions& options,
                        const typename KVCache<Value, order>::Checkpoint* context) {
  RankExtents mine;
  agree_on_file(comm, file, [&] {
    mine = own_extents(cache, sequence, partition, comm, info, options, context);
  });
  const auto extents = comm.all_gather(mine.extents);
  const auto sums = comm.all_gather(mine.sums);
  const auto layers = comm.all_gather(mine.layers);
  SnapshotLayout layout;
  agree_on_file(comm, file, [&] {
    std::vector<RankExtents> all;
    for (int rank = 0; rank < comm.size(); ++rank) {
      all.push_back({extents[rank], sums[rank], layers[rank]});
    }
    layout = joined_layout(all, partition, comm.rank());
    layout.content = options.content;
    layout.compress = options.compress;
    layout.dtype = options.dtype.value_or(DTypeOf<Value>::value);
    if (context) check_context(cache, sequence, *context, partition, layout, comm.rank());
  });
  return layout;
}

// Rank 0's count. Collective.
SnapshotOptions common_options(const SnapshotOptions& options, const Communicator& comm) {
  std::int64_t numbers[] = {static_cast<std::int64_t>(options.content), options.compress,
                            options.dtype ? static_cast<std::int64_t>(*options.dtype) : -1};
  comm.broadcast(numbers, sizeof(numbers), 0);
  SnapshotOptions common;
  common.content = static_cast<SnapshotContent>(numbers[0]);
  common.compress = static_cast<int>(numbers[1]);
  if (numbers[2] >= 0) common.dtype = static_cast<DType>(numbers[2]);
  return common;
}

// The rows of one head that go into one group of the file; on devices brought to the host when they
// are asked for.
template <class Value, PageOrder order>
std::function<std::shared_ptr<const SnapshotHead>()> rows_of_head(
    KVCache<Value, order>& cache, SequenceId sequence,
    const typename KVCache<Value, order>::Checkpoint* context, const Writing& writing, int group,
    int head, int local_head) {
  const SnapshotLayout& layout = writing.layout();
  const bool is_of_context = layout.is_of_context(group);
  const int layer = group % layout.n_layers();
  const SnapshotGroup& of = layout.groups[group];
  const std::int64_t in_ring = std::min(
      (is_of_context ? layout.context_tokens : layout.tokens) - of.ring_first, layout.window);
  const std::int64_t rows = of.offsets[head + 1] - of.offsets[head];
  const DType dtype = layout.dtype;
  const float* queries = nullptr;
  const std::int64_t dim = layout.head_dim;
  if (const SnapshotQueries* all = writing.queries(layer); all && !is_of_context) {
    queries = all->values.data() + local_head * of.query_group * of.query_tokens * dim;
  }
  if constexpr (detail::runs_on_host) {
    auto raw = is_of_context ? cache.raw_rows(*context, layer, local_head)
                             : cache.raw_rows(sequence, layer, local_head);
    const std::int64_t skipped = raw.rows() - rows;
    auto made =
        std::make_shared<detail::RawHead<Value, order>>(std::move(raw), skipped, in_ring, dtype);
    made->set_queries(queries, dim);
    return [made] { return std::shared_ptr<const SnapshotHead>(made); };
  } else {
    return [=, &cache] {
      auto brought = is_of_context ? cache.host_rows(*context, layer, local_head)
                                   : cache.host_rows(sequence, layer, local_head);
      const std::int64_t skipped = static_cast<std::int64_t>(brought.positions.size()) - rows;
      auto made = std::make_shared<detail::CopiedHead<Value, order>>(std::move(brought), skipped,
                                                                     in_ring, dtype);
      made->set_queries(queries, dim);
      return std::shared_ptr<const SnapshotHead>(made);
    };
  }
}

}  // namespace

template <class Value, PageOrder order>
std::unique_ptr<SnapshotWriting> begin_snapshot(
    const fs::path& file, KVCache<Value, order>& cache, SequenceId sequence,
    const HeadPartition& partition, const Communicator& comm, const SnapshotInfo& info,
    const SnapshotOptions& options, const typename KVCache<Value, order>::Checkpoint* context) {
  const SnapshotOptions common = common_options(options, comm);
  SnapshotLayout layout = describe(file, cache, sequence, partition, comm, info, common, context);
  auto writing = std::make_unique<Writing>(file, comm, info, std::move(layout));
  writing->create(info);
  std::vector<HeadWork> works;
  agree_on_file(comm, file, [&] {
    const SnapshotLayout& made = writing->layout();
    for (int group = 0; group < static_cast<int>(made.groups.size()); ++group) {
      const auto& heads = partition.heads(group % made.n_layers(), comm.rank());
      for (int h = 0; h < static_cast<int>(heads.size()); ++h) {
        works.push_back({group,
                         heads[h],
                         rows_of_head(cache, sequence, context, *writing, group, heads[h], h),
                         {}});
      }
    }
  });
  if (common.compress > 0) {
    writing->compress_rows(std::move(works), partition);
  } else {
    writing->write_rows(std::move(works), detail::runs_on_host);
  }
  return writing;
}

template <class Value, PageOrder order>
std::vector<std::string> write_snapshot(const fs::path& file, KVCache<Value, order>& cache,
                                        SequenceId sequence, const HeadPartition& partition,
                                        const Communicator& comm, const SnapshotInfo& info,
                                        const SnapshotOptions& options) {
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

#define KVZAP_INSTANTIATE(Value, order)                                          \
  template std::unique_ptr<SnapshotWriting> begin_snapshot(                      \
      const fs::path&, KVCache<Value, order>&, SequenceId, const HeadPartition&, \
      const Communicator&, const SnapshotInfo&, const SnapshotOptions&,          \
      const KVCache<Value, order>::Checkpoint*);                                 \
  template std::vector<std::string> write_snapshot(                              \
      const fs::path&, KVCache<Value, order>&, SequenceId, const HeadPartition&, \
      const Communicator&, const SnapshotInfo&, const SnapshotOptions&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
