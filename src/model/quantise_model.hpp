// Writes a model to a GGUF file whose matrices are rounded to the types of a mixture.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/type_mixture.hpp"

namespace kvzap::model {

/// A tensor in the new file.
struct WrittenTensor {
  std::string name;
  std::string_view type;
  std::int64_t values = 0;
  std::int64_t bytes = 0;
  /// Whether the type has blocks with scales.
  bool has_blocks = false;
  /// Root of the mean squared difference from the source's values, over that of those values; 0 if
  /// they are all zero.
  double relative_error = 0;
};

/// The contents of the new file, and its source.
struct QuantiseReport {
  std::uintmax_t bytes_before = 0;
  std::uintmax_t bytes_after = 0;
  std::vector<WrittenTensor> tensors;
  std::vector<std::string> warnings;  // what the format cannot hold exactly
};

/// Called with the values written so far, and those of the whole model.
using QuantiseProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Writes the model, a folder or a GGUF file, to the GGUF file `file`. Tensors that the source
/// holds in the wanted type are copied. Reads and writes pieces of tensors, on all host threads.
/// `progress` may be empty. Throws Error if the model cannot be read, for RoPE scaling and
/// tokenizers that the format cannot hold, if `file` exists or cannot be written, and for weights
/// that a type with blocks cannot hold: NaN, infinity, and magnitudes above those of f16. For one
/// process only.
QuantiseReport quantise_model(const std::filesystem::path& model, const std::filesystem::path& file,
                              const gguf::TypeMixture& mixture, const QuantiseProgress& progress);

}  // namespace kvzap::model
