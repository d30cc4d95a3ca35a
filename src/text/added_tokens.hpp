// Tokens that are found in a text before it is normalized and split.
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

namespace kvzap::text {

/// An entry of added_tokens in tokenizer.json: whether it must be a whole word, and whether it
/// includes the white space to its left and right.
struct AddedToken {
  TokenId id;
  bool single_word, lstrip, rstrip;
};

/// Finds added tokens in a text: the leftmost first, and of several at one place the longest.
class AddedTokenMatcher {
 public:
  /// Returns false if a token with this text exists already.
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
            std::max(begin, covered);  // the previous token may include the beginning of this one
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

  /// Returns the longest token that starts at `position`, and its length; 0 if there is none.
  std::pair<const AddedToken*, std::size_t> longest(std::string_view text,
                                                    std::size_t position) const;

 private:
  // A sorted table takes little more memory than its texts, however long they are.
  std::map<std::string, AddedToken, std::less<>> m_tokens;
  std::size_t m_longest = 0;
  std::array<bool, 256> m_first{};
};

}  // namespace kvzap::text
