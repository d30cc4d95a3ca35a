#include "gguf/folder_tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <kvzap/core/types.hpp>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "files/base64.hpp"
#include "files/byte_alphabet.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "gguf/made_files.hpp"
#include "gguf/model_file.hpp"
#include "gguf/sentence_piece_file.hpp"
#include "gguf/sentence_piece_parts.hpp"
#include "gguf/tokenizer_parts.hpp"

namespace kvzap::gguf {

namespace fs = std::filesystem;
using files::JsonField;
using nlohmann::json;

namespace {

constexpr std::int64_t most_tokens = 1 << 21;
// Most tokens of a vocabulary with ranks. Published ones have 200,000.
constexpr std::size_t most_ranks = 1u << 19;
// Most pieces that are added tokens. Published vocabularies have 6,500.
constexpr std::size_t most_added_pieces = 1u << 16;
// Most tokens without a text. Published vocabularies have a thousand.
constexpr std::int64_t most_gap = 1 << 16;

/// Names of transformers for special tokens, in the order in which it adds them.
constexpr const char* special_names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                         "pad_token", "cls_token", "mask_token"};

json read_object(const fs::path& file) {
  std::error_code ignored;
  return fs::exists(file, ignored) ? files::read_json_object(file) : json::object();
}

/// An entry of added_tokens. Flags that are not there are false.
json added_token(std::string_view content, bool special) {
  return {{"content", std::string(content)}, {"normalized", false}, {"special", special}};
}

/// Returns the tokens of tiktoken's vocabulary by rank, in the byte alphabet.
std::vector<std::string> read_ranks(const fs::path& file) {
  const std::string text = files::read_text_file(file);
  std::vector<std::string> tokens;
  std::string_view rest = text;
  for (std::size_t line = 1; !rest.empty(); ++line) {
    const std::string_view entry = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    if (entry.empty()) continue;
    const std::size_t space = entry.find(' ');
    const auto bytes = files::from_base64(entry.substr(0, space));
    std::string_view rank = space == entry.npos ? "" : entry.substr(space + 1);
    if (!rank.empty() && rank.back() == '\r') rank.remove_suffix(1);
    if (!bytes || bytes->empty() || rank != std::to_string(tokens.size())) {
      files::throw_unexpected(fmt::format("{}: line {}", file.string(), line),
                              fmt::format("a token in base64 and its rank {}", tokens.size()),
                              files::abbreviated(entry));
    }
    if (tokens.size() == most_ranks) {
      files::throw_unexpected(file.string(), fmt::format("at most {} tokens", most_ranks), "more");
    }
    tokens.push_back(files::byte_alphabet().encode(*bytes));
  }
  return tokens;
}

/// Whether transformers reads tokenizer.model of a family by the file's own settings, whatever
/// tokenizer_class says.
bool reads_by_settings(std::string_view model_type) {
  static const std::set<std::string_view> families = {
      "aria",        "ernie4_5",  "ernie4_5_moe", "granite",   "granitemoe", "granitemoehybrid",
      "hyperclovax", "internlm2", "internlm3",    "jamba",     "llava",      "llava_next",
      "minicpm3",    "ministral", "ministral3",   "mistral",   "mistral3",   "mixtral",
      "nemotron",    "olmo2",     "olmo3",        "persimmon", "phi3",       "phimoe",
      "pixtral",     "stablelm",  "vipllava",     "voxtral"};
  return families.count(model_type) != 0;
}

/// The special tokens of tekken.json files that do not list them (version 3).
constexpr std::string_view older_tekken_tokens[] = {"<unk>",
                                                    "<s>",
                                                    "</s>",
                                                    "[INST]",
                                                    "[/INST]",
                                                    "[AVAILABLE_TOOLS]",
                                                    "[/AVAILABLE_TOOLS]",
                                                    "[TOOL_RESULTS]",
                                                    "[/TOOL_RESULTS]",
                                                    "[TOOL_CALLS]",
                                                    "[IMG]",
                                                    "<pad>",
                                                    "[IMG_BREAK]",
                                                    "[IMG_END]",
                                                    "[PREFIX]",
                                                    "[MIDDLE]",
                                                    "[SUFFIX]",
                                                    "[SYSTEM_PROMPT]",
                                                    "[/SYSTEM_PROMPT]",
                                                    "[TOOL_CONTENT]"};

/// Returns the special tokens of tekken.json by their ranks.
std::map<std::int64_t, std::string> tekken_tokens(const JsonField& list) {
  std::map<std::int64_t, std::string> tokens;
  if (list.is_null()) {
    for (const std::string_view text : older_tekken_tokens) tokens.emplace(tokens.size(), text);
    return tokens;
  }
  const std::size_t count = list.array_size();
  for (std::size_t i = 0; i < count; ++i) {
    const JsonField rank = list.element(i).member("rank");
    const std::string& text = list.element(i).member("token_str").string();
    if (!tokens.emplace(rank.integer(0, static_cast<std::int64_t>(count) - 1), text).second) {
      rank.fail("a rank that no other token has");
    }
  }
  return tokens;
}

/// Makes the tokenizer.json of one folder.
class FolderTokenizer {
 public:
  explicit FolderTokenizer(const fs::path& file)
      : m_file(file),
        m_config_name((file.parent_path() / "tokenizer_config.json").string()),
        m_config(read_object(m_config_name)) {
    const fs::path folder = file.parent_path();
    const auto model = read_model_object(folder, "config.json");
    if (model && model->content.contains("model_type")) {
      m_model_type = JsonField(model->content, model->where).member("model_type").string();
    }
    if (!config("tokenizer_class").is_null()) m_class = config("tokenizer_class").string();
    constexpr std::string_view fast = "Fast";
    if (m_class.size() > fast.size() && m_class.substr(m_class.size() - fast.size()) == fast) {
      m_class.resize(m_class.size() - fast.size());
    }
    if (config("split_special_tokens").boolean(false)) {
      files::throw_unexpected(m_config_name + ": split_special_tokens", "false", "true");
    }
    if (!m_config.contains("added_tokens_decoder")) read_older_files(folder);
    m_made = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  }

