// Anthropic's /v1/messages and OpenAI's /v1/responses: requests are those of chats, replies have
// their own forms.
#include <gtest/gtest.h>

#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>

#include "files/json_file.hpp"
#include "server/answer_parts.hpp"
#include "unit/server/served_model.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;
using test::served;
using test::served_with_tools;
using test::text_of;

OrderedJson parsed(const std::string& text) { return files::parse_own_json(text); }

/// The events of a stream, each with its name.
std::vector<OrderedJson> events_of(const std::string& stream) {
  std::vector<OrderedJson> events;
  for (std::size_t at = 0, next; (next = stream.find("\n\n", at)) != stream.npos; at = next + 2) {
    const std::string event = stream.substr(at, next - at);
    const std::size_t data = event.find("\ndata: ");
    EXPECT_EQ(event.rfind("event: ", 0), 0U) << event;
    events.push_back(parsed(event.substr(data + 7)));
    EXPECT_EQ(event.substr(7, data - 7), events.back().at("type").get<std::string>());
  }
  return events;
}

const char* const chat_tools = R"("tools": [{"type": "function", "function": {"name": "now",
  "description": "D", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}}])";

const std::string chat_text = std::string(R"({"messages": [{"role": "system", "content": "S"},
  {"role": "user", "content": "Time?"}, {"role": "assistant", "content": "Hm", "tool_calls": [
    {"id": "1", "function": {"name": "now", "arguments": {"z": 1, "a": 2}}}]},
  {"role": "tool", "tool_call_id": "1", "content": "5"}, {"role": "user", "content": "And?"}], )") +
                              chat_tools + "}";

const char* const messages_text = R"({"max_tokens": 5, "system": "S", "messages": [
  {"role": "user", "content": "Time?"},
  {"role": "assistant", "content": [{"type": "thinking", "thinking": "T", "signature": ""},
    {"type": "text", "text": "Hm"},
    {"type": "tool_use", "id": "1", "name": "now", "input": {"z": 1, "a": 2}}]},
  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"},
    {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]}],
  "tools": [{"name": "now", "description": "D",
    "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}],
  "stop_sequences": ["x"], "top_k": 3, "thinking": {"type": "enabled", "budget_tokens": 9}})";

