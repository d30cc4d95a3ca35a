// English words, and random prose.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::detail {

/// Words between single spaces, as views of the list.
std::vector<std::string_view> words_of(std::string_view list);

/// A few hundred words each, in lower case; no word is in two lists or twice in one.
const std::vector<std::string_view>& common_nouns();
const std::vector<std::string_view>& adjectives();
const std::vector<std::string_view>& verbs();

/// At least `words` words of grammatical sentences without meaning and without digits; the same on
/// every platform.
std::string made_up_prose(std::size_t words);

}  // namespace kvzap::detail
