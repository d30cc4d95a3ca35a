// The tokens of a BPE model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::text {

/// Texts and ids of tokens, found by either. It has few blocks of memory, so a tokenizer of 150,000
/// tokens loads and frees fast.
class Vocabulary {
 public:
  /// `count`: the number of tokens to come.
  explicit Vocabulary(std::size_t count = 0);

  /// Adds a token whose text is new. Returns false if another token has the id.
  bool insert(std::string_view text, TokenId id);

  std::optional<TokenId> find(std::string_view text) const;

  /// Returns the text of a token; nothing if no token has the id.
  std::optional<std::string_view> text(TokenId id) const;

  std::size_t size() const { return m_tokens.size(); }

  /// The bytes of the longest text.
  std::size_t longest() const { return m_longest; }

 private:
  struct Token {
    std::size_t begin;  // of its text
    std::uint32_t size;
    TokenId id;
  };
  struct Slot {
    std::uint32_t hash;
    std::uint32_t place;  // of the token, plus 1; 0: empty
  };

  std::string_view text_of(const Token& token) const {
    return std::string_view(m_texts).substr(token.begin, token.size);
  }

  std::string m_texts;
  std::size_t m_longest = 0;
  std::vector<Token> m_tokens;
  std::vector<Slot> m_slots;            // by hash: a power of two, at most half of them taken
  std::vector<std::uint32_t> m_places;  // by id, as in a slot: the ids of models are dense
  std::unordered_map<TokenId, std::uint32_t> m_far_places;  // of ids beyond m_places
};

/// Reads the member `vocab` of a model: an object of tokens and their ids.
Vocabulary read_vocabulary(const nlohmann::json& vocab, const files::JsonField& model);

}  // namespace kvzap::text
