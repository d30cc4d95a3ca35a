#include "server/request_fields.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "files/quote.hpp"

namespace kvzap::server {
namespace {

thread_local std::set<std::string>* asked = nullptr;  // see AskedFields

}  // namespace

AskedFields::AskedFields() { asked = &m_names; }
AskedFields::~AskedFields() { asked = nullptr; }
void AskedFields::note(const char* name) {
  if (asked) asked->insert(name);
}

files::ParsedJson object_of(std::string_view body) {
  try {
    files::ParsedJson json(files::parse_ordered_json(body, "the body"));
    if (json.value().is_object()) return json;
  } catch (const Error& error) {
    throw BadRequest("", error.what());
  }
  throw BadRequest("", "the body is not a JSON object");
}

void refuse(const std::string& field, const std::string& expected, const Json* found) {
  throw BadRequest(field, fmt::format("{} is {}; expected {}", field,
                                      found ? files::described(*found) : "missing", expected));
}

void refuse(const std::string& field, const std::string& expected, const Json& found) {
  refuse(field, expected, &found);
}

void refuse_as_unsupported(const std::string& field, const std::string& hint) {
  throw BadRequest(field, field + " is not supported" + hint);
}

const Json* field_of(const Json& object, const char* name) {
  const Json* const member = member_of(object, name);
  return member && member->is_null() ? nullptr : member;
}

const Json* member_of(const Json& object, const char* name) {
  AskedFields::note(name);
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

bool is_text(const Json* field, std::string_view value) {
  return field && field->is_string() && field->get_ref<const std::string&>() == value;
}

bool bool_of(const Json& object, const char* name, bool otherwise) {
  const Json* const field = field_of(object, name);
  if (!field) return otherwise;
  if (!field->is_boolean()) refuse(name, "true or false", *field);
  return field->get<bool>();
}

double number_of(const Json& object, const char* name, const limits::Range<double>& range,
                 double otherwise) {
  const Json* const field = field_of(object, name);
  if (!field) return otherwise;
  const double value = field->is_number() ? field->get<double>() : std::nan("");
  if (!(value >= range.least && value <= range.most)) {
    refuse(name, fmt::format("a number from {} to {}", range.least, range.most), *field);
  }
  return value;
}

std::int64_t integer_of(const Json& object, const char* name,
                        const limits::Range<std::int64_t>& range, std::int64_t otherwise) {
  const Json* const field = field_of(object, name);
  if (!field) return otherwise;
  const bool fits = field->is_number_integer() &&
                    (!field->is_number_unsigned() ||
                     field->get<std::uint64_t>() <=
                         static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  if (!fits || field->get<std::int64_t>() < range.least ||
      field->get<std::int64_t>() > range.most) {
    refuse(name, fmt::format("an integer from {} to {}", range.least, range.most), *field);
  }
  return field->get<std::int64_t>();
}

bool is_minus_one(const Json* value) {
  return value && value->is_number_integer() && !value->is_number_unsigned() && *value == -1;
}

const std::string& text_of(const Json& value, const std::string& name) {
  if (!value.is_string()) refuse(name, "a string", value);
  return value.get_ref<const std::string&>();
}

const std::string& text_at(const Json& object, const char* name, const std::string& where) {
  const Json* const field = field_of(object, name);
  const std::string full = where.empty() ? name : where + "." + name;
  if (!field) refuse(full, "a string", nullptr);
  return text_of(*field, full);
}

std::vector<std::string> texts_of(const Json& content, const std::string& name,
                                  const std::vector<std::string_view>& types) {
  if (content.is_string()) return {content.get<std::string>()};
  if (!content.is_array() || content.size() > limits::parts) {
    refuse(name, "a string or an array of parts", content);
  }
  std::vector<std::string> parts;
  for (const Json& part : content) {
    const Json* const type = field_of(part, "type");
    const Json* const text = field_of(part, "text");
    const bool fits = text && std::any_of(types.begin(), types.end(),
                                          [&](std::string_view one) { return is_text(type, one); });
    if (!fits) {
      throw BadRequest(name,
                       fmt::format("{} has a part{} that is not text; other types are not "
                                   "supported",
                                   name, type ? " of the type " + files::described(*type) : ""));
    }
    parts.push_back(text_of(*text, name + ".text"));
  }
  return parts;
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text;
  return all;
}

void check_model(const Json& body, const ServedModel& model) {
  const Json* const name = field_of(body, "model");
  if (!name) return;
  const std::string& wanted = text_of(*name, "model");
  if (wanted == model.name) return;
  throw BadRequest("model",
                   fmt::format("model is {}; expected {}", files::in_quotes(wanted),
                               files::in_quotes(model.name)),
                   model_not_found);
}

}  // namespace kvzap::server
