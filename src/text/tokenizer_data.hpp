// A tokenizer's tables. tokenizer_data.cpp reads them, tokenizer.cpp uses them.
#pragma once

#include <array>
#include <cstddef>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json_field.hpp"
#include "text/added_tokens.hpp"
#include "text/bpe.hpp"
#include "text/pre_tokenizer.hpp"

namespace kvzap {

/// The contents of tokenizer.json, and the steps of encoding and decoding.
struct Tokenizer::Data {
  using JsonField = base::JsonField;

  // Tokens in the byte alphabet; added tokens as they are written.
  std::unordered_map<std::string, TokenId> vocabulary;
  // The bytes that each token decodes to.
  std::unordered_map<TokenId, std::string> bytes;
  std::unordered_set<TokenId> special;
  std::size_t size = 0;

  std::unordered_map<std::string, TokenId> added;
  text::AddedTokenMatcher raw_matcher;         // added tokens sought in the raw text
  text::AddedTokenMatcher normalized_matcher;  // added tokens sought in the normalized text

  bool nfc = false;
  std::vector<text::Splitter> splitters;
  bool add_prefix_space = false;
  std::optional<text::Splitter> byte_level_splitter;

  std::array<TokenId, 256> byte_ids{};
  text::MergeTable merges;
  bool ignore_merges = false;

  std::vector<TokenId> prefix, suffix;

  /// `content`: a whole tokenizer.json; `file`: its name in messages.
  Data(nlohmann::json content, const std::string& file);

  // Vocabulary and merges are nearly all of the file. Their JSON is freed during reading, so that
  // they are never in memory twice.
  void read_model(const JsonField& model, nlohmann::json vocab, nlohmann::json merge_list);
  void read_vocabulary(nlohmann::json vocab, const JsonField& model);
  void read_merges(nlohmann::json list, const JsonField& model);
  void read_normalizer(const JsonField& field, int depth);
  void read_added_tokens(const JsonField& field);
  void read_pre_tokenizers(const JsonField& field);
  bool read_pre_tokenizer(const JsonField& field, bool is_last, int depth);
  void read_post_processor(const JsonField& field, int depth);
  void read_template(const JsonField& field);
  void read_decoder(const JsonField& field);

  using Cache = std::unordered_map<std::string, std::vector<TokenId>>;
  void encode_text(std::string_view text, Cache& cache, std::vector<TokenId>& ids) const;
  void encode_pre_token(std::string_view text, Cache& cache, std::vector<TokenId>& ids) const;

  // Returns the bytes that a token adds to the decoded text.
  std::string_view decoded(TokenId id, bool skip_special_tokens) const {
    const auto found = bytes.find(id);
    if (found == bytes.end() || (skip_special_tokens && special.count(id) != 0)) return {};
    return found->second;
  }
};

}  // namespace kvzap
