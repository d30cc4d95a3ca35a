#include "gguf/chat_templates.hpp"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "gguf/model_file.hpp"

namespace kvzap::gguf {

namespace fs = std::filesystem;
using files::JsonField;

namespace {

using Templates = std::map<std::string, NamedTemplate>;

Templates read_files(const fs::path& folder, std::uintmax_t max_bytes) {
  // Of two files with one name, the first counts.
  const std::pair<const char*, fs::path> names[] = {
      {"default", "chat_template.jinja"},
      {"default", fs::path("additional_chat_templates") / "default.jinja"},
      {"tool_use", fs::path("additional_chat_templates") / "tool_use.jinja"}};
  Templates found;
  std::error_code ignored;
  for (const auto& [name, file] : names) {
    const fs::path path = folder / file;
    if (found.count(name) != 0 || !fs::is_regular_file(path, ignored)) continue;
    found[name] = {files::read_text_file(path, max_bytes), path.string()};
  }
  return found;
}

/// Reads a field that is a text, a list of objects, or null.
Templates read_field(const JsonField& field) {
  Templates found;
  if (field.value().is_string()) found["default"] = {field.string(), field.where()};
  if (field.is_null() || field.value().is_string()) return found;
  for (std::size_t i = 0; i < field.array_size(); ++i) {
    const JsonField entry = field.element(i);
    if (!entry.value().is_object() || entry.member("name").is_null() ||
        entry.member("template").is_null()) {
      field.fail("objects with a name and a template");
    }
    const std::string& name = entry.member("name").string();
    if (name != "default" && name != "tool_use") continue;
    found[name] = {entry.member("template").string(), fmt::format("{}[{}]", field.where(), name)};
  }
  if (found.count("default") == 0) {
    files::throw_unexpected(field.where(), "a template named \"default\"", "none");
  }
  return found;
}

}  // namespace

Templates read_chat_templates(const fs::path& model, std::uintmax_t max_bytes) {
  Templates found;
  if (!is_gguf(model)) found = read_files(model, max_bytes);
  for (const char* name : {"tokenizer_config.json", "chat_template.json"}) {
    if (!found.empty()) break;
    const auto file = read_model_object(model, name);
    if (file) found = read_field(JsonField(file->content, file->where).member("chat_template"));
  }
  for (const auto& [name, source] : found) {
    if (source.text.size() <= max_bytes) continue;
    files::throw_unexpected(source.where, fmt::format("a template of at most {} bytes", max_bytes),
                            fmt::format("one of {}", source.text.size()));
  }
  return found;
}

}  // namespace kvzap::gguf
