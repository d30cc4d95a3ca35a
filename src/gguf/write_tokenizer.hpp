// The metadata of a GGUF file that stands for a folder's tokenizer files.
#pragma once

#include <cstdint>
#include <filesystem>

#include "gguf/gguf_writer.hpp"

namespace kvzap::gguf {

/// Adds the tokenizer, the ids of special tokens and the chat template of a model's folder, if it
/// has them. `vocab_size`: rows of the embedding table; ids without a token become unused tokens.
/// Throws Error that names the file for tokenizers that the format cannot hold: all but byte-level
/// BPE with a pre-tokenizer that has a name in the format, and BPE of SentencePiece.
void add_tokenizer(const std::filesystem::path& folder, std::int64_t vocab_size,
                   GgufWriter& writer);

}  // namespace kvzap::gguf
