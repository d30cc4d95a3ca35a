// What each rank does of its own heads' rows: writes them to their places in the file, and reads
// them back.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "io/snapshot_layout.hpp"
#include "io/snapshot_rows.hpp"

namespace kvzap::detail {

/// What one rank does of one head.
struct HeadWork {
  int group = 0;
  int head = 0;  // of the model
  /// The rows, for as long as they are held.
  std::function<std::shared_ptr<const SnapshotHead>()> rows;
  /// (kind of the group), once they are written.
  std::vector<std::uint32_t> crcs;
};

/// Takes room for so many bytes of a new file, or sees whether there is. Throws Error if not.
void make_room(int descriptor, std::int64_t bytes);

/// Room for the rows of one piece, aligned for elements of any type.
std::vector<std::max_align_t> piece_buffer(const SnapshotLayout& layout);

/// Calls work(first row, rows) for rows that fit the buffer, piece by piece.
void each_piece(const SnapshotLayout& layout, int group, RowKind kind, int head,
                const std::function<void(std::int64_t first, std::int64_t rows)>& work);

/// Writes rows to where `places` (SnapshotStructure::places) has them, and notes their checksums.
/// Touches neither Kokkos nor MPI nor HDF5, as the next one. Throws Error, also if `stop` is set.
void write_heads(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                 std::vector<HeadWork>& works, int descriptor, const std::atomic<bool>& stop);

/// Reads them again. Throws Error, naming data set and head, if they have other checksums.
void check_heads(const SnapshotLayout& layout, const std::vector<std::int64_t>& places,
                 const std::vector<HeadWork>& works, int descriptor, const std::atomic<bool>& stop);

/// The same of everything but uncompressed rows: the seal and what it covers, compressed chunks.
void check_rest(int descriptor);

/// fsync. Throws Error.
void bring_to_disk(int descriptor);

}  // namespace kvzap::detail
