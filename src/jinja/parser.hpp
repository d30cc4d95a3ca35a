// Parses a template.
#pragma once

#include <string_view>

#include "jinja/lexer.hpp"
#include "jinja/syntax.hpp"

namespace kvzap::jinja {

/// Parses `source`, UTF-8. Throws SyntaxFailure.
Body parse(std::string_view source);

}  // namespace kvzap::jinja
