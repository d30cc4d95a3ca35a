// The HDF5 part of a snapshot. Rank 0 alone makes it in memory: HDF5 never accesses the file on the
// disk. HDF5 cannot recover from a failed write, and its parallel drivers depend on MPI-IO, some
// components of which hang or write wrong bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/container.hpp"
#include "io/memory_file.hpp"
#include "io/seal.hpp"
#include "io/snapshot_layout.hpp"

namespace kvzap::io {

/// Returns the largest possible size of the file in bytes, without compression, to check for space
/// in advance.
std::int64_t snapshot_bytes_at_most(const SnapshotLayout& layout, const SnapshotInfo& info);

/// The type of a row's numbers in the file, and its name in errors.
struct RowElement {
  Hdf5Handle type;
  std::string name;
};
/// `dtype` is that of keys and values.
RowElement element_of_rows(RowKind kind, DType dtype);

/// Everything but rows. Every function may throw Error.
class SnapshotStructure {
 public:
  /// Creates all groups, attributes and data sets. Rows get a place in the file, but no content.
  SnapshotStructure(const SnapshotLayout& layout, const SnapshotInfo& info);

  /// Returns the byte of the file at which rows of group g and kind k begin: element g *
  /// n_row_kinds + k. It is -1 if there are no such rows, or if they are compressed.
  const std::vector<std::int64_t>& places() const { return m_places; }

  /// Adds rows to a compressed data set. Each data set must get its rows in order.
  void write_rows(int group, RowKind kind, std::int64_t first, std::int64_t rows, const void* data);
  /// Moves the compressed rows of a whole group from memory to their place in the file.
  void move_rows(int group, int descriptor);

  /// crcs: (kind of the group, KV head).
  void set_checksums(int group, const std::vector<std::uint32_t>& crcs);
  /// Writes everything but rows, followed by the seal, and truncates the file there. Returns the
  /// file's bytes.
  std::int64_t write(int descriptor);

 private:
  void make_group(int group);
  void make_rows(int group, RowKind kind);
  hid_t open_rows(int group, RowKind kind);
  void close();

  const SnapshotLayout& m_layout;
  MemoryFile m_memory;
  Hdf5Handle m_file;
  int m_open_group = -1;
  std::map<RowKind, Hdf5Handle> m_open;
  std::vector<std::int64_t> m_places;
  std::vector<std::int64_t> m_checksum_places;  // (group)
  std::vector<SealedExtent> m_extents;
};

}  // namespace kvzap::io
