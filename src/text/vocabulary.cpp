#include "text/vocabulary.hpp"

#include <algorithm>
#include <functional>

namespace kvzap::text {
namespace {

std::uint32_t hash_of(std::string_view text) {
  return static_cast<std::uint32_t>(std::hash<std::string_view>{}(text));
}

}  // namespace

Vocabulary::Vocabulary(std::size_t count) : m_places(2 * count) {
  m_tokens.reserve(count);
  std::size_t slots = 2;
  while (slots < 2 * count) slots *= 2;
  m_slots.resize(slots);
}

bool Vocabulary::insert(std::string_view text, TokenId id) {
  const auto place = static_cast<std::uint32_t>(m_tokens.size() + 1);
  const auto index = static_cast<std::size_t>(id);
  if (index >= m_places.size()) {
    if (!m_far_places.emplace(id, place).second) return false;
  } else if (m_places[index] != 0) {
    return false;
  } else {
    m_places[index] = place;
  }
  m_tokens.push_back({m_texts.size(), static_cast<std::uint32_t>(text.size()), id});
  m_texts += text;
  m_longest = std::max(m_longest, text.size());
  const std::uint32_t hash = hash_of(text);
  const std::size_t mask = m_slots.size() - 1;
  std::size_t slot = hash & mask;
  while (m_slots[slot].place != 0) slot = (slot + 1) & mask;
  m_slots[slot] = {hash, place};
  return true;
}

std::optional<TokenId> Vocabulary::find(std::string_view text) const {
  const std::uint32_t hash = hash_of(text);
  const std::size_t mask = m_slots.size() - 1;
  for (std::size_t slot = hash & mask; m_slots[slot].place != 0; slot = (slot + 1) & mask) {
    const Token& token = m_tokens[m_slots[slot].place - 1];
    if (m_slots[slot].hash == hash && text_of(token) == text) return token.id;
  }
  return std::nullopt;
}

std::optional<std::string_view> Vocabulary::text(TokenId id) const {
  const auto index = static_cast<std::size_t>(id);
  std::uint32_t place = 0;
  if (index < m_places.size()) {
    place = m_places[index];
  } else if (const auto found = m_far_places.find(id); found != m_far_places.end()) {
    place = found->second;
  }
  if (place == 0) return std::nullopt;
  return text_of(m_tokens[place - 1]);
}

Vocabulary read_vocabulary(const nlohmann::json& vocab, const files::JsonField& model) {
  const files::JsonField field = model.named(vocab, "vocab");
  if (!vocab.is_object() || vocab.empty()) field.fail("an object of tokens and their ids");
  const auto& members = vocab.get_ref<const nlohmann::json::object_t&>();
  Vocabulary vocabulary(members.size());
  for (const auto& [token, id] : members) {
    const files::JsonField value = field.named(id, token);
    if (!vocabulary.insert(token, value.token_id())) value.fail("an id that no other token has");
  }
  return vocabulary;
}

}  // namespace kvzap::text
