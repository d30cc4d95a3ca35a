#include "text/tokenizer_data.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/byte_alphabet.hpp"
#include "text/pattern.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

// Limit on nested Sequences, so that a hostile file cannot exhaust the stack.
constexpr int max_nesting = 32;

// Published tokenizers have three; each is a compiled pattern.
constexpr std::size_t max_splitters = 64;

using base::abbreviated;
using base::JsonField;
using base::throw_unexpected;
using text::AddedToken;
using text::byte_alphabet;
using text::normalize_nfc;
using text::pair_key;
using text::Pattern;
using text::split_behavior;
using text::SplitBehavior;
using text::translated_pattern;

}  // namespace

Tokenizer::Data::Data(nlohmann::json content, const std::string& file) {
  // Returns a value moved out of an object's member; null if there is none.
  const auto taken = [](nlohmann::json& object, const char* key) {
    const auto found = object.is_object() ? object.find(key) : object.end();
    return found == object.end() ? nlohmann::json() : std::exchange(*found, nullptr);
  };
  nlohmann::json none;
  const auto model = content.find("model");
  nlohmann::json& model_content = model == content.end() ? none : *model;
  nlohmann::json vocab = taken(model_content, "vocab");
  nlohmann::json merge_list = taken(model_content, "merges");
  const JsonField root(content, file, "");
  read_model(root.member("model"), std::move(vocab), std::move(merge_list));
  read_normalizer(root.member("normalizer"), 0);
  read_added_tokens(root.member("added_tokens"));
  read_pre_tokenizers(root.member("pre_tokenizer"));
  read_post_processor(root.member("post_processor"), 0);
  read_decoder(root.member("decoder"));
}

void Tokenizer::Data::read_model(const JsonField& model, nlohmann::json vocab,
                                 nlohmann::json merge_list) {
  const JsonField type = model.member("type");
  // Files of old releases omit the type of a BPE model.
  if (!type.is_null() && type.string() != "BPE") type.fail("\"BPE\"");
  if (model.member("byte_fallback").boolean(false)) {
    model.member("byte_fallback").fail("false (a byte-level, not a SentencePiece, vocabulary)");
  }
  const JsonField dropout = model.member("dropout");
  if (!dropout.is_null() && !(dropout.value().is_number() && dropout.value().get<double>() == 0)) {
    dropout.fail("null or 0");
  }
  model.member("continuing_subword_prefix").require_null_or_empty_string();
  model.member("end_of_word_suffix").require_null_or_empty_string();
  ignore_merges = model.member("ignore_merges").boolean(false);
  read_vocabulary(std::move(vocab), model);
  read_merges(std::move(merge_list), model);
}

void Tokenizer::Data::read_vocabulary(nlohmann::json vocab, const JsonField& model) {
  const JsonField field = model.named(vocab, "vocab");
  if (!vocab.is_object()) field.fail("an object");
  auto& members = vocab.get_ref<nlohmann::json::object_t&>();
  vocabulary.reserve(members.size());
  bytes.reserve(members.size());
  while (!members.empty()) {
    auto member = members.extract(members.begin());
    const std::string& token = member.key();
    const JsonField value = field.named(member.mapped(), token);
    const TokenId id = value.token_id();
    if (!bytes.emplace(id, byte_alphabet().decode(token)).second) {
      value.fail("an id that no other token has");
    }
    vocabulary.emplace(std::move(member.key()), id);
  }
  size = vocabulary.size();
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = vocabulary.find(byte_alphabet().of_byte[byte]);
    if (found == vocabulary.end()) {
      throw_unexpected(field.where(),
                       fmt::format("a token for each byte (\"{}\" for {:#04x})",
                                   byte_alphabet().of_byte[byte], byte),
                       "none");
    }
    byte_ids[byte] = found->second;
  }
}

