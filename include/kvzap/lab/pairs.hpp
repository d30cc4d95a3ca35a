// Training data of surrogates: hidden states that enter attention, and the log KVzip+ scores that
// the oracle gives the pairs of their tokens. docs/reference/pairs-format.md describes the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/config.hpp>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/types.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// Whether this build can write and read files of pairs (KVZAP_ENABLE_HDF5). If not, what opens one
/// throws AgreedError or Error, which says so.
inline constexpr bool has_pairs_files = KVZAP_HAVE_HDF5;

/// What a file of pairs says of itself.
struct PairsInfo {
  std::string model;  // name or folder
  DType dtype = DType::bf16;
  std::int64_t hidden_size = 0;
  int layers = 0;
  int kv_heads = 0;
  std::int64_t pairs = 0;
  std::int64_t texts = 0;
  /// (texts + 1): pairs of text t are text_begin[t] .. text_begin[t + 1] - 1. Empty if unknown.
  std::vector<std::int64_t> text_begin;
  /// What the command that makes the file is to put into it; more than `texts` and `pairs` as long
  /// as it has not finished.
  std::int64_t planned_texts = 0;
  std::int64_t planned_pairs = 0;
  /// What decided on the content (options, hash of the texts), by name: the same values give the
  /// same pairs.
  std::map<std::string, std::string> command;

  bool is_complete() const { return texts == planned_texts; }
};

/// Pairs to train from, layer by layer; in a file or, in tests, in memory.
class PairSource {
 public:
  PairSource() = default;
  PairSource(const PairSource&) = delete;
  PairSource& operator=(const PairSource&) = delete;
  virtual ~PairSource() = default;

  virtual const PairsInfo& info() const = 0;
  /// Pairs begin … begin + count - 1 of a layer: `hidden` (count, hidden_size), values of type
  /// info().dtype as they are stored; `scores` (count, kv_heads). Either may be null. One process
  /// alone, no communication. Throws Error, naming file and data set.
  virtual void read(int layer, std::int64_t begin, std::int64_t count, void* hidden,
                    float* scores) const = 0;
};

/// A file of pairs, open to be read. Use it from one thread at a time (as HDF5).
class PairsFile : public PairSource {
 public:
  /// Reads what the file says of itself and checks it: the format and its version, types, extents
  /// and filters of every data set, and that sizes agree and fit this machine. Pairs are those of
  /// finished texts; a file whose command has not finished, or which another process is writing,
  /// can be read as far as it goes. One process alone. Throws Error, naming the file, what is
  /// wrong, what was expected and what was found.
  static std::unique_ptr<PairsFile> open(const std::filesystem::path& file);

  /// (pairs): of pairs begin … begin + count - 1, the token's position within its text.
  virtual std::vector<std::int64_t> positions(std::int64_t begin, std::int64_t count) const = 0;
};

/// What will be in a file of pairs, before the first of them is there. The same on all ranks, but
/// `texts`, which rank 0 alone needs.
struct PairsPlan {
  /// A text whose pairs are collected.
  struct Text {
    std::int64_t line = 0;                // in the file of texts, from 1
    std::string subset;                   // may be empty
    std::int64_t tokens = 0;              // of the text, of which pairs are a sample
    std::vector<std::int64_t> positions;  // of its pairs, within the text
  };

  std::string model;
  DType dtype = DType::bf16;
  std::int64_t hidden_size = 0;
  int layers = 0;
  int kv_heads = 0;
  std::vector<Text> texts;
  std::map<std::string, std::string> command;
  /// Of deflate, 0 (none) to 9. Changes the file, not its data.
  int compression = 1;
  /// Extents of a chunk of hidden states; 0: chosen. A chunk is compressed and written at once.
  std::int64_t chunk_pairs = 0;
  std::int64_t chunk_columns = 0;
  /// Share of the time that making pairs last may take. What was appended since it was done last
  /// is lost if the process is killed, and what fills no whole chunk.
  double flush_share = 0.05;
};

/// The pairs of one text, as this rank has them.
struct TextPairs {
  /// Of one layer.
  struct Layer {
    /// (pair, hidden_size) values of the file's type, on all ranks alike.
    std::vector<char> hidden;
    /// (pair, head of this rank).
    std::vector<float> scores;
  };
  std::vector<Layer> layers;
};

/// Makes a file of pairs, text by text, or goes on with one. What has been appended is safe against
/// the end of the process at any moment: a file FILE.recovery keeps HDF5's own data of the last
/// text that was finished, and goes when the file is complete. All functions are collective and
/// throw AgreedError, but for the destructor, which gives up whatever was not flushed.
class PairsWriter {
 public:
  /// Starts the file if there is none. If there is one, it must be of the same plan: what differs
  /// is told, and the file left as it is. heads[rank]: the KV heads that the rank's scores belong
  /// to, in their order.
  static std::unique_ptr<PairsWriter> open(const std::filesystem::path& file, const PairsPlan& plan,
                                           const std::vector<std::vector<int>>& heads,
                                           const Communicator& comm);
  PairsWriter(const PairsWriter&) = delete;
  PairsWriter& operator=(const PairsWriter&) = delete;
  virtual ~PairsWriter() = default;

  /// Texts whose pairs need not be collected (again): append the next one.
  virtual std::int64_t texts() const = 0;
  /// Texts whose pairs will last if the process ends now. Fewer, as pairs go to the disk in whole
  /// chunks.
  virtual std::int64_t safe_texts() const = 0;
  virtual std::int64_t planned_texts() const = 0;
  /// Bytes of the file so far.
  virtual std::int64_t bytes() const = 0;
  /// What was found and done on opening, for people; on rank 0.
  virtual const std::vector<std::string>& notes() const = 0;

  /// The pairs of text number texts().
  virtual void append(const TextPairs& text) = 0;
  /// After the last text, or before it: what is not in a whole chunk is left out then.
  virtual void close() = 0;

 protected:
  PairsWriter() = default;
};

}  // namespace kvzap
