// Tokenizer files for tests: the golden ones, and what is made of them.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {

using Json = nlohmann::json;

inline const std::filesystem::path source_folder = test::source_dir();
inline const std::filesystem::path golden_folder = source_folder / "tests/golden/tokenizer";

inline Json read_json(const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("cannot read " + path.string());
  return Json::parse(stream);
}

/// A tokenizer.json of one of the golden tokenizers, to be spoiled or varied.
inline Json golden_tokenizer(const std::string& name) {
  return read_json(golden_folder / name / "tokenizer.json");
}

inline Tokenizer load(const Json& root) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", root.dump());
  return Tokenizer::load(folder.path());
}

inline void expect_load_error(const Json& root, std::initializer_list<std::string_view> parts) {
  expect_error([&] { load(root); }, {"tokenizer.json"});
  expect_error([&] { load(root); }, parts);
}

inline Json byte_level(bool use_regex, bool add_prefix_space = false) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", add_prefix_space},
          {"trim_offsets", true},
          {"use_regex", use_regex}};
}

/// The pre-tokenizer that splits by a regular expression only.
inline Json split_by(const std::string& regex, const std::string& behavior = "Isolated") {
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", regex}}},
                      {"behavior", behavior},
                      {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level(false)}}};
}

/// A vocabulary of bytes and of "aa", whose merge shows where text was split.
inline Json pair_tokenizer() {
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

}  // namespace kvzap::test
