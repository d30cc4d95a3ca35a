#include "text/bpe.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <utility>

#include "files/byte_alphabet.hpp"
#include "text/utf8.hpp"

namespace kvzap::text {

using files::abbreviated;
using files::JsonField;
using files::throw_unexpected;

namespace {

std::string optional_string(const JsonField& field) {
  return field.is_null() ? std::string() : field.string();
}

}  // namespace

/// The symbols of a piece before merges. tokenizers appends an unknown character only when the next
/// character with a token, or another unknown one, follows; tokens of bytes overtake it.
class Bpe::Word {
 public:
  explicit Word(bool fuse_unknown) : m_fuse_unknown(fuse_unknown) {}

  void append(TokenId id) {
    flush();
    m_symbols.push_back(id);
  }
  void append_byte(TokenId id) { m_symbols.push_back(id); }
  void append_unknown(TokenId id) {
    if (m_unknown && m_fuse_unknown) return;
    flush();
    m_unknown = id;
  }
  std::vector<TokenId> finish() {
    flush();
    return std::move(m_symbols);
  }
  void reserve(std::size_t count) { m_symbols.reserve(count); }

 private:
  void flush() {
    if (m_unknown) m_symbols.push_back(*m_unknown);
    m_unknown.reset();
  }

  std::vector<TokenId> m_symbols;
  std::optional<TokenId> m_unknown;
  bool m_fuse_unknown;
};

Bpe::Bpe(const JsonField& model, const nlohmann::json& vocab, nlohmann::json merges)
    : m_where(model.member("unk_token").where()),
      m_prefix(optional_string(model.member("continuing_subword_prefix"))),
      m_suffix(optional_string(model.member("end_of_word_suffix"))),
      m_byte_fallback(model.member("byte_fallback").boolean(false)),
      m_fuse_unknown(model.member("fuse_unk").boolean(false)),
      m_ignore_merges(model.member("ignore_merges").boolean(false)) {
  const JsonField dropout = model.member("dropout");
  if (!dropout.is_null() && !(dropout.value().is_number() && dropout.value().get<double>() == 0)) {
    dropout.fail("null or 0");
  }
  const JsonField unknown = model.member("unk_token");
  if (!unknown.is_null()) m_unknown_token = unknown.string();
  read_vocabulary(vocab, model);
  read_merges(std::move(merges), model);
}

void Bpe::read_vocabulary(const nlohmann::json& vocab, const JsonField& model) {
  m_vocabulary = text::read_vocabulary(vocab, model);
  for (int byte = 0; byte < 256; ++byte) {
    m_alphabet_ids[byte] = find(files::byte_alphabet().of_byte[byte]);
    if (m_byte_fallback) m_fallback_ids[byte] = find(byte_token(static_cast<unsigned char>(byte)));
  }
  if (m_unknown_token) m_unknown_id = find(*m_unknown_token);
}

void Bpe::read_merges(nlohmann::json list, const JsonField& model) {
  const JsonField field = model.named(list, "merges");
  const std::size_t count = field.array_size();
  std::string merged;
  for (std::size_t i = 0; i < count; ++i) {
    const JsonField entry = field.element(i);
    std::string_view left, right;
    if (entry.value().is_string()) {
      const std::string_view text = entry.string();
      const std::size_t space = text.find(' ');
      if (space == text.npos || text.find(' ', space + 1) != text.npos) {
        entry.fail("two tokens with a space between them");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else {
      if (entry.array_size() != 2) entry.fail("two tokens");
      left = entry.element(0).string();
      right = entry.element(1).string();
    }
    const auto id_of = [&](std::string_view token) {
      const auto id = find(token);
      if (!id) throw_unexpected(entry.where(), "tokens of model.vocab", abbreviated(token));
      return *id;
    };
    const TokenId left_id = id_of(left), right_id = id_of(right);
    if (right.size() < m_prefix.size()) entry.fail("a token with the continuing_subword_prefix");
    merged.assign(left).append(right.substr(m_prefix.size()));
    // If a pair appears twice, its later rank counts.
    m_merges.set(left_id, right_id, {static_cast<std::uint32_t>(i), id_of(merged)});
    list[i] = nullptr;
  }
}

bool Bpe::append_whole(std::string_view piece, std::vector<TokenId>& ids) const {
  const auto whole = m_ignore_merges ? find(piece) : std::nullopt;
  if (whole) ids.push_back(*whole);
  return whole.has_value();
}

void Bpe::append_symbol(Word& word, const std::string& character) const {
  if (const auto id = find(character)) {
    word.append(*id);
    return;
  }
  bool has_all_bytes = m_byte_fallback;
  for (const char byte : character) {
    has_all_bytes = has_all_bytes && m_fallback_ids[static_cast<unsigned char>(byte)];
  }
  if (has_all_bytes) {
    for (const char byte : character) {
      word.append_byte(*m_fallback_ids[static_cast<unsigned char>(byte)]);
    }
  } else if (m_unknown_token) {
    if (!m_unknown_id) {
      throw_unexpected(
          m_where, fmt::format("a token of model.vocab (the text has {})", abbreviated(character)),
          abbreviated(*m_unknown_token));
    }
    word.append_unknown(*m_unknown_id);
  }
}

void Bpe::encode(std::string_view piece, std::vector<TokenId>& ids) const {
  if (append_whole(piece, ids)) return;
  Word word(m_fuse_unknown);
  word.reserve(piece.size());
  std::string character;
  for (std::size_t position = 0; position < piece.size();) {
    const std::size_t length = first_character(piece.substr(position)).second;
    character.clear();
    if (position > 0) character = m_prefix;
    character += piece.substr(position, length);
    position += length;
    if (position == piece.size()) character += m_suffix;
    append_symbol(word, character);
  }
  std::vector<TokenId> symbols = word.finish();
  apply_merges(symbols, m_merges);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

void Bpe::encode_bytes(std::string_view piece, std::vector<TokenId>& ids) const {
  if (m_ignore_merges) {
    if (append_whole(files::byte_alphabet().encode(piece), ids)) return;
  }
  Word word(m_fuse_unknown);
  word.reserve(piece.size());
  for (const char c : piece) {
    const auto byte = static_cast<unsigned char>(c);
    if (m_alphabet_ids[byte]) {
      word.append(*m_alphabet_ids[byte]);
    } else {
      append_symbol(word, files::byte_alphabet().of_byte[byte]);
    }
  }
  std::vector<TokenId> symbols = word.finish();
  apply_merges(symbols, m_merges);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

}  // namespace kvzap::text
