// Tokenizers of every supported kind, as Hugging Face's tokenizers reads them.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <kvzap/model/tokenizer.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "text/utf8.hpp"
#include "unit/temporary_folder.hpp"
#include "unit/text/tokenizer_files.hpp"
#include "watched.hpp"

namespace {

using kvzap::TokenId;
using kvzap::Tokenizer;
using kvzap::test::expect_error;
using kvzap::test::expect_load_error;
using kvzap::test::golden_folder;
using kvzap::test::Json;
using kvzap::test::load;
using kvzap::test::read_json;

using Ids = std::vector<TokenId>;

/// A tokenizer without any part but its model.
Json bare(Json model) {
  return {{"version", "1.0"},         {"added_tokens", Json::array()}, {"normalizer", nullptr},
          {"pre_tokenizer", nullptr}, {"post_processor", nullptr},     {"decoder", nullptr},
          {"model", std::move(model)}};
}

Json bpe(Json vocabulary, Json merges = Json::array()) {
  return {{"type", "BPE"}, {"vocab", std::move(vocabulary)}, {"merges", std::move(merges)}};
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip = true,
                     bool continues = false) {
  Tokenizer::StreamDecoder decoder(tokenizer, skip, continues);
  std::string text;
  for (const TokenId id : ids) text += decoder.append(id);
  return text + decoder.finish();
}

TEST(TokenizerKinds, EncodeAndDecodeAsReference) {
  const Json golden = read_json(golden_folder / "kinds.json");
  ASSERT_GE(golden["cases"].size(), 25u);
  for (const Json& each : golden["cases"]) {
    const Tokenizer tokenizer = load(each["tokenizer"]);
    for (std::size_t i = 0; i < each["texts"].size(); ++i) {
      const std::string text = each["texts"][i];
      EXPECT_EQ(tokenizer.encode(text), each["ids"][i].get<Ids>()) << each["kind"] << text;
      const Ids ids = tokenizer.encode(text, true);
      EXPECT_EQ(ids, each["special_ids"][i].get<Ids>()) << each["kind"] << text;
      std::string bytes, joined;
      for (const TokenId id : ids) bytes += tokenizer.token_bytes(id);
      kvzap::text::append_lossy(joined, bytes, true);
      // A decoder may leave out the space at the end of a text.
      const std::string continued = streamed(tokenizer, ids, false, true);
      EXPECT_TRUE(joined == continued || joined == continued + " ") << each["kind"] << text;
    }
    for (const Json& decoding : each["decodings"]) {
      const Ids ids = decoding[0].get<Ids>();
      EXPECT_EQ(tokenizer.decode(ids), decoding[1].get<std::string>()) << each["kind"];
      EXPECT_EQ(tokenizer.decode(ids, false), decoding[2].get<std::string>()) << each["kind"];
      EXPECT_EQ(streamed(tokenizer, ids), decoding[1].get<std::string>()) << each["kind"];
    }
  }
}

TEST(TokenizerKinds, BytesWithoutTokenAreUnknownOrNothing) {
  Json root = bare(bpe({{"a", 0}, {"b", 1}, {"ab", 2}, {"?", 3}}, {"a b"}));
  root["pre_tokenizer"] = kvzap::test::byte_level(false);
  EXPECT_EQ(load(root).encode("axb\nab"), (Ids{2, 2}));
  root["model"]["unk_token"] = "?";
  EXPECT_EQ(load(root).encode("axyb"), (Ids{0, 3, 3, 1}));
  root["model"]["fuse_unk"] = true;
  EXPECT_EQ(load(root).encode("axyb"), (Ids{0, 3, 1}));
  root["model"]["unk_token"] = "none";
  const Tokenizer without = load(root);
  EXPECT_EQ(without.encode("ab"), Ids{2});
  expect_error([&] { without.encode("x"); }, {"tokenizer.json", "model.unk_token", "\"none\""});
}

TEST(TokenizerKinds, StreamsLlama2Decoders) {
  Json vocabulary = {{"\u2581", 256}, {"\u2581a", 257}, {"a", 258}};
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", static_cast<unsigned>(byte));
    vocabulary[name] = byte;
  }
  Json root = bare(bpe(vocabulary, {"\u2581 a"}));
  root["model"]["byte_fallback"] = true;
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}};
  root["normalizer"] = {{"type", "Sequence"},
                        {"normalizers", {{{"type", "Prepend"}, {"prepend", "\u2581"}}, replace}}};
  root["decoder"] = {{"type", "Sequence"},
                     {"decoders",
                      {{{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}},
                       {{"type", "ByteFallback"}},
                       {{"type", "Fuse"}},
                       {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  const Tokenizer tokenizer = load(root);
  const Ids ids = tokenizer.encode("a\u4e2d a");
  EXPECT_EQ(ids, (Ids{257, 0xE4, 0xB8, 0xAD, 257}));
  Tokenizer::StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.append(257), "a");  // without the space that the tokenizer adds
  EXPECT_EQ(decoder.append(0xE4), "");
  EXPECT_EQ(decoder.append(0xB8), "");
  EXPECT_EQ(decoder.append(0xAD), "");
  EXPECT_EQ(decoder.append(257), "\u4e2d a");
  // A run of bytes that is no UTF-8 becomes U+FFFD for each byte.
  EXPECT_EQ(decoder.append(0xE4), "");
  EXPECT_EQ(decoder.append(0x41), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD\uFFFD");
  EXPECT_EQ(decoder.append(256), "");  // the decoder begins anew
  EXPECT_EQ(tokenizer.decode({256, 256, 258}), " a");
  EXPECT_EQ(tokenizer.token_bytes(257), " a");
  EXPECT_EQ(tokenizer.token_bytes(0xE4), "\xE4");
  EXPECT_EQ(tokenizer.token_bytes(999), "");
  EXPECT_EQ(streamed(tokenizer, {257, 257}, true, true), " a a");
}

TEST(TokenizerKinds, UnigramTakesTheHighestScore) {
  Json root = bare(Json::parse(R"({"type": "Unigram", "unk_id": 0, "vocab":
      [["<unk>", 0], ["a", -1], ["b", -1.5], ["ab", -2], ["aba", -9]]})"));
  EXPECT_EQ(load(root).encode("abaabc"), (Ids{3, 1, 3, 0}));
  EXPECT_EQ(load(root).encode("xyza"), (Ids{0, 1}));  // unknown characters become one token
  EXPECT_EQ(load(root).encode(""), Ids{});
  root["model"].erase("type");  // as in old files
  EXPECT_EQ(load(root).encode("ab"), Ids{3});
  root["model"]["unk_id"] = nullptr;
  const Tokenizer without = load(root);
  EXPECT_EQ(without.encode("ab"), Ids{3});
  expect_error([&] { without.encode("abx"); }, {"tokenizer.json", "model.unk_id", "\"x\""});
}

TEST(TokenizerKinds, RefusesDefectiveUnigrams) {
  const auto refuse = [](const char* field, Json value, std::string_view message) {
    Json model = Json::parse(R"({"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]]})");
    model[field] = std::move(value);
    expect_load_error(bare(model), {message, "expected", "found"});
  };
  refuse("vocab", Json::array(), "model.vocab");
  refuse("vocab", Json::parse(R"({"a": 1})"), "model.vocab");
  refuse("vocab", Json::parse(R"([{"a": 1}, 1])"), "model.vocab[0]");
  refuse("vocab", Json::parse(R"([["a"]])"), "model.vocab[0]");
  refuse("vocab", Json::parse(R"([["a", "b"]])"), "model.vocab[0][1]");
  refuse("vocab", Json::parse(R"([[1, 1]])"), "model.vocab[0][0]");
  refuse("vocab", Json::array({Json::array({std::string(1025, 'a'), 0})}), "at most 1024 bytes");
  refuse("unk_id", 1, "model.unk_id");
  refuse("unk_id", -1, "model.unk_id");
  refuse("byte_fallback", 1, "model.byte_fallback");
}

