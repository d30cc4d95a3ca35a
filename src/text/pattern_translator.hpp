// Translation of the regular expressions of tokenizer.json to PCRE2's syntax.
#pragma once

#include <string>

#include "files/json_field.hpp"

namespace kvzap::text {

/// Rewrites a pattern of Oniguruma (Ruby syntax, which the tokenizers library uses) for PCRE2 with
/// the same meaning. Throws Error for constructs that the two read differently and that no
/// published tokenizer needs: a refusal is better than a tokenizer that splits differently.
std::string translate_pattern(const files::JsonField& field);

}  // namespace kvzap::text
