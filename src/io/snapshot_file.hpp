// An existing snapshot file. Opening it reads and checks everything but the rows. Rows are read on
// demand, as bytes.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/engine/snapshot.hpp>
#include <optional>
#include <string>
#include <vector>

#include "files/temporary_file.hpp"
#include "io/container.hpp"
#include "io/seal.hpp"
#include "io/snapshot_layout.hpp"

namespace kvzap::io {

/// Reads one snapshot file. The messages of its errors do not name the file.
class SnapshotFile {
 public:
  /// Reads everything but rows, and checks every size and offset before use. Throws Error.
  explicit SnapshotFile(const std::filesystem::path& file);

  const SnapshotHeader& header() const { return m_header; }
  /// Its groups are the layers, then the layers of the context.
  const SnapshotLayout& layout() const { return m_layout; }
  /// Differs between any two files, and between two states of one file.
  std::uint32_t fingerprint() const { return m_seal.crc; }

  bool has(int group, RowKind kind) const { return set_of(group, kind).there; }
  /// Bytes of a row in this file. SnapshotLayout defines the rows of each kind.
  std::int64_t row_bytes(int group, RowKind kind) const { return set_of(group, kind).row_bytes; }
  /// Offset of the first row in the file; negative if the rows are in chunks.
  std::int64_t place(int group, RowKind kind) const { return set_of(group, kind).place; }
  int descriptor() const { return m_descriptor.get(); }

  /// Reads rows begin … begin + count - 1 of a head, and checks checksums of compressed chunks.
  void read(int group, RowKind kind, int head, std::int64_t begin, std::int64_t count,
            void* target) const;
  /// Reads all rows of a head into `buffer`, at most `bytes_at_once` bytes at a time. Calls
  /// take(begin, count, bytes) with rows begin … begin + count - 1. After the last call, throws
  /// Error if the checksum of all rows differs.
  using Take = std::function<void(std::int64_t begin, std::int64_t count, const char* bytes)>;
  void read_head(int group, RowKind kind, int head, std::int64_t bytes_at_once,
                 std::vector<char>& buffer, const Take& take) const;
  /// Throws Error if the file's checksum of a head's rows differs from `found`.
  void check_crc(int group, RowKind kind, int head, std::uint32_t found) const;
  /// Returns the positions of a head. Throws Error if they contradict the layer's extents.
  std::vector<std::int32_t> positions(int group, int head, std::vector<char>& buffer) const;
  /// Returns "layer 3, head 1" or "context, layer 3, head 1".
  std::string name_of_head(int group, int head) const;

  /// Checks the seal, the bytes that it covers, and the compressed chunks. Calls tell(sentence) for
  /// each damage.
  void check_sealed(const std::function<void(const std::string&)>& tell) const;

 private:
  struct Chunk {
    std::int64_t first = 0;  // its first index along the first extent
    SealedExtent extent;
    bool is_deflated = false, is_shuffled = false;
  };
  struct RowSet {
    bool there = false;
    std::int64_t row_bytes = 0;
    std::int64_t place = -1;
    std::vector<std::int64_t> extents;
    // If compressed: the chunks in order of `first`, and the inflated size of each.
    std::int64_t element_bytes = 0;
    std::int64_t chunk_extent = 0;  // along the first extent
    std::int64_t chunk_bytes = 0;
    std::vector<Chunk> chunks;
  };

  const RowSet& set_of(int group, RowKind kind) const {
    return m_sets[static_cast<std::size_t>(group)][static_cast<std::size_t>(kind)];
  }
  void read_header();
  void read_format(const std::string& kv_type);
  void read_run();
  // Reads the layers under `parent`: "" or "/context".
  void read_groups(const std::string& parent);
  void read_group(const std::string& path, int group);
  void read_checksums(const std::string& path, int group);
  RowSet open_rows(const std::string& path, int group, RowKind kind);
  void find_chunks(RowSet& set, const OpenSet& open, const std::string& path) const;
  void check_coverage() const;
  void read_chunk(const Chunk& chunk, std::vector<char>& stored) const;
  const std::vector<char>& inflated(const RowSet& set, const Chunk& chunk) const;

  files::FileDescriptor m_descriptor;
  Seal m_seal;
  std::int64_t m_bytes = 0;  // before the seal
  SnapshotHeader m_header;
  SnapshotLayout m_layout;
  Hdf5Handle m_file;                                    // open while the header is read
  std::vector<std::array<RowSet, n_row_kinds>> m_sets;  // (group)
  std::vector<std::array<std::vector<std::uint32_t>, n_row_kinds>> m_crcs;  // (group): (head)
  // The chunk of the last read, because the next rows are usually in it, and buffers for a chunk.
  mutable const Chunk* m_inflated_of = nullptr;
  mutable std::vector<char> m_inflated, m_stored, m_shuffled;
};

}  // namespace kvzap::io
