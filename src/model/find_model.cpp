#include "model/find_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <system_error>

#include "base/ascii.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool begins_with(const std::string& text, std::string_view begin) {
  return text.compare(0, begin.size(), begin) == 0;
}

/// OWNER/NAME, as the hub allows it.
bool looks_like_hub_name(const std::string& text) {
  const auto slash = text.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == text.size()) return false;
  for (const char* file : {".safetensors", ".gguf", ".json", ".jsonl", ".tsv", ".txt", ".h5"}) {
    if (fs::path(text).extension() == file) return false;
  }
  if (text.front() == '.' || text.front() == '~' || text.front() == '-') return false;
  const auto is_allowed = [](char c) {
    return base::is_letter_or_digit(c) || c == '.' || c == '_' || c == '-';
  };
  const auto name = text.begin() + static_cast<std::ptrdiff_t>(slash);
  return std::all_of(text.begin(), name, is_allowed) &&
         std::all_of(name + 1, text.end(), is_allowed);
}

/// Returns the value of an environment variable that is set and not empty, as a path.
std::optional<fs::path> folder_of(const char* variable) {
  const char* const value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return fs::path(value);
}

std::string with_home(const std::string& name) {
  const bool is_home = name == "~" || begins_with(name, "~/");
  const auto home = folder_of("HOME");
  return is_home && home && !is_there(name) ? home->string() + name.substr(1) : name;
}

/// The rules of huggingface_hub.
std::optional<fs::path> hub_cache() {
  if (const auto folder = folder_of("HF_HUB_CACHE")) return with_home(folder->string());
  if (const auto folder = folder_of("HUGGINGFACE_HUB_CACHE")) return with_home(folder->string());
  if (const auto folder = folder_of("HF_HOME"))
    return with_home(folder->string()) / fs::path("hub");
  if (const auto folder = folder_of("XDG_CACHE_HOME")) return *folder / "huggingface" / "hub";
  if (const auto folder = folder_of("HOME")) return *folder / ".cache" / "huggingface" / "hub";
  return std::nullopt;
}

/// Returns the snapshot of a cached model: that of refs/main, or the only one.
std::optional<fs::path> snapshot_of(const fs::path& cached) {
  std::ifstream stream(cached / "refs" / "main");
  std::string commit;
  if (stream >> commit && is_folder(cached / "snapshots" / commit)) {
    return cached / "snapshots" / commit;
  }
  std::error_code failed;
  std::vector<fs::path> all;
  for (fs::directory_iterator entry(cached / "snapshots", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    if (is_folder(entry->path())) all.push_back(entry->path());
  }
  if (all.size() != 1) return std::nullopt;
  return all.front();
}

/// Returns the cached model's folder of a name on the hub.
std::optional<fs::path> cached_model(const std::string& name) {
  const auto cache = hub_cache();
  if (!cache || !looks_like_hub_name(name)) return std::nullopt;
  std::string folder = "models--" + name;
  folder.replace(folder.find('/'), 1, "--");
  if (!is_folder(*cache / folder)) return std::nullopt;
  return *cache / folder;
}

/// Goes from a folder to the GGUF file or the snapshot in it.
fs::path inside(const fs::path& folder) {
  if (is_there(folder / "config.json")) return folder;
  if (is_folder(folder / "snapshots")) {
    const auto snapshot = snapshot_of(folder);
    return snapshot ? inside(*snapshot) : folder;
  }
  const std::vector<fs::path> files = gguf_files(folder);
  return files.size() == 1 ? files.front() : folder;
}

}  // namespace

std::vector<fs::path> gguf_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const fs::path& path = entry->path();
    if (path.extension() != ".gguf" || is_folder(path)) continue;
    if (begins_with(path.filename().string(), "mmproj")) continue;
    if (gguf::parts_of(path).front().filename() == path.filename()) files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string find_model(const std::string& given) {
  const std::string name = with_home(given);
  if (is_folder(name)) return inside(name).string();
  if (is_there(name)) {
    const fs::path folder = fs::path(name).parent_path();
    const fs::path extension = fs::path(name).extension();
    const bool is_part = extension == ".json" || extension == ".safetensors";
    if (gguf::is_gguf(name) || !is_part) return name;
    return is_there(folder / "config.json") ? (folder.empty() ? "." : folder.string()) : name;
  }
  const auto cached = cached_model(name);
  const fs::path found = cached ? inside(*cached) : fs::path();
  return !cached || found == *cached ? name : found.string();
}

std::string hub_hint(const std::string& name) {
  if (!looks_like_hub_name(name)) return "";
  const std::string own = name.substr(name.find('/') + 1);
  return fmt::format(
      ". kvzap downloads nothing: hf download {} --local-dir {} (pip install huggingface_hub), "
      "then give {}",
      name, own, own);
}

std::string download_hint(const fs::path& folder) {
  const auto unfinished = [](const fs::path& where) {
    std::error_code failed;
    for (fs::directory_iterator entry(where, failed), end; !failed && entry != end;
         entry.increment(failed)) {
      for (const char* extension : {".incomplete", ".part", ".crdownload", ".aria2"}) {
        if (entry->path().extension() == extension) return true;
      }
    }
    return false;
  };
  // The hub's tools keep unfinished files beside a local folder's or a cached model's files.
  for (const fs::path& where : {folder, folder / ".cache" / "huggingface" / "download",
                                folder / ".." / ".." / "blobs", folder / "blobs"}) {
    if (unfinished(where)) return "; its download has not finished: hf download continues it";
  }
  return "";
}

}  // namespace kvzap::model
