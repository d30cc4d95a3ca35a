#include "io/snapshot_heads.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <cerrno>

#include "files/crc32c.hpp"
#include "files/fully.hpp"
#include "files/temporary_file.hpp"
#include "io/container.hpp"
#include "io/hdf5_file.hpp"
#include "io/memory_file.hpp"
#include "io/seal.hpp"

namespace kvzap::io {
namespace {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rows go into the file as they lie in memory, which is little-endian"
#endif

// Rows are collected in a buffer that stays in the processor's cache. Their checksum is computed
// there, and the system copies them from there.
constexpr std::int64_t piece_bytes = std::int64_t{256} << 10;

// After this many written bytes, the disk is told to start. Short runs wait until the end, because
// their pages may be written again.
constexpr std::int64_t flushed_bytes = std::int64_t{8} << 20;
constexpr std::int64_t least_flushed_bytes = std::int64_t{1} << 20;

// Returns whether the file system is in memory. There, allocating space writes it, so everything
// would be written twice.
bool is_in_memory([[maybe_unused]] int descriptor) {
#ifdef __linux__
  struct statfs system = {};
  if (::fstatfs(descriptor, &system) != 0) return false;
  return system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
#else
  return false;
#endif
}

/// Tells the disk to start with the written bytes, without waiting: an error shows in fsync.
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
    if (m_end - m_begin >= least_flushed_bytes) {
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

std::int64_t place_of(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                      int group, RowKind kind, int head) {
  return places[static_cast<std::size_t>(group) * n_row_kinds + static_cast<std::size_t>(kind)] +
         layout.first_row(group, kind, head) * layout.row_bytes(group, kind);
}

/// Thrown if the write was cancelled.
class Stopped : public Error {
 public:
  Stopped() : Error("given up") {}
};

}  // namespace

// Detects a lack of space early. The disk may still fill up later; then writing throws.
void make_room(int descriptor, std::int64_t bytes) {
  if (!is_in_memory(descriptor)) return reserve(descriptor, 0, bytes);
  struct statvfs status = {};
  int code = 0;
  if (::fstatvfs(descriptor, &status) == 0 &&
      static_cast<std::int64_t>(status.f_bavail) <
          bytes / static_cast<std::int64_t>(status.f_frsize)) {
    code = ENOSPC;
  } else if (::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    code = errno;
  }
  if (code != 0) throw files::system_error(fmt::format("no room for {} bytes", bytes), code);
}

std::vector<std::max_align_t> piece_buffer(const SnapshotLayout& layout) {
  std::int64_t bytes = piece_bytes;
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    bytes = std::max(bytes, layout.row_bytes(group, RowKind::keys));
    bytes = std::max(bytes, layout.groups[group].query_tokens *
                                layout.row_bytes(group, RowKind::recent_queries));
  }
  return std::vector<std::max_align_t>(static_cast<std::size_t>(bytes) / sizeof(std::max_align_t) +
                                       1);
}

void each_piece(const SnapshotLayout& layout, int group, RowKind kind, int head,
                const std::function<void(std::int64_t first, std::int64_t rows)>& work) {
  const std::int64_t rows = layout.rows(group, kind, head);
  std::int64_t most = std::max<std::int64_t>(1, piece_bytes / layout.row_bytes(group, kind));
  if (kind == RowKind::recent_queries && rows > 0) {
    // Whole query heads, because a compressed data set accepts no part of one.
    const std::int64_t tokens = layout.groups[group].query_tokens;
    most = std::max<std::int64_t>(most / tokens, 1) * tokens;
  }
  for (std::int64_t first = 0; first < rows; first += most) {
    work(first, std::min(most, rows - first));
  }
}

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
        const std::int64_t length = count * layout.row_bytes(work.group, kind);
        crc = files::crc32c(bytes, static_cast<std::size_t>(length), crc);
        const std::int64_t begin = place + first * layout.row_bytes(work.group, kind);
        files::write_fully(descriptor, bytes, length, begin);
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
        const std::int64_t length = count * layout.row_bytes(work.group, kind);
        files::read_fully(descriptor, bytes, length,
                          place + first * layout.row_bytes(work.group, kind));
        crc = files::crc32c(bytes, static_cast<std::size_t>(length), crc);
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

void check_rest(int descriptor) {
  const auto seal = read_seal(descriptor);
  if (!seal) throw Error("reads differently from what was written: the seal is missing");
  about("reads differently from what was written", [&] {
    for (const SealedExtent& extent : seal->extents) check_extent(descriptor, extent);
  });
}

}  // namespace kvzap::io
