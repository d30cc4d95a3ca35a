// One sequence of a cache as an HDF5 file: kept, moved to other ranks, gone on with, and analysed
// by other programs. docs/reference/snapshot-format.md describes the file.
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

/// What a snapshot has of each row: where it is; also its score; also key and value. Only from the
/// last can a run go on.
enum class SnapshotContent { positions, scores, all };
/// "positions", "scores" or "all".
std::string_view name_of(SnapshotContent content);
/// Throws Error for another name.
SnapshotContent snapshot_content_from_name(const std::string& name);

/// How a snapshot is written.
struct SnapshotOptions {
  SnapshotContent content = SnapshotContent::all;
  /// HDF5's shuffle and deflate filters at this level, 1 to 9, for all rows; 0: as they are.
  int compress = 0;
  /// Type of keys and values in the file; absent: the cache's.
  std::optional<DType> dtype;
};

/// Newest queries of a layer that a policy will want (RecentQueries), on the host.
struct SnapshotQueries {
  /// Position of the first one; (query head on this rank, token, head_dim).
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  std::vector<float> values;
};

/// What the cache itself does not know.
struct SnapshotInfo {
  /// Name or folder of the model that filled the cache.
  std::string model;
  /// Tell models and tokenizers apart; empty: not known.
  std::string model_hash;
  std::string tokenizer_hash;
  /// Version of the program.
  std::string kvzap_version;
  /// ISO 8601, UTC. Empty: the time of writing, or that of SOURCE_DATE_EPOCH.
  std::string created;
  /// Name of the pruning method; "none" if every pair was kept.
  std::string prune = "none";
  /// Log score below which a pair was evicted, and the first positions that never were. Without
  /// meaning if nothing was pruned.
  float threshold = 0;
  std::int64_t sink = 0;
  /// JSON objects: the options of the run, and what else the program wants to find again. May be
  /// empty. Any length.
  std::string options;
  std::string run_state;
  /// Ids of all tokens that the run has been given or has made: the context, whole, also what of it
  /// is still to be run, then question and generated tokens. May be empty (not known).
  std::vector<TokenId> token_ids;
  /// How many of them are the context's; the rest was made of a question and an answer.
  std::int64_t context_tokens = 0;
  /// (vocab_size): after the last token of the context; may be empty. Rank 0's counts.
  std::vector<float> logits;
  /// Small integers of who drives the cache (engine, generator), by name; attributes of the group
  /// /state.
  std::map<std::string, std::int64_t> state;
  /// Of each layer; empty if no policy keeps any.
  std::vector<SnapshotQueries> recent_queries;
  /// Any further attributes, by name. A name that the format uses already is an error.
  std::map<std::string, SnapshotAttribute> further;
};

/// Whether this build can write and read snapshots (KVZAP_ENABLE_HDF5). If not, the functions below
/// throw AgreedError (those of one process: Error), which says so.
inline constexpr bool has_snapshots = KVZAP_HAVE_HDF5;

/// A snapshot on its way to the disk. Until it is finished the sequence that it is of must not
/// change (fork it); other sequences may.
class SnapshotWriting {
 public:
  SnapshotWriting() = default;
  SnapshotWriting(const SnapshotWriting&) = delete;
  SnapshotWriting& operator=(const SnapshotWriting&) = delete;
  /// If it is not finished: waits for what is being written, and removes the unfinished file.
  virtual ~SnapshotWriting() = default;

  /// Goes on with the next stage if all ranks are through with this one, and does not wait for
  /// those that write. Returns whether the file is in its place. Collective and cheap: made to be
  /// called after each step. Throws AgreedError as finish does.
  virtual bool advance() = 0;
  /// Goes on to the end, waiting. Collective. Every rank throws AgreedError, naming the file, if
  /// anything cannot be written or what was written reads differently; an older file is then still
  /// whole.
  virtual void finish() = 0;
  /// Bytes of the file; 0 until it is finished.
  virtual std::int64_t file_bytes() const = 0;
  /// What there is to say of files that killed runs have left: see write_snapshot.
  virtual const std::vector<std::string>& notes() const = 0;
};

/// Begins to write all layers of one sequence to one HDF5 file. On host backends rows are written
/// by a thread of each rank while the caller goes on; elsewhere this returns when they are on the
/// host. `context`, if there is one, is a state to which the sequence can be cut back: written too,
/// so that a run that goes on can do so. Collective. `file`, `info` (but for recent_queries) and
/// `options` of rank 0 count. Throws as write_snapshot does.
template <class Value, PageOrder order>
std::unique_ptr<SnapshotWriting> begin_snapshot(
    const std::filesystem::path& file, KVCache<Value, order>& cache, SequenceId sequence,
    const HeadPartition& partition, const Communicator& comm, const SnapshotInfo& info,
    const SnapshotOptions& options = {},
    const typename KVCache<Value, order>::Checkpoint* context = nullptr);

