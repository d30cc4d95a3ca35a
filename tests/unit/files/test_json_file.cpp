// JSON that somebody else wrote: limits of nesting and memory, and messages that say where.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "files/c_locale.hpp"
#include "files/json_file.hpp"
#include "files/parsed_json.hpp"
#include "files/quote.hpp"

namespace {

using kvzap::files::in_quotes;
using kvzap::files::parse_json;
using kvzap::files::parse_ordered_json;
using kvzap::files::shown;

std::string message_of(const std::string& text) {
  try {
    parse_json(text, "FILE");
  } catch (const kvzap::Error& error) {
    return error.what();
  }
  return "no error";
}

std::string repeated(const std::string& text, std::size_t count) {
  std::string result;
  result.reserve(text.size() * count);
  for (std::size_t i = 0; i < count; ++i) result += text;
  return result;
}

TEST(JsonFile, ParsesAsTheLibraryDoes) {
  for (
      const std::string text :
      {"null", " [] ", "{}", "-0", "18446744073709551615", "-3", "1e300", "\"\\u00e4\\n\"",
       R"({"a": [1, 2.5, {"b": {}, "c": [[], [null, true, false]]}, "x"], "d": {"e": "f"}, "": 0})",
       R"([[1, [2, [3]]], {"k": [4, {"l": 5}], "m": 6}, 7])"}) {
    const auto parsed = parse_json(text, "FILE");
    const kvzap::files::CLocale c;  // the library aborts where a decimal point has two bytes
    EXPECT_EQ(parsed, nlohmann::json::parse(text)) << text;
    EXPECT_EQ(parse_ordered_json(text, "FILE").dump(), nlohmann::ordered_json::parse(text).dump());
  }
}

TEST(JsonFile, OrderedObjectsHaveBounds) {
  std::string text;
  for (int i = 0; i < 1024; ++i)
    text += fmt::format(R"({}"{}": {{"z": [1], "a": {{}}}})", i ? "," : "", i);
  const auto error_of = [](const std::string& body) {
    try {
      parse_ordered_json(body, "BODY");
    } catch (const kvzap::Error& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  const auto parsed = parse_ordered_json("{\"x\": {" + text + "}}", "BODY");
  EXPECT_EQ(parsed, nlohmann::ordered_json::parse("{\"x\": {" + text + "}}"));
  EXPECT_EQ(error_of("{\"x\": {" + text + ", \"y\": 1}}"),
            "BODY: too many members at x.1023: expected at most 1024");
  EXPECT_EQ(error_of(R"({"o": [{"k": 1, "b": 2, "k": 3}]})"),
            "BODY: key 'k' is given more than once at o[0].k");
  EXPECT_NE(error_of("[" + repeated("{\"a\":1},", 2000000) + "1]").find("too many values"),
            std::string::npos);
  EXPECT_EQ(kvzap::files::described(parsed["x"]["7"]), R"({"z":[1],"a":{}})");
}

TEST(JsonFile, MessagesSayWhere) {
  EXPECT_EQ(message_of("{\"a\": 1,\n \"b\": [2, {\"c\": nul}]}").substr(0, 66),
            "FILE: not valid JSON: line 2, column 20 (byte 29) at b[1].c: synta");
  EXPECT_EQ(message_of(std::string("{\"a\": 1}\0{\"a\": 2}", 17)),
            "FILE: not valid JSON: line 1, column 9 (byte 9): expected text, found a NUL byte");
  EXPECT_EQ(message_of("{\"o\": [{\"k\": 1, \"k\": 2}]}"),
            "FILE: key 'k' is given more than once at o[0].k");
  EXPECT_NE(message_of("{\"a\": 1} x").find("line 1, column 10 (byte 10)"), std::string::npos);
  EXPECT_NE(message_of("").find("line 1, column 1 (byte 1)"), std::string::npos);
  EXPECT_NE(message_of("[1e999]").find("at [0]: number overflow"), std::string::npos);
  EXPECT_NE(message_of("[\"\xff\"]").find("ill-formed UTF-8"), std::string::npos);
}

TEST(JsonFile, MessagesStayShort) {
  const std::string token = repeated("k\\u001b", 2000000);
  for (const std::string& text :
       {"{\"" + token + "\": 1, \"" + token + "\": 2}", "{\"" + token + "\": nul}", "[\"" + token,
        "[1" + token, "[" + repeated("1", 10000000) + "x]"}) {
    const std::string message = message_of(text);
    EXPECT_LT(message.size(), 700u) << message;
    EXPECT_GT(message.size(), 40u);
    EXPECT_EQ(message.find('\x1b'), std::string::npos);
  }
}

TEST(JsonFile, NestingIsLimited) {
  EXPECT_EQ(message_of(repeated("[", 64) + repeated("]", 64)), "no error");
  EXPECT_EQ(message_of(repeated("{\"a\":", 64) + "1" + repeated("}", 64)), "no error");
  EXPECT_NE(message_of(repeated("[", 50000000)).find("nested too deeply"), std::string::npos);
  EXPECT_NE(message_of(repeated("{\"a\":[", 65)).find("nested too deeply"), std::string::npos);
  EXPECT_LT(message_of(repeated("[", 200)).size(), 160);
  EXPECT_LT(message_of(repeated("{\"a\":[", 200)).size(), 160);
}

// Twenty times the text would be 240 MB.
TEST(JsonFile, MemoryIsLimited) {
  EXPECT_EQ(message_of("[" + repeated("0,", 400000) + "0]"), "no error");
  for (const std::string unit : {"[],", "{},", "\"\",", "{\"\":0},", "[0],"}) {
    EXPECT_NE(message_of("[" + repeated(unit, 4000000)).find("too many values at ["),
              std::string::npos)
        << unit;
  }
  std::string members = "{";
  for (int i = 0; i < 1500000; ++i) members += fmt::format("\"{:x}\":0,", i);
  EXPECT_NE(message_of(members).find("too many values at "), std::string::npos);
}

TEST(Quote, ShowsWhatATerminalWouldActUpon) {
  EXPECT_EQ(shown("plain ä € 😀 'x'"), "plain ä € 😀 'x'");
  EXPECT_EQ(in_quotes(std::string_view("a\0b\n\t\r\x1b[31m\x7f", 12)),
            R"('a\x00b\n\t\r\x1b[31m\x7f')");
  EXPECT_EQ(shown("\xc2\x9b \xff\xe2\x82 \xed\xa0\x80 \xf0\x80\x80\x80"),
            R"(\xc2\x9b \xff\xe2\x82 \xed\xa0\x80 \xf0\x80\x80\x80)");
  EXPECT_EQ(shown("ääää", 5), "ää…");
  EXPECT_EQ(shown("12345", 5), "12345");
  EXPECT_LE(shown(repeated("\x1b", 10000000)).size(), 400u);
}

}  // namespace