TEST(TokenizerKinds, WordsWithoutTokenAreUnknown) {
  Json root = bare(Json::parse(R"({"type": "WordPiece", "unk_token": "?", "vocab":
      {"?": 0, "a": 1, "##b": 2, "ab": 3, "##c": 4}, "continuing_subword_prefix": "##",
      "max_input_chars_per_word": 4})"));
  root["decoder"] = {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}};
  EXPECT_EQ(load(root).encode("abbc"), (Ids{3, 2, 4}));
  EXPECT_EQ(load(root).encode("abx"), Ids{0});
  EXPECT_EQ(load(root).encode("abbcc"), Ids{0});  // longer than a word may be
  EXPECT_EQ(load(root).decode({1, 2, 3, 0}), "ab ab?");
  root["model"]["max_input_chars_per_word"] = 5000;
  expect_load_error(root, {"model.max_input_chars_per_word", "0 to 1024"});

  root = bare(Json::parse(R"({"type": "WordLevel", "unk_token": "?", "vocab": {"a": 1}})"));
  const Tokenizer words = load(root);
  EXPECT_EQ(words.encode("a"), Ids{1});
  expect_error([&] { words.encode("b"); }, {"model.unk_token", "the unknown \"b\"", "\"?\""});
  root["model"]["vocab"] = Json::object();
  expect_load_error(root, {"model.vocab", "an object of tokens"});
  root["model"].erase("unk_token");
  expect_load_error(root, {"model"});
  root["model"]["type"] = "Words";
  expect_load_error(root, {"model.type", "BPE, Unigram, WordPiece or WordLevel"});
}

