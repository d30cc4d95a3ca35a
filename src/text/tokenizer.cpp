#include <fmt/format.h>

#include <algorithm>
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

}  // namespace

void Tokenizer::Data::encode_text(const TextPiece& whole, GrowthLimit& limit,
                                  text::PreTokenCache& cache) const {
  std::vector<TextPiece> pieces{whole};
  text::RewrittenText rewritten(limit);
  pre_tokenizers.apply(pieces, rewritten);
  const bool gives_bytes = pre_tokenizers.gives_bytes();
  for (const TextPiece& piece : pieces) {
    cache.append(piece.text, [&](std::vector<TokenId>& ids) {
      if (gives_bytes) {
        model->encode_bytes(piece.text, ids);
      } else {
        model->encode(piece.text, ids);
      }
    });
  }
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
  text::PreTokenCache cache(ids);
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
      data.encode_text(whole.part(begin, begin + piece.size()), limit, cache);
    });
  });
  if (add_special_tokens) {
    ids.insert(ids.end(), data.added_ids.suffix.begin(), data.added_ids.suffix.end());
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<TokenId>& ids, bool skip_special_tokens) const {
  const Data& data = *m_data;
  std::string text;
  if (data.decoder.joins_bytes()) {
    std::string bytes, memory;
    for (const TokenId id : ids) bytes += data.decoded_bytes(id, skip_special_tokens, memory);
    if (is_valid_utf8(bytes)) return bytes;
    append_lossy(text, bytes, true);
    return text;
  }
  auto states = data.decoder.start();
  for (const TokenId id : ids) {
    if (const auto token = data.decoded_token(id, skip_special_tokens)) {
      data.decoder.append(*token, states, text);
    }
  }
  data.decoder.finish(states, text);
  return text;
}

std::string Tokenizer::token_bytes(TokenId id) const {
  if (m_data->decoder.joins_bytes()) {
    std::string memory;
    return std::string(m_data->decoded_bytes(id, false, memory));
  }
  const auto token = m_data->decoded_token(id, false);
  return token ? m_data->decoder.bytes_between(*token) : std::string();
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
  std::string held, memory;  // bytes that wait for others; for a token's bytes
  std::size_t foreign = 0;   // bytes of a text before that are still to come

  std::string own(std::string text) {
    const std::size_t count = std::min(foreign, text.size());
    foreign -= count;
    return text.erase(0, count);
  }
};

Tokenizer::StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens,
                                        bool continues)
    : m_state(std::make_unique<State>(State{
          tokenizer.m_data, skip_special_tokens, tokenizer.m_data->decoder.start(), {}, {}})) {
  const text::Decoder& decoder = tokenizer.m_data->decoder;
  if (!continues || decoder.joins_bytes()) return;
  std::string before, later;
  decoder.append("x", m_state->steps, before);
  text::Decoder::States ended = m_state->steps;
  decoder.finish(ended, later);
  m_state->foreign = later.size();
}
Tokenizer::StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
Tokenizer::StreamDecoder& Tokenizer::StreamDecoder::operator=(StreamDecoder&&) noexcept = default;
Tokenizer::StreamDecoder::~StreamDecoder() = default;

std::string Tokenizer::StreamDecoder::append(TokenId id) {
  State& state = *m_state;
  const Data& data = *state.data;
  std::string text;
  if (data.decoder.joins_bytes()) {
    const std::string_view bytes = data.decoded_bytes(id, state.skip_special_tokens, state.memory);
    // Most tokens are whole characters.
    if (state.held.empty() && is_valid_utf8(bytes)) return std::string(bytes);
    state.held += bytes;
    state.held.erase(0, append_lossy(text, state.held, false));
  } else if (const auto token = data.decoded_token(id, state.skip_special_tokens)) {
    data.decoder.append(*token, state.steps, text);
  }
  return state.own(std::move(text));
}

std::string Tokenizer::StreamDecoder::finish() {
  std::string text;
  append_lossy(text, std::exchange(m_state->held, {}), true);
  m_state->data->decoder.finish(m_state->steps, text);
  return m_state->own(std::move(text));
}

}  // namespace kvzap
