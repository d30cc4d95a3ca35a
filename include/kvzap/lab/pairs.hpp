// Training data of surrogates: hidden states that enter attention, and the oracle's log KVzip+
// scores of their tokens' pairs. docs/reference/pairs-format.md describes the file.
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

/// Whether this build can write and read files of pairs (KVZAP_ENABLE_HDF5). Without it, functions
/// that open one throw AgreedError or Error.
inline constexpr bool has_pairs_files = KVZAP_HAVE_HDF5;

/// Metadata of a file of pairs.
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
  /// Sizes of the complete file: larger than `texts` and `pairs` until its command has finished.
  std::int64_t planned_texts = 0;
  std::int64_t planned_pairs = 0;
  /// Everything that determines the content (options, hash of the texts), by name: the same values
  /// give the same pairs.
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
  /// Reads pairs begin … begin + count - 1 of a layer: `hidden` (count, hidden_size), of type
  /// info().dtype; `scores` (count, kv_heads). Either may be null. No communication. Throws Error,
  /// naming file and data set.
  virtual void read(int layer, std::int64_t begin, std::int64_t count, void* hidden,
                    float* scores) const = 0;
};

/// A file of pairs, open to be read. Use it from one thread at a time (as HDF5).
class PairsFile : public PairSource {
 public:
  /// Reads and checks the metadata: format and version; types, extents and filters of every data
  /// set; sizes that agree and fit this machine. Has the pairs of finished texts, also while its
  /// command is unfinished or still writing. No communication. Throws Error, naming the file and
  /// the fault, with the expected and the found value.
  static std::unique_ptr<PairsFile> open(const std::filesystem::path& file);

  /// (count): the token positions of pairs begin … begin + count - 1 within their texts.
  virtual std::vector<std::int64_t> positions(std::int64_t begin, std::int64_t count) const = 0;
};

/// Planned content of a file of pairs. The same on all ranks, but only rank 0 needs `texts`.
struct PairsPlan {
  /// A text whose pairs are collected.
  struct Text {
    std::int64_t line = 0;                // in the file of texts, from 1
    std::string subset;                   // may be empty
    std::int64_t tokens = 0;              // of the whole text
    std::vector<std::int64_t> positions;  // of its pairs within the text
  };

  std::string model;
  DType dtype = DType::bf16;
  std::int64_t hidden_size = 0;
  int layers = 0;
  int kv_heads = 0;
  std::vector<Text> texts;
  std::map<std::string, std::string> command;
  /// Deflate level, 0 (none) to 9.
  int compression = 1;
  /// Extents of an HDF5 chunk of hidden states, compressed and written as a whole; 0: chosen.
  std::int64_t chunk_pairs = 0;
  std::int64_t chunk_columns = 0;
  /// Largest share of the time spent on flushes. A killed process loses pairs appended since the
  /// last flush, and those of incomplete chunks.
  double flush_share = 0.05;
};

/// This rank's part of the pairs of one text.
struct TextPairs {
  /// The pairs of one layer.
  struct Layer {
    /// (pair, hidden_size), of the file's type; the same on all ranks.
    std::vector<char> hidden;
    /// (pair, KV head of this rank).
    std::vector<float> scores;
  };
  std::vector<Layer> layers;
};

/// Writes a file of pairs, text by text, or continues one. Flushed pairs survive a crash: until the
/// file is complete, FILE.recovery keeps HDF5's own metadata of the last finished text. All
/// functions are collective and throw AgreedError, except the destructor, which discards unflushed
/// pairs.
class PairsWriter {
 public:
  /// Creates the file, or opens an existing one of the same plan; an error names the differences
  /// and leaves the file unchanged. heads[rank]: the KV heads of the rank's scores, in their order.
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
