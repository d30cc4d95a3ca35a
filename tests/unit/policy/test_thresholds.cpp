// The table of thresholds beside a surrogate: what it gives, and what it refuses.
#include <gtest/gtest.h>

#include <kvzap/engine/thresholds.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

ThresholdTable sample() {
  ThresholdTable table;
  table.model = "Qwen3-8B";
  table.dtype = DType::f16;
  table.chat_template = false;
  table.texts = 3;
  table.tokens = 4500;
  table.window = 64;
  table.sink = 4;
  table.rows = {{0.5, -4, 0.4999, 0.01, 0.45, 0.55},
                {0.75, -3, 0.75, 0.02, 0.7, 0.8},
                {0.9, -3, 0.91, 0, 0.91, 0.91}};
  return table;
}

class Thresholds : public ::testing::Test {
 protected:
  fs::path file() const { return ThresholdTable::file_in(m_folder.path()); }
  std::size_t files() const {
    return std::distance(fs::directory_iterator(m_folder.path()), fs::directory_iterator());
  }
  test::TemporaryFolder m_folder;
};

TEST_F(Thresholds, Interpolation) {
  const ThresholdTable table = sample();
  EXPECT_EQ(table.threshold(0.5), -4);
  EXPECT_EQ(table.threshold(0.75), -3);
  EXPECT_EQ(table.threshold(0.9), -3);
  EXPECT_DOUBLE_EQ(table.threshold(0.625), -3.5);
  EXPECT_DOUBLE_EQ(table.threshold(0.55), -3.8);
  EXPECT_EQ(table.threshold(0.8), -3);
  ThresholdTable one = table;
  one.rows.resize(1);
  EXPECT_EQ(one.threshold(0.5), -4);
}

TEST_F(Thresholds, OutsideOfTheTable) {
  const ThresholdTable table = sample();
  for (const double ratio : {0.49, 0.91, 0.0, 1.0, std::nan("")}) {
    test::expect_error([&] { table.threshold(ratio); },
                       {"outside of the calibrated ones, 0.5 to 0.9", "-4.000 for 0.5"});
  }
  EXPECT_NE(
      table.text().find("0.75     -3.000            0.750      0.020            0.700  0.800"),
      std::string::npos)
      << table.text();
  test::expect_error([] { ThresholdTable().threshold(0.5); }, {"empty"});
}

TEST_F(Thresholds, WriteAndLoad) {
  const ThresholdTable table = sample();
  table.write(file());
  const ThresholdTable loaded = ThresholdTable::load(file());
  EXPECT_EQ(loaded.model, table.model);
  EXPECT_EQ(loaded.dtype, table.dtype);
  EXPECT_EQ(loaded.chat_template, table.chat_template);
  EXPECT_EQ(loaded.texts, table.texts);
  EXPECT_EQ(loaded.tokens, table.tokens);
  EXPECT_EQ(loaded.window, table.window);
  EXPECT_EQ(loaded.sink, table.sink);
  ASSERT_EQ(loaded.rows.size(), table.rows.size());
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    EXPECT_EQ(loaded.rows[i].evict_ratio, table.rows[i].evict_ratio);
    EXPECT_EQ(loaded.rows[i].threshold, table.rows[i].threshold);
    EXPECT_EQ(loaded.rows[i].mean, table.rows[i].mean);
    EXPECT_EQ(loaded.rows[i].deviation, table.rows[i].deviation);
    EXPECT_EQ(loaded.rows[i].least, table.rows[i].least);
    EXPECT_EQ(loaded.rows[i].most, table.rows[i].most);
  }
  // A new file takes the old one's place: whoever has that open still reads it whole.
  const fs::path old = m_folder.path() / "old";
  fs::create_hard_link(file(), old);
  ThresholdTable other = table;
  other.rows.resize(1);
  other.write(file());
  EXPECT_EQ(ThresholdTable::load(file()).rows.size(), 1u);
  EXPECT_EQ(ThresholdTable::load(old).rows.size(), 3u);
  EXPECT_EQ(files(), 2u);
}

