// The tokenizer of a folder as metadata of a GGUF file: the same ids, or a refusal that names the
// part.
#include "gguf/write_tokenizer.hpp"

#include <gtest/gtest.h>

#include <initializer_list>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_file.hpp"
#include "gguf/gguf_writer.hpp"
#include "unit/temporary_folder.hpp"
#include "unit/text/tokenizer_files.hpp"

namespace kvzap::test {
namespace {

constexpr const char* mark = "\u2581";

Json added_token(int id, const char* content, bool special = true) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

Json replace(const char* text, const char* content) {
  return {{"type", "Replace"}, {"pattern", {{"String", text}}}, {"content", content}};
}

Json sequence(const char* members, const Json& parts) {
  return {{"type", "Sequence"}, {members, parts}};
}

/// SentencePiece's form with marks in place of spaces; `prepends`: also before a text.
Json marked(bool prepends) {
  Json vocabulary = {{"<unk>", 0}, {"<s>", 1},     {"</s>", 2},     {"\u2581", 3}, {"a", 4},
                     {"b", 5},     {"\u2581a", 6}, {"\u2581ab", 7}, {"ab", 8}};
  for (int i = 0; i < 32; ++i) {
    vocabulary["<0x" + std::string(1, "01"[i / 16]) + "0123456789ABCDEF"[i % 16] + ">"] = 9 + i;
  }
  Json decoders = {replace(mark, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
  Json normalizer = replace(" ", mark);
  if (prepends) {
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    normalizer = sequence("normalizers", {{{"type", "Prepend"}, {"prepend", mark}}, normalizer});
  }
  return {
      {"version", "1.0"},
      {"added_tokens", {added_token(0, "<unk>"), added_token(1, "<s>"), added_token(2, "</s>")}},
      {"normalizer", normalizer},
      {"pre_tokenizer", nullptr},
      {"post_processor", nullptr},
      {"decoder", sequence("decoders", decoders)},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", "<unk>"},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", true},
        {"byte_fallback", true},
        {"ignore_merges", false},
        {"vocab", vocabulary},
        {"merges", {"a b", "\u2581 a", "\u2581 ab"}}}}};
}

Json around(std::initializer_list<const char*> before, std::initializer_list<const char*> after,
            const Json& vocabulary) {
  Json single = Json::array(), special = Json::object();
  const auto add = [&](const char* token) {
    single.push_back({{"SpecialToken", {{"id", token}, {"type_id", 0}}}});
    special[token] = {{"id", token}, {"ids", {vocabulary[token]}}, {"tokens", {token}}};
  };
  for (const char* token : before) add(token);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  for (const char* token : after) add(token);
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", Json::array()},
          {"special_tokens", special}};
}

struct Written {
  TemporaryFolder folder;
  std::vector<std::string> warnings;

  explicit Written(const Json& root, const char* config = R"({"bos_token": "<s>"})",
                   const char* generation = "{}") {
    folder.write("tokenizer.json", root.dump());
    folder.write("generation_config.json", generation);
    folder.write("tokenizer_config.json", config);
    gguf::GgufWriter writer;
    writer.add_string("general.architecture", "llama");
    gguf::add_tokenizer(folder.path(), 1024, writer);
    warnings = writer.warnings();
    writer.write(folder.path() / "x.gguf", [](std::size_t, const auto&) {});
  }

  std::string model() const {
    const auto file = gguf::GgufFile::open(folder.path() / "x.gguf");
    return std::string(file.metadata().string("tokenizer.ggml.model"));
  }
};

void expect_same(const Json& root, std::string_view model, const std::vector<std::string>& texts,
                 const char* config = R"({"bos_token": "<s>"})") {
  const Written written(root, config);
  EXPECT_TRUE(written.warnings.empty());
  EXPECT_EQ(written.model(), model);
  const Tokenizer folder = Tokenizer::load(written.folder.path());
  const Tokenizer file = Tokenizer::load(written.folder.path() / "x.gguf");
  for (const std::string& text : texts) {
    const auto ids = folder.encode(text, true);
    EXPECT_EQ(file.encode(text, true), ids) << text;
    EXPECT_EQ(file.encode(text), folder.encode(text)) << text;
    EXPECT_EQ(file.decode(ids, false), folder.decode(ids, false)) << text;
  }
}

