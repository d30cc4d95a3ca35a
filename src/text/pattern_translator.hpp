// Regular expressions of tokenizer.json in PCRE2's syntax.
#pragma once

#include <string>

#include "text/json_field.hpp"

namespace kvzap::detail {

/// Rewrites a pattern of Oniguruma (Ruby syntax, what the tokenizers library uses) so that PCRE2
/// takes it for the same thing. What the two read differently and no published tokenizer needs is
/// refused by an Error: better no tokenizer than one that splits differently.
std::string translate_pattern(const JsonField& field);

}  // namespace kvzap::detail
