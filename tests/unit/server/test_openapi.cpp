// The document of /openapi.json: that it has the fields that the readers of requests know, and
// their limits, and no others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <kvzap/server/openapi.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "files/json_file.hpp"
#include "server/request_fields.hpp"
#include "unit/server/served_model.hpp"

namespace kvzap::server {
namespace {

using Names = std::set<std::string>;
using test::served_with_tools;

Json document() {
  const ServedModel model = served_with_tools();
  return files::parse_own_json(openapi_document(
      model, {{"/v1/chat/completions", {"POST"}}, {"/v1/models/{name}", {"GET", "HEAD"}, true}},
      "1"));
}

Json schema_of(const std::string& name) { return document()["components"]["schemas"][name]; }

/// Adds the names of all properties in a schema and in those that it refers to.
void add_names(const Json& schemas, const Json& at, Names& seen, Names& names) {
  if (!at.is_structured()) return;
  if (at.is_object() && at.contains("properties")) {
    for (const auto& [name, schema] : at["properties"].items()) names.insert(name);
  }
  const Json* const reference = at.is_object() && at.contains("$ref") ? &at["$ref"] : nullptr;
  if (reference && reference->is_string()) {
    const auto text = reference->get<std::string>();
    const std::string name = text.substr(text.rfind('/') + 1);
    if (seen.insert(name).second) add_names(schemas, schemas.at(name), seen, names);
  }
  for (const Json& member : at) add_names(schemas, member, seen, names);
}

Names documented(const std::string& schema) {
  const Json schemas = document()["components"]["schemas"];
  Names seen, names;
  add_names(schemas, schemas.at(schema), seen, names);
  return names;
}

/// The names of fields that the readers ask for in any of the bodies, which need not be right.
Names asked(Endpoint endpoint, const std::vector<std::string>& bodies) {
  const ServedModel model = served_with_tools();
  const AskedFields asked;
  for (const std::string& body : bodies) {
    try {
      parse_request(body, endpoint, model);
    } catch (const Error&) {
    }
  }
  Names names;  // "kvzap.keep_tokens" is there without its object, too
  for (const std::string& name : asked.names()) {
    if (name.find('.') == std::string::npos) names.insert(name);
  }
  return names;
}

Names without(const Names& all, const Names& others) {
  Names rest;
  std::set_difference(all.begin(), all.end(), others.begin(), others.end(),
                      std::inserter(rest, rest.end()));
  return rest;
}

/// Bodies that make the readers ask for every field of chats.
const std::vector<std::string> chats = {
    R"({"messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]},
         {"role": "user", "content": "x"},
         {"role": "assistant", "content": "", "tool_calls": [
           {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}]},
         {"role": "tool", "tool_call_id": "1", "content": "x"}],
       "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
       "tool_choice": {"type": "function", "function": {"name": "f"}},
       "chat_template_kwargs": {"enable_thinking": true}, "stream_options": {"include_usage": true},
       "kvzap": {"policy": "", "keep_tokens": 5, "prune": "none", "kv_type": "q8",
                 "return_kept": true, "threshold": null, "evict_ratio": null, "kv_budget": null,
           "decode_every": 4, "decode_keep": 9, "decode_evict_ratio": null}})",
    R"({"messages": [{"role": "user", "content": "x"}], "response_format":
         {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strict": true}}})",
    R"({"messages": [{"role": "user", "content": "x"}], "response_format":
         {"type": "json_object", "schema": {"type": "object"}}})",
    R"({"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": null,
         "json_object": null, "regex": null, "choice": null, "grammar": null}})"};

TEST(OpenApi, HasTheFieldsThatReadersOfChatsKnow) {
  // The chat template reads what a function is for, and the arguments of earlier calls.
  const Names known = asked(Endpoint::chat, chats), listed = documented("ChatRequest");
  EXPECT_EQ(without(known, listed), Names());
  EXPECT_EQ(without(listed, known), (Names{"arguments", "description"}));
}

