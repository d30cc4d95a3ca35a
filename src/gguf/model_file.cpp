#include "gguf/model_file.hpp"

#include <fmt/format.h>

#include <fstream>
#include <kvzap/core/types.hpp>
#include <system_error>

#include "files/json_file.hpp"
#include "gguf/folder_tokenizer.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/made_files.hpp"

namespace kvzap::gguf {

namespace fs = std::filesystem;

namespace {

std::optional<nlohmann::json> made_file(const fs::path& model, std::string_view name) {
  if (name == "generation_config.json") return make_generation_config(GgufFile::open(model));
  if (name == "tokenizer.json") return make_tokenizer(GgufFile::open(model));
  if (name == "tokenizer_config.json") return make_tokenizer_config(GgufFile::open(model));
  return std::nullopt;
}

/// Python writes infinite numbers, such as limits of a state space, as a name that JSON lacks.
std::string with_quoted_infinity(std::string_view text) {
  constexpr std::string_view name = "Infinity";
  std::string result;
  bool is_quoted = false;
  std::size_t copied = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (is_quoted && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      is_quoted = !is_quoted;
    } else if (!is_quoted && text.compare(i, name.size(), name) == 0) {
      result.append(text.substr(copied, i - copied)).append("\"Infinity\"");
      i += name.size() - 1;
      copied = i + 1;
    }
  }
  return result.append(text.substr(copied));
}

}  // namespace

bool is_gguf(const fs::path& model) {
  std::error_code ignored;
  if (fs::is_directory(model, ignored)) return false;
  if (model.extension() == ".gguf") return true;
  // Programs such as Ollama name files by their hashes.
  constexpr std::string_view magic = "GGUF";
  std::string begin(magic.size(), '\0');
  return fs::is_regular_file(model, ignored) &&
         std::ifstream(model, std::ios::binary).read(begin.data(), magic.size()) && begin == magic;
}

std::string name_of_model_file(const fs::path& model, std::string_view name) {
  return is_gguf(model) ? fmt::format("{} ({})", model.string(), name) : (model / name).string();
}

std::optional<ModelFile> read_model_file(const fs::path& model, std::string_view name,
                                         std::uintmax_t max_bytes) {
  const std::string where = name_of_model_file(model, name);
  if (is_gguf(model)) {
    auto content = made_file(model, name);
    if (!content) return std::nullopt;
    return ModelFile{*std::move(content), where};
  }
  std::error_code ignored;
  if (!fs::exists(model / name, ignored)) {
    const auto file = name == "tokenizer.json" ? vocabulary_file(model) : std::nullopt;
    if (!file) return std::nullopt;
    return ModelFile{make_folder_tokenizer(*file),
                     fmt::format("{} (tokenizer.json)", file->string())};
  }
  std::string text = files::read_text_file(model / name, max_bytes);
  if (name == "config.json") text = with_quoted_infinity(text);
  return ModelFile{files::parse_json(text, where), where};
}

std::optional<ModelFile> read_model_object(const fs::path& model, std::string_view name) {
  auto file = read_model_file(model, name);
  if (file && !file->content.is_object()) {
    throw Error(fmt::format("{}: expected a JSON object, found {}", file->where,
                            file->content.type_name()));
  }
  return file;
}

bool has_model_file(const fs::path& model, std::string_view name) {
  std::error_code ignored;
  if (!is_gguf(model)) {
    return fs::is_regular_file(model / name, ignored) ||
           (name == "tokenizer.json" && vocabulary_file(model));
  }
  if (!fs::exists(model, ignored)) return false;
  if (name == "config.json" || name == "generation_config.json") return true;
  return (name == "tokenizer.json" || name == "tokenizer_config.json") &&
         GgufFile::open(model).metadata().has("tokenizer.ggml.tokens");
}

}  // namespace kvzap::gguf