void expect_refused(const Json& root, std::initializer_list<std::string_view> parts,
                    const char* config = R"({"bos_token": "<s>"})") {
  expect_error([&] { Written(root, config); }, {"tokenizer.json: "});
  expect_error([&] { Written(root, config); }, parts);
}

void expect_warned(const Json& root, std::initializer_list<std::string_view> parts,
                   const char* config = R"({"bos_token": "<s>"})") {
  const Written written(root, config);
  ASSERT_EQ(written.warnings.size(), 1u);
  for (const std::string_view part : parts) {
    EXPECT_NE(written.warnings[0].find(part), std::string::npos) << written.warnings[0];
  }
  Tokenizer::load(written.folder.path() / "x.gguf");
}

const std::vector<std::string> texts = {"",        "a b",     "ab",         " ab<s>a",  "a  b ",
                                        "a</s>ab", "\u2581a", "x\n\ta\x01", "<0x0A> ab"};

TEST(WriteTokenizer, MarkedSpaces) {
  expect_same(marked(true), "llama", texts);
  expect_same(marked(false), "gemma4", texts);
  Json root = marked(false);
  root["pre_tokenizer"] = {{"type", "Split"},
                           {"pattern", {{"String", " "}}},
                           {"behavior", "MergedWithPrevious"},
                           {"invert", false}};
  expect_same(root, "gemma4", texts);
  root["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", mark}, {"prepend_scheme", "never"}, {"split", false}};
  root["normalizer"] = nullptr;
  expect_same(root, "gemma4", texts);
  // Tokens without merges stay without them, and the order of merges is kept.
  for (const bool prepends : {true, false}) {
    root = marked(prepends);
    root["model"]["merges"] = {"\u2581 a", "\u2581a b"};
    expect_same(root, prepends ? "llama" : "gemma4", texts);
  }
}

TEST(WriteTokenizer, RefusesOtherFormsOfMarkedSpaces) {
  Json root = marked(false);
  root["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", mark}, {"prepend_scheme", "first"}, {"split", false}};
  expect_refused(root, {"pre_tokenizer", "Metaspace"});
  root["normalizer"] = nullptr;
  expect_refused(root, {"decoder"});
  root["decoder"] = marked(true)["decoder"];
  expect_warned(root, {"pre_tokenizer", "special token"});
  root = marked(true);
  root["pre_tokenizer"] = split_by("a")["pretokenizers"][0];
  expect_refused(root, {"pre_tokenizer", "Regex"});
  root = marked(false);
  root["normalizer"] =
      sequence("normalizers", {{{"type", "NFKC"}}, {{"type", "Lowercase"}}, root["normalizer"]});
  expect_refused(root, {"normalizer", "NFKC"});
  root = marked(true);
  root["decoder"] = marked(false)["decoder"];
  expect_refused(root, {"decoder", "Strip"});
  root = marked(true);
  root["model"]["ignore_merges"] = true;
  expect_refused(root, {"model.ignore_merges"});
  root = marked(true);
  root["model"]["unk_token"] = nullptr;
  expect_refused(root, {"model.unk_token", "<0x20>"});
  root = marked(true);
  root["model"]["fuse_unk"] = false;
  expect_refused(root, {"model.fuse_unk"});
  root["model"]["byte_fallback"] = false;
  expect_refused(root, {"pre_tokenizer"});
}

TEST(WriteTokenizer, TokensOfUsersWithMarks) {
  Json root = marked(false);
  root["model"]["vocab"]["\u2581\u2581"] = 100;
  root["model"]["merges"].push_back("\u2581 \u2581");
  root["added_tokens"].push_back(added_token(100, "\u2581\u2581", false));
  expect_same(root, "gemma4", {"a  b", "\u2581\u2581a", "a\u2581\u2581\u2581 b"});
  Json prepending = marked(true);
  prepending["added_tokens"].push_back(added_token(100, "\u2581x", false));
  expect_refused(prepending, {"added_tokens", "\u2581x"});
  prepending["added_tokens"].back()["special"] = true;
  expect_same(prepending, "llama", {"a\u2581xb", "a xb"});
  prepending["added_tokens"].back() = added_token(100, "x a", false);
  expect_same(prepending, "llama", {"ax ab", "a\u2581x ab"});
}

