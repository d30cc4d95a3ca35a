// The parts of a tokenizer. tokenizer_data.cpp reads them, tokenizer.cpp uses them.
#pragma once

#include <cstddef>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json_field.hpp"
#include "text/added_tokens.hpp"
#include "text/decoder.hpp"
#include "text/normalizer.hpp"
#include "text/post_processor.hpp"
#include "text/pre_tokenizer.hpp"
#include "text/text_piece.hpp"
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
  text::AddedTokenMatcher raw_matcher;         // added tokens sought in the raw text
  text::AddedTokenMatcher normalized_matcher;  // added tokens sought in the normalized text

  text::Normalizers normalizers;
  text::PreTokenizers pre_tokenizers;
  text::AddedIds added_ids;
  text::Decoder decoder;

  /// `content`: a whole tokenizer.json; `file`: its name in messages.
  Data(nlohmann::json content, const std::string& file);

  void read_added_tokens(const base::JsonField& field);

  using Cache = std::unordered_map<std::string, std::vector<TokenId>>;
  void encode_text(const text::TextPiece& whole, text::GrowthLimit& limit, Cache& cache,
                   std::vector<TokenId>& ids) const;
  void encode_pre_token(std::string_view text, Cache& cache, std::vector<TokenId>& ids) const;

  // Returns the token that takes part in decoding; null if the id has none or it is left out.
  const std::string* decoded_token(TokenId id, bool skip_special_tokens) const {
    if (skip_special_tokens && special.count(id) != 0) return nullptr;
    const auto found = added_texts.find(id);
    return found == added_texts.end() ? model->token(id) : &found->second;
  }
};

}  // namespace kvzap
