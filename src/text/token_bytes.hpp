// The bytes of each token of a byte-level vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <kvzap/core/types.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "files/byte_alphabet.hpp"

namespace kvzap::text {

/// Tokens as bytes, decoded once from the byte alphabet.
class TokenBytes {
 public:
  /// Replaces the contents: text_of(id) returns the token of an id below `ids`, in the byte
  /// alphabet; nothing if there is none.
  template <class TextOf>
  void fill(std::size_t ids, TextOf text_of) {
    m_bytes.clear();
    m_ends.assign(1, 0);
    m_ends.reserve(ids + 1);
    for (std::size_t id = 0; id < ids; ++id) {
      if (const auto text = text_of(static_cast<TokenId>(id))) {
        files::byte_alphabet().decode(*text, m_bytes);
      }
      m_ends.push_back(m_bytes.size());
    }
  }

  /// Returns whether the table has the id.
  bool has(TokenId id) const { return id >= 0 && static_cast<std::size_t>(id) + 1 < m_ends.size(); }

  /// Returns the bytes of a token that the table has; none if no token has the id.
  std::string_view operator[](TokenId id) const {
    const auto place = static_cast<std::size_t>(id);
    return std::string_view(m_bytes).substr(m_ends[place], m_ends[place + 1] - m_ends[place]);
  }

 private:
  std::string m_bytes;
  std::vector<std::size_t> m_ends;  // of each token in m_bytes; the first is 0
};

}  // namespace kvzap::text
