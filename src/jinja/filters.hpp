// The tables of filters.
#pragma once

#include <string_view>

#include "jinja/evaluator.hpp"

namespace kvzap::jinja {

/// Filters of sequences. Returns null for others.
Function find_sequence_filter(std::string_view name);

}  // namespace kvzap::jinja
