#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grammar/json_strings.hpp"
#include "grammar/regular_match.hpp"

namespace {

using namespace kvzap::grammar;

TEST(JsonStrings, CharactersHaveEverySpellingOrOne) {
  const Expr any = any_json_character(), one = json_character({{0, last_code_point}});
  for (const char* text : {"a", "é", "\U0001F600", "/", "\x7F", "\\\"", "\\\\", "\\n", "\\u0001"}) {
    EXPECT_TRUE(matches(any, text)) << text;
    EXPECT_TRUE(matches(one, text)) << text;
  }
  for (const char* text : {"\\/", "\\u0041", "\\u00E9", "\\uD83D\\uDE00", "\\uFFFF", "\\uD7FF"}) {
    EXPECT_TRUE(matches(any, text)) << text;
    EXPECT_FALSE(matches(one, text)) << text;
  }
  for (const char* text : {"", "\"", "\\", "\n", "\\x", "\\uD83D", "\\uDE00", "\\uD83D\\u0041"}) {
    EXPECT_FALSE(matches(any, text)) << text;
    EXPECT_FALSE(matches(one, text)) << text;
  }
}

TEST(JsonStrings, LiteralsAreCanonical) {
  EXPECT_EQ(json_string("a\"\\/\n\x01é"), R"("a\"\\/\n\u0001é")");
}

TEST(JsonStrings, Formats) {
  const struct {
    const char* name;
    std::vector<std::string> taken, left;
  } cases[] = {
      {"date",
       {"2026-11-29", "2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "0004-02-29"},
       {"2026-02-29", "1900-02-29", "0000-01-01", "2026-04-31", "2026-13-01", "2026-00-01",
        "2026-1-1", "0000-02-29"}},
      {"time",
       {"00:00:00Z", "23:59:59.123+05:30"},
       {"24:00:00Z", "12:00:60Z", "12:00:00", "12:00Z"}},
      {"date-time", {"2026-11-29T10:17:04Z"}, {"2026-11-29 10:17:04Z", "2026-11-29"}},
      {"duration",
       {"P1Y2M3DT4H5M6S", "P3W", "PT5M", "P1D", "P1YT1S"},
       {"P", "PT", "P1YT", "1D", "P1W1D", "P1Y1D"}},
      {"uuid",
       {"123e4567-e89b-12d3-a456-426614174000"},
       {"123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"}},
      {"email", {"a.b+c@example.org"}, {"a", "a@", "@b", ".a@b", "a@b..c", "a b@c"}},
      {"hostname", {"example.org", "a-1", "localhost"}, {"-a", "a-", "a..b", "", "a_b"}},
      {"ipv4", {"0.0.0.0", "255.249.199.9"}, {"256.0.0.0", "1.2.3", "01.2.3.4"}},
      {"ipv6",
       {"::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2::7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4",
        "1:2:3:4:5:6:7::"},
       {"1", ":", ":::", "1:2:3:4:5:6:7", "1::2::3", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:1.2.3.4",
        "12345::", "1:2:3:4::5:6:7:8"}},
      {"uri",
       {"https://example.org/a/b?c=d#e", "mailto:a@b.c", "http://[::1]:80/", "urn:a:b",
        "file:///a%20b"},
       {"example.org", "http://a b", "://a", "http://[::1", "a:%2"}},
  };
  for (const auto& each : cases) {
    const Expr texts = json_format(each.name);
    ASSERT_TRUE(texts) << each.name;
    for (const auto& text : each.taken) EXPECT_TRUE(matches(texts, text)) << text;
    for (const auto& text : each.left) EXPECT_FALSE(matches(texts, text)) << text;
  }
  EXPECT_FALSE(json_format("int32"));
}

}  // namespace
