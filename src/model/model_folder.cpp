#include "model/model_folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvzap/core/types.hpp>
#include <string>
#include <system_error>

#include "gguf/model_file.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

/// OWNER/NAME, as the hub allows it.
bool looks_like_hub_name(const std::string& text) {
  const auto slash = text.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == text.size()) return false;
  for (const char* file : {".safetensors", ".gguf", ".json", ".jsonl", ".tsv", ".txt", ".h5"}) {
    if (fs::path(text).extension() == file) return false;
  }
  if (text.front() == '.' || text.front() == '~' || text.front() == '-') return false;
  const auto is_allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  const auto name = text.begin() + static_cast<std::ptrdiff_t>(slash);
  return std::all_of(text.begin(), name, is_allowed) &&
         std::all_of(name + 1, text.end(), is_allowed);
}

}  // namespace

std::string hub_hint(const std::string& name) {
  if (!looks_like_hub_name(name)) return "";
  const std::string own = name.substr(name.find('/') + 1);
  return fmt::format(
      ". What is on the Hugging Face hub is downloaded first: huggingface-cli download {} "
      "--local-dir {}, and then given as {}",
      name, own, own);
}

void check_folder(const fs::path& folder, std::string_view expected) {
  const std::string name = folder.string();
  std::error_code ignored;
  const bool exists = fs::exists(folder, ignored);
  if (gguf::is_gguf(folder)) {
    throw Error(fmt::format("{}: is a GGUF file; expected {}", name, expected));
  }
  const std::string hint = hub_hint(name);
  if (!exists && !hint.empty()) {
    throw Error(fmt::format("{}: no such folder; expected {}{}", name, expected, hint));
  }
  if (exists && !fs::is_directory(folder, ignored)) {
    throw Error(fmt::format("{}: is a file; expected {}", name, expected));
  }
  if (!fs::exists(folder / "config.json", ignored)) {
    throw Error(
        fmt::format("{}: no such file; expected {}", (folder / "config.json").string(), expected));
  }
}

void check_model(const fs::path& model) {
  if (!gguf::is_gguf(model)) {
    return check_folder(model,
                        "a model's folder (config.json, *.safetensors, tokenizer.json) or a GGUF "
                        "file");
  }
  std::error_code ignored;
  if (fs::exists(model, ignored)) return;
  throw Error(
      fmt::format("{}: no such file; expected a GGUF file or a model's folder", model.string()));
}

}  // namespace kvzap::model
