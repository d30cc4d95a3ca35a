// The architectures of GGUF files: values of general.architecture, and their tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::gguf {

/// An architecture that kvzap reads and writes.
struct Architecture {
  /// The value of general.architecture, which also begins the names of its keys.
  std::string_view name;
  /// Classes of transformers whose weights such files hold. The first one is that of a plain file;
  /// fields of the file may choose another one.
  std::vector<std::string_view> class_names;
  /// RoPE turns neighbouring values of a head, while that of transformers turns its halves. Files
  /// therefore hold the rows of the two halves in turns, in the maps of queries and keys.
  bool interleaves_heads = false;
  /// RoPE may turn only the first values of a head.
  bool has_partial_rope = false;
  /// Names of a layer's tensors, without "blk.3." and ".weight".
  std::vector<std::string_view> tensors;
  /// Without the key attention.sliding_window_pattern, every window_pattern-th layer sees the whole
  /// text and the others a window. 0: files have no such layers.
  std::int64_t window_pattern = 0;
  /// Norms of the residual stream are LayerNorms.
  bool has_layer_norms = false;
  /// Names of a layer's tensors in checkpoints, each with that in files, that differ from those of
  /// other architectures.
  std::vector<std::pair<std::string_view, std::string_view>> own_names = {};
  /// In a model of this many layers, attention divides by the square root of embedding_length /
  /// head_count instead of that of a head's length. 0: there is none.
  std::int64_t layers_with_wide_scale = 0;
  /// Files hold the value heads of delta nets in another order: the first one of each key head,
  /// then the second one of each, and so on. Checkpoints hold all those of a key head together.
  bool deals_value_heads = false;
  /// Further blocks of the file predict later tokens (nextn_predict_layers). No layer uses them.
  bool has_extra_blocks = false;
  /// Of a class whose files have another architecture, or other tensors, with experts than without:
  /// whether models have experts.
  std::optional<bool> has_experts = std::nullopt;
  /// Layers may keep a state instead of rows. attention.head_count_kv has a number for each layer,
  /// which is 0 for a layer without attention.
  bool has_states = false;
  /// Layers are one part each: a state space, attention, or a feed-forward part, whose widths
  /// feed_forward_length has for each layer.
  bool has_single_parts = false;
  /// Layers with a window have other numbers of heads than full ones. attention.head_count and
  /// head_count_kv have a number for each layer, attention.sliding_window_pattern a flag.
  bool has_heads_of_kinds = false;
  /// Full layers turn half of rope.dimension_count values of a head; those with a window all.
  bool halves_full_rope = false;
  /// Attention is latent: keys and values are maps of one latent (DeepSeek-V2).
  bool has_latents = false;

  bool has_tensor(std::string_view name_in_layer) const;
  /// Returns the number whose square root divides the products of queries and keys.
  std::int64_t query_scalar(std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                            std::int64_t head_dim) const {
    return layers == layers_with_wide_scale ? hidden / heads : head_dim;
  }
};

/// Returns all architectures.
const std::vector<Architecture>& architectures();

/// Returns the architecture with the weights of this class, or nullptr. `has_experts`: models of
/// the class with experts may have another one.
const Architecture* architecture_of(std::string_view class_name, bool has_experts = false);

/// Returns the same or, for a class that GGUF lacks, an architecture with the names of its maps, by
/// which quantised weights get their types. Never null.
const Architecture* architecture_for_types(std::string_view class_name, bool has_experts = false);

}  // namespace kvzap::gguf
