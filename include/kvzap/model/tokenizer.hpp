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

/// Byte-level BPE read from tokenizer.json; gives the ids the Hugging Face tokenizers library
/// gives.
///
/// Supported are BPE models over the byte alphabet (merges as "a b" or ["a", "b"], ignore_merges),
/// the normalizer NFC, the pre-tokenizers Split, Digits and a final ByteLevel, added tokens with
/// all their flags, the post-processors ByteLevel and TemplateProcessing, the decoder ByteLevel,
/// and Sequences of these. The truncation and padding settings of the file are ignored. Which
/// characters are letters or numbers is up to the Unicode version of PCRE2, so that text in the
/// newest scripts may be split differently. Copies share one vocabulary, and all const members may
/// be called from several threads at once.
class Tokenizer {
 public:
  class StreamDecoder;

  /// Reads folder/tokenizer.json. Throws Error, naming the file, the field, what was expected and
  /// what was found, if the file is missing or malformed or asks for anything unsupported.
  static Tokenizer load(const std::filesystem::path& folder);

  /// Ids of a text. Added tokens (special ones too) written out in the text are recognised. Each
  /// maximal subpart of invalid UTF-8 counts as one U+FFFD. add_special_tokens applies the
  /// post-processor's template, such as a leading beginning-of-text token. Throws Error if a
  /// pre-tokenizer's regular expression exceeds its matching limits.
  std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = false) const;

  /// Text of ids. Special tokens are left out unless skip_special_tokens is false. Ids without a
  /// token (models pad their vocabulary) contribute nothing; invalid UTF-8 becomes U+FFFD.
  std::string decode(const std::vector<TokenId>& ids, bool skip_special_tokens = true) const;

  /// Id of the token with exactly this content: an added token as it is written, any other token in
  /// the byte alphabet of tokenizer.json ("Ġthe" for " the").
  std::optional<TokenId> token_id(std::string_view content) const;

  /// Whether decode leaves this token out by default.
  bool is_special(TokenId id) const;

  /// Number of tokens, added ones included. Ids may have gaps and so exceed it.
  std::size_t vocabulary_size() const;

 private:
  struct Data;
  explicit Tokenizer(std::shared_ptr<const Data> data);
  std::shared_ptr<const Data> m_data;
};

/// Decodes ids one by one. The pieces it returns, finish() last, concatenate to
/// Tokenizer::decode() of all the ids.
class Tokenizer::StreamDecoder {
 public:
  /// Shares the tokenizer's vocabulary, and may outlive the tokenizer.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = true);

  /// Text that is complete with this token: bytes that may begin a longer UTF-8 sequence are held
  /// back until a later call.
  std::string append(TokenId id);

  /// What was held back, as U+FFFD. The decoder is then as new.
  std::string finish();

 private:
  std::shared_ptr<const Data> m_data;
  bool m_skip_special_tokens;
  std::string m_pending;
};

}  // namespace kvzap
