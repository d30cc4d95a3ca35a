// Tokenizers of folders without tokenizer.json, as transformers converts them.
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "files/base64.hpp"
#include "gguf/model_file.hpp"
#include "unit/temporary_folder.hpp"
#include "unit/text/tokenizer_files.hpp"

namespace {

using kvzap::TokenId;
using kvzap::Tokenizer;
using kvzap::test::expect_error;
using kvzap::test::golden_folder;
using kvzap::test::Json;
using kvzap::test::read_json;
using kvzap::test::TemporaryFolder;

using Ids = std::vector<TokenId>;

TEST(FolderTokenizer, EncodesAsTransformers) {
  const Json golden = read_json(golden_folder / "folders.json");
  EXPECT_GE(golden["cases"].size(), 13u);
  for (const Json& each : golden["cases"]) {
    const std::string name = each["folder"];
    SCOPED_TRACE(name);
    const auto folder = golden_folder / "folders" / name;
    EXPECT_TRUE(kvzap::gguf::has_model_file(folder, "tokenizer.json"));
    const Tokenizer tokenizer = Tokenizer::load(folder);
    for (std::size_t i = 0; i < golden["texts"].size(); ++i) {
      const std::string text = golden["texts"][i];
      EXPECT_EQ(tokenizer.encode(text), each["ids"][i].get<Ids>()) << text;
      EXPECT_EQ(tokenizer.encode(text, true), each["special_ids"][i].get<Ids>()) << text;
    }
    for (const Json& decoding : each["decodings"]) {
      EXPECT_EQ(tokenizer.decode(decoding[0].get<Ids>()), decoding[1].get<std::string>());
      EXPECT_EQ(tokenizer.decode(decoding[0].get<Ids>(), false), decoding[2].get<std::string>());
    }
  }
}

std::string golden_bytes(const char* file) {
  std::ifstream stream(golden_folder / "folders" / file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(FolderTokenizer, TokenizerJsonComesFirst) {
  TemporaryFolder folder;
  EXPECT_FALSE(kvzap::gguf::has_model_file(folder.path(), "tokenizer.json"));
  folder.write("tokenizer.model", golden_bytes("llama/tokenizer.model"));
  folder.write("tokenizer.json", kvzap::test::golden_tokenizer("gpt2").dump());
  EXPECT_EQ(Tokenizer::load(folder.path()).encode("a"), Ids{64});
}

TEST(FolderTokenizer, RefusesWhatItCannotConvert) {
  const auto refused = [](const char* file, const std::string& content, const std::string& config,
                          std::initializer_list<std::string_view> parts) {
    TemporaryFolder folder;
    folder.write(file, content);
    if (std::string(file) == "vocab.json") folder.write("merges.txt", "a b\n");
    folder.write("tokenizer_config.json", config);
    expect_error([&] { Tokenizer::load(folder.path()); }, parts);
  };
  refused("vocab.json", R"({"a": 0})", R"({"tokenizer_class": "BioGptTokenizer"})",
          {"tokenizer_config.json: tokenizer_class", "GPT2Tokenizer", "\"BioGptTokenizer\""});
  refused("vocab.json", R"({"a": 0})", "{}", {"tokenizer_class", "tokenizer.json in the folder"});
  refused("vocab.json", R"({"a": "b"})", R"({"tokenizer_class": "GPT2Tokenizer"})",
          {"vocab.json: a"});
  refused("hy.tiktoken", "YQ== 0\n", "{}", {"added_tokens_decoder", "special tokens"});
  refused("tiktoken.model", "YQ== 0\nYg== 2\n", "{}", {"tiktoken.model: line 2", "rank 1"});
  refused("tiktoken.model", "YQ== 0\n", R"({"added_tokens_decoder": {"x": {"content": "y"}}})",
          {"added_tokens_decoder", "ids as keys"});
  refused("tiktoken.model", "YQ== 0\n", R"({"added_tokens_decoder": {"999999": {"content": "y"}}})",
          {"added_tokens_decoder", "ids below"});
  refused("tiktoken.model", "YQ== 0\n", R"({"added_tokens_decoder": []})",
          {"added_tokens_decoder", "an object"});
  refused("tokenizer.model", "\n", "{}", {"tokenizer.model", "a model of SentencePiece"});
  refused("tokenizer.model", std::string("\x0A\x03\x0A\x01\xFF", 5), "{}",
          {"pieces[0]", "a text in UTF-8"});
  refused("tokenizer.model",
          std::string("\x0A\x03\x0A\x01"
                      "a\x12\x02\x18\x03",
                      9),
          "{}", {"model_type", "unigram (1) or BPE (2)"});
  refused("tekken.json",
          R"({"config": {"pattern": "a"}, "vocab": [], "special_tokens": [{"rank": 1}]})", "{}",
          {"special_tokens[0]"});
  refused("tekken.json",
          R"({"config": {"pattern": "a"}, "vocab": [{"token_bytes": "*"}], "special_tokens": []})",
          "{}", {"vocab[0].token_bytes", "base64"});
}

/// Damaged bytes are an error that names a file, or make another tokenizer.
TEST(FolderTokenizer, DamagedModels) {
  const std::string whole = golden_bytes("settings-unigram/tokenizer.model");
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::string bytes = whole;
    for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (round % 4 == 0) bytes.resize(random() % bytes.size());
    if (!bytes.empty()) bytes[0] = '\n';
    TemporaryFolder folder;
    folder.write("tokenizer.model", bytes);
    try {
      Tokenizer::load(folder.path()).encode("Hello, world");
    } catch (const kvzap::Error& error) {
      EXPECT_NE(std::string(error.what()).find("token"), std::string::npos);
    }
  }
}

TEST(FolderTokenizer, Base64) {
  for (const std::string bytes : {"", "a", "ab", "abc", "\xff\x00z"}) {
    EXPECT_EQ(kvzap::files::from_base64(kvzap::files::to_base64(bytes)), bytes);
  }
  EXPECT_EQ(kvzap::files::to_base64("ab"), "YWI=");
  EXPECT_EQ(kvzap::files::from_base64("YWI"), "ab");
  EXPECT_FALSE(kvzap::files::from_base64("Y!"));
}

}  // namespace