TEST(TokenizerKinds, BoundsTheGrowthOfTexts) {
  Json root = bare(bpe({{"a", 0}}));
  const Json doubling = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  root["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  for (int i = 0; i < 40; ++i) root["normalizer"]["normalizers"].push_back(doubling);
  const Tokenizer tokenizer = load(root);
  expect_error([&] { tokenizer.encode("a"); }, {"tokenizer.json", "at most 32 bytes"});
  for (int i = 0; i < 40; ++i) root["normalizer"]["normalizers"].push_back(doubling);
  expect_load_error(root, {"normalizer.normalizers[64]", "at most 64 parts"});
}

TEST(TokenizerKinds, EncodeLongTextsQuickly) {
  const std::size_t size = kvzap::test::watched ? 50000 : 500000;
  const auto begin = std::chrono::steady_clock::now();
  Json scores = Json::array({Json::array({"<unk>", 0})});
  for (std::size_t length = 1; length <= 1024; length *= 2) {
    scores.push_back(Json::array({std::string(length, 'a'), -1.0 / static_cast<double>(length)}));
  }
  const Tokenizer unigram = load(bare({{"type", "Unigram"}, {"unk_id", 0}, {"vocab", scores}}));
  EXPECT_FALSE(unigram.encode(std::string(size, 'a')).empty());
  const Tokenizer words = load(bare(Json::parse(R"({"type": "WordPiece", "unk_token": "?", "vocab":
      {"?": 0, "\u00e9": 1, "##\u00e9": 2, "##a\u00e9": 3, "##a": 4},
      "continuing_subword_prefix": "##", "max_input_chars_per_word": 1024})")));
  EXPECT_EQ(words.encode("\u00e9a\u00e9\u00e9aa\u00e9"), (Ids{1, 3, 2, 4, 3}));
  std::string word = "\u00e9";  // another word each time
  for (std::size_t i = 0; i < 600; ++i) {
    word += i % 3 == 0 ? "\u00e9" : "a\u00e9";
    ASSERT_EQ(words.encode(word).size(), i + 2);
  }
  EXPECT_EQ(unigram.encode(std::string(size, 'b')), Ids{0});
  Json root = bare(bpe({{"a", 0}, {"aa", 1}}, {"a a"}));
  EXPECT_EQ(load(root).encode(std::string(size, 'a')).size(), size / 2);
  root["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", "(a+)+b"}}}, {"content", ""}};
  try {
    load(root).encode(std::string(size, 'a'));
  } catch (const kvzap::Error& error) {
    EXPECT_NE(std::string(error.what()).find("normalizer.pattern.Regex"), std::string::npos);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(elapsed.count(), 60.0);
}

}  // namespace
