// Methods of strings.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "jinja/evaluator.hpp"
#include "jinja/formatting.hpp"
#include "jinja/methods.hpp"
#include "jinja/search.hpp"
#include "jinja/unicode.hpp"

namespace kvzap::jinja::string_methods {
namespace {

std::string_view bytes_of(const Value& value) { return value.text()->bytes; }

Value text(Evaluator& evaluator, std::string_view bytes) {
  return evaluator.make_text(std::string(bytes));
}

Value list_of(Evaluator& evaluator, const std::vector<std::string_view>& pieces,
              Sequence::Shape shape = Sequence::Shape::list) {
  std::vector<Value> values;
  values.reserve(pieces.size());
  for (const std::string_view piece : pieces) values.push_back(text(evaluator, piece));
  return evaluator.make_sequence(std::move(values), shape);
}

template <Ends ends>
Value strip(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("strip", arguments, {""});
  const bool has_characters = given[0] && !given[0]->is_none();
  evaluator.meter().step(self.text()->length / 16);
  return text(evaluator, stripped(bytes_of(self), ends,
                                  has_characters ? std::optional(given.text(0)) : std::nullopt));
}

template <std::string (*map)(std::string_view)>
Value mapped(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("a string's method", arguments, {});
  evaluator.meter().step(self.text()->length / 16);
  return evaluator.make_text(map(bytes_of(self)));
}

/// Parts of a text, counted by the meter.
class Pieces {
 public:
  explicit Pieces(Meter& meter) : m_meter(meter) {}

  std::size_t size() const { return m_pieces.size(); }
  void add(std::string_view piece) {
    m_meter.allocate(sizeof(piece));
    m_pieces.push_back(piece);
  }
  /// Returns the pieces in order of the text.
  std::vector<std::string_view> take(bool from_right) {
    if (from_right) std::reverse(m_pieces.begin(), m_pieces.end());
    return std::move(m_pieces);
  }

