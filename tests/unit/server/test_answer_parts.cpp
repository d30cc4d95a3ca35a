// The parts of answers: thoughts, text and calls of tools, as families write them.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/answer_parts.hpp"
#include "server/json_scanner.hpp"
#include "text/utf8.hpp"

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

/// Parts of an answer, joined as replies join them, and the pieces of arguments.
struct Joined {
  std::string thoughts, text, calls;
  std::vector<std::string> pieces;

  void add(const AnswerParts& parts) {
    for (const AnswerPart& part : parts) {
      EXPECT_TRUE(text::is_valid_utf8(part.text));
      switch (part.kind) {
        case AnswerPart::Kind::thoughts:
          thoughts += part.text;
          break;
        case AnswerPart::Kind::text:
          text += part.text;
          break;
        case AnswerPart::Kind::call:
          calls += " " + part.text;
          arguments.clear();
          break;
        case AnswerPart::Kind::arguments:
          calls += part.text;
          arguments += part.text;
          pieces.push_back(part.text);
          break;
        case AnswerPart::Kind::call_end:
          expect_object(part.is_whole);
          if (!part.is_whole) calls += "...";
          break;
      }
    }
  }

  /// Arguments are an object, or its beginning.
  void expect_object(bool is_whole) const {
    const auto closed = OrderedJson::parse(closed_json(arguments), nullptr, false);
    EXPECT_TRUE(closed.is_object()) << arguments;
    if (is_whole) {
      EXPECT_EQ(closed_json(arguments), arguments);
    }
  }

  std::string shown() const { return "[" + thoughts + "][" + text + "]" + calls; }

 private:
  std::string arguments;  // of the last call
};

/// The parts of a text, given in pieces of up to `longest` bytes; 0: as a whole.
Joined parts_of(AnswerFormat format, std::string_view text, unsigned seed = 0,
                unsigned longest = 0) {
  AnswerParser parser(std::make_shared<const AnswerFormat>(std::move(format)));
  std::mt19937 random(seed);
  Joined all;
  while (!text.empty()) {
    const std::size_t count = longest == 0 ? text.size() : 1 + random() % longest;
    all.add(parser.append(text.substr(0, count)));
    text.remove_prefix(std::min(count, text.size()));
  }
  all.add(parser.finish());
  return all;
}

void expect_parts(const AnswerFormat& format, std::string_view text, std::string_view expected) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(parts_of(format, text, seed, seed == 0 ? 0 : 7).shown(), expected) << text;
  }
}

constexpr const char* paris = R"( weather{"city":"Paris","days":2})";
constexpr const char* both = R"( weather{"city":"Paris","days":2} now{})";

using Styled = std::pair<ToolStyle, std::string>;

/// The calls of `both` in each style.
std::vector<Styled> calls_of_styles() {
  const std::string call = R"({"name": "weather", "arguments": {"city": "Paris", "days": 2}})";
  const std::string other = R"({"name": "now", "arguments": {}})";
  return {
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
      {ToolStyle::lfm, "<|tool_call_start|>[" + call + ", " + other + "]<|tool_call_end|>"},
      {ToolStyle::granite, "<|tool_call|>[" + call + ", " + other + "]"},
      {ToolStyle::json, "\n" + call + "; " + other},
      {ToolStyle::json, "<|python_tag|>[" + call + "," + other + "]"},
      {ToolStyle::harmony,
       "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
       R"({"city": "Paris", "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>)"
       "commentary json<|message|>{}"}};
}

TEST(AnswerParts, CallsOfEachStyle) {
  for (const auto& [style, text] : calls_of_styles()) {
    expect_parts(format(style), text, std::string("[][]") + both);
    AnswerFormat once = format(style);
    once.calls_once = true;
    expect_parts(once, text, std::string("[][]") + paris);
    // All styles give arguments as they are written.
    const Joined one_by_one = parts_of(format(style), text, 0, 1);
    EXPECT_GT(one_by_one.pieces.size(), 10U) << text;
  }
}

