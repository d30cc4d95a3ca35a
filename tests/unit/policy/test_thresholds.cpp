// The table of thresholds beside a surrogate: its files, the thresholds and windows that a pruning
// takes from it.
#include <gtest/gtest.h>

#include <kvzap/engine/thresholds.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/json_file.hpp"
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
  table.sink = 4;
  table.windows = {{64,
                    {{0.5, -4, 0.4999, 0.01, 0.45, 0.55},
                     {0.75, -3, 0.75, 0.02, 0.7, 0.8},
                     {0.9, -3, 0.91, 0, 0.91, 0.91}}}};
  return table;
}

/// Texts of 1,500 tokens.
ThresholdTable several_windows() {
  ThresholdTable table = sample();
  table.sink = 0;
  table.windows.insert(table.windows.begin(), {128, {{0.5, -3.5, 0.5, 0, 0.5, 0.5}}});
  table.windows.push_back({8, {{0.5, -5, 0.5, 0, 0.5, 0.5}, {0.95, -1, 0.95, 0, 0.95, 0.95}}});
  table.recommended =
      ThresholdTable::Recommendation{-2, 8, 0.85, 0.8, 0.7, 0.9, 0.85, 100, "evaluation"};
  return table;
}

Pruning plain() { return Pruning::kvzap("."); }

void expect_same(const ThresholdTable& loaded, const ThresholdTable& table) {
  EXPECT_EQ(loaded.model, table.model);
  EXPECT_EQ(loaded.dtype, table.dtype);
  EXPECT_EQ(loaded.chat_template, table.chat_template);
  EXPECT_EQ(loaded.texts, table.texts);
  EXPECT_EQ(loaded.tokens, table.tokens);
  EXPECT_EQ(loaded.sink, table.sink);
  ASSERT_EQ(loaded.windows.size(), table.windows.size());
  for (std::size_t w = 0; w < table.windows.size(); ++w) {
    EXPECT_EQ(loaded.windows[w].window, table.windows[w].window);
    const std::vector<ThresholdTable::Row>&there = loaded.windows[w].rows,
          &here = table.windows[w].rows;
    ASSERT_EQ(there.size(), here.size());
    for (std::size_t i = 0; i < here.size(); ++i) {
      EXPECT_EQ(there[i].evict_ratio, here[i].evict_ratio);
      EXPECT_EQ(there[i].threshold, here[i].threshold);
      EXPECT_EQ(there[i].mean, here[i].mean);
      EXPECT_EQ(there[i].deviation, here[i].deviation);
      EXPECT_EQ(there[i].least, here[i].least);
      EXPECT_EQ(there[i].most, here[i].most);
    }
  }
  ASSERT_EQ(loaded.recommended.has_value(), table.recommended.has_value());
  if (!table.recommended) return;
  EXPECT_EQ(loaded.recommended->threshold, table.recommended->threshold);
  EXPECT_EQ(loaded.recommended->window, table.recommended->window);
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
  const ThresholdTable::Window table = sample().windows[0];
  EXPECT_EQ(table.threshold(0.5), -4);
  EXPECT_EQ(table.threshold(0.75), -3);
  EXPECT_EQ(table.threshold(0.9), -3);
  EXPECT_DOUBLE_EQ(table.threshold(0.625), -3.5);
  EXPECT_DOUBLE_EQ(table.threshold(0.55), -3.8);
  EXPECT_EQ(table.threshold(0.8), -3);
  ThresholdTable::Window one = table;
  one.rows.resize(1);
  EXPECT_EQ(one.threshold(0.5), -4);
}

TEST_F(Thresholds, OutsideOfTheTable) {
  const ThresholdTable table = sample();
  for (const double ratio : {0.49, 0.91, 0.0, 1.0, std::nan("")}) {
    test::expect_error(
        [&] { table.windows[0].threshold(ratio); },
        {"with a window of 64 is outside of the calibrated ones, 0.5 to 0.9", "-4.000 for 0.5"});
  }
  EXPECT_NE(
      table.text().find("0.75     -3.000            0.750      0.020            0.700  0.800"),
      std::string::npos)
      << table.text();
  test::expect_error([] { ThresholdTable::Window().threshold(0.5); }, {"empty"});
  test::expect_error([] { ThresholdTable().nearest(8); }, {"empty"});
  test::expect_error([] { ThresholdTable().window_for(0.5); }, {"empty"});
}

TEST_F(Thresholds, WriteAndLoad) {
  const ThresholdTable table = sample();
  table.write(file());
  expect_same(ThresholdTable::load(file()), table);
  // A new file takes the old one's place: whoever has that open still reads it whole.
  const fs::path old = m_folder.path() / "old";
  fs::create_hard_link(file(), old);
  ThresholdTable other = table;
  other.windows[0].rows.resize(1);
  other.write(file());
  EXPECT_EQ(ThresholdTable::load(file()).windows[0].rows.size(), 1u);
  EXPECT_EQ(ThresholdTable::load(old).windows[0].rows.size(), 3u);
  EXPECT_EQ(files(), 2u);
}

