#include <gtest/gtest.h>

#include <string>

#include "gguf/made_files.hpp"
#include "unit/text/tokenizer_files.hpp"

namespace {

using kvzap::gguf::pre_tokenizer_kind;
using kvzap::test::golden_tokenizer;
using kvzap::test::Json;
using kvzap::test::load;

/// Every name of a pre-tokenizer in a GGUF file makes a tokenizer.json that loads.
TEST(PreTokenizerNames, MakeTokenizers) {
  for (const std::string_view name : kvzap::gguf::pre_tokenizer_names()) {
    SCOPED_TRACE(name);
    auto kind = pre_tokenizer_kind(name);
    ASSERT_TRUE(kind);
    Json root = golden_tokenizer("gpt2");
    root["normalizer"] = kind->normalizer;
    root["pre_tokenizer"] = kind->pre_tokenizer;
    const std::string text = "It's 2024: \u1F7D\u2126\u1FD3!\n\nΩmega, 中文。 done";
    EXPECT_EQ(load(root).decode(load(root).encode(text)).substr(0, 10), "It's 2024:");
  }
}

}  // namespace