const char* const response_text = R"({"max_output_tokens": 5, "instructions": "S", "input": [
  {"role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
  {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
  {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm"}]},
  {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{\"z\": 1, \"a\": 2}"},
  {"type": "function_call_output", "call_id": "1", "output": "5"},
  {"role": "user", "content": "And?"}],
  "tools": [{"type": "function", "name": "now", "description": "D",
    "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}],
  "reasoning": {"effort": "low"}})";

TEST(OtherProtocols, RequestsAreThoseOfChats) {
  const ServedModel model = served_with_tools();
  std::string body = chat_text;
  body.insert(1, R"("chat_template_kwargs": {"enable_thinking": true}, )");
  const ApiRequest chat = parse_request(body, Endpoint::chat, model);
  const std::string prompt = text_of(chat.generations.front().prompt, model);
  EXPECT_NE(prompt.find(R"({"z": 1, "a": 2})"), std::string::npos) << prompt;
  const ApiRequest messages = parse_request(messages_text, Endpoint::messages, model);
  EXPECT_EQ(text_of(messages.generations.front().prompt, model), prompt);
  EXPECT_EQ(messages.generations.front().max_new_tokens, 5);
  EXPECT_EQ(messages.generations.front().sampling.top_k, 3);
  EXPECT_EQ(messages.stop, std::vector<std::string>{"x"});
  const ApiRequest response = parse_request(response_text, Endpoint::responses, model);
  EXPECT_EQ(text_of(response.generations.front().prompt, model), prompt);
  EXPECT_EQ(response.generations.front().max_new_tokens, 5);
  for (const ApiRequest* const one : {&chat, &messages, &response}) {
    EXPECT_EQ(one->format->tools, chat.format->tools);
    EXPECT_TRUE(one->format->begins_in_thoughts);
    EXPECT_EQ(one->prompt_tokens, chat.prompt_tokens);
  }
  EXPECT_EQ(parsed(count_tokens(messages_text, model)).at("input_tokens"), chat.prompt_tokens);
}

TEST(OtherProtocols, ErrorsNameTheFieldsOfTheRequest) {
  const ServedModel model = served();
  const auto field = [&](const char* body, Endpoint endpoint) {
    try {
      parse_request(body, endpoint, model);
    } catch (const BadRequest& error) {
      EXPECT_EQ(std::string(error.what()).rfind(error.field, 0), 0U) << error.what();
      return error.field;
    }
    return std::string("none");
  };
  EXPECT_EQ(field(R"({"messages": [{"role": "user", "content": "x"}], "stop_sequences": 5})",
                  Endpoint::messages),
            "stop_sequences");
  EXPECT_EQ(field(R"({"input": "x", "max_output_tokens": 0})", Endpoint::responses),
            "max_output_tokens");
  EXPECT_EQ(field(R"({"input": "x", "text": {"format": {"type": "xml"}}})", Endpoint::responses),
            "text.format.type");
  EXPECT_EQ(field(R"({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}})",
                  Endpoint::responses),
            "text.format");
  EXPECT_EQ(field(R"({"messages": [{"role": "user", "content": "x"}],
                      "tool_choice": {"type": "tool", "name": "n"}})",
                  Endpoint::messages),
            "tool_choice.name");
  EXPECT_EQ(field(R"({"input": [{"type": "file_search_call"}]})", Endpoint::responses), "input[0]");
}

TEST(OtherProtocols, MessagesHaveBlocks) {
  const ServedModel model = served_with_tools();
  const ApiRequest request = parse_request(messages_text, Endpoint::messages, model);
  Ending ending;
  ending.prompt_tokens = 9;
  ending.cached_tokens = 4;
  ending.new_tokens = 3;
  const std::string text =
      R"(Hm.</think>Well. <tool_call>{"name": "now", "arguments": {"z": 1, "a": 2}}</tool_call>)";
  const auto whole = ReplyWriter::make(request, model, 7, 0);
  const OrderedJson message = parsed(whole->body({{text, {}, ending}}));
  EXPECT_EQ(
      message.at("content").dump(),
      R"([{"type":"thinking","thinking":"Hm.","signature":""},{"type":"text","text":"Well."},)"
      R"({"type":"tool_use","id":"toolu_7_0","name":"now","input":{"z":1,"a":2}}])");
  EXPECT_EQ(message.at("stop_reason"), "tool_use");
  EXPECT_EQ(message.at("usage").at("input_tokens"), 5);
  const auto writer = ReplyWriter::make(request, model, 7, 0);
  std::string stream = writer->begin(0);
  for (const char c : text) stream += writer->piece(0, std::string(1, c), {});
  stream += writer->end(0, ending);
  stream += writer->finish({ending});
  std::string thoughts, said, input;
  int pieces = 0;
  for (const OrderedJson& event : events_of(stream)) {
    if (event.at("type") != "content_block_delta") continue;
    const OrderedJson& delta = event.at("delta");
    thoughts += delta.value("thinking", "");
    said += delta.value("text", "");
    input += delta.value("partial_json", "");
    pieces += static_cast<int>(delta.contains("partial_json"));
  }
  EXPECT_EQ(pieces, 13);
  EXPECT_EQ(thoughts, "Hm.");
  EXPECT_EQ(said, "Well.");
  EXPECT_EQ(input, R"({"z":1,"a":2})");
  // The input of a cut call has what is whole of it.
  ending.reason = EndReason::max_new_tokens;
  const std::string cut = R"(</think><tool_call>{"name": "now", "arguments": {"z": 1, "a": "x)";
  const OrderedJson cut_message =
      parsed(ReplyWriter::make(request, model, 7, 0)->body({{cut, {}, ending}}));
  EXPECT_EQ(cut_message.at("content").back().at("input").dump(), R"({"z":1})");
  EXPECT_EQ(cut_message.at("stop_reason"), "max_tokens");
  ending.reason = EndReason::stop_id;
  EXPECT_EQ(events_of(writer->sign()).front().at("type"), "ping");
  const auto silent = ReplyWriter::make(request, model, 7, 0);
  std::string sign = silent->sign();
  sign += silent->begin(0);
  const std::vector<OrderedJson> signs = events_of(sign);
  ASSERT_EQ(signs.size(), 2U);
  EXPECT_EQ(signs[0].at("type"), "message_start");
  EXPECT_EQ(events_of(writer->failure("no"))[0].at("error").at("type"), "api_error");
  // Without tools: a stop text, and the length.
  const ApiRequest plain =
      parse_request(R"({"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["b"]})",
                    Endpoint::messages, model);
  ending.reason = EndReason::cut;
  ending.stop = "b";
  const auto reason_of = [&] {
    return parsed(ReplyWriter::make(plain, model, 8, 0)->body({{"a", {}, ending}}))["stop_reason"];
  };
  EXPECT_EQ(reason_of(), "stop_sequence");
  ending.stop.clear();
  EXPECT_EQ(reason_of(), "end_turn");
  ending.reason = EndReason::context_full;
  EXPECT_EQ(reason_of(), "max_tokens");
}

