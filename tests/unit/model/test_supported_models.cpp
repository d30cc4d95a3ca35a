// The list of supported models, beside the readers of config.json and of tokenizers.
#include <gtest/gtest.h>

#include <kvzap/model/supported_models.hpp>
#include <set>

namespace kvzap {
namespace {

TEST(SupportedModels, EveryPartNamesItsTests) {
  std::set<std::string> keys;
  for (const SupportedKind& kind : supported_models()) {
    EXPECT_TRUE(keys.insert(kind.key).second) << kind.key;
    EXPECT_FALSE(kind.title.empty()) << kind.key;
    EXPECT_FALSE(kind.parts.empty()) << kind.key;
    std::set<std::string> names;
    for (const SupportedPart& part : kind.parts) {
      EXPECT_TRUE(names.insert(part.name).second) << part.name;
      EXPECT_FALSE(part.tested.empty()) << kind.key << ": " << part.name;
    }
  }
}

TEST(SupportedModels, HasTheTypesOfPublishedFiles) {
  const auto names = [](const std::string& key) {
    std::set<std::string> found;
    for (const SupportedKind& kind : supported_models()) {
      if (kind.key != key) continue;
      for (const SupportedPart& part : kind.parts) found.insert(part.name);
    }
    return found;
  };
  EXPECT_EQ(names("gguf_weights"),
            (std::set<std::string>{"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
                                   "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"}));
  EXPECT_EQ(names("architectures").count("Qwen3ForCausalLM"), 1U);
  EXPECT_EQ(names("safetensors_weights").count("gptq"), 1U);
}

}  // namespace
}  // namespace kvzap
