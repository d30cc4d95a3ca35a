// A new file of pairs: attributes, data sets and everything else that stands before any pair.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/lab/pairs.hpp>
#include <vector>

#include "io/hdf5_objects.hpp"

namespace kvzap::detail {

/// Index of each text's first pair, and the number of pairs: (text + 1).
std::vector<std::int64_t> text_begins(const PairsPlan& plan);

/// A chunk of zeros that the filters of `data_set` can unpack, packed well even where --compression
/// is 0.
std::vector<char> packed_zeros(hid_t data_set);

/// Fills an empty file. Rank 0 alone calls it. Throws Error.
void write_structure(const std::filesystem::path& path, const PairsPlan& plan);

/// Where the data begin and end that were written with the structure.
struct FixedRegion {
  std::int64_t begin;
  std::int64_t end;
};

FixedRegion fixed_region(hid_t file);

}  // namespace kvzap::detail
