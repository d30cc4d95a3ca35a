// The parts of a tokenizer. tokenizer_data.cpp reads them, tokenizer.cpp uses them.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "files/json_field.hpp"
#include "text/added_tokens.hpp"
#include "text/decoder.hpp"
#include "text/normalizer.hpp"
#include "text/post_processor.hpp"
#include "text/pre_token_cache.hpp"
#include "text/pre_tokenizer.hpp"
#include "text/text_piece.hpp"
#include "text/token_bytes.hpp"
#include "text/token_model.hpp"

namespace kvzap {

/// The contents of tokenizer.json, and the steps of encoding and decoding.
struct Tokenizer::Data {
  std::string file;  // its name in messages
  std::unique_ptr<const text::TokenModel> model;
  std::size_t size = 0;  // number of tokens

  std::unordered_map<std::string, TokenId> added;
  // The texts that added tokens decode to: the normalized ones of those that are found in the
  // normalized text.
  std::unordered_map<TokenId, std::string> added_texts;
  std::unordered_set<TokenId> special;
  // Set at filter_place of each added token. Few tokens are added, so few are sought in the tables.
  std::bitset<1u << 14> may_be_added;
  text::AddedTokenMatcher raw_matcher;         // added tokens sought in the raw text
  text::AddedTokenMatcher normalized_matcher;  // added tokens sought in the normalized text

  text::Normalizers normalizers;
  text::PreTokenizers pre_tokenizers;
  text::AddedIds added_ids;
  text::Decoder decoder;
  text::TokenBytes token_bytes;  // of ids up to a bound, if the decoder joins bytes

  /// `content`: a whole tokenizer.json; `file`: its name in messages.
  Data(nlohmann::json content, const std::string& file);

  void read_added_tokens(const files::JsonField& field);

  std::size_t filter_place(TokenId id) const {
    return static_cast<std::uint32_t>(id) % may_be_added.size();
  }

  void encode_text(const text::TextPiece& whole, text::GrowthLimit& limit,
                   text::PreTokenCache& cache) const;

  // Returns the bytes that a token adds to a text, if the decoder joins bytes. `memory` may hold
  // them.
  std::string_view decoded_bytes(TokenId id, bool skip_special_tokens, std::string& memory) const;

  // Returns the token that takes part in decoding; nothing if the id has none or it is left out.
  std::optional<std::string_view> decoded_token(TokenId id, bool skip_special_tokens) const {
    if (!may_be_added[filter_place(id)]) return model->token(id);
    if (skip_special_tokens && special.count(id) != 0) return std::nullopt;
    const auto found = added_texts.find(id);
    return found == added_texts.end() ? model->token(id)
                                      : std::optional<std::string_view>(found->second);
  }
};

}  // namespace kvzap
