// The architectures of GGUF files: values of general.architecture, and their tensors.
#pragma once

#include <string_view>
#include <vector>

namespace kvzap::gguf {

/// An architecture that kvzap reads and writes.
struct Architecture {
  /// The value of general.architecture, which also begins the names of its keys.
  std::string_view name;
  /// Classes of transformers whose weights such files hold. The first one is that of a plain file;
  /// fields of the file may choose another one.
  std::vector<std::string_view> class_names;
  /// The value of model_type with the first class.
  std::string_view model_type;
  /// RoPE turns neighbouring values of a head, while that of transformers turns its halves. Files
  /// therefore hold the rows of the two halves in turns, in the maps of queries and keys.
  bool interleaves_heads = false;
  /// RoPE may turn only the first values of a head.
  bool has_partial_rope = false;
  /// Names of a layer's tensors, without "blk.3." and ".weight".
  std::vector<std::string_view> tensors;

  bool has_tensor(std::string_view name_in_layer) const;
};

/// Returns all architectures.
const std::vector<Architecture>& architectures();

/// Returns the architecture with the weights of this class, or nullptr.
const Architecture* architecture_of(std::string_view class_name);

}  // namespace kvzap::gguf
