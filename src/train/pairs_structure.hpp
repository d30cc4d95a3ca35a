// Creates a file of pairs: attributes, data sets and everything else before the first pair.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/lab/pairs.hpp>
#include <vector>

#include "io/hdf5.hpp"

namespace kvzap::train {

/// Returns the index of each text's first pair, then the number of pairs: (text + 1).
std::vector<std::int64_t> text_begins(const PairsPlan& plan);

/// Returns a chunk of zeros, compressed for the filters of `data_set`, even if --compression is 0.
std::vector<char> packed_zeros(hid_t data_set);

/// Fills an empty file. Call it on rank 0 only. Throws Error.
void write_structure(const std::filesystem::path& path, const PairsPlan& plan);

/// Begin and end of the data written with the structure.
struct FixedRegion {
  std::int64_t begin;
  std::int64_t end;
};

FixedRegion fixed_region(hid_t file);

}  // namespace kvzap::train
