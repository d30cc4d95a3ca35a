// Gemma 3n and 4 in GGUF files: layers with heads of two sizes, layers that read the keys and
// values of others, and inputs of layers.
#pragma once

#include "model/gguf_fields.hpp"

namespace kvzap::model {

/// The rows of sizes of Gemma 4, instead of those of all families: widths and KV heads of each
/// layer, and the length of heads of both kinds.
void gemma4_sizes(GgufFields& f);
/// The rows of RoPE of Gemma 4. Full layers turn the first pairs of a head: the factors of the
/// others in the tensor of factors are very large.
void gemma4_rope(GgufFields& f);
/// The widths of layers of Gemma 3n.
void gemma3n_widths(GgufFields& f);

void gemma3n_rows(GgufFields& f);
void gemma4_rows(GgufFields& f);

}  // namespace kvzap::model
