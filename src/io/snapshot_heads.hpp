// Each rank writes the rows of its own heads to their places in the file, and reads them back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "io/snapshot_layout.hpp"
#include "io/snapshot_rows.hpp"

namespace kvzap::io {

/// The work of one rank on one head.
struct HeadWork {
  int group = 0;
  int head = 0;  // of the model
  /// Returns the rows. They exist while the result is held.
  std::function<std::shared_ptr<const SnapshotHead>()> rows;
  /// (kind of the group), set once the rows are written.
  std::vector<std::uint32_t> crcs;
};
/// What rank 0 needs of it.
template <class Visit>
void list_fields(HeadWork& work, Visit& visit) {
  visit("group", work.group);
  visit("head", work.head);
  visit("crcs", work.crcs);
}

/// Allocates this many bytes of a new file, or tests whether they are free. Throws Error if not.
void make_room(int descriptor, std::int64_t bytes);

/// Returns a buffer for the rows of one piece, aligned for elements of any type.
std::vector<std::max_align_t> piece_buffer(const SnapshotLayout& layout);

/// Calls work(first row, rows) for runs of rows that fit the buffer.
void each_piece(const SnapshotLayout& layout, int group, RowKind kind, int head,
                const std::function<void(std::int64_t first, std::int64_t rows)>& work);

/// Writes rows to the places in `places` (SnapshotStructure::places), and records their checksums.
/// Throws Error, also if `stop` is set. Neither this function nor check_heads uses Kokkos, MPI or
/// HDF5.
void write_heads(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                 std::vector<HeadWork>& works, int descriptor, const std::atomic<bool>& stop);

/// Reads the rows again. Throws Error that names data set and head if their checksums differ.
void check_heads(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                 const std::vector<HeadWork>& works, int descriptor, const std::atomic<bool>& stop);

/// Checks everything but uncompressed rows: the seal, the bytes that it covers, and compressed
/// chunks.
void check_rest(int descriptor);

}  // namespace kvzap::io
