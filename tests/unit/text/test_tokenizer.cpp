#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "text/utf8.hpp"
#include "unit/text/tokenizer_files.hpp"
#include "watched.hpp"

namespace {

using kvzap::TokenId;
using kvzap::Tokenizer;
using kvzap::test::golden_folder;
using kvzap::test::golden_tokenizer;
using kvzap::test::Json;
using kvzap::test::load;
using kvzap::test::pair_tokenizer;
using kvzap::test::read_json;
using kvzap::test::source_folder;

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::string streamed(const Tokenizer& tokenizer, const std::vector<TokenId>& ids, bool skip) {
  Tokenizer::StreamDecoder decoder(tokenizer, skip);
  std::string text;
  for (const TokenId id : ids) text += decoder.append(id);
  return text + decoder.finish();
}

class GoldenTokenizer : public testing::TestWithParam<std::string> {
 protected:
  std::filesystem::path folder() const {
    return GetParam() == "recall-4m" ? source_folder / "inputs/models/recall-4m"
                                     : golden_folder / GetParam();
  }
  Tokenizer tokenizer = Tokenizer::load(folder());
  Json golden = read_json(golden_folder / (GetParam() + ".json"));
};

TEST_P(GoldenTokenizer, EncodesAsReference) {
  const Json texts = read_json(golden_folder / "texts.json");
  ASSERT_EQ(texts.size(), golden["ids"].size());
  ASSERT_GT(texts.size(), 250u);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::string text = from_hex(texts[i]);
    EXPECT_EQ(tokenizer.encode(text), golden["ids"][i].get<std::vector<TokenId>>()) << texts[i];
  }
}

TEST_P(GoldenTokenizer, DecodesAsReferenceAtOnceAndByToken) {
  for (const Json& decoding : golden["decodings"]) {
    const auto ids = decoding[0].get<std::vector<TokenId>>();
    for (const bool skip : {true, false}) {
      const std::string expected = decoding[skip ? 1 : 2];
      EXPECT_EQ(tokenizer.decode(ids, skip), expected) << decoding[0];
      EXPECT_EQ(streamed(tokenizer, ids, skip), expected) << decoding[0];
    }
    std::string bytes, text;
    for (const TokenId id : ids) bytes += tokenizer.token_bytes(id);
    kvzap::text::append_lossy(text, bytes, true);
    EXPECT_EQ(text, decoding[2].get<std::string>()) << decoding[0];
  }
}

TEST_P(GoldenTokenizer, AddsSpecialTokensAndCountsTokensAsReference) {
  EXPECT_EQ(tokenizer.encode("Hello", true),
            golden["hello_with_special_tokens"].get<std::vector<TokenId>>());
  EXPECT_EQ(tokenizer.vocabulary_size(), golden["vocabulary_size"].get<std::size_t>());
  std::vector<TokenId> special;
  for (TokenId id = 0; id < 2000; ++id) {
    if (tokenizer.is_special(id)) special.push_back(id);
  }
  auto expected = golden["special"].get<std::vector<TokenId>>();
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(special, expected);
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenTokenizer,
                         testing::Values("recall-4m", "qwen2", "llama3", "gpt2", "nemo", "mixed"),
                         [](const auto& info) {
                           return info.param == "recall-4m" ? "recall_4m" : info.param;
                         });

TEST(Tokenizer, FindsTokensByContent) {
  const Tokenizer tokenizer = Tokenizer::load(golden_folder / "qwen2");
  const auto id = tokenizer.token_id("<|im_end|>");
  ASSERT_TRUE(id);
  EXPECT_EQ(tokenizer.encode("<|im_end|>"), std::vector<TokenId>{*id});
  EXPECT_TRUE(tokenizer.is_special(*id));
  const auto word = tokenizer.token_id("Ġthe");
  ASSERT_TRUE(word);
  EXPECT_EQ(tokenizer.decode({*word}), " the");
  EXPECT_FALSE(tokenizer.is_special(*word));
  EXPECT_FALSE(tokenizer.token_id("no such token"));
  EXPECT_FALSE(tokenizer.token_id(""));
}

TEST(Tokenizer, IgnoresIdsWithoutToken) {
  const Tokenizer tokenizer = Tokenizer::load(golden_folder / "qwen2");
  EXPECT_EQ(tokenizer.decode({-1, 2000000000}), "");
  EXPECT_EQ(streamed(tokenizer, {-1, 2000000000}, true), "");
  EXPECT_FALSE(tokenizer.is_special(-1));
}

