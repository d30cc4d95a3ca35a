// The fields of config.json that set RoPE, in both dialects.
#pragma once

#include <kvzap/model/model_config.hpp>

#include "model/config_fields.hpp"

namespace kvzap::model {

/// Reads the base and the scaling of RoPE, from "rope_scaling" (older files) or "rope_parameters"
/// (transformers 5). Throws Error.
void read_rope(ConfigFields& fields, ModelConfig& config);

}  // namespace kvzap::model
