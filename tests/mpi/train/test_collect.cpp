// The collector against transformers, on any number of ranks, and what it makes of a file of texts.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <kvzap/lab/collect.hpp>
#include <kvzap/model/safetensors.hpp>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden_files.hpp"
#include "source_dir.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;

const fs::path source = test::source_dir();
const fs::path goldens = source / "tests/golden/collect";
const fs::path recall = source / "inputs/models/recall-4m";

/// Takes pairs instead of a file.
class PairsInMemory final : public PairsWriter {
 public:
  explicit PairsInMemory(std::int64_t planned) : m_planned(planned) {}
  std::int64_t texts() const override { return static_cast<std::int64_t>(all.size()); }
  std::int64_t safe_texts() const override { return texts(); }
  std::int64_t planned_texts() const override { return m_planned; }
  std::int64_t bytes() const override { return 0; }
  const std::vector<std::string>& notes() const override { return m_notes; }
  void append(const TextPairs& text) override { all.push_back(text); }
  void close() override { is_closed = true; }

  std::vector<TextPairs> all;
  bool is_closed = false;

 private:
  std::int64_t m_planned;
  std::vector<std::string> m_notes;
};

CollectRules all_of_each() {
  CollectRules rules;
  rules.tokens_per_text = 1 << 20;
  rules.min_tokens = 1;
  return rules;
}

CollectTexts read(const fs::path& model, const fs::path& file, const CollectRules& rules) {
  return read_collect_texts(file, rules, Tokenizer::load(model), ChatTemplate::detect(model),
                            ModelConfig::load(model));
}

void expect_goldens(const fs::path& folder) {
  const Communicator comm = Communicator::world();
  const auto golden =
      SafetensorsFolder::open(goldens / (folder.filename().string() + ".safetensors"));
  const CollectTexts texts = read(folder, goldens / "texts.jsonl", all_of_each());
  ASSERT_EQ(texts.texts.size(), 3u);
  const ModelConfig config = ModelConfig::load(folder);
  if (comm.size() > config.num_key_value_heads) GTEST_SKIP() << "more ranks than heads";
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const Model>(
      Model::load(folder, config, DType::f32, partition, comm.rank(), {std::nullopt, {}}));
  PairsInMemory writer(3);
  const CollectResult result = collect_pairs(
      model, comm.is_root() ? texts.texts : std::vector<CollectText>{}, writer, comm, nullptr);
  EXPECT_TRUE(writer.is_closed);
  EXPECT_EQ(result.texts, 3);
  EXPECT_EQ(result.non_finite_scores, 0);
  ASSERT_EQ(writer.all.size(), 3u);
  const std::vector<int>& heads = partition.heads(0, comm.rank());
  for (std::size_t t = 0; t < 3; ++t) {
    const CollectText& text = texts.texts[t];
    const std::string name = std::to_string(t);
    const auto ids = kvzap::golden::tensor<std::int64_t>(golden, name + ".ids");
    EXPECT_EQ(std::vector<std::int64_t>(text.ids.begin(), text.ids.end()), ids);
    EXPECT_EQ((std::vector<std::int64_t>{text.text_begin, text.text_end, text.repeat_begin,
                                         text.repeat_end}),
              kvzap::golden::tensor<std::int64_t>(golden, name + ".extents"));
    const auto pairs = static_cast<std::size_t>(text.text_end - text.text_begin);
    const auto scores = kvzap::golden::tensor<float>(golden, name + ".scores");
    const auto hidden = kvzap::golden::tensor<float>(golden, name + ".hidden");
    const auto of_hidden = kvzap::golden::tensor<std::int64_t>(golden, name + ".of_hidden");
    const auto columns = static_cast<std::size_t>(config.hidden_size);
    const auto kv_heads = static_cast<std::size_t>(config.num_key_value_heads);
    ASSERT_EQ(text.positions.size(), pairs);
    for (std::size_t l = 0; l < writer.all[t].layers.size(); ++l) {
      const TextPairs::Layer& layer = writer.all[t].layers[l];
      ASSERT_EQ(layer.scores.size(), pairs * heads.size());
      for (std::size_t p = 0; p < pairs; ++p) {
        for (std::size_t h = 0; h < heads.size(); ++h) {
          ASSERT_NEAR(layer.scores[p * heads.size() + h],
                      scores[(l * pairs + p) * kv_heads + heads[h]], 1e-3)
              << "text " << t << ", layer " << l << ", position " << p << ", head " << heads[h];
        }
      }
      ASSERT_EQ(layer.hidden.size(), pairs * columns * sizeof(float));
      for (std::size_t i = 0; i < of_hidden.size(); ++i) {
        std::vector<float> row(columns);
        std::memcpy(row.data(), layer.hidden.data() + of_hidden[i] * columns * sizeof(float),
                    columns * sizeof(float));
        for (std::size_t c = 0; c < columns; ++c) {
          ASSERT_NEAR(row[c], hidden[(l * of_hidden.size() + i) * columns + c], 1e-3)
              << "text " << t << ", layer " << l << ", position " << of_hidden[i];
        }
      }
    }
  }
}

