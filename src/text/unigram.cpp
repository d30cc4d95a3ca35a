#include "text/unigram.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>

#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

using files::JsonField;

// The work for a text is at most this times its length. Tokens of published models have less than a
// hundred bytes.
constexpr std::size_t max_token_bytes = 1024;

// SentencePiece's kUnkPenalty.
constexpr double unknown_penalty = 10;

// tokenizers reads a number as its digits, rounded to a double and then divided by a power of ten.
// The last bit of the result decides between segmentations of equal scores, such as "aa a" and
// "a aa". Files have the shortest digits that identify a number.
double as_tokenizers_reads(double score) {
  std::array<char, 32> text{};
  const auto end =
      std::to_chars(text.begin(), text.end(), score, std::chars_format::scientific).ptr;
  const char* const mantissa_end = std::find(text.data(), end, 'e');
  std::uint64_t digits = 0;
  int decimals = 0;
  bool is_decimal = false;
  for (const char* c = text.data(); c != mantissa_end; ++c) {
    is_decimal = is_decimal || *c == '.';
    if (*c < '0' || *c > '9') continue;
    digits = digits * 10 + static_cast<std::uint64_t>(*c - '0');
    decimals += is_decimal ? 1 : 0;
  }
  decimals -= std::atoi(mantissa_end + 1);
  constexpr std::array<double, 23> powers = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                             1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                             1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
  if (decimals <= 0 || decimals >= static_cast<int>(powers.size())) return score;
  return std::copysign(static_cast<double>(digits) / powers[static_cast<std::size_t>(decimals)],
                       score);
}

}  // namespace

Unigram::Unigram(const JsonField& model, nlohmann::json vocab)
    : m_byte_fallback(model.member("byte_fallback").boolean(false)),
      m_where(model.member("unk_id").where()) {
  const JsonField field = model.named(vocab, "vocab");
  const std::size_t count = field.array_size();
  if (count == 0 || count > std::numeric_limits<TokenId>::max()) {
    field.fail("a list of tokens and their scores");
  }
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    const JsonField entry = field.element(i);
    if (entry.array_size() != 2) entry.fail("a token and its score");
    const std::string& token = entry.element(0).string();
    if (token.size() > max_token_bytes) {
      entry.element(0).fail(fmt::format("a token of at most {} bytes", max_token_bytes));
    }
    m_tokens.push_back(token);
    m_scores.push_back(as_tokenizers_reads(entry.element(1).number()));
    least = std::min(least, m_scores.back());
    vocab[i] = nullptr;
  }
  m_unknown_score = least - unknown_penalty;

  // Of equal tokens, the last counts.
  m_order.resize(count);
  std::iota(m_order.begin(), m_order.end(), 0U);
  std::sort(m_order.begin(), m_order.end(), [this](std::uint32_t a, std::uint32_t b) {
    const int order = m_tokens[a].compare(m_tokens[b]);
    return order < 0 || (order == 0 && a > b);
  });
  m_order.erase(
      std::unique(m_order.begin(), m_order.end(),
                  [this](std::uint32_t a, std::uint32_t b) { return m_tokens[a] == m_tokens[b]; }),
      m_order.end());
  std::size_t place = !m_order.empty() && m_tokens[m_order[0]].empty() ? 1 : 0;
  for (int byte = 0; byte < 256; ++byte) {
    m_first[byte] = static_cast<std::uint32_t>(place);
    while (place < m_order.size() &&
           static_cast<unsigned char>(m_tokens[m_order[place]][0]) == byte) {
      ++place;
    }
  }
  m_first[256] = static_cast<std::uint32_t>(place);

  const JsonField unknown = model.member("unk_id");
  if (!unknown.is_null()) {
    m_unknown_id = static_cast<TokenId>(unknown.integer(0, static_cast<std::int64_t>(count) - 1));
  }
  for (int byte = 0; m_byte_fallback && byte < 256; ++byte) {
    m_fallback_ids[byte] = find(byte_token(static_cast<unsigned char>(byte)));
  }
}

