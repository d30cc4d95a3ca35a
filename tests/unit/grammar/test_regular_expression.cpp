#include <gtest/gtest.h>

#include <random>
#include <regex>
#include <string>
#include <vector>

#include "grammar/json_strings.hpp"
#include "grammar/regular_expression.hpp"
#include "grammar/regular_match.hpp"
#include "unit/grammar/reference_match.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using namespace kvzap::grammar;
using kvzap::test::expect_error;
using kvzap::test::ReferenceMatch;

struct PatternCase {
  const char* pattern;
  std::vector<std::string> taken, left;
};

void expect_texts(const PatternCase& each, const Expr& texts) {
  for (const auto& text : each.taken) {
    EXPECT_TRUE(matches(texts, text)) << each.pattern << " " << text;
    EXPECT_TRUE(ReferenceMatch::matches(texts, text)) << each.pattern << " " << text;
  }
  for (const auto& text : each.left) {
    EXPECT_FALSE(matches(texts, text)) << each.pattern << " " << text;
    EXPECT_FALSE(ReferenceMatch::matches(texts, text)) << each.pattern << " " << text;
  }
}

TEST(RegularExpression, MatchesWholeTexts) {
  const PatternCase cases[] = {
      {"", {""}, {"a"}},
      {"abc", {"abc"}, {"", "ab", "abcd"}},
      {"a|bc|", {"a", "bc", ""}, {"b", "abc"}},
      {"(a|b)*c", {"c", "abac"}, {"a", "cc"}},
      {"(?:ab)+", {"ab", "abab"}, {"", "aba"}},
      {"(?<year>\\d{4})-(?P<m>\\d\\d)", {"2026-11"}, {"2026-1", "a026-11"}},
      {"a?b*?c+?", {"c", "abbcc", "bc"}, {"ab", "aac"}},
      {"a{2}", {"aa"}, {"a", "aaa"}},
      {"a{2,}", {"aa", "aaaaa"}, {"a"}},
      {"a{1,3}?", {"a", "aaa"}, {"", "aaaa"}},
      {"a{0}", {""}, {"a"}},
      {"(a?){3}", {"", "a", "aaa"}, {"aaaa"}},
      {"(?:a*)*", {"", "aaa"}, {"b"}},
      {"[a-c_]", {"a", "b", "c", "_"}, {"d", "-", "ab"}},
      {"[^a-c]", {"d", "\n", "é", "\U0001F600"}, {"a", "dd", ""}},
      {"[]", {}, {"", "a"}},
      {"[^]", {"a", "\n"}, {""}},
      {"[-a]+", {"-a"}, {"b"}},
      {"[a-]+", {"-a"}, {"b"}},
      {"[\\w-.]+", {"a-.b"}, {"!"}},
      {"[\\]\\\\]+", {"]\\"}, {"["}},
      {"[\\d\\s]+", {"1 2\t"}, {"a"}},
      {"[\\b]", {"\b"}, {"b"}},
      {"\\w+", {"aZ_9"}, {"é", "-"}},
      {"\\W\\D\\S", {"-ax"}, {"aax", "-1x", "-a "}},
      {"\\s", {" ", "\xC2\xA0", "\xEF\xBB\xBF"}, {"a"}},
      {".", {"a", "é"}, {"\n", "\r", "\xE2\x80\xA8", "ab"}},
      {"\\t\\n\\r\\f\\v\\0", {std::string("\t\n\r\f\v\0", 6)}, {""}},
      {"\\x41\\u00e9\\u{1F600}\\cJ", {"Aé\U0001F600\n"}, {"A"}},
      {"\\uD83D\\uDE00", {"\U0001F600"}, {"a"}},
      {"[\\u{1F600}-\\u{1F602}]", {"\U0001F601"}, {"\U0001F603"}},
      {"\\.\\/\\-\\$\\^", {"./-$^"}, {"a/-$^"}},
      {"{}]", {"{}]"}, {"{}"}},
      {"a{x}", {"a{x}"}, {"a"}},
      {"\\p{L}+", {"aÄж"}, {"1"}},
      {"\\p{Lu}\\p{Ll}", {"Äa"}, {"aÄ"}},
      {"\\P{L}[\\p{Nd}_]", {"15", "-_"}, {"a1"}},
      {"\\p{Letter}\\p{gc=P}", {"a!"}, {"a1"}},
      {"^abc$", {"abc"}, {"abcd"}},
      {"^a|b$|^$", {"a", "b", ""}, {"ab"}},
      {"(^a|b)c", {"ac", "bc"}, {"c"}},
      {"a^b", {}, {"ab", "a^b"}},
      {"(|a)^b", {"b"}, {"ab"}},
      {"a$|(b$)?", {"a", "b", ""}, {"ab"}},
      {"é", {"é"}, {"\xC3", "e"}},
  };
  for (const PatternCase& each : cases) {
    expect_texts(each, read_regular_expression(each.pattern, code_point));
  }
}

TEST(RegularExpression, SearchesUnlessBound) {
  const PatternCase cases[] = {
      {"b", {"b", "abc", "\nb\n"}, {"", "ac"}},
      {"^b", {"b", "bc"}, {"ab"}},
      {"b$", {"b", "ab"}, {"ba", "b\n"}},
      {"^b$", {"b"}, {"ab", "ba", "b\n"}},
      {"^a|b$", {"a", "ax", "xb"}, {"xa", "bx"}},
      {"(^|,)a(,|$)", {"a", "x,a", "a,x", "x,a,x"}, {"xa", "ax"}},
      {"^(a$|b)", {"a", "b", "bx"}, {"ax"}},
      {"(^a)?b", {"ab", "b", "xab"}, {"a"}},
      {"", {"", "x"}, {}},
      {"^", {"", "x"}, {}},
      {"$^", {""}, {"x"}},
  };
  for (const PatternCase& each : cases) {
    expect_texts(each, read_regular_expression(each.pattern, code_point, Extent::search));
  }
}

