#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <kvzap/model/chat_template.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "source_dir.hpp"
#include "text/chat_input.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::ChatMessage;
using kvzap::ChatRole;
using kvzap::ChatTemplate;
using kvzap::test::expect_error;
using kvzap::test::TemporaryFolder;
using Json = nlohmann::json;

const Json& golden_cases() {
  static const Json cases = [] {
    std::ifstream stream(kvzap::test::source_dir() / "tests/golden/tokenizer/templates.json");
    return Json::parse(stream)["cases"];
  }();
  return cases;
}

const Json bos_config = {{"bos_token", "<|begin_of_text|>"}};

ChatTemplate detect(const std::string& source, const Json& config = bos_config) {
  const TemporaryFolder folder;
  folder.write("chat_template.jinja", source);
  folder.write("tokenizer_config.json", config.dump());
  return ChatTemplate::detect(folder.path());
}

void expect_refused(const std::string& source, std::initializer_list<std::string_view> parts = {}) {
  expect_error([&] { detect(source); }, {"chat_template.jinja"});
  expect_error([&] { detect(source); }, parts);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t position = text.find(from);
  EXPECT_NE(position, std::string::npos) << from;
  return position == std::string::npos ? text : text.replace(position, from.size(), to);
}

const std::string chatml =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' "
    "}}{% endif %}";

TEST(ChatTemplate, MatchesReferenceForPublishedFamilies) {
  ASSERT_EQ(golden_cases().size(), 8u);
  for (const Json& golden : golden_cases()) {
    SCOPED_TRACE(golden["template"].get<std::string>());
    const ChatTemplate chat_template = detect(golden["template"]);
    for (const bool thinking : {true, false}) {
      const ChatTemplate::Parts parts = chat_template.parts(thinking);
      const Json& expected = golden[thinking ? "thinking" : "no_thinking"];
      EXPECT_EQ(parts.prefix, expected[0].get<std::string>());
      EXPECT_EQ(parts.suffix, expected[1].get<std::string>());
      EXPECT_EQ(parts.trim_content, golden["format"] == "llama3");
    }
    const std::string padded = golden["padded"];
    const ChatTemplate::Parts parts = chat_template.parts(false);
    const std::string whole = parts.prompt(padded + "and more");
    EXPECT_EQ(whole, parts.context(padded) + "and more" + parts.suffix);
    EXPECT_EQ(chat_template.parts(false).prompt(golden["padded"].get<std::string>()),
              golden["padded_prompt"].get<std::string>());
    const Json& around = golden["exchange"];
    if (around.size() != 3) {  // a template that knows no assistant
      expect_error([&] { chat_template.exchange("Read this.", "That."); }, {"an answer"});
      expect_error([&] { chat_template.between_turns(); }, {"several turns"});
      continue;
    }
    const auto exchange = chat_template.exchange("Read this.", "That.");
    const auto part = [&](int i) { return around[i].get<std::string>(); };
    EXPECT_EQ(exchange.text, part(0) + "Read this." + part(1) + "That." + part(2));
    EXPECT_EQ(exchange.text.find("Read this."), exchange.user);
    EXPECT_EQ(exchange.text.find("That."), exchange.assistant);
  }
}