TEST(OpenApi, HasTheFieldsThatReadersOfCompletionsKnow) {
  std::vector<std::string> bodies(chats.begin() + 1, chats.end());
  bodies.emplace_back(R"({"stream_options": {"include_usage": true}, "tool_choice": "none",
      "kvzap": {"policy": "", "keep_tokens": 5, "prune": "none", "kv_type": "q8",
                "return_kept": true, "threshold": null, "evict_ratio": null, "kv_budget": null,
           "decode_every": 4, "decode_keep": 9, "decode_evict_ratio": null}})");
  for (std::string& body : bodies) body.insert(1, R"("prompt": "x", )");
  const Names known = asked(Endpoint::completions, bodies),
              listed = documented("CompletionRequest");
  EXPECT_EQ(without(known, listed), Names());
  EXPECT_EQ(without(listed, known), Names());
}

TEST(OpenApi, HasTheFieldsThatReadersOfOtherProtocolsKnow) {
  const std::vector<std::string> messages = {
      R"({"system": "x", "messages": [
           {"role": "user", "content": [{"type": "text", "text": "x"}]},
           {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"},
             {"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
           {"role": "user", "content": [
             {"type": "tool_result", "tool_use_id": "1", "content": "x"}]}],
         "tools": [{"name": "f", "description": "d", "strict": false, "input_schema": {}}],
         "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
         "thinking": {"type": "enabled"}, "kvzap": {"policy": "", "keep_tokens": 5,
           "prune": "none", "kv_type": "q8", "return_kept": true, "threshold": null,
           "evict_ratio": null, "kv_budget": null,
           "decode_every": 4, "decode_keep": 9, "decode_evict_ratio": null}})",
      R"({"messages": [{"role": "user", "content": "x"}],
          "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}})",
      R"({"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": null,
         "json_object": null, "regex": null, "choice": null, "grammar": null}})"};
  const Names of_chats = documented("ChatRequest");
  Names known = asked(Endpoint::messages, messages), listed = documented("MessagesRequest");
  EXPECT_EQ(without(without(known, listed), of_chats), Names());
  EXPECT_EQ(without(listed, known), Names());

  const std::vector<std::string> responses = {
      R"({"input": [{"type": "message", "role": "user", "content": "x"},
           {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
           {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
           {"type": "function_call_output", "call_id": "1", "output": "x"}],
         "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
         "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "none"},
         "kvzap": {"policy": "", "keep_tokens": 5, "prune": "none", "kv_type": "q8",
           "return_kept": true, "threshold": null, "evict_ratio": null, "kv_budget": null,
           "decode_every": 4, "decode_keep": 9, "decode_evict_ratio": null}})",
      R"({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}})",
      R"({"input": "x", "structured_outputs": {"json": null, "json_object": null, "regex": null,
         "choice": null, "grammar": null}})"};
  known = asked(Endpoint::responses, responses);
  listed = documented("ResponseRequest");
  EXPECT_EQ(without(without(known, listed), of_chats), Names());
  EXPECT_EQ(without(listed, known), Names());
}

TEST(OpenApi, HasTheFieldsThatReadersOfTextsKnow) {
  const std::tuple<Endpoint, const char*, const char*> texts[] = {
      {Endpoint::embeddings, "EmbeddingRequest", R"({"input": "x"})"},
      {Endpoint::score, "ScoreRequest", R"({"text_1": "x", "text_2": ["x"]})"},
      {Endpoint::rerank, "RerankRequest", R"({"query": "x", "documents": ["x"]})"}};
  for (const auto& [endpoint, schema, body] : texts) {
    EXPECT_EQ(asked(endpoint, {body}), documented(schema)) << schema;
  }
}

