#include "text/json_parts.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

using files::JsonField;

// A hostile file must not exhaust the stack. Published tokenizers nest twice.
constexpr int max_nesting = 32;

// Published tokenizers have ten; some are compiled patterns.
constexpr std::size_t max_parts = 64;

void flatten(const JsonField& field, const std::string& members, int depth,
             std::vector<JsonField>& parts) {
  const JsonField type = field.member("type");
  if (type.string() != "Sequence") {
    if (parts.size() == max_parts) field.fail(fmt::format("at most {} parts", max_parts));
    parts.push_back(field);
    return;
  }
  if (depth == max_nesting) type.fail(fmt::format("at most {} nested Sequences", max_nesting));
  const JsonField list = field.member(members);
  for (std::size_t i = 0; i < list.array_size(); ++i) {
    flatten(list.element(i), members, depth + 1, parts);
  }
}

}  // namespace

std::vector<JsonField> flattened(const JsonField& field, const std::string& members) {
  std::vector<JsonField> parts;
  if (!field.is_null()) flatten(field, members, 0, parts);
  return parts;
}

const std::string& one_character(const JsonField& field) {
  const std::string& text = field.string();
  if (text.empty() || first_character(text).second != text.size()) field.fail("one character");
  return text;
}

PrependScheme prepend_scheme(const JsonField& metaspace) {
  const JsonField field = metaspace.member("prepend_scheme");
  const JsonField add_prefix_space = metaspace.member("add_prefix_space");
  const std::string name = field.is_null() ? "always" : field.string();
  const bool prepends = add_prefix_space.boolean(true);
  if (name == "never") return PrependScheme::never;
  if (!prepends) {
    if (!field.is_null()) add_prefix_space.fail("true or the prepend_scheme \"never\"");
    return PrependScheme::never;
  }
  if (name == "always") return PrependScheme::always;
  if (name == "first") return PrependScheme::first;
  field.fail("always, first or never");
}

}  // namespace kvzap::text