/// begin_snapshot and finish. All ranks write their own heads' rows together, at most one layer's
/// rows of memory beside the cache. A file that is there already is replaced in one step once the
/// new one is complete, reads back as it was written, and is on the disk; a symbolic link is
/// replaced, not followed.
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
                                        const SnapshotInfo& info,
                                        const SnapshotOptions& options = {});

/// Tries whether a snapshot can be created at `file` (rank 0's counts) and seen by all ranks, so
/// that a long run does not find out at its end. Leaves an existing file untouched and nothing
/// behind. Collective; every rank throws AgreedError, naming the file, if it cannot. Does not know
/// how much space the snapshot will need. Removes what killed runs left there, and returns what
/// there is to say of it, as write_snapshot does.
std::vector<std::string> check_snapshot_writable(const std::filesystem::path& file,
                                                 const Communicator& comm);

/// What a snapshot says of itself, beside its rows.
struct SnapshotHeader {
  std::int64_t format_version = 0;  // 1 or 2; what 1 does not have is empty
  SnapshotContent content = SnapshotContent::all;
  int compress = 0;
  DType dtype = DType::f32;
  std::int64_t n_layers = 0, n_kv_heads = 0, head_dim = 0;
  std::int64_t window = 0, page_rows = 0;
  /// Tokens that the sequence was given (counted as KVCache::tokens does).
  std::int64_t tokens = 0;
  std::vector<std::int64_t> ring_first;            // (layer)
  std::vector<std::vector<std::int64_t>> offsets;  // (layer, KV head + 1), rows
  SnapshotInfo info;                               // without recent_queries
  AppendCounts counts;                             // of the sequence, summed over ranks
  bool has_recent_queries = false;
  bool has_context = false;  // a state to cut back to: begin_snapshot's `context`
  std::int64_t file_bytes = 0;
};

/// Rows of one head on the host, in order of position. What the file does not have is empty.
struct SnapshotRows {
  std::vector<std::int64_t> positions;
  std::vector<float> scores;  // NaN: none
  std::vector<std::uint8_t>
      judged;                       // 0: a newest row that nobody has judged yet (not in version 1)
  std::vector<float> keys, values;  // (row, head_dim), converted
};

/// Reads a snapshot, of version 1 or 2, in one process. Every size and offset in the file is
/// checked against the others and the file's length before it is used.
class SnapshotReader {
 public:
  /// Checks the file's seal, which covers everything but rows, before anything else of it is looked
  /// at. Throws Error, "snapshot FILE: …" naming what was expected and found, if that is no
  /// snapshot, or a damaged one.
  explicit SnapshotReader(const std::filesystem::path& file);
  ~SnapshotReader();
  SnapshotReader(SnapshotReader&&) noexcept;
  SnapshotReader& operator=(SnapshotReader&&) noexcept;

  const std::filesystem::path& file() const;
  const SnapshotHeader& header() const;
  /// Of one head (of the model). `with_values`: keys and values too. Throws Error, also if the
  /// rows' checksums differ, naming layer, head and data set.
  SnapshotRows rows(int layer, int head, bool with_values) const;
  /// Reads everything and checks all checksums. One sentence for each that differs or cannot be
  /// read; none: the file is whole. A file of version 1 has none, which it says by throwing Error.
  std::vector<std::string> verify(
      const std::function<void(int layer, int layers)>& progress = {}) const;

  struct Impl;
  const Impl& impl() const { return *m_impl; }

 private:
  std::unique_ptr<Impl> m_impl;
};

/// What load_snapshot makes of the file beside the sequence.
template <class Value, PageOrder order>
struct LoadedSnapshot {
  SequenceId sequence = -1;
  /// The state to cut back to, if the file has one.
  std::optional<typename KVCache<Value, order>::Checkpoint> context;
  /// Of this rank's heads, layer by layer; empty if the file has none.
  std::vector<SnapshotQueries> recent_queries;
};

/// A new sequence with what the file holds. Every rank reads its own heads' rows, a layer's at most
/// at a time, checks their checksums, and rounds keys and values to Value if the file has another
/// type. `cache` may have another page size and order than the one that was written, on any number
/// of ranks; its window is to be the file's. Collective; every rank has a reader of its own of the
/// same file. Throws AgreedError (AgreedOutOfMemory for want of memory) on every rank, "snapshot
/// FILE: …", if the file is of version 1 or without keys and values, if extents differ from the
/// cache's, or for what cannot be read or is damaged; there is no new sequence then.
template <class Value, PageOrder order>
LoadedSnapshot<Value, order> load_snapshot(const SnapshotReader& reader,
                                           KVCache<Value, order>& cache,
                                           const HeadPartition& partition,
                                           const Communicator& comm);

}  // namespace kvzap
