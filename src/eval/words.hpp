// English words, and prose made of them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::detail {

/// What stands between single spaces. The words view the list.
std::vector<std::string_view> words_of(std::string_view list);

/// A few hundred words each, in lower case; no word is in two lists or twice in one.
const std::vector<std::string_view>& common_nouns();
const std::vector<std::string_view>& adjectives();
const std::vector<std::string_view>& verbs();

/// At least so many words of sentences that are grammatical and tell of nothing; the same ones on
/// every platform. There are no digits in them.
std::string made_up_prose(std::size_t words);

}  // namespace kvzap::detail
