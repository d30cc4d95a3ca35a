// Tokenizers of folders without tokenizer.json, as transformers converts them.
#include <gtest/gtest.h>

#include <chrono>
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
using namespace std::string_literals;

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

/// A field of bytes in the wire format of protocol buffers; fewer than 128 bytes.
std::string field(int number, const std::string& bytes) {
  return static_cast<char>(number << 3 | 2) + std::string(1, static_cast<char>(bytes.size())) +
         bytes;
}

std::string piece(const std::string& text, int type = 1, const std::string& score = "") {
  std::string bytes = field(1, text);
  if (!score.empty()) bytes += '\x15' + score;
  return field(1, bytes + '\x18' + static_cast<char>(type));
}

/// A model of BPE with control pieces at 0 to 3, and user_defined ones after "\u2581", "a", "b".
std::string small_model(const std::vector<std::string>& user_defined = {}) {
  std::string bytes = piece("<unk>", 2) + piece("<s>", 3) + piece("</s>", 3) + piece("<ctl>", 3);
  for (const char* text : {"\u2581", "a", "b"}) bytes += piece(text);
  for (const std::string& text : user_defined) bytes += piece(text, 4);
  return bytes;
}
const std::string bpe_settings = field(2, "\x18\x02");

Tokenizer of_model(const std::string& bytes, const std::string& config,
                   const std::string& model_config = "{}") {
  TemporaryFolder folder;
  folder.write("tokenizer.model", bytes);
  folder.write("tokenizer_config.json", config);
  folder.write("config.json", model_config);
  return Tokenizer::load(folder.path());
}

/// A field of tokenizer_config.json that declares a token.
std::string declared(const std::string& content, const std::string& flags) {
  return R"({"content": ")" + content + R"(", )" + flags + "}";
}

TEST(FolderTokenizer, FlagsOfDeclaredPieces) {
  const std::string model = small_model() + bpe_settings;
  const auto ids = [&](const std::string& config) {
    return of_model(model, R"({"tokenizer_class": "LlamaTokenizer", )" + config + "}")
        .encode("a </s> b");
  };
  EXPECT_EQ(ids(R"("legacy": false)"), (Ids{4, 5, 4, 2, 4, 6}));
  EXPECT_EQ(ids(R"("added_tokens_decoder": {"2": )" + declared("</s>", R"("rstrip": true)") + "}"),
            (Ids{4, 5, 4, 2, 6}));
  EXPECT_EQ(ids(R"("eos_token": )" + declared("</s>", R"("lstrip": true, "normalized": false)")),
            (Ids{4, 5, 2, 4, 6}));
  const Tokenizer plain = of_model(model, R"({"tokenizer_class": "LlamaTokenizer",
      "added_tokens_decoder": {"3": {"content": "<ctl>", "special": false}}})");
  EXPECT_EQ(plain.decode({5, 3, 2}), "a<ctl>");
  // Those of added_tokens_decoder come before.
  EXPECT_EQ(ids(R"("added_tokens_decoder": {"2": )" + declared("</s>", R"("rstrip": true)") +
                R"(}, "eos_token": )" + declared("</s>", R"("lstrip": true)")),
            (Ids{4, 5, 4, 2, 6}));
}

TEST(FolderTokenizer, ListsTakeThePlaceOfUndeclaredPieces) {
  const auto ids = [&](const std::string& config) {
    return of_model(small_model() + bpe_settings,
                    R"({"tokenizer_class": "LlamaTokenizer")" + config + "}")
        .encode("<ctl>");
  };
  EXPECT_EQ(ids(""), Ids{3});
  EXPECT_EQ(ids(R"(, "extra_special_tokens": {})"), Ids{3});
  for (const char* list :
       {R"(, "extra_special_tokens": [])", R"(, "additional_special_tokens": [])",
        R"(, "additional_special_tokens": ["<x>"])"}) {
    EXPECT_EQ(ids(list).front(), 4) << list;
  }
}

/// The order of fields in a file is free.
TEST(FolderTokenizer, SettingsBeforePieces) {
  const Tokenizer tokenizer =
      of_model(bpe_settings + small_model(), R"({"tokenizer_class": "LlamaTokenizer"})");
  EXPECT_EQ(tokenizer.encode("a<s>"), (Ids{4, 5, 1}));
}

TEST(FolderTokenizer, ManyPiecesOfUsers) {
  std::vector<std::string> pieces;
  for (int i = 0; i < 5000; ++i) pieces.push_back("q" + std::to_string(i) + "x");
  pieces.emplace_back("a.b");
  pieces.emplace_back("a.");
  const Tokenizer tokenizer =
      of_model(small_model(pieces) + bpe_settings, R"({"tokenizer_class": "LlamaTokenizer"})",
               R"({"model_type": "ernie4_5"})");
  EXPECT_EQ(tokenizer.encode("q4999xa.bq17xa.a"), (Ids{4, 5006, 5007, 24, 5008, 5}));
}

