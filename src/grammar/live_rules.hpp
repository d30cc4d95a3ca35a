// Whether rules make a text.
#pragma once

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// Whether rule `root` makes a text. Rules before `first`, which are others', count as making one,
/// and so do `both` and `difference`.
bool makes_text(const Grammar& grammar, RuleId first, RuleId root);

}  // namespace kvzap::grammar