TEST_F(Thresholds, VersionsOfFiles) {
  const auto version = [&](const ThresholdTable& table) {
    table.write(file());
    expect_same(ThresholdTable::load(file()), table);
    return files::read_json_object(file()).at("format_version").get<int>();
  };
  ThresholdTable table = several_windows();
  EXPECT_EQ(version(table), 2);
  EXPECT_FALSE(files::read_json_object(file()).contains("rows"));
  // Earlier readers take one window, which is the recommendation's, too.
  table.windows = {table.windows[2]};
  EXPECT_EQ(version(table), 1);
  table.recommended->window = 32;
  EXPECT_EQ(version(table), 2);
  table.recommended.reset();
  EXPECT_EQ(version(table), 1);
  // Earlier writers did not say the recommendation's window.
  table.recommended = several_windows().recommended;
  EXPECT_EQ(version(table), 1);
  json earlier = files::read_json_object(file());
  earlier["recommended"].erase("window");
  m_folder.write("thresholds.json", earlier.dump());
  EXPECT_EQ(ThresholdTable::load(file()).recommended->window, 8);
}

TEST_F(Thresholds, WindowOfARatio) {
  const ThresholdTable table = several_windows();  // 1,500 tokens
  EXPECT_EQ(table.window_for(0), 128);
  EXPECT_EQ(table.window_for(0.65), 128);  // a quarter of 525 rows is 131
  EXPECT_EQ(table.window_for(0.66), 64);   // 127
  EXPECT_EQ(table.window_for(0.82), 64);   // 67
  EXPECT_EQ(table.window_for(0.83), 8);
  EXPECT_EQ(table.window_for(0.999), 8);
  for (const auto& [window, nearest] : std::vector<std::pair<int, int>>{
           {128, 128}, {64, 64}, {8, 8}, {1, 8}, {36, 64}, {35, 8}, {5000, 128}}) {
    EXPECT_EQ(table.nearest(window).window, nearest) << window;
  }
  EXPECT_NE(table.text().find("window 128:\n"), std::string::npos) << table.text();
  EXPECT_NE(table.text().find("recommended: -2.000 with a window of 8;"), std::string::npos);
  EXPECT_EQ(sample().text().find("window"), std::string::npos);
}

TEST_F(Thresholds, PruningsLookUpTheirWindow) {
  several_windows().write(file());
  const std::string folder = m_folder.path().string();
  const auto found = [&](Pruning pruning) {
    pruning.surrogate = folder;
    return look_up_threshold(pruning);
  };
  Pruning pruning = plain().evict_ratio(0.5);
  EXPECT_EQ(found(pruning).threshold, -3.5);
  pruning.window = 8;
  EXPECT_EQ(found(pruning).threshold, -5);
  EXPECT_TRUE(found(pruning).warnings.empty());
  pruning.window = 10;  // the nearest one, with a warning
  EXPECT_EQ(found(pruning).threshold, -5);
  ASSERT_EQ(found(pruning).warnings.size(), 1u);
  EXPECT_NE(found(pruning).warnings[0].find("was calibrated with window 8, but window is 10"),
            std::string::npos);
  pruning.amount.evict_ratio = 0.95;
  EXPECT_EQ(found(pruning).threshold, -1);
  pruning.window = 128;
  test::expect_error([&] { found(pruning); },
                     {"thresholds.json", "0.95 with a window of 128 is outside"});
  pruning = plain().recommended_threshold();
  EXPECT_EQ(found(pruning).threshold, -2);
  ASSERT_EQ(found(pruning).warnings.size(), 1u);
  EXPECT_NE(found(pruning).warnings[0].find("window 8, but window is 128"), std::string::npos);
  EXPECT_NE(found(pruning).warnings[0].find("window auto takes 8"), std::string::npos);
  pruning.window = 8;
  EXPECT_TRUE(found(pruning).warnings.empty());
  pruning.mode = PruneMode::always;
  pruning.window = 128;
  EXPECT_TRUE(found(pruning).warnings.empty());
}

