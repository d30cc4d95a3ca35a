// Training data of surrogates: the hidden states that enter attention, and the oracle's log KVzip+
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
  /// Sizes of the complete file. They exceed `texts` and `pairs` until the command that writes it
  /// has finished.
  std::int64_t planned_texts = 0;
  std::int64_t planned_pairs = 0;
  /// Everything that determines the content (options, hash of the texts), by name: the same values
  /// give the same pairs.
  std::map<std::string, std::string> command;

  bool is_complete() const { return texts == planned_texts; }
};

/// Source of training pairs, read layer by layer: a file or, in tests, memory.
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

/// A file of pairs, open for reading. Use it from one thread at a time (as HDF5).
class PairsFile : public PairSource {
 public:
  /// Opens a file and checks its metadata: format and version; types, extents and filters of every
  /// data set; sizes that agree and fit this machine. Provides the pairs of finished texts, even
  /// while its command is unfinished or still writing. No communication. Throws Error, naming the
  /// file and the fault, with the expected and the found value.
  static std::unique_ptr<PairsFile> open(const std::filesystem::path& file);

  /// Returns the token positions of pairs begin … begin + count - 1 within their texts: (count).
  virtual std::vector<std::int64_t> positions(std::int64_t begin, std::int64_t count) const = 0;
};

/// Planned content of a file of pairs. It must be the same on all ranks, but only rank 0 needs
/// `texts`.
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
  /// Extents of an HDF5 chunk of hidden states, which is compressed and written as a whole. 0:
  /// chosen by the writer.
  std::int64_t chunk_pairs = 0;
  std::int64_t chunk_columns = 0;
  /// Largest fraction of the time that may be spent on flushes. If the process is killed, pairs
  /// appended since the last flush and pairs of incomplete chunks are lost.
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
  /// Creates the file, or opens an existing one of the same plan. The plan may have fewer texts
  /// than the file, the first ones: the file then ends with them, or has more already and is
  /// unchanged. If the plans differ otherwise, the error names the differences and the file is
  /// unchanged. heads[rank]: the KV heads of the rank's scores, in order.
  static std::unique_ptr<PairsWriter> open(const std::filesystem::path& file, const PairsPlan& plan,
                                           const std::vector<std::vector<int>>& heads,
                                           const Communicator& comm);
  PairsWriter(const PairsWriter&) = delete;
  PairsWriter& operator=(const PairsWriter&) = delete;
  virtual ~PairsWriter() = default;

  /// Returns the number of texts whose pairs the writer has. Append the next text, unless there are
  /// planned_texts() or more.
  virtual std::int64_t texts() const = 0;
  /// Returns the number of texts whose pairs will survive if the process ends now. It may be lower
  /// than texts(), because pairs are written to disk in whole chunks.
  virtual std::int64_t safe_texts() const = 0;
  virtual std::int64_t planned_texts() const = 0;
  /// Returns the bytes of the file so far.
  virtual std::int64_t bytes() const = 0;
  /// Returns messages for people about the state of the file when it was opened; on rank 0.
  virtual const std::vector<std::string>& notes() const = 0;

  /// Appends the pairs of text number texts().
  virtual void append(const TextPairs& text) = 0;
  /// Call it after the last text. If called earlier, pairs that do not fill a chunk are lost.
  virtual void close() = 0;

 protected:
  PairsWriter() = default;
};

}  // namespace kvzap
