// Arrays of numbers from JSON and .npy files, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "files/number_table.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using Shape = std::vector<std::int64_t>;

template <class Value>
std::string bytes_of(const std::vector<Value>& values) {
  std::string bytes(values.size() * sizeof(Value), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string npy(const std::string& dict, const std::string& data, char version = 1) {
  std::string text = "\x93NUMPY";
  text += version;
  text += '\0';
  text += static_cast<char>(dict.size());
  text += '\0';
  if (version > 1) text += std::string(2, '\0');
  return text + dict + data;
}

std::string dict_of(const std::string& descr, const std::string& shape,
                    const std::string& order = "False") {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }   \n";
}

class NumberTables : public ::testing::Test {
 protected:
  files::NumberTable read(const std::string& content) {
    m_folder.write("table", content);
    return files::read_number_table(m_folder.path() / "table");
  }
  void refuse(const std::string& content, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(content.substr(0, 120));
    test::expect_error([&] { read(content); }, parts);
    test::expect_error([&] { read(content); }, {"table"});
  }

  test::TemporaryFolder m_folder;
};

TEST_F(NumberTables, JsonLists) {
  files::NumberTable table = read(" [0.5, 1, 2e-1]");
  EXPECT_EQ(table.shape, Shape({3}));
  EXPECT_EQ(table.values, (std::vector<double>{0.5, 1, 0.2}));
  table = read("[[1, 2, 3],\n [4, 5, 6]]");
  EXPECT_EQ(table.shape, Shape({2, 3}));
  EXPECT_EQ(table.values, (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(read("[[[1], [2]], [[3], [4]], [[5], [6]]]").shape, Shape({3, 2, 1}));
}

TEST_F(NumberTables, NpyFilesOfBothOrdersAndTypes) {
  const std::vector<double> c = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  files::NumberTable table = read(npy(dict_of("'<f8'", "(2, 3, 2)"), bytes_of(c)));
  EXPECT_EQ(table.shape, Shape({2, 3, 2}));
  EXPECT_EQ(table.values, c);
  EXPECT_EQ(read(npy(dict_of("'<f8'", "(2, 3, 2)"), bytes_of(c), 3)).values, c);
  // numpy.asfortranarray: the first index changes fastest.
  const std::vector<float> fortran = {1, 7, 3, 9, 5, 11, 2, 8, 4, 10, 6, 12};
  table = read(npy(dict_of("'<f4'", "(2, 3, 2)", "True"), bytes_of(fortran)));
  EXPECT_EQ(table.values, c);
  table = read(npy(dict_of("'<f4'", "(12,)"), bytes_of(fortran)));
  EXPECT_EQ(table.shape, Shape({12}));
  EXPECT_TRUE(std::isnan(read(npy(dict_of("'<f4'", "(1,)"),
                                  bytes_of<float>({std::numeric_limits<float>::quiet_NaN()})))
                             .values[0]));
}

TEST_F(NumberTables, NpyFilesOfSmallAndWholeNumbers) {
  // numpy.array([0.5, 1, 0, -2.0 ** -24], dtype="float16")
  EXPECT_EQ(
      read(npy(dict_of("'<f2'", "(4,)"), bytes_of<std::uint16_t>({0x3800, 0x3c00, 0, 0x8001})))
          .values,
      (std::vector<double>{0.5, 1, 0, -0x1p-24}));
  const auto expect = [&](const char* type, const std::string& data) {
    SCOPED_TRACE(type);
    const files::NumberTable table = read(npy(dict_of(type, "(2, 2)", "True"), data));
    EXPECT_EQ(table.shape, Shape({2, 2}));
    EXPECT_EQ(table.values, (std::vector<double>{0, 3, 1, 2}));
  };
  expect("'|i1'", bytes_of<std::int8_t>({0, 1, 3, 2}));
  expect("'<i2'", bytes_of<std::int16_t>({0, 1, 3, 2}));
  expect("'<i4'", bytes_of<std::int32_t>({0, 1, 3, 2}));
  expect("'<i8'", bytes_of<std::int64_t>({0, 1, 3, 2}));
  expect("'|u1'", bytes_of<std::uint8_t>({0, 1, 3, 2}));
  expect("'<u2'", bytes_of<std::uint16_t>({0, 1, 3, 2}));
  expect("'<u4'", bytes_of<std::uint32_t>({0, 1, 3, 2}));
  expect("'<u8'", bytes_of<std::uint64_t>({0, 1, 3, 2}));
  EXPECT_EQ(read(npy(dict_of("'<i8'", "(1,)"), bytes_of<std::int64_t>({-1}))).values,
            std::vector<double>{-1});
  EXPECT_EQ(read(npy(dict_of("'|b1'", "(2,)"), bytes_of<std::uint8_t>({1, 0}))).values,
            (std::vector<double>{1, 0}));
}

TEST_F(NumberTables, RefusedJson) {
  refuse("", {"table"});
  refuse("3", {"expected a list", "found 3"});
  refuse("{}", {"expected a list"});
  refuse("[]", {"1 or more elements"});
  refuse("[[]]", {"[0]", "1 or more elements"});
  refuse("[1, [2]]", {"[1]", "expected a number"});
  refuse("[[1], 2]", {"[1]", "expected a list", "found 2"});
  refuse("[[1, 2], [3]]", {"[1]", "expected 2 elements, found 1"});
  refuse("[[1, 2], [3, 4, 5]]", {"[1]", "expected 2 elements, found 3"});
  refuse("[1, \"2\"]", {"[1]", "expected a number"});
  refuse("[1, null]", {"[1]", "expected a number"});
  refuse("[1e999]", {"table"});
  refuse("[[[[1]]]]", {"nested up to 3"});
}

TEST_F(NumberTables, RefusedNpy) {
  const std::string data = bytes_of<double>({1, 2, 3, 4});
  refuse("\x93NUMPY", {"version 1 to 3"});
  refuse(npy(dict_of("'<f8'", "(4,)"), data, 4), {"version 1 to 3"});
  refuse(npy(dict_of("'<f8'", "(4,)"), data).substr(0, 40), {"end of the file"});
  refuse(npy("{}", data), {"'descr'"});
  refuse(npy("{'descr': '<f8'}", data), {"'fortran_order'"});
  refuse(npy("{'descr': '<f8', 'fortran_order': False}", data), {"'shape'"});
  for (const char* type : {"'<i3'", "'>f8'", "'|O'", "[('a', '<f8')]", "'<c8'", "", "'<f8"}) {
    refuse(npy(dict_of(type, "(4,)"), data),
           {"descr", "expected little-endian floats or whole numbers"});
  }
  refuse(npy(dict_of("'<f8'", "(4,)", "1"), data), {"fortran_order", "True or False"});
  for (const char* shape : {"()", "4", "(4", "(-4,)", "(0,)", "(,)", "(4.0,)", "(1, 1, 2, 2)", "",
                            "(a,)", "(99999999999999999999,)", "(9223372036854775807, 2)"}) {
    refuse(npy(dict_of("'<f8'", shape), data), {"shape", "1 to 3 positive whole numbers"});
  }
  refuse(npy(dict_of("'<f8'", "(67108864, 67108864, 67108864)"), data), {"data", "32 bytes"});
  refuse(npy(dict_of("'<f8'", "(3,)"), data), {"data", "(3,)", "32 bytes"});
  refuse(npy(dict_of("'<f8'", "(5,)"), data), {"data", "(5,)", "32 bytes"});
  refuse(npy(dict_of("'<f4'", "(2, 2)"), data), {"data", "(2, 2) values of 4 bytes"});
}

TEST_F(NumberTables, FilesThatAreNone) {
  test::expect_error([&] { files::read_number_table(m_folder.path()); }, {"is a folder"});
  test::expect_error([&] { files::read_number_table(m_folder.path() / "no"); },
                     {"cannot be opened"});
  test::expect_error([&] { files::read_number_table("/dev/zero"); }, {"too large"});
}

}  // namespace
}  // namespace kvzap
