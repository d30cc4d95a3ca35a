#include "model/model_folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <kvzap/core/types.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "files/plain_text.hpp"
#include "gguf/model_file.hpp"
#include "model/find_model.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

/// Returns "; the folder has N GGUF files: …" or "".
std::string several_files(const fs::path& folder) {
  const std::vector<fs::path> files = gguf_files(folder);
  if (files.size() < 2) return "";
  return fmt::format("; the folder has {} GGUF files: give one of them, such as {}", files.size(),
                     files.front().string());
}

/// Throws Error if the system refuses to read a file or folder, which would otherwise seem missing.
void check_permission(const fs::path& path) {
  if (::access(path.c_str(), R_OK) == 0 || errno != EACCES) return;
  throw Error(fmt::format("{}: permission denied", path.string()));
}

}  // namespace

void check_folder(const fs::path& folder, std::string_view expected) {
  const std::string name = folder.string();
  check_permission(folder);
  std::error_code ignored;
  const bool exists = fs::exists(folder, ignored);
  if (gguf::is_gguf(folder)) {
    throw Error(fmt::format("{}: is a GGUF file; expected {}", name, expected));
  }
  const std::string hint = name_hint(name);
  if (!exists && !hint.empty()) {
    throw Error(fmt::format("{}: no such folder; expected {}{}", name, expected, hint));
  }
  if (exists && !fs::is_directory(folder, ignored)) {
    const auto content = files::content_of(files::first_bytes(folder));
    throw Error(fmt::format("{}: is {}; expected {}", name,
                            content ? files::text_of(*content, name) : "a file", expected));
  }
  check_permission(folder / "config.json");
  if (!fs::exists(folder / "config.json", ignored)) {
    throw Error(fmt::format("{}: no such file; expected {}{}{}", (folder / "config.json").string(),
                            expected, several_files(folder), download_hint(folder)));
  }
}

void check_model(const fs::path& model) {
  check_permission(model);
  if (!gguf::is_gguf(model)) {
    check_folder(model,
                 "a model's folder (config.json, *.safetensors, tokenizer.json) or a GGUF file");
    if (!is_surrogate(model)) return;
    throw Error(fmt::format("{}: is a KVzap surrogate's; expected the model whose cache it prunes",
                            (model / "config.json").string()));
  }
  std::error_code ignored;
  if (fs::exists(model, ignored)) return;
  throw Error(fmt::format("{}: no such file; expected a GGUF file or a model's folder{}",
                          model.string(), hub_hint(model.string())));
}

}  // namespace kvzap::model
