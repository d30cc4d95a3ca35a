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
  for (const char* const name :
       {"gpt-2",     "phi-2",     "jais",        "trillion",  "mpt",          "olmo",
        "smollm",    "starcoder", "refact",      "codeshell", "exaone",       "minerva-7b",
        "command-r", "llama-bpe", "llama3",      "llama-v3",  "falcon3",      "falcon-h1",
        "pixtral",   "lfm2",      "dbrx",        "smaug-bpe", "qwen2",        "deepseek-r1-qwen",
        "stablelm2", "tekken",    "gpt-4o",      "llama4",    "deepseek-llm", "deepseek-coder",
        "falcon",    "default",   "deepseek-v3", "glm4",      "chatglm-bpe",  "minimax-m2"}) {
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
