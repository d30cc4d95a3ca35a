// Requests for vectors of texts: what is read, refused and replied.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>

#include "files/base64.hpp"
#include "unit/server/served_model.hpp"

namespace kvzap::server {
namespace {

using Json = nlohmann::json;
using test::served;

ApiRequest read(Endpoint endpoint, const Json& body) {
  return parse_request(body.dump(), endpoint, served());
}

/// "FIELD: message" of the refusal.
std::string refusal(Endpoint endpoint, const Json& body) {
  try {
    read(endpoint, body);
  } catch (const BadRequest& error) {
    return error.field + ": " + error.what();
  }
  return "";
}

Json reply(Endpoint endpoint, const Json& body, const std::vector<std::vector<float>>& vectors) {
  const ServedModel model = served();
  const ApiRequest request = parse_request(body.dump(), endpoint, model);
  EXPECT_EQ(static_cast<std::size_t>(request.answers()), vectors.size());
  std::vector<ReplyWriter::Whole> answers(vectors.size());
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    answers[i].embedding = vectors[i];
    answers[i].ending.prompt_tokens = 3;
  }
  return Json::parse(ReplyWriter::make(request, model, 7, 99)->body(answers));
}

TEST(Embeddings, InputsAreTextsOrIds) {
  const ServedModel model = served();
  const ApiRequest text = read(Endpoint::embeddings, {{"input", "one two"}, {"user", "u"}});
  ASSERT_EQ(text.generations.size(), 1U);
  const GenerationRequest& one = text.generations.front();
  EXPECT_EQ(one.prompt.front().tokens, model.tokenizer->encode("one two", true));
  EXPECT_EQ(one.pooling, Pooling::last);
  EXPECT_EQ(one.max_new_tokens, 0);
  EXPECT_EQ(one.pruning->mode, PruneMode::none);
  EXPECT_FALSE(text.streams);
  const ApiRequest ids = read(Endpoint::embeddings, {{"input", {5, 6}}, {"model", "recall"}});
  EXPECT_EQ(ids.generations.front().prompt.front().tokens, (std::vector<TokenId>{5, 6}));
  EXPECT_EQ(ids.prompt_tokens, 2);
  const ApiRequest lists = read(Endpoint::embeddings, {{"input", {{5}, {6, 7}}}});
  EXPECT_EQ(lists.generations[1].prompt.front().tokens, (std::vector<TokenId>{6, 7}));
  EXPECT_EQ(lists.answers(), 2);
  EXPECT_EQ(read(Endpoint::embeddings, {{"input", {"a", "b", "c"}}}).answers(), 3);
  ServedModel mean = served();
  mean.pooling = Pooling::mean;
  EXPECT_EQ(parse_request(R"({"input": "a"})", Endpoint::embeddings, mean).generations[0].pooling,
            Pooling::mean);
}

TEST(Embeddings, WrongRequestsNameTheirField) {
  const auto starts = [](Endpoint endpoint, const Json& body, const std::string& with) {
    const std::string found = refusal(endpoint, body);
    EXPECT_EQ(found.rfind(with, 0), 0U) << found << "; expected " << with;
  };
  const auto embeddings = Endpoint::embeddings;
  starts(embeddings, Json::object(), "input: the input is missing");
  starts(embeddings, {{"input", nullptr}}, "input: input is null; expected");
  starts(embeddings, {{"input", ""}}, "input: input has no tokens");
  starts(embeddings, {{"input", {"a", ""}}}, "input[1]: input[1] has no tokens");
  starts(embeddings, {{"input", Json::array()}}, "input: ");
  starts(embeddings, {{"input", {1024}}}, "input: ");
  starts(embeddings, {{"input", std::vector<std::string>(1025, "a")}},
         "input: input is an array of 1025 prompts; expected at most 1024");
  starts(embeddings, {{"input", "a"}, {"dimensions", 8}},
         "dimensions: dimensions is not supported");
  starts(embeddings, {{"input", "a"}, {"kvzap", {{"threshold", 1}}}}, "kvzap: ");
  starts(embeddings, {{"input", "a"}, {"encoding_format", "int8"}},
         R"(encoding_format: encoding_format is 'int8'; expected "float" or "base64")");
  starts(Endpoint::score, {{"text_1", {"a", "b"}}, {"text_2", {"a", "b", "c"}}},
         "text_1: text_1 has 2 texts; expected 1, or 3 as text_2 has");
  starts(Endpoint::rerank, {{"query", {"a"}}, {"documents", {"a"}}}, "query: ");
  starts(Endpoint::rerank, {{"query", "a"}, {"documents", {{5}}}}, "documents: ");
  ServedModel model = served();
  model.hidden_size = 64;
  EXPECT_NO_THROW(
      parse_request(R"({"input": "a", "dimensions": 64})", Endpoint::embeddings, model));
}

TEST(Embeddings, RepliesHaveUnitVectors) {
  const Json body = {{"input", {"a", "b"}}};
  const Json floats = reply(Endpoint::embeddings, body, {{3, 4, 0}, {0, 0, 0}});
  EXPECT_EQ(floats["object"], "list");
  EXPECT_EQ(floats["model"], "recall");
  EXPECT_EQ(floats["usage"], (Json{{"prompt_tokens", 6}, {"total_tokens", 6}}));
  EXPECT_EQ(floats["data"][0]["object"], "embedding");
  EXPECT_EQ(floats["data"][1]["index"], 1);
  EXPECT_NEAR(floats["data"][0]["embedding"][1].get<double>(), 0.8, 1e-7);
  EXPECT_EQ(floats["data"][1]["embedding"], (Json{0.0, 0.0, 0.0}));
  Json in_base64 = body;
  in_base64["encoding_format"] = "base64";
  const Json packed = reply(Endpoint::embeddings, in_base64, {{3, 4, 0}, {1, 0, 0}});
  const auto bytes = files::from_base64(packed["data"][0]["embedding"].get<std::string>());
  ASSERT_TRUE(bytes && bytes->size() == 12);
  float numbers[3] = {};
  std::memcpy(numbers, bytes->data(), sizeof numbers);
  EXPECT_FLOAT_EQ(numbers[0], 0.6F);
  EXPECT_FLOAT_EQ(numbers[1], 0.8F);
}

TEST(Embeddings, ScoresAreCosines) {
  const Json one =
      reply(Endpoint::score, {{"text_1", "q"}, {"text_2", {"a", "b"}}}, {{2, 0}, {3, 4}, {-1, 0}});
  EXPECT_EQ(one["object"], "list");
  EXPECT_EQ(one["data"].size(), 2U);
  EXPECT_NEAR(one["data"][0]["score"].get<double>(), 0.6, 1e-6);
  EXPECT_NEAR(one["data"][1]["score"].get<double>(), -1, 1e-6);
  const Json each = reply(Endpoint::score, {{"text_1", {"p", "q"}}, {"text_2", {"a", "b"}}},
                          {{1, 0}, {0, 1}, {5, 0}, {5, 0}});
  EXPECT_NEAR(each["data"][0]["score"].get<double>(), 1, 1e-6);
  EXPECT_NEAR(each["data"][1]["score"].get<double>(), 0, 1e-6);
  const Json ranked =
      reply(Endpoint::rerank, {{"query", "q"}, {"documents", {"a", "b", "c"}}, {"top_n", 2}},
            {{1, 0}, {0, 1}, {1, 0}, {1, 1}});
  ASSERT_EQ(ranked["results"].size(), 2U);
  EXPECT_EQ(ranked["results"][0]["index"], 1);
  EXPECT_EQ(ranked["results"][0]["document"]["text"], "b");
  EXPECT_EQ(ranked["results"][1]["index"], 2);
  EXPECT_NEAR(ranked["results"][1]["relevance_score"].get<double>(), std::sqrt(0.5), 1e-6);
}

}  // namespace
}  // namespace kvzap::server
