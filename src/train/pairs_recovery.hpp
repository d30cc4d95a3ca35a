// What keeps a file of pairs whole when the process that writes it ends at any moment.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace kvzap::detail {

/// FILE.recovery: the beginning of FILE, where everything lies that HDF5 changes in place, as it
/// was when the last text was finished. All that is written later is either there or behind what
/// was the end of the file then, so that putting it back undoes whatever HDF5 had begun. It is
/// replaced as a whole: the moment of its renaming is the moment at which texts count as finished.
/// Used by one process alone; functions throw Error.
class PairsRecovery {
 public:
  explicit PairsRecovery(const std::filesystem::path& pairs_file);

  /// Keeps bytes 0 … changing - 1 of `source`: the pairs file, or what will be renamed to it. Bytes
  /// changing … fixed - 1, which never change, tell later whether file and image belong together.
  void save(const std::filesystem::path& source, std::int64_t changing, std::int64_t fixed);
  /// Puts the image back, if there is one; returns whether there was. Throws Error, with the pairs
  /// file left as it is, if the image is damaged, of another file or of more than there is of this
  /// one.
  bool restore() const;
  /// Removes the image, unless it is damaged or of another file.
  void remove() const;

 private:
  struct Image;
  /// Throws Error if it is damaged. Absent: no such file.
  std::optional<Image> read() const;
  bool belongs(const Image& image, int pairs_descriptor) const;

  std::filesystem::path m_pairs_file;
  std::filesystem::path m_path;
  std::uint64_t m_fixed_hash = 0;
  bool m_is_hashed = false;
};

/// A writer's claim on a pairs file, for as long as it lives; it ends with the process at the
/// latest.
class PairsClaim {
 public:
  /// Throws Error if another process has the claim. Where the file system has no such locks,
  /// nothing is claimed.
  explicit PairsClaim(const std::filesystem::path& file);
  ~PairsClaim();
  PairsClaim(const PairsClaim&) = delete;
  PairsClaim& operator=(const PairsClaim&) = delete;

 private:
  int m_descriptor;
};

}  // namespace kvzap::detail
