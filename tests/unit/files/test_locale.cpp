// Nothing depends on the locale of the process. ctest runs these and other tests again in locales
// with another decimal point (KVZAP_TEST_LOCALE).
#include <gtest/gtest.h>

#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "files/ascii.hpp"
#include "files/c_locale.hpp"
#include "files/decimal.hpp"
#include "files/json_file.hpp"
#include "source_dir.hpp"

namespace kvzap::files {
namespace {

namespace fs = std::filesystem;

TEST(Locale, NumbersAreTheSameInEvery) {
  const std::string before = std::localeconv()->decimal_point;
  double number = 0;
  EXPECT_EQ(read_real("-3.5", number), DecimalFault::none);
  EXPECT_EQ(number, -3.5);
  EXPECT_EQ(read_real("-3,5", number), DecimalFault::syntax);
  EXPECT_EQ(decimal_of(0.22f), 0.22);
  EXPECT_EQ(parse_json("[0.0078125, -1.5e-3, 1234567.5]", "TEXT").dump(),
            "[0.0078125,-0.0015,1234567.5]");
  EXPECT_EQ(parse_own_json(R"({"b":1.25,"a":0.5})").dump(), R"({"b":1.25,"a":0.5})");
  {
    const CLocale guard;
    EXPECT_EQ(std::strtod("1.5", nullptr), 1.5);
    EXPECT_STREQ(std::localeconv()->decimal_point, ".");
  }
  EXPECT_EQ(std::localeconv()->decimal_point, before);
}

TEST(Locale, WordsAreThoseOfAscii) {
  EXPECT_EQ(words_of(" a\tb\r\n\vc\fd "), (std::vector<std::string_view>{"a", "b", "c", "d"}));
  EXPECT_TRUE(words_of(" \n").empty());
  EXPECT_EQ(words_of("a\xa0\x85z").size(), 1u);  // blanks in ISO 8859-1
  EXPECT_EQ(upper('i'), 'I');
  EXPECT_EQ(lower('I'), 'i');
  EXPECT_FALSE(is_letter('\xe4'));
  EXPECT_TRUE(is_letter_or_digit('7'));
}

// files/decimal.hpp and files/ascii.hpp have what to use instead.
TEST(Locale, SourcesCallNothingThatDependsOnIt) {
  const std::regex forbidden(
      R"(\b(strto(d|f|ld)|sto(d|f|ld)|atof|is(alpha|alnum|digit|space|punct|print|graph|upper|lower|xdigit)|to(lower|upper))\s*\(|printf\([^)]*%[^sduxpcz%"]*[efgaEFGA]\b|\{:[^}]*L\}|std::(regex|put_time|ostringstream))");
  // It sets the locale of its streams.
  const std::set<std::string> excepted = {"src/engine/sampler.cpp"};
  for (const char* folder : {"include", "src", "drivers", "python/src"}) {
    for (const auto& entry : fs::recursive_directory_iterator(test::source_dir() / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".cpp" && extension != ".hpp") continue;
      const std::string name = fs::relative(entry.path(), test::source_dir()).string();
      if (excepted.count(name) != 0) continue;
      std::ifstream stream(entry.path());
      int number = 0;
      for (std::string line; std::getline(stream, line);) {
        ++number;
        line.erase(std::min(line.find("//"), line.size()));
        std::smatch found;
        EXPECT_FALSE(std::regex_search(line, found, forbidden))
            << name << ":" << number << ": " << found.str();
      }
    }
  }
}

}  // namespace
}  // namespace kvzap::files
