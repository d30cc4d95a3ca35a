// Unigram models (SentencePiece): the segmentation with the highest total score.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"
#include "text/token_model.hpp"

namespace kvzap::text {

/// A Unigram model. Adjacent unknown characters become one unknown token, or the tokens of their
/// bytes (byte_fallback).
class Unigram : public TokenModel {
 public:
  Unigram(const files::JsonField& model, nlohmann::json vocab);

  void encode(std::string_view piece, std::vector<TokenId>& ids) const override;
  std::optional<TokenId> find(std::string_view token) const override;
  std::optional<std::string_view> token(TokenId id) const override;
  std::size_t size() const override { return m_order.size(); }

 private:
  /// Calls on_token(length, id) for each token that `text` begins with, shorter ones first.
  template <class OnToken>
  void each_prefix(std::string_view text, OnToken on_token) const;
  void append(std::string_view part, std::vector<TokenId>& ids) const;
  TokenId unknown_id(std::string_view part) const;

  std::vector<std::string> m_tokens;  // by id
  std::vector<double> m_scores;
  std::vector<std::uint32_t> m_order;      // ids, sorted by token
  std::array<std::uint32_t, 257> m_first;  // places in m_order where tokens begin with a byte
  double m_unknown_score;
  std::optional<TokenId> m_unknown_id;
  std::array<std::optional<TokenId>, 256> m_fallback_ids;  // <0x00> to <0xFF>
  bool m_byte_fallback;
  std::string m_where;  // of unk_id, in messages
};

}  // namespace kvzap::text
