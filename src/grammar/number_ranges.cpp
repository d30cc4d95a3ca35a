#include "grammar/number_ranges.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <utility>

namespace kvzap::grammar {
namespace {

/// Digits that two doubles always tell apart.
constexpr int significant_digits = 15;
constexpr std::uint64_t most_endings = 1'000;

Expr digit(char first = '0', char last = '9') {
  ByteSet bytes;
  for (char each = first; each <= last; ++each) bytes.set(static_cast<unsigned char>(each));
  return one_byte(bytes);
}

Expr digits_between(std::int64_t least, std::int64_t most) { return repeat(digit(), least, most); }

Expr any_whole() {
  return choice({literal("0"), sequence({digit('1'), digits_between(0, unlimited)})});
}

Expr signed_texts(Expr texts) { return sequence({optional(literal("-")), std::move(texts)}); }

/// Numbers without sign between whose texts and a bound digits decide, from the last to the first.
/// Wholes above (below) `whole`, of the same number of digits.
Expr same_length(const std::string& whole, bool above) {
  Expr rest = nothing();
  for (std::size_t i = whole.size(); i-- > 0;) {
    const std::int64_t behind = static_cast<std::int64_t>(whole.size() - i) - 1;
    const char lowest = i == 0 && whole.size() > 1 ? '1' : '0';
    const char first = above ? static_cast<char>(whole[i] + 1) : lowest;
    const char last = above ? '9' : static_cast<char>(whole[i] - 1);
    std::vector<Expr> choices = {sequence({digit(whole[i], whole[i]), rest})};
    if (first <= last) {
      choices.push_back(sequence({digit(first, last), digits_between(behind, behind)}));
    }
    rest = choice(std::move(choices));
  }
  return rest;
}

Expr whole_above(const std::string& whole) {
  const auto length = static_cast<std::int64_t>(whole.size());
  return choice(
      {same_length(whole, true), sequence({digit('1'), digits_between(length, unlimited)})});
}

Expr whole_below(const std::string& whole) {
  std::vector<Expr> choices = {same_length(whole, false)};
  const auto length = static_cast<std::int64_t>(whole.size());
  if (length > 1) {
    choices.push_back(literal("0"));
    choices.push_back(sequence({digit('1'), digits_between(0, length - 2)}));
  }
  return choice(std::move(choices));
}

/// No fraction, or a point and up to `most` digits.
Expr any_fraction(int most) {
  if (most == 0) return empty();
  return optional(sequence({literal("."), digits_between(1, most)}));
}

/// Digits after the point, or after some of them: those not below (strictly: above) `bound`.
Expr fraction_digits_above(std::string_view bound, bool strictly, int most) {
  if (bound.empty() && !strictly) return digits_between(0, most);
  if (most == 0) return nothing();
  const char first = bound.empty() ? '0' : bound[0];
  const std::string_view behind = bound.empty() ? bound : bound.substr(1);
  std::vector<Expr> choices = {
      sequence({digit(first, first), fraction_digits_above(behind, strictly, most - 1)})};
  if (first < '9') {
    choices.push_back(sequence({digit(static_cast<char>(first + 1)), digits_between(0, most - 1)}));
  }
  return choice(std::move(choices));
}

/// Those not above (strictly: below) `bound`.
Expr fraction_digits_below(std::string_view bound, bool strictly, int most, bool may_end) {
  if (bound.empty()) {
    return strictly ? nothing() : repeat(literal("0"), may_end ? 0 : 1, most);
  }
  std::vector<Expr> choices;
  if (may_end) choices.push_back(empty());
  if (most > 0) {
    choices.push_back(sequence({digit(bound[0], bound[0]),
                                fraction_digits_below(bound.substr(1), strictly, most - 1, true)}));
    if (bound[0] > '0') {
      choices.push_back(
          sequence({digit('0', static_cast<char>(bound[0] - 1)), digits_between(0, most - 1)}));
    }
  }
  return choices.empty() ? nothing() : choice(std::move(choices));
}

/// Numbers without sign at or above a bound without sign; `most` digits after the point.
Expr magnitudes_above(const Decimal& bound, bool strictly, int most) {
  Expr fraction = any_fraction(most);
  const bool decides = strictly || !bound.fraction.empty();
  if (decides) {
    fraction = sequence({literal("."), fraction_digits_above(bound.fraction, strictly, most)});
  }
  return choice({sequence({literal(bound.whole), fraction}),
                 sequence({whole_above(bound.whole), any_fraction(most)})});
}

Expr magnitudes_below(const Decimal& bound, bool strictly, int most) {
  std::vector<Expr> fractions;
  if (!strictly || !bound.fraction.empty()) fractions.push_back(empty());
  if (most > 0) {
    fractions.push_back(
        sequence({literal("."), fraction_digits_below(bound.fraction, strictly, most, false)}));
  }
  std::vector<Expr> choices = {sequence({whole_below(bound.whole), any_fraction(most)})};
  if (!fractions.empty()) {
    choices.push_back(sequence({literal(bound.whole), choice(std::move(fractions))}));
  }
  return choice(std::move(choices));
}

/// Numbers on one side of a bound.
Expr beyond(const NumberBound& bound, bool above, int most) {
  const bool strictly = bound.is_exclusive;
  const Expr all = sequence({any_whole(), any_fraction(most)});
  const Expr farther = magnitudes_above(bound.value, strictly, most);
  const Expr nearer = magnitudes_below(bound.value, strictly, most);
  const Expr minus = literal("-");
  const auto has_zeros = [](const std::string& digits) {
    return digits.find_first_not_of('0') == std::string::npos;
  };
  if (strictly && has_zeros(bound.value.whole) && has_zeros(bound.value.fraction)) {
    return above ? farther : sequence({minus, farther});  // without -0
  }
  if (above == bound.value.is_negative) {  // zero lies within
    return above ? choice({all, sequence({minus, nearer})})
                 : choice({sequence({minus, all}), nearer});
  }
  return above ? farther : sequence({minus, farther});
}

/// Digits after the point that no bound makes ambiguous.
int fraction_digits(const NumberLimits& limits) {
  int whole = 1;
  for (const auto& bound : {limits.least, limits.most}) {
    if (bound) whole = std::max(whole, static_cast<int>(bound->value.whole.size()));
  }
  return std::max(0, significant_digits - whole);
}

/// A value as digits / 10^fraction_digits; 0 for more digits than are of use.
std::uint64_t scaled(const Decimal& value) {
  const std::string digits = value.whole + value.fraction;
  return digits.size() > 18 ? 0 : std::strtoull(digits.c_str(), nullptr, 10);
}

std::uint64_t power_of_ten(std::size_t exponent) {
  std::uint64_t result = 1;
  for (; exponent > 0; --exponent) result *= 10;
  return result;
}

/// The digits at the end that decide whether an integer is a multiple of `divisor`, or nothing.
std::optional<std::size_t> deciding_digits(std::uint64_t divisor) {
  for (std::size_t count = 0; count <= 18; ++count) {
    const std::uint64_t power = power_of_ten(count);
    if (power % divisor != 0) continue;
    if (power / divisor > most_endings) return std::nullopt;
    return count;
  }
  return std::nullopt;
}

/// What the digits of a multiple with `places` digits after the point are a multiple of.
std::uint64_t divisor_at(const Decimal& value, std::size_t places) {
  const std::uint64_t number = scaled(value);
  return number / std::gcd(number, power_of_ten(value.fraction.size() - places));
}

/// `value` / 10^places with all places, and without needless zeros in front.
std::string with_point(std::string digits, std::size_t places, bool trim) {
  if (places == 0) return digits;
  if (trim && digits.size() <= places) digits.insert(0, places + 1 - digits.size(), '0');
  if (digits.size() > places) digits.insert(digits.size() - places, ".");
  return digits;
}

/// Multiples of `value` with `places` digits after the point.
Expr multiples_with_places(const Decimal& value, std::size_t places) {
  const std::uint64_t divisor = divisor_at(value, places);
  const std::size_t count = *deciding_digits(divisor);
  const auto length = static_cast<std::int64_t>(places);
  Expr shape = any_whole();
  if (places > 0) shape = sequence({shape, literal("."), digits_between(length, length)});
  if (count == 0) return signed_texts(shape);
  ByteSet before = digit()->bytes;
  before.set('.');
  std::vector<Expr> endings, short_texts;
  for (std::uint64_t ending = 0; ending < power_of_ten(count); ending += divisor) {
    const std::string all = fmt::format("{:0{}}", ending, count);
    endings.push_back(literal(with_point(all, places, false)));
    short_texts.push_back(literal(with_point(std::to_string(ending), places, true)));
  }
  const Expr texts = choice({sequence({repeat(one_byte(before), 0), choice(std::move(endings))}),
                             choice(std::move(short_texts))});
  return signed_texts(both(shape, texts));
}

Expr multiples(const Decimal& value, bool integers) {
  std::vector<Expr> choices;
  const std::size_t most = integers ? 0 : value.fraction.size();
  for (std::size_t places = 0; places <= most; ++places) {
    choices.push_back(multiples_with_places(value, places));
  }
  return choice(std::move(choices));
}

Expr exponent() {
  ByteSet letter;
  letter.set('e').set('E');
  return sequence(
      {one_byte(letter), optional(choice({literal("+"), literal("-")})), digits_between(1, 3)});
}

Expr without_limits(NumberKind kind) {
  if (kind == NumberKind::integer) return signed_texts(any_whole());
  const Expr digits = digits_between(0, unlimited);
  if (kind == NumberKind::fraction) {
    return signed_texts(sequence({any_whole(), literal("."), digits, digit('1'), digits}));
  }
  return signed_texts(
      sequence({any_whole(), optional(sequence({literal("."), digits_between(1, unlimited)})),
                optional(exponent())}));
}

}  // namespace

std::string Decimal::text() const {
  return (is_negative ? "-" : "") + whole + (fraction.empty() ? "" : "." + fraction);
}

Decimal decimal(const nlohmann::ordered_json& number) {
  std::string text;
  if (number.is_number_float()) {
    const double value = number.get<double>();
    if (!std::isfinite(value)) throw Error("JSON schema: a number exceeds a double");
    text = std::abs(value) < 0x1p53 ? fmt::format("{}", value) : fmt::format("{:.0f}", value);
  } else {
    text = number.dump();
  }
  Decimal result;
  result.is_negative = text[0] == '-';
  if (result.is_negative) text.erase(0, 1);
  std::int64_t power = 0;
  if (const auto at = text.find('e'); at != std::string::npos) {
    power = std::strtoll(text.c_str() + at + 1, nullptr, 10);
    text.resize(at);
  }
  const auto point = std::min(text.find('.'), text.size());
  std::string fraction = point < text.size() ? text.substr(point + 1) : "";
  std::string whole = text.substr(0, point);
  for (; power > 0; --power) {
    whole += fraction.empty() ? '0' : fraction[0];
    if (!fraction.empty()) fraction.erase(0, 1);
  }
  for (; power < 0; ++power) {
    fraction.insert(fraction.begin(), whole.empty() ? '0' : whole.back());
    if (!whole.empty()) whole.pop_back();
  }
  whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size()));
  fraction.erase(fraction.find_last_not_of('0') + 1);
  result.whole = whole.empty() ? "0" : whole;
  result.fraction = fraction;
  if (result.whole == "0" && fraction.empty()) result.is_negative = false;
  return result;
}

