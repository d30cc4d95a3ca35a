// Methods of strings.
#include "jinja/string_methods.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "jinja/evaluator.hpp"
#include "jinja/printing.hpp"

namespace kvzap::jinja {

Pieces words_of(std::string_view text, Meter& meter) {
  Pieces words;
  for (text = stripped(text); !text.empty(); text = stripped(text, Ends::left)) {
    std::size_t size = 0;
    for (const auto& [character, bytes] : Characters(text)) {
      if (is_space(character)) break;
      size += bytes.size();
    }
    meter.allocate(sizeof(text));
    words.push_back(text.substr(0, size));
    text.remove_prefix(size);
  }
  return words;
}

Pieces lines_of(std::string_view text, bool keeps_ends, Meter& meter) {
  Pieces lines;
  std::size_t begin = 0, place = 0;
  for (const auto& [c, bytes] : Characters(text)) {
    const std::size_t end = std::exchange(place, place + bytes.size());
    const bool ends_line = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                           c == 0x2028 || c == 0x2029;
    if (!ends_line) continue;
    if (c == '\n' && begin == end && end > 0 && text[end - 1] == '\r') {  // the rest of \r\n
      if (keeps_ends) lines.back() = {lines.back().data(), lines.back().size() + 1};
    } else {
      meter.allocate(sizeof(text));
      lines.push_back(text.substr(begin, (keeps_ends ? place : end) - begin));
    }
    begin = place;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

Pieces pieces_of(std::string_view text, std::string_view separator, std::int64_t most,
                 bool from_right, Meter& meter) {
  Pieces pieces;
  if (from_right) {
    meter.allocate(text.size() + separator.size());
    const std::string mirrored(text.rbegin(), text.rend());
    const std::string mirrored_separator(separator.rbegin(), separator.rend());
    pieces = pieces_of(mirrored, mirrored_separator, most, false, meter);
    for (std::string_view& piece : pieces) {
      const auto end = static_cast<std::size_t>(piece.data() - mirrored.data()) + piece.size();
      piece = text.substr(text.size() - end, piece.size());
    }
    std::reverse(pieces.begin(), pieces.end());
    return pieces;
  }
  std::size_t begin = 0, from = 0;
  while (most < 0 || static_cast<std::int64_t>(pieces.size()) < most) {
    const std::size_t found = find_text(text, separator, from, meter);
    if (found == std::string_view::npos) break;
    meter.allocate(sizeof(text));
    pieces.push_back(text.substr(begin, found - begin));
    begin = from = found + separator.size();
    if (separator.empty()) from += from < text.size() ? character_at(text, from).second : 1;
  }
  pieces.push_back(text.substr(begin));
  return pieces;
}

std::string joined(const Pieces& pieces, std::string_view separator, Meter& meter) {
  std::string result;
  for (const std::string_view& piece : pieces) {
    const std::string_view before = &piece == &pieces.front() ? "" : separator;
    meter.allocate(before.size() + piece.size());
    result.append(before).append(piece);
  }
  return result;
}

std::string escaped(std::string_view text) {
  constexpr std::string_view special = "&<>\"'";
  constexpr std::string_view entities[] = {"&amp;", "&lt;", "&gt;", "&#34;", "&#39;"};
  std::string result;
  for (const char c : text) {
    const std::size_t found = special.find(c);
    result += found == special.npos ? std::string_view(&c, 1) : entities[found];
  }
  return result;
}

std::string justified(const Call& call, std::string_view text, std::int64_t width,
                      std::string_view fill, Ends side) {
  if (length_of(fill) != 1) call.fail("the fill of a string must be one character");
  const std::int64_t missing = std::max<std::int64_t>(width - length_of(text), 0);
  if (missing > 1 << 20) call.fail("a string is too wide");
  call.meter.allocate(static_cast<std::size_t>(missing) * fill.size());
  // As CPython's str.center rounds.
  const std::int64_t before = side == Ends::left    ? 0
                              : side == Ends::right ? missing
                                                    : missing / 2 + (missing & width & 1);
  std::string result;
  for (std::int64_t i = 0; i < before; ++i) result += fill;
  result += text;
  for (std::int64_t i = before; i < missing; ++i) result += fill;
  return result;
}

}  // namespace kvzap::jinja

namespace kvzap::jinja::string_methods {
namespace {

std::string_view bytes_of(const Value& value) { return value.text()->bytes; }

/// Returns the object's text after it counts steps for it.
std::string_view read(Call& c) {
  c.meter.step(c.self.text()->length / 16);
  return bytes_of(c.self);
}

Value text(Call& c, std::string_view bytes) { return c.evaluator.make_text(std::string(bytes)); }

Value list_of(Call& c, const Pieces& pieces, Sequence::Shape shape = Sequence::Shape::list) {
  std::vector<Value> values;
  values.reserve(pieces.size());
  for (const std::string_view piece : pieces) values.push_back(text(c, piece));
  return c.evaluator.make_sequence(std::move(values), shape);
}

template <Ends ends>
Value strip(Call& c) {
  return text(c, stripped(read(c), ends, c.has(0) ? std::optional(c.text(0)) : std::nullopt));
}

template <std::string (*map)(std::string_view)>
Value mapped(Call& c) {
  return c.evaluator.make_text(map(read(c)));
}

template <bool (*property)(std::string_view)>
Value has(Call& c) {
  return property(read(c));
}

/// Whether all characters of a string that is not empty have the property.
template <bool (*property)(std::int32_t)>
Value all(Call& c) {
  const std::string_view bytes = read(c);
  for (const auto& [character, piece] : Characters(bytes)) {
    if (!property(character)) return false;
  }
  return !bytes.empty();
}

bool is_letter_or_digit(std::int32_t c) { return c != '_' && is_word(c); }
bool is_numeric(std::int32_t c) { return is_letter_or_digit(c) && !is_letter(c); }

std::string_view separator_of(Call& c) {
  if (c.text(0).empty()) c.fail("the separator is empty");
  return c.text(0);
}

template <bool from_right>
Value split(Call& c) {
  const std::string_view bytes = bytes_of(c.self);
  const std::int64_t most = c.integer(1, -1);
  c.meter.allocate(bytes.size());
  if (c.has(0)) return list_of(c, pieces_of(bytes, separator_of(c), most, from_right, c.meter));
  Pieces words = words_of(bytes, c.meter);
  const std::size_t kept = most < 0 ? words.size() : static_cast<std::size_t>(most);
  if (kept >= words.size()) return list_of(c, words);
  // The other words are one piece, with the white space at the text's end or begin.
  if (from_right) {
    words.erase(words.begin(), words.end() - static_cast<std::ptrdiff_t>(kept) - 1);
    const auto begin = static_cast<std::size_t>(words[0].data() - bytes.data());
    words[0] = bytes.substr(0, begin + words[0].size());
  } else {
    words.resize(kept + 1);
    words[kept] = bytes.substr(static_cast<std::size_t>(words[kept].data() - bytes.data()));
  }
  return list_of(c, words);
}

template <bool from_right>
Value partition(Call& c) {
  const std::string_view bytes = bytes_of(c.self), separator = separator_of(c);
  const Pieces found = pieces_of(bytes, separator, 1, from_right, c.meter);
  const Pieces parts = found.size() == 2 ? Pieces{found[0], separator, found[1]}
                       : from_right      ? Pieces{"", "", bytes}
                                         : Pieces{bytes, "", ""};
  return list_of(c, parts, Sequence::Shape::tuple);
}

/// A substring between the code points of arguments 1 and 2.
struct Window {
  std::string_view bytes;
  std::int64_t begin = 0;  // in code points
  bool exists = true;

  explicit Window(Call& c) {
    const Text& text = *c.self.text();
    const auto clipped = [&](std::size_t index, std::int64_t otherwise) {
      if (!c.has(index)) return otherwise;
      const std::int64_t place = c.integer(index);
      return std::max<std::int64_t>(place < 0 ? place + text.length : place, 0);
    };
    begin = clipped(1, 0);
    const std::int64_t end = std::min(clipped(2, text.length), text.length);
    exists = begin <= end;
    bytes = text.bytes;
    if (!exists || (begin == 0 && end == text.length)) return;
    c.meter.step(static_cast<std::int64_t>(bytes.size() / 64));
    bytes.remove_prefix(offset_of(bytes, begin));
    bytes = bytes.substr(0, offset_of(bytes, end - begin));
  }
};

template <bool ends>
bool matches(std::string_view bytes, std::string_view affix) {
  return affix.size() <= bytes.size() &&
         bytes.substr(ends ? bytes.size() - affix.size() : 0, affix.size()) == affix;
}

template <bool ends>
Value has_affix(Call& c) {
  const Window window(c);
  const auto* const several =
      c[0]->is(Sequence::Shape::tuple) ? &c[0]->sequence()->values : nullptr;
  for (std::size_t i = 0; i < (several ? several->size() : 1); ++i) {
    const Value& affix = several ? (*several)[i] : *c[0];
    if (!affix.is_string()) c.fail("expected strings");
    c.meter.step(affix.text()->length / 64);
    if (window.exists && matches<ends>(window.bytes, affix.text()->bytes)) return true;
  }
  return false;
}

template <bool ends>
Value remove_affix(Call& c) {
  const std::string_view bytes = bytes_of(c.self), affix = c.text(0);
  const std::size_t removed = matches<ends>(bytes, affix) ? affix.size() : 0;
  return text(c, bytes.substr(ends ? 0 : removed, bytes.size() - removed));
}

template <bool from_right, bool must_exist>
Value find(Call& c) {
  const Window window(c);
  const Pieces found = pieces_of(window.bytes, c.text(0), 1, from_right, c.meter);
  if (window.exists && found.size() == 2) {
    c.meter.step(static_cast<std::int64_t>(found[0].size() / 64));
    return window.begin + length_of(found[0]);
  }
  if (must_exist) c.fail("the string does not contain the other");
  return -1;
}

Value count(Call& c) {
  const Window window(c);
  c.meter.step(c.self.text()->length / 64);
  const Pieces pieces = pieces_of(window.bytes, c.text(0), -1, false, c.meter);
  return window.exists ? pieces.size() - 1 : 0;
}

Value replace(Call& c) {
  const Pieces pieces = pieces_of(bytes_of(c.self), c.text(0), c.integer(2, -1), false, c.meter);
  return Value(joined(pieces, c.text(1), c.meter));
}

Value join(Call& c) {
  const std::vector<Value> elements = c.evaluator.elements_of(*c[0]);
  Pieces pieces;
  for (const Value& value : elements) {
    if (!value.is_string()) c.fail(fmt::format("expected strings, found {}", value.type_name()));
    pieces.push_back(bytes_of(value));
  }
  return c.evaluator.make_text(joined(pieces, bytes_of(c.self), c.meter));
}

Value format(Call& c) {
  return c.evaluator.make_text(
      brace_formatted(c.evaluator, bytes_of(c.self), c.arguments, c.self.text()->is_safe));
}

Value splitlines(Call& c) { return list_of(c, lines_of(bytes_of(c.self), c.flag(0), c.meter)); }

template <Ends side>
Value justify(Call& c) {
  return text(c, justified(c, bytes_of(c.self), c.integer(0), c.text(1, " "), side));
}

Value zfill(Call& c) {
  const std::string_view bytes = bytes_of(c.self);
  const std::size_t sign = !bytes.empty() && (bytes[0] == '-' || bytes[0] == '+') ? 1 : 0;
  const auto width = c.integer(0) - static_cast<std::int64_t>(sign);
  return c.evaluator.make_text(std::string(bytes.substr(0, sign)) +
                               justified(c, bytes.substr(sign), width, "0", Ends::right));
}

constexpr Builtin table[] = {{"strip", strip<Ends::both>, 0, {"_"}},
                             {"lstrip", strip<Ends::left>, 0, {"_"}},
                             {"rstrip", strip<Ends::right>, 0, {"_"}},
                             {"split", split<false>, 0, {"sep", "maxsplit"}},
                             {"rsplit", split<true>, 0, {"sep", "maxsplit"}},
                             {"startswith", has_affix<false>, 1, {"_", "_", "_"}},
                             {"endswith", has_affix<true>, 1, {"_", "_", "_"}},
                             {"replace", replace, 2, {"_", "_", "count"}},
                             {"upper", mapped<upper>},
                             {"lower", mapped<lower>},
                             {"title", mapped<titled>},
                             {"capitalize", mapped<capitalized>},
                             {"join", join, 1, {"_"}},
                             {"find", find<false, false>, 1, {"_", "_", "_"}},
                             {"rfind", find<true, false>, 1, {"_", "_", "_"}},
                             {"index", find<false, true>, 1, {"_", "_", "_"}},
                             {"rindex", find<true, true>, 1, {"_", "_", "_"}},
                             {"count", count, 1, {"_", "_", "_"}},
                             {"format", format, 0, {"*"}},
                             {"splitlines", splitlines, 0, {"keepends"}},
                             {"removeprefix", remove_affix<false>, 1, {"_"}},
                             {"removesuffix", remove_affix<true>, 1, {"_"}},
                             {"partition", partition<false>, 1, {"_"}},
                             {"rpartition", partition<true>, 1, {"_"}},
                             {"isdigit", all<is_digit>},
                             {"isdecimal", all<is_digit>},
                             {"isnumeric", all<is_numeric>},
                             {"isalpha", all<is_letter>},
                             {"isalnum", all<is_letter_or_digit>},
                             {"isspace", all<is_space>},
                             {"isupper", has<is_all_upper>},
                             {"islower", has<is_all_lower>},
                             {"ljust", justify<Ends::left>, 1, {"_", "_"}},
                             {"rjust", justify<Ends::right>, 1, {"_", "_"}},
                             {"center", justify<Ends::both>, 1, {"_", "_"}},
                             {"zfill", zfill, 1, {"_"}}};

}  // namespace
}  // namespace kvzap::jinja::string_methods

namespace kvzap::jinja {

const Builtin* find_string_method(std::string_view name) {
  return find_in(string_methods::table, name);
}

}  // namespace kvzap::jinja
