// 16-bit weights and caches answer as float does: at least 95 of 100 held-out prompts get the same
// generated ids, with the full cache and with a pruned one; and the answers are right.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>

#include "source_dir.hpp"

namespace kvzap {
namespace {

const std::filesystem::path inputs = test::source_dir() / "inputs";
const std::filesystem::path folder = inputs / "models/recall-4m";

struct EvalPrompt {
  std::vector<TokenId> context, question;
  std::string answer;
  std::int64_t max_new_tokens;
};

std::vector<EvalPrompt> eval_prompts(const Tokenizer& tokenizer) {
  const auto parts = ChatTemplate::detect(folder).parts(false);
  std::vector<EvalPrompt> prompts;
  for (const auto& [file, count] :
       {std::pair{"recall-256.jsonl", 50}, {"recall-512.jsonl", 30}, {"recall-1024.jsonl", 20}}) {
    std::ifstream stream(inputs / "eval" / file);
    std::string line;
    for (int i = 0; i < count && std::getline(stream, line); ++i) {
      const auto json = nlohmann::json::parse(line);
      prompts.push_back({tokenizer.encode(parts.prefix + json["context"].get<std::string>()),
                         tokenizer.encode(json["question"].get<std::string>() + parts.suffix),
                         json["answer"], json["max_new_tokens"]});
    }
  }
  return prompts;
}

template <class Value>
std::vector<std::vector<TokenId>> answers(const std::vector<EvalPrompt>& prompts, bool pruned) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = ModelConfig::load(folder);
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const Model>(
      Model::load(folder, config, DTypeOf<Value>::value, partition, comm.rank()));
  CacheOptions options;
  options.pruning.mode = pruned ? PruneMode::prefill : PruneMode::none;
  options.pruning.amount.threshold = -4.3f;
  options.pruning.window = 32;
  std::vector<std::vector<TokenId>> all;
  std::shared_ptr<Surrogate> surrogate;
  if (pruned) {
    surrogate = std::make_shared<Surrogate>(Surrogate::load(inputs / "models/kvzap-mlp-recall-4m",
                                                            config, partition, comm.rank(),
                                                            DTypeOf<Value>::value, comm));
  }
  const auto stop_ids = load_stop_ids(folder, config.vocab_size);
  for (const EvalPrompt& prompt : prompts) {
    const auto generator = Generator::create(model, surrogate, options, comm);
    generator->prefill(prompt.context, false);
    AnswerOptions answer_options;
    answer_options.max_new_tokens = prompt.max_new_tokens;
    answer_options.stop_ids = stop_ids;
    all.push_back(generator->answer(prompt.question, answer_options).tokens);
  }
  return all;
}

class ValueTypes : public ::testing::TestWithParam<bool> {};

TEST_P(ValueTypes, AgreeOnEvalPrompts) {
  const Tokenizer tokenizer = Tokenizer::load(folder);
  const auto prompts = eval_prompts(tokenizer);
  ASSERT_EQ(prompts.size(), 100u);
  const auto reference = answers<float>(prompts, GetParam());
  int right = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    right += tokenizer.decode(reference[i]) == prompts[i].answer;
  }
  EXPECT_GE(right, 95) << "answers in float that are right";
  const auto compare = [&](const std::vector<std::vector<TokenId>>& ids, const char* name) {
    int same = 0;
    for (std::size_t i = 0; i < prompts.size(); ++i) same += ids[i] == reference[i];
    RecordProperty(fmt::format("{}_same_as_f32", name), same);
    std::printf("%s: %d of 100 answers as in f32 (%d right in f32)\n", name, same, right);
    EXPECT_GE(same, 95) << name;
  };
  compare(answers<bfloat16>(prompts, GetParam()), "bf16");
  compare(answers<half>(prompts, GetParam()), "f16");
}

INSTANTIATE_TEST_SUITE_P(Caches, ValueTypes, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "pruned" : "full");
});

}  // namespace
}  // namespace kvzap