  json make() {
    const std::string name = m_file.filename().string();
    if (name == "tekken.json") {
      make_tekken();
    } else if (name == "vocab.json") {
      make_merging();
    } else if (name == "tokenizer.model" && is_sentence_piece()) {
      make_sentence_piece();
    } else {
      make_tiktoken();
    }
    add_declared_tokens();
    add_post_processor();
    m_made["added_tokens"] = json::array();
    for (auto& [id, token] : m_added) {
      token["id"] = id;
      m_made["added_tokens"].push_back(std::move(token));
    }
    return std::move(m_made);
  }

 private:
  JsonField config(const char* field) const {
    return JsonField(m_config, m_config_name).member(field);
  }

  /// Before tokenizer_config.json had all tokens, two files had them.
  void read_older_files(const fs::path& folder) {
    const json map = read_object(folder / "special_tokens_map.json");
    for (const auto& [key, value] : map.items()) m_config[key] = value;
    const fs::path file = folder / "added_tokens.json";
    const json ids = read_object(file);
    const std::set<std::string> special = named_tokens();
    json& decoder = m_config["added_tokens_decoder"] = json::object();
    for (const auto& [content, id] : ids.items()) {
      const bool is_special = special.count(content) != 0;
      json token = added_token(content, is_special);
      token["normalized"] = !is_special;
      decoder[std::to_string(JsonField(id, file.string(), content).integer(0, most_tokens))] =
          std::move(token);
    }
  }

  /// Returns the text of a special token: that of tokenizer_config.json, or the default of its
  /// kind.
  std::optional<std::string> special_text(const char* name) const {
    const auto found = m_config.find(name);
    if (found == m_config.end()) {
      const auto by_default = m_defaults.find(name);
      if (by_default == m_defaults.end()) return std::nullopt;
      return by_default->second;
    }
    const JsonField field = config(name);
    if (field.is_null()) return std::nullopt;
    return found->is_object() ? field.member("content").string() : field.string();
  }

  std::set<std::string> named_tokens() const {
    std::set<std::string> named;
    for (const char* name : special_names) {
      if (const auto text = special_text(name)) named.insert(*text);
    }
    return named;
  }

  bool is_class(std::initializer_list<std::string_view> names) const {
    return std::find(names.begin(), names.end(), m_class) != names.end();
  }

  // ---- Vocabularies -----------------------------------------------------------------------------