/// A text with random changes, which often make it no call.
std::string changed(std::string text, std::mt19937& random) {
  const std::string_view inserted[] = {
      "\"", "{", "}", "]", ",", "\\", "\n", "é", "<", "</tool_call>", "\\ud83d"};
  for (unsigned count = random() % 4; count > 0 && !text.empty(); --count) {
    const std::size_t place = random() % text.size();
    switch (random() % 3) {
      case 0:
        text.erase(place, 1 + random() % 4);
        break;
      case 1:
        text.resize(place);
        break;
      default:
        text.insert(place, inserted[random() % std::size(inserted)]);
    }
  }
  return text;
}

TEST(AnswerParts, PartsDoNotDependOnPieces) {
  std::mt19937 random(7);
  std::vector<Styled> texts = calls_of_styles();
  const std::string city = R"("São \"😀\" \\ud83d\\ude00 \n")";
  for (std::size_t i = 0, count = texts.size(); i < count; ++i) {
    std::string text = texts[i].second;
    for (std::size_t at = 0; (at = text.find("\"Paris\"", at)) != text.npos; at += city.size()) {
      text.replace(at, 7, city);
    }
    texts.emplace_back(texts[i].first, "Text é\n" + text + "\nMore. ");
    texts.emplace_back(texts[i].first, std::move(text));
  }
  for (int round = 0; round < 100; ++round) {
    for (const auto& [style, original] : texts) {
      const std::string text = changed(original, random);
      const std::string whole = parts_of(format(style), text).shown();
      const unsigned longest = 1 + random() % 30;
      ASSERT_EQ(parts_of(format(style), text, random(), longest).shown(), whole) << text;
    }
  }
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
        "<tool_call>{\"name\": \"now\", \"arguments\": \"1\"}</tool_call>",
        "<tool_call>{\"name\": \"now\"</tool_call>", "<tool_call>{\"name\": \"now\"",
        "<tool_call></tool_call>", "<tool_call>]</tool_call>", "a <tool_ca"}) {
    expect_parts(format(ToolStyle::hermes), text, "[][" + text + "]");
  }
  expect_parts(format(ToolStyle::json), "{1}", "[][{1}]");
  expect_parts(format(ToolStyle::lfm), "<|tool_call_start|>[no(a=1)]<|tool_call_end|>",
               "[][<|tool_call_start|>[no(a=1)]<|tool_call_end|>]");
  expect_parts(format(ToolStyle::mistral), "[TOOL_CALLS]{}", "[][[TOOL_CALLS]{}]");
  const std::string name(2000, 'n');
  expect_parts(format(ToolStyle::mistral), "[TOOL_CALLS]" + name + "[ARGS]{}",
               "[][[TOOL_CALLS]" + name + "[ARGS]{}]");
}

TEST(AnswerParts, CallsThatGoWrongOrAreCut) {
  // What a call has so far remains; the rest is text.
  expect_parts(format(ToolStyle::hermes),
               R"(<tool_call>{"name": "now", "arguments": {"a": 1, "b" 2}}</tool_call> Yes)",
               R"([][2}}</tool_call> Yes] now{"a":1,"b"...)");
  expect_parts(format(ToolStyle::hermes),
               R"(<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}}</tool_call>)",
               R"([][": 2}}</tool_call>] now{"a":1,"a...)");
  expect_parts(format(ToolStyle::hermes),
               R"(<tool_call>{"name": "now", "arguments": {}}}</tool_call>)",
               "[][}</tool_call>] now{}");
  expect_parts(format(ToolStyle::lfm), "<|tool_call_start|>[now(a=)]<|tool_call_end|>",
               "[][a=)]<|tool_call_end|>] now{...");
  expect_parts(format(ToolStyle::coder),
               "<tool_call><function=weather><parameter=city>\nOslo\n</parameter><parameter=city>",
               R"([][<parameter=city>] weather{"city":"Oslo"...)");
  const std::string deep = R"({"name": "now", "arguments": {"a": )" + std::string(100, '[') +
                           std::string(100, ']') + "}}";
  expect_parts(format(ToolStyle::json), deep,
               "[][" + std::string(37, '[') + std::string(100, ']') + R"(}}] now{"a":)" +
                   std::string(63, '[') + "...");
  // The end of the answer drops what is not known to be an argument.
  expect_parts(format(ToolStyle::hermes), R"(<tool_call>{"name": "now", "arguments": {"a": "x\)",
               R"([][] now{"a":"x\...)");
  expect_parts(format(ToolStyle::hermes), R"(<tool_call>{"name": "now", "arguments": {"a": 12)",
               R"([][] now{"a":12...)");
  expect_parts(format(ToolStyle::hermes), R"(<tool_call>{"name": "now", "arguments": {}, "i)",
               "[][] now{}");
  expect_parts(format(ToolStyle::glm), "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg",
               R"([][] now{"a":...)");
  expect_parts(format(ToolStyle::glm), "<tool_call>no", "[][<tool_call>no]");
  const std::string now = R"(<tool_call>{"name": "now"}</tool_call>)";
  for (const std::size_t count : {20U, 27U, 30U, 38U, 50U, 60U}) {
    expect_parts(format(ToolStyle::hermes), (now + now).substr(0, count),
                 count < 26 ? "[][" + now.substr(0, count) + "]" : "[][] now{}");
  }
}

