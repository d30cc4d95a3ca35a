// How texts say how many pages steps of one token read.
#include <gtest/gtest.h>

#include <kvzap/engine/engine.hpp>

#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

TEST(ReadPagesNames, AreReadAndWritten) {
  EXPECT_EQ(read_pages_from_name("all"), ReadPages());
  EXPECT_EQ(read_pages_from_name("1.0"), ReadPages());
  EXPECT_EQ(read_pages_from_name("1"), (ReadPages{1, 1}));
  EXPECT_EQ(read_pages_from_name("0.25"), (ReadPages{0, 0.25}));
  for (const char* text : {"all", "1", "16", "0.25", "0.125"}) {
    EXPECT_EQ(name_of(read_pages_from_name(text)), text);
  }
  for (const char* text :
       {"", "0", "-1", "0.0", "-0.5", "1.1", "2.0", "nan", "inf", "ALL", "0.5 ", "1e30"}) {
    test::expect_error([&] { read_pages_from_name(text); },
                       {std::string("is '") + text + "'", "expected a number of pages"});
  }
}

}  // namespace
}  // namespace kvzap
