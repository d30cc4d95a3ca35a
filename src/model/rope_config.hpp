// The fields of config.json that set RoPE, in both dialects.
#pragma once

#include <kvzap/model/model_config.hpp>

#include "model/config_fields.hpp"

namespace kvzap::model {

/// What a family's RoPE allows.
struct RopeRules {
  /// The base without a field of the file.
  double default_theta = 10000;
  /// The part of a head's dimensions that RoPE rotates, without partial_rotary_factor; 0: the
  /// family has no such field.
  double default_rotary_factor = 0;
  /// The field with the number of rotated dimensions, which then ignores partial_rotary_factor; and
  /// what it means if it is absent.
  const char* rotary_dim_field = nullptr;
  std::int64_t default_rotary_dim = 0;
  /// See ModelConfig::rope_is_interleaved.
  bool is_interleaved = false;
  /// The family has llama_4_scaling_beta.
  bool scales_queries = false;
  /// Layers with a window have this base and no scaling, without rope_local_base_freq or
  /// rope_parameters.sliding_attention; 0: the family has no such fields.
  double default_window_theta = 0;
  /// The part of a head's dimensions that RoPE rotates in these layers, without
  /// partial_rotary_factor; 0: it rotates whole heads.
  double default_window_factor = 0;
  /// Layers with a window have no scaling, and the base of the others without
  /// rope_parameters.sliding_attention.
  bool windows_are_unscaled = false;
  /// The file may deal the frequencies to the axes of an image (mrope_section, mrope_interleaved).
  /// All axes of text have the same position, so this changes nothing.
  bool has_image_sections = false;
  /// rotary_pct and rotary_emb_base are names of partial_rotary_factor and rope_theta (GPT-NeoX).
  bool has_older_names = false;
  /// The type may be proportional (ModelConfig::turning_part), and is without rope_parameters, with
  /// this partial_rotary_factor. 0: the family has no such type.
  double default_turning_part = 0;
  /// The file may stretch the base by `alpha` (HunYuan), for which it says "dynamic".
  bool has_alpha = false;
  /// longrope has short_mscale and long_mscale, the attention factors (Phi-3.5-MoE).
  bool has_mscales = false;
};

/// Reads the base and the scaling of RoPE, from "rope_scaling" (older files) or "rope_parameters"
/// (transformers 5), and the dimensions that it rotates. Throws Error.
void read_rope(ConfigFields& fields, const RopeRules& rules, ModelConfig& config);

}  // namespace kvzap::model