TEST(Collect, MatchesGoldensOfRecall) { expect_goldens(recall); }
TEST(Collect, MatchesGoldensOfQwen2) {
  expect_goldens(source / "tests/golden/models/qwen2-random");
}

TEST(Collect, StopsAfterATextAndGoesOn) {
  const Communicator comm = Communicator::world();
  CollectRules rules = all_of_each();
  rules.tokens_per_text = 10;
  const CollectTexts texts = read(recall, goldens / "texts.jsonl", rules);
  const ModelConfig config = ModelConfig::load(recall);
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const Model>(
      Model::load(recall, config, DType::bf16, partition, comm.rank(), {std::nullopt, {}}));
  PairsInMemory writer(3);
  // The last rank alone wants to stop.
  const CollectResult first = collect_pairs(model, texts.texts, writer, comm,
                                            [&] { return comm.rank() + 1 == comm.size(); });
  EXPECT_TRUE(first.stopped);
  EXPECT_EQ(writer.texts(), 1);
  const CollectResult second = collect_pairs(model, texts.texts, writer, comm, nullptr);
  EXPECT_FALSE(second.stopped);
  EXPECT_EQ(second.texts, 2);
  EXPECT_EQ(second.pairs, 20);
  EXPECT_EQ(writer.texts(), 3);
  // A sample is part of the whole.
  PairsInMemory whole(3);
  const CollectTexts all = read(recall, goldens / "texts.jsonl", all_of_each());
  collect_pairs(model, all.texts, whole, comm, nullptr);
  const std::size_t row = static_cast<std::size_t>(config.hidden_size) * sizeof(bfloat16);
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t i = 0; i < 10; ++i) {
      const auto position = static_cast<std::size_t>(texts.texts[t].positions[i]);
      EXPECT_EQ(std::memcmp(writer.all[t].layers[3].hidden.data() + i * row,
                            whole.all[t].layers[3].hidden.data() + position * row, row),
                0);
    }
  }
}

// ---- Files of texts: one process alone ----------------------------------------------------------

class CollectTextsTest : public ::testing::Test {
 protected:
  CollectTextsTest() {
    std::string pattern = (fs::temp_directory_path() / "kvzap-XXXXXX").string();
    m_folder = ::mkdtemp(pattern.data());
  }
  ~CollectTextsTest() override { fs::remove_all(m_folder); }

