// Keeps a file of pairs intact if the writing process dies at any moment.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace kvzap::train {

/// FILE.recovery: the start of FILE, with everything that HDF5 changes in place, as of the last
/// finished text. Later writes change only this part or append to the file, so restoring the image
/// undoes them. Renaming replaces the image and thereby marks texts as finished. One process uses
/// it. The functions throw Error.
class PairsRecovery {
 public:
  explicit PairsRecovery(const std::filesystem::path& pairs_file);

  /// Saves bytes 0 … changing - 1 of `source`: the pairs file, or the file that will be renamed to
  /// it. Bytes changing … fixed - 1 never change; they identify the file to which the image
  /// belongs.
  void save(const std::filesystem::path& source, std::int64_t changing, std::int64_t fixed);
  /// Restores the image, if there is one, and returns whether there was one. Throws Error and
  /// leaves the pairs file unchanged if the image is damaged, belongs to another file or is longer
  /// than the pairs file.
  bool restore() const;
  /// Removes the image, unless it is damaged or belongs to another file.
  void remove() const;

 private:
  struct Image;
  /// Returns nothing if there is no image. Throws Error if it is damaged.
  std::optional<Image> read() const;
  bool belongs(const Image& image, int pairs_descriptor) const;

  std::filesystem::path m_pairs_file;
  std::filesystem::path m_path;
  std::uint64_t m_fixed_hash = 0;
  bool m_is_hashed = false;
};

/// Removes the lock files FILE-NUMBER-NUMBER.lock that Open MPI leaves beside a file if ranks on
/// several nodes are killed. Call it while no other process has the file open. Ignores errors.
void remove_mpi_locks(const std::filesystem::path& file);

/// A writer's lock on a pairs file. The destructor or the end of the process releases it.
class PairsClaim {
 public:
  /// Throws Error if another process has the lock. Has no effect on file systems without locks.
  explicit PairsClaim(const std::filesystem::path& file);
  ~PairsClaim();
  PairsClaim(const PairsClaim&) = delete;
  PairsClaim& operator=(const PairsClaim&) = delete;

 private:
  int m_descriptor;
};

}  // namespace kvzap::train
