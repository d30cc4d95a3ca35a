#include <gtest/gtest.h>

#include <filesystem>
#include <kvzap/model/tokenizer.hpp>
#include <string>
#include <string_view>

#include "unit/temporary_folder.hpp"
#include "unit/text/tokenizer_files.hpp"

namespace {

using kvzap::Tokenizer;
using kvzap::test::byte_level;
using kvzap::test::expect_error;
using kvzap::test::expect_load_error;
using kvzap::test::golden_tokenizer;
using kvzap::test::Json;
using kvzap::test::load;
using kvzap::test::TemporaryFolder;

TEST(Tokenizer, ReadsTheOlderForms) {
  Json root = golden_tokenizer("gpt2");
  const Tokenizer reference = load(root);
  root["model"].erase("type");
  root["model"].erase("ignore_merges");
  root["model"]["dropout"] = 0.0;
  root["model"]["continuing_subword_prefix"] = "";
  root["model"]["end_of_word_suffix"] = "";
  root.erase("post_processor");
  root.erase("normalizer");
  root["pre_tokenizer"].erase("use_regex");
  root["decoder"] = {{"type", "Sequence"}, {"decoders", {root["decoder"]}}};
  const std::string text = "It's 2024, the older forms.  Done";
  EXPECT_EQ(load(root).encode(text), reference.encode(text));
}

TEST(Tokenizer, RefusesMissingOrBrokenFiles) {
  const TemporaryFolder folder;
  expect_error([&] { Tokenizer::load(folder.path()); }, {"tokenizer.json", "no readable file"});
  expect_error([&] { Tokenizer::load(folder.path() / "none"); }, {"none", "tokenizer.json"});
  for (const std::string_view content : {"", "{", "[1,", "\xff", "{\"model\": \"\xff\"}"}) {
    folder.write("tokenizer.json", content);
    expect_error([&] { Tokenizer::load(folder.path()); }, {"tokenizer.json", "JSON"});
  }
  folder.write("tokenizer.json", std::string(100000, '['));
  expect_error([&] { Tokenizer::load(folder.path()); }, {"tokenizer.json", "JSON"});
  for (const std::string_view content : {"[]", "1", "null", "\"x\""}) {
    folder.write("tokenizer.json", content);
    expect_error([&] { Tokenizer::load(folder.path()); }, {"tokenizer.json", "an object"});
  }
  folder.write("tokenizer.json", "{}");
  expect_error([&] { Tokenizer::load(folder.path()); }, {"model", "an object", "found none"});
  const TemporaryFolder directory;
  std::filesystem::create_directory(directory.path() / "tokenizer.json");
  expect_error([&] { Tokenizer::load(directory.path()); }, {"tokenizer.json", "no readable file"});
}

struct Defect {
  const char* pointer;  // where in the file
  const char* value;    // JSON
  const char* message;
};

class DefectiveTokenizer : public testing::TestWithParam<Defect> {};

TEST_P(DefectiveTokenizer, IsRefusedByName) {
  Json root = golden_tokenizer("llama3");
  root[Json::json_pointer(GetParam().pointer)] = Json::parse(GetParam().value);
  expect_load_error(root, {GetParam().message, "expected", "found"});
}

INSTANTIATE_TEST_SUITE_P(
    Model, DefectiveTokenizer,
    testing::Values(Defect{"/model/type", R"("WordModel")", "model.type"},
                    Defect{"/model/type", "3", "model.type"},
                    Defect{"/model/byte_fallback", R"("no")", "model.byte_fallback"},
                    Defect{"/model/dropout", "0.1", "model.dropout"},
                    Defect{"/model/dropout", R"("0")", "model.dropout"},
                    Defect{"/model/continuing_subword_prefix", "1",
                           "model.continuing_subword_prefix"},
                    Defect{"/model/continuing_subword_prefix", R"("########")", "model.merges[0]"},
                    Defect{"/model/end_of_word_suffix", "1", "model.end_of_word_suffix"},
                    Defect{"/model/unk_token", "1", "model.unk_token"},
                    Defect{"/model/fuse_unk", "1", "model.fuse_unk"},
                    Defect{"/model/ignore_merges", "1", "model.ignore_merges"},
                    Defect{"/model/vocab", "null", "model.vocab"},
                    Defect{"/model/vocab", "[]", "model.vocab"},
                    Defect{"/model/vocab", "{}", "model.vocab"},
                    Defect{"/model/vocab/new", "-1", "model.vocab.new"},
                    Defect{"/model/vocab/new", "2147483648", "model.vocab.new"},
                    Defect{"/model/vocab/new", "18446744073709551615", "model.vocab.new"},
                    Defect{"/model/vocab/new", "1e30", "model.vocab.new"},
                    Defect{"/model/vocab/new", "1.5", "model.vocab.new"},
                    Defect{"/model/vocab/new", R"("7")", "model.vocab.new"},
                    Defect{"/model/vocab/zzz", "5", "an id that no other token has"},
                    Defect{"/model/merges", "null", "model.merges"},
                    Defect{"/model/merges", R"("a b")", "model.merges"},
                    Defect{"/model/merges/3", R"("ab")", "model.merges[3]"},
                    Defect{"/model/merges/3", R"("a b c")", "model.merges[3]"},
                    Defect{"/model/merges/3", R"(["a"])", "model.merges[3]"},
                    Defect{"/model/merges/3", R"(["a", 1])", "model.merges[3][1]"},
                    Defect{"/model/merges/3", "7", "model.merges[3]"},
                    Defect{"/model/merges/3", R"("a qqqq")", "qqqq"},
                    Defect{"/model/merges/3", R"("! !")", "\"!!\""}));

INSTANTIATE_TEST_SUITE_P(
    Pipeline, DefectiveTokenizer,
    testing::Values(
        Defect{"/normalizer", R"({"type":"Prepend"})", "normalizer.prepend"},
        Defect{"/normalizer", R"({"type":"Other"})", "normalizer.type"},
        Defect{"/normalizer", R"({"type":"Strip","strip_left":true})", "normalizer.strip_right"},
        Defect{"/normalizer", R"({"type":"Replace","pattern":{"Regex":"("},"content":""})",
               "normalizer.pattern.Regex"},
        Defect{"/normalizer", R"({"type":"Precompiled","precompiled_charsmap":"?"})", "base64"},
        Defect{"/normalizer", R"({"type":"Precompiled","precompiled_charsmap":"AA=="})",
               "normalizer.precompiled_charsmap"},
        Defect{"/normalizer", R"({"type":"Precompiled","precompiled_charsmap":"////////"})",
               "holds its trie"},
        Defect{"/normalizer", R"({"type":"Sequence","normalizers":[{"type":"Replace"}]})",
               "normalizer.normalizers[0].pattern"},
        Defect{"/normalizer", R"({"type":"Sequence"})", "normalizer.normalizers"},
        Defect{"/normalizer", R"("NFC")", "normalizer"},
        Defect{"/pre_tokenizer", R"({"type":"Metaspace"})", "pre_tokenizer.replacement"},
        Defect{"/pre_tokenizer", R"({"type":"Metaspace","replacement":"ab"})", "one character"},
        Defect{"/pre_tokenizer", R"({"type":"Metaspace","replacement":"_","prepend_scheme":"x"})",
               "always, first or never"},
        Defect{"/pre_tokenizer",
               R"({"type":"Metaspace","replacement":"_","prepend_scheme":"first",)"
               R"("add_prefix_space":false})",
               "pre_tokenizer.add_prefix_space"},
        Defect{"/pre_tokenizer", R"({"type":"UnicodeScripts"})", "pre_tokenizer.type"},
        Defect{"/pre_tokenizer", R"({"type":"CharDelimiterSplit","delimiter":""})",
               "one character"},
        Defect{"/pre_tokenizer", R"({"type":"ByteLevel"})", "pre_tokenizer.add_prefix_space"},
        Defect{"/pre_tokenizer/pretokenizers/0/behavior", R"("Merged")", "behavior"},
        Defect{"/pre_tokenizer/pretokenizers/0/pattern", R"({"Glob":"*"})", "pattern"},
        Defect{"/pre_tokenizer/pretokenizers/0/pattern", R"("x")", "pattern"},
        Defect{"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex":7})", "pattern.Regex"},
        Defect{"/post_processor", R"({"type":"Other"})", "post_processor.type"},
        Defect{"/post_processor", R"({"type":"BertProcessing","cls":["a"],"sep":["a",0]})",
               "post_processor.cls"},
        Defect{"/post_processor", R"({"type":"RobertaProcessing","cls":["a",0],"sep":["a",9999]})",
               "post_processor.sep[1]"},
        Defect{"/post_processor/processors/0",
               R"({"type":"BertProcessing","cls":["a",0],)"
               R"("sep":["a",0]})",
               "post_processor.processors[1].type"},
        Defect{"/post_processor/processors/1/single", "[]", "the sequence A once"},
        Defect{"/post_processor/processors/1/single", R"([{"Sequence":{"id":"B"}}])",
               "the sequence A once"},
        Defect{"/post_processor/processors/1/single/0", R"({"SpecialToken":{"id":"?"}})",
               "special_tokens.?"},
        Defect{"/post_processor/processors/1/single/0", R"({"Other":1})", "SpecialToken"},
        Defect{"/post_processor/processors/1/special_tokens/<|begin_of_text|>/ids", "[99999]",
               "ids[0]"},
        Defect{"/decoder", R"({"type":"CTC"})", "decoder.type"},
        Defect{"/decoder", R"({"type":"Metaspace"})", "decoder.replacement"},
        Defect{"/decoder", R"({"type":"Strip","content":"","start":0,"stop":0})",
               "decoder.content"},
        Defect{"/decoder", R"({"type":"Strip","content":" ","start":-1,"stop":0})",
               "decoder.start"},
        Defect{"/decoder",
               R"({"type":"Replace","pattern":{"String":"a"},"content":)"
               R"("0123456789012345678901234567890123456789012345678901234567890123)"
               R"(4567890"})",
               "decoder.content"},
        Defect{"/decoder", R"({"type":"Sequence","decoders":[{"type":"CTC"}]})",
               "decoder.decoders[0].type"}));

