// The pre-tokenizers that GGUF files name, as Hugging Face's tokenizers splits texts.
#include <gtest/gtest.h>

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "gguf/made_files.hpp"
#include "unit/text/tokenizer_files.hpp"

namespace {

using kvzap::TokenId;
using kvzap::gguf::pre_tokenizer_kind;
using kvzap::test::golden_folder;
using kvzap::test::golden_tokenizer;
using kvzap::test::Json;
using kvzap::test::load;
using kvzap::test::read_json;

TEST(PreTokenizerNames, SplitAsReference) {
  const Json golden = read_json(golden_folder / "pre_tokenizers.json");
  std::set<std::string> names;
  for (const Json& row : golden["kinds"]) {
    Json root = golden_tokenizer("gpt2");
    for (const std::string name : row["names"]) {
      SCOPED_TRACE(name);
      names.insert(name);
      const auto kind = pre_tokenizer_kind(name);
      ASSERT_TRUE(kind);
      EXPECT_EQ(kind->normalizer, row["normalizer"]);
      EXPECT_EQ(kind->pre_tokenizer, row["pre_tokenizer"]);
    }
    root["normalizer"] = row["normalizer"];
    root["pre_tokenizer"] = row["pre_tokenizer"];
    const kvzap::Tokenizer tokenizer = load(root);
    for (std::size_t i = 0; i < golden["texts"].size(); ++i) {
      const std::string text = golden["texts"][i];
      EXPECT_EQ(tokenizer.encode(text), row["ids"][i].get<std::vector<TokenId>>())
          << row["names"] << text;
    }
  }
  for (const std::string_view name : kvzap::gguf::pre_tokenizer_names()) {
    EXPECT_EQ(names.count(std::string(name)), 1u) << name;
  }
}

}  // namespace