 private:
  Meter& m_meter;
  std::vector<std::string_view> m_pieces;
};

/// Splits at white space.
std::vector<std::string_view> words_of(std::string_view bytes, std::int64_t most, bool from_right,
                                       Meter& meter) {
  Pieces words(meter);
  const Ends ends = from_right ? Ends::right : Ends::left;
  for (bytes = stripped(bytes, ends); !bytes.empty(); bytes = stripped(bytes, ends)) {
    if (most >= 0 && static_cast<std::int64_t>(words.size()) == most) {
      words.add(bytes);
      break;
    }
    std::size_t begin = 0, end = bytes.size();
    if (from_right) {
      begin = end;
      while (begin > 0) {
        std::size_t previous = begin - 1;
        while (previous > 0 && (static_cast<unsigned char>(bytes[previous]) & 0xC0) == 0x80) {
          --previous;
        }
        if (is_space(character_at(bytes, previous).first)) break;
        begin = previous;
      }
      words.add(bytes.substr(begin));
      bytes = bytes.substr(0, begin);
    } else {
      end = 0;
      while (end < bytes.size()) {
        const auto [character, length] = character_at(bytes, end);
        if (is_space(character)) break;
        end += length;
      }
      words.add(bytes.substr(0, end));
      bytes = bytes.substr(end);
    }
  }
  return words.take(from_right);
}

std::vector<std::string_view> pieces_of(std::string_view bytes, std::string_view separator,
                                        std::int64_t most, bool from_right, Meter& meter) {
  Pieces pieces(meter);
  Searcher searcher(separator, meter);
  while (most < 0 || static_cast<std::int64_t>(pieces.size()) < most) {
    const std::size_t found = from_right ? searcher.last(bytes) : searcher.first(bytes);
    if (found == std::string_view::npos) break;
    const std::string_view before = bytes.substr(0, found);
    const std::string_view after = bytes.substr(found + separator.size());
    pieces.add(from_right ? after : before);
    bytes = from_right ? before : after;
  }
  pieces.add(bytes);
  return pieces.take(from_right);
}

template <bool from_right>
Value split(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("split", arguments, {"sep", "maxsplit"});
  const std::int64_t most = given.integer_or(1, -1);
  evaluator.meter().allocate(self.text()->bytes.size());
  if (given[0] == nullptr || given[0]->is_none()) {
    return list_of(evaluator, words_of(bytes_of(self), most, from_right, evaluator.meter()));
  }
  const std::string_view separator = given.text(0);
  if (separator.empty()) throw Failure("split: the separator is empty");
  return list_of(evaluator,
                 pieces_of(bytes_of(self), separator, most, from_right, evaluator.meter()));
}

template <bool from_right>
Value partition(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("partition", arguments, {""}, 1);
  const std::string_view bytes = bytes_of(self), separator = given.text(0);
  if (separator.empty()) throw Failure("partition: the separator is empty");
  Searcher searcher(separator, evaluator.meter());
  const std::size_t found = from_right ? searcher.last(bytes) : searcher.first(bytes);
  std::vector<std::string_view> parts;
  if (found != std::string_view::npos) {
    parts = {bytes.substr(0, found), separator, bytes.substr(found + separator.size())};
  } else if (from_right) {
    parts = {"", "", bytes};
  } else {
    parts = {bytes, "", ""};
  }
  return list_of(evaluator, parts, Sequence::Shape::tuple);
}

std::vector<std::string_view> lines_of(std::string_view bytes, bool keeps_ends, Meter& meter) {
  Pieces lines(meter);
  std::size_t begin = 0;
  for (std::size_t place = 0; place < bytes.size();) {
    const auto [c, length] = character_at(bytes, place);
    const std::size_t end = place;
    place += length;
    const bool ends_line = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                           c == 0x2028 || c == 0x2029;
    if (!ends_line) continue;
    if (c == '\r' && bytes.substr(place, 1) == "\n") ++place;
    lines.add(bytes.substr(begin, (keeps_ends ? place : end) - begin));
    begin = place;
  }
  if (begin < bytes.size()) lines.add(bytes.substr(begin));
  return lines.take(false);
}

Value splitlines(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("splitlines", arguments, {"keepends"});
  return list_of(evaluator, lines_of(bytes_of(self), given.flag(0), evaluator.meter()));
}

/// A substring between code points, as find() and others take it.
struct Window {
  std::string_view bytes;
  std::int64_t begin = 0;  // in code points
  bool exists = true;

