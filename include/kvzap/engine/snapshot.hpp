// Writes one sequence of a cache to an HDF5 file and reads it back, on any number of ranks. A run
// can resume from the file, and other programs can analyse it. docs/reference/snapshot-format.md
// describes the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/config.hpp>
#include <kvzap/core/cache.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/head_partition.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace kvzap {

/// Value of an attribute: text (UTF-8, no NUL), a double or an integer.
using SnapshotAttribute = std::variant<std::string, double, std::int64_t>;

/// The parts of each row in a snapshot: its position; position and score; or everything, with key
/// and value. A run can resume only from the last.
enum class SnapshotContent { positions, scores, all };
/// Returns "positions", "scores" or "all".
std::string_view name_of(SnapshotContent content);
/// Parses such a name. Throws Error for any other name.
SnapshotContent snapshot_content_from_name(const std::string& name);

/// How a snapshot is written.
struct SnapshotOptions {
  SnapshotContent content = SnapshotContent::all;
  /// Level of HDF5's deflate filter, 1 to 9, after its shuffle filter, for all rows; 0: no
  /// compression.
  int compress = 0;
  /// Type of keys and values in the file; absent: that of the cache, so quantised rows stay
  /// quantised.
  std::optional<DType> dtype;
};

/// A layer's newest queries, on the host, for a policy that needs them (RecentQueries).
struct SnapshotQueries {
  std::int64_t first = 0;  // position of the first token
  std::int64_t tokens = 0;
  std::vector<float> values;  // (query head on this rank, token, head_dim)
};

/// Facts about the run that the cache does not have.
struct SnapshotInfo {
  /// Name or folder of the model that filled the cache.
  std::string model;
  /// Hashes of the model's and the tokenizer's files; empty: unknown.
  std::string model_hash;
  std::string tokenizer_hash;
  /// Version of the program.
  std::string kvzap_version;
  /// ISO 8601, UTC. Empty: the time of writing, or that of SOURCE_DATE_EPOCH.
  std::string created;
  /// Name of the pruning method; "none" if every pair was kept.
  std::string prune = "none";
  /// Log score below which pairs were evicted, and the number of first positions that are never
  /// evicted. Without meaning if nothing was pruned.
  float threshold = 0;
  std::int64_t sink = 0;
  /// JSON objects: the options of the run, and further state of the program. May be empty.
  std::string options;
  std::string run_state;
  /// Ids of all tokens that the run was given or generated: the whole context, run or not yet, then
  /// question and answer. May be empty (unknown).
  std::vector<TokenId> token_ids;
  /// Number of token_ids that belong to the context.
  std::int64_t context_tokens = 0;
  /// (vocab_size): logits after the last token of the context; may be empty. Rank 0's value counts.
  std::vector<float> logits;
  /// Integers of the engine and the generator, by name; attributes of the group /state.
  std::map<std::string, std::int64_t> state;
  /// (layer); empty if no policy stores any.
  std::vector<SnapshotQueries> recent_queries;
  /// Further attributes, by name. A name that the format defines is an error.
  std::map<std::string, SnapshotAttribute> further;
};

/// Whether this build can write and read snapshots (KVZAP_ENABLE_HDF5). Otherwise the functions
/// below throw: AgreedError if collective, Error if for one process.
inline constexpr bool has_snapshots = KVZAP_HAVE_HDF5;

/// A snapshot that is being written. Its sequence must not change until it is finished; to continue
/// the sequence, fork it. Other sequences may change.
class SnapshotWriting {
 public:
  SnapshotWriting() = default;
  SnapshotWriting(const SnapshotWriting&) = delete;
  SnapshotWriting& operator=(const SnapshotWriting&) = delete;
  /// If the snapshot is not finished: waits for writes in progress and removes the unfinished file.
  virtual ~SnapshotWriting() = default;

  /// Begins the next stage if all ranks have completed this one. Does not wait for writes. Returns
  /// whether the file is complete. Collective and cheap: call it after each step. Throws
  /// AgreedError as finish does.
  virtual bool advance() = 0;
  /// Waits until the file is complete. Collective. Every rank throws AgreedError, naming the file,
  /// if a write fails or the file reads back differently. An older file is then still intact.
  virtual void finish() = 0;
  /// Returns the bytes of the file; 0 until it is finished.
  virtual std::int64_t file_bytes() const = 0;
  /// Returns sentences about files that killed runs left behind: see write_snapshot.
  virtual const std::vector<std::string>& notes() const = 0;
};

/// Begins to write all layers of one sequence to one HDF5 file. On host backends, a thread of each
/// rank writes rows while the caller continues. On devices, this function returns once the rows are
/// on the host. If `context` is given it is written, too: the state to which a resumed run can cut
/// the sequence back. Collective. Rank 0's `file`, `info` (except recent_queries) and `options`
/// count. Throws as write_snapshot does.
std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file, KVCache& cache,
                                                SequenceId sequence, const HeadPartition& partition,
                                                const Communicator& comm, const SnapshotInfo& info,
                                                const SnapshotOptions& options = {},
                                                const KVCache::Checkpoint* context = nullptr);

