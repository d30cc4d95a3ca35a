#include "grammar/expression.hpp"

#include <algorithm>

namespace kvzap::grammar {
namespace {

using Kind = Expression::Kind;

constexpr char32_t first_surrogate = 0xD800, last_surrogate = 0xDFFF;

Expr make(Kind kind, std::vector<Expr> parts = {}) {
  auto made = std::make_shared<Expression>();
  made->kind = kind;
  made->parts = std::move(parts);
  return made;
}

Expr byte_range(unsigned first, unsigned last) {
  ByteSet bytes;
  for (unsigned byte = first; byte <= last; ++byte) bytes.set(byte);
  return one_byte(bytes);
}

/// Sorted ranges without overlap.
std::vector<CodePoints> merged(std::vector<CodePoints> ranges) {
  std::sort(ranges.begin(), ranges.end());
  std::vector<CodePoints> result;
  for (const auto& [first, last] : ranges) {
    if (first > last) continue;
    if (!result.empty() && first <= result.back().second + 1) {
      result.back().second = std::max(result.back().second, last);
    } else {
      result.emplace_back(first, last);
    }
  }
  return result;
}

/// Continuation bytes below the first byte of a character.
constexpr unsigned payload_bits = 6;

/// The last `count` bytes of characters from `first` to `last`, which share all bytes before.
void add_tails(unsigned count, char32_t first, char32_t last, const Expr& before,
               std::vector<Expr>& choices) {
  if (count == 0) {
    choices.push_back(before);
    return;
  }
  const unsigned shift = payload_bits * (count - 1);
  const char32_t mask = (char32_t{1} << shift) - 1;
  const auto byte_of = [&](char32_t code) { return 0x80U | ((code >> shift) & 0x3FU); };
  const auto add = [&](char32_t from, char32_t to) {
    const Expr next = sequence({before, byte_range(byte_of(from), byte_of(to))});
    add_tails(count - 1, from & mask, to & mask, next, choices);
  };
  // Ranges whose later bytes are not free are split off at both ends.
  const auto high = [&](char32_t code) { return code >> shift; };
  if (high(first) == high(last)) return add(first, last);
  if ((first & mask) != 0) {
    add(first, first | mask);
    first = (first | mask) + 1;
  }
  const bool has_end = (last & mask) != mask;
  const char32_t end = last;
  if (has_end) last = (last & ~mask) - 1;
  if (high(first) <= high(last) && first <= last) add(first, last);
  if (has_end) add(end & ~mask, end);
}

/// Code points whose UTF-8 has `tails` continuation bytes and begins with `lead`.
void add_encoded(unsigned tails, unsigned lead, char32_t first, char32_t last,
                 std::vector<Expr>& choices) {
  if (tails == 0) {
    choices.push_back(byte_range(first, last));
    return;
  }
  const unsigned shift = payload_bits * tails;
  const char32_t mask = (char32_t{1} << shift) - 1;
  for (char32_t high = first >> shift; high <= last >> shift; ++high) {
    const char32_t from = high == first >> shift ? first & mask : 0;
    const char32_t to = high == last >> shift ? last & mask : mask;
    const unsigned byte = lead | static_cast<unsigned>(high);
    add_tails(tails, from, to, byte_range(byte, byte), choices);
  }
}

}  // namespace

Expr nothing() { return make(Kind::nothing); }

Expr empty() { return make(Kind::sequence); }

Expr one_byte(const ByteSet& bytes) {
  auto made = std::make_shared<Expression>();
  made->kind = Kind::bytes;
  made->bytes = bytes;
  return made;
}

Expr any_text() { return repeat(one_byte(ByteSet().set()), 0); }

Expr literal(std::string_view text) {
  auto made = std::make_shared<Expression>();
  made->kind = Kind::text;
  made->text = text;
  return made;
}

Expr special_token(TokenId token) {
  auto made = std::make_shared<Expression>();
  made->kind = Kind::token;
  made->token = token;
  return made;
}

Expr sequence(std::vector<Expr> parts) {
  return parts.size() == 1 ? parts.front() : make(Kind::sequence, std::move(parts));
}

Expr choice(std::vector<Expr> parts) {
  return parts.size() == 1 ? parts.front() : make(Kind::choice, std::move(parts));
}

Expr repeat(Expr part, std::int64_t least, std::int64_t most) {
  auto made = std::make_shared<Expression>();
  made->kind = Kind::repeat;
  made->least = least;
  made->most = most;
  made->parts.push_back(std::move(part));
  return made;
}

Expr call(RuleId rule) {
  auto made = std::make_shared<Expression>();
  made->kind = Kind::call;
  made->rule = rule;
  return made;
}

Expr both(Expr a, Expr b) { return make(Kind::both, {std::move(a), std::move(b)}); }

Expr difference(Expr a, Expr b) { return make(Kind::difference, {std::move(a), std::move(b)}); }

Expr code_point(const std::vector<CodePoints>& ranges) {
  struct Length {
    char32_t first, last;
    unsigned tails, lead;
  };
  constexpr Length lengths[] = {{0, 0x7F, 0, 0},
                                {0x80, 0x7FF, 1, 0xC0},
                                {0x800, first_surrogate - 1, 2, 0xE0},
                                {last_surrogate + 1, 0xFFFF, 2, 0xE0},
                                {0x10000, last_code_point, 3, 0xF0}};
  std::vector<Expr> choices;
  for (const auto& [first, last] : merged(ranges)) {
    for (const Length& length : lengths) {
      const char32_t from = std::max(first, length.first), to = std::min(last, length.last);
      if (from <= to) add_encoded(length.tails, length.lead, from, to, choices);
    }
  }
  return choices.empty() ? nothing() : choice(std::move(choices));
}

std::vector<CodePoints> complement(std::vector<CodePoints> ranges) {
  std::vector<CodePoints> result;
  char32_t next = 0;
  for (const auto& [first, last] : merged(std::move(ranges))) {
    if (first > next) result.emplace_back(next, first - 1);
    next = last + 1;
  }
  if (next <= last_code_point) result.emplace_back(next, last_code_point);
  return result;
}

Expr until(std::string_view mark) {
  // What contains the mark and one byte more is no shortest text.
  const Expr all = any_text(), byte = one_byte(ByteSet().set());
  return difference(sequence({all, literal(mark)}), sequence({all, literal(mark), byte, all}));
}

}  // namespace kvzap::grammar
