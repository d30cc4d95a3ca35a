// Names of tensors in GGUF files and in checkpoints of Hugging Face.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvzap::gguf {

/// Returns GGUF's name of the tensor that checkpoints of Hugging Face call `name`:
/// "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight". Returns nothing for a name
/// that no supported architecture has.
std::optional<std::string> gguf_name(std::string_view name);

/// Returns the inverse of gguf_name.
std::optional<std::string> hugging_face_name(std::string_view name);

/// Returns GGUF's name of a tensor of layer `layer`: "blk.3.attn_q.weight" for "attn_q.weight".
std::string name_in_layer(std::int64_t layer, std::string_view name);

}  // namespace kvzap::gguf
