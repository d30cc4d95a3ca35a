// The pre-tokenizers that tokenizer.ggml.pre names, as the published tokenizer.json files write
// them.
#include <algorithm>
#include <initializer_list>

#include "gguf/made_files.hpp"

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
constexpr const char* tekken_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* gpt4o_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* deepseek_letters =
    R"(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)";
constexpr const char* deepseek_v3_words =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

json split(const char* pattern) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", pattern}}},
          {"behavior", "Isolated"},
          {"invert", false}};
}

json digits(bool individual) { return {{"type", "Digits"}, {"individual_digits", individual}}; }

json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

json sequence(json members) {
  return {{"type", "Sequence"}, {"pretokenizers", std::move(members)}};
}

/// Splits by the patterns, one after the other.
json splits(std::initializer_list<const char*> patterns) {
  json members = json::array();
  for (const char* pattern : patterns) members.push_back(split(pattern));
  members.push_back(byte_level(false));
  return sequence(std::move(members));
}

json deepseek(const char* letters, const char* punctuation, bool splits_final_space) {
  json members = {split("[\r\n]"), split(letters), split(punctuation)};
  if (splits_final_space) members.push_back(split(R"(\s+$)"));
  members.push_back(split("[一-龥ࠀ-一가-퟿]+"));
  members.push_back(digits(true));
  members.push_back(byte_level(false));
  return sequence(std::move(members));
}

json falcon() {
  return sequence({{{"type", "Punctuation"}, {"behavior", "Contiguous"}},
                   byte_level(true),
                   digits(false),
                   split("[0-9][0-9][0-9]")});
}

}  // namespace

std::optional<PreTokenizerKind> pre_tokenizer_kind(std::string_view name) {
  const auto is_one_of = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const json nfc = {{"type", "NFC"}};
  if (is_one_of({"gpt-2", "phi-2", "jais", "trillion"})) return {{nullptr, byte_level(true)}};
  if (is_one_of({"mpt", "olmo"})) return {{nfc, byte_level(true)}};
  if (is_one_of({"smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"})) {
    return {{nullptr, sequence({digits(true), byte_level(true)})}};
  }
  if (name == "command-r") return {{nfc, sequence({digits(true), byte_level(true)})}};
  if (is_one_of({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"})) {
    return {{nullptr, splits({llama3_words}), true, true}};
  }
  if (is_one_of({"dbrx", "smaug-bpe"})) return {{nullptr, splits({llama3_words})}};
  if (name == "qwen2") return {{nfc, splits({qwen2_words})}};
  if (is_one_of({"deepseek-r1-qwen", "stablelm2"})) return {{nullptr, splits({qwen2_words})}};
  if (name == "tekken") return {{nullptr, splits({tekken_words}), true, true}};
  if (is_one_of({"gpt-4o", "llama4"})) return {{nullptr, splits({gpt4o_words})}};
  if (name == "deepseek-llm") {
    return {{nullptr, deepseek(deepseek_letters, R"(\s?[!-/:-~！-／：-～‘-‟　-。]+)", true)}};
  }
  if (name == "deepseek-coder") {
    return {{nullptr, deepseek(R"(\s?\p{L}+)", R"(\s?\p{P}+)", false)}};
  }
  if (name == "deepseek-v3") {
    return {{nullptr, splits({R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+", deepseek_v3_words})}};
  }
  if (name == "falcon") return {{nullptr, falcon()}};
  if (name == "default") {
    return {
        {nullptr, splits({R"([\p{P}\$\+<=>\^~\|]+)", gpt2_words, R"(\p{N}+)", "[0-9][0-9][0-9]"})}};
  }
  return std::nullopt;
}

}  // namespace kvzap::gguf
