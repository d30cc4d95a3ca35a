// Grammars of answers: the fields that ask for them, and calls of tools in the ways of families.
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "grammar/automaton.hpp"
#include "grammar/recogniser.hpp"
#include "server/answer_grammar.hpp"
#include "server/answer_parts.hpp"
#include "server/tool_rules.hpp"
#include "unit/server/served_model.hpp"

namespace kvzap::test {
namespace {

using nlohmann::ordered_json;

ordered_json tools() {
  return ordered_json::parse(R"([
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
      "properties": {"city": {"type": "string", "maxLength": 6},
                     "unit": {"type": "string", "enum": ["C", "F"]},
                     "days": {"type": "integer", "minimum": 1, "maximum": 14}},
      "required": ["city", "days"], "additionalProperties": false}}},
    {"type": "function", "function": {"name": "now"}}])");
}

AnswerFormat format(ToolStyle style) {
  AnswerFormat format;
  format.style = style;
  format.tools = tools();
  return format;
}

grammar::Automaton automaton_of(const AnswerFormat& format) {
  grammar::Grammar grammar;
  const MarkWriter write = [](std::string_view mark) { return grammar::literal(mark); };
  const grammar::Expr calls = format.style == ToolStyle::harmony
                                  ? harmony_call(format, write, grammar)
                                  : calls_expression(format, write, grammar);
  grammar.root = grammar.add("calls", calls);
  return grammar::compile(grammar);
}

bool matches(const grammar::Automaton& automaton, const std::string& text) {
  grammar::Recogniser recogniser(automaton);
  for (const char c : text) {
    if (!recogniser.read_byte(static_cast<unsigned char>(c))) return false;
  }
  return recogniser.is_match();
}

/// A text of the grammar, or nothing if the walk gets too long.
std::string random_text(const grammar::Automaton& automaton, std::mt19937& random) {
  grammar::Recogniser recogniser(automaton);
  std::string text;
  while (text.size() < 400 && !(recogniser.is_match() && random() % 2 == 0)) {
    // Free text ends with a mark that a walk would not find.
    for (const std::string mark : {"</parameter>", "</arg_value>"}) {
      std::size_t read = 0;
      while (random() % 64 != 0 && read < mark.size() &&
             recogniser.read_byte(static_cast<unsigned char>(mark[read]))) {
        ++read;
      }
      text += mark.substr(0, read);
    }
    // Letters and digits often, so that texts stay readable; ends of parts oftener.
    constexpr std::string_view usual = "<>\"}]),: \nabC";
    std::vector<unsigned char> may_follow;
    for (unsigned byte = 0; byte < 128; ++byte) {
      const auto value = static_cast<unsigned char>(byte);
      if (!recogniser.read_byte(value)) continue;
      recogniser.go_back(1);
      const bool is_usual = usual.find(static_cast<char>(value)) != usual.npos;
      may_follow.insert(may_follow.end(), is_usual ? 20 : 1, value);
    }
    if (may_follow.empty()) {
      for (unsigned byte = 128; byte < 256; ++byte) {
        if (!recogniser.read_byte(static_cast<unsigned char>(byte))) continue;
        recogniser.go_back(1);
        may_follow.push_back(static_cast<unsigned char>(byte));
      }
    }
    if (may_follow.empty()) break;
    const unsigned char byte = may_follow[random() % may_follow.size()];
    recogniser.read_byte(byte);
    text += static_cast<char>(byte);
  }
  return recogniser.is_match() ? text : std::string();
}

constexpr ToolStyle styles[] = {ToolStyle::hermes,  ToolStyle::coder,    ToolStyle::glm,
                                ToolStyle::mistral, ToolStyle::deepseek, ToolStyle::kimi,
                                ToolStyle::lfm,     ToolStyle::granite,  ToolStyle::json,
                                ToolStyle::harmony};

