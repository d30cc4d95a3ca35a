// Combines the parts of a sequence on all ranks.
#pragma once

#include <filesystem>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/snapshot.hpp>

#include "io/snapshot_layout.hpp"

namespace kvzap::io {

/// Returns the heads of a layer of the cache that are one KV head of the partition, and of files.
int parts_of_head(const CacheShape& shape, const HeadPartition& partition, int layer, int rank);

/// Returns the layout of the file for this sequence. `context` may be null. Collective; throws
/// AgreedError that names `file` in the cases that begin_snapshot refuses.
SnapshotLayout describe_snapshot(const std::filesystem::path& file, KVCache& cache,
                                 SequenceId sequence, const HeadPartition& partition,
                                 const Communicator& comm, const SnapshotInfo& info,
                                 const SnapshotOptions& options,
                                 const KVCache::Checkpoint* context);

}  // namespace kvzap::io
