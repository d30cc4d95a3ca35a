// Suggestions for misspelled names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/ascii.hpp"

namespace kvzap::files {

/// Returns the number of letters to insert, remove, replace or swap with their neighbour to make
/// `b` of `a` (optimal string alignment).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before = std::exchange(last, row);
  }
  return last[b.size()];
}

/// Returns the words of a name, which - or _ separates.
inline std::vector<std::string_view> words_of_name(std::string_view name) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find_first_of("-_", begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// Returns the edit distance if `given` may be a misspelling of `name`, else a large number. Upper
/// case counts as lower case. Each word must be similar to its counterpart: --max-tokens and
/// --keep-tokens differ in meaning, although they share most letters, and so do --top-k and
/// --top-p.
inline std::size_t misspelling(std::string_view given, std::string_view name) {
  constexpr std::size_t none = 1000;
  const auto most = [](std::size_t letters) -> std::size_t {
    return letters <= 1 ? 0 : letters <= 5 ? 1 : letters <= 7 ? 2 : 3;
  };
  const std::string given_lower = lower_case(given), name_lower = lower_case(name);
  const auto own = words_of_name(given_lower), others = words_of_name(name_lower);
  if (own.size() != others.size()) {
    const auto joined = [](const std::vector<std::string_view>& words) {
      std::string text;
      for (const std::string_view word : words) text += word;
      return text;
    };
    const std::string a = joined(own), b = joined(others);
    const std::size_t distance = edit_distance(a, b);
    return distance <= (std::max(a.size(), b.size()) >= 6 ? 1 : 0) ? distance + 1 : none;
  }
  std::size_t sum = 0;
  for (std::size_t i = 0; i < own.size(); ++i) {
    const std::size_t distance = edit_distance(own[i], others[i]);
    if (distance > most(std::max(own[i].size(), others[i].size()))) return none;
    sum += distance;
  }
  return sum <= 3 ? sum : none;
}

/// Returns the one of `names` of which `name` is most likely a misspelling, the first of equally
/// likely ones. Returns an empty text if it is a misspelling of none.
inline std::string nearest_name(std::string_view name, const std::vector<std::string>& names) {
  std::string best;
  std::size_t least = 1000;
  for (const std::string& candidate : names) {
    const std::size_t distance = misspelling(name, candidate);
    if (distance >= least) continue;
    least = distance;
    best = candidate;
  }
  return best;
}

}  // namespace kvzap::files
