// The chat templates of a model, by their names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace kvzap::gguf {

/// A chat template, and its file and field in messages.
struct NamedTemplate {
  std::string text;
  std::string where;
};

/// Returns the templates "default" and "tool_use" of a folder or a GGUF file, if it has them: those
/// of chat_template.jinja ("default") and
/// additional_chat_templates/default.jinja and tool_use.jinja; without them those of chat_template
/// in tokenizer_config.json, which is a text or a list of objects with a name and a template;
/// without it that of chat_template.json. Other names are ignored. Throws Error if a file is
/// malformed, has templates but no "default", or a template has more than `max_bytes`.
std::map<std::string, NamedTemplate> read_chat_templates(const std::filesystem::path& model,
                                                         std::uintmax_t max_bytes);

}  // namespace kvzap::gguf
