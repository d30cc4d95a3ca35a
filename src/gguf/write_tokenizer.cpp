#include "gguf/write_tokenizer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <kvzap/core/types.hpp>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/ascii.hpp"
#include "files/byte_alphabet.hpp"
#include "files/json_field.hpp"
#include "files/quote.hpp"
#include "gguf/chat_templates.hpp"
#include "gguf/made_files.hpp"
#include "gguf/model_file.hpp"
#include "gguf/token_types.hpp"
#include "gguf/tokenizer_parts.hpp"

namespace kvzap::gguf {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

/// Returns a member, or null.
json member_of(const json& object, const char* name) {
  return object.is_object() ? object.value(name, json()) : json();
}

std::string type_of(const json& part) {
  const json type = member_of(part, "type");
  return type.is_string() ? type.get<std::string>() : "";
}

/// Returns a part of tokenizer.json without fields that do not change ids.
json essence(json part) {
  if (type_of(part) == "ByteLevel") {
    part.erase("trim_offsets");
    if (!part.contains("use_regex")) part["use_regex"] = true;
  }
  return part;
}

/// Returns the essence of a part, or of the parts of a Sequence, as a list. `members`: the name of
/// its field.
json parts_of(const json& part, const char* members) {
  json parts = json::array();
  if (type_of(part) != "Sequence") {
    if (!part.is_null()) parts.push_back(essence(part));
    return parts;
  }
  const json list = member_of(part, members);
  if (!list.is_array()) return json::array({part});
  for (const json& member : list) {
    for (json& each : parts_of(member, members)) parts.push_back(std::move(each));
  }
  return parts;
}

/// The parts of a tokenizer.json that have a name in the format.
struct Parts {
  explicit Parts(const json& tokenizer)
      : normalizers(parts_of(member_of(tokenizer, "normalizer"), "normalizers")),
        pre_tokenizers(parts_of(member_of(tokenizer, "pre_tokenizer"), "pretokenizers")),
        decoders(parts_of(member_of(tokenizer, "decoder"), "decoders")) {}

  json normalizers, pre_tokenizers, decoders;
};

/// Returns the name of a byte-level pre-tokenizer in the format.
std::optional<std::string_view> name_of_pre_tokenizer(const Parts& parts, bool ignores_merges) {
  for (const std::string_view name : pre_tokenizer_names()) {
    const auto kind = pre_tokenizer_kind(name);
    if (kind && kind->byte_level && kind->ignore_merges == ignores_merges &&
        parts_of(kind->normalizer, "normalizers") == parts.normalizers &&
        parts_of(kind->pre_tokenizer, "pretokenizers") == parts.pre_tokenizers) {
      return name;
    }
  }
  return std::nullopt;
}

/// Whether normalization to NFC keeps a text as it is, whatever text is around it, and makes it of
/// no other text. Of ASCII, letters and <=> may compose with what follows, and K ; ` may come of
/// other characters.
bool is_inert_in_nfc(const std::string& text) {
  return text.find_first_of("K;`") == text.npos && !files::is_letter(text.back()) &&
         std::string_view("<=>").find(text.back()) == std::string_view::npos &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= 0 && c < 0x7F; });
}

/// Whether one of `second` could begin within one of `first`.
bool begins_within(const std::set<std::string>& first, const std::set<std::string>& second) {
  constexpr std::size_t most_bytes = 256;  // the work grows with the square
  for (const std::string& text : first) {
    if (text.size() > most_bytes) return true;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const std::string rest = text.substr(i);
      const auto longer = second.lower_bound(rest);
      if (longer != second.end() && longer->compare(0, rest.size(), rest) == 0) return true;
      for (std::size_t n = 1; n < rest.size(); ++n) {
        if (second.count(rest.substr(0, n)) != 0) return true;
      }
    }
  }
  return false;
}

using Ids = std::vector<std::uint32_t>;

/// Ids of tokens before and after a text.
struct TemplateIds {
  Ids before, after;
};

/// Writes the parts of one folder.
class TokenizerWriter {
 public:
  TokenizerWriter(ModelFile tokenizer, std::int64_t vocab_size, GgufWriter& writer)
      : m_file(std::move(tokenizer)),
        m_parts(m_file.content),
        m_vocab_size(vocab_size),
        m_writer(writer) {}