  CollectTexts texts(const std::string& content, const CollectRules& rules) const {
    const fs::path file = m_folder / "texts.jsonl";
    std::ofstream(file, std::ios::binary) << content;
    return read(recall, file, rules);
  }
  std::string error(const std::string& content, const CollectRules& rules = all_of_each()) const {
    try {
      texts(content, rules);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  fs::path m_folder;
};

#define EXPECT_SAYS(error, words) EXPECT_NE((error).find(words), std::string::npos) << (error)

TEST_F(CollectTextsTest, AreChosen) {
  CollectRules rules = all_of_each();
  rules.min_tokens = 5;
  rules.max_tokens = 30;
  rules.per_subset = 2;
  const std::string words = "one two three four five six seven eight";
  const std::string good = R"({"text": ")" + words + R"("})";
  const std::string of_subset = R"({"text": ")" + words + R"(", "subset": "a"})";
  std::string many = words;
  for (int i = 0; i < 10; ++i) many += " " + words;
  const std::string content = good + "\n" + of_subset + "\n\n" + R"({"text": "one"})" + "\r\n" +
                              R"({"text": ")" + many + R"("})" + "\n" + of_subset + "\n" +
                              of_subset + "\n" + R"({"text": ")" + words + R"(", "subset": null})" +
                              "\n" + good + "\n" + R"({"text": ""})";
  const CollectTexts chosen = texts(content, rules);
  EXPECT_EQ(chosen.lines, 9);
  EXPECT_EQ(chosen.too_short, 2);
  EXPECT_EQ(chosen.too_long, 1);
  EXPECT_EQ(chosen.over_subset, 1);
  EXPECT_EQ(chosen.over_max_texts, 0);
  std::vector<std::int64_t> lines;
  for (const auto& text : chosen.plan) lines.push_back(text.line);
  EXPECT_EQ(lines, (std::vector<std::int64_t>{1, 2, 6, 8, 9}));
  EXPECT_EQ(chosen.plan[1].subset, "a");
  rules.max_texts = 3;
  EXPECT_EQ(texts(content, rules).texts.size(), 3u);
  EXPECT_EQ(texts(content, rules).over_max_texts, 4);
  EXPECT_NE(texts(content + "\n", rules).hash, "");
  EXPECT_NE(texts(content + "\n\n", rules).hash, chosen.hash);
}

TEST_F(CollectTextsTest, AreSampledBySeedAndLineAlone) {
  CollectRules rules = all_of_each();
  rules.tokens_per_text = 6;
  const std::string line = R"({"text": "one two three four five six seven eight nine ten"})";
  const auto first = texts(line + "\n" + line, rules);
  EXPECT_EQ(texts("\n" + line, rules).plan[0].positions, first.plan[1].positions);
  EXPECT_NE(first.plan[0].positions, first.plan[1].positions);
  rules.seed = 1;
  EXPECT_NE(texts(line, rules).plan[0].positions, first.plan[0].positions);
  for (const auto& plan : first.plan) {
    ASSERT_EQ(plan.positions.size(), 6u);
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_LT(plan.positions[i], plan.tokens);
      if (i > 0) {
        EXPECT_GT(plan.positions[i], plan.positions[i - 1]);
      }
    }
  }
}

TEST_F(CollectTextsTest, AreRefused) {
  EXPECT_SAYS(error(""), "there is no text in it");
  EXPECT_SAYS(error("\n\n"), "there is no text in it");
  EXPECT_SAYS(error("{\"text\": \"a b c\"}\nplain words\n"), "line 2: not valid JSON");
  EXPECT_SAYS(error("[1]"), "line 1: expected a JSON object, found array");
  EXPECT_SAYS(error("{\"words\": 1}"), "line 1: text: expected a string, found none");
  EXPECT_SAYS(error("{\"text\": 1}"), "line 1: text: expected a string, found 1");
  EXPECT_SAYS(error("{\"text\": \"a\", \"subset\": 1}"),
              "line 1: subset: expected a string, found 1");
  EXPECT_SAYS(error("{\"text\": \"\xff\"}"), "expected UTF-8 text");
  CollectRules rules;
  EXPECT_SAYS(error("{\"text\": \"a b c\"}", rules), "none of its texts can be used: ");
  EXPECT_SAYS(error("{\"text\": \"a b c\"}", rules), "(--min-tokens): 1; more than");
  try {
    read(recall, m_folder / "none", all_of_each());
    FAIL();
  } catch (const Error& error) {
    EXPECT_SAYS(std::string(error.what()), "cannot be read");
  }
}

}  // namespace
}  // namespace kvzap
