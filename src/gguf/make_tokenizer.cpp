// tokenizer.json, tokenizer_config.json and generation_config.json from the metadata of a GGUF
// file.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "files/quote.hpp"
#include "gguf/made_files.hpp"
#include "gguf/token_types.hpp"
#include "gguf/tokenizer_parts.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

constexpr std::uint64_t max_tokens = 1u << 21;
constexpr std::uint64_t max_merges = 1u << 22;

constexpr const char* tokens_key = "tokenizer.ggml.tokens";
constexpr const char* model_key = "tokenizer.ggml.model";
constexpr const char* merges_key = "tokenizer.ggml.merges";
constexpr const char* pre_key = "tokenizer.ggml.pre";

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (std::size_t found = 0; (found = text.find(from)) != text.npos;) {
    result.append(text.substr(0, found)).append(to);
    text.remove_prefix(found + from.size());
  }
  return result.append(text);
}

/// The vocabulary of one file. The texts lie in the file.
class TokenTable {
 public:
  explicit TokenTable(const Metadata& values) : m_values(values) {
    auto tokens = values.find_strings(tokens_key, max_tokens);
    if (!tokens) return;
    const std::uint64_t count = tokens->left();
    if (count == 0) values.fail(tokens_key, "tokens", "none");
    m_types = values.find_integers("tokenizer.ggml.token_type", count, 0, byte)
                  .value_or(std::vector<std::int64_t>(count, normal));
    texts.reserve(count);
    while (tokens->left() > 0) {
      texts.push_back(tokens->next());
      if (!files::is_utf8(texts.back())) {
        values.fail(fmt::format("{}[{}]", tokens_key, texts.size() - 1), "a text in UTF-8",
                    files::in_quotes(texts.back()));
      }
    }
  }

  std::size_t size() const { return texts.size(); }
  /// Type 0 is that of tokens that a converter could not classify.
  std::int64_t type(std::size_t id) const {
    return m_types[id] == 0 ? std::int64_t{normal} : m_types[id];
  }
  bool is_added(std::size_t id) const {
    return type(id) == control || type(id) == user_defined || type(id) == unknown;
  }

  /// Returns the id of a special token, by the end of its key; `fallback` if there is none.
  std::optional<std::size_t> special(std::string_view name,
                                     std::optional<std::size_t> fallback = std::nullopt) const {
    const std::string key = fmt::format("tokenizer.ggml.{}_token_id", name);
    const auto id = m_values.find_integer(key, 0, static_cast<std::int64_t>(size()) - 1);
    if (id) return static_cast<std::size_t>(*id);
    return fallback && *fallback < size() ? fallback : std::nullopt;
  }

  std::vector<std::string_view> texts;

 private:
  const Metadata& m_values;
  std::vector<std::int64_t> m_types;
};

bool is_sentence_piece(const Metadata& values) { return values.find_string(model_key) == "llama"; }

/// Returns ids of the special tokens that tokenizers of this kind have by default.
std::optional<std::size_t> default_id(const Metadata& values, std::string_view name) {
  if (!is_sentence_piece(values)) return std::nullopt;
  if (name == "unknown") return 0;
  if (name == "bos") return 1;
  if (name == "eos") return 2;
  return std::nullopt;
}

std::optional<std::size_t> special_id(const Metadata& values, const TokenTable& tokens,
                                      std::string_view name) {
  return tokens.special(name, default_id(values, name));
}

/// Returns the text of a token as it appears in a prompt.
std::string prompt_text(const Metadata& values, const TokenTable& tokens, std::size_t id) {
  const bool has_spaces = is_sentence_piece(values) && tokens.type(id) == user_defined;
  return has_spaces ? replaced(tokens.texts[id], space_mark, " ") : std::string(tokens.texts[id]);
}

json vocabulary_of(const Metadata& values, const TokenTable& tokens) {
  json vocabulary = json::object();
  auto& members = vocabulary.get_ref<json::object_t&>();
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    // Converters fill gaps of the vocabulary with unused tokens.
    if (tokens.type(id) == unused) continue;
    const bool is_new = members.emplace(prompt_text(values, tokens, id), id).second;
    if (is_new || tokens.is_added(id)) continue;
    values.fail(fmt::format("{}[{}]", tokens_key, id), "each token once",
                fmt::format("{} again", files::in_quotes(tokens.texts[id])));
  }
  return vocabulary;
}

