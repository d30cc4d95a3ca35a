// The model of a tokenizer: its vocabulary, and the encoding of a piece of text.
#pragma once

#include <cstddef>
#include <kvzap/core/types.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::text {

class TokenModel {
 public:
  virtual ~TokenModel() = default;

  /// Appends the ids of a piece (valid UTF-8, not empty). Throws Error if the piece has a character
  /// that needs a token for unknown characters and the vocabulary has none.
  virtual void encode(std::string_view piece, std::vector<TokenId>& ids) const = 0;

  /// Returns whether encode_bytes exists.
  virtual bool takes_bytes() const { return false; }

  /// Appends the ids of a piece whose bytes stand for characters of the byte alphabet.
  virtual void encode_bytes(std::string_view /*piece*/, std::vector<TokenId>& /*ids*/) const {}

  virtual std::optional<TokenId> find(std::string_view token) const = 0;

  /// Returns the text of a token; nothing if the vocabulary has no such id.
  virtual std::optional<std::string_view> token(TokenId id) const = 0;

  /// Returns the number of tokens.
  virtual std::size_t size() const = 0;
};

/// Reads the field model. Its members `vocab` and `merges` are nearly all of the file; they are
/// passed apart and freed during reading, so that they are never in memory twice.
std::unique_ptr<const TokenModel> read_model(const files::JsonField& model, nlohmann::json vocab,
                                             nlohmann::json merges);

/// Returns the name of the token for a byte without a token of its own: "<0x0A>".
std::string byte_token(unsigned char byte);

}  // namespace kvzap::text
