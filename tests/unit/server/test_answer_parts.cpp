// The parts of answers: thoughts, text and calls of tools, as families write them.
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "server/answer_parts.hpp"
#include "server/tool_bodies.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson tools() {
  return OrderedJson::parse(R"([
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
      "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}}])");
}

AnswerFormat format(ToolStyle style) {
  AnswerFormat format;
  format.style = style;
  format.tools = tools();
  return format;
}

std::string shown(const AnswerParts& parts) {
  std::string text = "[" + parts.thoughts + "][" + parts.text + "]";
  for (const ToolCall& call : parts.calls) text += " " + call.name + call.arguments;
  return text;
}

/// The parts of a text, given in pieces of random sizes.
std::string parts_of(AnswerFormat format, std::string_view text, unsigned seed = 0) {
  AnswerParser parser(std::make_shared<const AnswerFormat>(std::move(format)));
  std::mt19937 random(seed);
  AnswerParts all;
  const auto take = [&](AnswerParts parts) {
    all.thoughts += parts.thoughts;
    all.text += parts.text;
    for (ToolCall& call : parts.calls) all.calls.push_back(std::move(call));
  };
  while (!text.empty()) {
    const std::size_t count = seed == 0 ? text.size() : 1 + random() % 7;
    take(parser.append(text.substr(0, count)));
    text.remove_prefix(std::min(count, text.size()));
  }
  take(parser.finish());
  return shown(all);
}

void expect_parts(const AnswerFormat& format, std::string_view text, std::string_view expected) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(parts_of(format, text, seed), expected) << text;
  }
}

constexpr const char* paris = R"( weather{"city":"Paris","days":2})";
constexpr const char* both = R"( weather{"city":"Paris","days":2} now{})";

TEST(AnswerParts, CallsOfEachStyle) {
  const std::string call = R"({"name": "weather", "arguments": {"city": "Paris", "days": 2}})";
  const std::string other = R"({"name": "now", "arguments": {}})";
  const std::pair<ToolStyle, std::string> texts[] = {
      {ToolStyle::hermes,
       "<tool_call>\n" + call + "\n</tool_call>\n<tool_call>\n" + other + "\n</tool_call>"},
      {ToolStyle::coder,
       "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
       "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
       "<tool_call>\n<function=now>\n</function>\n</tool_call>"},
      {ToolStyle::glm,
       "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
       "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>now\n"
       "</tool_call>"},
      {ToolStyle::mistral, "[TOOL_CALLS][" + call + ", " + other + "]"},
      {ToolStyle::mistral,
       R"([TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{})"},
      {ToolStyle::deepseek,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
       R"({"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{})"
       "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {ToolStyle::deepseek,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
       "{\"city\": \"Paris\", \"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
       "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {ToolStyle::kimi,
       "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
       R"(<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>)"
       "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
       "<|tool_calls_section_end|>"},
      {ToolStyle::lfm,
       R"(<|tool_call_start|>[weather(city="Paris", days=2), now()]<|tool_call_end|>)"},
      {ToolStyle::granite, "<|tool_call|>[" + call + ", " + other + "]"},
      {ToolStyle::json, "\n" + call + "; " + other},
      {ToolStyle::json, "<|python_tag|>[" + call + "," + other + "]"},
      {ToolStyle::harmony,
       "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
       R"({"city": "Paris", "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>)"
       "commentary json<|message|>{}"}};
  for (const auto& [style, text] : texts)
    expect_parts(format(style), text, std::string("[][]") + both);
  AnswerFormat once = format(ToolStyle::hermes);
  once.calls_once = true;
  expect_parts(once, texts[0].second, std::string("[][]") + paris);
}

TEST(AnswerParts, TextAroundCalls) {
  const std::string call =
      R"(<tool_call>{"name": "now", "parameters": "{\"a\": [1, {\"b\": \"}\"}]}"}</tool_call>)";
  expect_parts(format(ToolStyle::hermes), "Let me see.\n" + call + "\n Done. ",
               R"([][Let me see.Done.] now{"a":[1,{"b":"}"}]})");
  expect_parts(format(ToolStyle::hermes), " No <tool call> here \n", "[][ No <tool call> here \n]");
}

TEST(AnswerParts, WhatIsNoCallIsText) {
  for (const std::string text :
       {"<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"now\"</tool_call>", "<tool_call>{\"name\": \"now\"",
        "<tool_call></tool_call>", "<tool_call>]</tool_call>", "a <tool_ca"}) {
    expect_parts(format(ToolStyle::hermes), text, "[][" + text + "]");
  }
  expect_parts(format(ToolStyle::json), "{1}", "[][{1}]");
  expect_parts(format(ToolStyle::lfm), "<|tool_call_start|>[now(a=)]<|tool_call_end|>",
               "[][<|tool_call_start|>[now(a=)]<|tool_call_end|>]");
  const std::string deep = R"({"name": "now", "arguments": {"a": )" + std::string(100, '[') +
                           std::string(100, ']') + "}}";
  expect_parts(format(ToolStyle::json), deep, "[][" + deep + "]");
}

TEST(AnswerParts, Thoughts) {
  AnswerFormat format;
  format.has_thoughts = true;
  expect_parts(format, "\n<think>\nHm.\n</think>\n\nYes. ", "[\nHm.\n][Yes. ]");
  expect_parts(format, " Yes <think>.", "[][ Yes <think>.]");
  expect_parts(format, "<thin", "[][<thin]");
  format.begins_in_thoughts = true;
  expect_parts(format, "Hm.</think>Yes.", "[Hm.][Yes.]");
  expect_parts(format, "Hm.</thi", "[Hm.</thi][]");
  format.style = ToolStyle::hermes;
  format.tools = tools();
  expect_parts(format, "Hm.</think>\n\n<tool_call>{\"name\": \"now\"}</tool_call>",
               "[Hm.][] now{}");
}

TEST(AnswerParts, Harmony) {
  AnswerFormat format;
  format.style = ToolStyle::harmony;
  expect_parts(format,
               "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
               "<|message|>Yes < no.<|return|>",
               "[Hm.][Yes < no.]");
  expect_parts(format,
               "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
               "to=functions.none<|message|>{}<|call|>",
               "[Hm.][{}]");
  expect_parts(format, "Plain.", "[][Plain.]");
  expect_parts(format, "<|channel|>final", "[][<|channel|>final]");
}

TEST(AnswerParts, FormatsOfTemplates) {
  EXPECT_EQ(format_of("{{ '<tool_call>' }}").style, ToolStyle::hermes);
  EXPECT_EQ(format_of("<tool_call><function=").style, ToolStyle::coder);
  EXPECT_EQ(format_of("<tool_call><arg_key>").style, ToolStyle::glm);
  EXPECT_EQ(format_of("[TOOL_CALLS]").style, ToolStyle::mistral);
  EXPECT_EQ(format_of("<｜tool▁calls▁begin｜>").style, ToolStyle::deepseek);
  EXPECT_EQ(format_of("<|tool_calls_section_begin|>").style, ToolStyle::kimi);
  EXPECT_EQ(format_of("<|tool_call_start|>").style, ToolStyle::lfm);
  EXPECT_EQ(format_of("<|tool_call|>").style, ToolStyle::granite);
  EXPECT_EQ(format_of("<|channel|>").style, ToolStyle::harmony);
  EXPECT_EQ(format_of("").style, ToolStyle::json);
  EXPECT_TRUE(format_of("</think>").has_thoughts);
}

}  // namespace
}  // namespace kvzap::server
