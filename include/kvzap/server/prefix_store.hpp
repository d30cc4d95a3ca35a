// Pruned states of documents in files, which a server finds again after a restart.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::server {

/// A stored state: one snapshot, named kvzap-prefix-ID.h5.
struct StoredPrefix {
  std::filesystem::path file;
  std::string id;     // 16 hexadecimal digits
  std::string model;  // its name
  std::string pruning;
  std::string kv_type;
  std::string text;         // the first words; empty: the writer had no tokenizer
  std::int64_t tokens = 0;  // of the prompt
  std::int64_t rows = 0;    // kept, over all layers and KV heads
  std::int64_t bytes = 0;   // of the file
  std::int64_t used = 0;    // time of the last use: nanoseconds since 1970
  /// Hash of all that rows depend on beside the key: see PrefixStore::kind_of.
  std::string kind;
  /// Tokens and marks, as in the scheduler's prefix tree.
  std::vector<std::int32_t> key;
  /// The state can be cut back to beginnings of the key down to this length.
  std::int64_t whole_from = 0;
};

/// Reads all stored states of a folder, the least recently used one first. Calls tell(sentence) for
/// each file with the name of a stored state that is none. Changes nothing. Throws Error if the
/// folder cannot be read. Does not communicate.
std::vector<StoredPrefix> stored_prefixes(const std::filesystem::path& folder,
                                          const std::function<void(const std::string&)>& tell);

/// Returns the ids of all files of a folder with the names of stored states, damaged or not. Throws
/// Error if the folder cannot be read.
std::vector<std::string> ids_of_stored_prefixes(const std::filesystem::path& folder);
/// Returns the file of an id, whether it exists or not; empty for a text that is no id.
std::filesystem::path file_of_stored_prefix(const std::filesystem::path& folder,
                                            const std::string& id);

/// States in a folder, bounded in bytes: the least recently used ones are removed. Several servers
/// may use one folder. A file appears in one step and does not change afterwards, and its
/// modification time is that of its last use. Only files with the names of stored states are ever
/// removed. Lives on rank 0; it neither communicates nor reads rows. Not thread-safe.
class PrefixStore {
 public:
  /// Where states are stored, and what they are states of.
  struct Options {
    std::filesystem::path folder;
    /// Files may take these bytes. The file that is being written does not count.
    std::int64_t most_bytes = 0;
    /// A state is stored if it has this number of tokens more than a stored one that it continues.
    std::int64_t least_tokens = 256;
    // For SnapshotInfo. The model's hash identifies the weights.
    std::string model, model_hash, tokenizer_hash, kvzap_version;
    DType dtype = DType::bf16;  // of the cache
    /// All other options of the server on which rows depend.
    std::string setting;
    /// Returns the text of a pruning with the contents of its files in place of their names.
    /// Absent: Pruning::text.
    std::function<std::string(const Pruning&)> identity_of;
    /// Returns the text of some tokens. Absent: there is no tokenizer.
    std::function<std::string(const std::vector<TokenId>&)> text_of;
    /// Receives warnings. Absent: there are none.
    std::function<void(const std::string&)> warn;
  };

  /// Makes the folder, for its owner alone, if it does not exist. Removes damaged files and those
  /// that killed servers left unfinished, and files beyond most_bytes. Throws Error if files cannot
  /// be written there.
  explicit PrefixStore(Options options);
  ~PrefixStore();
  PrefixStore(const PrefixStore&) = delete;
  PrefixStore& operator=(const PrefixStore&) = delete;

  /// Returns a hash of the model, the setting, the pruning and the type of rows.
  std::string kind_of(const Pruning& pruning, const PageFormat& format);

  /// A stored state that serves a prompt.
  struct Found {
    StoredPrefix state;
    std::int64_t length = 0;  // of the beginning of the key that it serves
  };
  /// Returns the state that serves the longest beginning of `key`, of at most `most` elements.
  /// Finds states that other servers have written, after a second at the latest.
  std::optional<Found> find(const std::string& kind, const std::vector<std::int32_t>& key,
                            std::int64_t most);
  /// Returns whether a state of this key is worth a file.
  bool wants(const std::string& kind, const std::vector<std::int32_t>& key);

  /// A state to write.
  struct Place {
    StoredPrefix state;
    SnapshotInfo info;
  };
  Place place_for(const Pruning& pruning, const PageFormat& format,
                  const std::vector<std::int32_t>& key, std::int64_t whole_from);
  /// Call it when the file of a place is complete. Removes files beyond most_bytes.
  void note_written(const StoredPrefix& state);
  /// Notes that a state was used now.
  void note_used(const StoredPrefix& state);
  /// Call it if a state could not be read: `reason`. Removes its file if that is damaged.
  void refuse(const StoredPrefix& state, const std::string& reason);
  void warn(const std::string& sentence) const;

  /// Number and bytes of the files, as of the last look into the folder.
  std::int64_t size() const;
  std::int64_t bytes() const;

 private:
  struct Index;

  void look();
  void take_in(StoredPrefix state);
  void forget(const std::string& name);
  void remove(const std::string& name);
  void bound();

  Options m_options;
  std::unique_ptr<Index> m_index;
};

}  // namespace kvzap::server
