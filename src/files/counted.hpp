// Numbers with their nouns.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace kvzap::files {

/// Returns the plural of an English noun: tokens, queries, batches.
inline std::string plural(std::string_view noun) {
  const auto ends_in = [&](std::string_view end) {
    return noun.size() >= end.size() && noun.substr(noun.size() - end.size()) == end;
  };
  if (ends_in("ry") || ends_in("py")) return fmt::format("{}ies", noun.substr(0, noun.size() - 1));
  return fmt::format("{}{}", noun, ends_in("ch") || ends_in("s") || ends_in("x") ? "es" : "s");
}

/// Returns "1 prompt" or "7 prompts", for messages.
template <class Number>
std::string counted(Number number, std::string_view noun) {
  return number == 1 ? fmt::format("1 {}", noun) : fmt::format("{} {}", number, plural(noun));
}

}  // namespace kvzap::files