TEST(ToolRules, EveryTextIsCallsWithValidArguments) {
  std::mt19937 random(5);
  for (const ToolStyle style : styles) {
    const grammar::Automaton automaton = automaton_of(format(style));
    int weathers = 0;
    for (int i = 0; i < 150; ++i) {
      const std::string text = random_text(automaton, random);
      if (text.empty()) continue;
      AnswerParser parser(std::make_shared<const AnswerFormat>(format(style)));
      const std::string start = style == ToolStyle::harmony ? "<|start|>assistant" : "";
      std::vector<std::pair<std::string, std::string>> calls;
      const auto take = [&](const AnswerParts& parts) {
        for (const AnswerPart& part : parts) {
          EXPECT_TRUE(part.is_whole) << text;
          EXPECT_NE(part.kind, AnswerPart::Kind::text) << text;
          if (part.kind == AnswerPart::Kind::call) calls.emplace_back(part.text, "");
          if (part.kind == AnswerPart::Kind::arguments) calls.back().second += part.text;
        }
      };
      take(parser.append(start + text));
      take(parser.finish());
      ASSERT_FALSE(calls.empty()) << static_cast<int>(style) << ' ' << text;
      for (const auto& [name, written] : calls) {
        const auto arguments = ordered_json::parse(written);
        if (name == "now") {
          EXPECT_EQ(arguments, ordered_json::object());
          continue;
        }
        ++weathers;
        ASSERT_TRUE(arguments.at("city").is_string()) << text;
        ASSERT_TRUE(arguments.at("days").is_number_integer()) << text;
        EXPECT_GE(arguments.at("days"), 1);
        EXPECT_LE(arguments.at("days"), 14);
        if (arguments.contains("unit")) {
          EXPECT_TRUE(arguments.at("unit") == "C" || arguments.at("unit") == "F") << text;
        }
        EXPECT_EQ(arguments.size(), arguments.contains("unit") ? 3U : 2U);
      }
    }
    EXPECT_GT(weathers, 5) << static_cast<int>(style);
  }
}

TEST(ToolRules, CallsAsModelsWriteThem) {
  const std::string call = R"({"name": "weather", "arguments": {"city": "Paris", "days": 2}})";
  const std::pair<ToolStyle, std::string> texts[] = {
      {ToolStyle::hermes, "<tool_call>\n" + call + "\n</tool_call>"},
      {ToolStyle::hermes,
       "<tool_call>\n" + call + "\n</tool_call>\n<tool_call>\n" + call + "\n</tool_call>"},
      {ToolStyle::coder,
       "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
       "2\n</parameter>\n</function>\n</tool_call>"},
      {ToolStyle::glm,
       "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
       "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"},
      {ToolStyle::mistral, "[TOOL_CALLS][" + call + "]"},
      {ToolStyle::mistral, R"([TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2})"},
      {ToolStyle::lfm,
       R"(<|tool_call_start|>[weather(city="Paris", days=2), now()]<|tool_call_end|>)"},
      {ToolStyle::granite, "<|tool_call|>[" + call + "]"},
      {ToolStyle::json, R"({"name": "weather", "parameters": {"city": "Paris", "days": 2}})"},
      {ToolStyle::harmony,
       "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
       R"({"city": "Paris", "days": 2})"}};
  for (const auto& [style, text] : texts) {
    EXPECT_TRUE(matches(automaton_of(format(style)), text)) << text;
    AnswerFormat once = format(style);
    once.calls_once = true;
    const bool has_two = text.find("now") != text.npos || text.find("\n<tool_call>") != text.npos;
    EXPECT_NE(matches(automaton_of(once), text), has_two) << text;
  }
}

