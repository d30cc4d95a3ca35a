#include "text/word_models.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "text/utf8.hpp"

namespace kvzap::text {

using files::JsonField;

namespace {

// The work for a word grows with its length and the square of that of the longest token.
// tokenizers' default is 100.
constexpr std::int64_t most_characters = 1024;

/// Returns as many whole characters as at most so many bytes hold.
std::string_view first_characters(std::string_view text, std::size_t bytes) {
  if (bytes >= text.size()) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0u) == 0x80u) --bytes;
  return text.substr(0, bytes);
}

}  // namespace

WordLevel::WordLevel(const JsonField& model, const nlohmann::json& vocab)
    : m_vocabulary(read_vocabulary(vocab, model)),
      m_unknown(model.member("unk_token").string()),
      m_where(model.member("unk_token").where()) {}

void WordLevel::append_unknown(std::string_view piece, std::vector<TokenId>& ids) const {
  const auto id = find(m_unknown);
  if (!id) {
    files::throw_unexpected(m_where,
                            fmt::format("a token of model.vocab (the text has the unknown {})",
                                        files::abbreviated(piece)),
                            files::abbreviated(m_unknown));
  }
  ids.push_back(*id);
}

void WordLevel::encode(std::string_view piece, std::vector<TokenId>& ids) const {
  if (const auto id = find(piece)) {
    ids.push_back(*id);
  } else {
    append_unknown(piece, ids);
  }
}

WordPiece::WordPiece(const JsonField& model, const nlohmann::json& vocab)
    : WordLevel(model, vocab),
      m_prefix(model.member("continuing_subword_prefix").string()),
      m_most_characters(static_cast<std::size_t>(
          model.member("max_input_chars_per_word").integer(0, most_characters))) {}

void WordPiece::encode(std::string_view piece, std::vector<TokenId>& ids) const {
  const std::size_t before = ids.size();
  const auto unknown = [&] {
    ids.resize(before);
    append_unknown(piece, ids);
  };
  std::size_t characters = 0;
  for (std::size_t i = 0; i < piece.size(); i += first_character(piece.substr(i)).second) {
    ++characters;
  }
  if (characters > m_most_characters) return unknown();
  std::string token;
  for (std::size_t begin = 0; begin < piece.size();) {
    token = begin > 0 ? m_prefix : std::string();
    const std::size_t prefix = token.size();
    token += first_characters(piece.substr(begin), longest() - std::min(longest(), prefix));
    std::optional<TokenId> id;
    while (token.size() > prefix && !(id = find(token))) {
      token.resize(token.size() - last_character(token).second);
    }
    if (!id) return unknown();
    ids.push_back(*id);
    begin += token.size() - prefix;
  }
}

}  // namespace kvzap::text