json added_tokens_of(const Metadata& values, const TokenTable& tokens) {
  json added = json::array();
  std::set<std::string> known;
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    const std::string text = prompt_text(values, tokens, id);
    if (!tokens.is_added(id) || text.empty() || !known.insert(text).second) continue;
    added.push_back({{"id", id},
                     {"content", text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", tokens.type(id) != user_defined}});
  }
  return added;
}

/// Adds the post-processor that puts special tokens around a text.
void add_template(const Metadata& values, const TokenTable& tokens, bool bos_by_default,
                  json& tokenizer) {
  const auto wanted = [&](const char* name, bool by_default) {
    const std::string key = fmt::format("tokenizer.ggml.add_{}_token", name);
    const auto id = special_id(values, tokens, name);
    const auto asked = values.find_flag(key);
    std::vector<TemplateToken> found;
    if (!asked.value_or(by_default)) return found;
    if (id) {
      found.push_back({prompt_text(values, tokens, *id), *id});
    } else if (asked) {
      values.fail(key, "false, as there is no such token", "true");
    }
    return found;
  };
  tokenizer["post_processor"] =
      template_processing(wanted("bos", bos_by_default), wanted("eos", false));
}

json merges_of(const Metadata& values) {
  auto texts = values.find_strings(merges_key, max_merges);
  if (!texts) values.fail(merges_key, "an array of strings", "none");
  json merges = json::array();
  auto& list = merges.get_ref<json::array_t&>();
  list.reserve(static_cast<std::size_t>(texts->left()));
  while (texts->left() > 0) {
    const std::string_view text = texts->next();
    if (!files::is_utf8(text)) {
      values.fail(fmt::format("{}[{}]", merges_key, list.size()), "a text in UTF-8",
                  files::in_quotes(text));
    }
    list.emplace_back(std::string(text));
  }
  return merges;
}

/// Makes characters without a token those of their bytes, or the unknown one.
void add_byte_fallback(const Metadata& values, const TokenTable& tokens, json& model) {
  model["fuse_unk"] = true;
  model["byte_fallback"] = true;
  const auto unknown_id = special_id(values, tokens, "unknown");
  if (unknown_id) model["unk_token"] = std::string(tokens.texts[*unknown_id]);
}

void make_merging(const Metadata& values, const TokenTable& tokens, std::string_view name,
                  json& tokenizer) {
  auto kind = pre_tokenizer_kind(name);
  if (!kind) {
    values.fail(pre_key, "the name of a supported pre-tokenizer", files::in_quotes(name));
  }
  tokenizer["normalizer"] = std::move(kind->normalizer);
  tokenizer["pre_tokenizer"] = std::move(kind->pre_tokenizer);
  tokenizer["decoder"] = kind->byte_level ? byte_level_decoder() : marked_spaces_decoder(false);
  tokenizer["model"] = bpe_model(vocabulary_of(values, tokens), merges_of(values));
  tokenizer["model"]["ignore_merges"] = kind->ignore_merges;
  if (!kind->byte_level) add_byte_fallback(values, tokens, tokenizer["model"]);
  add_template(values, tokens, kind->add_bos, tokenizer);
}

/// Returns the merges of a file that build tokens of its vocabulary.
json merges_of_vocabulary(const Metadata& values, const json& vocabulary) {
  json merges = json::array();
  for (json& merge : merges_of(values)) {
    const auto& text = merge.get_ref<const std::string&>();
    const std::size_t space = text.find(' ', 1);
    if (space == text.npos) values.fail(merges_key, "pairs of tokens", files::in_quotes(text));
    const std::string left = text.substr(0, space), right = text.substr(space + 1);
    if (vocabulary.contains(left) && vocabulary.contains(right) &&
        vocabulary.contains(left + right)) {
      merges.push_back(std::move(merge));
    }
  }
  return merges;
}

/// Returns the merges that build the tokens of SentencePiece's BPE: every split of a token in two
/// tokens, in descending order of the token's score. Equal scores are ordered as transformers'
/// converter orders them.
json merges_of_scores(const Metadata& values, const TokenTable& tokens) {
  constexpr const char* key = "tokenizer.ggml.scores";
  const auto scores = values.find_floats(key, tokens.size());
  if (!scores) values.fail(key, "an array of numbers", "none");
  std::vector<std::string_view> normal_texts = tokens.texts;
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    if (tokens.type(id) != normal) normal_texts[id] = {};
  }
  std::vector<TokenMerge> merges = all_merges(normal_texts, [&](std::size_t most) {
    values.fail(tokens_key, fmt::format("at most {} merges of tokens", most), "more");
  });
  const auto order = [&](const TokenMerge& merge) {
    return std::tuple((*scores)[merge.token], characters_of(tokens.texts[merge.left]),
                      characters_of(tokens.texts[merge.right]));
  };
  std::stable_sort(merges.begin(), merges.end(),
                   [&](const TokenMerge& a, const TokenMerge& b) { return order(a) > order(b); });
  return pairs_of(merges, tokens.texts);
}

void make_sentence_piece(const Metadata& values, const TokenTable& tokens, json& tokenizer) {
  const bool adds_space = values.find_flag("tokenizer.ggml.add_space_prefix").value_or(true);
  json vocabulary = vocabulary_of(values, tokens);
  // A file of SentencePiece's model has scores. Converters of tokenizer.json may add its merges,
  // which can differ in the order.
  json merges = values.has(merges_key) ? merges_of_vocabulary(values, vocabulary)
                                       : merges_of_scores(values, tokens);
  json normalizers = json::array();
  if (adds_space) normalizers.push_back({{"type", "Prepend"}, {"prepend", space_mark}});
  normalizers.push_back(replace_text(" ", space_mark));
  tokenizer["normalizer"] = {{"type", "Sequence"}, {"normalizers", std::move(normalizers)}};
  tokenizer["pre_tokenizer"] = nullptr;
  tokenizer["decoder"] = marked_spaces_decoder(adds_space);
  tokenizer["model"] = bpe_model(std::move(vocabulary), std::move(merges));
  add_byte_fallback(values, tokens, tokenizer["model"]);
  add_template(values, tokens, true, tokenizer);
}

constexpr std::string_view end_of_part = "<|end|>";

/// Names of control tokens that end a message. Older converters do not record them.
bool ends_turn(std::string_view text) {
  static constexpr std::string_view names[] = {"<|eot_id|>",
                                               "<|eom_id|>",
                                               "<|im_end|>",
                                               end_of_part,
                                               "<end_of_turn>",
                                               "<|endoftext|>",
                                               "<|end_of_text|>",
                                               "<end_of_utterance>",
                                               "<｜end▁of▁sentence｜>",
                                               "<|return|>",
                                               "<|call|>",
                                               "<|eot|>",
                                               "<|END_OF_TURN_TOKEN|>",
                                               "<turn|>",
                                               "<|tool_response>",
                                               "<|flush|>",
                                               "<|calls|>",
                                               "<EOT>",
                                               "[EOT]",
                                               "[EOS]",
                                               "[e~["};
  return std::find(std::begin(names), std::end(names), text) != std::end(names);
}

}  // namespace