TEST(AnswerParts, ArgumentsAreThoseOfTheText) {
  // Numbers and strings stay as they are written, in JSON; the marks may be in strings.
  expect_parts(
      format(ToolStyle::hermes),
      R"(<tool_call>{"arguments": {"a": "</tool_call>\u00e9", "b": 1.0E2}, "name": "now"}</tool_call>)",
      R"([][] now{"a":"</tool_call>\u00e9","b":1.0E2})");
  expect_parts(
      format(ToolStyle::hermes),
      R"(<tool_call>{"id": [1, "}"], "name": "now", "more": -0.5, "parameters": {}}</tool_call>)",
      "[][] now{}");
  expect_parts(format(ToolStyle::coder),
               "<tool_call><function=weather><parameter=city>\n\nA \"b\"\n\n</parameter>"
               "<parameter=days>\n[1, {}]\n</parameter><parameter=other>\nx y\n</parameter>"
               "</function></tool_call>",
               R"([][] weather{"city":"\nA \"b\"\n","days":[1,{}],"other":"x y"})");
  expect_parts(format(ToolStyle::glm),
               "<tool_call>weather<arg_key>city</arg_key><arg_value>\n</arg_value>"
               "<arg_key>days</arg_key><arg_value> 3 </arg_value></tool_call>",
               R"([][] weather{"city":"\n","days":3})");
  expect_parts(
      format(ToolStyle::lfm),
      R"(<|tool_call_start|>[now(a='it\'s "\d\x41\u00e9"', b=None, c=[1, {"d": True}])]<|tool_call_end|>)",
      R"([][True}])]<|tool_call_end|>] now{"a":"it's \"\\d\u0041\u00e9\"","b":null,"c":[1,{"d":...)");
  expect_parts(format(ToolStyle::lfm), "<|tool_call_start|>[now(a = -1.5, b={}), now(c='\n')]",
               R"([][] now{"a":-1.5,"b":{}} now{"c":"\n"})");
}

TEST(AnswerParts, BeginningsOfJson) {
  const std::pair<const char*, const char*> texts[] = {
      {R"({"a":1,"b":12)", R"({"a":1})"},       {R"({"a":1,"b":[12,)", R"({"a":1,"b":[12]})"},
      {R"({"a":{"b":"x)", R"({"a":{}})"},       {R"({"a":{"b":"x"},"c)", R"({"a":{"b":"x"}})"},
      {R"({"a":[true,fal)", R"({"a":[true]})"}, {"{", "{}"},
      {R"({"a":1.5})", R"({"a":1.5})"}};
  for (const auto& [text, closed] : texts) EXPECT_EQ(closed_json(text), closed);
  EXPECT_EQ(compact_json(" [1, -0.5e+3, \"a b\", {} ] "), "[1,-0.5e+3,\"a b\",{}]");
  EXPECT_EQ(compact_json("10"), "10");
  for (const char* const text :
       {"", "01", "1.", "-", "[1,]", "{\"a\":1,}", "tru", "\"\\ud83d\"", "\"\\ude00\"", "\"\\x\"",
        "[1] 2", "{\"a\":1,\"\\u0061\":2}", "1e", "{1:2}", "\"\n\"", "[1}", "+1"}) {
    EXPECT_FALSE(compact_json(text)) << text;
    EXPECT_FALSE(OrderedJson::accept(text) && std::string(text).find("u0061") == std::string::npos);
  }
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