TEST(ToolRules, SchemasCountUnlessToldOtherwise) {
  AnswerFormat one = format(ToolStyle::hermes);
  one.tools.erase(1);
  auto& function = one.tools[0]["function"];
  const std::string wrong =
      "<tool_call>{\"name\": \"weather\", \"arguments\": {\"x\": 1}}</tool_call>";
  EXPECT_FALSE(matches(automaton_of(one), wrong));
  function["strict"] = false;
  EXPECT_TRUE(matches(automaton_of(one), wrong));
  function.erase("strict");
  function["parameters"]["not"] = {{"required", {"city"}}};  // no grammar can say this
  EXPECT_TRUE(matches(automaton_of(one), wrong));
  function["strict"] = true;
  EXPECT_THROW(automaton_of(one), BadRequest);
}

/// Whether an answer of a request may be `text`, as a whole.
bool allows(const std::string& fields, const std::string& text, const ServedModel& model) {
  const std::string body =
      R"({"messages": [{"role": "user", "content": "Hello"}], )" + fields + "}";
  ApiRequest request = parse_request(body, Endpoint::chat, model);
  complete(request);
  const auto grammar = request.generations[0].sampling.grammar;
  if (!grammar) return true;
  TokenGrammar::State state(grammar);
  try {
    for (const TokenId token : model.tokenizer->encode(text)) state.append(token);
  } catch (const Error&) {
    return false;
  }
  return state.may_end();
}

TEST(AnswerGrammar, FieldsOfAllServers) {
  const ServedModel model = served();
  const std::string schema =
      R"({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})";
  const std::string in_quotes = ordered_json(schema).dump();
  for (const std::string& fields :
       {R"("response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": )" +
            schema + "}}",
        R"("response_format": {"type": "json_object", "schema": )" + schema + "}",
        R"("guided_json": )" + schema, R"("guided_json": )" + in_quotes,
        R"("structured_outputs": {"json": )" + schema + "}", R"("json_schema": )" + schema}) {
    EXPECT_TRUE(allows(fields, R"({"a": 5})", model)) << fields;
    EXPECT_FALSE(allows(fields, R"({"b": 5})", model)) << fields;
    EXPECT_FALSE(allows(fields, R"({"a": 5)", model)) << fields;
  }
  EXPECT_TRUE(allows(R"("response_format": {"type": "json_object"})", R"({"b": [5]})", model));
  EXPECT_FALSE(allows(R"("response_format": {"type": "json_object"})", "[5]", model));
  EXPECT_TRUE(allows(R"("response_format": {"type": "text"})", "[5", model));
  for (const char* const fields :
       {R"("guided_regex": "[a-c]+5?")", R"("structured_outputs": {"regex": "[a-c]+5?"})"}) {
    EXPECT_TRUE(allows(fields, "abc5", model));
    EXPECT_FALSE(allows(fields, "5", model));
  }
  for (const char* const fields : {R"("guided_choice": ["yes", "no"])",
                                   R"("structured_outputs": {"choice": ["yes", "no"]})"}) {
    EXPECT_TRUE(allows(fields, "no", model));
    EXPECT_FALSE(allows(fields, "n", model));
  }
  for (const char* const fields : {R"("grammar": "root ::= \"a\" root \"b\" | \"\"")",
                                   R"("guided_grammar": "root ::= \"a\" root \"b\" | \"\"")"}) {
    EXPECT_TRUE(allows(fields, "aabb", model));
    EXPECT_FALSE(allows(fields, "aab", model));
  }
}

