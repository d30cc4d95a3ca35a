// Parts of grammars that no text ends.
#pragma once

#include "grammar/expression.hpp"

namespace kvzap::grammar {

/// Takes out of the rules from `first` on what makes no text, as a member that needs itself, and
/// returns whether rule `root` makes one. `both` and `difference` count as making texts.
bool remove_dead_ends(Grammar& grammar, RuleId first, RuleId root);

}  // namespace kvzap::grammar
