#include "session/model_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "files/fnv.hpp"
#include "gguf/folder_tokenizer.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "model/gguf_metadata.hpp"

namespace kvzap::session {

namespace fs = std::filesystem;

std::vector<fs::path> weight_files(const fs::path& model) {
  std::error_code ignored;
  std::vector<fs::path> weights;
  if (gguf::is_gguf(model)) {
    for (fs::path& part : gguf::parts_of(model)) {
      if (fs::is_regular_file(part, ignored)) weights.push_back(std::move(part));
    }
    return weights;
  }
  for (const auto& entry : fs::directory_iterator(model)) {
    if (entry.path().extension() == ".safetensors") weights.push_back(entry.path());
  }
  std::sort(weights.begin(), weights.end());
  return weights;
}

bool has_quantised_weights(const fs::path& model) {
  if (weight_files(model).empty()) return false;
  if (gguf::is_gguf(model)) return true;
  const auto config = gguf::read_model_object(model, "config.json");
  return config && config->content.contains("quantization_config");
}

namespace {

/// Hashes the name, the size and evenly spaced parts of each existing file.
std::string hash_of_files(const std::vector<fs::path>& files) {
  std::uint64_t hash = files::fnv_start;
  const auto add_part = [&](const fs::path& file, std::uintmax_t begin, std::size_t bytes) {
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(begin));
    std::string part(bytes, '\0');
    stream.read(part.data(), static_cast<std::streamsize>(bytes));
    hash = files::fnv1a(part, hash);
  };
  for (const fs::path& file : files) {
    std::error_code ignored;
    if (!fs::is_regular_file(file, ignored)) continue;
    const std::uintmax_t size = fs::file_size(file);
    constexpr std::uintmax_t parts = 32;
    constexpr std::uintmax_t bytes = std::uintmax_t{1} << 16;
    hash = files::fnv1a(fmt::format("{} {}", file.filename().string(), size), hash);
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

/// Hashes the files `names` and the weights of a model. Empty if the model has none of them.
std::string hash_of_parts(const fs::path& model, const std::vector<const char*>& names,
                          bool with_weights) {
  std::vector<fs::path> files;
  if (with_weights) files = weight_files(model);
  if (!gguf::is_gguf(model)) {
    files.insert(files.begin(), names.size(), {});
    std::transform(names.begin(), names.end(), files.begin(),
                   [&](const char* name) { return model / name; });
    std::error_code ignored;
    const auto tokenizer = std::find(files.begin(), files.end(), model / "tokenizer.json");
    if (tokenizer != files.end() && !fs::is_regular_file(*tokenizer, ignored)) {
      // Without it, these make the tokenizer.
      if (const auto vocabulary = gguf::vocabulary_file(model)) *tokenizer = *vocabulary;
      for (const char* name : {"merges.txt", "added_tokens.json", "special_tokens_map.json"}) {
        files.push_back(model / name);
      }
    }
    const bool has_any = std::any_of(files.begin(), files.end(), [&](const fs::path& file) {
      return fs::is_regular_file(file, ignored);
    });
    return has_any ? hash_of_files(files) : "";
  }
  std::string text = with_weights ? hash_of_files(files) : "";
  for (const char* name : names) {
    const auto file = name == std::string_view("config.json") ? kvzap::model::read_config(model)
                                                              : gguf::read_model_file(model, name);
    if (file) text += file->content.dump();
  }
  return text.empty() ? "" : fmt::format("{:016x}", files::fnv1a(text));
}

}  // namespace

std::string hash_of_model(const fs::path& model, bool with_weights) {
  return hash_of_parts(
      model, {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"},
      with_weights);
}

ModelHashes hashes_of_model(const fs::path& model, bool with_weights) {
  return {hash_of_parts(model, {"config.json"}, with_weights),
          hash_of_parts(model, {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"},
                        false),
          hash_of_parts(model, {"generation_config.json"}, false)};
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
