// OpenAI's protocol: what requests are taken for, which are refused and why, what replies say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>
#include <random>

#include "server/answer_parts.hpp"
#include "unit/server/served_model.hpp"

namespace kvzap::server {
namespace {

using Json = nlohmann::json;
using test::served;
using test::served_with_tools;
using test::text_of;

Json message(const std::string& role, const Json& content) {
  return {{"role", role}, {"content", content}};
}
Json part(const std::string& text) { return {{"type", "text"}, {"text", text}}; }

ApiRequest chat(const Json& body) { return parse_request(body.dump(), Endpoint::chat, served()); }
ApiRequest completion(const Json& body) {
  return parse_request(body.dump(), Endpoint::completions, served());
}

TEST(Protocol, ChatHasDefaultsAndOptions) {
  Json body = {{"model", "recall"}, {"messages", {message("user", "What is 3?")}}};
  ApiRequest request = chat(body);
  EXPECT_TRUE(request.is_chat());
  EXPECT_FALSE(request.streams);
  EXPECT_EQ(request.generations.front().choices, 1);
  EXPECT_EQ(request.generations.front().top_logprobs, -1);
  EXPECT_EQ(request.generations.front().stop_ids, (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(request.generations.front().pruning->mode, PruneMode::prefill);
  EXPECT_FALSE(request.generations.front().pruning->amount.threshold);
  std::int64_t prompt = 0;
  for (const Segment& segment : request.generations.front().prompt) {
    prompt += static_cast<std::int64_t>(segment.tokens.size());
  }
  EXPECT_EQ(request.generations.front().max_new_tokens, 4096 - prompt + 1);
  body.update({{"max_tokens", 7},
               {"max_completion_tokens", 5},
               {"temperature", 0.5},
               {"top_p", 0},
               {"top_k", -1},
               {"seed", -3},
               {"stop", {"a", "bc"}},
               {"n", 2},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}},
               {"logprobs", true},
               {"top_logprobs", 4},
               {"ignore_eos", true},
               {"user", "somebody"},
               {"tools", Json::array()},
               {"kvzap", {{"threshold", -2.5}, {"prune", "none"}}}});
  request = chat(body);
  EXPECT_EQ(request.generations.front().max_new_tokens, 5);
  EXPECT_EQ(request.generations.front().sampling.temperature, 0.5);
  EXPECT_GT(request.generations.front().sampling.top_p, 0);
  EXPECT_EQ(request.generations.front().sampling.top_k, 0);
  EXPECT_EQ(request.generations.front().sampling.seed, static_cast<std::uint64_t>(-3));
  EXPECT_EQ(request.stop, (std::vector<std::string>{"a", "bc"}));
  EXPECT_EQ(request.generations.front().choices, 2);
  EXPECT_TRUE(request.streams && request.includes_usage && request.has_logprobs);
  EXPECT_EQ(request.generations.front().top_logprobs, 4);
  EXPECT_TRUE(request.generations.front().stop_ids.empty());
  EXPECT_EQ(request.generations.front().pruning->amount.threshold, -2.5);
  EXPECT_EQ(request.generations.front().pruning->mode, PruneMode::none);
}

TEST(Protocol, CompletionsTakeTextOrIds) {
  const ServedModel model = served();
  const ApiRequest text = completion({{"prompt", "one two"}, {"echo", true}});
  EXPECT_EQ(text.generations.front().prompt.front().tokens,
            model.tokenizer->encode("one two", true));
  EXPECT_TRUE(text.generations.front().prompt.front().branches);
  EXPECT_EQ(text.generations.front().max_new_tokens, 16);
  EXPECT_EQ(text.prompt_texts, std::vector<std::string>{"one two"});
  EXPECT_EQ(completion({{"prompt", {"one two"}}}).generations.front().prompt.front().tokens,
            text.generations.front().prompt.front().tokens);
  for (const Json& prompt : {Json({5, 6, 7}), Json(std::vector<Json>{{5, 6, 7}})}) {
    const ApiRequest ids = completion({{"prompt", prompt}, {"logprobs", 2}});
    EXPECT_EQ(ids.generations.front().prompt.front().tokens, (std::vector<TokenId>{5, 6, 7}));
    EXPECT_EQ(ids.generations.front().top_logprobs, 2);
  }
}

TEST(Protocol, CompletionsTakeListsOfPrompts) {
  ServedModel model = served();
  const auto read = [&](const Json& fields) {
    Json body = {{"max_tokens", 8}};
    body.update(fields);
    return parse_request(body.dump(), Endpoint::completions, model);
  };
  const ApiRequest texts = read({{"prompt", {"one two", "three"}}, {"n", 3}, {"echo", true}});
  EXPECT_EQ(texts.prompts, 2);
  EXPECT_EQ(texts.choices, 3);
  EXPECT_EQ(texts.answers(), 6);
  EXPECT_EQ(texts.prompt_texts, (std::vector<std::string>{"one two", "three"}));
  ASSERT_EQ(texts.generations.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const GenerationRequest& one = texts.generations[i];
    EXPECT_EQ(one.choices, 3);
    EXPECT_EQ(one.max_new_tokens, 8);
    EXPECT_EQ(one.prompt.front().tokens, model.tokenizer->encode(texts.prompt_texts[i], true));
  }
  EXPECT_NE(texts.generations[0].sampling.seed, texts.generations[1].sampling.seed);
  // Each prompt is answered as if it were sent alone.
  const ApiRequest seeded = read({{"prompt", {"one two", "three"}}, {"seed", 5}});
  for (const GenerationRequest& one : seeded.generations) EXPECT_EQ(one.sampling.seed, 5U);
  // Each has the length that is left behind it.
  const std::vector<TokenId> two = {5, 6}, most(4094, 5);
  const ApiRequest ids = read({{"prompt", Json(std::vector<Json>{two, most})}});
  EXPECT_EQ(ids.generations[0].prompt.front().tokens, two);
  EXPECT_EQ(ids.generations[0].max_new_tokens, 8);
  EXPECT_EQ(ids.generations[1].max_new_tokens, 3);
}

TEST(Protocol, TheModelContinuesALastMessageOfTheAssistant) {
  const ServedModel model = served();
  const auto text_of = [&](const std::vector<Json>& messages) {
    const Json body = {{"messages", messages}};
    std::string text;
    const ApiRequest request = parse_request(body.dump(), Endpoint::chat, model);
    for (const Segment& segment : request.generations.front().prompt) {
      EXPECT_NE(segment.kind, Segment::Kind::generated);
      text += model.tokenizer->decode(segment.tokens, false);
    }
    return text;
  };
  const Json asked = message("user", "How many?");
  for (const char* begun : {"There are", " \n", "", "<think>\n1 + 1"}) {
    EXPECT_EQ(text_of({asked, message("assistant", begun)}), text_of({asked}) + begun);
  }
}

TEST(Protocol, RequestsHaveAPruningOfTheirOwn) {
  const auto pruning_of = [](const Json& wish) {
    return *completion({{"prompt", "a"}, {"kvzap", wish}}).generations.front().pruning;
  };
  const Pruning rows = pruning_of({{"policy", "snapkv:window=32"}, {"keep_tokens", 7}});
  EXPECT_EQ(rows.policy, "snapkv:window=32");
  EXPECT_EQ(rows.amount.keep_tokens, 7);
  const Pruning cut = pruning_of(
      {{"policy", "h2o"}, {"keep_tokens", 7}, {"decode_every", 128}, {"decode_evict_ratio", 0.5}});
  EXPECT_EQ(cut.decode, (Pruning::DecodeCuts{128, {}, 0.5}));
  EXPECT_EQ(pruning_of({{"decode_keep", 64}}).decode, (Pruning::DecodeCuts{0, 64, {}}));
  EXPECT_EQ(pruning_of({{"kv_budget", "2kB"}}).amount.kv_bytes, 2000);
  EXPECT_EQ(pruning_of({{"kv_budget", 4096}}).amount.kv_bytes, 4096);
}

TEST(Protocol, RequestsHaveATypeOfRowsOfTheirOwn) {
  const auto format_of = [](const Json& wish) {
    return *completion({{"prompt", "a"}, {"kvzap", wish}}).generations.front().page_format;
  };
  EXPECT_EQ(format_of({{"kv_type", "q8,q4"}}), (PageFormat{RowType::q8, RowType::q4}));
  EXPECT_EQ(format_of({{"kv_type", "bf16"}, {"threshold", -3}}), PageFormat());
  EXPECT_EQ(format_of(Json::object()), PageFormat());
}

TEST(Protocol, RepliesHaveProgressAndTheRowsThatStayed) {
  const ServedModel model = served();
  Json body = {{"messages", {message("user", "é 中 <b>")}},
               {"stream", true},
               {"return_progress", true},
               {"kvzap", {{"return_kept", true}}}};
  const ApiRequest request = chat(body);
  EXPECT_TRUE(request.reports_progress && request.generations.front().returns_kept);
  body["stream"] = false;
  EXPECT_FALSE(chat(body).reports_progress);
  body.erase("return_progress");
  body["kvzap"] = {{"return_kept", nullptr}};
  EXPECT_FALSE(chat(body).generations.front().returns_kept);

  const auto writer = ReplyWriter::make(request, model, 3, 1700000000);
  const Json event = Json::parse(writer->progress(0, {900, 100, 300, 1.2346}).substr(6));
  EXPECT_EQ(event["prompt_progress"],
            Json({{"total", 900}, {"cache", 100}, {"processed", 300}, {"time_ms", 1235}}));
  EXPECT_EQ(event["choices"][0]["delta"], Json::object());
  EXPECT_TRUE(event["choices"][0]["finish_reason"].is_null());

  auto kept = std::make_shared<KeptTokens>();
  for (const Segment& segment : request.generations.front().prompt) {
    kept->tokens.insert(kept->tokens.end(), segment.tokens.begin(), segment.tokens.end());
  }
  for (std::size_t t = 0; t < kept->tokens.size(); ++t) {
    kept->rows.push_back(static_cast<std::int64_t>(t));
  }
  kept->full = 24;
  Ending ending;
  ending.kept = kept;
  const Json last = Json::parse(writer->end(0, ending).substr(6))["choices"][0]["kvzap"]["kept"];
  EXPECT_EQ(last["rows"], Json(kept->rows));
  EXPECT_EQ(last["full"], 24);
  ASSERT_EQ(last["texts"].size(), kept->tokens.size());
  std::string text;
  for (const Json& part : last["texts"]) text += part.get<std::string>();
  EXPECT_EQ(text, text_of(request.generations.front().prompt, model));
  const Json whole = Json::parse(writer->body({{"x", {}, ending}}));
  EXPECT_EQ(whole["choices"][0]["kvzap"]["kept"], last);
  EXPECT_FALSE(whole["kvzap"].contains("kept"));
}

TEST(Protocol, RequestsWithoutASeedHaveOneOfTheirOwn) {
  const Json body = {{"prompt", "a"}};
  ServedModel model = served();
  const auto seed = [&] {
    return parse_request(body.dump(), Endpoint::completions, model)
        .generations.front()
        .sampling.seed;
  };
  EXPECT_NE(seed(), seed());
  model.has_seed = true;
  model.sampling.seed = 7;
  EXPECT_EQ(seed(), 7U);
  const ApiRequest request = completion({{"prompt", "a"}, {"seed", -1}, {"max_tokens", -1}});
  EXPECT_NE(request.generations.front().sampling.seed, std::uint64_t(-1));
  EXPECT_GT(request.generations.front().max_new_tokens, 4000);
}

TEST(Protocol, TextsAndTokensAreTurnedIntoOneAnother) {
  ServedModel model = served();
  const std::string text = "The sky: \xc3\xa4 1";
  const Json tokens = Json::parse(tokenize(Json{{"content", text}}.dump(), model));
  EXPECT_EQ(tokens["tokens"].get<std::vector<TokenId>>(), model.tokenizer->encode(text));
  EXPECT_EQ(Json::parse(detokenize(tokens.dump(), model))["content"], text);
  const Json with_special =
      Json::parse(tokenize(Json{{"content", "a"}, {"add_special", true}}.dump(), model));
  EXPECT_EQ(with_special["tokens"].get<std::vector<TokenId>>(), model.tokenizer->encode("a", true));
  for (const char* wrong :
       {"", "[]", "{}", R"({"content": 3})", R"({"content": "a", "add_special": 1})"}) {
    EXPECT_THROW(tokenize(wrong, model), BadRequest) << wrong;
  }
  for (const char* wrong : {"", "[]", "{}", R"({"tokens": "a"})", R"({"tokens": [1.5]})",
                            R"({"tokens": [-1]})", R"({"tokens": [99999999999]})"}) {
    EXPECT_THROW(detokenize(wrong, model), BadRequest) << wrong;
  }
  model.tokenizer.reset();
  EXPECT_THROW(tokenize(R"({"content": "a"})", model), BadRequest);
}

TEST(Protocol, TextsBeyondTheContextAreRefusedBeforeTheyAreTokenized) {
  ServedModel model = served();
  model.longest_token = longest_token(*model.tokenizer);
  EXPECT_GE(model.longest_token, std::string("<|im_start|>").size());
  EXPECT_LT(model.longest_token, 100U);
  model.longest_token = 10;
  const std::string longest(40960, 'a'), beyond = longest + "a";
  const auto refuse = [&](const auto& work, const std::string& field) {
    try {
      work();
      ADD_FAILURE() << field;
    } catch (const BadRequest& error) {
      EXPECT_EQ(error.field, field);
      EXPECT_EQ(error.code, "context_length_exceeded");
    }
  };
  const auto ask = [&](const Json& body, bool is_chat) {
    return [&model, text = body.dump(), is_chat] {
      parse_request(text, is_chat ? Endpoint::chat : Endpoint::completions, model);
    };
  };
  refuse(ask({{"prompt", beyond}}, false), "prompt");
  refuse(ask({{"prompt", {"a", beyond}}}, false), "prompt[1]");
  const Json parts = {part(longest), part("a")};
  refuse(ask({{"messages", {message("user", parts)}}}, true), "messages");
  refuse([&] { tokenize(Json({{"content", beyond}}).dump(), model); }, "content");
  EXPECT_NO_THROW(tokenize(Json({{"content", longest}}).dump(), model));
  // This many tokens do not fit either.
  refuse(ask({{"prompt", std::string(40000, '7')}}, false), "prompt");
}

TEST(Protocol, BadRequestsNameTheirField) {
  const auto expect = [](const std::string& body, bool is_chat, const std::string& field,
                         const std::string& words) {
    try {
      parse_request(body, is_chat ? Endpoint::chat : Endpoint::completions, served());
      ADD_FAILURE() << body;
    } catch (const BadRequest& error) {
      EXPECT_EQ(error.field, field) << error.what();
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  const auto of_chat = [&](Json fields, const std::string& field, const std::string& words) {
    Json body = {{"messages", {message("user", "x")}}};
    body.update(fields);
    expect(body.dump(), true, field, words);
  };
  expect("", true, "", "body");
  expect("[1]", true, "", "object");
  expect("{\"messages\": 1", true, "", "body");
  expect("{\"a\": 1, \"a\": 2}", true, "", "a");
  expect(std::string("{}\0", 3), true, "", "NUL");
  expect(std::string(200, '[') + std::string(200, ']'), true, "", "body");
  expect("{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}", true, "", "body");
  expect("{}", true, "messages", "missing");
  expect("{}", false, "prompt", "missing");
  of_chat({{"model", "other"}}, "model", "recall");
  of_chat({{"model", 3}}, "model", "string");
  of_chat({{"messages", Json::array()}}, "messages", "1 to");
  of_chat({{"messages", {1}}}, "messages[0]", "object");
  of_chat({{"messages", {message("robot", "x")}}}, "messages[0].role", "robot");
  of_chat({{"messages", {message("user", 3)}}}, "messages[0].content", "string");
  of_chat({{"messages", {{{"role", "user"}}}}}, "messages[0].content", "missing");
  of_chat({{"messages", {message("user", {{{"type", "image_url"}}})}}}, "messages[0].content",
          "not text");
  of_chat({{"messages", {message("user", "x"), message("system", "y")}}}, "messages",
          "not a user message");
  of_chat({{"messages", {message("assistant", "y")}}}, "messages", "not a user message");
  const Json answer = message("assistant", "y");
  of_chat({{"messages", {message("user", "x"), answer, answer}}}, "messages", "not a user message");
  of_chat({{"temperature", -1}}, "temperature", "0 to 100");
  of_chat({{"temperature", "hot"}}, "temperature", "hot");
  of_chat({{"top_p", 1.5}}, "top_p", "0 to 1");
  of_chat({{"max_tokens", 0}}, "max_tokens", "1");
  of_chat({{"max_tokens", 1.5}}, "max_tokens", "integer");
  of_chat({{"max_tokens", 1e30}}, "max_tokens", "integer");
  of_chat({{"max_tokens", -2}}, "max_tokens", "integer");
  of_chat({{"n", 17}}, "n", "1 to 16");
  of_chat({{"n", 0}}, "n", "1 to 16");
  of_chat({{"seed", 0.5}}, "seed", "integer");
  of_chat({{"stop", {1}}}, "stop", "string");
  of_chat({{"stop", ""}}, "stop", "0 bytes");
  of_chat({{"stop", std::vector<std::string>(17, "x")}}, "stop", "16");
  of_chat({{"stream", "yes"}}, "stream", "true or false");
  of_chat({{"top_logprobs", 2}}, "top_logprobs", "logprobs");
  of_chat({{"logprobs", true}, {"top_logprobs", 21}}, "top_logprobs", "20");
  const Json tool = {{"type", "function"}, {"function", {{"name", "now"}}}};
  of_chat({{"tools", {tool}}}, "tools", "not supported by the model's chat template");
  of_chat({{"tools", {{{"type", "function"}}}}}, "tools[0]", "function");
  of_chat({{"tools", 5}}, "tools", "an array");
  of_chat({{"tools", {tool, tool}}}, "tools[1].function.name", "another tool");
  of_chat({{"tools", {{{"function", {{"name", "a b"}}}}}}}, "tools[0].function.name", "letters");
  Json call = message("assistant", nullptr);
  call["tool_calls"] = {{{"function", {{"name", "now"}, {"arguments", "[1]"}}}}};
  of_chat({{"messages", {call, message("tool", "5")}}},
          "messages[0].tool_calls[0].function.arguments", "no JSON object");
  call["tool_calls"] = 5;
  of_chat({{"messages", {call, message("tool", "5")}}}, "messages[0].tool_calls", "an array");
  of_chat({{"messages", {message("tool", "5"), message("assistant", "x")}}}, "messages", "last");
  of_chat({{"repeat_penalty", 1.1}}, "repeat_penalty", "not supported");
  of_chat({{"logit_bias", {5, 1}}}, "logit_bias", "an object");
  of_chat({{"logit_bias", {{"5", 101}}}}, "logit_bias", "-100 to 100");
  of_chat({{"logit_bias", {{"five", 1}}}}, "logit_bias", "token ids from 0 to 1023");
  of_chat({{"logit_bias", {{"1024", 1}}}}, "logit_bias", "token ids from 0 to 1023");
  of_chat({{"stop_token_ids", 5}}, "stop_token_ids", "an array");
  of_chat({{"stop_token_ids", {-1}}}, "stop_token_ids", "token ids from 0 to 1023");
  of_chat({{"stop_token_ids", std::vector<int>(1025, 1)}}, "stop_token_ids", "1024");
  of_chat({{"min_tokens", -1}}, "min_tokens", "integer from 0");
  of_chat({{"messages", {message("user", nullptr)}}}, "messages[0].content", "null");
  of_chat({{"best_of", 3}}, "best_of", "not supported");
  of_chat({{"kvzap", {{"treshold", 1}}}}, "kvzap", "treshold");
  of_chat({{"kvzap", {{"threshold", "low"}}}}, "kvzap.threshold", "number");
  of_chat({{"kvzap", {{"prune", "all"}}}}, "kvzap.prune", "always");
  of_chat({{"kvzap", {{"return_kept", 1}}}}, "kvzap.return_kept", "true or false");
  of_chat({{"return_progress", "yes"}}, "return_progress", "true or false");
  of_chat({{"kvzap", {{"threshold", 1}, {"evict_ratio", 0.5}}}}, "kvzap", "one of them");
  of_chat({{"kvzap", {{"keep_tokens", 9}, {"kv_budget", 5}}}}, "kvzap", "one of them");
  of_chat({{"kvzap", {{"policy", 3}}}}, "kvzap.policy", "string");
  of_chat({{"kvzap", {{"kv_type", 8}}}}, "kvzap.kv_type", "string");
  of_chat({{"kvzap", {{"keep_tokens", 1.5}}}}, "kvzap.keep_tokens", "integer from 1");
  of_chat({{"kvzap", {{"keep_tokens", 0}}}}, "kvzap.keep_tokens", "integer from 1");
  of_chat({{"kvzap", {{"decode_every", 0}}}}, "kvzap.decode_every", "integer from 1");
  of_chat({{"kvzap", {{"decode_keep", "9"}}}}, "kvzap.decode_keep", "integer from 1");
  of_chat({{"kvzap", {{"decode_evict_ratio", "9"}}}}, "kvzap.decode_evict_ratio", "number");
  of_chat({{"kvzap", {{"kv_budget", "much"}}}}, "kvzap.kv_budget", "expected bytes");
  of_chat({{"kvzap", {{"kv_budget", -1}}}}, "kvzap.kv_budget", "integer from 1");
  of_chat({{"kvzap", {{"evict_ratio", 0.5}}}}, "kvzap.evict_ratio", "no budget");
  expect("{\"prompt\": []}", false, "prompt", "string");
  expect("{\"prompt\": \"\"}", false, "prompt", "no tokens");
  expect("{\"prompt\": [1, -2]}", false, "prompt", "has -2; expected token ids from 0 to 1023");
  expect("{\"prompt\": [[3], [1024]]}", false, "prompt[1]", "has 1024; expected token ids");
  expect("{\"prompt\": [1, 99999999999]}", false, "prompt", "token ids");
  expect("{\"prompt\": [\"a\", 3]}", false, "prompt[1]", "is 3; expected a string");
  expect("{\"prompt\": [[3], []]}", false, "prompt[1]", "array of token ids");
  expect("{\"prompt\": [[3], [[3]]]}", false, "prompt[1]", "array of token ids");
  expect("{\"prompt\": [[3], [3, \"a\"]]}", false, "prompt[1]", "token ids");
  expect("{\"prompt\": [3, \"a\"]}", false, "prompt", "token ids");
  expect("{\"prompt\": [\"a\", \"\"]}", false, "prompt[1]", "no tokens");
  std::vector<int> many(5000, 3);
  expect(Json({{"prompt", many}}).dump(), false, "prompt", "4096");
  expect(Json({{"prompt", Json(std::vector<Json>{{3}, many})}}).dump(), false, "prompt[1]", "4096");
  expect(Json({{"prompt", std::vector<std::string>(129, "a")}}).dump(), false, "prompt",
         "129 prompts; expected at most 128");
}

TEST(Protocol, RulesForTokens) {
  Json body = {
      {"messages", {message("user", "x"), message("assistant", nullptr), message("user", "y")}},
      {"stop_token_ids", {7, 8}},
      {"min_tokens", 3},
      {"logit_bias", {{"5", -100}, {"6", 1.5}}},
      {"tool_choice", "none"},
      {"repeat_penalty", 1.0}};
  const GenerationRequest request = chat(body).generations.front();
  EXPECT_EQ(request.stop_ids, (std::vector<TokenId>{1, 2, 7, 8}));
  EXPECT_EQ(request.sampling.end_tokens, request.stop_ids);
  EXPECT_EQ(request.sampling.min_new_tokens, 3);
  EXPECT_EQ(request.sampling.logit_bias,
            (std::vector<std::pair<TokenId, float>>{{5, -100.0F}, {6, 1.5F}}));
  body["ignore_eos"] = true;
  EXPECT_EQ(chat(body).generations.front().stop_ids, (std::vector<TokenId>{7, 8}));
}

const char* const tool_body = R"({
  "messages": [{"role": "user", "content": "Time?"},
    {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
      "function": {"name": "now", "arguments": "{\"zone\": \"UTC\", \"a\": 1}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "5"}],
  "tools": [{"type": "function", "function": {"name": "now", "parameters":
    {"type": "object", "properties": {"zone": {"type": "string"}, "a": {}}}}}])";

TEST(Protocol, ToolsAreRenderedInTheirOrder) {
  const ServedModel model = served_with_tools();
  const ApiRequest request = parse_request(std::string(tool_body) + "}", Endpoint::chat, model);
  EXPECT_EQ(text_of(request.generations.front().prompt, model),
            R"(<tools>{"type": "function", "function": {"name": "now", "parameters": )"
            R"({"type": "object", "properties": {"zone": {"type": "string"}, "a": {}}}}}</tools>)"
            "<|im_start|>user\nTime?<|im_end|>\n<|im_start|>assistant\n<tool_call>now "
            R"({"zone": "UTC", "a": 1}</tool_call><|im_end|>)"
            "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n");
  ASSERT_TRUE(request.format);
  EXPECT_EQ(request.format->style, ToolStyle::hermes);
  EXPECT_EQ(request.format->tools.size(), 1U);
  EXPECT_FALSE(request.format->begins_in_thoughts || request.format->calls_once);
  const ApiRequest thinking = parse_request(
      std::string(tool_body) +
          R"(, "parallel_tool_calls": false, "chat_template_kwargs": {"enable_thinking": true}})",
      Endpoint::chat, model);
  EXPECT_TRUE(thinking.format->begins_in_thoughts && thinking.format->calls_once);
  const ApiRequest none =
      parse_request(std::string(tool_body) + R"(, "tool_choice": "none"})", Endpoint::chat, model);
  EXPECT_TRUE(none.format->tools.empty());
}

TEST(Protocol, RepliesHaveCallsAndThoughts) {
  const ServedModel model = served_with_tools();
  const ApiRequest request = parse_request(std::string(tool_body) + "}", Endpoint::chat, model);
  Ending ending;
  ending.reason = EndReason::stop_id;
  const std::string text =
      R"(<think>Hm.</think><tool_call>{"name": "now", "arguments": {"a": 2}}</tool_call>)";
  const auto writer = ReplyWriter::make(request, model, 7, 1700000000);
  const Json whole = Json::parse(writer->body({{text, {}, ending}}))["choices"][0];
  EXPECT_EQ(whole["finish_reason"], "tool_calls");
  EXPECT_EQ(whole["message"], Json::parse(R"({"role": "assistant", "content": null,
    "reasoning_content": "Hm.", "tool_calls": [{"id": "call-chatcmpl-7-0-0", "type": "function",
      "function": {"name": "now", "arguments": "{\"a\":2}"}}]})"));
  std::string stream;
  for (const char c : text) stream += writer->piece(0, std::string(1, c), {});
  stream += writer->end(0, ending);
  std::string thoughts;
  Json calls = Json::array(), reasons = Json::array();
  for (std::size_t at = 0, next; (next = stream.find("\n\n", at)) != stream.npos; at = next + 2) {
    const Json choice = Json::parse(stream.substr(at + 6, next - at - 6))["choices"][0];
    thoughts += choice["delta"].value("reasoning_content", "");
    for (const Json& call : choice["delta"].value("tool_calls", Json::array())) {
      calls.push_back(call);
    }
    if (!choice["finish_reason"].is_null()) reasons.push_back(choice["finish_reason"]);
  }
  EXPECT_EQ(thoughts, "Hm.");
  // The name comes first, then one event for each new piece of the arguments.
  ASSERT_EQ(calls.size(), 1U + std::string(R"({"a":2})").size());
  const Json& first = whole["message"]["tool_calls"][0];
  EXPECT_EQ(calls[0]["id"], first["id"]);
  EXPECT_EQ(calls[0]["function"], Json({{"name", "now"}, {"arguments", ""}}));
  std::string arguments;
  for (const Json& call : calls) {
    EXPECT_EQ(call["index"], 0);
    EXPECT_EQ(call.contains("id"), arguments.empty() && &call == &calls[0]);
    arguments += call["function"]["arguments"].get_ref<const std::string&>();
  }
  EXPECT_EQ(arguments, first["function"]["arguments"].get<std::string>());
  EXPECT_EQ(reasons, Json({"tool_calls"}));
}

TEST(Protocol, ACutCallIsNoReasonToCallTools) {
  const ServedModel model = served_with_tools();
  const ApiRequest request = parse_request(std::string(tool_body) + "}", Endpoint::chat, model);
  Ending ending;
  ending.reason = EndReason::max_new_tokens;
  const std::string text = R"(<tool_call>{"name": "now", "arguments": {"a": 2, "b": "x)";
  const auto writer = ReplyWriter::make(request, model, 7, 1700000000);
  const Json whole = Json::parse(writer->body({{text, {}, ending}}))["choices"][0];
  EXPECT_EQ(whole["finish_reason"], "length");
  EXPECT_EQ(whole["message"]["tool_calls"][0]["function"]["arguments"], R"({"a":2,"b":"x)");
  writer->piece(0, text, {});
  EXPECT_NE(writer->end(0, ending).find(R"("finish_reason":"length")"), std::string::npos);
}

TEST(Protocol, SegmentsAreTheRenderedConversation) {
  const ServedModel model = served();
  using Kind = Segment::Kind;
  const auto kinds = [](const ApiRequest& request) {
    std::vector<Kind> all;
    for (const Segment& segment : request.generations.front().prompt) all.push_back(segment.kind);
    return all;
  };
  const auto rendered = [&](const std::vector<ChatMessage>& messages) {
    return model.chat_template->render(messages, false, true);
  };
  const ApiRequest one = chat({{"messages", {message("user", "a b")}}});
  EXPECT_EQ(kinds(one), (std::vector<Kind>{Kind::context, Kind::question}));
  EXPECT_EQ(text_of(one.generations.front().prompt, model), rendered({{ChatRole::user, "a b"}}));
  // As `kvzap run` cuts a context from its question.
  const ChatTemplate::Parts around = model.chat_template->parts(false);
  EXPECT_EQ(one.generations.front().prompt[0].tokens,
            model.tokenizer->encode(around.context("a b")));
  EXPECT_EQ(one.generations.front().prompt[1].tokens, model.tokenizer->encode(around.suffix));
  // A document may be in the same text as its question, unless it has a part of its own.
  EXPECT_TRUE(one.generations.front().prompt[0].branches);
  const ApiRequest two = chat({{"messages", {message("user", {part("a b "), part("c?")})}}});
  EXPECT_EQ(kinds(two), (std::vector<Kind>{Kind::context, Kind::question}));
  EXPECT_FALSE(two.generations.front().prompt[0].branches);
  EXPECT_EQ(two.generations.front().prompt[0].tokens,
            model.tokenizer->encode(around.context("a b ")));
  EXPECT_EQ(two.generations.front().prompt[1].tokens,
            model.tokenizer->encode("c?" + around.suffix));
  EXPECT_EQ(text_of(two.generations.front().prompt, model), rendered({{ChatRole::user, "a b c?"}}));
  // A conversation begins with all that the one before had, and what was answered.
  const ApiRequest later = chat({{"messages",
                                  {message("system", "S s"), message("user", "a b"),
                                   message("assistant", "user"), message("user", "d")}}});
  EXPECT_EQ(kinds(later), (std::vector<Kind>{Kind::context, Kind::question, Kind::generated,
                                             Kind::context, Kind::question}));
  EXPECT_EQ(model.tokenizer->decode(later.generations.front().prompt[2].tokens), "user");
  EXPECT_EQ(text_of(later.generations.front().prompt, model),
            rendered({{ChatRole::system, "S s"},
                      {ChatRole::user, "a b"},
                      {ChatRole::assistant, "user"},
                      {ChatRole::user, "d"}}));
  ASSERT_EQ(later.generations.front().prompt[0].cuts.size(), 1U);
  const std::vector<TokenId>& first = later.generations.front().prompt[0].tokens;
  const std::string shared = model.tokenizer->decode(
      {first.begin(), first.begin() + later.generations.front().prompt[0].cuts[0]});
  EXPECT_NE(shared.find("S s"), std::string::npos);
  EXPECT_EQ(shared.find("a b"), std::string::npos);
}

TEST(Protocol, AnswersEndBeforeAStopText) {
  const ServedModel model = served();
  std::mt19937 random(3);
  const std::string letters = "ab c";
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) text += letters[random() % letters.size()];
    std::vector<std::string> stops;
    for (int s = 0; s < 3; ++s) {
      std::string stop;
      for (unsigned i = 0; i < 2 + random() % 4; ++i) stop += letters[random() % letters.size()];
      stops.push_back(stop);
    }
    std::size_t end = text.size();
    for (const std::string& stop : stops) end = std::min(end, text.find(stop));
    AnswerText answer(*model.tokenizer, stops);
    std::string said;
    for (const TokenId token : model.tokenizer->encode(text)) {
      said += answer.append(token);
      if (answer.has_stopped()) break;
    }
    said += answer.finish();
    // The first to be complete may not be the first to begin, but nothing of it is said.
    EXPECT_EQ(said, text.substr(0, said.size()));
    EXPECT_EQ(answer.has_stopped(), end < text.size());
    for (const std::string& stop : stops) EXPECT_EQ(said.find(stop), std::string::npos);
    if (!answer.has_stopped()) {
      EXPECT_EQ(said, text);
    }
  }
}

TEST(Protocol, RepliesAreThoseOfOpenAi) {
  const ServedModel model = served();
  const ApiRequest request = chat({{"messages", {message("user", "x")}}, {"logprobs", true}});
  const auto writer = ReplyWriter::make(request, model, 12, 1700000000);
  Ending ending;
  ending.reason = EndReason::max_new_tokens;
  ending.prompt_tokens = 9;
  ending.cached_tokens = 4;
  ending.new_tokens = 2;
  ending.evict_ratio = 0.5;
  ending.kv_bytes = 100;
  ending.full_kv_bytes = 200;
  const float infinite = -std::numeric_limits<float>::infinity();
  const Json whole =
      Json::parse(writer->body({{"hi \xff", {{5, -0.5F, {{5, -0.5F}, {6, infinite}}}}, ending}}));
  EXPECT_EQ(whole["object"], "chat.completion");
  EXPECT_EQ(whole["id"], "chatcmpl-12");
  EXPECT_EQ(whole["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"], -9999.0);
  EXPECT_EQ(whole["usage"]["total_tokens"], 11);
  EXPECT_EQ(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
  EXPECT_EQ(whole["kvzap"]["kv_bytes"], 100);
  const auto event = [](const std::string& text) {
    EXPECT_EQ(text.rfind("data: ", 0), 0U);
    EXPECT_EQ(text.substr(text.size() - 2), "\n\n");
    return Json::parse(text.substr(6));
  };
  EXPECT_EQ(event(writer->begin(0))["choices"][0]["delta"]["role"], "assistant");
  EXPECT_EQ(event(writer->piece(0, "hi", {}))["choices"][0]["delta"]["content"], "hi");
  ending.reason = EndReason::cut;
  EXPECT_EQ(event(writer->end(0, ending))["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(writer->finish({ending}), "data: [DONE]\n\n");
  const Json error = Json::parse(error_body("bad\n\x1b", "invalid_request_error", "n"));
  EXPECT_EQ(error["error"]["param"], "n");
  EXPECT_EQ(error["error"]["message"].get<std::string>().find('\x1b'), std::string::npos);
  // A prompt's tokens count once for all answers to it.
  const ApiRequest several =
      completion({{"prompt", {"a", "b"}}, {"n", 2}, {"echo", true}, {"max_tokens", 4}});
  const auto all = ReplyWriter::make(several, model, 13, 1700000000);
  std::vector<ReplyWriter::Whole> answers(4, {" x", {}, ending});
  for (std::size_t i = 2; i < 4; ++i) answers[i].ending.prompt_tokens = 20;
  const Json replied = Json::parse(all->body(answers));
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(replied["choices"][i]["index"], i);
    EXPECT_EQ(replied["choices"][i]["text"], i < 2 ? "a x" : "b x");
    EXPECT_EQ(event(all->begin(i))["choices"][0]["text"], i < 2 ? "a" : "b");
  }
  EXPECT_EQ(replied["usage"]["prompt_tokens"], 29);
  EXPECT_EQ(replied["usage"]["completion_tokens"], 8);
  EXPECT_EQ(replied["usage"]["prompt_tokens_details"]["cached_tokens"], 8);
  const std::string metrics = metrics_text({}, model);
  EXPECT_NE(
      metrics.find("# TYPE kvzap_steps_total counter\nkvzap_steps_total{model_name=\"recall\"} 0"),
      std::string::npos);
}

}  // namespace
}  // namespace kvzap::server