/// Calls begin_snapshot and finish. Each rank writes its own heads' rows. Beside the cache it needs
/// memory for the rows of at most one layer. An existing file is replaced in one step, once the new
/// one is complete, reads back unchanged, and is on the disk. If `file` is a symbolic link, its
/// target is replaced and the link stays.
///
/// Every rank throws AgreedError, naming the file, if a write fails, or if the partition does not
/// describe this cache. It is also thrown if ranks or layers disagree on extents or on the number
/// of tokens. An older file is then still intact, and the unfinished one (FILE.tmp-…) is removed.
/// One exception: if the folder cannot be written to the disk, the new file is in place but may not
/// survive a power failure.
///
/// A run that is killed while it writes leaves FILE.tmp-…, as large as a snapshot. The next run
/// that writes or checks the same file removes it, unless the first run may still be alive. Returns
/// a sentence about each such file on rank 0, and nothing on other ranks.
std::vector<std::string> write_snapshot(const std::filesystem::path& file, KVCache& cache,
                                        SequenceId sequence, const HeadPartition& partition,
                                        const Communicator& comm, const SnapshotInfo& info,
                                        const SnapshotOptions& options = {});

/// Tests whether a snapshot can be created at `file` (rank 0's value counts) and opened by all
/// ranks. Call it before a long run. Leaves an existing file unchanged and no new one behind. Does
/// not test the free space. Removes files that killed runs left behind, and returns sentences about
/// them as write_snapshot does. Collective; every rank throws AgreedError, naming the file, if the
/// test fails.
std::vector<std::string> check_snapshot_writable(const std::filesystem::path& file,
                                                 const Communicator& comm);

/// The contents of a snapshot except its rows.
struct SnapshotHeader {
  std::int64_t format_version = 0;
  SnapshotContent content = SnapshotContent::all;
  int compress = 0;
  DType dtype = DType::f32;
  /// How rows before the ring are stored; if wide, with `dtype` as those of the ring.
  PageFormat format;
  std::int64_t n_layers = 0, n_kv_heads = 0, head_dim = 0;
  std::int64_t window = 0, page_rows = 0;
  /// Tokens of the sequence, as KVCache::tokens counts them.
  std::int64_t tokens = 0;
  std::vector<std::int64_t> ring_first;  // (layer)
  std::vector<std::int64_t> own_rings;   // (layer), rows; 0: it has pages (OwnRing)
  // (layer): values of a key in a row of the file. Layers with windows may have several KV heads
  // for one of the file, whose keys follow one another.
  std::vector<std::int64_t> row_dims;
  // (layer): heads of its state, and values of each; values 0: the layer has rows (StateShape)
  std::vector<std::int64_t> state_heads, state_values;
  std::vector<std::vector<std::int64_t>> offsets;  // (layer, KV head + 1), rows
  SnapshotInfo info;                               // without recent_queries
  AppendCounts counts;                             // of the sequence, summed over ranks
  bool has_recent_queries = false;
  // a state to which the sequence can be cut back: begin_snapshot's `context`
  bool has_context = false;
  std::int64_t file_bytes = 0;
};

/// Rows of one head on the host, in order of position. Parts that the file does not have are empty.
struct SnapshotRows {
  std::vector<std::int64_t> positions;
  std::vector<float> scores;  // NaN: no score
  // 0: one of the newest rows, which the policy has not judged yet
  std::vector<std::uint8_t> judged;
  std::vector<float> keys, values;  // (row, head_dim), converted or unpacked
};

/// Reads a snapshot in one process. Checks every size and offset in the file against the others and
/// the file's length before use.
class SnapshotReader {
 public:
  /// Opens a file. First checks the file's seal, which covers everything but rows. Throws Error
  /// ("snapshot FILE: …", with expected and found) if the file is no snapshot, of another format
  /// version, or damaged.
  explicit SnapshotReader(const std::filesystem::path& file);
  ~SnapshotReader();
  SnapshotReader(SnapshotReader&&) noexcept;
  SnapshotReader& operator=(SnapshotReader&&) noexcept;

  const std::filesystem::path& file() const;
  const SnapshotHeader& header() const;
  /// Reads the rows of one head of the model; keys and values only if `with_values`. Throws Error,
  /// naming layer, head and data set, if they cannot be read or a checksum differs.
  SnapshotRows rows(int layer, int head, bool with_values) const;
  /// Reads everything and checks all checksums. Returns a sentence for each part that is damaged or
  /// cannot be read. Returns nothing if the file is intact.
  std::vector<std::string> verify(
      const std::function<void(int layer, int layers)>& progress = {}) const;

  struct Impl;
  const Impl& impl() const { return *m_impl; }

 private:
  std::unique_ptr<Impl> m_impl;
};

/// The result of load_snapshot.
struct LoadedSnapshot {
  SequenceId sequence = -1;
  /// The state to which the sequence can be cut back, if the file has one.
  std::optional<KVCache::Checkpoint> context;
  /// (layer), for this rank's heads; empty if the file has none.
  std::vector<SnapshotQueries> recent_queries;
};

/// Adds a sequence to the cache and fills it from the file. Every rank reads the rows of its own
/// heads, at most one layer's at a time, and checks their checksums. Keys and values are rounded to
/// its type if the file has another. Quantised rows stay as they are if the cache has their format;
/// else they are unpacked, and quantised again as the cache packs rows. Page size and number of
/// ranks may differ from those of the writer; the window must be the file's.
///
/// Collective; every rank passes its own reader of the same file. Every rank throws AgreedError
/// ("snapshot FILE: …"; AgreedOutOfMemory without memory) if the file has no keys and values, if
/// its extents differ from the cache's, or if it cannot be read or is damaged. The cache then has
/// no new sequence.
LoadedSnapshot load_snapshot(const SnapshotReader& reader, KVCache& cache,
                             const HeadPartition& partition, const Communicator& comm);

}  // namespace kvzap
