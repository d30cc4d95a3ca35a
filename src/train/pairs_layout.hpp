// The HDF5 objects of a file of pairs, for reader and writer. docs/reference/pairs-format.md
// describes them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/lab/pairs.hpp>
#include <string>
#include <vector>

#include "io/container.hpp"

namespace kvzap::train {

constexpr std::int64_t pairs_version = 1;
/// Name of the format in messages.
constexpr const char* pairs_kind = "pairs file";

/// The checked metadata of a file.
struct PairsLayout {
  PairsInfo info;
  /// Pairs in the file: all whole chunks, and the last one if it is partial. The last pairs may
  /// belong to an unfinished text.
  std::int64_t written = 0;
  /// Bytes at the start of the file that hold everything but data. Only these bytes change in
  /// place.
  std::int64_t metadata_bytes = 0;
  /// Extents of a chunk of hidden states; 0 if the data set is not chunked.
  std::int64_t chunk_pairs = 0;
  std::int64_t chunk_columns = 0;
  /// PairsInfo::command as JSON.
  std::string command;
  /// The texts without their positions.
  std::vector<PairsPlan::Text> texts;
};

/// Reads and checks everything but pairs. `file_bytes`: size of the file. Throws Error.
PairsLayout read_pairs_layout(hid_t file, std::int64_t file_bytes);
/// Adds the root's attributes to a new file, from `info` and `command`.
void write_pairs_attributes(hid_t file, const PairsLayout& layout);

/// "/layers/N/hidden" or "/layers/N/scores".
std::string pairs_data_set(int layer, const char* name);

/// Reads elements begin … begin + count - 1 of a data set of whole numbers.
std::vector<std::int64_t> read_integers(hid_t file, const std::string& name, std::int64_t begin,
                                        std::int64_t count);

}  // namespace kvzap::train
