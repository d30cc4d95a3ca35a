#include "gguf/write_tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvzap/core/types.hpp>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "gguf/chat_templates.hpp"
#include "gguf/made_files.hpp"
#include "gguf/model_file.hpp"
#include "gguf/token_types.hpp"

namespace kvzap::gguf {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

/// Returns a part of tokenizer.json without fields that do not change ids.
json essence(json part) {
  if (part.is_array()) {
    for (json& member : part) member = essence(std::move(member));
  } else if (part.is_object()) {
    part.erase("trim_offsets");
    for (auto& [key, member] : part.items()) member = essence(std::move(member));
  }
  return part;
}

/// Returns a member, or null.
json member_of(const json& object, const char* name) {
  return object.is_object() ? object.value(name, json()) : json();
}

/// Returns the name of the folder's pre-tokenizer in the format.
std::optional<std::string_view> name_of_pre_tokenizer(const json& tokenizer) {
  const json normalizer = essence(member_of(tokenizer, "normalizer"));
  const json pre_tokenizer = essence(member_of(tokenizer, "pre_tokenizer"));
  const bool ignores = member_of(member_of(tokenizer, "model"), "ignore_merges") == true;
  for (const std::string_view name : pre_tokenizer_names()) {
    const auto kind = pre_tokenizer_kind(name);
    if (kind && kind->byte_level && kind->ignore_merges == ignores &&
        essence(kind->normalizer) == normalizer && essence(kind->pre_tokenizer) == pre_tokenizer) {
      return name;
    }
  }
  return std::nullopt;
}

/// Writes the parts of one folder.
class TokenizerWriter {
 public:
  TokenizerWriter(ModelFile tokenizer, std::int64_t vocab_size, GgufWriter& writer)
      : m_file(std::move(tokenizer)), m_vocab_size(vocab_size), m_writer(writer) {}

  void add() {
    read_tokens();
    const json& model = m_file.content["model"];
    if (model["byte_fallback"] == true) {
      m_writer.add_string("tokenizer.ggml.model", "llama");
      mark_bytes();
      add_scores();
      const json normalizer = m_file.content["normalizer"];
      m_writer.add_flag("tokenizer.ggml.add_space_prefix",
                        normalizer.dump().find("Prepend") != std::string::npos ||
                            m_file.content["pre_tokenizer"].is_object());
    } else {
      const auto pre = name_of_pre_tokenizer(m_file.content);
      if (!pre) fail("pre_tokenizer", "one that GGUF has a name for", "another");
      m_writer.add_string("tokenizer.ggml.model", "gpt2");
      m_writer.add_string("tokenizer.ggml.pre", *pre);
      m_writer.add_strings("tokenizer.ggml.merges", merges());
    }
    m_writer.add_strings("tokenizer.ggml.tokens", m_tokens);
    m_writer.add_i32s("tokenizer.ggml.token_type", m_types);
    add_template();
  }