TEST_F(Thresholds, WriteFails) {
  sample().write(file());
  test::expect_error([&] { sample().write(m_folder.path() / "none" / "t.json"); },
                     {"none/t.json", "No such file"});
  // What cannot be replaced stays as it was, and nothing is left beside it.
  const fs::path taken = m_folder.path() / "taken";
  fs::create_directory(taken);
  test::expect_error([&] { sample().write(taken); }, {"taken"});
  EXPECT_TRUE(fs::is_directory(taken));
  EXPECT_EQ(files(), 2u);
}

TEST_F(Thresholds, MalformedFiles) {
  sample().write(file());
  std::ifstream stream(file());
  const json good = json::parse(stream);
  const auto refuse = [&](const json& content, std::string_view field, std::string_view expected) {
    m_folder.write("thresholds.json", content.dump());
    test::expect_error(
        [&] { ThresholdTable::load(file()); },
        {"thresholds.json: ", field, std::string("expected ") + std::string(expected)});
  };
  const auto with = [&](const char* field, const json& value) {
    json changed = good;
    changed[field] = value;
    return changed;
  };
  const auto with_row = [&](std::size_t row, const char* field, const json& value) {
    json changed = good;
    changed["rows"][row][field] = value;
    return changed;
  };
  const char* const fields[] = {"format", "format_version", "model",  "dtype", "chat_template",
                                "texts",  "tokens",         "window", "sink",  "rows"};
  for (const char* field : fields) {
    json changed = good;
    changed.erase(field);
    refuse(changed, std::string(field) + ": ", "");
    refuse(with(field, nullptr), std::string(field) + ": ", "");
    refuse(with(field, json::object()), std::string(field) + ": ", "");
  }
  refuse(with("format", "kvzap.run"), "format", "\"kvzap.thresholds\"");
  refuse(with("format_version", 2), "format_version", "a whole number from 1 to 1, found 2");
  refuse(with("dtype", "f64"), "dtype", "f32, bf16 or f16");
  refuse(with("texts", 0), "texts", "a whole number from 1");
  refuse(with("texts", 1.5), "texts", "a whole number from 1");
  refuse(with("texts", 18446744073709551615u), "texts", "a whole number from 1");
  refuse(with("tokens", -1), "tokens", "a whole number from 1");
  refuse(with("window", 0), "window", "a whole number from 1");
  refuse(with("window", std::int64_t{1} << 40), "window", "a whole number from 1 to 16777216");
  refuse(with("sink", -1), "sink", "a whole number from 0");
  refuse(with("rows", json::array()), "rows", "a list");
  refuse(with("rows", {1}), "rows[0]", "an object");
  for (const char* field : {"evict_ratio", "threshold", "mean", "deviation", "least", "most"}) {
    refuse(with_row(1, field, nullptr), std::string("rows[1].") + field, "a number");
    refuse(with_row(1, field, "0.6"), std::string("rows[1].") + field, "a number");
    json changed = good;
    changed["rows"][1].erase(field);
    refuse(changed, std::string("rows[1].") + field, "a number");
  }
  refuse(with_row(0, "evict_ratio", 0), "rows[0].evict_ratio", "a number above 0 and below 1");
  refuse(with_row(2, "evict_ratio", 1), "rows[2].evict_ratio", "a number above 0.75 and below 1");
  refuse(with_row(1, "evict_ratio", 0.5), "rows[1].evict_ratio", "a number above 0.5");
  refuse(with_row(1, "threshold", -5), "rows[1].threshold", "at least -4");
  refuse(with_row(2, "threshold", 1e39), "rows[2].threshold", "a number of size 3.4");
  refuse(with_row(0, "threshold", -1e300), "rows[0].threshold", "a number of size 3.4");
  refuse(with_row(1, "mean", 1.01), "rows[1].mean", "a number from 0 to 1");
  refuse(with_row(1, "least", -0.1), "rows[1].least", "a number from 0 to 1");
  m_folder.write("thresholds.json", "{\"format\": ");
  test::expect_error([&] { ThresholdTable::load(file()); }, {"thresholds.json", "JSON"});
  fs::remove(file());
  test::expect_error([&] { ThresholdTable::load(file()); }, {"thresholds.json: no such file"});
}

}  // namespace
}  // namespace kvzap