TEST_F(Thresholds, AutoWindows) {
  several_windows().write(file());
  const std::string folder = m_folder.path().string();
  const auto resolved = [&](const std::string& text) {
    Pruning pruning = Pruning::parse(text);
    pruning.auto_window = true;
    if (pruning.has_policy()) pruning.surrogate = folder;
    resolve_threshold(pruning, Communicator::self());
    EXPECT_FALSE(pruning.auto_window);
    return std::pair(pruning.window, pruning.amount.threshold);
  };
  using Found = std::pair<int, std::optional<double>>;
  EXPECT_EQ(resolved("kvzap@evict-ratio=0.5"), (Found{128, -3.5}));
  EXPECT_EQ(resolved("kvzap@evict-ratio=0.7"), (Found{64, static_cast<float>(-3.2)}));
  EXPECT_EQ(resolved("kvzap@evict-ratio=0.95"), (Found{8, -1}));
  EXPECT_EQ(resolved("kvzap@threshold=auto"), (Found{8, -2}));
  // The recommended one, for whatever has no thresholds of its own.
  EXPECT_EQ(resolved("kvzap@threshold=-4"), (Found{8, -4}));
  EXPECT_EQ(resolved("kvzap+ada@evict-ratio=0.5"), (Found{8, std::nullopt}));
  EXPECT_EQ(resolved("kvzap@keep-tokens=5"), (Found{8, std::nullopt}));
  // Generated text needs the largest one.
  EXPECT_EQ(resolved("kvzap@evict-ratio=0.5@prune=always"), (Found{128, -3.5}));
  EXPECT_EQ(resolved("kvzap@threshold=auto@prune=always"), (Found{128, -2}));
  EXPECT_EQ(resolved("kvzap@threshold=-4@prune=always"), (Found{128, -4}));
  // Nothing is evicted: no file is read.
  EXPECT_EQ(resolved("@prune=none"), (Found{128, std::nullopt}));

  ThresholdTable table = several_windows();
  table.recommended.reset();
  table.write(file());
  EXPECT_EQ(resolved("kvzap@evict-ratio=0.7").first, 64);
  for (const char* text :
       {"kvzap@threshold=-4", "kvzap@threshold=auto", "kvzap+ada@evict-ratio=0.5"}) {
    test::expect_error([&] { resolved(text); },
                       {"window auto: ", "thresholds.json: expected the field recommended",
                        "kvzap calibrate --evaluation", "give window a number"});
  }
  fs::remove(file());
  test::expect_error([&] { resolved("kvzap@threshold=-4"); },
                     {"window auto: ", "thresholds.json", "does not exist", "kvzap calibrate",
                      "give window a number"});
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
  const json good = files::read_json_object(file());
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
  refuse(with("format_version", 3), "format_version", "a whole number from 1 to 2, found 3");
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
  refuse(with("format_version", 2), "windows", "a list");  // whose fields are others
  m_folder.write("thresholds.json", "{\"format\": ");
  test::expect_error([&] { ThresholdTable::load(file()); }, {"thresholds.json", "JSON"});
  fs::remove(file());
  test::expect_error([&] { ThresholdTable::load(file()); }, {"thresholds.json: no such file"});
}

TEST_F(Thresholds, MalformedWindows) {
  several_windows().write(file());
  const json good = files::read_json_object(file());
  const auto refuse = [&](const std::string& pointer, const json& value, std::string_view field,
                          std::string_view expected) {
    json changed = good;
    changed[json::json_pointer(pointer)] = value;
    m_folder.write("thresholds.json", changed.dump());
    test::expect_error(
        [&] { ThresholdTable::load(file()); },
        {"thresholds.json: ", field, std::string("expected ") + std::string(expected)});
  };
  refuse("/format_version", 1, "window", "a whole number from 1");
  refuse("/windows", nullptr, "windows", "a list");
  refuse("/windows", json::array(), "windows", "a list");
  refuse("/windows", 3, "windows", "a list");
  refuse("/windows/1", 3, "windows[1]", "an object");
  refuse("/windows/1/window", nullptr, "windows[1].window", "a whole number");
  refuse("/windows/1/window", 0, "windows[1].window", "a whole number from 1 to 16777216");
  refuse("/windows/0/window", 1 << 25, "windows[0].window", "a whole number from 1 to 16777216");
  refuse("/windows/1/window", 8.5, "windows[1].window", "a whole number");
  refuse("/windows/1/window", "64", "windows[1].window", "a whole number");
  refuse("/windows/1/window", 128, "windows[1].window", "less than 128");
  refuse("/windows/1/window", 7, "windows[2].window", "less than 7");
  refuse("/windows/2/rows", json::array(), "windows[2].rows", "a list");
  refuse("/windows/2/rows", nullptr, "windows[2].rows", "a list");
  refuse("/windows/2/rows/1/threshold", -6, "windows[2].rows[1].threshold", "at least -5");
  refuse("/windows/2/rows/0/mean", 2, "windows[2].rows[0].mean", "a number from 0 to 1");
  refuse("/recommended/window", nullptr, "recommended.window", "a whole number");
  refuse("/recommended/window", 0, "recommended.window", "a whole number from 1");
  refuse("/recommended/window", "auto", "recommended.window", "a whole number");
  refuse("/recommended/threshold", nullptr, "recommended.threshold", "a number");
}

}  // namespace
}  // namespace kvzap
