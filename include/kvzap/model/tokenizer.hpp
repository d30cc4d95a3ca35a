// Byte-level BPE tokenizer of a Hugging Face model folder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvzap/core/types.hpp"

namespace kvzap {

/// Byte-level BPE read from tokenizer.json. It produces the same ids as the Hugging Face tokenizers
/// library.
///
/// It supports BPE models over the byte alphabet (merges as "a b" or ["a", "b"], ignore_merges) and
/// the normalizer NFC. It supports the pre-tokenizers Split, Digits and a final ByteLevel, and
/// added tokens with all their flags. It supports the post-processors ByteLevel and
/// TemplateProcessing, the decoder ByteLevel, and Sequences of these. Truncation and padding
/// settings of the file are ignored. The Unicode version of PCRE2 decides which characters are
/// letters or numbers, so text in very new scripts may be split differently.
///
/// Copies share one vocabulary. All const members may be called from several threads at once.
class Tokenizer {
 public:
  class StreamDecoder;

  /// Reads folder/tokenizer.json. Throws Error that names the file, the field, expected and found
  /// value, if the file is missing, malformed or uses an unsupported feature.
  static Tokenizer load(const std::filesystem::path& folder);

  /// Returns the ids of a text. Added tokens (special ones included) that are spelled out in the
  /// text are recognised. Each maximal subpart of invalid UTF-8 counts as one U+FFFD.
  /// `add_special_tokens` applies the post-processor's template, such as a leading
  /// beginning-of-text token. Throws Error if a regular expression of the pre-tokenizer exceeds its
  /// matching limits.
  std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = false) const;

  /// Returns the text of ids. Special tokens are left out unless skip_special_tokens is false. Ids
  /// without a token contribute nothing (models pad their vocabulary). Invalid UTF-8 becomes
  /// U+FFFD.
  std::string decode(const std::vector<TokenId>& ids, bool skip_special_tokens = true) const;

  /// Returns the id of the token with exactly this content. An added token is written as it is, any
  /// other token in the byte alphabet of tokenizer.json ("Ġthe" for " the").
  std::optional<TokenId> token_id(std::string_view content) const;

  /// Returns whether decode leaves this token out by default.
  bool is_special(TokenId id) const;

  /// Returns the number of tokens, added ones included. Ids may have gaps, so an id may exceed it.
  std::size_t vocabulary_size() const;

 private:
  struct Data;
  explicit Tokenizer(std::shared_ptr<const Data> data);
  std::shared_ptr<const Data> m_data;
};

/// Decodes ids one by one. The returned pieces, including that of finish(), concatenate to
/// Tokenizer::decode() of all ids.
class Tokenizer::StreamDecoder {
 public:
  /// Shares the tokenizer's vocabulary and may outlive the tokenizer.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = true);

  /// Returns the text that is complete with this token. Bytes that may begin a longer UTF-8
  /// sequence are held back until a later call.
  std::string append(TokenId id);

  /// Returns U+FFFD for bytes that were held back, and resets the decoder.
  std::string finish();

 private:
  std::shared_ptr<const Data> m_data;
  bool m_skip_special_tokens;
  std::string m_pending;
};

}  // namespace kvzap
