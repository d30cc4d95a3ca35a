// tokenizer.json from the files of a folder that lacks it.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvzap::gguf {

/// Returns the file of a folder's vocabulary: tekken.json, tokenizer.model, *.tiktoken,
/// tiktoken.model, or vocab.json beside merges.txt, in this order; nothing if there is none.
std::optional<std::filesystem::path> vocabulary_file(const std::filesystem::path& folder);

/// Returns the tokenizer.json that transformers' converters make of the file and of
/// tokenizer_config.json, special_tokens_map.json and added_tokens.json beside it. Throws Error if
/// a file is malformed, and for a tokenizer_class that splits texts in a way of its own.
nlohmann::json make_folder_tokenizer(const std::filesystem::path& file);

}  // namespace kvzap::gguf
