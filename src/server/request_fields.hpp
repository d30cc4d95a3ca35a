// Readers of the fields of request bodies. A field is absent if it is missing or null. All throw
// BadRequest, which names the field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "files/parsed_json.hpp"
#include "server/request_limits.hpp"

namespace kvzap::server {

using Json = nlohmann::ordered_json;

/// Returns fields of OpenAI's, vLLM's and llama.cpp's servers that have an effect there and are
/// refused here, each with an array of the values that have none.
const Json& unsupported_fields();

/// Returns the object in a body.
files::ParsedJson object_of(std::string_view body);

/// "FIELD is FOUND; expected EXPECTED". `found`: null for a missing field.
[[noreturn]] void refuse(const std::string& field, const std::string& expected, const Json* found);
[[noreturn]] void refuse(const std::string& field, const std::string& expected, const Json& found);
/// "FIELD is not supported".
[[noreturn]] void refuse_as_unsupported(const std::string& field, const std::string& hint = {});

/// Returns the member of an object, or null if it is absent or `object` is none.
const Json* field_of(const Json& object, const char* name);
/// The same, if a member with the value null is not absent.
const Json* member_of(const Json& object, const char* name);
/// Whether the member is a string of this value.
bool is_text(const Json* field, std::string_view value);
bool bool_of(const Json& object, const char* name, bool otherwise);
double number_of(const Json& object, const char* name, const limits::Range<double>& range,
                 double otherwise);
std::int64_t integer_of(const Json& object, const char* name,
                        const limits::Range<std::int64_t>& range, std::int64_t otherwise);
const std::string& text_of(const Json& value, const std::string& name);
/// Returns the text of a member that may not be absent. `where`: the object's name.
const std::string& text_at(const Json& object, const char* name, const std::string& where);
/// Whether the value is -1, which other programs take for "random" and "no limit".
bool is_minus_one(const Json* value);

/// Returns the texts of a content: one string, or an array of parts whose type is one of `types`.
std::vector<std::string> texts_of(const Json& content, const std::string& name,
                                  const std::vector<std::string_view>& types = {"text"});
std::string joined(const std::vector<std::string>& texts);

/// Collects the names of the fields that readers ask for on its thread while it exists. Tests
/// compare them with the document of /openapi.json.
class AskedFields {
 public:
  AskedFields();
  ~AskedFields();
  AskedFields(const AskedFields&) = delete;
  AskedFields& operator=(const AskedFields&) = delete;
  /// Readers of fields call it.
  static void note(const char* name);
  const std::set<std::string>& names() const { return m_names; }

 private:
  std::set<std::string> m_names;
};

using Prompt = std::vector<Segment>;

/// Reads a field that has one prompt (a text or token ids), or an array of up to `most` of them.
/// Adds their texts to `texts`.
std::vector<Prompt> prompts_of(const Json& body, const char* field, std::int64_t most,
                               const ServedModel& model, std::vector<std::string>& texts);

/// Refuses a name that is not the model's.
void check_model(const Json& body, const ServedModel& model);

}  // namespace kvzap::server
