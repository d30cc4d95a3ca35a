// English words, and random prose.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::eval {

/// Returns the words of a list that are separated by single spaces, as views of the list.
std::vector<std::string_view> words_of(std::string_view list);

/// Lists of a few hundred words each, in lower case. No word occurs twice, in one list or in two.
const std::vector<std::string_view>& common_nouns();
const std::vector<std::string_view>& adjectives();
const std::vector<std::string_view>& verbs();

/// Returns at least `words` words of grammatical sentences without meaning and without digits. The
/// text is the same on every platform.
std::string made_up_prose(std::size_t words);

}  // namespace kvzap::eval
