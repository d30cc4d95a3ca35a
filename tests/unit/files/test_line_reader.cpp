#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "files/line_reader.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::files {
namespace {

class LineReaderTest : public ::testing::Test {
 protected:
  LineReader open(const std::string& text, std::size_t most = 1 << 20) {
    m_folder.write("lines", text);
    return {m_file, "lines", most};
  }

  const test::TemporaryFolder m_folder;
  const std::filesystem::path m_file = m_folder.path() / "lines";
};

TEST_F(LineReaderTest, ReadsEveryLineAndHashesEveryByte) {
  const std::string long_line(200000, 'x');  // longer than a block
  for (const bool ends : {true, false}) {
    const std::string text = "one\n\n" + long_line + "\n \nlast" + (ends ? "\n" : "");
    LineReader reader = open(text);
    std::vector<std::string> lines;
    while (reader.next()) lines.push_back(reader.line());
    EXPECT_EQ(lines, (std::vector<std::string>{"one", "", long_line, " ", "last"}));
    EXPECT_EQ(reader.has_end(), ends);
    EXPECT_EQ(reader.hash(), fnv1a(text));
    EXPECT_FALSE(reader.next());
    EXPECT_EQ(reader.number(), 5);
  }
  EXPECT_FALSE(open("").next());
}

TEST_F(LineReaderTest, SkipsBlankLinesAndCountsThem) {
  LineReader reader = open("\n \t\r\none\n\n\ntwo");
  ASSERT_TRUE(reader.next_text());
  EXPECT_EQ(reader.where(), m_file.string() + ": line 3");
  ASSERT_TRUE(reader.next_text());
  EXPECT_EQ(reader.line(), "two");
  EXPECT_EQ(reader.number(), 6);
  EXPECT_FALSE(reader.next_text());
}

TEST_F(LineReaderTest, ALineWithoutEndDoesNotFillTheMemory) {
  LineReader reader = open("0123456789\n" + std::string(1 << 20, 'x') + "\nnext\n", 10);
  ASSERT_TRUE(reader.next());
  try {
    reader.next();
    FAIL() << "a line of 1 MiB was read";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              m_file.string() + ": line 2: expected at most 10 bytes, found more");
  }
}

TEST_F(LineReaderTest, ObjectsAndTheirErrors) {
  LineReader reader = open("{\"a\": 1}\n[2]\nwords\n");
  const auto error = [&] {
    try {
      reader.object("a hint");
    } catch (const Error& caught) {
      return std::string(caught.what());
    }
    return std::string();
  };
  ASSERT_TRUE(reader.next_text());
  EXPECT_EQ(reader.object("").at("a"), 1);
  ASSERT_TRUE(reader.next_text());
  EXPECT_EQ(error(), m_file.string() + ": line 2: expected a JSON object, found array; a hint");
  ASSERT_TRUE(reader.next_text());
  EXPECT_NE(error().find("line 3: not valid JSON"), std::string::npos);
}

TEST_F(LineReaderTest, RefusesFoldersAndMissingFiles) {
  for (const auto& file : {m_folder.path(), m_folder.path() / "none"}) {
    try {
      LineReader reader(file, "a file of texts");
      ADD_FAILURE() << file;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), file.string() + ": cannot be read; expected a file of texts");
    }
  }
}

}  // namespace
}  // namespace kvzap::files
