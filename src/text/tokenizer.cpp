#include <fmt/format.h>

#include <kvzap/model/tokenizer.hpp>
#include <utility>

#include "gguf/model_file.hpp"
#include "text/tokenizer_data.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

using text::append_lossy;
using text::GrowthLimit;
using text::is_valid_utf8;
using text::TextPiece;

// Limits of the cache of pre-tokens: bytes of one, and their number.
constexpr std::size_t max_cached_bytes = 256;
constexpr std::size_t max_cached_pre_tokens = 100000;

}  // namespace

void Tokenizer::Data::encode_pre_token(std::string_view text, Cache& cache,
                                       std::vector<TokenId>& ids) const {
  const auto encode = [&](std::vector<TokenId>& result) {
    if (pre_tokenizers.gives_bytes()) {
      model->encode_bytes(text, result);
    } else {
      model->encode(text, result);
    }
  };
  if (text.size() > max_cached_bytes) return encode(ids);
  std::string key(text);
  const auto found = cache.find(key);
  if (found != cache.end()) {
    ids.insert(ids.end(), found->second.begin(), found->second.end());
    return;
  }
  std::vector<TokenId> symbols;
  encode(symbols);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (cache.size() < max_cached_pre_tokens) cache.emplace(std::move(key), std::move(symbols));
}

void Tokenizer::Data::encode_text(const TextPiece& whole, GrowthLimit& limit, Cache& cache,
                                  std::vector<TokenId>& ids) const {
  std::vector<TextPiece> pieces{whole};
  text::RewrittenText rewritten(limit);
  pre_tokenizers.apply(pieces, rewritten);
  for (const TextPiece& piece : pieces) encode_pre_token(piece.text, cache, ids);
}

Tokenizer::Tokenizer(std::shared_ptr<const Data> data) : m_data(std::move(data)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  auto file = gguf::has_model_file(folder, "tokenizer.json")
                  ? gguf::read_model_file(folder, "tokenizer.json")
                  : std::nullopt;
  if (!file) {
    throw Error(fmt::format("{}: expected a tokenizer, found no readable file",
                            gguf::name_of_model_file(folder, "tokenizer.json")));
  }
  return Tokenizer(std::make_shared<const Data>(std::move(file->content), file->where));
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
  GrowthLimit limit(data.file, text.size());
  if (add_special_tokens) ids = data.added_ids.prefix;
  const auto on_token = [&](TokenId id) { ids.push_back(id); };
  data.raw_matcher.scan(text, on_token, [&](std::string_view part) {
    const bool at_start = part.data() == text.data();
    TextPiece whole{part, at_start ? text::first_character(part).second : 0};
    text::NormalizedText normalized;
    if (!data.normalizers.empty()) {
      normalized = data.normalizers.apply(part, at_start, limit);
      whole = {normalized.text, normalized.from_first};
    }
    data.normalized_matcher.scan(whole.text, on_token, [&](std::string_view piece) {
      const auto begin = static_cast<std::size_t>(piece.data() - whole.text.data());
      data.encode_text(whole.part(begin, begin + piece.size()), limit, cache, ids);
    });
  });
  if (add_special_tokens) {
    ids.insert(ids.end(), data.added_ids.suffix.begin(), data.added_ids.suffix.end());
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<TokenId>& ids, bool skip_special_tokens) const {
  std::string text;
  auto states = m_data->decoder.start();
  for (const TokenId id : ids) {
    const std::string* token = m_data->decoded_token(id, skip_special_tokens);
    if (token != nullptr) m_data->decoder.append(*token, states, text);
  }
  m_data->decoder.finish(states, text);
  return text;
}

std::optional<TokenId> Tokenizer::token_id(std::string_view content) const {
  const std::string key(content);
  const auto found = m_data->added.find(key);
  return found == m_data->added.end() ? m_data->model->find(key) : std::optional(found->second);
}

bool Tokenizer::is_special(TokenId id) const { return m_data->special.count(id) != 0; }

std::size_t Tokenizer::vocabulary_size() const { return m_data->size; }

struct Tokenizer::StreamDecoder::State {
  std::shared_ptr<const Data> data;
  bool skip_special_tokens;
  text::Decoder::States steps;
};

Tokenizer::StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : m_state(std::make_unique<State>(
          State{tokenizer.m_data, skip_special_tokens, tokenizer.m_data->decoder.start()})) {}
Tokenizer::StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
Tokenizer::StreamDecoder& Tokenizer::StreamDecoder::operator=(StreamDecoder&&) noexcept = default;
Tokenizer::StreamDecoder::~StreamDecoder() = default;

std::string Tokenizer::StreamDecoder::append(TokenId id) {
  std::string text;
  const std::string* token = m_state->data->decoded_token(id, m_state->skip_special_tokens);
  if (token != nullptr) m_state->data->decoder.append(*token, m_state->steps, text);
  return text;
}

std::string Tokenizer::StreamDecoder::finish() {
  std::string text;
  m_state->data->decoder.finish(m_state->steps, text);
  return text;
}

}  // namespace kvzap