template <class OnToken>
void Unigram::each_prefix(std::string_view text, OnToken on_token) const {
  const auto byte_at = [this](std::uint32_t id, std::size_t depth) {
    return static_cast<unsigned char>(m_tokens[id][depth]);
  };
  // m_order[begin..end-1] are the tokens that begin with text[0..depth-1].
  const auto first = static_cast<unsigned char>(text[0]);
  auto begin = m_order.begin() + m_first[first], end = m_order.begin() + m_first[first + 1];
  for (std::size_t depth = 1; begin != end; ++depth) {
    if (m_tokens[*begin].size() == depth) {
      on_token(depth, static_cast<TokenId>(*begin));
      ++begin;
    }
    if (depth == text.size()) return;
    const auto byte = static_cast<unsigned char>(text[depth]);
    begin = std::lower_bound(begin, end, byte, [&](std::uint32_t id, unsigned char wanted) {
      return byte_at(id, depth) < wanted;
    });
    end = std::upper_bound(begin, end, byte, [&](unsigned char wanted, std::uint32_t id) {
      return wanted < byte_at(id, depth);
    });
  }
}

void Unigram::encode(std::string_view piece, std::vector<TokenId>& ids) const {
  // The best segmentation of the text up to a place: its score, and the begin of its last token.
  struct Best {
    double score = 0;
    std::size_t begin = std::string_view::npos;
    TokenId id = 0;
  };
  std::vector<Best> best(piece.size() + 1);
  for (std::size_t begin = 0; begin < piece.size();) {
    const std::size_t character = first_character(piece.substr(begin)).second;
    bool has_character = false;
    const auto improves = [&](std::size_t length, double score) {
      const Best& target = best[begin + length];
      return target.begin == std::string_view::npos || score + best[begin].score > target.score;
    };
    each_prefix(piece.substr(begin), [&](std::size_t length, TokenId id) {
      const double score = m_scores[id];
      if (improves(length, score)) best[begin + length] = {score + best[begin].score, begin, id};
      if (length == character) has_character = true;
    });
    if (!has_character && improves(character, m_unknown_score)) {
      best[begin + character] = {m_unknown_score + best[begin].score, begin,
                                 unknown_id(piece.substr(begin, character))};
    }
    begin += character;
  }
  std::vector<std::string_view> parts;
  bool previous_unknown = false;
  for (std::size_t end = piece.size(); end > 0;) {
    const Best& last = best[end];
    const std::string_view part = piece.substr(last.begin, end - last.begin);
    const bool is_unknown = last.id == m_unknown_id;
    if (is_unknown && previous_unknown) {
      parts.back() = piece.substr(last.begin, part.size() + parts.back().size());
    } else {
      parts.push_back(part);
    }
    previous_unknown = is_unknown;
    end = last.begin;
  }
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) append(*part, ids);
}

void Unigram::append(std::string_view part, std::vector<TokenId>& ids) const {
  // Unknown characters that follow each other may be a token together.
  if (const auto id = find(part)) {
    ids.push_back(*id);
    return;
  }
  const bool has_all_bytes =
      m_byte_fallback && std::all_of(part.begin(), part.end(), [this](char byte) {
        return m_fallback_ids[static_cast<unsigned char>(byte)].has_value();
      });
  if (has_all_bytes) {
    for (const char byte : part) ids.push_back(*m_fallback_ids[static_cast<unsigned char>(byte)]);
  } else {
    ids.push_back(unknown_id(part));
  }
}

TokenId Unigram::unknown_id(std::string_view part) const {
  if (!m_unknown_id) {
    files::throw_unexpected(
        m_where, fmt::format("an id (the text has the unknown {})", files::abbreviated(part)),
        "none");
  }
  return *m_unknown_id;
}

std::optional<TokenId> Unigram::find(std::string_view token) const {
  const auto found = std::lower_bound(
      m_order.begin(), m_order.end(), token,
      [this](std::uint32_t id, std::string_view wanted) { return m_tokens[id] < wanted; });
  if (found == m_order.end() || m_tokens[*found] != token) return std::nullopt;
  return static_cast<TokenId>(*found);
}

std::optional<std::string_view> Unigram::token(TokenId id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= m_tokens.size()) return std::nullopt;
  return m_tokens[id];
}

}  // namespace kvzap::text