TEST(ChatTemplate, RendersConversationsAsTransformersDoes) {
  const std::map<std::string, ChatRole> roles = {
      {"system", ChatRole::system}, {"user", ChatRole::user}, {"assistant", ChatRole::assistant}};
  int conversations = 0;
  for (const Json& golden : golden_cases()) {
    if (!golden.contains("conversations")) continue;
    const ChatTemplate chat_template = detect(golden["template"]);
    for (const Json& conversation : golden["conversations"]) {
      SCOPED_TRACE(golden["template"].get<std::string>() + conversation.dump());
      std::vector<ChatMessage> messages;
      for (const Json& message : conversation["messages"]) {
        messages.push_back({roles.at(message[0]), message[1]});
        EXPECT_EQ(name_of(messages.back().role), message[0].get<std::string>());
      }
      const bool thinking = conversation["thinking"];
      const std::string expected = conversation["text"];
      EXPECT_EQ(chat_template.render(messages, thinking, conversation["generation_prompt"]),
                expected);
      ++conversations;
      if (messages.front().role != ChatRole::system || !conversation["generation_prompt"]) continue;
      // The same in the parts that a conversation under way is made of.
      const auto parts = chat_template.parts(thinking, messages[0].content);
      const auto first = parts.prompt(messages[1].content);
      if (messages.size() == 2) {
        EXPECT_EQ(first, expected);
      }
    }
  }
  EXPECT_EQ(conversations, 7 * 7 * 4);

  const ChatTemplate chat_template = detect(chatml);
  const ChatTemplate::Parts parts = chat_template.parts(false);
  EXPECT_EQ(parts.prompt("1") + "2" + chat_template.between_turns() + "3" + parts.suffix,
            chat_template.render(
                {{ChatRole::user, "1"}, {ChatRole::assistant, "2"}, {ChatRole::user, "3"}}, false));
  expect_error([&] { chat_template.render({}, false); }, {"at least one message"});
}

TEST(ChatTemplate, ReadsTokenizerConfig) {
  const TemporaryFolder folder;
  const Json bos = {{"content", "<s>"}, {"special", true}};
  const std::string llama3 = golden_cases()[5]["template"];
  Json config = {{"chat_template", llama3}, {"bos_token", bos}};
  folder.write("tokenizer_config.json", config.dump());
  EXPECT_EQ(ChatTemplate::detect(folder.path()).parts(true).prefix,
            "<s><|start_header_id|>user<|end_header_id|>\n\n");

  config["chat_template"] = {{{"name", "tool_use"}, {"template", "{{ tools }}"}},
                             {{"name", "default"}, {"template", llama3}}};
  folder.write("tokenizer_config.json", config.dump());
  EXPECT_TRUE(ChatTemplate::detect(folder.path()).parts(true).trim_content);

  // The file of its own takes precedence.
  folder.write("chat_template.jinja", chatml);
  EXPECT_EQ(ChatTemplate::detect(folder.path()).parts(true).prefix, "<|im_start|>user\n");
}

/// A chat with tools has a template of its own, if the folder has one.
TEST(ChatTemplate, ReadsNamedTemplates) {
  kvzap::text::ChatInput input;
  input.messages = nlohmann::ordered_json::parse(R"([{"role": "user", "content": "u"}])");
  const auto rendered = [&](const TemporaryFolder& folder) {
    const ChatTemplate found = ChatTemplate::detect(folder.path());
    input.tools = nullptr;
    const std::string text = found.render(input);
    input.tools = nlohmann::ordered_json::parse(R"([{"name": "t"}])");
    return text + "|" + found.render(input);
  };
  const std::string plain = "{{ bos_token }}{{ messages[0].content }}";
  const std::string with_tools = "{{ bos_token }}{{ tools[0].name }}";
  const TemporaryFolder folder;
  folder.write("special_tokens_map.json", R"({"bos_token": {"content": "<s>"}})");
  folder.write("chat_template.json", Json{{"chat_template", plain}}.dump());
  EXPECT_EQ(rendered(folder), "<s>u|<s>u");
  const Json list = {{{"name", "rag"}, {"template", "{{"}},
                     {{"name", "tool_use"}, {"template", with_tools}},
                     {{"name", "default"}, {"template", plain}}};
  folder.write("tokenizer_config.json", Json{{"chat_template", list}}.dump());
  EXPECT_EQ(rendered(folder), "<s>u|<s>t");
  folder.write("chat_template.jinja", "x" + plain);
  EXPECT_EQ(rendered(folder), "x<s>u|x<s>u");
  std::filesystem::create_directory(folder.path() / "additional_chat_templates");
  folder.write("additional_chat_templates/tool_use.jinja", "y" + with_tools);
  EXPECT_EQ(rendered(folder), "x<s>u|y<s>t");
  folder.write("additional_chat_templates/tool_use.jinja", "{{");
  expect_error([&] { ChatTemplate::detect(folder.path()).render(input); }, {"tool_use.jinja"});
}

TEST(ChatTemplate, NeedsNoTokenizerConfig) {
  const TemporaryFolder folder;
  folder.write("chat_template.jinja", chatml);
  EXPECT_EQ(ChatTemplate::detect(folder.path()).parts(true).prefix, "<|im_start|>user\n");
}

