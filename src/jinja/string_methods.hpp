// Functions on strings that methods and filters share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/unicode.hpp"
#include "jinja/value.hpp"

namespace kvzap::jinja {

/// Parts of a text, which must outlive them, in its order. The meter counts them.
using Pieces = std::vector<std::string_view>;

/// str.split() at white space.
Pieces words_of(std::string_view text, Meter& meter);
/// str.splitlines().
Pieces lines_of(std::string_view text, bool keeps_ends, Meter& meter);
/// Splits at a separator, at most `most` times from that end; `most` < 0: always. An empty
/// separator is before each character and at the end.
Pieces pieces_of(std::string_view text, std::string_view separator, std::int64_t most,
                 bool from_right, Meter& meter);
/// Returns the pieces with the separator between them.
std::string joined(const Pieces& pieces, std::string_view separator, Meter& meter);

/// Returns `text` with entities for & < > " and '.
std::string escaped(std::string_view text);

/// Returns `text` at that side of a string of `width` code points.
std::string justified(const Call& call, std::string_view text, std::int64_t width,
                      std::string_view fill, Ends side);

/// Returns the method, or null.
const Builtin* find_string_method(std::string_view name);

}  // namespace kvzap::jinja
