// Reads arrays of numbers from untrusted files: nested lists in JSON, or NumPy's .npy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvzap::files {

/// An array in the order of C: the last index changes fastest.
struct NumberTable {
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

/// Returns the shape as NumPy writes it: "(3, 2)", "(3,)".
std::string text_of_shape(const std::vector<std::int64_t>& shape);

/// Returns the numbers of a file: nested JSON lists of equal lengths, or a .npy file (version 1 to
/// 3) of bools, whole numbers or little-endian float16 to float64. At most three dimensions, none
/// of them empty. Throws Error "FILE: FIELD: expected …, found …" for anything else, and for more
/// than 64 MiB. Values may be NaN or infinite in a .npy file.
NumberTable read_number_table(const std::filesystem::path& file);

}  // namespace kvzap::files