  void add() {
    read_tokens();
    const json& model = m_file.content["model"];
    for (const char* field : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      const json value = member_of(model, field);
      if (!value.is_null() && value != "" && value != 0) {
        fail(fmt::format("model.{}", field), "none, as GGUF lacks it", value.dump());
      }
    }
    if (member_of(model, "byte_fallback") == true) {
      add_marked_spaces(model);
    } else {
      add_byte_level(model);
    }
    m_writer.add_strings("tokenizer.ggml.tokens", m_tokens);
    m_writer.add_i32s("tokenizer.ggml.token_type", m_types);
    m_writer.add_strings("tokenizer.ggml.merges", merges());
  }

  /// Returns the ids of special tokens around a text.
  TemplateIds template_ids() const {
    TemplateIds ids;
    bool has_ids = false;
    for (const json& part : parts_of(member_of(m_file.content, "post_processor"), "processors")) {
      const std::string type = type_of(part);
      if (type == "ByteLevel") continue;  // changes offsets alone
      const files::JsonField field(part, m_file.where, "post_processor");
      if (has_ids) field.member("type").fail("one part that adds tokens");
      has_ids = true;
      if (type == "TemplateProcessing") {
        read_template(field, ids);
      } else if (type == "BertProcessing" || type == "RobertaProcessing") {
        for (const auto& [name, list] : {std::pair("cls", &ids.before), {"sep", &ids.after}}) {
          const auto id = field.member(name).element(1).token_id();
          list->push_back(static_cast<std::uint32_t>(id));
        }
      } else {
        field.member("type").fail("TemplateProcessing, BertProcessing or RobertaProcessing");
      }
    }
    return ids;
  }

  /// Adds whether a token is put beside a text. `ids`: those that the folder puts there.
  void add_flag(std::string_view name, const Ids& ids, std::optional<std::uint32_t> token) {
    const bool has_form = ids.empty() || (token && ids == Ids{*token});
    if (!has_form) {
      warn("post_processor", fmt::format("GGUF has the {0}_token alone on its side of a text, not "
                                         "the ids {1}: the file adds none",
                                         name, fmt::join(ids, ", ")));
    }
    m_writer.add_flag(fmt::format("tokenizer.ggml.add_{}_token", name), has_form && !ids.empty());
  }

  /// Returns the id of the token for unknown characters, if the model has one.
  std::optional<std::uint32_t> unknown_id() const {
    return id_of(member_of(m_file.content["model"], "unk_token"));
  }

