// Parts of tokenizer.json made of a model of SentencePiece.
#pragma once

#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gguf/sentence_piece_file.hpp"

namespace kvzap::gguf {

/// Called with the most merges that a vocabulary may have, if it has more. It throws.
using TooManyMerges = std::function<void(std::size_t)>;

/// The pre-tokenizer that marks spaces and does not split.
nlohmann::json metaspace(const char* prepend_scheme);

/// Returns a BPE model with byte fallback, whose merges follow the ids of the tokens that they
/// make.
nlohmann::json model_of_ids(const SentencePieceFile& file, const TooManyMerges& too_many);

/// Adds model, normalizer, pre-tokenizer and decoder to a tokenizer.json, so that it encodes as
/// SentencePiece does with the settings of the file. `texts`: those of the pieces, some of which
/// may have other names than in the file. `is_legacy`: each text between added tokens begins with
/// a mark, not only the first.
void add_by_settings(const SentencePieceFile& file, const std::vector<std::string>& texts,
                     bool is_legacy, const TooManyMerges& too_many, nlohmann::json& tokenizer);

}  // namespace kvzap::gguf
