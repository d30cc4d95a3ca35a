#include <fmt/format.h>

#include <deque>
#include <kvzap/model/tokenizer.hpp>
#include <utility>

#include "base/json_file.hpp"
#include "text/byte_alphabet.hpp"
#include "text/tokenizer_data.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

using text::append_lossy;
using text::apply_merges;
using text::byte_alphabet;
using text::is_valid_utf8;
using text::normalize_nfc;
using text::Splitter;

// Limits of the cache of pre-tokens: bytes of one, and their number.
constexpr std::size_t max_cached_bytes = 256;
constexpr std::size_t max_cached_pre_tokens = 100000;

}  // namespace

void Tokenizer::Data::encode_pre_token(std::string_view text, Cache& cache,
                                       std::vector<TokenId>& ids) const {
  const bool cacheable = text.size() <= max_cached_bytes;
  std::string key;
  if (cacheable) {
    key = text;
    const auto found = cache.find(key);
    if (found != cache.end()) {
      ids.insert(ids.end(), found->second.begin(), found->second.end());
      return;
    }
  }
  std::vector<TokenId> symbols;
  if (ignore_merges) {
    std::string token;
    for (const char byte : text) token += byte_alphabet().of_byte[static_cast<unsigned char>(byte)];
    const auto found = vocabulary.find(token);
    if (found != vocabulary.end()) symbols = {found->second};
  }
  if (symbols.empty()) {
    symbols.reserve(text.size());
    for (const char byte : text) symbols.push_back(byte_ids[static_cast<unsigned char>(byte)]);
    apply_merges(symbols, merges);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (cacheable && cache.size() < max_cached_pre_tokens) {
    cache.emplace(std::move(key), std::move(symbols));
  }
}

void Tokenizer::Data::encode_text(std::string_view text, Cache& cache,
                                  std::vector<TokenId>& ids) const {
  std::vector<std::string_view> pieces{text}, parts;
  const auto split_all = [&](const Splitter& splitter) {
    parts.clear();
    for (const std::string_view piece : pieces) splitter.split(piece, parts);
    pieces.swap(parts);
  };
  for (const Splitter& splitter : splitters) split_all(splitter);
  std::deque<std::string> prefixed;  // storage of pieces; a deque never moves its elements
  if (add_prefix_space) {
    for (std::string_view& piece : pieces) {
      if (piece.front() != ' ') piece = prefixed.emplace_back(" " + std::string(piece));
    }
  }
  if (byte_level_splitter) split_all(*byte_level_splitter);
  for (const std::string_view piece : pieces) encode_pre_token(piece, cache, ids);
}

Tokenizer::Tokenizer(std::shared_ptr<const Data> data) : m_data(std::move(data)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer.json";
  if (!std::filesystem::is_regular_file(path)) {
    throw Error(fmt::format("{}: expected a tokenizer, found no readable file", path.string()));
  }
  // The text is freed before the tables are built.
  nlohmann::json content = base::parse_json(base::read_text_file(path), path.string());
  return Tokenizer(std::make_shared<const Data>(std::move(content), path.string()));
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::string repaired;
  if (!is_valid_utf8(text)) {
    append_lossy(repaired, text, true);
    text = repaired;
  }
  const Data& data = *m_data;
  std::vector<TokenId> ids;
  Data::Cache cache;
  if (add_special_tokens) ids = data.prefix;
  const auto on_token = [&](TokenId id) { ids.push_back(id); };
  const auto on_normalized = [&](std::string_view piece) { data.encode_text(piece, cache, ids); };
  data.raw_matcher.scan(text, on_token, [&](std::string_view piece) {
    if (data.nfc) {
      data.normalized_matcher.scan(normalize_nfc(piece), on_token, on_normalized);
    } else {
      data.normalized_matcher.scan(piece, on_token, on_normalized);
    }
  });
  if (add_special_tokens) ids.insert(ids.end(), data.suffix.begin(), data.suffix.end());
  return ids;
}

std::string Tokenizer::decode(const std::vector<TokenId>& ids, bool skip_special_tokens) const {
  std::string bytes, text;
  for (const TokenId id : ids) bytes += m_data->decoded(id, skip_special_tokens);
  append_lossy(text, bytes, true);
  return text;
}

std::optional<TokenId> Tokenizer::token_id(std::string_view content) const {
  const std::string key(content);
  for (const auto* table : {&m_data->added, &m_data->vocabulary}) {
    const auto found = table->find(key);
    if (found != table->end()) return found->second;
  }
  return std::nullopt;
}

bool Tokenizer::is_special(TokenId id) const { return m_data->special.count(id) != 0; }

std::size_t Tokenizer::vocabulary_size() const { return m_data->size; }

Tokenizer::StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : m_data(tokenizer.m_data), m_skip_special_tokens(skip_special_tokens) {}

std::string Tokenizer::StreamDecoder::append(TokenId id) {
  m_pending += m_data->decoded(id, m_skip_special_tokens);
  std::string text;
  m_pending.erase(0, append_lossy(text, m_pending, false));
  return text;
}

std::string Tokenizer::StreamDecoder::finish() {
  std::string text;
  append_lossy(text, m_pending, true);
  m_pending.clear();
  return text;
}

}  // namespace kvzap