void Tokenizer::Data::read_merges(nlohmann::json list, const JsonField& model) {
  const JsonField field = model.named(list, "merges");
  const std::size_t count = field.array_size();
  if (count == 0) field.fail("merges");
  merges.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const JsonField entry = field.element(i);
    std::string left, right;
    if (entry.value().is_string()) {
      const std::string& text = entry.string();
      const std::size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        entry.fail("two tokens with a space between them");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else {
      if (entry.array_size() != 2) entry.fail("two tokens");
      left = entry.element(0).string();
      right = entry.element(1).string();
    }
    const auto id_of = [&](const std::string& token) {
      const auto found = vocabulary.find(token);
      if (found == vocabulary.end()) {
        throw_unexpected(entry.where(), "tokens of model.vocab", abbreviated(token));
      }
      return found->second;
    };
    // If a pair appears twice, its later rank counts.
    merges[pair_key(id_of(left), id_of(right))] = {static_cast<std::uint32_t>(i),
                                                   id_of(left + right)};
    list[i] = nullptr;
  }
}

void Tokenizer::Data::read_normalizer(const JsonField& field, int depth) {
  if (field.is_null()) return;
  const JsonField type = field.member("type");
  if (type.string() == "NFC") {
    nfc = true;
  } else if (type.string() == "Sequence" && depth < max_nesting) {
    const JsonField normalizers = field.member("normalizers");
    for (std::size_t i = 0; i < normalizers.array_size(); ++i) {
      read_normalizer(normalizers.element(i), depth + 1);
    }
  } else {
    type.fail("NFC or a Sequence of NFC");
  }
}

void Tokenizer::Data::read_added_tokens(const JsonField& field) {
  if (field.is_null()) return;
  for (std::size_t i = 0; i < field.array_size(); ++i) {
    const JsonField entry = field.element(i);
    const std::string& content = entry.member("content").string();
    const JsonField id_field = entry.member("id");
    const AddedToken token{id_field.token_id(), entry.member("single_word").boolean(false),
                           entry.member("lstrip").boolean(false),
                           entry.member("rstrip").boolean(false)};
    const bool is_special = entry.member("special").boolean(false);
    const bool normalized = entry.member("normalized").boolean(!is_special);
    if (content.empty()) entry.member("content").fail("a text that is not empty");

    const auto in_model = vocabulary.find(content);
    if (in_model != vocabulary.end()) {
      if (in_model->second != token.id) {
        id_field.fail(fmt::format("{}, the id in model.vocab", in_model->second));
      }
    } else if (bytes.count(token.id) != 0) {
      id_field.fail("an id that no other token has");
    } else {
      ++size;
    }
    if (!added.emplace(content, token.id).second) {
      entry.member("content").fail("a token that is not listed before");
    }
    const std::string pattern = normalized && nfc ? normalize_nfc(content) : content;
    if (!(normalized ? normalized_matcher : raw_matcher).insert(pattern, token)) {
      entry.member("content").fail("a token that normalizes like no other");
    }
    bytes[token.id] = byte_alphabet().decode(content);
    if (is_special) special.insert(token.id);
  }
}

void Tokenizer::Data::read_pre_tokenizers(const JsonField& field) {
  if (field.is_null() || !read_pre_tokenizer(field, true, 0)) {
    field.fail("a ByteLevel pre-tokenizer, or a Sequence that ends with one");
  }
}