  std::optional<std::int64_t> id_in_vocabulary(const std::string& token) const {
    const json& vocab = m_made["model"]["vocab"];
    if (vocab.is_object()) {
      const auto found = vocab.find(token);
      return found == vocab.end() ? std::nullopt : std::optional(found->get<std::int64_t>());
    }
    const auto found = m_places.find(token);
    return found == m_places.end() ? std::nullopt : std::optional(found->second);
  }

  std::function<void(std::size_t)> too_many() const {
    return [this](std::size_t most) {
      files::throw_unexpected(m_file.string(), fmt::format("at most {} merges of tokens", most),
                              "more");
    };
  }

  /// Makes a byte-level model of tokens in the byte alphabet, which merge in the order of ranks.
  /// The rank of a token is its place; `first_id` is the id of the first.
  void make_ranked(const std::vector<std::string>& tokens, std::size_t first_id, json splits) {
    const std::vector<std::string_view> texts(tokens.begin(), tokens.end());
    json vocab = json::object();
    for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
      if (!vocab.emplace(tokens[rank], first_id + rank).second) {
        files::throw_unexpected(m_file.string(), "each token once",
                                files::in_quotes(tokens[rank]) + " again");
      }
    }
    m_made["normalizer"] = nullptr;
    m_made["pre_tokenizer"] = std::move(splits);
    m_made["decoder"] = byte_level_decoder();
    m_made["model"] = bpe_model(std::move(vocab), pairs_of(all_merges(texts, too_many()), texts));
    m_made["model"]["ignore_merges"] = true;
  }

  void make_tekken() {
    const json content = files::read_json_object(m_file);
    const JsonField root(content, m_file.string());
    const JsonField settings = root.member("config");
    const JsonField entries = root.member("vocab");
    const JsonField special_count = settings.member("default_num_special_tokens");
    const JsonField size = settings.member("default_vocab_size");
    const std::map<std::int64_t, std::string> named = tekken_tokens(root.member("special_tokens"));
    const std::int64_t first_id = special_count.is_null() ? static_cast<std::int64_t>(named.size())
                                                          : special_count.integer(0, most_gap);
    std::size_t count = std::min(entries.array_size(), most_ranks);
    if (!size.is_null()) {
      count =
          std::min(count, static_cast<std::size_t>(size.integer(first_id, most_tokens) - first_id));
    }
    std::vector<std::string> tokens;
    for (std::size_t i = 0; i < count; ++i) {
      const JsonField text = entries.element(i).member("token_bytes");
      const auto bytes = files::from_base64(text.string());
      if (!bytes || bytes->empty()) text.fail("bytes in base64");
      tokens.push_back(files::byte_alphabet().encode(*bytes));
    }
    make_ranked(tokens, static_cast<std::size_t>(first_id),
                sequence_of_pre_tokenizers(
                    {split_at(settings.member("pattern").string()), byte_level(false)}));
    for (std::int64_t id = 0; id < first_id; ++id) {
      const auto found = named.find(id);
      add(found == named.end() ? fmt::format("<SPECIAL_{}>", id) : found->second, true, id);
    }
  }

  void make_tiktoken() {
    const std::vector<std::string> tokens = read_ranks(m_file);
    // Only the model's own program has these patterns: no file of the folder does.
    const bool is_kimi = m_class == "TikTokenTokenizer" || m_model_type.substr(0, 4) == "kimi";
    const bool is_qwen =
        is_class({"HYTokenizer", "QWenTokenizer"}) || m_file.extension() == ".tiktoken";
    const auto kind = *pre_tokenizer_kind(is_kimi ? "kimi-k2" : is_qwen ? "qwen2" : "dbrx");
    make_ranked(tokens, 0, kind.pre_tokenizer);
    m_made["normalizer"] = kind.normalizer;
    const json declared = declared_tokens();
    if (declared.empty()) {
      files::throw_unexpected(m_config_name + ": added_tokens_decoder",
                              "the special tokens of " + m_file.filename().string(), "none");
    }
    // Ids without a token get names, so that later tokens keep their ids.
    std::int64_t last = 0;
    for (const auto& entry : declared.items()) last = std::max(last, declared_id(entry.key()));
    const auto first = static_cast<std::int64_t>(tokens.size());
    m_first_special = first;
    if (last - first > most_gap) {
      files::throw_unexpected(m_config_name + ": added_tokens_decoder",
                              fmt::format("ids below {}", first + most_gap), std::to_string(last));
    }
    for (std::int64_t id = first; id <= last; ++id) {
      if (declared.contains(std::to_string(id))) continue;
      add(fmt::format("<|reserved_token_{}|>", id), true, id);
    }
  }