  std::optional<std::uint32_t> id_of(const json& token) const {
    const json content = token.is_object() ? token.value("content", json()) : token;
    if (!content.is_string()) return std::nullopt;
    const auto found = m_ids.find(content.get<std::string>());
    return found == m_ids.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  [[noreturn]] void fail(const std::string& field, const std::string& expected,
                         const std::string& found) const {
    files::throw_unexpected(m_file.where + ": " + field, expected, found);
  }

  void set_token(const std::string& text, const json& id, std::int32_t type) {
    if (!id.is_number_integer() || id.get<std::int64_t>() < 0 ||
        id.get<std::int64_t>() >= m_vocab_size) {
      fail(files::abbreviated(text), fmt::format("an id below {}", m_vocab_size), id.dump());
    }
    const auto place = id.get<std::uint32_t>();
    m_tokens[place] = text;
    m_types[place] = type;
    m_ids[text] = place;
  }

  void read_tokens() {
    const json& model = member("model");
    if (member_of(model, "type") != "BPE" || !member_of(model, "vocab").is_object() ||
        !member_of(model, "merges").is_array()) {
      fail("model", "a BPE with vocab and merges", member_of(model, "type").dump());
    }
    m_types.assign(static_cast<std::size_t>(m_vocab_size), unused);
    for (std::int64_t id = 0; id < m_vocab_size; ++id)
      m_tokens.push_back(fmt::format("[PAD{}]", id));
    for (const auto& [text, id] : model["vocab"].items()) set_token(text, id, normal);
    const json added = member_of(m_file.content, "added_tokens");
    if (!added.is_array()) return;
    for (const json& token : added) {
      const json content = member_of(token, "content");
      if (!content.is_string()) fail("added_tokens", "tokens with a content", content.dump());
      const bool is_unknown = content == member_of(model, "unk_token");
      set_token(content.get<std::string>(), member_of(token, "id"),
                is_unknown                            ? unknown
                : member_of(token, "special") == true ? control
                                                      : user_defined);
    }
  }

  const json& member(const char* name) const {
    if (!m_file.content.contains(name)) fail(name, "an object", "none");
    return m_file.content[name];
  }

  std::vector<std::string> merges() const {
    std::vector<std::string> texts;
    for (const json& merge : m_file.content["model"]["merges"]) {
      const bool is_pair =
          merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
      if (!is_pair && !merge.is_string()) fail("model.merges", "pairs of tokens", merge.dump());
      texts.push_back(is_pair ? merge[0].get<std::string>() + " " + merge[1].get<std::string>()
                              : merge.get<std::string>());
    }
    return texts;
  }

  void mark_bytes() {
    for (int value = 0; value < 256; ++value) {
      const auto found = m_ids.find(fmt::format("<0x{:02X}>", value));
      if (found != m_ids.end()) m_types[found->second] = byte;
    }
  }

  /// SentencePiece merges in descending order of the score of the token that results.
  void add_scores() {
    std::vector<float> scores(m_tokens.size(), -std::numeric_limits<float>::max());
    std::vector<bool> is_scored(m_tokens.size());
    float score = 0;
    for (const std::string& merge : merges()) {
      std::string token = merge;
      const std::size_t space = token.find(' ');
      if (space != token.npos) token.erase(space, 1);
      const auto found = m_ids.find(token);
      if (found == m_ids.end() || is_scored[found->second]) continue;
      is_scored[found->second] = true;
      scores[found->second] = score;
      score -= 1;
    }
    m_writer.add_f32s("tokenizer.ggml.scores", scores);
  }

  /// Adds whether a text begins and ends with special tokens.
  void add_template() {
    const json processor = member_of(m_file.content, "post_processor");
    json single = member_of(processor, "single");
    const json members = member_of(processor, "processors");
    if (members.is_array()) {
      for (const json& member : members) {
        if (member_of(member, "type") == "TemplateProcessing") single = member_of(member, "single");
      }
    }
    const auto is_special = [](const json& part) { return part.contains("SpecialToken"); };
    const bool has = single.is_array() && !single.empty();
    m_writer.add_flag("tokenizer.ggml.add_bos_token", has && is_special(single.front()));
    m_writer.add_flag("tokenizer.ggml.add_eos_token", has && is_special(single.back()));
  }

  ModelFile m_file;
  std::int64_t m_vocab_size;
  GgufWriter& m_writer;
  std::vector<std::string> m_tokens;
  std::vector<std::int32_t> m_types;
  std::map<std::string, std::uint32_t> m_ids;
};

}  // namespace

void add_tokenizer(const fs::path& folder, std::int64_t vocab_size, GgufWriter& writer) {
  auto tokenizer = read_model_object(folder, "tokenizer.json");
  if (!tokenizer) return;
  TokenizerWriter tokens(*std::move(tokenizer), vocab_size, writer);
  tokens.add();
  const auto config = read_model_object(folder, "tokenizer_config.json");
  const auto generation = read_model_object(folder, "generation_config.json");
  const auto model = read_model_object(folder, "config.json");
  const json settings = config ? config->content : json::object();
  constexpr std::pair<const char*, const char*> names[] = {
      {"bos", "bos"}, {"eos", "eos"}, {"unk", "unknown"}, {"pad", "padding"}};
  for (const auto& [name, own_name] : names) {
    auto id = tokens.id_of(member_of(settings, fmt::format("{}_token", name).c_str()));
    for (const auto* file : {&generation, &model}) {
      if (id || !*file) continue;
      json field = member_of((*file)->content, fmt::format("{}_token_id", name).c_str());
      if (field.is_array() && !field.empty()) field = json(field.front());
      if (field.is_number_unsigned() && field < vocab_size) id = field.get<std::uint32_t>();
    }
    if (id) writer.add_u32(fmt::format("tokenizer.ggml.{}_token_id", own_name), *id);
  }
  constexpr std::uintmax_t most_template_bytes = 1u << 20;
  for (const auto& [name, source] : read_chat_templates(folder, most_template_bytes)) {
    const char* const end = name == "tool_use" ? ".tool_use" : "";
    writer.add_string(fmt::format("tokenizer.chat_template{}", end), source.text);
  }
}

}  // namespace kvzap::gguf
