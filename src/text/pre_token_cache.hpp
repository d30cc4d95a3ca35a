// The ids of the pre-tokens of a text. Most pre-tokens recur.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <kvzap/core/types.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::text {

/// Appends ids of pre-tokens to a list. It encodes each short pre-token once and then copies its
/// ids within the list.
class PreTokenCache {
 public:
  /// `ids`: the list, to which others may append, too.
  explicit PreTokenCache(std::vector<TokenId>& ids) : m_ids(ids), m_slots(64) {}

  /// Appends the ids of a pre-token (not empty); encode(ids) appends those of a new one.
  template <class Encode>
  void append(std::string_view text, Encode encode) {
    if (text.size() > max_bytes) return encode(m_ids);
    const auto hash = static_cast<std::uint32_t>(std::hash<std::string_view>{}(text));
    const Slot* const slot = &m_slots[place_of(text, hash)];
    if (slot->text_size != 0) {
      for (std::size_t i = 0; i < slot->ids; ++i) m_ids.push_back(m_ids[slot->first_id + i]);
      return;
    }
    const std::size_t first_id = m_ids.size();
    encode(m_ids);
    if (m_count == max_pre_tokens) return;
    if (2 * ++m_count > m_slots.size()) grow();
    m_slots[place_of(text, hash)] = {first_id, static_cast<std::uint32_t>(m_ids.size() - first_id),
                                     static_cast<std::uint32_t>(m_texts.size()),
                                     static_cast<std::uint32_t>(text.size()), hash};
    m_texts += text;
  }

 private:
  static constexpr std::size_t max_bytes = 256, max_pre_tokens = 100000;

  struct Slot {
    std::size_t first_id;  // in m_ids
    std::uint32_t ids;
    std::uint32_t text, text_size;  // in m_texts; the size is 0 in empty slots
    std::uint32_t hash;
  };

  /// Returns the index of the slot of a pre-token, or of the empty one that it would take.
  std::size_t place_of(std::string_view text, std::uint32_t hash) const {
    const std::size_t mask = m_slots.size() - 1;
    std::size_t place = hash & mask;
    for (; m_slots[place].text_size != 0; place = (place + 1) & mask) {
      const Slot& slot = m_slots[place];
      if (slot.hash == hash &&
          std::string_view(m_texts).substr(slot.text, slot.text_size) == text) {
        break;
      }
    }
    return place;
  }

  void grow() {
    std::vector<Slot> old(2 * m_slots.size());
    old.swap(m_slots);
    const std::size_t mask = m_slots.size() - 1;
    for (const Slot& slot : old) {
      if (slot.text_size == 0) continue;
      std::size_t place = slot.hash & mask;
      while (m_slots[place].text_size != 0) place = (place + 1) & mask;
      m_slots[place] = slot;
    }
  }

  std::vector<TokenId>& m_ids;
  std::string m_texts;
  std::vector<Slot> m_slots;  // a power of two; at most half of them are taken
  std::size_t m_count = 0;
};

}  // namespace kvzap::text
