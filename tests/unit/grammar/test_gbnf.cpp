#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grammar/gbnf.hpp"
#include "unit/grammar/reference_match.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using namespace kvzap::grammar;
using kvzap::test::expect_error;
using kvzap::test::ReferenceMatch;

TEST(Gbnf, MakesTexts) {
  const struct {
    const char* text;
    std::vector<const char*> taken, left;
  } cases[] = {
      {"root ::= \"a\" \"bc\"", {"abc"}, {"a", "abcd"}},
      {"root ::= \"a\" | \"b\" |", {"a", "b", ""}, {"ab"}},
      {"# a comment\nroot ::= first # another\n  second\nfirst ::= \"1\"\nsecond ::=\n  \"2\"",
       {"12"},
       {"1", "2"}},
      {"root ::= (\"a\" | \"b\")* [0-9]+ \"!\"?", {"1", "ab12!", "b0"}, {"a", "!", "1!!"}},
      {"root ::= \"ab\"{2} [x]{1,} \"c\"{0,2}", {"ababx", "ababxxcc"}, {"abx", "ababxccc"}},
      {"root ::= \"ab\" *", {"", "abab"}, {"a", "abb"}},
      {"root ::= [^a-c\\]\\n]", {"d", "[", "é"}, {"a", "]", "\n", "dd"}},
      {"root ::= [a-]+ [-]", {"a-", "--"}, {"b-"}},
      {"root ::= . .", {"a\n", "é\U0001F600"}, {"a", "aaa"}},
      {"root ::= \"\\\"\\\\\\n\\r\\t\\x41\\xe9\\u00e9\\U0001F600\\[\\]\"",
       {"\"\\\n\r\tA\xC3\xA9\xC3\xA9\U0001F600[]"},
       {"a"}},
      {"root ::= root \"+\" n | n\nn ::= [0-9]", {"1", "1+2+3"}, {"+", "1+"}},
      {"root ::= a \"x\"\na ::= b | \"\"\nb ::= a \"y\"", {"x", "yx", "yyx"}, {"y"}},
      {"root ::=\n  \"a\"\n  | \"b\"\n  | (\n \"c\"\n | \"d\"\n )\n", {"a", "b", "c", "d"}, {"e"}},
      {"my_rule-1 ::= \"a\"\r\nroot ::= my_rule-1{2}\r\n", {"aa"}, {"a"}},
      {"root ::= \"a\" never | \"b\"\nnever ::= never \"x\"", {"b"}, {"a", "ax"}},
      {"root ::= ((\"a\"+)?){2}", {"", "aaa"}, {"b"}},
      {"root ::= []| \"a\"", {"a"}, {""}},
      {"root ::= object\n"
       "value ::= object | array | string | number | \"true\"\n"
       "object ::= \"{\" ws (string \":\" ws value (\",\" ws string \":\" ws value)*)? \"}\" ws\n"
       "array ::= \"[\" ws (value (\",\" ws value)*)? \"]\" ws\n"
       "string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" [\"\\\\bfnrt])* \"\\\"\" ws\n"
       "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) ws\n"
       "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}",
       {R"({"a": [1, {"b": "c\n"}]})", "{}"},
       {"[]", R"({"a":})"}},
  };
  for (const auto& each : cases) {
    const Grammar grammar = read_gbnf(each.text);
    for (const char* text : each.taken) {
      EXPECT_TRUE(ReferenceMatch::matches(grammar, text)) << each.text << "\n" << text;
    }
    for (const char* text : each.left) {
      EXPECT_FALSE(ReferenceMatch::matches(grammar, text)) << each.text << "\n" << text;
    }
  }
}

TEST(Gbnf, ErrorsNameTheirPlace) {
  const struct {
    std::string text;
    const char *place, *message;
  } cases[] = {
      {"", "grammar", "'root"},
      {"a ::= \"x\"", "grammar", "'root"},
      {"root ::= a\na ::= \"é\" b", "line 2, column 11", "no rule 'b'"},
      {"root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1", "a second rule 'root'"},
      {"root ::= \"a", "line 1, column 10", "literal"},
      {"root ::= [a", "line 1, column 10", "without ']'"},
      {"root ::= [b-a]", "line 1, column 12", "wrong order"},
      {"root ::= (\"a\"", "line 1, column 10", "without ')'"},
      {"root ::= \"a\")", "line 1, column 13", "expected a part"},
      {"root ::= *", "line 1, column 10", "nothing to repeat"},
      {"root ::= \"a\"{2,1}", "line 1, column 13", "wrong order"},
      {"root ::= \"a\"{,1}", "line 1, column 14", "a count"},
      {"root ::= \"a\"{999999999999999999999}", "line 1, column 14", "100000"},
      {"root ::= \"a\"{1", "line 1, column 15", "'}'"},
      {"root ::= \"\\d\"", "line 1, column 11", "escapes"},
      {"root ::= \"\\x4\"", "line 1, column 11", "hexadecimal"},
      {"root ::= \"\\uD800\"", "line 1, column 11", "Unicode"},
      {"root ::= <think>", "line 1, column 10", "tokens"},
      {"root ::= 'a'", "line 1, column 10", "expected a part"},
      {"root = \"a\"", "line 1, column 6", "'::='"},
      {"::= \"a\"", "line 1, column 1", "name"},
      {"root ::= root \"a\"", "grammar", "no text"},
      {"root ::= (\"a\" & \"b\")", "line 1, column 15", "')'"},
      {"root ::= " + std::string(200, '('), "line 1", "100 groups"},
      {"root ::= \"a\"" + std::string(200, '*'), "line 1", "operators"},
      {std::string(max_gbnf_bytes + 1, ' '), "grammar", "at most"},
      {"root ::= \"\xFF\"", "grammar", "UTF-8"},
      {"start: \"a\" | b\nb: /[a-z]+/", "grammar", "Lark"},
      {"?start: value\n", "grammar", "Lark"},
      {"%import common.WS\n", "grammar", "Lark"},
  };
  for (const auto& each : cases) {
    expect_error([&] { read_gbnf(each.text); }, {each.place, each.message});
  }
}

}  // namespace
