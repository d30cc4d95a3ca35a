// Reading of JSON that somebody else wrote: size, nesting and repeated keys are checked. Compiled
// once, since the parser takes seconds to compile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/types.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvzap::detail {

/// Deepest nesting of objects and arrays that any file of a model folder needs, with room to spare.
inline constexpr int max_json_depth = 64;

/// Parses `text`; `what` names it in messages. Throws Error for anything that is not one JSON
/// value, for nesting deeper than max_json_depth and for a key that is repeated within one object
/// (parsers disagree on which of the two counts).
nlohmann::json parse_json(std::string_view text, const std::string& what);

/// Reads and parses a JSON file that must hold an object. Throws Error for a missing file, one
/// larger than `max_bytes`, or anything but an object.
nlohmann::json read_json_object(const std::filesystem::path& file,
                                std::uintmax_t max_bytes = 64u << 20);

}  // namespace kvzap::detail
