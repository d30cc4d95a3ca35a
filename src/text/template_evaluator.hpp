// The output of a chat template for one user message.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "text/jinja.hpp"

namespace kvzap::text::jinja {

/// A text that is known except for the user's message.
struct Part {
  enum Kind { literal, content, trimmed_content } kind;
  std::string text;
};

/// Runs a template on one user message. Returns nothing if a part is not understood; `problem` then
/// names it.
std::optional<std::vector<Part>> evaluate(const std::vector<Node>& nodes,
                                          const std::optional<std::string>& bos_token,
                                          bool thinking, std::string& problem);

}  // namespace kvzap::text::jinja