TEST(RegularExpression, WritesCharactersOfJsonStrings) {
  const PatternCase cases[] = {
      {"[^a]",
       {"b", "\\\"", "\\\\", "\\n", "\\u0000", "\\u001f", "é", "/", "\x7F"},
       {"a", "\"", "\\", "\n", "\\u0062", "\\/", "\\u001F"}},
      {"\\\\\"", {"\\\\\\\""}, {"\\\""}},
      {"[\\n\\t]", {"\\n", "\\t"}, {"\n", "\\r"}},
      {"[!-#]", {"!", "\\\"", "#"}, {"\"", "$"}},
  };
  for (const PatternCase& each : cases) {
    expect_texts(each, read_regular_expression(each.pattern, json_character));
  }
}

TEST(RegularExpression, RefusesByName) {
  const struct {
    std::string pattern;
    const char *place, *message;
  } cases[] = {
      {"ab(?=c)", "byte 2", "lookahead"},
      {"(?!c)", "byte 0", "lookahead"},
      {"(?<=c)", "byte 0", "lookbehind"},
      {"(?<!c)", "byte 0", "lookbehind"},
      {"(a)\\1", "byte 3", "back references"},
      {"\\k<a>", "byte 0", "back references"},
      {"(?P=a)", "byte 0", "back references"},
      {"\\bword", "byte 0", "\\b"},
      {"a\\B", "byte 1", "\\B"},
      {"(?i)a", "byte 0", "flags"},
      {"(?>a)", "byte 0", "kinds of groups"},
      {"(?<a", "byte 0", "name"},
      {"a**", "byte 2", "quantifier"},
      {"a+{2}", "byte 2", "quantifier"},
      {"*a", "byte 0", "nothing to repeat"},
      {"(+)", "byte 1", "nothing to repeat"},
      {"a{3,2}", "byte 1", "wrong order"},
      {"a{100001}", "byte 2", "100000"},
      {"a{,3}", "byte 1", "'{,'"},
      {"a{1x}", "byte 3", "'}'"},
      {"(^a)*", "byte 0", "anchor"},
      {"(a", "byte 0", "without ')'"},
      {"a)", "byte 1", "without '('"},
      {"[a", "byte 0", "without ']'"},
      {"[b-a]", "byte 2", "wrong order"},
      {"[a-\\d]", "byte 2", "class of characters"},
      {"\\", "byte 1", "too early"},
      {"\\xG1", "byte 0", "hexadecimal"},
      {"\\u12", "byte 0", "hexadecimal"},
      {"\\u{110000}", "byte 0", "Unicode"},
      {"\\uD800", "byte 0", "surrogate"},
      {"\\01", "byte 0", "octal"},
      {"\\c1", "byte 0", "\\cA"},
      {"\\A", "byte 0", "\\A"},
      {"\\p{Greek}", "byte 0", "general category"},
      {"\\pL", "byte 0", "{…}"},
      {"\xFF", "byte 0", "UTF-8"},
      {std::string(max_pattern_bytes + 1, 'a'), "byte 0", "65536"},
      {std::string(5'000, '('), "byte", "100 groups"},
  };
  for (const auto& each : cases) {
    expect_error([&] { read_regular_expression(each.pattern, code_point); },
                 {"regular expression", each.place, each.message});
  }
}

/// Texts over a and b, in the syntax that std::regex has, too.
std::string random_pattern(std::mt19937& random, int depth) {
  const auto below = [&](unsigned count) { return random() % count; };
  if (depth == 0) {
    const char* atoms[] = {"a", "b", ".", "[ab]", "[^a]", ""};
    return atoms[below(6)];
  }
  const std::string part = random_pattern(random, depth - 1);
  switch (below(5)) {
    case 0:
      return "(?:" + part + "|" + random_pattern(random, depth - 1) + ")";
    case 1: {
      const char* counts[] = {"*", "+", "?", "{2}", "{1,2}", "{2,}"};
      return "(?:" + part + ")" + counts[below(6)];
    }
    default:
      return part + random_pattern(random, depth - 1);
  }
}

TEST(RegularExpression, RandomPatternsMatchAsInTheStandardLibrary) {
  std::mt19937 random(7);
  for (int round = 0; round < 100; ++round) {
    std::string pattern = random_pattern(random, 3);
    if (round % 4 == 1) pattern = "^" + pattern;
    if (round % 3 == 1) pattern += "$";
    const Expr whole = read_regular_expression(pattern, code_point);
    const Expr part = read_regular_expression(pattern, code_point, Extent::search);
    const std::regex reference(pattern);
    for (unsigned bits = 1; bits < 64; ++bits) {
      std::string text;  // all of up to 5 letters
      for (unsigned left = bits; left > 1; left >>= 1U) text += (left & 1U) != 0 ? 'a' : 'b';
      ASSERT_EQ(matches(whole, text), std::regex_match(text, reference)) << pattern << " " << text;
      ASSERT_EQ(matches(part, text), std::regex_search(text, reference)) << pattern << " " << text;
    }
  }
}

}  // namespace
