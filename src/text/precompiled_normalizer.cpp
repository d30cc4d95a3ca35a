#include "text/precompiled_normalizer.hpp"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstddef>

#include "files/base64.hpp"
#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

// Published tables have 33.
constexpr std::size_t max_replacement_bytes = 128;

/// A unit of the trie.
struct TrieUnit {
  std::uint32_t bits;
  bool has_leaf() const { return (bits >> 8 & 1) != 0; }
  std::uint32_t value() const { return bits & 0x7FFFFFFF; }
  std::uint32_t label() const { return bits & 0x800000FF; }
  std::uint32_t offset() const { return bits >> 10 << ((bits & 0x200) >> 6); }
};

std::uint32_t little_endian(std::string_view bytes, std::size_t position) {
  std::uint32_t result = 0;
  for (std::size_t i = 4; i-- > 0;) {
    result = result << 8 | static_cast<unsigned char>(bytes[position + i]);
  }
  return result;
}

}  // namespace

PrecompiledNormalizer::PrecompiledNormalizer(const files::JsonField& charsmap) {
  const auto decoded = files::from_base64(charsmap.string());
  if (!decoded) charsmap.fail("a text in base64");
  const std::string& bytes = *decoded;
  if (bytes.size() < 4) charsmap.fail("a table of normalized characters");
  const std::size_t trie_bytes = little_endian(bytes, 0);
  if (trie_bytes % 4 != 0 || trie_bytes == 0 || trie_bytes > bytes.size() - 4) {
    charsmap.fail("a table of normalized characters that holds its trie");
  }
  m_units.reserve(trie_bytes / 4);
  for (std::size_t i = 0; i < trie_bytes; i += 4) m_units.push_back(little_endian(bytes, 4 + i));
  m_texts = bytes.substr(4 + trie_bytes);
  if (!is_valid_utf8(m_texts)) charsmap.fail("a table of normalized characters in UTF-8");
  for (std::size_t begin = 0; begin < m_texts.size();) {
    const std::size_t end = std::min(m_texts.find('\0', begin), m_texts.size());
    if (end - begin > max_replacement_bytes) {
      charsmap.fail(fmt::format("replacements of at most {} bytes", max_replacement_bytes));
    }
    begin = end + 1;
  }
}

std::optional<std::string_view> PrecompiledNormalizer::replacement(std::string_view part) const {
  std::size_t position = TrieUnit{m_units[0]}.offset();
  for (const char byte : part) {
    const auto c = static_cast<unsigned char>(byte);
    position ^= c;
    if (c == 0 || position >= m_units.size() || TrieUnit{m_units[position]}.label() != c)
      return std::nullopt;
    const TrieUnit unit{m_units[position]};
    position ^= unit.offset();
    if (!unit.has_leaf()) continue;
    if (position >= m_units.size()) return std::nullopt;
    const std::size_t begin = TrieUnit{m_units[position]}.value();
    if (begin >= m_texts.size()) return std::nullopt;
    const std::string_view text = std::string_view(m_texts).substr(begin);
    const std::string_view result = text.substr(0, text.find('\0'));
    // A malformed table could refer to the inside of a character.
    if (!is_valid_utf8(result)) return std::nullopt;
    return result;
  }
  return std::nullopt;
}

void PrecompiledNormalizer::append(std::string& result, std::string_view cluster) const {
  if (cluster.size() < 6) {
    if (const auto whole = replacement(cluster)) {
      result += *whole;
      return;
    }
  }
  for (std::size_t position = 0; position < cluster.size();) {
    const std::size_t length = first_character(cluster.substr(position)).second;
    const std::string_view c = cluster.substr(position, length);
    result += replacement(c).value_or(c);
    position += length;
  }
}

std::string PrecompiledNormalizer::operator()(std::string_view text) const {
  std::string result;
  result.reserve(text.size());
  std::size_t begin = 0;
  utf8proc_int32_t previous = 0, state = 0;
  for (std::size_t position = 0; position < text.size();) {
    const auto [c, length] = first_character(text.substr(position));
    if (position > 0 && utf8proc_grapheme_break_stateful(previous, c, &state)) {
      append(result, text.substr(begin, position - begin));
      begin = position;
    }
    previous = c;
    position += length;
  }
  append(result, text.substr(begin));
  return result;
}

}  // namespace kvzap::text