// Returns whether the pre-tokenizer is ByteLevel or ends with it; nothing may follow ByteLevel.
bool Tokenizer::Data::read_pre_tokenizer(const JsonField& field, bool is_last, int depth) {
  if (splitters.size() >= max_splitters) {
    field.fail(fmt::format("at most {} pre-tokenizers", max_splitters));
  }
  const JsonField type = field.member("type");
  const std::string& name = type.string();
  if (name == "Sequence" && depth < max_nesting) {
    const JsonField members = field.member("pretokenizers");
    const std::size_t count = members.array_size();
    bool byte_level = false;
    for (std::size_t i = 0; i < count; ++i) {
      byte_level = read_pre_tokenizer(members.element(i), is_last && i + 1 == count, depth + 1);
    }
    return byte_level;
  }
  if (name == "Split") {
    const JsonField pattern = field.member("pattern");
    const JsonField regex = pattern.member("Regex");
    const JsonField literal = pattern.member("String");
    if (regex.is_null() == literal.is_null()) pattern.fail("a Regex or a String");
    splitters.emplace_back(
        regex.is_null() ? Pattern(literal.string(), PCRE2_LITERAL, literal.where())
                        : translated_pattern(regex),
        split_behavior(field.member("behavior")), field.member("invert").boolean(false));
    return false;
  }
  if (name == "Digits") {
    splitters.emplace_back(Pattern("\\p{N}", 0, field.where()),
                           field.member("individual_digits").boolean(false)
                               ? SplitBehavior::isolated
                               : SplitBehavior::contiguous,
                           false);
    return false;
  }
  if (name == "ByteLevel") {
    if (!is_last) type.fail("ByteLevel only as the last pre-tokenizer");
    add_prefix_space = field.member("add_prefix_space").boolean();
    if (field.member("use_regex").boolean(true)) {
      const nlohmann::json pattern =
          R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
      byte_level_splitter.emplace(translated_pattern({pattern, field.where(), "use_regex"}),
                                  SplitBehavior::isolated, false);
    }
    return true;
  }
  type.fail("Split, Digits, ByteLevel or a Sequence of these");
}

void Tokenizer::Data::read_post_processor(const JsonField& field, int depth) {
  if (field.is_null()) return;
  const JsonField type = field.member("type");
  const std::string& name = type.string();
  if (name == "Sequence" && depth < max_nesting) {
    const JsonField processors = field.member("processors");
    for (std::size_t i = 0; i < processors.array_size(); ++i) {
      read_post_processor(processors.element(i), depth + 1);
    }
  } else if (name == "TemplateProcessing") {
    read_template(field);
  } else if (name != "ByteLevel") {  // ByteLevel only changes offsets
    type.fail("ByteLevel, TemplateProcessing or a Sequence of these");
  }
}

void Tokenizer::Data::read_template(const JsonField& field) {
  const JsonField single = field.member("single");
  const JsonField special_tokens = field.member("special_tokens");
  std::vector<TokenId> before, after;
  bool text_seen = false;
  for (std::size_t i = 0; i < single.array_size(); ++i) {
    const JsonField piece = single.element(i);
    const JsonField sequence = piece.member("Sequence");
    if (!sequence.is_null()) {
      if (sequence.member("id").string() != "A" || text_seen) {
        single.fail("the sequence A once");
      }
      text_seen = true;
      continue;
    }
    const std::string& name = piece.member("SpecialToken").member("id").string();
    const JsonField token_ids = special_tokens.member(name).member("ids");
    for (std::size_t k = 0; k < token_ids.array_size(); ++k) {
      const TokenId id = token_ids.element(k).token_id();
      if (bytes.count(id) == 0) token_ids.element(k).fail("the id of a token");
      (text_seen ? after : before).push_back(id);
    }
  }
  if (!text_seen) single.fail("the sequence A once");
  // In a Sequence of post-processors, a later template surrounds the earlier ones.
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
}

void Tokenizer::Data::read_decoder(const JsonField& field) {
  if (field.is_null()) field.fail("a ByteLevel decoder");
  const JsonField type = field.member("type");
  if (type.string() == "Sequence") {
    const JsonField decoders = field.member("decoders");
    if (decoders.array_size() != 1) decoders.fail("one ByteLevel decoder");
    const JsonField only = decoders.element(0).member("type");
    if (only.string() != "ByteLevel") only.fail("ByteLevel");
  } else if (type.string() != "ByteLevel") {
    type.fail("ByteLevel");
  }
}

}  // namespace kvzap
