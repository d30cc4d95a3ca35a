// Byte-pair encoding, over the byte alphabet or over characters.
#pragma once

#include <array>
#include <cstddef>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"
#include "text/merges.hpp"
#include "text/token_model.hpp"
#include "text/vocabulary.hpp"

namespace kvzap::text {

/// A BPE model. A character without a token becomes the tokens of its bytes (byte_fallback), the
/// token for unknown characters, or nothing.
class Bpe : public TokenModel {
 public:
  Bpe(const files::JsonField& model, const nlohmann::json& vocab, nlohmann::json merges);

  void encode(std::string_view piece, std::vector<TokenId>& ids) const override;
  bool takes_bytes() const override { return m_prefix.empty() && m_suffix.empty(); }
  void encode_bytes(std::string_view piece, std::vector<TokenId>& ids) const override;
  std::optional<TokenId> find(std::string_view token) const override {
    return m_vocabulary.find(token);
  }
  std::optional<std::string_view> token(TokenId id) const override { return m_vocabulary.text(id); }
  std::size_t size() const override { return m_vocabulary.size(); }

 private:
  class Word;

  void read_vocabulary(const nlohmann::json& vocab, const files::JsonField& model);
  void read_merges(nlohmann::json list, const files::JsonField& model);
  void append_symbol(Word& word, const std::string& character) const;
  bool append_whole(std::string_view piece, std::vector<TokenId>& ids) const;

  Vocabulary m_vocabulary;
  std::array<std::optional<TokenId>, 256> m_alphabet_ids;  // the byte alphabet's tokens
  std::array<std::optional<TokenId>, 256> m_fallback_ids;  // <0x00> to <0xFF>
  MergeTable m_merges;
  std::optional<std::string> m_unknown_token;
  std::optional<TokenId> m_unknown_id;
  std::string m_where;  // of unk_token, in messages
  std::string m_prefix, m_suffix;
  bool m_byte_fallback, m_fuse_unknown, m_ignore_merges;
};

}  // namespace kvzap::text
