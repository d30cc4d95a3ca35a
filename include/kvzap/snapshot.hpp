// One sequence of a cache as an HDF5 file, for analysis by other programs. docs/snapshot-format.md
// describes the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/cache.hpp>
#include <kvzap/communicator.hpp>
#include <kvzap/config.hpp>
#include <kvzap/head_partition.hpp>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace kvzap {

/// Value of an attribute: text (UTF-8, no NUL), a double or an integer.
using SnapshotAttribute = std::variant<std::string, double, std::int64_t>;

/// What the cache itself does not know; becomes attributes of the file's root group.
struct SnapshotInfo {
  /// Name or folder of the model that filled the cache.
  std::string model;
  /// Name of the pruning method; "none" if every pair was kept.
  std::string prune = "none";
  /// Log score below which a pair was evicted, and the first positions that never were. Without
  /// meaning if nothing was pruned.
  float threshold = 0;
  std::int64_t sink = 0;
  /// Any further attributes, by name. A name that the format uses already is an error.
  std::map<std::string, SnapshotAttribute> further;
};

/// Whether this build can write snapshots (KVZAP_ENABLE_HDF5). If not, both functions below throw
/// AgreedError, which says so.
inline constexpr bool has_snapshots = KVZAP_HAVE_HDF5;

/// Writes all layers of one sequence to one HDF5 file. Collective: all ranks write their own heads'
/// rows together (MPI-IO), at most one head's rows in memory at a time. `file` and `info` of rank 0
/// count. A file that is there already is replaced in one step once the new one is complete; a
/// symbolic link is replaced, not followed.
///
/// Every rank throws AgreedError, naming the file, if the partition does not describe this cache,
/// if ranks or layers disagree on extents or on the number of tokens, or if anything cannot be
/// written; an older file is then still whole, and the unfinished one (FILE.tmp-…) is gone. (The
/// one exception is that the folder cannot be brought to the disk: the new file is then in its
/// place, but need not be after a power failure.)
///
/// A run that is killed while it writes leaves FILE.tmp-…, which takes the space of a whole
/// snapshot. The next one that writes or checks the same file removes it, unless its run may be
/// alive. Returns what there is to say of such files, a sentence for each, on rank 0; nothing on
/// other ranks.
template <class Value, PageOrder order>
std::vector<std::string> write_snapshot(const std::filesystem::path& file,
                                        KVCache<Value, order>& cache, SequenceId sequence,
                                        const HeadPartition& partition, const Communicator& comm,
                                        const SnapshotInfo& info);

/// Tries whether a snapshot can be created at `file` (rank 0's counts) and seen by all ranks, so
/// that a long run does not find out at its end. Leaves an existing file untouched and nothing
/// behind. Collective; every rank throws AgreedError, naming the file, if it cannot. Does not know
/// how much space the snapshot will need. Removes what killed runs left there, and returns what
/// there is to say of it, as write_snapshot does.
std::vector<std::string> check_snapshot_writable(const std::filesystem::path& file,
                                                 const Communicator& comm);

}  // namespace kvzap
