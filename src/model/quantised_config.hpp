// The field quantization_config of a model's config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/config_fields.hpp"

namespace kvzap::model {

/// Formats of quantised weights in safetensors files.
enum class QuantisedFormat {
  fp8,    // floats of 8 bits (e4m3), a scale for each tensor, row or block
  mxfp4,  // floats of 4 bits (e2m1), a power of two for 32 values (OCP Microscaling Formats 1.0)
  awq,    // integers of 4 bits, in AutoAWQ's layout "gemm"
  gptq    // integers of 4 bits, in AutoGPTQ's layout
};

/// The parts of quantization_config that decide how weights are read.
struct QuantisedConfig {
  QuantisedFormat format = QuantisedFormat::fp8;
  /// fp8: rows and columns of a block with one scale; 0: a scale for the tensor or for each row.
  std::int64_t block_rows = 0;
  std::int64_t block_columns = 0;
  /// awq, gptq: inputs that share a scale; 0: all.
  std::int64_t group_size = 0;
  /// awq, gptq: without stored zero points, each is 8.
  bool may_lack_zeros = false;
  /// gptq: stored zero points are one less than the true ones (checkpoint_format "gptq").
  bool zeros_less_one = false;
};

/// Reads quantization_config of `config`; nothing if it is absent or null. Unknown fields add a
/// warning. Throws Error that names file and field for an unsupported quant_method, for numbers of
/// bits other than 4 (awq, gptq) or 8 (fp8), and for malformed fields.
std::optional<QuantisedConfig> read_quantised_config(ConfigFields& config,
                                                     std::vector<std::string>& warnings);

}  // namespace kvzap::model