// As jinja2 3.1 renders them: white space is Python's, and a loop's variables end with it.
TEST(ChatTemplate, FollowsJinjasRulesOfSpaceAndScope) {
  for (const std::string& source :
       {"\u00A0\x1F" + replaced(chatml, "{% for", "{%- for"),
        replaced(chatml, "{% if", " \u2003\n{%- if"), replaced(chatml, "{% for", "\u3000{% for"),
        replaced(chatml, "{% endfor %}", "{% endfor -%}\x1C \u0085\n"),
        replaced(chatml, "{% endfor %}",
                 "{% set x = '!' %}{% endfor %}"
                 "{% if x is defined %}{{ x }}{% endif %}"),
        "{% set x = '' %}" +
            replaced(chatml, "{% endfor %}", "{% set x = '!' %}{% endfor %}{{ x }}")}) {
    SCOPED_TRACE(source);
    EXPECT_EQ(detect(source).parts(false).prompt("X"),
              "<|im_start|>user\nX<|im_end|>\n<|im_start|>assistant\n");
  }
}

TEST(ChatTemplate, TakesVariantsOfSpelling) {
  for (const std::string& source :
       {replaced(chatml, "message['content']", "message.content"),
        replaced(chatml, "message['content']", "messages[0][\"content\"]"),
        replaced(chatml, "{% for message in messages %}",
                 "{% set loop_messages = messages %}{% for message in loop_messages %}"),
        replaced(chatml, "'<|im_start|>' +", "\"<|im_start|>\" ~"), chatml + "\n",
        "{# a comment with ' and {{ #}" + chatml,
        replaced(chatml, "{% if add_generation_prompt %}",
                 "{% if add_generation_prompt is defined and add_generation_prompt %}"),
        replaced(chatml, "{{ '<|im_start|>'",
                 "{% if not (message.role == 'tool' or message['role'] == 'assistant') and "
                 "(tools is not defined or not tools) %}{% endif %}{{ '<|im_start|>'")}) {
    SCOPED_TRACE(source);
    const ChatTemplate chat_template = detect(source);
    EXPECT_EQ(chat_template.parts(false).prompt(" X "),
              "<|im_start|>user\n X <|im_end|>\n<|im_start|>assistant\n");
  }
  const ChatTemplate always_thinks =
      detect(replaced(chatml, "assistant\n'", "assistant\n<think>\n'"));
  EXPECT_EQ(always_thinks.parts(false).suffix, "<|im_end|>\n<|im_start|>assistant\n<think>\n");
  EXPECT_TRUE(detect(replaced(chatml, "message['content']", "message['content']|trim"))
                  .parts(false)
                  .trim_content);
}

TEST(ChatTemplate, RefusesMissingTemplates) {
  const TemporaryFolder folder;
  expect_error([&] { ChatTemplate::detect(folder.path()); },
               {"chat_template.jinja", "tokenizer_config.json"});
  folder.write("tokenizer_config.json", "{}");
  expect_error([&] { ChatTemplate::detect(folder.path()); }, {"neither"});
}

TEST(ChatTemplate, RefusesBrokenConfigs) {
  const TemporaryFolder folder;
  for (const std::string_view content :
       {"{", "[]", "\xff", R"({"chat_template": 3})", R"({"chat_template": [3]})",
        R"({"chat_template": [{"name": "default"}]})",
        R"({"chat_template": [{"name": "rag", "template": "x"}]})",
        R"({"chat_template": [{"name": "default", "template": 5}]})",
        R"({"chat_template": "x", "bos_token": 5})",
        R"({"chat_template": "x", "bos_token": {"special": true}})"}) {
    folder.write("tokenizer_config.json", content);
    expect_error([&] { ChatTemplate::detect(folder.path()); }, {"tokenizer_config.json"});
  }
}

TEST(ChatTemplate, RefusesLlama3WithoutBosToken) {
  const std::string llama3 = golden_cases()[5]["template"];
  expect_error([&] { detect(llama3, Json::object()); }, {"line 3: 'bos_token' is undefined"});
}

