// Readers of the fields of request bodies. A field is absent if it is missing or null. All throw
// BadRequest, which names the field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "files/parsed_json.hpp"

namespace kvzap::server {

using Json = nlohmann::ordered_json;

/// Returns the object in a body.
files::ParsedJson object_of(std::string_view body);

/// "FIELD is FOUND; expected EXPECTED". `found`: null for a missing field.
[[noreturn]] void refuse(const std::string& field, const std::string& expected, const Json* found);
[[noreturn]] void refuse(const std::string& field, const std::string& expected, const Json& found);
/// "FIELD is not supported".
[[noreturn]] void refuse_as_unsupported(const std::string& field, const std::string& hint = {});

/// Returns the member of an object, or null if it is absent or `object` is none.
const Json* field_of(const Json& object, const char* name);
/// Whether the member is a string of this value.
bool is_text(const Json* field, std::string_view value);
bool bool_of(const Json& object, const char* name, bool otherwise);
double number_of(const Json& object, const char* name, double least, double most, double otherwise);
std::int64_t integer_of(const Json& object, const char* name, std::int64_t least, std::int64_t most,
                        std::int64_t otherwise);
const std::string& text_of(const Json& value, const std::string& name);
/// Returns the text of a member that may not be absent. `where`: the object's name.
const std::string& text_at(const Json& object, const char* name, const std::string& where);
/// Whether the value is -1, which other programs take for "random" and "no limit".
bool is_minus_one(const Json* value);

/// Returns the texts of a content: one string, or an array of parts whose type is one of `types`.
std::vector<std::string> texts_of(const Json& content, const std::string& name,
                                  const std::vector<std::string_view>& types = {"text"});
std::string joined(const std::vector<std::string>& texts);

/// Refuses a name that is not the model's.
void check_model(const Json& body, const ServedModel& model);

}  // namespace kvzap::server
