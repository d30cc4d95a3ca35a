// Searches in texts whose time is linear and counted, whatever an untrusted template searches for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "jinja/value.hpp"

namespace kvzap::jinja {

/// Finds a text in others. The text must outlive the object.
class Searcher {
 public:
  Searcher(std::string_view wanted, Meter& meter);

  /// Returns the first place in `text` at or behind `from`, or npos.
  std::size_t first(std::string_view text, std::size_t from = 0);
  /// Returns the last place in `text`, or npos.
  std::size_t last(std::string_view text);

 private:
  template <bool from_right>
  std::size_t find_long(std::string_view text);

  std::string_view m_wanted;
  Meter& m_meter;
  // For each beginning (or end) of a long text, the length of its longest part that repeats.
  std::array<std::vector<std::uint32_t>, 2> m_repeats;
};

/// A set of characters.
class CharacterSet {
 public:
  explicit CharacterSet(std::string_view characters);
  bool contains(std::int32_t character) const;

 private:
  std::array<bool, 128> m_ascii{};
  std::vector<std::int32_t> m_others;  // in order
};

}  // namespace kvzap::jinja