TEST(ChatTemplate, TakesOtherFamilies) {
  const ChatTemplate mistral = detect(
      "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' "
      "+ message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ "
      "message['content'] + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}"
      "{% endif %}{% endfor %}",
      {{"bos_token", "<s>"}, {"eos_token", "</s>"}});
  EXPECT_EQ(mistral.parts(false).prompt("One."), "<s>[INST] One. [/INST]");
  EXPECT_EQ(mistral.between_turns(), "</s>[INST] ");
  const auto exchange = mistral.exchange("One.", "Two.");
  EXPECT_EQ(exchange.text, "<s>[INST] One. [/INST]Two.</s>");
  EXPECT_EQ(exchange.assistant, exchange.text.find("Two."));
  expect_error([&] { mistral.parts(false, "Be brief."); },
               {"chat_template.jinja: line 1", "only user and assistant"});

  const ChatTemplate gemma = detect(
      "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set "
      "role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' "
      "+ "
      "role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if "
      "add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}");
  EXPECT_TRUE(gemma.parts(false).trim_content);
  EXPECT_EQ(gemma.parts(false).suffix, "<end_of_turn>\n<start_of_turn>model\n");
  EXPECT_EQ(gemma.between_turns(), "<end_of_turn>\n<start_of_turn>user\n");
}

// A template that puts the context before a question in another form cannot be used.
TEST(ChatTemplate, RefusesTemplatesThatChangeMessages) {
  for (const std::string& source : {
           std::string("plain text"),
           std::string(),
           std::string("{{ messages }}"),
           replaced(chatml, "message['content']", "message['content']|upper"),
           replaced(chatml, "message['content']", "message['content']|e"),
           replaced(chatml, "message['content']", "message['content'].replace('a', 'b')"),
           replaced(chatml, "message['content']", "message['content'].lstrip()"),
           replaced(chatml, "message['content']", "message['content'][:100]"),
           replaced(chatml, "message['content']", "message['content'] + message['content']"),
           replaced(chatml, "message['content']", "message['content'] * 2"),
           replaced(chatml, "message['content']", "('x' if true else message['content'])"),
           replaced(chatml, "in messages %}", "in messages[1:] %}"),
           replaced(chatml, "{% for", "{% set messages = [] %}{% for"),
       }) {
    SCOPED_TRACE(source);
    expect_refused(source, {"expected a template that writes the user's message once", "found"});
  }
}

TEST(ChatTemplate, RefusesBrokenJinja) {
  const std::string parentheses(100000, '(');
  std::string negations;
  for (int i = 0; i < 25000; ++i) negations += "not ";
  for (const std::string& source :
       {std::string("{{ 'a"), std::string("\n{{ 'a' "), std::string("{% if"), std::string("{# a"),
        std::string("{{"), std::string("{% %}"), std::string("{% endif %}"),
        std::string("{% else %}"), std::string("{% if add_generation_prompt %}"),
        std::string("{% if true %}{% endfor %}"), std::string("{{ }}"), std::string("{{ + }}"),
        std::string("{% for %}{% endfor %}"), std::string("{% set %}"), std::string("{{ '\\"),
        std::string("{% if not %}a{% endif %}"), "{% if " + parentheses + " %}a{% endif %}",
        "{% if " + negations + "true %}a{% endif %}"}) {
    SCOPED_TRACE(source.substr(0, 100));
    expect_refused(source, {source[0] == '\n' ? "line 2" : "line 1"});
  }
}

TEST(ChatTemplate, RendersToolsAndThoughts) {
  const ChatTemplate chat_template = detect(
      "{% if tools %}{{ tools|tojson }}{% endif %}{% for message in messages %}{{ message.role }}:"
      "{{ message.content }}{{ message.reasoning_content }}{% for call in message.tool_calls %}"
      "{{ call.function.arguments|tojson }}{% endfor %}{% endfor %}{{ enable_thinking }}");
  kvzap::text::ChatInput input;
  input.messages = nlohmann::ordered_json::parse(
      R"([{"role": "user", "content": "u"},
          {"role": "assistant", "content": null, "reasoning": "r",
           "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": "é"}}}]}])");
  input.tools = nlohmann::ordered_json::parse(R"([{"type": "function", "a": 1.0}])");
  EXPECT_EQ(chat_template.render(input),
            "[{\"type\": \"function\", \"a\": 1.0}]user:uassistant:r{\"z\": 1, \"a\": \"é\"}False");
  input.variables["enable_thinking"] = "maybe";
  input.messages.erase(1);
  EXPECT_EQ(chat_template.render(input), "[{\"type\": \"function\", \"a\": 1.0}]user:umaybe");
  input.messages[0] = "u";
  expect_error([&] { chat_template.render(input); }, {"expected an object, found string"});
}

