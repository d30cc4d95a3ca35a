#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <kvzap/tokenizer.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::TokenId;
using kvzap::Tokenizer;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;
using Json = nlohmann::json;

const std::filesystem::path source_folder = KVZAP_SOURCE_DIR;
const std::filesystem::path golden_folder = source_folder / "tests/golden/tokenizer";

Json read_json(const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("cannot read " + path.string());
  return Json::parse(stream);
}

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

/// A tokenizer.json of one of the golden tokenizers, to be spoiled or varied.
Json golden_tokenizer(const std::string& name) {
  return read_json(golden_folder / name / "tokenizer.json");
}

Tokenizer load(const Json& root) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", root.dump());
  return Tokenizer::load(folder.path());
}

void expect_load_error(const Json& root, std::initializer_list<std::string_view> parts) {
  expect_error([&] { load(root); }, {"tokenizer.json"});
  expect_error([&] { load(root); }, parts);
}

Json byte_level(bool use_regex, bool add_prefix_space = false) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

/// The pre-tokenizer that splits by a regular expression only.
Json split_by(const std::string& regex, const std::string& behavior = "Isolated") {
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", regex}}},
                      {"behavior", behavior},
                      {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level(false)}}};
}

/// A vocabulary of bytes and of "aa", whose merge shows where text was split.
Json pair_tokenizer() {
  Json root = golden_tokenizer("gpt2");
  Json vocabulary;
  for (const auto& [token, id] : root["model"]["vocab"].items()) {
    if (id.get<int>() < 256) vocabulary[token] = id;
  }
  EXPECT_EQ(vocabulary.size(), 256u);
  vocabulary["aa"] = 256;
  root["model"]["vocab"] = vocabulary;
  root["model"]["merges"] = {"a a"};
  root["added_tokens"] = Json::array();
  return root;
}

