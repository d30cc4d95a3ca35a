// Numbers of JSON within bounds, as texts.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// A number in decimal digits, exact. Zero has no sign.
struct Decimal {
  bool is_negative = false;
  std::string whole = "0";  // without needless zeros in front
  std::string fraction;     // without zeros at the end

  bool is_integer() const { return fraction.empty(); }
  /// Without an exponent.
  std::string text() const;
};

/// The value of a JSON number, as Python compares it: doubles of 2^53 and more by all their digits,
/// smaller ones by the fewest digits that name them.
Decimal decimal(const nlohmann::ordered_json& number);
/// < 0, 0 or > 0, as a is less than, equal to or greater than b.
int compare(const Decimal& a, const Decimal& b);

struct NumberBound {
  Decimal value;
  bool is_exclusive = false;
};

struct NumberLimits {
  std::optional<NumberBound> least, most;
  std::vector<Decimal> multiples_of;

  /// Keep the tighter of two bounds.
  void tighten_least(const NumberBound& bound);
  void tighten_most(const NumberBound& bound);
  void tighten(const NumberLimits& other);
  /// Whether the bounds leave no number; false if only no integer is left.
  bool are_contradictory() const;
};

/// Whether digits at the end decide what a multiple of `value` is: it is 2^a 5^b 10^c, as 0.01, 5
/// or 20, and at most 1,000 endings have to be told apart.
bool has_decimal_multiples(const Decimal& value);

enum class NumberKind { any, integer, fraction };

/// The texts of numbers within limits. Integers are written without point and exponent; `fraction`
/// means numbers that are no integers. Numbers with limits have no exponent; those with bounds have
/// at most 15 significant digits near a bound, so that no reader rounds them out of the bounds.
/// Multiples are those of decimal arithmetic. Regular, without calls.
Expr number_texts(const NumberLimits& limits, NumberKind kind);

}  // namespace kvzap::grammar
