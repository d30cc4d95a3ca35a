#include "gguf/sentence_piece_parts.hpp"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <utility>

#include "files/base64.hpp"
#include "gguf/tokenizer_parts.hpp"

namespace kvzap::gguf {

using nlohmann::json;

namespace {

json replace_pattern(std::string_view pattern, std::string_view content) {
  return {{"type", "Replace"},
          {"pattern", {{"Regex", std::string(pattern)}}},
          {"content", std::string(content)}};
}

/// Returns a BPE model whose merges follow the scores of the tokens that they make. Only normal
/// pieces merge.
json model_of_scores(const SentencePieceFile& file, const std::vector<std::string>& texts,
                     const TooManyMerges& too_many) {
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  std::vector<std::string_view> normal_views = views;
  json vocab = json::object();
  for (std::size_t id = 0; id < texts.size(); ++id) {
    vocab[texts[id]] = id;
    if (file.pieces[id].type != normal) normal_views[id] = {};
  }
  auto merges = all_merges(normal_views, too_many);
  const auto order = [&](const TokenMerge& merge) {
    return std::tuple(-file.pieces[merge.token].score, merge.token, views[merge.left],
                      views[merge.right]);
  };
  std::sort(merges.begin(), merges.end(),
            [&](const TokenMerge& a, const TokenMerge& b) { return order(a) < order(b); });
  json model = bpe_model(std::move(vocab), pairs_of(merges, views));
  model["unk_token"] = file.unknown;
  model["fuse_unk"] = true;
  return model;
}

json unigram_model(const SentencePieceFile& file, const std::vector<std::string>& texts) {
  json vocab = json::array();
  for (std::size_t id = 0; id < texts.size(); ++id) {
    vocab.push_back({texts[id], static_cast<double>(file.pieces[id].score)});
  }
  return {{"type", "Unigram"}, {"unk_id", file.unknown_id}, {"vocab", std::move(vocab)}};
}

}  // namespace

json metaspace(const char* prepend_scheme) {
  return {{"type", "Metaspace"},
          {"replacement", space_mark},
          {"prepend_scheme", prepend_scheme},
          {"split", false}};
}

json model_of_ids(const SentencePieceFile& file, const TooManyMerges& too_many) {
  std::vector<std::string_view> texts;
  json vocab = json::object();
  for (const auto& piece : file.pieces) {
    vocab[std::string(piece.text)] = texts.size();
    texts.push_back(piece.text);
  }
  auto merges = all_merges(texts, too_many);
  const auto order = [&](const TokenMerge& merge) {
    return std::tuple(merge.token, characters_of(texts[merge.left]),
                      characters_of(texts[merge.right]));
  };
  std::stable_sort(merges.begin(), merges.end(),
                   [&](const TokenMerge& a, const TokenMerge& b) { return order(a) < order(b); });
  json model = bpe_model(std::move(vocab), pairs_of(merges, texts));
  model["fuse_unk"] = true;
  model["byte_fallback"] = true;
  return model;
}

void add_by_settings(const SentencePieceFile& file, const std::vector<std::string>& texts,
                     bool is_legacy, const TooManyMerges& too_many, json& tokenizer) {
  std::vector<std::string> isolated;
  for (std::size_t id = 0; id < texts.size(); ++id) {
    if (file.pieces[id].type == user_defined) isolated.push_back(texts[id]);
  }
  json& model = tokenizer["model"];
  if (file.kind == SentencePieceFile::bpe) {
    model = model_of_scores(file, texts, too_many);
    model["ignore_merges"] = !isolated.empty();
  } else {
    model = unigram_model(file, texts);
  }
  model["byte_fallback"] = file.byte_fallback;

  json normalizers = json::array();
  if (!file.charsmap.empty()) {
    normalizers.push_back(
        {{"type", "Precompiled"}, {"precompiled_charsmap", files::to_base64(file.charsmap)}});
  }
  if (file.removes_extra_spaces) {
    normalizers.push_back(replace_pattern(R"(\A +| +\z)", ""));
    normalizers.push_back(replace_pattern(" {2,}", " "));
  }
  if (file.escapes_spaces) normalizers.push_back(replace_text(" ", space_mark));
  // Metaspace adds no mark to a text that begins with one; SentencePiece does.
  if (file.adds_space && is_legacy) {
    normalizers.push_back(replace_pattern("\\A\u2581", "\u2581\u2581"));
  }
  tokenizer["normalizer"] = {{"type", "Sequence"}, {"normalizers", std::move(normalizers)}};

  json splits = json::array();
  if (file.adds_space) splits.push_back(metaspace(is_legacy ? "always" : "first"));
  if (!isolated.empty()) splits.push_back(split_at_texts(isolated));
  tokenizer["pre_tokenizer"] =
      splits.empty() ? json() : sequence_of_pre_tokenizers(std::move(splits));

  // Clang would copy the element of = {element}, and GCC make an array of it.
  json decoders = json::array({replace_text(space_mark, " ")});
  if (file.byte_fallback) decoders.push_back({{"type", "ByteFallback"}});
  if (file.adds_space || file.byte_fallback) decoders.push_back({{"type", "Fuse"}});
  if (file.adds_space) {
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  tokenizer["decoder"] = {{"type", "Sequence"}, {"decoders", std::move(decoders)}};
}

}  // namespace kvzap::gguf