  std::optional<std::uint32_t> id_of(const json& token) const {
    const json content = token.is_object() ? token.value("content", json()) : token;
    if (!content.is_string()) return std::nullopt;
    const auto found = m_ids.find(content.get<std::string>());
    return found == m_ids.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  void warn(const std::string& field, const std::string& what) {
    m_writer.add_warning(fmt::format("{}: {}: {}", m_file.where, field, what));
  }

  [[noreturn]] void fail(const std::string& field, const std::string& expected,
                         const std::string& found) const {
    files::throw_unexpected(m_file.where + ": " + field, expected, found);
  }

  /// The form of SentencePiece: characters, with marks in place of spaces.
  void add_marked_spaces(const json& model) {
    const json replace = replace_text(" ", space_mark);
    const json marks_begin = json::array({{{"type", "Prepend"}, {"prepend", space_mark}}, replace});
    const json& splits = m_parts.pre_tokenizers;
    json mark = {{"type", "Metaspace"},
                 {"replacement", space_mark},
                 {"prepend_scheme", "first"},
                 {"split", false}};
    const bool marks_first = m_parts.normalizers.empty() && splits == json::array({mark});
    if (marks_first) {
      warn("pre_tokenizer",
           "GGUF puts a space before each text that follows a special token, not "
           "before the first alone");
    }
    const bool adds_space = marks_first || m_parts.normalizers == marks_begin;
    bool has_form = splits.empty() || marks_first;
    if (!adds_space) {
      // After the normalizer there are no spaces to split at.
      const json split = {{"type", "Split"},
                          {"pattern", {{"String", " "}}},
                          {"behavior", "MergedWithPrevious"},
                          {"invert", false}};
      mark["prepend_scheme"] = "never";
      if (m_parts.normalizers == json::array({replace})) {
        has_form = has_form || splits == json::array({split});
      } else if (m_parts.normalizers.empty()) {
        has_form = splits == json::array({mark});
      } else {
        fail("normalizer",
             fmt::format("Replace of spaces by {}, or Prepend and this Replace", space_mark),
             files::abbreviated(m_file.content["normalizer"].dump()));
      }
    }
    if (!has_form) {
      fail("pre_tokenizer", "none, Split at spaces or Metaspace that never prepends, as in GGUF",
           files::abbreviated(member_of(m_file.content, "pre_tokenizer").dump()));
    }
    if (m_parts.decoders != parts_of(marked_spaces_decoder(adds_space), "decoders")) {
      fail("decoder", fmt::format("Replace, ByteFallback, Fuse{}", adds_space ? " and Strip" : ""),
           files::abbreviated(member_of(m_file.content, "decoder").dump()));
    }
    if (model.value("ignore_merges", json()) == true) {
      fail("model.ignore_merges", "false with byte_fallback, as in GGUF", "true");
    }
    check_unknown(model);
    check_marks(adds_space);
    m_writer.add_string("tokenizer.ggml.model", adds_space ? "llama" : "gemma4");
    m_writer.add_flag("tokenizer.ggml.add_space_prefix", adds_space);
    mark_bytes();
    add_scores();
  }

  void add_byte_level(const json& model) {
    const auto pre = name_of_pre_tokenizer(m_parts, model.value("ignore_merges", json()) == true);
    if (!pre) fail("pre_tokenizer", "one that GGUF has a name for", "another");
    const json& decoders = m_parts.decoders;
    if (decoders.size() != 1 || type_of(decoders[0]) != "ByteLevel") {
      fail("decoder", "ByteLevel", files::abbreviated(decoders.dump()));
    }
    bool has_all = true;
    for (int value = 0; value < 256; ++value) {
      const std::string byte(1, static_cast<char>(value));
      has_all = has_all && m_ids.count(files::byte_alphabet().encode(byte)) != 0;
    }
    const json unknown_token = member_of(model, "unk_token");
    if (!unknown_token.is_null() && !has_all) {
      fail("model.unk_token", "none, as the vocabulary lacks tokens of bytes",
           files::abbreviated(unknown_token.dump()));
    }
    m_writer.add_string("tokenizer.ggml.model", "gpt2");
    m_writer.add_string("tokenizer.ggml.pre", *pre);
  }

  /// Bytes without a token become the unknown one, one for a whole run.
  void check_unknown(const json& model) const {
    for (int value = 0; value < 256; ++value) {
      if (m_ids.count(byte_token(value)) != 0) continue;
      if (!unknown_id()) {
        fail("model.unk_token", "a token, as the vocabulary lacks " + byte_token(value),
             files::abbreviated(member_of(model, "unk_token").dump()));
      }
      if (member_of(model, "fuse_unk") != true) fail("model.fuse_unk", "true", "false");
      return;
    }
  }

  /// In tokens of users, `llama` has marks for spaces.
  void check_marks(bool adds_space) const {
    for (std::size_t id = 0; adds_space && id < m_tokens.size(); ++id) {
      if (m_types[id] == user_defined && m_tokens[id].find(space_mark) != std::string::npos) {
        fail("added_tokens",
             fmt::format("special ones, or ones without {}, as in GGUF", space_mark),
             files::in_quotes(m_tokens[id]));
      }
    }
  }

  void set_token(const std::string& text, const json& id, std::int32_t type) {
    if (!id.is_number_integer() || id.get<std::int64_t>() < 0 ||
        id.get<std::int64_t>() >= m_vocab_size) {
      fail(files::abbreviated(text), fmt::format("an id below {}", m_vocab_size), id.dump());
    }
    const auto place = id.get<std::uint32_t>();
    if (m_types[place] != unused && m_tokens[place] != text) {
      fail(files::abbreviated(text), "an id that no other token has", id.dump());
    }
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
    std::set<std::string> raw, normalized;
    for (std::size_t i = 0; i < added.size(); ++i) {
      const json& token = added[i];
      const std::string where = fmt::format("added_tokens[{}]", i);
      const json content = member_of(token, "content");
      if (!content.is_string() || content == "") {
        fail(where + ".content", "a text", content.dump());
      }
      const bool is_special = member_of(token, "special") == true;
      const bool is_unknown = is_special && content == member_of(model, "unk_token");
      const auto text = content.get<std::string>();
      set_token(text, member_of(token, "id"),
                is_unknown   ? unknown
                : is_special ? control
                             : user_defined);
      for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
        if (member_of(token, flag) == true) {
          m_flagged.insert(flag);
        }
      }
      const bool is_normalized = token.value("normalized", json(!is_special)) == true;
      if (is_normalized && !is_kept(text)) fail_normalized(where);
      (is_normalized ? normalized : raw).insert(text);
    }
    if (begins_within(raw, normalized) || begins_within(normalized, raw)) {
      fail_normalized("added_tokens");
    }
    if (!m_flagged.empty()) {
      warn("added_tokens",
           fmt::format("GGUF lacks {}, which some tokens have: white space or words "
                       "around these may become other ids",
                       fmt::join(m_flagged, " and ")));
    }
  }