  Window(const Text& text, const Parameters& given, std::size_t first, Meter& meter) {
    const auto clipped = [&](std::size_t index, std::int64_t otherwise) {
      if (given[index] == nullptr || given[index]->is_none()) return otherwise;
      const std::int64_t place = given.integer_or(index, 0);
      return std::max<std::int64_t>(place < 0 ? place + text.length : place, 0);
    };
    begin = clipped(first, 0);
    const std::int64_t end = std::min(clipped(first + 1, text.length), text.length);
    exists = begin <= end;
    if (!exists) return;
    const std::string_view all = text.bytes;
    if (begin == 0 && end == text.length) {
      bytes = all;
      return;
    }
    meter.step(static_cast<std::int64_t>(all.size() / 64));
    const std::size_t offset = offset_of(all, begin);
    bytes = all.substr(offset, offset_of(all.substr(offset), end - begin));
  }
};

template <bool ends>
bool matches(std::string_view bytes, std::string_view affix) {
  if (affix.size() > bytes.size()) return false;
  return bytes.substr(ends ? bytes.size() - affix.size() : 0, affix.size()) == affix;
}

template <bool ends>
Value has_affix(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("startswith or endswith", arguments, {"", "", ""}, 1);
  const Window window(*self.text(), given, 1, evaluator.meter());
  const auto matches_text = [&](const Value& affix) {
    evaluator.meter().step(affix.text()->length / 64);
    return window.exists && matches<ends>(window.bytes, affix.text()->bytes);
  };
  if (given[0]->is_string()) return matches_text(*given[0]);
  if (!given[0]->is(Sequence::Shape::tuple)) throw Failure("startswith and endswith need strings");
  for (const Value& affix : given[0]->sequence()->values) {
    if (!affix.is_string()) throw Failure("startswith and endswith need strings");
    if (matches_text(affix)) return true;
  }
  return false;
}

template <bool ends>
Value remove_affix(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("removeprefix or removesuffix", arguments, {""}, 1);
  std::string_view bytes = bytes_of(self);
  const std::string_view affix = given.text(0);
  if (matches<ends>(bytes, affix)) {
    ends ? bytes.remove_suffix(affix.size()) : bytes.remove_prefix(affix.size());
  }
  return text(evaluator, bytes);
}

template <bool from_right, bool must_exist>
Value find_text(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("find", arguments, {"", "", ""}, 1);
  const Window window(*self.text(), given, 1, evaluator.meter());
  std::size_t found = std::string_view::npos;
  Searcher searcher(given.text(0), evaluator.meter());
  if (window.exists)
    found = from_right ? searcher.last(window.bytes) : searcher.first(window.bytes);
  if (found != std::string_view::npos) {
    evaluator.meter().step(static_cast<std::int64_t>(found / 64));
    return window.begin + length_of(window.bytes.substr(0, found));
  }
  if (must_exist) throw Failure("index: the string does not contain the other");
  return std::int64_t{-1};
}

Value count(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("count", arguments, {"", "", ""}, 1);
  const Window window(*self.text(), given, 1, evaluator.meter());
  evaluator.meter().step(self.text()->length / 64);
  const std::string_view wanted = given.text(0);
  if (!window.exists) return std::int64_t{0};
  if (wanted.empty()) return length_of(window.bytes) + 1;
  Searcher searcher(wanted, evaluator.meter());
  std::int64_t number = 0;
  for (std::size_t place = searcher.first(window.bytes); place != std::string_view::npos;
       place = searcher.first(window.bytes, place + wanted.size())) {
    ++number;
  }
  return number;
}

Value replace(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("replace", arguments, {"", "", "count"}, 2);
  return replaced(evaluator, bytes_of(self), given.text(0), given.text(1), given.integer_or(2, -1));
}

Value join(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("join", arguments, {""}, 1);
  std::string result;
  bool is_first = true;
  for (const Value& value : evaluator.elements_of(*given[0])) {
    if (!value.is_string()) {
      throw Failure(fmt::format("join: expected strings, found {}", value.type_name()));
    }
    if (!is_first) result += bytes_of(self);
    is_first = false;
    evaluator.meter().allocate(bytes_of(self).size() + bytes_of(value).size());
    result += bytes_of(value);
  }
  return evaluator.make_text(std::move(result));
}

Value format(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  return evaluator.make_text(
      brace_formatted(evaluator, bytes_of(self), arguments, self.text()->is_safe));
}

/// Whether all characters of a string that is not empty have the property.
template <bool (*property)(std::int32_t)>
Value all(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("a string's method", arguments, {});
  evaluator.meter().step(self.text()->length / 16);
  const std::string_view bytes = bytes_of(self);
  for (std::size_t place = 0; place < bytes.size();) {
    const auto [character, length] = character_at(bytes, place);
    if (!property(character)) return false;
    place += length;
  }
  return !bytes.empty();
}

bool is_numeric(std::int32_t c) { return c != '_' && is_word(c) && !is_letter(c); }
bool is_letter_or_digit(std::int32_t c) { return c != '_' && is_word(c); }

template <bool upper_case>
Value is_case(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("isupper or islower", arguments, {});
  evaluator.meter().step(self.text()->length / 16);
  return has_case(bytes_of(self), upper_case);
}

enum class Side { left, right, both };

template <Side side>
Value justify(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("ljust, rjust or center", arguments, {"", ""}, 1);
  const std::string_view fill = given.text_or(1, " ");
  if (length_of(fill) != 1) throw Failure("the fill of a string must be one character");
  const std::int64_t missing = given.integer_or(0, 0) - self.text()->length;
  if (missing <= 0) return self;
  if (missing > 1 << 20) throw Failure("a string is too wide");
  evaluator.meter().allocate(static_cast<std::size_t>(missing) * fill.size());
  // As CPython's str.center rounds.
  const std::int64_t width = given.integer_or(0, 0);
  const std::int64_t before = side == Side::left    ? 0
                              : side == Side::right ? missing
                                                    : missing / 2 + (missing & width & 1);
  std::string result;
  for (std::int64_t i = 0; i < before; ++i) result += fill;
  result += bytes_of(self);
  for (std::int64_t i = before; i < missing; ++i) result += fill;
  return evaluator.make_text(std::move(result));
}

Value zfill(Evaluator& evaluator, const Value& self, Arguments& arguments) {
  const Parameters given("zfill", arguments, {""}, 1);
  const std::int64_t missing = given.integer_or(0, 0) - self.text()->length;
  if (missing <= 0) return self;
  if (missing > 1 << 20) throw Failure("a string is too wide");
  std::string result(bytes_of(self));
  const bool has_sign = !result.empty() && (result[0] == '-' || result[0] == '+');
  result.insert(has_sign ? 1 : 0, static_cast<std::size_t>(missing), '0');
  return evaluator.make_text(std::move(result));
}

constexpr std::pair<std::string_view, Function> table[] = {
    {"strip", strip<Ends::both>},
    {"lstrip", strip<Ends::left>},
    {"rstrip", strip<Ends::right>},
    {"split", split<false>},
    {"rsplit", split<true>},
    {"startswith", has_affix<false>},
    {"endswith", has_affix<true>},
    {"replace", replace},
    {"upper", mapped<upper>},
    {"lower", mapped<lower>},
    {"title", mapped<titled>},
    {"capitalize", mapped<capitalized>},
    {"join", join},
    {"find", find_text<false, false>},
    {"rfind", find_text<true, false>},
    {"index", find_text<false, true>},
    {"rindex", find_text<true, true>},
    {"count", count},
    {"format", format},
    {"splitlines", splitlines},
    {"removeprefix", remove_affix<false>},
    {"removesuffix", remove_affix<true>},
    {"partition", partition<false>},
    {"rpartition", partition<true>},
    {"isdigit", all<is_digit>},
    {"isdecimal", all<is_digit>},
    {"isnumeric", all<is_numeric>},
    {"isalpha", all<is_letter>},
    {"isalnum", all<is_letter_or_digit>},
    {"isspace", all<is_space>},
    {"isupper", is_case<true>},
    {"islower", is_case<false>},
    {"ljust", justify<Side::left>},
    {"rjust", justify<Side::right>},
    {"center", justify<Side::both>},
    {"zfill", zfill},
};

}  // namespace
}  // namespace kvzap::jinja::string_methods

