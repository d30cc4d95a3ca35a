// Snapshots of a build without HDF5: there are none, and one says so.
#include <fmt/format.h>

#include <kvzap/snapshot.hpp>

#include "base/instantiate.hpp"

namespace kvzap {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& file) {
  throw AgreedError(fmt::format(
      "snapshot {}: this kvzap was built without HDF5 (KVZAP_ENABLE_HDF5=OFF)", file.string()));
}

}  // namespace

template <class Value, PageOrder order>
std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                KVCache<Value, order>&, SequenceId,
                                                const HeadPartition&, const Communicator&,
                                                const SnapshotInfo&, const SnapshotOptions&,
                                                const typename KVCache<Value, order>::Checkpoint*) {
  refuse(file);
}

template <class Value, PageOrder order>
std::vector<std::string> write_snapshot(const std::filesystem::path& file, KVCache<Value, order>&,
                                        SequenceId, const HeadPartition&, const Communicator&,
                                        const SnapshotInfo&, const SnapshotOptions&) {
  refuse(file);
}

std::vector<std::string> check_snapshot_writable(const std::filesystem::path& file,
                                                 const Communicator&) {
  refuse(file);
}

#define KVZAP_INSTANTIATE(Value, order)                                                       \
  template std::unique_ptr<SnapshotWriting> begin_snapshot(                                   \
      const std::filesystem::path&, KVCache<Value, order>&, SequenceId, const HeadPartition&, \
      const Communicator&, const SnapshotInfo&, const SnapshotOptions&,                       \
      const KVCache<Value, order>::Checkpoint*);                                              \
  template std::vector<std::string> write_snapshot(                                           \
      const std::filesystem::path&, KVCache<Value, order>&, SequenceId, const HeadPartition&, \
      const Communicator&, const SnapshotInfo&, const SnapshotOptions&);
KVZAP_FOR_EACH_CACHE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE

}  // namespace kvzap
