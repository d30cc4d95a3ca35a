// Reads untrusted JSON: size, nesting and repeated keys are checked. One source compiles the
// parser, because that takes seconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvzap::files {

/// Deepest nesting of objects and arrays. Files of model folders need less.
inline constexpr int max_json_depth = 64;

/// Returns the limit on the memory that the values of a JSON text may take: 3 × text + 38 MB.
/// Together with the text, the total stays below 4 × text + 64 MB, even while the values are freed.
/// Hostile texts would take 20 times their size. Among the files of models, tokenizers come closest
/// to the limit.
std::size_t json_memory_limit(std::size_t text_bytes);

/// Parses `text`; `what` names it in messages. Throws Error that gives the place if the text is not
/// one JSON value, has a NUL byte, or is nested deeper than max_json_depth. An object that repeats
/// a key is an error, because parsers disagree on which value counts. So are values that exceed
/// json_memory_limit.
nlohmann::json parse_json(std::string_view text, const std::string& what);

/// Calls parse_json for a text that must contain an object. Throws Error "WHAT: …" for other
/// values.
nlohmann::json parse_json_object(std::string_view text, const std::string& what);

/// Parses JSON that this library wrote, and keeps the order of members.
nlohmann::ordered_json parse_own_json(std::string_view text);

/// Returns JSON text in one line. Replaces bytes that are not UTF-8, as in a file name, or in an
/// answer that ends within a character.
std::string json_text(const nlohmann::ordered_json& value);
/// Returns JSON text in indented lines, each with its end. Replaces the same bytes.
std::string json_lines(const nlohmann::ordered_json& value);

/// Returns the contents of a regular file. Throws Error if it is missing, not regular or larger
/// than `max_bytes`, or if reading fails.
std::string read_text_file(const std::filesystem::path& file, std::uintmax_t max_bytes = 64u << 20);

/// Calls read_text_file and parse_json_object.
nlohmann::json read_json_object(const std::filesystem::path& file,
                                std::uintmax_t max_bytes = 64u << 20);

/// A value for messages: a string in single quotes, others as JSON. Long ones are shortened.
std::string described(const nlohmann::json& value);

}  // namespace kvzap::files
