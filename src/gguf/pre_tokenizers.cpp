// The pre-tokenizers that tokenizer.ggml.pre names, as the published tokenizer.json files write
// them.
#include <algorithm>
#include <initializer_list>

#include "gguf/made_files.hpp"
#include "gguf/tokenizer_parts.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

// Patterns in Oniguruma's syntax.
constexpr const char* gpt2_words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))";
constexpr const char* llama3_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* qwen2_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* qwen35_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* tekken_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* gpt4o_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// Escapes: normalization of this source (NFC) would change these characters.
constexpr const char* deepseek_letters =
    R"(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-)"
    "\u1F7D"
    R"(ᾀ-ᾴᾶ-ᾼ)"
    "\u1FBE"
    R"(ῂ-ῄῆ-ῌῐ-)"
    "\u1FD3"
    R"(ῖ-)"
    "\u1FDB"
    R"(ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ)"
    "\u2126"
    R"(ℨ)"
    "\u212A"
    R"(-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)";
constexpr const char* deepseek_v3_words =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// \s with a run of at most so many characters for each power of two.
constexpr const char* jais2_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1})";
constexpr const char* kimi_words =
    R"([\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* youtu_scripts =
    "[\uAC00-\uD7A3\u3131-\u318E]+|[！…“”‘’—：；，、-\u303F\uFE30-\uFE4F]+|[\u3105-\u312F]+|"
    "[一-龥\u3040-ゟ゠-ヿ]+";
constexpr const char* youtu_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* minicpm5_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* seed_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* bailing_words =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr const char* exaone_moe_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)";
// Digits in groups of three from the right.
constexpr const char* digits_from_right = R"(\d{1,3}(?=(?:\d{3})*\b))";
constexpr const char* afmoe_digits = R"(\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N})))";
constexpr const char* afmoe_scripts =
    "[一-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-ゟ゠-ヿ\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F"
    "\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+";
constexpr const char* bloom_words = " ?[^(\\s|[.,!?…。，、।۔،])]+";

json digits(bool individual) { return {{"type", "Digits"}, {"individual_digits", individual}}; }

/// Splits by the patterns, one after the other.
json splits(std::initializer_list<const char*> patterns) {
  json members = json::array();
  for (const char* pattern : patterns) members.push_back(split_at(pattern));
  members.push_back(byte_level(false));
  return sequence_of_pre_tokenizers(std::move(members));
}

json deepseek(const char* letters, const char* punctuation, bool splits_final_space) {
  json members = {split_at("[\r\n]"), split_at(letters), split_at(punctuation)};
  if (splits_final_space) members.push_back(split_at(R"(\s+$)"));
  members.push_back(split_at("[一-龥ࠀ-一가-퟿]+"));
  members.push_back(digits(true));
  members.push_back(byte_level(false));
  return sequence_of_pre_tokenizers(std::move(members));
}

json falcon() {
  return sequence_of_pre_tokenizers({{{"type", "Punctuation"}, {"behavior", "Contiguous"}},
                                     byte_level(true),
                                     digits(false),
                                     split_at("[0-9][0-9][0-9]")});
}

