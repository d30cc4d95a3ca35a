// Models of SentencePiece: tokenizer.model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/token_types.hpp"

namespace kvzap::gguf {

/// A tokenizer.model: the message ModelProto of SentencePiece's sentencepiece_model.proto.
struct SentencePieceFile {
  /// Numbers in the file. Types of pieces have the numbers of TokenType.
  enum Kind : std::uint64_t { unigram = 1, bpe = 2, word = 3, character = 4 };

  struct Piece {
    std::string_view text;  // in the bytes of the file
    float score = 0;
    std::int32_t type = normal;
  };

  std::vector<Piece> pieces;
  std::uint64_t kind = unigram;
  bool byte_fallback = false;
  // Ids are -1 if there is no such piece.
  std::int64_t unknown_id = 0, bos_id = 1, eos_id = 2;
  std::string unknown = "<unk>", bos = "<s>", eos = "</s>";
  /// The compiled normalizer; empty: none.
  std::string charsmap;
  bool adds_space = true;
  bool removes_extra_spaces = true;
  bool escapes_spaces = true;

  /// Reads the bytes of a file. Throws Error that begins with `where` if they are malformed, if a
  /// piece is not UTF-8 or its score not finite, or if there are no pieces or more than 2^19.
  /// `bytes` must outlive the result.
  static SentencePieceFile parse(std::string_view bytes, const std::string& where);
};

}  // namespace kvzap::gguf
