// Training data of surrogates: hidden states that enter attention, and the log KVzip+ scores that
// the oracle gives the pairs of their tokens. docs/pairs-format.md describes the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/communicator.hpp>
#include <kvzap/config.hpp>
#include <kvzap/head_partition.hpp>
#include <kvzap/types.hpp>
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

}  // namespace kvzap