json chameleon() {
  return sequence_of_pre_tokenizers({split_at("<sentinel:[0-9]+>"),
                                     split_at("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
                                     split_at("([\\t\\n]|    |  )"),
                                     digits(true),
                                     {{"type", "Punctuation"}, {"behavior", "Isolated"}},
                                     byte_level(true)});
}

/// SentencePiece's marks in place of spaces, and no splits.
PreTokenizerKind marked_spaces(bool add_bos) {
  PreTokenizerKind kind;
  kind.normalizer = replace_text(" ", space_mark);
  kind.add_bos = add_bos;
  kind.byte_level = false;
  return kind;
}

/// Names with one pre-tokenizer. kvzap writes the first of them.
struct NamedKinds {
  std::vector<std::string_view> names;
  PreTokenizerKind kind;
};

std::vector<NamedKinds> make_table() {
  const json nfc = {{"type", "NFC"}};
  const json deepseek_v3 = splits({R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+", deepseek_v3_words});
  return {
      {{"gpt-2", "phi-2", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum",
        "granite-docling"},
       {nullptr, byte_level(true)}},
      {{"mpt", "olmo"}, {nfc, byte_level(true)}},
      {{"smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"},
       {nullptr, sequence_of_pre_tokenizers({digits(true), byte_level(true)})}},
      {{"command-r"}, {nfc, sequence_of_pre_tokenizers({digits(true), byte_level(true)})}},
      {{"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"},
       {nullptr, splits({llama3_words}), true, true}},
      {{"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}, {nullptr, splits({llama3_words})}},
      {{"qwen2", "hunyuan"}, {nfc, splits({qwen2_words})}},
      {{"qwen35"}, {nfc, splits({qwen35_words})}},
      {{"stablelm2", "deepseek-r1-qwen", "solar-open", "grok-2", "megrez", "kormo"},
       {nullptr, splits({qwen2_words})}},
      {{"tekken"}, {nullptr, splits({tekken_words}), true, true}},
      {{"gpt-4o", "llama4", "minimax-m2", "kanana2"}, {nullptr, splits({gpt4o_words})}},
      {{"tiny_aya", "cohere2moe"}, {nfc, splits({digits_from_right, gpt4o_words})}},
      {{"deepseek-llm"},
       {nullptr, deepseek(deepseek_letters, R"(\s?[!-/:-~！-／：-～‘-‟　-。]+)", true)}},
      {{"deepseek-coder"}, {nullptr, deepseek(R"(\s?\p{L}+)", R"(\s?\p{P}+)", false)}},
      {{"deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"}, {nullptr, deepseek_v3}},
      {{"afmoe"}, {nullptr, splits({afmoe_digits, afmoe_scripts, deepseek_v3_words})}},
      {{"kimi-k2"}, {nullptr, splits({kimi_words}), true}},
      {{"youtu"}, {nullptr, splits({youtu_scripts, youtu_words}), true}},
      {{"jais-2"}, {nullptr, splits({jais2_words})}},
      {{"minicpm5"}, {nullptr, splits({R"(\p{N}{1,3})", minicpm5_words}), true}},
      {{"seed-coder"}, {nullptr, splits({seed_words})}},
      {{"exaone-moe"}, {nullptr, splits({exaone_moe_words})}},
      {{"bailingmoe", "bailingmoe2", "llada-moe"}, {nullptr, splits({bailing_words})}},
      {{"superbpe"}, {nullptr, splits({R"(\p{N}+)", R"((?=(\d{3})+(?!\d)))"})}},
      {{"poro-chat", "bloom", "gpt3-finnish"}, {nullptr, splits({bloom_words})}},
      {{"viking"},
       {nullptr,
        sequence_of_pre_tokenizers({split_at(bloom_words), digits(true), byte_level(false)})}},
      {{"chameleon"}, {nullptr, chameleon(), false, true}},
      {{"falcon"}, {nullptr, falcon()}},
      {{"gemma4"}, marked_spaces(true)},
      {{"sarvam-moe"}, marked_spaces(false)},
      {{"default"},
       {nullptr, splits({R"([\p{P}\$\+<=>\^~\|]+)", gpt2_words, R"(\p{N}+)", "[0-9][0-9][0-9]"})}}};
}

const std::vector<NamedKinds>& table() {
  static const std::vector<NamedKinds> kinds = make_table();
  return kinds;
}

}  // namespace

std::optional<PreTokenizerKind> pre_tokenizer_kind(std::string_view name) {
  for (const NamedKinds& row : table()) {
    if (std::find(row.names.begin(), row.names.end(), name) != row.names.end()) return row.kind;
  }
  return std::nullopt;
}

std::vector<std::string_view> pre_tokenizer_names() {
  std::vector<std::string_view> names;
  for (const NamedKinds& row : table()) {
    names.insert(names.end(), row.names.begin(), row.names.end());
  }
  return names;
}

}  // namespace kvzap::gguf