int compare(const Decimal& a, const Decimal& b) {
  if (a.is_negative != b.is_negative) return a.is_negative ? -1 : 1;
  const int sign = a.is_negative ? -1 : 1;
  if (a.whole.size() != b.whole.size()) return a.whole.size() < b.whole.size() ? -sign : sign;
  const int wholes = a.whole.compare(b.whole);
  if (wholes != 0) return wholes < 0 ? -sign : sign;
  const int fractions = a.fraction.compare(b.fraction);
  return fractions == 0 ? 0 : fractions < 0 ? -sign : sign;
}

void NumberLimits::tighten_least(const NumberBound& bound) {
  const int order = least ? compare(bound.value, least->value) : 1;
  if (order > 0) least = bound;
  if (order == 0) least->is_exclusive |= bound.is_exclusive;
}

void NumberLimits::tighten_most(const NumberBound& bound) {
  const int order = most ? compare(bound.value, most->value) : -1;
  if (order < 0) most = bound;
  if (order == 0) most->is_exclusive |= bound.is_exclusive;
}

void NumberLimits::tighten(const NumberLimits& other) {
  if (other.least) tighten_least(*other.least);
  if (other.most) tighten_most(*other.most);
  multiples_of.insert(multiples_of.end(), other.multiples_of.begin(), other.multiples_of.end());
}

bool NumberLimits::are_contradictory() const {
  if (!least || !most) return false;
  const int order = compare(least->value, most->value);
  return order > 0 || (order == 0 && (least->is_exclusive || most->is_exclusive));
}

bool has_decimal_multiples(const Decimal& value) {
  if (value.is_negative || scaled(value) == 0) return false;
  for (std::size_t places = 0; places <= value.fraction.size(); ++places) {
    if (!deciding_digits(divisor_at(value, places))) return false;
  }
  return true;
}

Expr number_texts(const NumberLimits& limits, NumberKind kind) {
  const bool integers = kind == NumberKind::integer;
  const int most = integers ? 0 : fraction_digits(limits);
  std::vector<Expr> all;
  if (limits.least) all.push_back(beyond(*limits.least, true, most));
  if (limits.most) all.push_back(beyond(*limits.most, false, most));
  for (const Decimal& value : limits.multiples_of) all.push_back(multiples(value, integers));
  if (all.empty() || kind == NumberKind::fraction) {
    all.insert(all.begin(), without_limits(kind));
  }
  Expr result = all[0];
  for (std::size_t i = 1; i < all.size(); ++i) result = both(result, all[i]);
  return result;
}

}  // namespace kvzap::grammar
