// Models whose pieces are whole words: WordLevel and WordPiece.
#pragma once

#include <cstddef>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"
#include "text/token_model.hpp"
#include "text/vocabulary.hpp"

namespace kvzap::text {

/// A vocabulary of words. Another word becomes the unknown token.
class WordLevel : public TokenModel {
 public:
  WordLevel(const files::JsonField& model, const nlohmann::json& vocab);

  void encode(std::string_view piece, std::vector<TokenId>& ids) const override;
  std::optional<TokenId> find(std::string_view token) const override {
    return m_vocabulary.find(token);
  }
  std::optional<std::string_view> token(TokenId id) const override { return m_vocabulary.text(id); }
  std::size_t size() const override { return m_vocabulary.size(); }

 protected:
  /// Throws Error if the vocabulary has no unknown token.
  void append_unknown(std::string_view piece, std::vector<TokenId>& ids) const;

  std::size_t longest() const { return m_vocabulary.longest(); }

 private:
  Vocabulary m_vocabulary;
  std::string m_unknown;
  std::string m_where;  // of unk_token, in messages
};

/// Splits each word into the longest tokens, from left to right. All but the first have a prefix in
/// the vocabulary. A word that has no such split becomes the unknown token.
class WordPiece : public WordLevel {
 public:
  WordPiece(const files::JsonField& model, const nlohmann::json& vocab);

  void encode(std::string_view piece, std::vector<TokenId>& ids) const override;

 private:
  std::string m_prefix;
  std::size_t m_most_characters;
};

}  // namespace kvzap::text