TEST(OpenApi, HasTheFieldsOfPruningAndTokenizers) {
  const ServedModel model = served_with_tools();
  std::string expected;
  try {
    parse_request(R"({"prompt": "x", "kvzap": {"x": 1}})", Endpoint::completions, model);
  } catch (const BadRequest& error) {
    expected = error.what();
  }
  for (const std::string& name : documented("PruningFields")) {
    EXPECT_NE(expected.find(name), std::string::npos) << name << ": " << expected;
  }
  EXPECT_EQ(std::count(expected.begin(), expected.end(), ','), 9) << expected;  // of eleven names
  const Names to_tokenize = documented("TokenizeRequest");
  const Names to_detokenize = documented("DetokenizeRequest");
  {
    const AskedFields asked;
    tokenize(R"({"content": "x"})", model);
    EXPECT_EQ(asked.names(), to_tokenize);
  }
  const AskedFields asked;
  detokenize(R"({"tokens": [5]})", model);
  EXPECT_EQ(asked.names(), to_detokenize);
}

/// The field that a body with this field is refused for, or "".
std::string refused(Endpoint endpoint, const std::string& name, const Json& value) {
  Json body = endpoint == Endpoint::chat ? Json::parse(R"({"messages": [
                {"role": "user", "content": "x"}], "logprobs": true})")
                                         : Json{{"prompt", "x"}};
  if (name == "best_of") body["n"] = 2;
  body[name] = value;
  try {
    parse_request(files::json_text(body), endpoint, served_with_tools());
  } catch (const BadRequest& error) {
    return error.field;
  }
  return {};
}

TEST(OpenApi, LimitsAreThoseOfTheReaders) {
  for (const auto endpoint : {Endpoint::chat, Endpoint::completions}) {
    const bool is_chat = endpoint == Endpoint::chat;
    const Json schema = schema_of(is_chat ? "ChatRequest" : "CompletionRequest");
    int checked = 0;
    for (const auto& [name, field] : schema["properties"].items()) {
      const Json& range = field.contains("anyOf") ? field["anyOf"][0] : field;
      if (!range.contains("maximum") || name == "seed") continue;
      ++checked;
      const Json &least = range["minimum"], &most = range["maximum"];
      if (name != "best_of") {
        EXPECT_EQ(refused(endpoint, name, least), "") << name;
        EXPECT_EQ(refused(endpoint, name, most), "") << name;
      }
      const double below = least.get<double>() - 2, above = most.get<double>() * 1.5 + 2;
      EXPECT_EQ(refused(endpoint, name, below), name);
      EXPECT_EQ(refused(endpoint, name, above), name);
      const bool is_whole = range["type"] == "integer" || range["type"][0] == "integer";
      const bool has_next = is_whole && most.get<std::int64_t>() < limits::any_count;
      if (!has_next) continue;
      EXPECT_EQ(refused(endpoint, name, most.get<std::int64_t>() + 1), name);
    }
    EXPECT_GE(checked, 12);
  }
}

TEST(OpenApi, EveryFieldMayBeNullOrIsRequired) {
  for (const auto endpoint : {Endpoint::chat, Endpoint::completions}) {
    const bool is_chat = endpoint == Endpoint::chat;
    const Json schema = schema_of(is_chat ? "ChatRequest" : "CompletionRequest");
    for (const auto& [name, field] : schema["properties"].items()) {
      const bool is_required = schema["required"][0].get<std::string>() == name;
      EXPECT_EQ(refused(endpoint, name, nullptr), is_required ? name : "") << name;
    }
  }
}

TEST(OpenApi, DescribesPaths) {
  const Json paths = document()["paths"];
  EXPECT_EQ(paths.size(), 2U);
  EXPECT_FALSE(paths["/v1/chat/completions"]["post"].contains("security"));
  const Json& of_model = paths["/v1/models/{name}"];
  EXPECT_EQ(of_model["get"]["security"].size(), 2U);
  EXPECT_TRUE(of_model["get"]["responses"].contains("404"));
  EXPECT_FALSE(of_model["head"]["responses"]["200"].contains("content"));
  EXPECT_THROW(openapi_document(served_with_tools(), {{"/x", {"GET"}}}, "1"), Error);
}

}  // namespace
}  // namespace kvzap::server
