// Jinja templates as transformers renders chat templates: Jinja2 in its immutable sandbox, with
// trim_blocks, lstrip_blocks, loop controls, the `generation` tag and transformers' tojson.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvzap::jinja {

/// A parsed template. Several threads may render one.
class Template {
 public:
  /// Parses `source`, UTF-8. `name` begins messages, such as the template's file. Throws Error
  /// "NAME: line N: …" for text that is no template.
  Template(std::string_view source, std::string name);

  /// Renders the template with the members of `variables`, an object whose order of keys counts.
  /// A function that gives the date gives 26 July 2024.
  ///
  /// Throws Error "NAME: line N: …" if the template fails or refuses the values, and if it takes
  /// more steps, memory or nesting than a chat template needs. The bounds grow with the strings in
  /// `variables`: 1,000,000 steps and 32 MB of new values, and 64 times the size.
  std::string render(const nlohmann::ordered_json& variables) const;

 private:
  struct Parsed;
  std::shared_ptr<const Parsed> m_parsed;
};

}  // namespace kvzap::jinja