  /// vocab.json and merges.txt.
  void make_merging() {
    static const std::map<std::string_view, std::string_view> class_of_type = {
        {"gpt2", "GPT2Tokenizer"},       {"gpt_neo", "GPT2Tokenizer"},
        {"gptj", "GPT2Tokenizer"},       {"gpt_bigcode", "GPT2Tokenizer"},
        {"opt", "GPT2Tokenizer"},        {"phi", "CodeGenTokenizer"},
        {"starcoder2", "GPT2Tokenizer"}, {"gpt_neox", "GPTNeoXTokenizer"},
        {"qwen2", "Qwen2Tokenizer"},     {"qwen3", "Qwen2Tokenizer"},
        {"qwen2_moe", "Qwen2Tokenizer"}, {"qwen3_moe", "Qwen2Tokenizer"}};
    static const std::map<std::string_view, std::pair<const char*, const char*>> kinds = {
        {"GPT2Tokenizer", {"gpt-2", "<|endoftext|>"}},
        {"CodeGenTokenizer", {"gpt-2", "<|endoftext|>"}},
        {"GPTNeoXTokenizer", {"olmo", "<|endoftext|>"}},
        {"Qwen2Tokenizer", {"qwen2", "<|endoftext|>"}}};
    std::string_view name = m_class;
    const auto of_type = class_of_type.find(m_model_type);
    if (m_class.empty() && of_type != class_of_type.end()) name = of_type->second;
    const auto kind = kinds.find(name);
    if (kind == kinds.end()) {
      std::vector<std::string_view> names;
      names.reserve(kinds.size());
      for (const auto& entry : kinds) names.push_back(entry.first);
      files::throw_unexpected(m_config_name + ": tokenizer_class",
                              files::alternatives(names) + ", or tokenizer.json in the folder",
                              m_class.empty() ? "none" : files::abbreviated(m_class));
    }
    const auto parts = *pre_tokenizer_kind(kind->second.first);
    m_made["normalizer"] = parts.normalizer;
    m_made["pre_tokenizer"] = parts.pre_tokenizer;
    json& bytes = name == "Qwen2Tokenizer" ? m_made["pre_tokenizer"]["pretokenizers"].back()
                                           : m_made["pre_tokenizer"];
    bytes["add_prefix_space"] = config("add_prefix_space").boolean(false);
    m_made["decoder"] = byte_level_decoder();
    json vocabulary = files::read_json_object(m_file);
    const JsonField vocab(vocabulary, m_file.string());
    for (const auto& entry : vocabulary.items()) vocab.member(entry.key()).integer(0, most_tokens);
    json merges = merges_of_file(vocabulary);
    m_made["model"] = bpe_model(std::move(vocabulary), std::move(merges));
    for (const char* token : {"bos_token", "eos_token", "unk_token"}) {
      m_defaults[token] = kind->second.second;
    }
    if (name == "Qwen2Tokenizer") {
      m_defaults.erase("bos_token");
      m_defaults["pad_token"] = kind->second.second;
    }
    if (name == "GPTNeoXTokenizer") m_defaults["pad_token"] = "<|padding|>";
  }