INSTANTIATE_TEST_SUITE_P(
    AddedTokens, DefectiveTokenizer,
    testing::Values(Defect{"/added_tokens", "{}", "added_tokens"},
                    Defect{"/added_tokens/0", "5", "added_tokens[0]"},
                    Defect{"/added_tokens/0/id", "-5", "added_tokens[0].id"},
                    Defect{"/added_tokens/0/id", "3", "added_tokens[0].id"},
                    Defect{"/added_tokens/0/id", "null", "added_tokens[0].id"},
                    Defect{"/added_tokens/0/content", R"("")", "added_tokens[0].content"},
                    Defect{"/added_tokens/0/content", R"("!")", "the id in model.vocab"},
                    Defect{"/added_tokens/0/content", R"("<|eot_id|>")", "listed before"},
                    Defect{"/added_tokens/0/content", "null", "added_tokens[0].content"},
                    Defect{"/added_tokens/0/special", "1", "added_tokens[0].special"},
                    Defect{"/added_tokens/0/lstrip", R"("x")", "added_tokens[0].lstrip"}));

TEST(Tokenizer, RefusesEndlessNesting) {
  Json normalizer = {{"type", "NFC"}}, pre_tokenizer = byte_level(true), processor;
  processor = {{"type", "ByteLevel"}};
  // (Moved: copies of what is nested, a thousand times, would take most of the time.)
  const auto nest = [](Json& inner, const char* key) {
    Json outer = {{"type", "Sequence"}};
    outer[key].push_back(std::move(inner));
    inner = std::move(outer);
  };
  for (int i = 0; i < 1000; ++i) {
    nest(normalizer, "normalizers");
    nest(pre_tokenizer, "pretokenizers");
    nest(processor, "processors");
  }
  const auto with = [](const char* key, Json& value) {
    Json root = golden_tokenizer("gpt2");
    root[key] = std::move(value);
    return root;
  };
  expect_load_error(with("normalizer", normalizer), {"normalizer"});
  expect_load_error(with("pre_tokenizer", pre_tokenizer), {"pre_tokenizer"});
  expect_load_error(with("post_processor", processor), {"post_processor"});
}

