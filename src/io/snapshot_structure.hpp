// The HDF5 part of a snapshot, made in memory by rank 0 alone: HDF5 never sees the file on the
// disk. It cannot recover from a write that fails, and its parallel drivers rest on MPI-IO, some of
// whose components hang or write wrong bytes.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "io/hdf5_objects.hpp"
#include "io/memory_file.hpp"
#include "io/seal.hpp"
#include "io/snapshot_layout.hpp"

namespace kvzap::detail {

/// Bytes that the file will have at most, without compression: to see ahead whether there is room.
std::int64_t snapshot_bytes_at_most(const SnapshotLayout& layout, const SnapshotInfo& info);

/// Type of a row's numbers in the file. `dtype` is that of keys and values.
Hdf5Handle type_of_rows(RowKind kind, DType dtype);

/// Everything but rows. Any function throws Error.
class SnapshotStructure {
 public:
  /// All groups, attributes and data sets; rows have a place in the file, but no content.
  SnapshotStructure(const SnapshotLayout& layout, const SnapshotInfo& info);

  /// Byte of the file at which rows of group g and kind k begin: element g * n_row_kinds + k; -1:
  /// nowhere, as there are none, or they are compressed.
  const std::vector<std::int64_t>& places() const { return m_places; }

  /// Of compressed rows: takes them in; each data set's from its first to its last.
  void write_rows(int group, RowKind kind, std::int64_t first, std::int64_t rows, const void* data);
  /// Moves what was compressed of a whole group from memory to where it belongs in the file.
  void move_rows(int group, int descriptor);

  /// crcs: (kind of the group, KV head).
  void set_checksums(int group, const std::vector<std::uint32_t>& crcs);
  /// Writes everything but rows, and the seal behind it, and cuts the file off there. Returns the
  /// file's bytes.
  std::int64_t write(int descriptor);

 private:
  void make_group(int group);
  void make_rows(hid_t parent, int group, RowKind kind);
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

}  // namespace kvzap::detail