  json merges_of_file(const json& vocabulary) const {
    const fs::path file = m_file.parent_path() / "merges.txt";
    const std::string text = files::read_text_file(file);
    if (!files::is_utf8(text)) files::throw_unexpected(file.string(), "UTF-8", "other bytes");
    json list = json::array();
    std::string_view rest = text;
    for (std::size_t place = 1; !rest.empty(); ++place) {
      std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(rest.size(), line.size() + 1));
      if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
      if (line.empty() || line.substr(0, 8) == "#version") continue;
      const std::size_t space = line.find(' ');
      const std::string left(line.substr(0, space));
      const std::string right(space == line.npos ? "" : line.substr(space + 1));
      const auto has = [&](const std::string& token) { return vocabulary.contains(token); };
      if (!has(left) || !has(right) || !has(left + right)) {
        files::throw_unexpected(fmt::format("{}: line {}", file.string(), place),
                                "two tokens of vocab.json that make another one",
                                files::abbreviated(line));
      }
      list.push_back(std::string(line));
    }
    return list;
  }

  // ---- SentencePiece ----------------------------------------------------------------------------

  /// tiktoken's vocabulary has the same name in some folders; it begins with base64, the other one
  /// with the mark of a field.
  bool is_sentence_piece() {
    m_bytes = files::read_text_file(m_file);
    const auto is_base64 = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '+' || c == '/';
    };
    return m_bytes.empty() || !is_base64(m_bytes[0]);
  }

  void make_sentence_piece() {
    const auto file = SentencePieceFile::parse(m_bytes, m_file.string());
    const bool is_bpe = file.kind == SentencePieceFile::bpe;
    if (!is_bpe && file.kind != SentencePieceFile::unigram) {
      files::throw_unexpected(m_file.string() + ": model_type", "unigram (1) or BPE (2)",
                              std::to_string(file.kind));
    }
    const bool has_class = !reads_by_settings(m_model_type);
    const bool is_gemma = m_class.empty() && m_model_type.substr(0, 5) == "gemma";
    if (has_class && is_class({"CodeLlamaTokenizer"})) {
      files::throw_unexpected(m_config_name + ": tokenizer_class",
                              "tokenizer.json in the folder, or LlamaTokenizer",
                              files::in_quotes(m_class));
    }
    if (has_class && is_class({"LlamaTokenizer"})) {
      make_llama(file);
    } else if (has_class && (is_gemma || is_class({"GemmaTokenizer"}))) {
      make_gemma(file);
    } else {
      make_by_settings(file, is_bpe);
    }
    // A list of special tokens takes the place of those in the file.
    if (m_config.contains("additional_special_tokens") ||
        config("extra_special_tokens").value().is_array()) {
      return;
    }
    for (std::size_t id = 0; id < file.pieces.size(); ++id) {
      const auto& piece = file.pieces[id];
      if (piece.type != control && (piece.type != user_defined || m_isolates_pieces)) continue;
      if (m_pieces.size() == most_added_pieces) {
        files::throw_unexpected(
            m_file.string(), fmt::format("at most {} special tokens", most_added_pieces), "more");
      }
      const auto renamed = m_renamed.find(id);
      m_pieces.emplace(renamed == m_renamed.end() ? std::string(piece.text) : renamed->second,
                       piece.type == control);
    }
  }

  void make_llama(const SentencePieceFile& file) {
    const bool adds_space = config("add_prefix_space").boolean(true);
    const bool is_legacy = config("legacy").boolean(false);
    m_made["model"] = model_of_ids(file, too_many());
    m_made["normalizer"] = nullptr;
    m_made["pre_tokenizer"] = metaspace(!adds_space ? "never" : is_legacy ? "always" : "first");
    m_made["decoder"] = marked_spaces_decoder(adds_space);
    m_defaults = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"unk_token", "<unk>"}};
  }

  void make_gemma(const SentencePieceFile& file) {
    m_defaults = {{"bos_token", "<bos>"},
                  {"eos_token", "<eos>"},
                  {"unk_token", "<unk>"},
                  {"pad_token", "<pad>"},
                  {"mask_token", "<mask>"}};
    m_made["model"] = model_of_ids(file, too_many());
    if (const auto unknown_text = special_text("unk_token")) {
      m_made["model"]["unk_token"] = *unknown_text;
    }
    m_made["normalizer"] = replace_text(" ", space_mark);
    m_made["pre_tokenizer"] = nullptr;
    m_made["decoder"] = marked_spaces_decoder(false);
  }

  /// Follows the settings of the file, as SentencePiece itself does.
  void make_by_settings(const SentencePieceFile& file, bool is_bpe) {
    m_isolates_pieces = true;
    if (is_bpe) rename_pieces(file);
    std::vector<std::string> texts;
    for (std::size_t id = 0; id < file.pieces.size(); ++id) {
      const auto found = m_renamed.find(id);
      texts.push_back(found == m_renamed.end() ? std::string(file.pieces[id].text) : found->second);
      m_places[texts.back()] = static_cast<std::int64_t>(id);
    }
    add_by_settings(file, texts, config("legacy").boolean(true), too_many(), m_made);
    if (file.bos_id >= 0) m_defaults["bos_token"] = file.bos.empty() ? "<s>" : file.bos;
    if (file.eos_id >= 0) m_defaults["eos_token"] = file.eos.empty() ? "</s>" : file.eos;
    if (file.unknown_id >= 0) {
      m_defaults["unk_token"] = file.unknown.empty() ? "<unk>" : file.unknown;
    }
    m_plain_tokens = file.adds_space;
  }

  /// tokenizer_config.json may have other names for pieces, such as placeholders.
  void rename_pieces(const SentencePieceFile& file) {
    std::map<std::size_t, std::string> names;
    const json declared = declared_tokens();
    for (const auto& [key, token] : declared.items()) {
      const auto id = static_cast<std::size_t>(declared_id(key));
      if (id < file.pieces.size()) names[id] = declared_content(key, token);
    }
    std::set<std::string_view> kept;
    for (std::size_t id = 0; id < file.pieces.size(); ++id) {
      if (names.count(id) == 0) kept.insert(file.pieces[id].text);
    }
    for (const auto& [id, name] : names) {
      if (kept.count(name) == 0 && name != file.pieces[id].text) m_renamed[id] = name;
    }
  }

  // ---- Added tokens -----------------------------------------------------------------------------

  json declared_tokens() const {
    const JsonField field = config("added_tokens_decoder");
    return field.is_null() ? json::object() : field.object().value();
  }

  std::int64_t declared_id(const std::string& key) const {
    std::int64_t id = 0;
    const bool is_number =
        !key.empty() && key.size() <= 7 && std::all_of(key.begin(), key.end(), [&](char c) {
          id = id * 10 + (c - '0');
          return c >= '0' && c <= '9';
        });
    if (!is_number || id > most_tokens) {
      files::throw_unexpected(m_config_name + ": added_tokens_decoder", "ids as keys",
                              files::in_quotes(key));
    }
    return id;
  }

  std::string declared_content(const std::string& key, const json& token) const {
    return JsonField(token, m_config_name, "added_tokens_decoder." + key)
        .member("content")
        .string();
  }

  /// Returns an id after those of the vocabulary and of added tokens.
  std::int64_t next_id() const {
    const json& vocab = m_made["model"]["vocab"];
    auto id = static_cast<std::int64_t>(vocab.size());
    if (!m_added.empty()) id = std::max(id, m_added.rbegin()->first + 1);
    if (!vocab.is_object()) return id;
    // As many ids as tokens are not enough if there are gaps between them.
    std::int64_t last = -1;
    bool is_taken = false;
    for (const auto& entry : vocab.items()) {
      const auto other = entry.value().get<std::int64_t>();
      last = std::max(last, other);
      is_taken = is_taken || other == id;
    }
    return is_taken ? last + 1 : id;
  }

  /// Adds a token, or gives one that is there other flags. Without an id, it is that of the
  /// vocabulary, or the next one.
  void add(json token, std::optional<std::int64_t> id) {
    const auto content = token["content"].get<std::string>();
    if (content.empty()) return;
    if (m_plain_tokens) token["normalized"] = false;
    const auto known = m_added_ids.find(content);
    if (known != m_added_ids.end()) {
      json& entry = m_added[known->second];
      if (entry["special"] == true) token["special"] = true;
      entry = std::move(token);
      return;
    }
    if (const auto in_vocabulary = id_in_vocabulary(content)) id = in_vocabulary;
    if (!id) id = next_id();
    // Of two texts with one id, the first has it.
    if (m_added.emplace(*id, std::move(token)).second) m_added_ids.emplace(content, *id);
  }
  /// Adds a token without flags; one that is there keeps its own.
  void add(const std::string& content, bool special, std::optional<std::int64_t> id) {
    const auto known = m_added_ids.find(content);
    if (known == m_added_ids.end()) {
      add(added_token(content, special), id);
    } else if (special) {
      m_added[known->second]["special"] = true;
    }
  }

  /// Adds a special token that a field gives as a text, or as an object with flags. Those of
  /// added_tokens_decoder come before the object's.
  void add_special(const JsonField& field) {
    const bool is_object = field.value().is_object();
    const std::string& content = is_object ? field.member("content").string() : field.string();
    if (is_object && m_declared.count(content) == 0) {
      add(flagged_token(field, true), std::nullopt);
    } else {
      add(content, true, std::nullopt);
    }
  }

  static json flagged_token(const JsonField& field, bool special) {
    json token = added_token(field.member("content").string(), special);
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (field.member(flag).boolean(false)) token[flag] = true;
    }
    token["normalized"] = field.member("normalized").boolean(!special);
    return token;
  }

  /// Adds the tokens of tokenizer_config.json.
  void add_declared_tokens() {
    const json declared = declared_tokens();
    std::map<std::int64_t, std::string> keys;
    for (const auto& entry : declared.items()) keys[declared_id(entry.key())] = entry.key();
    const std::set<std::string> named = named_tokens();
    for (const auto& [id, key] : keys) {
      const JsonField field(declared[key], m_config_name, "added_tokens_decoder." + key);
      const std::string& content = field.member("content").string();
      const bool special = field.member("special").boolean(false) || named.count(content) != 0 ||
                           id >= m_first_special;
      m_declared.insert(content);
      add(flagged_token(field, special), id);
    }
    const bool is_ranked = m_first_special < most_tokens;  // then the list comes first
    if (is_ranked) add_listed_tokens();
    for (const char* name : special_names) {
      if (m_config.contains(name) && !config(name).is_null()) {
        add_special(config(name));
      } else if (const auto text = special_text(name)) {
        add(*text, true, std::nullopt);
      }
    }
    if (!is_ranked) add_listed_tokens();
    for (const auto& [text, special] : m_pieces) {
      if (m_added_ids.count(text) == 0) add(text, special || named.count(text) != 0, std::nullopt);
    }
  }

  void add_listed_tokens() {
    for (const char* name : {"additional_special_tokens", "extra_special_tokens"}) {
      const JsonField list = config(name);
      if (!list.value().is_array()) continue;
      for (std::size_t i = 0; i < list.array_size(); ++i) add_special(list.element(i));
    }
  }

  void add_post_processor() {
    const auto wanted = [&](const char* flag, const char* name) {
      std::vector<TemplateToken> tokens;
      const auto text = special_text(name);
      if (!config(flag).boolean(false) || !text) return tokens;
      const auto found = std::find_if(m_added.begin(), m_added.end(), [&](const auto& entry) {
        return entry.second["content"] == *text;
      });
      if (found != m_added.end()) {
        tokens.push_back({*text, static_cast<std::size_t>(found->first)});
      }
      return tokens;
    };
    m_made["post_processor"] = template_processing(wanted("add_bos_token", "bos_token"),
                                                   wanted("add_eos_token", "eos_token"));
  }

  fs::path m_file;
  std::string m_config_name;
  json m_config;
  std::string m_class, m_model_type;
  std::string m_bytes;  // of tokenizer.model
  json m_made;
  std::map<std::string, std::string> m_defaults;  // of special tokens
  std::map<std::string, std::int64_t> m_places;   // of tokens in a list
  std::map<std::size_t, std::string> m_renamed;   // pieces
  std::map<std::int64_t, json> m_added;
  std::map<std::string, std::int64_t> m_added_ids;
  std::map<std::string, bool> m_pieces;        // control (true) and user_defined ones
  std::set<std::string> m_declared;            // texts of added_tokens_decoder
  std::int64_t m_first_special = most_tokens;  // declared tokens from this id on are special
  bool m_isolates_pieces = false;              // pieces that users defined are splits, not tokens
  bool m_plain_tokens = false;  // added tokens are sought in the text before it is normalized
};

}  // namespace

std::optional<fs::path> vocabulary_file(const fs::path& folder) {
  std::error_code ignored;
  const auto has = [&](const char* name) { return fs::is_regular_file(folder / name, ignored); };
  for (const char* name : {"tekken.json", "tokenizer.model", "tiktoken.model"}) {
    if (has(name)) return folder / name;
  }
  for (const char* name : {"qwen.tiktoken", "hy.tiktoken"}) {
    if (has(name)) return folder / name;
  }
  if (has("vocab.json") && has("merges.txt")) return folder / "vocab.json";
  return std::nullopt;
}

json make_folder_tokenizer(const fs::path& file) { return FolderTokenizer(file).make(); }

}  // namespace kvzap::gguf