/// An id after the last one, where a vocabulary has gaps.
TEST(FolderTokenizer, GapsOfIds) {
  TemporaryFolder folder;
  folder.write("vocab.json", R"({"a": 0, "b": 2, "\u0120": 5})");
  folder.write("merges.txt", "#version: 0.2\n");
  folder.write("tokenizer_config.json",
               R"({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<x>"})");
  EXPECT_EQ(Tokenizer::load(folder.path()).token_id("<x>"), 4);  // after <|endoftext|>
  folder.write("vocab.json", R"({"a": 0, "b": 3, "<|endoftext|>": 2})");
  EXPECT_EQ(Tokenizer::load(folder.path()).token_id("<x>"), 4);
  folder.write("tokenizer_config.json", R"({"tokenizer_class": "GPTNeoXTokenizer"})");
  EXPECT_TRUE(Tokenizer::load(folder.path()).token_id("<|padding|>"));
  folder.write("merges.txt", "#version: 0.2\na c\n");
  expect_error([&] { Tokenizer::load(folder.path()); }, {"merges.txt: line 2", "a c"});
}

/// Declared tokens are special, and those of a list come before named ones.
TEST(FolderTokenizer, SpecialTokensOfRanks) {
  TemporaryFolder folder;
  folder.write("tiktoken.model", "YQ== 0\nYg== 1\n");
  folder.write("tokenizer_config.json", R"({"added_tokens_decoder": {"3": {"content": "<y>"}},
      "bos_token": "<b>", "extra_special_tokens": ["<e>"]})");
  const Tokenizer tokenizer = Tokenizer::load(folder.path());
  EXPECT_EQ(tokenizer.encode("<y><e><b>"), (Ids{3, 4, 5}));
  EXPECT_EQ(tokenizer.decode({0, 3, 1}), "ab");
}

/// Names alone do not make tokens of tekken.json special ones.
TEST(FolderTokenizer, TekkenWithoutNames) {
  TemporaryFolder folder;
  folder.write("tekken.json", R"({"config": {"pattern": "a"}, "vocab": [{"token_bytes": "YQ=="}],
      "special_tokens": [{"rank": 0, "token_str": "<s>"}]})");
  folder.write("tokenizer_config.json", R"({"add_bos_token": true})");
  EXPECT_EQ(Tokenizer::load(folder.path()).encode("a", true), Ids{1});
  folder.write("tokenizer_config.json", R"({"add_bos_token": true, "bos_token": "<s>"})");
  EXPECT_EQ(Tokenizer::load(folder.path()).encode("a", true), (Ids{0, 1}));
}

/// Memory and time stay in proportion to the file.
TEST(FolderTokenizer, HostileVocabularies) {
  const std::string config = R"({"tokenizer_class": "LlamaTokenizer"})";
  std::string many;
  for (int i = 0; i <= 1 << 19; ++i) many += "\x0A\x00"s;
  expect_error([&] { of_model(many, config); }, {"tokenizer.model", "at most 524288 pieces"});
  many.clear();
  for (int i = 0; i <= 1 << 16; ++i) many += piece("<" + std::to_string(i), 3);
  expect_error([&] { of_model(many, config); }, {"tokenizer.model", "at most 65536 special"});
  many.clear();
  for (int i = 0; i <= 1 << 19; ++i) many += "YQ== " + std::to_string(i) + "\n";
  expect_error([&] { of_model(many, config); }, {"tokenizer.model", "at most 524288 tokens"});
  for (const std::string& score : {"\0\0\xC0\x7F"s, "\0\0\x80\xFF"s}) {
    expect_error([&] { of_model(piece("a", 1, score), config); },
                 {"pieces[0].score", "a finite number"});
  }
  // Every part of every piece is a piece.
  many.clear();
  for (std::size_t size = 1; size <= 500; ++size) {
    const std::string text = field(1, "").substr(0, 1);
    std::string bytes = text;
    const auto append_size = [](std::string& to, std::size_t value) {
      if (value >= 128) to += static_cast<char>(value % 128 + 128);
      to += static_cast<char>(value >= 128 ? value / 128 : value);
    };
    append_size(bytes, size);
    bytes += std::string(size, 'a');
    many += '\x0A';
    append_size(many, bytes.size());
    many += bytes;
  }
  expect_error([&] { of_model(many + bpe_settings, config); }, {"merges of tokens"});
}

TEST(FolderTokenizer, RefusesOtherSettings) {
  const std::string model = small_model() + bpe_settings;
  expect_error([&] { of_model(model, R"({"tokenizer_class": "CodeLlamaTokenizer"})"); },
               {"tokenizer_class", "tokenizer.json in the folder"});
  expect_error([&] { of_model(model, R"({"split_special_tokens": true})"); },
               {"split_special_tokens", "expected false"});
}

/// Python writes infinite numbers in config.json.
TEST(FolderTokenizer, InfiniteNumbers) {
  TemporaryFolder folder;
  std::string list;
  for (int i = 0; i < 300000; ++i) list += "Infinity,";
  folder.write("config.json", R"({"a": "Infinity \" Infinity", "b": [-1, )" + list + "0]}");
  const auto start = std::chrono::steady_clock::now();
  const auto file = kvzap::gguf::read_model_file(folder.path(), "config.json");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));  // not the square
  ASSERT_TRUE(file);
  EXPECT_EQ(file->content["a"], R"(Infinity " Infinity)");
  EXPECT_EQ(file->content["b"].size(), 300002u);
  EXPECT_EQ(file->content["b"][300000], "Infinity");
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
