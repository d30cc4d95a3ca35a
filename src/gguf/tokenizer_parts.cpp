#include "gguf/tokenizer_parts.hpp"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

namespace kvzap::gguf {

using nlohmann::json;

namespace {

constexpr std::size_t most_merges = 1u << 22;
// Vocabularies of SentencePiece and tiktoken have two or three merges a token.
constexpr std::size_t most_merges_per_token = 3;
constexpr std::size_t allowed_bytes = 1u << 24;   // of the merges of any vocabulary
constexpr std::size_t allowed_merges = 1u << 16;  // of any vocabulary
// SentencePiece's default is 16 characters. tiktoken's vocabularies have runs of 128 spaces.
constexpr std::size_t most_merged_bytes = 512;

}  // namespace

json bpe_model(json vocab, json merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", std::move(vocab)},
          {"merges", std::move(merges)}};
}

json byte_level(bool use_regex, bool add_prefix_space) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

namespace {

json split_at_matches(json pattern) {
  return {{"type", "Split"},
          {"pattern", std::move(pattern)},
          {"behavior", "Isolated"},
          {"invert", false}};
}

}  // namespace

json split_at(std::string_view pattern) {
  return split_at_matches({{"Regex", std::string(pattern)}});
}

json split_at_texts(const std::vector<std::string>& texts) {
  return split_at_matches({{"Texts", texts}});
}

json sequence_of_pre_tokenizers(json members) {
  return {{"type", "Sequence"}, {"pretokenizers", std::move(members)}};
}

json replace_text(std::string_view text, std::string_view content) {
  return {{"type", "Replace"},
          {"pattern", {{"String", std::string(text)}}},
          {"content", std::string(content)}};
}

json byte_level_decoder() { return byte_level(true, true); }

json marked_spaces_decoder(bool removes_space) {
  json decoders = {replace_text(space_mark, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
  if (removes_space) {
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  return {{"type", "Sequence"}, {"decoders", std::move(decoders)}};
}

json template_processing(const std::vector<TemplateToken>& before,
                         const std::vector<TemplateToken>& after) {
  if (before.empty() && after.empty()) return nullptr;
  json single = json::array(), special = json::object();
  const auto add = [&](const TemplateToken& token) {
    single.push_back({{"SpecialToken", {{"id", token.text}, {"type_id", 0}}}});
    special[token.text] = {{"id", token.text}, {"ids", {token.id}}, {"tokens", {token.text}}};
  };
  for (const TemplateToken& token : before) add(token);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  for (const TemplateToken& token : after) add(token);
  return {{"type", "TemplateProcessing"},
          {"single", std::move(single)},
          {"pair", json::array()},
          {"special_tokens", std::move(special)}};
}

std::vector<TokenMerge> all_merges(const std::vector<std::string_view>& texts,
                                   const std::function<void(std::size_t)>& too_many) {
  std::unordered_map<std::string_view, std::size_t> places;
  places.reserve(texts.size());
  for (std::size_t place = 0; place < texts.size(); ++place) {
    if (!texts[place].empty()) places.emplace(texts[place], place);
  }
  const std::size_t most =
      std::min<std::size_t>(most_merges, allowed_merges + most_merges_per_token * texts.size());
  std::size_t bytes = 0;
  for (const std::string_view text : texts) bytes += 4 * text.size();
  bytes += allowed_bytes;
  std::vector<TokenMerge> merges;
  for (std::size_t place = 0; place < texts.size(); ++place) {
    const std::string_view text = texts[place];
    if (text.size() > most_merged_bytes) continue;
    const auto first = static_cast<std::ptrdiff_t>(merges.size());
    for (std::size_t i = 1; i < text.size(); ++i) {
      const auto left = places.find(text.substr(0, i));
      const auto right = left == places.end() ? places.end() : places.find(text.substr(i));
      if (right == places.end()) continue;
      if (merges.size() >= most || bytes < text.size()) too_many(merges.size());
      bytes -= text.size();
      merges.push_back({place, left->second, right->second});
    }
    std::sort(merges.begin() + first, merges.end(), [](const TokenMerge& a, const TokenMerge& b) {
      return std::pair(a.left, a.right) < std::pair(b.left, b.right);
    });
  }
  return merges;
}

std::size_t characters_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u;
  }));
}

json pairs_of(const std::vector<TokenMerge>& merges, const std::vector<std::string_view>& texts) {
  json list = json::array();
  auto& pairs = list.get_ref<json::array_t&>();
  pairs.reserve(merges.size());
  for (const TokenMerge& merge : merges) {
    const std::string_view left = texts[merge.left], right = texts[merge.right];
    if (left.find(' ') != left.npos || right.find(' ') != right.npos) {
      pairs.push_back(json::array({std::string(left), std::string(right)}));
    } else {
      pairs.emplace_back(std::string(left).append(" ").append(right));  // takes half the memory
    }
  }
  return list;
}

}  // namespace kvzap::gguf