TEST(WriteTokenizer, TokensAroundATextAreThoseOfTheFormat) {
  for (const bool prepends : {true, false}) {
    Json root = marked(prepends);
    const Json vocabulary = root["model"]["vocab"];
    const std::string_view model = prepends ? "llama" : "gemma4";
    root["post_processor"] = around({"<s>"}, {}, vocabulary);
    expect_same(root, model, texts);
    expect_same(root, model, texts, "{}");
    // Without a name, the tokenizer's own token comes before the model's.
    Written named(root, "{}", R"({"bos_token_id": 2})");
    EXPECT_EQ(Tokenizer::load(named.folder.path() / "x.gguf").encode("", true).front(), 1);
    root["post_processor"] = around({"<s>"}, {"</s>"}, vocabulary);
    expect_same(root, model, texts, R"({"bos_token": "<s>", "eos_token": "</s>"})");
    root["post_processor"] = around({}, {"</s>"}, vocabulary);
    expect_same(root, model, texts, R"({"eos_token": "</s>"})");
    root["post_processor"] = around({"<s>", "</s>"}, {}, vocabulary);
    expect_warned(root, {"post_processor", "bos_token", "1, 2"});
    root["post_processor"] = around({"</s>"}, {}, vocabulary);
    expect_warned(root, {"post_processor", "bos_token", "2"});
    root["post_processor"] = {
        {"type", "BertProcessing"}, {"cls", {"<s>", 1}}, {"sep", {"</s>", 2}}};
    expect_same(root, model, texts, R"({"bos_token": "<s>", "eos_token": "</s>"})");
    expect_warned(root, {"post_processor", "eos_token"},
                  R"({"bos_token": "<s>", "eos_token": "<unk>"})");
  }
}

TEST(WriteTokenizer, FlagsOfAddedTokens) {
  for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
    Json root = marked(true);
    root["added_tokens"][2][flag] = true;
    expect_warned(root, {"added_tokens", flag});
  }
  Json root = marked(false);
  root["added_tokens"].push_back(added_token(100, "<x>", false));
  root["added_tokens"][3]["normalized"] = true;
  expect_same(root, "gemma4", {"a<x> b<s>"});
  root["added_tokens"][3]["content"] = "<x y>";
  expect_refused(root, {"added_tokens[3].normalized"});
  root["added_tokens"][3]["content"] = ">x";  // <s>x would be another token first
  expect_refused(root, {"added_tokens.normalized"});
  root["normalizer"] = marked(true)["normalizer"];
  root["decoder"] = marked(true)["decoder"];
  root["added_tokens"][3]["content"] = "<x>";
  expect_refused(root, {"added_tokens[3].normalized"});
}

TEST(WriteTokenizer, ByteLevel) {
  Json root = pair_tokenizer();
  root["normalizer"] = nullptr;
  root["pre_tokenizer"] = byte_level(true);
  root["decoder"] = byte_level(true);
  root["model"]["unk_token"] = "a";  // all bytes have tokens
  expect_same(root, "gpt2", {"aaa b", "\u00e9<x>"});
  root["normalizer"] = sequence("normalizers", Json::array());
  root["pre_tokenizer"].erase("use_regex");
  expect_same(root, "gpt2", {"aaa b"});
  Json other = root;
  other["model"]["vocab"].erase("b");
  expect_refused(other, {"model.unk_token"});
  other = root;
  other["model"]["end_of_word_suffix"] = "b";
  expect_refused(other, {"model.end_of_word_suffix", "none"});
  other = root;
  other["model"]["continuing_subword_prefix"] = "b";
  expect_refused(other, {"model.continuing_subword_prefix"});
  other = root;
  other["decoder"] = nullptr;
  expect_refused(other, {"decoder", "ByteLevel"});
  other = root;
  other["pre_tokenizer"]["add_prefix_space"] = true;
  expect_refused(other, {"pre_tokenizer", "one that GGUF has a name for"});
}

/// Normalization keeps tokens that no other text becomes, and that compose with none.
TEST(WriteTokenizer, NormalizedTokens) {
  Json root = pair_tokenizer();
  root["normalizer"] = {{"type", "NFC"}};
  root["pre_tokenizer"] = byte_level(true);
  root["decoder"] = byte_level(true);
  Json token = added_token(300, "  ", false);
  token["normalized"] = true;
  root["added_tokens"] = Json::array({token});
  expect_same(root, "gpt2", {"a  b", "a  \u0301b"});
  for (const char* content : {"<x>", "K|", "\u00e9|", "|a"}) {
    root["added_tokens"][0]["content"] = content;
    expect_refused(root, {"added_tokens[0].normalized"});
  }
}

}  // namespace
}  // namespace kvzap::test
