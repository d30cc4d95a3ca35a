#include "server/chat_form.hpp"

#include <algorithm>

namespace kvzap::server {

BadRequest renamed(const BadRequest& error, const FieldNames& names) {
  for (const auto& [name, own] : names) {
    const auto begins = [&name = name](const std::string& text) {
      return text.compare(0, name.size(), name) == 0;
    };
    if (!begins(error.field)) continue;
    const std::string rest = error.field.substr(name.size());
    if (!rest.empty() && rest.front() != '.') continue;
    std::string what = error.what();
    if (begins(what)) what.replace(0, name.size(), own);
    return {own + rest, what, error.code};
  }
  return error;
}

Json take_field(Json& object, const char* name) {
  AskedFields::note(name);
  const auto found = object.find(name);
  if (found == object.end()) return {};
  Json value = std::move(*found);
  object.erase(found);
  return value;
}

void refuse_field(const Json& object, const char* name, const Json& neutral) {
  const Json* const field = field_of(object, name);
  if (!field || (field->is_structured() && field->empty()) ||
      std::find(neutral.begin(), neutral.end(), *field) != neutral.end()) {
    return;
  }
  refuse_as_unsupported(name);
}

void set_thinks(bool thinks, Json& chat) {
  Json& fields = chat["chat_template_kwargs"];
  if (fields.is_null() || fields.is_object()) fields["enable_thinking"] = thinks;
}

Json function_json(Json function) {
  return {{"type", "function"}, {"function", std::move(function)}};
}

}  // namespace kvzap::server
