// Snapshots in a build without HDF5: every function reports that there are none.
#include <fmt/format.h>

#include <kvzap/engine/snapshot.hpp>

namespace kvzap {
namespace {

constexpr const char* no_hdf5 = "this kvzap was built without HDF5 (KVZAP_ENABLE_HDF5=OFF)";

[[noreturn]] void refuse(const std::filesystem::path& file) {
  throw AgreedError(fmt::format("snapshot {}: {}", file.string(), no_hdf5));
}

}  // namespace

std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file, KVCache&,
                                                SequenceId, const HeadPartition&,
                                                const Communicator&, const SnapshotInfo&,
                                                const SnapshotOptions&,
                                                const KVCache::Checkpoint*) {
  refuse(file);
}

std::vector<std::string> write_snapshot(const std::filesystem::path& file, KVCache&, SequenceId,
                                        const HeadPartition&, const Communicator&,
                                        const SnapshotInfo&, const SnapshotOptions&) {
  refuse(file);
}

std::vector<std::string> check_snapshot_writable(const std::filesystem::path& file,
                                                 const Communicator&) {
  refuse(file);
}

// There is no reader: none can be made.
struct SnapshotReader::Impl {
  SnapshotHeader header;
};
SnapshotReader::SnapshotReader(const std::filesystem::path& file) {
  throw Error(fmt::format("snapshot {}: {}", file.string(), no_hdf5));
}
SnapshotReader::~SnapshotReader() = default;
SnapshotReader::SnapshotReader(SnapshotReader&&) noexcept = default;
SnapshotReader& SnapshotReader::operator=(SnapshotReader&&) noexcept = default;
const std::filesystem::path& SnapshotReader::file() const { throw Error(no_hdf5); }
const SnapshotHeader& SnapshotReader::header() const { return m_impl->header; }
SnapshotRows SnapshotReader::rows(int, int, bool) const { throw Error(no_hdf5); }
std::vector<std::string> SnapshotReader::verify(const std::function<void(int, int)>&) const {
  throw Error(no_hdf5);
}

LoadedSnapshot load_snapshot(const SnapshotReader&, KVCache&, const HeadPartition&,
                             const Communicator&) {
  throw AgreedError(no_hdf5);
}

}  // namespace kvzap