TEST(Tokenizer, StreamHoldsBackIncompleteCharacters) {
  const Tokenizer tokenizer = load(pair_tokenizer());
  const std::vector<TokenId> ids = tokenizer.encode("😀");
  ASSERT_EQ(ids.size(), 4u);
  Tokenizer::StreamDecoder decoder(tokenizer);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(decoder.append(ids[i]), "");
  EXPECT_EQ(decoder.append(ids[3]), "😀");
  EXPECT_EQ(decoder.finish(), "");
  // A sequence that turns out to be broken is released at once.
  EXPECT_EQ(decoder.append(ids[0]), "");
  EXPECT_EQ(decoder.append(ids[1]), "");
  EXPECT_EQ(decoder.append(tokenizer.encode("x")[0]), "\uFFFDx");
  EXPECT_EQ(decoder.append(ids[0]), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(Tokenizer, StreamDecoderOutlivesTokenizer) {
  auto tokenizer = std::make_unique<Tokenizer>(load(pair_tokenizer()));
  Tokenizer::StreamDecoder decoder(*tokenizer);
  const TokenId id = tokenizer->encode("x")[0];
  tokenizer.reset();
  EXPECT_EQ(decoder.append(id), "x");
}

TEST(Tokenizer, EncodesLongPreTokensQuickly) {
  // A quadratic merge would take minutes for any of these; the bound leaves room for slow machines.
  const auto begin = std::chrono::steady_clock::now();
  const std::size_t size = kvzap::test::watched ? 160000 : 1000000;
  for (const char* const name : {"qwen2", "llama3", "gpt2", "nemo"}) {
    const Tokenizer tokenizer = Tokenizer::load(golden_folder / name);
    for (const std::string_view unit :
         {"a", " ", "\n", "the", "é", "的", "!", "A", "e\u0323\u0301"}) {
      std::string text;
      while (text.size() < size / 4) text += unit;
      const std::string decoded = tokenizer.decode(tokenizer.encode(text + "x"));
      EXPECT_GT(decoded.size(), size / 16) << name << unit;
      if (unit != "e\u0323\u0301") {
        EXPECT_EQ(decoded, text + "x") << name << unit;
      }
    }
  }
  const Tokenizer tokenizer = load(pair_tokenizer());
  EXPECT_EQ(tokenizer.encode(std::string(size, 'a')).size(), size / 2);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(elapsed.count(), 60.0);
}

TEST(Tokenizer, NormalizesLongRunsOfMarksQuickly) {
  const Tokenizer tokenizer = Tokenizer::load(golden_folder / "qwen2");
  std::string mixed = "q", ordered = "q";
  for (int i = 0; i < 100000; ++i) mixed += "\u0307\u0323";
  for (int i = 0; i < 100000; ++i) ordered += "\u0323";
  for (int i = 0; i < 100000; ++i) ordered += "\u0307";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(tokenizer.encode(mixed), tokenizer.encode(ordered));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(elapsed.count(), 20.0);
}

// As tokenizers 0.22 does: the white space that a token has taken is no token of its own any more.
TEST(Tokenizer, AddedTokensShareNoWhiteSpace) {
  Json root = golden_tokenizer("gpt2");
  const auto add = [&](TokenId id, const char* content, bool lstrip, bool rstrip) {
    root["added_tokens"].push_back({{"id", id},
                                    {"content", content},
                                    {"single_word", false},
                                    {"lstrip", lstrip},
                                    {"rstrip", rstrip},
                                    {"normalized", false},
                                    {"special", false}});
  };
  add(5000, "<a>", false, true);
  add(5001, "\n\n", true, false);
  const Tokenizer tokenizer = load(root);
  const TokenId x = tokenizer.encode("x").at(0);
  EXPECT_EQ(tokenizer.encode("<a>\n\nx"), (std::vector<TokenId>{5000, x}));
  EXPECT_EQ(tokenizer.encode("x \n\nx"), (std::vector<TokenId>{x, 5001, x}));
}

// As tokenizers 0.23 does: a token that the normalizer changes is found and decoded as changed.
TEST(Tokenizer, AddedTokensDecodeAsTheyAreFound) {
  Json root = golden_tokenizer("gpt2");
  root["normalizer"] = {{"type", "NFC"}};
  root["added_tokens"].push_back(
      {{"id", 5000}, {"content", "\u0958"}, {"special", false}, {"normalized", true}});
  const Tokenizer tokenizer = load(root);
  EXPECT_EQ(tokenizer.encode("\u0958"), std::vector<TokenId>{5000});
  EXPECT_EQ(tokenizer.decode({5000}), "\u0915\u093c");
}

TEST(Tokenizer, LaterOfTwoEqualMergesCounts) {
  Json root = pair_tokenizer();
  root["model"]["vocab"]["ab"] = 257;
  root["model"]["merges"] = {"a a", "a b", "a a"};
  const Tokenizer tokenizer = load(root);
  EXPECT_EQ(tokenizer.encode("aab").back(), 257);
}

}  // namespace
