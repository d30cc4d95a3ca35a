// The JSON files of a model's folder, made from the metadata of a GGUF file. For config.json see
// model/gguf_metadata.hpp.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.hpp"

namespace kvzap::gguf {

/// Returns generation_config.json: the ids of special tokens, and the ids that end an answer.
nlohmann::json make_generation_config(const GgufFile& file);

/// Returns tokenizer.json for a tokenizer of the kind gpt2 (byte-level BPE), llama (BPE of
/// SentencePiece with byte fallback) or gemma4 (the same with merges); nothing if the file has no
/// tokens. Throws Error for another kind, an unknown pre-tokenizer, and malformed values.
std::optional<nlohmann::json> make_tokenizer(const GgufFile& file);

/// Returns tokenizer_config.json: the chat template and the special tokens that it uses; nothing if
/// the file has no tokens.
std::optional<nlohmann::json> make_tokenizer_config(const GgufFile& file);

/// Returns the normalizer and pre-tokenizer of tokenizer.json for a value of tokenizer.ggml.pre,
/// and whether merges are ignored for pre-tokens in the vocabulary; nothing for an unknown value.
struct PreTokenizerKind {
  nlohmann::json normalizer;
  nlohmann::json pre_tokenizer;
  bool ignore_merges = false;
  /// Whether a text begins with the beginning-of-text token, if the file does not say.
  bool add_bos = false;
  /// Whether tokens are written in the byte alphabet. Otherwise they are characters, and characters
  /// without a token become tokens of bytes.
  bool byte_level = true;
};
std::optional<PreTokenizerKind> pre_tokenizer_kind(std::string_view name);

/// Returns the values of tokenizer.ggml.pre that pre_tokenizer_kind knows. Of names for the same
/// pre-tokenizer, the one to write comes first.
std::vector<std::string_view> pre_tokenizer_names();

}  // namespace kvzap::gguf