TEST(Tokenizer, RefusesTokensThatNormalizeAlike) {
  Json root = golden_tokenizer("qwen2");
  for (const char* const content : {"\u00e9x", "e\u0301x"}) {
    root["added_tokens"].push_back({{"id", 1000 + root["added_tokens"].size()},
                                    {"content", content},
                                    {"normalized", true},
                                    {"special", false}});
  }
  expect_load_error(root, {"normalizes like no other"});
}

// Repeated keys, what stands after a NUL, and texts that would take many times their size.
TEST(Tokenizer, RefusesWhatOtherFilesMayNotHaveEither) {
  const TemporaryFolder folder;
  const auto refuse = [&](std::string_view content, std::initializer_list<std::string_view> parts) {
    folder.write("tokenizer.json", content);
    expect_error([&] { Tokenizer::load(folder.path()); }, {"tokenizer.json"});
    expect_error([&] { Tokenizer::load(folder.path()); }, parts);
  };
  refuse(R"({"model": {"vocab": {"a": 1, "b": 2, "a": 3}}})",
         {"'a' is given more than once at model.vocab.a"});
  refuse(std::string_view("{}\0{", 4), {"a NUL byte", "byte 3"});
  std::string lists = R"({"added_tokens": [)";
  for (int i = 0; i < 2000000; ++i) lists += "[],";
  refuse(lists, {"too many values at added_tokens[", "MB in memory"});
}

