#include "session/model_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/fnv.hpp"

namespace kvzap::session {

namespace fs = std::filesystem;

std::vector<fs::path> weight_files(const fs::path& folder) {
  std::vector<fs::path> weights;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") weights.push_back(entry.path());
  }
  std::sort(weights.begin(), weights.end());
  return weights;
}

namespace {

/// Hashes the name, the size and evenly spaced parts of each existing file.
std::string hash_of_files(const std::vector<fs::path>& files) {
  std::uint64_t hash = base::fnv_start;
  const auto add_part = [&](const fs::path& file, std::uintmax_t begin, std::size_t bytes) {
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(begin));
    std::string part(bytes, '\0');
    stream.read(part.data(), static_cast<std::streamsize>(bytes));
    hash = base::fnv1a(part, hash);
  };
  for (const fs::path& file : files) {
    std::error_code ignored;
    if (!fs::is_regular_file(file, ignored)) continue;
    const std::uintmax_t size = fs::file_size(file);
    constexpr std::uintmax_t parts = 32;
    constexpr std::uintmax_t bytes = std::uintmax_t{1} << 16;
    hash = base::fnv1a(fmt::format("{} {}", file.filename().string(), size), hash);
    if (size <= parts * bytes) {
      add_part(file, 0, static_cast<std::size_t>(size));
      continue;
    }
    for (std::uintmax_t i = 0; i < parts; ++i) {
      add_part(file, (size - bytes) / (parts - 1) * i, static_cast<std::size_t>(bytes));
    }
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace

std::string hash_of_model(const fs::path& folder, bool with_weights) {
  std::vector<fs::path> files;
  for (const char* name :
       {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    files.emplace_back(folder / name);
  }
  if (with_weights) {
    const std::vector<fs::path> weights = weight_files(folder);
    files.insert(files.end(), weights.begin(), weights.end());
  }
  return hash_of_files(files);
}

ModelHashes hashes_of_model(const fs::path& folder, bool with_weights) {
  const auto hash = [](const std::vector<fs::path>& files) -> std::string {
    std::error_code ignored;
    const bool has_any = std::any_of(files.begin(), files.end(), [&](const fs::path& file) {
      return fs::is_regular_file(file, ignored);
    });
    return has_any ? hash_of_files(files) : "";
  };
  std::vector<fs::path> files = {folder / "config.json"};
  if (with_weights) {
    const std::vector<fs::path> weights = weight_files(folder);
    files.insert(files.end(), weights.begin(), weights.end());
  }
  return {hash(files),
          hash({folder / "tokenizer.json", folder / "tokenizer_config.json",
                folder / "chat_template.jinja"}),
          hash({folder / "generation_config.json"})};
}

std::string hash_of_policy_file(const fs::path& file) {
  std::vector<fs::path> files;
  if (fs::is_directory(file)) {
    files = weight_files(file);
    files.push_back(file / "full_attention_heads.tsv");
    files.push_back(file / "config.json");
  } else {
    files.push_back(file);
    // config.json of a pattern of duo-attention is in the same folder.
    if (file.extension() == ".tsv") files.push_back(file.parent_path() / "config.json");
  }
  return hash_of_files(files);
}

}  // namespace kvzap::session
