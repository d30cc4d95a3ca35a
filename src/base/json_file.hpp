// Reading of JSON that somebody else wrote: size, nesting and repeated keys are checked. Compiled
// once, since the parser takes seconds to compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvzap::detail {

/// Deepest nesting of objects and arrays that any file of a model folder needs, with room to spare.
inline constexpr int max_json_depth = 64;

/// Most bytes that the values of a JSON text may take in memory: 3 × text + 38 MB. With the text
/// that stays below 4 × text + 64 MB, also while the values are taken apart. Hostile texts would
/// take 20 times theirs; of the files that models come with, the tokenizers' come closest.
std::size_t json_memory_limit(std::size_t text_bytes);

/// Parses `text`; `what` names it in messages. Throws Error, which says where, for anything that is
/// not one JSON value (a NUL byte, too), for nesting deeper than max_json_depth, for a key that is
/// repeated within one object (parsers disagree on which of the two counts) and for values that
/// take more than json_memory_limit.
nlohmann::json parse_json(std::string_view text, const std::string& what);

/// All of a regular file. Throws Error for a missing one, anything else, one larger than
/// `max_bytes` and a read error.
std::string read_text_file(const std::filesystem::path& file, std::uintmax_t max_bytes = 64u << 20);

/// Reads and parses a JSON file that must hold an object. Throws Error for a missing file, one
/// larger than `max_bytes`, or anything but an object.
nlohmann::json read_json_object(const std::filesystem::path& file,
                                std::uintmax_t max_bytes = 64u << 20);

/// A value for messages: a short one as it is, a long text shortened and quoted, of arrays and
/// objects only what they are.
std::string described(const nlohmann::json& value);

}  // namespace kvzap::detail