TEST(AnswerGrammar, IsMadeOnce) {
  const ServedModel model = served();
  const std::string body =
      R"({"messages": [{"role": "user", "content": "Hello"}], "guided_regex": "[a-c]+5?"})";
  ApiRequest first = parse_request(body, Endpoint::chat, model);
  EXPECT_TRUE(first.make_grammar);
  EXPECT_FALSE(first.generations[0].sampling.grammar);
  complete(first);
  EXPECT_FALSE(first.make_grammar);
  const ApiRequest second = parse_request(body, Endpoint::chat, model);
  EXPECT_FALSE(second.make_grammar);
  EXPECT_EQ(second.generations[0].sampling.grammar, first.generations[0].sampling.grammar);
  // What was refused once is refused before anything waits.
  const std::string wrong =
      R"({"messages": [{"role": "user", "content": "Hello"}], "guided_regex": "(a"})";
  ApiRequest refused = parse_request(wrong, Endpoint::chat, model);
  EXPECT_THROW(complete(refused), BadRequest);
  EXPECT_THROW(parse_request(wrong, Endpoint::chat, model), BadRequest);
}

TEST(AnswerGrammar, WrongFieldsAreNamed) {
  const ServedModel model = served();
  const std::pair<const char*, const char*> cases[] = {
      {R"("guided_regex": "(a")", "guided_regex"},
      {R"("guided_choice": [])", "guided_choice"},
      {R"("guided_choice": [5])", "guided_choice"},
      {R"("grammar": "root ::= x")", "grammar"},
      {R"("guided_json": {"not": {"type": "string"}, "type": ["object"], "unevaluatedItems": 1})",
       "guided_json"},
      {R"("guided_json": "{")", "guided_json"},
      {R"("response_format": {"type": "structural_tag"})", "response_format.type"},
      {R"("response_format": {"type": "json_schema"})", "response_format.json_schema"},
      {R"("structured_outputs": {"structural_tag": "x"})", "structured_outputs.structural_tag"},
      {R"("guided_regex": "a", "guided_choice": ["a"])", "guided_choice"},
      {R"("tool_choice": "required")", "tool_choice"}};
  for (const auto& [fields, field] : cases) {
    try {
      allows(fields, "", model);
      ADD_FAILURE() << fields;
    } catch (const BadRequest& error) {
      EXPECT_EQ(error.field, field) << error.what();
    }
  }
}

TEST(AnswerGrammar, ToolChoiceAndThoughts) {
  const ServedModel model = served_with_tools();
  const std::string tools_field = R"("tools": )" + tools().dump();
  const std::string call = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
  const std::string wrong = "<tool_call>{\"name\": \"no\", \"arguments\": {}}</tool_call>";
  const std::string weather =
      "<tool_call>{\"name\": \"weather\", \"arguments\": "
      "{\"city\": \"Rome\", \"days\": 3}}</tool_call>";
  EXPECT_TRUE(allows(tools_field, "Hello.", model));
  EXPECT_TRUE(allows(tools_field, "Hello. " + call, model));
  EXPECT_FALSE(allows(tools_field, "Hello. " + wrong, model));
  const std::string required = tools_field + R"(, "tool_choice": "required")";
  EXPECT_TRUE(allows(required, call, model));
  EXPECT_TRUE(allows(required, call + "\n" + weather, model));
  EXPECT_FALSE(allows(required, "Hello.", model));
  const std::string named =
      tools_field + R"(, "tool_choice": {"type": "function", "function": {"name": "now"}})";
  EXPECT_TRUE(allows(named, call, model));
  EXPECT_FALSE(allows(named, weather, model));
  EXPECT_FALSE(allows(named, call + call, model));
  EXPECT_TRUE(allows(tools_field + R"(, "tool_choice": "none")", wrong, model));
  const std::string choice = R"("guided_choice": ["yes"])";
  EXPECT_TRUE(allows(tools_field + ", " + choice, "yes", model));
  EXPECT_TRUE(allows(tools_field + ", " + choice, call, model));
  EXPECT_FALSE(allows(tools_field + ", " + choice, "no", model));
  // The prompt begins thoughts.
  const std::string thinks = choice + R"(, "chat_template_kwargs": {"enable_thinking": true})";
  EXPECT_TRUE(allows(thinks, "Is it? {}</think>\n\nyes", model));
  EXPECT_FALSE(allows(thinks, "yes", model));
  EXPECT_TRUE(allows(choice, "yes", model));
}

}  // namespace
}  // namespace kvzap::test