/// Number of tokens of a text, which shows where the pre-tokenizer split it.
std::size_t token_count(const std::string& regex, std::string_view text) {
  Json root = pair_tokenizer();
  root["pre_tokenizer"] = split_by(regex);
  return load(root).encode(text).size();
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
  const std::size_t size = 1000000;
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

TEST(Tokenizer, LaterOfTwoEqualMergesCounts) {
  Json root = pair_tokenizer();
  root["model"]["vocab"]["ab"] = 257;
  root["model"]["merges"] = {"a a", "a b", "a a"};
  const Tokenizer tokenizer = load(root);
  EXPECT_EQ(tokenizer.encode("aab").back(), 257);
}

TEST(Tokenizer, TemplatesNest) {
  Json root = golden_tokenizer("llama3");
  const Tokenizer plain = load(root);
  const TokenId bos = *plain.token_id("<|begin_of_text|>"), eot = *plain.token_id("<|eot_id|>");
  const Json outer = {{"type", "TemplateProcessing"},
                      {"single",
                       {{{"SpecialToken", {{"id", "E"}, {"type_id", 0}}}},
                        {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                        {{"SpecialToken", {{"id", "E"}, {"type_id", 0}}}}}},
                      {"special_tokens", {{"E", {{"ids", {eot}}}}}}};
  root["post_processor"]["processors"].push_back(outer);
  const Tokenizer tokenizer = load(root);
  EXPECT_EQ(tokenizer.encode("", true), (std::vector<TokenId>{eot, bos, eot}));
  EXPECT_EQ(tokenizer.encode(""), std::vector<TokenId>{});
}

TEST(Tokenizer, WhiteSpaceClassesMatchUnicodeWhiteSpace) {
  // U+180E is white space to PCRE2, not to the reference; U+0085 is to both.
  EXPECT_EQ(token_count(R"(a\sa)", "aa\u0085aa"), 6u);
  EXPECT_EQ(token_count(R"(\s)", "a\u180ea"), 5u);
  EXPECT_EQ(token_count(R"(\S+)", "aa"), 1u);
  EXPECT_EQ(token_count(R"([^\s])", "aa"), 2u);
  EXPECT_EQ(token_count(R"([^\S])", "aa"), 1u);
  EXPECT_EQ(token_count(R"([\S])", "aa"), 2u);
  EXPECT_EQ(token_count(R"([\s-a])", "aa"), 2u);
}

TEST(Tokenizer, RegularExpressionsMeanWhatTheyMeanToOniguruma) {
  EXPECT_EQ(token_count(R"(a{,1})", "aa"), 2u);   // {,n} is {0,n}
  EXPECT_EQ(token_count(R"(^a)", "aa\naa"), 5u);  // ^ matches at each line
  EXPECT_EQ(token_count(R"(.)", "aa"), 2u);
  EXPECT_EQ(token_count(R"([^\v])", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\u0061)", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\x{61})", "aa"), 2u);
  EXPECT_EQ(token_count(R"((?i)A)", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\p{Latin})", "aa"), 2u);
  EXPECT_EQ(token_count(R"(\p{^Latin})", "aa"), 1u);
  EXPECT_EQ(token_count(R"(\P{Nd}|\d|\D)", "aa"), 2u);
  EXPECT_EQ(token_count("", "aa"), 2u);  // empty matches split everywhere
}

TEST(Tokenizer, RefusesRegularExpressionsReadDifferentlyElsewhere) {
  for (const char* const regex :
       {R"(\w)",      R"(\h)",     R"(\R)",          R"(\bx)",        R"(\1)",
        R"(\Qa)",     R"([a[b]])", R"([[:alpha:]])", R"([a&&b])",     R"(a{1,2}+)",
        R"(a{2}?)",   R"(a{x})",   R"(a(?i)b|c)",    R"((?<n>a))",    R"((?m:a))",
        R"((*UCP)a)", R"(\p{)",    R"(\pL)",         R"(\p{sc:Han})", R"(\x{110000000})",
        R"(\xff)",    R"(\u12)",   R"([a)",          R"([]a])",       "a\\"}) {
    Json root = pair_tokenizer();
    root["pre_tokenizer"] = split_by(regex);
    expect_load_error(root, {"pre_tokenizer.pretokenizers[0].pattern.Regex", "supported syntax"});
  }
  for (const char* const regex : {"(a", "a)", "*", R"(\p{Nonsense})", R"(\x{d800})"}) {
    Json root = pair_tokenizer();
    root["pre_tokenizer"] = split_by(regex);
    expect_load_error(root, {"pre_tokenizer.pretokenizers[0].pattern.Regex"});
  }
}

TEST(Tokenizer, ReportsExceededMatchLimits) {
  Json root = pair_tokenizer();
  root["pre_tokenizer"] = split_by(R"((?:a+)+(?:a+)+[bc])");
  const Tokenizer tokenizer = load(root);
  expect_error([&] { tokenizer.encode(std::string(60, 'a')); },
               {"pre_tokenizer.pretokenizers[0].pattern.Regex", "limit"});
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
  expect_error([&] { Tokenizer::load(folder.path()); }, {"model", "an object", "null"});
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
    testing::Values(Defect{"/model/type", R"("Unigram")", "model.type"},
                    Defect{"/model/type", "3", "model.type"},
                    Defect{"/model/byte_fallback", "true", "model.byte_fallback"},
                    Defect{"/model/byte_fallback", R"("no")", "model.byte_fallback"},
                    Defect{"/model/dropout", "0.1", "model.dropout"},
                    Defect{"/model/dropout", R"("0")", "model.dropout"},
                    Defect{"/model/continuing_subword_prefix", R"("##")",
                           "model.continuing_subword_prefix"},
                    Defect{"/model/end_of_word_suffix", R"("</w>")", "model.end_of_word_suffix"},
                    Defect{"/model/ignore_merges", "1", "model.ignore_merges"},
                    Defect{"/model/vocab", "null", "model.vocab"},
                    Defect{"/model/vocab", "[]", "model.vocab"},
                    Defect{"/model/vocab", "{}", "a token for each byte"},
                    Defect{"/model/vocab/new", "-1", "model.vocab.new"},
                    Defect{"/model/vocab/new", "2147483648", "model.vocab.new"},
                    Defect{"/model/vocab/new", "18446744073709551615", "model.vocab.new"},
                    Defect{"/model/vocab/new", "1e30", "model.vocab.new"},
                    Defect{"/model/vocab/new", "1.5", "model.vocab.new"},
                    Defect{"/model/vocab/new", R"("7")", "model.vocab.new"},
                    Defect{"/model/vocab/zzz", "5", "an id that no other token has"},
                    Defect{"/model/merges", "null", "model.merges"},
                    Defect{"/model/merges", "[]", "model.merges"},
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
        Defect{"/normalizer", R"({"type":"Prepend","prepend":"_"})", "normalizer.type"},
        Defect{"/normalizer", R"({"type":"NFKC"})", "normalizer.type"},
        Defect{"/normalizer", R"({"type":"Sequence","normalizers":[{"type":"Replace"}]})",
               "normalizer.normalizers[0].type"},
        Defect{"/normalizer", R"({"type":"Sequence"})", "normalizer.normalizers"},
        Defect{"/normalizer", R"("NFC")", "normalizer"},
        Defect{"/pre_tokenizer", "null", "a ByteLevel pre-tokenizer"},
        Defect{"/pre_tokenizer", R"({"type":"Metaspace"})", "pre_tokenizer.type"},
        Defect{"/pre_tokenizer", R"({"type":"Digits"})", "a ByteLevel pre-tokenizer"},
        Defect{"/pre_tokenizer", R"({"type":"ByteLevel"})", "pre_tokenizer.add_prefix_space"},
        Defect{"/pre_tokenizer", R"({"type":"Sequence","pretokenizers":[]})",
               "a ByteLevel pre-tokenizer"},
        Defect{"/pre_tokenizer/pretokenizers/0", R"({"type":"ByteLevel","add_prefix_space":false})",
               "pre_tokenizer.pretokenizers[0].type"},
        Defect{"/pre_tokenizer/pretokenizers/0/behavior", R"("Merged")", "behavior"},
        Defect{"/pre_tokenizer/pretokenizers/0/pattern", R"({"Glob":"*"})", "pattern"},
        Defect{"/pre_tokenizer/pretokenizers/0/pattern", R"("x")", "pattern"},
        Defect{"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex":7})", "pattern.Regex"},
        Defect{"/post_processor", R"({"type":"BertProcessing"})", "post_processor.type"},
        Defect{"/post_processor/processors/1/single", "[]", "the sequence A once"},
        Defect{"/post_processor/processors/1/single", R"([{"Sequence":{"id":"B"}}])",
               "the sequence A once"},
        Defect{"/post_processor/processors/1/single/0", R"({"SpecialToken":{"id":"?"}})",
               "special_tokens.?"},
        Defect{"/post_processor/processors/1/single/0", R"({"Other":1})", "SpecialToken"},
        Defect{"/post_processor/processors/1/special_tokens/<|begin_of_text|>/ids", "[99999]",
               "ids[0]"},
        Defect{"/decoder", "null", "decoder"},
        Defect{"/decoder", R"({"type":"Metaspace"})", "decoder.type"},
        Defect{"/decoder", R"({"type":"Sequence","decoders":[]})", "decoder.decoders"},
        Defect{"/decoder", R"({"type":"Sequence","decoders":[{"type":"Fuse"}]})",
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
  for (int i = 0; i < 1000; ++i) {
    normalizer = {{"type", "Sequence"}, {"normalizers", Json::array({normalizer})}};
    pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", Json::array({pre_tokenizer})}};
    processor = {{"type", "Sequence"}, {"processors", Json::array({processor})}};
  }
  const auto with = [](const char* key, const Json& value) {
    Json root = golden_tokenizer("gpt2");
    root[key] = value;
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

}  // namespace