// Jinja takes all three for \n, in the text and in literals; Python's open() does before it.
TEST(ChatTemplate, TakesAllLineEndsForOne) {
  for (const char* const line_end : {"\r\n", "\r"}) {
    std::string other;
    for (const char c : chatml + "\n") other += c == '\n' ? line_end : std::string(1, c);
    EXPECT_EQ(detect(other).parts(false).prompt("X"), detect(chatml).parts(false).prompt("X"));
    EXPECT_EQ(detect(other).parts(false).prefix, "<|im_start|>user\n");
  }
}

TEST(ChatTemplate, ReadsTheEscapesOfPython) {
  const auto prefix_with = [](const std::string& escape) {
    const auto parts = detect("{{ '" + escape + "' }}" + chatml).parts(false);
    return parts.prefix.substr(0, parts.prefix.find("<|im_start|>"));
  };
  EXPECT_EQ(prefix_with(R"(\a\b\f\n\r\t\v\\\'\")"), "\a\b\f\n\r\t\v\\'\"");
  EXPECT_EQ(prefix_with(R"(\x41\xe4\u20ac\U0001F600\101\08\q)"),
            "A\u00e4\u20ac\U0001F600A" + std::string("\0008\\q", 4));
  for (const char* const escape :
       {R"(\N{BULLET})", R"(\x4)", R"(\uD800)", R"(\U00110000)", "\\\u00e4"}) {
    expect_refused("{{ '" + std::string(escape) + "' }}" + chatml);
  }
}

TEST(ChatTemplate, TakesLittleMemory) {
  std::string doubled = "{% set a = 'a' %}";
  for (int i = 0; i < 40; ++i) doubled += "{% set a = a + a %}";
  expect_refused(doubled + "{{ a }}" + chatml, {"too much memory"});
  expect_refused("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
                 {"too m"});
  expect_refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {"nested too deep"});
  expect_refused(
      "{% set ns = namespace(a=[]) %}{% for i in range(1000) %}{% set ns.a = [ns.a] %}"
      "{% endfor %}",
      {"nested too deep"});
  expect_refused("{{ 'a' * 10 ** 12 }}", {"memory"});
  expect_refused("{{ 'aaa'.replace('', 'b' * 10 ** 7) }}", {"memory"});
  expect_refused(std::string(200 << 10, ' ') + chatml, {"at most 131072 bytes"});
  const TemporaryFolder folder;
  folder.write("tokenizer_config.json",
               Json{{"chat_template", std::string(200 << 10, ' ') + chatml}}.dump());
  expect_error([&] { ChatTemplate::detect(folder.path()); },
               {"tokenizer_config.json: chat_template", "at most 131072 bytes"});
}

// A hostile file can have megabytes where a message quotes it, and control characters.
TEST(ChatTemplate, MessagesStayShortAndPlain) {
  const std::string name(100 << 10, 'n');
  for (const std::string& source :
       {"{{ " + name + ".x }}", "{{ 1|" + name + " }}", "{{ 1 is " + name + " }}",
        "{% " + name + " %}" + chatml, "{{ '\x1b[31m" + name + "' }}",
        "{{ raise_exception('\x1b[31m" + name + "') }}"}) {
    try {
      detect(source);
      ADD_FAILURE() << source.substr(0, 40);
    } catch (const kvzap::Error& error) {
      const std::string message = error.what();
      EXPECT_LT(message.size(), 1000u);
      EXPECT_EQ(message.find('\x1b'), std::string::npos);
    }
  }
}

}  // namespace
