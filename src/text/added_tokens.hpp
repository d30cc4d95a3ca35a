// Tokens that are found in a text before anything else is done with it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <kvzap/core/types.hpp>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "text/utf8.hpp"

namespace kvzap::detail {

/// An entry of tokenizer.json's added_tokens: whether it has to stand apart from words, and whether
/// it takes the white space to its left and right along.
struct AddedToken {
  TokenId id;
  bool single_word, lstrip, rstrip;
};

/// Finds added tokens in a text: leftmost first, and of those the longest.
class AddedTokenMatcher {
 public:
  /// False if there is a token of this text already.
  bool insert(std::string_view text, const AddedToken& token);

  /// Calls on_token(id) and on_text(text) in the order of the text.
  template <class OnToken, class OnText>
  void scan(std::string_view text, OnToken on_token, OnText on_text) const {
    std::size_t covered = 0;
    for (std::size_t position = 0; position < text.size();) {
      const auto [token, length] = longest(text, position);
      if (length == 0) {
        ++position;
        continue;
      }
      std::size_t begin = position, end = position + length;
      position = end;
      if (token->single_word &&
          ((begin > 0 && is_word(last_character(text.substr(0, begin)).first)) ||
           (end < text.size() && is_word(first_character(text.substr(end)).first)))) {
        continue;
      }
      if (token->lstrip) {
        while (begin > covered) {
          const auto [c, bytes] = last_character(text.substr(0, begin));
          if (!is_white_space(c)) break;
          begin -= bytes;
        }
        begin =
            std::max(begin, covered);  // the token before may have taken what this one is made of
      }
      if (token->rstrip) {
        while (end < text.size()) {
          const auto [c, bytes] = first_character(text.substr(end));
          if (!is_white_space(c)) break;
          end += bytes;
        }
      }
      if (covered < begin) on_text(text.substr(covered, begin - covered));
      if (begin < end) on_token(token->id);
      covered = end;
    }
    if (covered < text.size()) on_text(text.substr(covered));
  }

 private:
  // The longest token that starts at `position`, and its length; 0 if there is none.
  std::pair<const AddedToken*, std::size_t> longest(std::string_view text,
                                                    std::size_t position) const;

  // A sorted table takes little more than its texts, however long they are.
  std::map<std::string, AddedToken, std::less<>> m_tokens;
  std::size_t m_longest = 0;
  std::array<bool, 256> m_first{};
};

}  // namespace kvzap::detail