std::optional<json> make_tokenizer(const GgufFile& file) {
  const Metadata& values = file.metadata();
  const TokenTable tokens(values);
  if (tokens.size() == 0) return std::nullopt;
  json tokenizer = {{"version", "1.0"},
                    {"truncation", nullptr},
                    {"padding", nullptr},
                    {"added_tokens", added_tokens_of(values, tokens)},
                    {"post_processor", nullptr}};
  const std::string_view model = values.string(model_key);
  if (model == "gpt2") {
    make_merging(values, tokens, values.find_string(pre_key).value_or("default"), tokenizer);
  } else if (model == "gemma4") {
    make_merging(values, tokens, model, tokenizer);
  } else if (model == "llama") {
    make_sentence_piece(values, tokens, tokenizer);
  } else {
    values.fail(model_key, "'gpt2', 'llama' or 'gemma4'", files::in_quotes(model));
  }
  return tokenizer;
}

std::optional<json> make_tokenizer_config(const GgufFile& file) {
  const Metadata& values = file.metadata();
  const TokenTable tokens(values);
  if (tokens.size() == 0) return std::nullopt;
  // Without a class, transformers builds the tokenizer that it expects of the architecture.
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}};
  constexpr std::pair<const char*, const char*> names[] = {
      {"bos", "bos"}, {"eos", "eos"}, {"unknown", "unk"}, {"padding", "pad"}};
  for (const auto& [name, short_name] : names) {
    if (const auto id = special_id(values, tokens, name)) {
      config[fmt::format("{}_token", short_name)] = prompt_text(values, tokens, *id);
    }
  }
  const auto text = values.find_string("tokenizer.chat_template");
  const auto tool_use = values.find_string("tokenizer.chat_template.tool_use");
  if (text && tool_use) {
    config["chat_template"] = {{{"name", "default"}, {"template", std::string(*text)}},
                               {{"name", "tool_use"}, {"template", std::string(*tool_use)}}};
  } else if (text) {
    config["chat_template"] = std::string(*text);
  }
  return config;
}

json make_generation_config(const GgufFile& file) {
  const Metadata& values = file.metadata();
  const TokenTable tokens(values);
  json config = json::object();
  if (tokens.size() == 0) return config;
  if (const auto id = special_id(values, tokens, "bos")) config["bos_token_id"] = *id;
  if (const auto id = special_id(values, tokens, "padding")) config["pad_token_id"] = *id;
  std::vector<std::size_t> ends;
  const auto add = [&](std::size_t id) {
    if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
  };
  for (const char* name : {"eos", "eot", "eom"}) {
    if (const auto id = special_id(values, tokens, name)) add(*id);
  }
  // gpt-oss and Solar Open write several parts; another token follows the last one.
  const auto has = [&](std::string_view text) {
    return std::find(tokens.texts.begin(), tokens.texts.end(), text) != tokens.texts.end();
  };
  const bool has_parts =
      (has("<|return|>") && has("<|call|>")) || (has("<|flush|>") && has("<|calls|>"));
  for (std::size_t id = 0; id < tokens.size(); ++id) {
    const std::string_view text = tokens.texts[id];
    if (tokens.type(id) != control || (has_parts && text == end_of_part)) continue;
    if (ends_turn(text)) add(id);
  }
  if (!ends.empty()) config["eos_token_id"] = ends;
  return config;
}

}  // namespace kvzap::gguf
