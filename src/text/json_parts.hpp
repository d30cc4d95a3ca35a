// Fields that several parts of tokenizer.json have.
#pragma once

#include <string>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::text {

/// Returns the parts of a normalizer, pre-tokenizer, post-processor or decoder: the members of its
/// Sequences in order, the field itself without a Sequence, nothing if it is null. `members` names
/// the list of a Sequence. Throws Error if Sequences nest too deeply or have too many members.
std::vector<files::JsonField> flattened(const files::JsonField& field, const std::string& members);

/// Returns a text of exactly one character.
const std::string& one_character(const files::JsonField& field);

/// The pieces of a text to which Metaspace prepends its replacement of a space.
enum class PrependScheme { always, first, never };

/// Returns the scheme of a Metaspace, which old files give as add_prefix_space.
PrependScheme prepend_scheme(const files::JsonField& metaspace);

}  // namespace kvzap::text