TEST(OtherProtocols, ResponsesHaveItemsAndAreStored) {
  ServedModel model = served_with_tools();
  model.responses = std::make_shared<ResponseStore>(1 << 20, 8);
  const ApiRequest request = parse_request(response_text, Endpoint::responses, model);
  Ending ending;
  const std::string text =
      R"(Hm.</think>Well. <tool_call>{"name": "now", "arguments": {"z": 3}}</tool_call>)";
  const auto writer = ReplyWriter::make(request, model, 7, 11);
  std::string stream = writer->begin(0);
  for (const char c : text) stream += writer->piece(0, std::string(1, c), {});
  stream += writer->end(0, ending);
  stream += writer->finish({ending});
  const std::vector<OrderedJson> events = events_of(stream);
  for (std::size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].at("sequence_number"), i);
  const OrderedJson& last = events.back();
  EXPECT_EQ(last.at("type"), "response.completed");
  const OrderedJson& output = last.at("response").at("output");
  ASSERT_EQ(output.size(), 3U);
  EXPECT_EQ(output[0]["content"][0].dump(), R"({"type":"reasoning_text","text":"Hm."})");
  EXPECT_EQ(output[1]["content"][0]["text"], "Well.");
  EXPECT_EQ(output[2]["arguments"], R"({"z":3})");
  std::string arguments;
  for (const OrderedJson& event : events) {
    if (event.at("type") == "response.function_call_arguments.delta") {
      EXPECT_EQ(event.at("item_id"), output[2]["id"]);
      EXPECT_EQ(event.at("delta").get_ref<const std::string&>().size(), 1U);
      arguments += event.at("delta").get_ref<const std::string&>();
    }
    if (event.at("type") == "response.function_call_arguments.done") {
      EXPECT_EQ(event.at("arguments"), arguments);
    }
  }
  EXPECT_EQ(arguments, R"({"z":3})");
  const std::string id = last.at("response").at("id").get<std::string>();
  const auto stored = model.responses->find(id);
  ASSERT_TRUE(stored);
  EXPECT_EQ(parsed(stored->body), last.at("response"));
  // A request that goes on has the prompt of one that repeats everything, without instructions.
  OrderedJson repeated = parsed(response_text);
  for (const OrderedJson& item : output) repeated["input"].push_back(item);
  const OrderedJson result = {
      {"type", "function_call_output"}, {"call_id", output[2]["call_id"]}, {"output", "6"}};
  repeated["input"].push_back(result);
  OrderedJson next = parsed(response_text);
  next["input"] = OrderedJson::array({result});
  next["previous_response_id"] = id;
  const auto prompt_of = [&](const OrderedJson& body) {
    return text_of(parse_request(body.dump(), Endpoint::responses, model).generations[0].prompt,
                   model);
  };
  EXPECT_EQ(prompt_of(next), prompt_of(repeated));
  next["previous_response_id"] = "resp_other";
  EXPECT_THROW(prompt_of(next), BadRequest);
}

TEST(OtherProtocols, ACutCallIsIncomplete) {
  ServedModel model = served_with_tools();
  model.responses = std::make_shared<ResponseStore>(1 << 20, 8);
  const ApiRequest request = parse_request(response_text, Endpoint::responses, model);
  Ending ending;
  ending.reason = EndReason::max_new_tokens;
  const std::string text = R"(</think><tool_call>{"name": "now", "arguments": {"z": 3, "a")";
  const OrderedJson response =
      parsed(ReplyWriter::make(request, model, 7, 11)->body({{text, {}, ending}}));
  const OrderedJson& call = response.at("output").back();
  EXPECT_EQ(call.at("status"), "incomplete");
  EXPECT_EQ(call.at("arguments"), R"({"z":3,"a")");
  // The conversation goes on with what is whole of the arguments.
  OrderedJson next = parsed(response_text);
  next["input"] = OrderedJson::array(
      {{{"type", "function_call_output"}, {"call_id", call["call_id"]}, {"output", "6"}}});
  next["previous_response_id"] = response.at("id");
  const ApiRequest second = parse_request(next.dump(), Endpoint::responses, model);
  EXPECT_NE(text_of(second.generations[0].prompt, model).find(R"(now {"z": 3}<)"),
            std::string::npos);
}

TEST(OtherProtocols, TheStoreDropsTheLeastRecentlyUsed) {
  ResponseStore store(4000, 3);
  for (const char* const id : {"a", "b", "c"}) store.put(id, {id, "[]"});
  EXPECT_TRUE(store.find("a"));
  store.put("d", {"d", "[]"});
  EXPECT_FALSE(store.find("b"));
  EXPECT_EQ(store.find("a")->body, "a");
  EXPECT_TRUE(store.erase("a"));
  EXPECT_FALSE(store.erase("a"));
  store.put("long", {std::string(2500, 'x'), ""});
  EXPECT_TRUE(store.find("long"));
  EXPECT_TRUE(store.find("d") && !store.find("c"));
  store.put("too long", {std::string(4000, 'x'), ""});
  EXPECT_TRUE(store.find("long") && !store.find("too long"));
}

}  // namespace
}  // namespace kvzap::server
