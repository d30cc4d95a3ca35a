// The tokenizer of a model.
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

/// A tokenizer read from tokenizer.json. It produces the same ids and texts as the Hugging Face
/// tokenizers library (0.23).
///
/// - Models: BPE, over the byte alphabet or over characters (byte_fallback, unk_token, fuse_unk,
///   ignore_merges, continuing_subword_prefix, end_of_word_suffix); Unigram (byte_fallback);
///   WordPiece; WordLevel.
/// - Normalizers: NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend, Replace,
///   Precompiled, ByteLevel, Nmt, BertNormalizer.
/// - Pre-tokenizers: Split, Digits, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit,
///   FixedLength, BertPreTokenizer, Metaspace, ByteLevel.
/// - Added tokens with all their flags.
/// - Post-processors: ByteLevel, TemplateProcessing, BertProcessing, RobertaProcessing.
/// - Decoders: ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace, WordPiece, BPEDecoder.
/// - Sequences of these. Every other kind is an error.
///
/// Truncation and padding settings of the file are ignored. Special tokens are special whatever
/// their other flags. The Unicode versions of PCRE2 and utf8proc decide about the properties of
/// characters, so text in very new scripts may be split differently.
///
/// Copies share one vocabulary. All const members may be called from several threads at once.
class Tokenizer {
 public:
  class StreamDecoder;

  /// Reads folder/tokenizer.json. Without it, converts another vocabulary of the folder as
  /// transformers does: tekken.json, tokenizer.model (SentencePiece or tiktoken), tiktoken.model,
  /// or vocab.json and merges.txt. Throws Error that names the file, the field, expected and found
  /// value, if the files are missing, malformed or use an unsupported feature.
  static Tokenizer load(const std::filesystem::path& folder);

  /// Returns the ids of a text. Added tokens (special ones included) that are spelled out in the
  /// text are recognised. Each maximal subpart of invalid UTF-8 counts as one U+FFFD.
  /// `add_special_tokens` applies the post-processor's template, such as a leading
  /// beginning-of-text token. Throws Error if a regular expression exceeds its matching limits, if
  /// a character has no token and the file lacks a token for unknown ones, or if normalizers and
  /// pre-tokenizers add more than 32 bytes for each byte of the text.
  std::vector<TokenId> encode(std::string_view text, bool add_special_tokens = false) const;

  /// Returns the text of ids. Special tokens are left out unless skip_special_tokens is false. Ids
  /// without a token contribute nothing (models pad their vocabulary). Invalid UTF-8 becomes
  /// U+FFFD. Without a decoder in the file, spaces join the tokens.
  std::string decode(const std::vector<TokenId>& ids, bool skip_special_tokens = true) const;

  /// Returns the bytes that a token, special or not, adds to a text between other tokens. They may
  /// be a part of a character. None for an id without a token.
  std::string token_bytes(TokenId id) const;

  /// Returns the id of the token with exactly this content. An added token is written as it is, any
  /// other token as in model.vocab ("Ġthe" or "▁the" for " the").
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
  /// Shares the tokenizer's vocabulary and may outlive the tokenizer. `continues`: the ids follow
  /// on a text, so a decoder that changes the beginning of a text leaves the first one alone.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens = true,
                         bool continues = false);
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;
  ~StreamDecoder();

  /// Returns the text that is complete with this token. Bytes that may begin a longer UTF-8
  /// sequence are held back until a later call, as is a run of byte tokens ("<0xE2>") until another
  /// token follows.
  std::string append(TokenId id);

  /// Returns the text that was held back, U+FFFD for incomplete bytes, and resets the decoder.
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> m_state;
};

}  // namespace kvzap