TEST(Tokenizer, QuotesHostileTokensShortly) {
  const std::string token = "\x1b[31m" + std::string(2000000, 'x') + std::string(1, '\0');
  for (const char* const pointer : {"/model/vocab/", "/model/merges/0", "/added_tokens/0/id",
                                    "/model/type", "/pre_tokenizer/type", "/normalizer"}) {
    Json root = golden_tokenizer("qwen2");
    root[Json::json_pointer(pointer == std::string("/model/vocab/") ? pointer + token : pointer)] =
        token;
    try {
      load(root);
      ADD_FAILURE() << pointer;
    } catch (const kvzap::Error& error) {
      const std::string message = error.what();
      EXPECT_LT(message.size(), 500u);
      EXPECT_EQ(message.find('\x1b'), std::string::npos);
      EXPECT_NE(message.find("\\x1b"), std::string::npos) << message;
    }
  }
}

// Of added tokens that begin alike the longest counts, whatever lies between them in the table.
TEST(Tokenizer, TakesTheLongestOfAddedTokens) {
  Json root = golden_tokenizer("qwen2");
  int id = 2000;
  for (const char* const content :
       {"@@", "@@a", "@@ab", "@@abz", "@@ac", "@@abcd", "@@abcdefgh", "@@b"}) {
    root["added_tokens"].push_back({{"id", id++}, {"content", content}, {"special", true}});
  }
  const Tokenizer tokenizer = load(root);
  const auto first = [&](std::string_view text) { return tokenizer.encode(text).at(0); };
  EXPECT_EQ(first("@@"), 2000);
  EXPECT_EQ(first("@@x"), 2000);
  EXPECT_EQ(first("@@aZ"), 2001);
  EXPECT_EQ(first("@@abc"), 2002);
  EXPECT_EQ(first("@@abcx"), 2002);
  EXPECT_EQ(first("@@abzz"), 2003);
  EXPECT_EQ(first("@@ac"), 2004);
  EXPECT_EQ(first("@@abcdefg"), 2005);
  EXPECT_EQ(first("@@abcdefgh"), 2006);
  EXPECT_EQ(first("@@b"), 2007);
}

}  // namespace
