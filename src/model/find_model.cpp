#include "model/find_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <system_error>

#include "files/ascii.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
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

/// Returns whether `text` may be an owner, a model or a tag of the hub, and is no path.
bool is_word(const std::string& text) {
  for (const char* file : {".safetensors", ".gguf", ".json", ".jsonl", ".tsv", ".txt", ".h5"}) {
    if (fs::path(text).extension() == file) return false;
  }
  if (text.empty() || text.front() == '.' || text.front() == '~' || text.front() == '-') {
    return false;
  }
  return std::all_of(text.begin(), text.end(), [](char c) {
    return files::is_letter_or_digit(c) || c == '.' || c == '_' || c == '-';
  });
}

/// A model of the hub.
struct HubName {
  std::string owner, name;
  std::string file;  // of all its files only this one, or those of a pattern; empty: all
};

/// Understands OWNER/NAME, OWNER/NAME:TAG of llama.cpp, and addresses of pages.
std::optional<HubName> hub_name(std::string text) {
  bool is_address = false;
  for (const std::string_view begin :
       {"https://", "http://", "www.", "huggingface.co/", "hf.co/", "hf://"}) {
    if (!begins_with(text, begin)) continue;
    text.erase(0, begin.size());
    is_address = true;
  }
  while (!text.empty() && text.back() == '/') text.pop_back();
  std::vector<std::string> parts = {""};
  for (const char c : text.substr(0, text.find_first_of("?#"))) {
    if (c == '/') parts.emplace_back();
    if (c != '/') parts.back().push_back(c);
  }
  if (parts.size() < 2 || (parts.size() > 2 && !is_address)) return std::nullopt;
  HubName hub = {parts[0], parts[1].substr(0, parts[1].find(':')), ""};
  if (!is_word(hub.owner) || !is_word(hub.name)) return std::nullopt;
  if (hub.name.size() < parts[1].size()) {
    const std::string tag = parts[1].substr(hub.name.size() + 1);
    if (!is_word(tag)) return std::nullopt;
    hub.file = "*" + tag + "*.gguf";
  }
  // OWNER/NAME/blob/main/FILE
  if (parts.size() > 4 && parts[2] != "tree") hub.file = parts.back();
  return hub;
}

/// Returns the value of an environment variable that is set and not empty, as a path.
std::optional<fs::path> folder_of(const char* variable) {
  const char* const value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return fs::path(value);
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
  const auto hub = hub_name(name);
  if (!cache || !hub) return std::nullopt;
  const std::string folder = "models--" + hub->owner + "--" + hub->name;
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

std::string with_home(const std::string& name) {
  const bool is_home = name == "~" || begins_with(name, "~/");
  const auto home = folder_of("HOME");
  return is_home && home && !is_there(name) ? home->string() + name.substr(1) : name;
}

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
  return cached ? inside(*cached).string() : name;
}

bool is_surrogate(const fs::path& folder) {
  if (!is_there(folder / "config.json")) return false;
  try {
    const auto config = files::read_json_object(folder / "config.json");
    return config.value("model_type", "") == "kvzap";
  } catch (const std::exception&) {
    return false;
  }
}

bool is_ollama_name(const std::string& name) {
  const auto colon = name.find(':');
  return colon != std::string::npos && is_word(name.substr(0, colon)) &&
         is_word(name.substr(colon + 1));
}

std::string ollama_hint(const std::string& name) {
  return fmt::format("ollama show {} --modelfile names its GGUF file after FROM", name);
}

std::string folder_of_download(const std::string& name) {
  const auto hub = hub_name(name);
  return hub ? hub->name : "DIR";
}

std::string download_call(const std::string& name, const std::string& folder) {
  const auto hub = hub_name(name);
  std::string text = "hf download " + (hub ? hub->owner + "/" + hub->name : "OWNER/NAME");
  if (hub && !hub->file.empty()) {
    const bool is_pattern = hub->file.front() == '*';
    text += (is_pattern ? " --include " : " ") + files::shell_quoted(hub->file);
  }
  return text + " --local-dir " +
         files::shell_quoted(folder.empty() ? folder_of_download(name) : folder);
}

std::string hub_hint(const std::string& name) {
  if (!hub_name(name)) return "";
  return fmt::format(". kvzap downloads nothing: {} (pip install huggingface_hub), then give {}",
                     download_call(name), folder_of_download(name));
}

std::string name_hint(const std::string& name) {
  if (is_ollama_name(name)) return ". kvzap has no store of models: " + ollama_hint(name);
  return is_word(name)
             ? ". kvzap downloads nothing: hf download OWNER/NAME --local-dir DIR fetches a model"
             : hub_hint(name);
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
  // models--OWNER--NAME of the hub's cache
  std::string name = folder.filename().string();
  if (begins_with(name, "models--") && is_folder(folder / "snapshots")) {
    name.erase(0, std::string_view("models--").size());
    const auto dashes = name.find("--");
    if (dashes != std::string::npos) name.replace(dashes, 2, "/");
    return "; the hub's cache lacks the snapshot of refs/main: hf download " + name + " fetches it";
  }
  return "";
}

}  // namespace kvzap::model