namespace kvzap::jinja {

bool has_case(std::string_view text, bool upper_case) {
  bool found = false;
  for (std::size_t place = 0; place < text.size();) {
    const auto [character, length] = character_at(text, place);
    if (upper_case ? is_lower(character) : is_upper(character)) return false;
    found |= is_cased(character);
    place += length;
  }
  return found;
}

std::vector<std::string_view> split_lines(std::string_view text, Meter& meter) {
  return string_methods::lines_of(text, false, meter);
}

Value replaced(Evaluator& evaluator, std::string_view text, std::string_view from,
               std::string_view to, std::int64_t most) {
  std::string result;
  std::size_t place = 0;
  Searcher searcher(from, evaluator.meter());
  const auto add = [&](std::string_view piece) {
    evaluator.meter().allocate(piece.size());
    result += piece;
  };
  for (std::int64_t i = 0; i != most; ++i) {
    evaluator.meter().step();
    std::size_t found = from.empty() ? place : searcher.first(text, place);
    if (from.empty() && i > 0) {
      if (place >= text.size()) break;
      found = place + character_at(text, place).second;
    }
    if (found == std::string_view::npos) break;
    add(text.substr(place, found - place));
    add(to);
    place = found + from.size();
  }
  add(text.substr(place));
  return Value(std::move(result));
}

Function find_string_method(std::string_view name) { return find_in(string_methods::table, name); }

}  // namespace kvzap::jinja
