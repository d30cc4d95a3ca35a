// Parts of tokenizer.json, as converters of other formats make them.
#pragma once

#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::gguf {

/// Stands for a space in SentencePiece's vocabularies.
inline constexpr const char* space_mark = "\u2581";

/// The model: BPE, with `vocab` an object of tokens and ids, and `merges` a list of pairs.
nlohmann::json bpe_model(nlohmann::json vocab, nlohmann::json merges);

/// The pre-tokenizer that writes bytes in the byte alphabet. `use_regex`: it splits as GPT-2's.
nlohmann::json byte_level(bool use_regex, bool add_prefix_space = false);
/// The pre-tokenizer that splits at matches of a pattern in Oniguruma's syntax, and keeps them.
nlohmann::json split_at(std::string_view pattern);
/// The pre-tokenizer that splits at the longest of some texts, and keeps them. kvzap alone reads
/// it: tokenizers has a pattern of alternatives, which grows with the vocabulary.
nlohmann::json split_at_texts(const std::vector<std::string>& texts);
nlohmann::json sequence_of_pre_tokenizers(nlohmann::json members);

/// A part that replaces a text (not a pattern).
nlohmann::json replace_text(std::string_view text, std::string_view content);

nlohmann::json byte_level_decoder();
/// Decodes SentencePiece's tokens. `removes_space`: without a space before the whole text.
nlohmann::json marked_spaces_decoder(bool removes_space);

/// A special token before or after a text.
struct TemplateToken {
  std::string text;
  std::size_t id;
};
/// The post-processor that puts tokens before and after a text; null if there are none.
nlohmann::json template_processing(const std::vector<TemplateToken>& before,
                                   const std::vector<TemplateToken>& after);

/// A token that consists of two others: their places in a vocabulary.
struct TokenMerge {
  std::size_t token, left, right;
};
/// Returns every split of a token into two tokens, in the order of tokens, and for each by the
/// places of its parts. Empty texts and tokens of more than 512 bytes take no part. Calls
/// `too_many(n)`, which throws, if there are more than n splits, or if those have several times the
/// bytes of the vocabulary: tokens of a hostile vocabulary could have thousands each, those of
/// published ones have two or three.
std::vector<TokenMerge> all_merges(const std::vector<std::string_view>& texts,
                                   const std::function<void(std::size_t)>& too_many);

/// Returns the number of characters of a text in UTF-8.
std::size_t characters_of(std::string_view text);

/// Returns merges as a list of texts "left right", or of pairs of texts that have spaces.
nlohmann::json pairs_of(const std::vector<TokenMerge>& merges,
                        const std::vector<std::string_view>& texts);

}  // namespace kvzap::gguf
