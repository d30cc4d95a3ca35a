#include "jinja/search.hpp"

#include <algorithm>

#include "jinja/unicode.hpp"

namespace kvzap::jinja {

namespace {

// The library's search may compare the whole text at each place. Up to this length it is faster.
constexpr std::size_t most_short = 32;

}  // namespace

Searcher::Searcher(std::string_view wanted, Meter& meter) : m_wanted(wanted), m_meter(meter) {}

std::size_t Searcher::first(std::string_view text, std::size_t from) {
  const std::string_view rest = text.substr(std::min(from, text.size()));
  const bool is_short = m_wanted.size() <= most_short;
  const std::size_t found = is_short ? rest.find(m_wanted) : find_long<false>(rest);
  const std::size_t read = std::min(found, rest.size());
  m_meter.step(1 + static_cast<std::int64_t>(read / 64));
  return found == std::string_view::npos ? found : text.size() - rest.size() + found;
}

std::size_t Searcher::last(std::string_view text) {
  const bool is_short = m_wanted.size() <= most_short;
  const std::size_t found = is_short ? text.rfind(m_wanted) : find_long<true>(text);
  const std::size_t read = found == std::string_view::npos ? text.size() : text.size() - found;
  m_meter.step(1 + static_cast<std::int64_t>(read / 64));
  return found;
}

/// The algorithm of Knuth, Morris and Pratt.
template <bool from_right>
std::size_t Searcher::find_long(std::string_view text) {
  if (m_wanted.size() > text.size()) return std::string_view::npos;
  const auto at = [](std::string_view bytes, std::size_t i) {
    return bytes[from_right ? bytes.size() - 1 - i : i];
  };
  auto& repeats = m_repeats[from_right ? 1 : 0];
  const auto advance = [&](std::size_t matched, char next) {
    while (matched > 0 && at(m_wanted, matched) != next) matched = repeats[matched - 1];
    return at(m_wanted, matched) == next ? matched + 1 : matched;
  };
  if (repeats.empty()) {
    m_meter.allocate(m_wanted.size() * sizeof(std::uint32_t));
    repeats.resize(m_wanted.size());
    for (std::size_t i = 1; i < m_wanted.size(); ++i) {
      repeats[i] = static_cast<std::uint32_t>(advance(repeats[i - 1], at(m_wanted, i)));
    }
  }
  std::size_t matched = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    matched = advance(matched, at(text, i));
    if (matched == m_wanted.size()) return from_right ? text.size() - 1 - i : i + 1 - matched;
  }
  return std::string_view::npos;
}

CharacterSet::CharacterSet(std::string_view characters) {
  for (std::size_t place = 0; place < characters.size();) {
    const auto [character, length] = character_at(characters, place);
    if (character < 128) {
      m_ascii[static_cast<std::size_t>(character)] = true;
    } else {
      m_others.push_back(character);
    }
    place += length;
  }
  std::sort(m_others.begin(), m_others.end());
}

bool CharacterSet::contains(std::int32_t character) const {
  return character < 128 ? m_ascii[static_cast<std::size_t>(character)]
                         : std::binary_search(m_others.begin(), m_others.end(), character);
}

}  // namespace kvzap::jinja