  [[noreturn]] void fail_normalized(const std::string& where) const {
    fail(where + ".normalized", "false, as GGUF lacks the setting", "true");
  }

  /// Whether a token is in the normalized text if and only if it is in the text itself.
  bool is_kept(const std::string& text) const {
    if (m_parts.normalizers.empty()) return true;
    if (m_parts.normalizers.size() > 1) return false;
    if (type_of(m_parts.normalizers[0]) == "NFC") return is_inert_in_nfc(text);
    return m_parts.normalizers[0] == replace_text(" ", space_mark) && text.find(' ') == text.npos &&
           text.find(space_mark) == text.npos;
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
      if (std::count(texts.back().begin(), texts.back().end(), ' ') != 1) {
        fail("model.merges", "tokens without spaces", merge.dump());
      }
    }
    return texts;
  }

  static std::string byte_token(int value) { return fmt::format("<0x{:02X}>", value); }

  void mark_bytes() {
    for (int value = 0; value < 256; ++value) {
      const auto found = m_ids.find(byte_token(value));
      if (found != m_ids.end() && m_types[found->second] == normal) m_types[found->second] = byte;
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

  static void read_template(const files::JsonField& part, TemplateIds& ids) {
    const files::JsonField single = part.member("single");
    bool text_seen = false;
    for (std::size_t i = 0; i < single.array_size(); ++i) {
      const files::JsonField piece = single.element(i);
      if (!piece.member("Sequence").is_null()) {
        text_seen = true;
        continue;
      }
      const std::string& name = piece.member("SpecialToken").member("id").string();
      const auto list = part.member("special_tokens").member(name).member("ids");
      for (std::size_t k = 0; k < list.array_size(); ++k) {
        const auto id = static_cast<std::uint32_t>(list.element(k).token_id());
        (text_seen ? ids.after : ids.before).push_back(id);
      }
    }
  }

  ModelFile m_file;
  Parts m_parts;
  std::int64_t m_vocab_size;
  GgufWriter& m_writer;
  std::vector<std::string> m_tokens;
  std::vector<std::int32_t> m_types;
  std::map<std::string, std::uint32_t> m_ids;
  std::set<std::string> m_flagged;  // flags of added tokens
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
  constexpr std::string_view unknown_name = "unk";
  constexpr std::pair<std::string_view, std::string_view> names[] = {
      {"bos", "bos"}, {"eos", "eos"}, {unknown_name, "unknown"}, {"pad", "padding"}};
  const TemplateIds around = tokens.template_ids();
  const std::map<std::string_view, Ids> sides = {{"bos", around.before}, {"eos", around.after}};
  for (const auto& [name, own_name] : names) {
    auto id = name == unknown_name ? tokens.unknown_id() : std::nullopt;
    if (!id) id = tokens.id_of(member_of(settings, fmt::format("{}_token", name).c_str()));
    const auto side = sides.find(name);
    if (!id && side != sides.end() && side->second.size() == 1) id = side->second[0];
    for (const auto* file : {&generation, &model}) {
      if (id || !*file) continue;
      json field = member_of((*file)->content, fmt::format("{}_token_id", name).c_str());
      if (field.is_array() && !field.empty()) field = json(field.front());
      if (field.is_number_unsigned() && field < vocab_size) id = field.get<std::uint32_t>();
    }
    if (side != sides.end()) tokens.add_flag(name, side->second, id);
    if (id) writer.add_u32(fmt::format("tokenizer.ggml.{}_token_id", own_name), *id);
  }
  constexpr std::uintmax_t most_template_bytes = 1u << 20;
  for (const auto& [name, source] : read_chat_templates(folder, most_template_bytes)) {
    const char* const end = name == "tool_use" ? ".tool_use" : "";
    writer.add_string(fmt::format("tokenizer.chat_template{}", end), source.text);
  }
}

}  // namespace kvzap::gguf
