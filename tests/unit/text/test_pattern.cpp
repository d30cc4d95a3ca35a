#include <gtest/gtest.h>

#include <cstddef>
#include <kvzap/model/tokenizer.hpp>
#include <string>
#include <string_view>

#include "unit/temporary_folder.hpp"
#include "unit/text/tokenizer_files.hpp"

namespace {

using kvzap::Tokenizer;
using kvzap::test::expect_error;
using kvzap::test::expect_load_error;
using kvzap::test::Json;
using kvzap::test::load;
using kvzap::test::pair_tokenizer;
using kvzap::test::split_by;

/// Number of tokens of a text, which shows where the pre-tokenizer split it.
std::size_t token_count(const std::string& regex, std::string_view text) {
  Json root = pair_tokenizer();
  root["pre_tokenizer"] = split_by(regex);
  return load(root).encode(text).size();
}

TEST(Tokenizer, WhiteSpaceClassesMatchUnicodeWhiteSpace) {
  // U+180E is white space to PCRE2, not to the reference; U+0085 is to both.
  EXPECT_EQ(token_count(R"(a\sa)", "aa\u0085aa"), 6u);
  EXPECT_EQ(token_count(R"(\s)", "a\u180ea"), 5u);
  EXPECT_EQ(token_count(R"(\S+)", "aa"), 1u);
  EXPECT_EQ(token_count(R"([^\s])", "aa"), 2u);
  EXPECT_EQ(token_count(R"([^\S])", "aa"), 1u);
  EXPECT_EQ(token_count(R"([\S])", "aa"), 2u);
  EXPECT_EQ(token_count(R"([\s-a])", "aa"), 2u);
}

TEST(Tokenizer, RegularExpressionsMeanWhatTheyMeanToOniguruma) {
  EXPECT_EQ(token_count(R"(a{,1})", "aa"), 2u);    // {,n} is {0,n}
  EXPECT_EQ(token_count(R"(^a)", "aa\naa"), 5u);   // ^ matches at each line
  EXPECT_EQ(token_count(R"(\Aa)", "aa\naa"), 4u);  // but \A, \z and \Z only at the text's ends
  EXPECT_EQ(token_count(R"(a\z)", "aa\naa"), 4u);
  EXPECT_EQ(token_count(R"(a\Z)", "aaaa\n"), 4u);
  EXPECT_EQ(token_count(R"(.)", "aa"), 2u);
  EXPECT_EQ(token_count(R"([^\v])", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\u0061)", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\x{61})", "aa"), 2u);
  EXPECT_EQ(token_count(R"((?i)A)", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\p{Latin})", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\p{^Latin})", "aa"), 1u);
  EXPECT_EQ(token_count(R"(\P{Nd}|\d|\D)", "aa"), 2u);
  EXPECT_EQ(token_count("", "aa"), 2u);  // empty matches split everywhere
}

TEST(Tokenizer, ClassesMeanWhatTheyMeanToOniguruma) {
  EXPECT_EQ(token_count(R"(\w)", "a½a"), 3u + 1u);  // bare \w has the numbers of Latin-1
  EXPECT_EQ(token_count(R"([\w])", "aa½"), 2u + 2u);
  EXPECT_EQ(token_count(R"(\W)", "aa"), 1u);
  EXPECT_EQ(token_count(R"(\h)", "aa"), 2u);
  EXPECT_EQ(token_count(R"([\h-])", "aa"), 2u);
  EXPECT_EQ(token_count(R"(a\b)", "aaa"), 2u);
  EXPECT_EQ(token_count(R"(a\B)", "aaa"), 3u);
  EXPECT_EQ(token_count(R"( ?[^(\s|[.,!?])]+)", "aa.aa"), 3u);  // the pattern of BLOOM
  EXPECT_EQ(token_count(R"([\p{L}&&[^b]])", "aa"), 2u);
  EXPECT_EQ(token_count(R"([\p{L}&&[a]&&[^a]])", "aa"), 1u);
  EXPECT_EQ(token_count(R"([^\p{L}&&[^b]])", "aa"), 1u);
}

TEST(Tokenizer, RefusesRegularExpressionsReadDifferentlyElsewhere) {
  for (const char* const regex :
       {R"([\W])",    R"([a[^b]])",  R"(\R)",          R"([\b])",       R"(\1)",
        R"(\Qa)",     R"([a-[b]])",  R"([[:alpha:]])", R"([a&&])",      R"(a{1,2}+)",
        R"([a[-b]])", R"([a[b-]c])", R"([[a]-b])",     R"([a[b[c]]])",  R"([a[b&&c]])",
        R"(a{2}?)",   R"(a{x})",     R"(a(?i)b|c)",    R"((?<n>a))",    R"((?m:a))",
        R"((*UCP)a)", R"(\p{)",      R"(\pL)",         R"(\p{sc:Han})", R"(\x{110000000})",
        R"(\xff)",    R"(\u12)",     R"([a)",          R"([]a])",       "a\\"}) {
    Json root = pair_tokenizer();
    root["pre_tokenizer"] = split_by(regex);
    expect_load_error(root, {"pre_tokenizer.pretokenizers[0].pattern.Regex", "supported syntax"});
  }
  for (const char* const regex : {"(a", "a)", "*", R"(\p{Nonsense})", R"(\x{d800})"}) {
    Json root = pair_tokenizer();
    root["pre_tokenizer"] = split_by(regex);
    expect_load_error(root, {"pre_tokenizer.pretokenizers[0].pattern.Regex"});
  }
}

TEST(Tokenizer, ReportsExceededMatchLimits) {
  Json root = pair_tokenizer();
  root["pre_tokenizer"] = split_by(R"((?:a+)+(?:a+)+[bc])");
  const Tokenizer tokenizer = load(root);
  expect_error([&] { tokenizer.encode(std::string(60, 'a')); },
               {"pre_tokenizer.pretokenizers[0].pattern.Regex", "limit"});
}

}  // namespace
