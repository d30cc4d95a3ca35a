#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "jinja/template.hpp"
#include "source_dir.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using kvzap::jinja::Template;
using kvzap::test::expect_error;
using Json = nlohmann::ordered_json;

std::string rendered(const std::string& source, const Json& variables = Json::object()) {
  return Template(source, "chat.jinja").render(variables);
}

// tests/golden/make_jinja_goldens.py lets jinja2 render these.
TEST(Jinja, RendersAsJinja2Does) {
  std::ifstream stream(kvzap::test::source_dir() / "tests/golden/jinja/templates.json");
  const Json golden = Json::parse(stream);
  ASSERT_GT(golden["cases"].size(), 150u);
  for (const Json& item : golden["cases"]) {
    const std::string source = item[0];
    SCOPED_TRACE(source);
    if (item[1].is_null()) {
      expect_error([&] { rendered(source, golden["variables"]); }, {"chat.jinja: line "});
    } else {
      EXPECT_EQ(rendered(source, golden["variables"]), item[1].get<std::string>());
    }
  }
}

// Whole chats in templates that combine the features.
TEST(Jinja, RendersChatsAsJinja2Does) {
  std::ifstream stream(kvzap::test::source_dir() / "tests/golden/jinja/styles.json");
  const Json golden = Json::parse(stream);
  for (const auto& [name, chats] : golden["texts"].items()) {
    for (const auto& [chat, text] : chats.items()) {
      SCOPED_TRACE(name + ", " + chat);
      Json variables = {{"bos_token", "<s>"},
                        {"tools", nullptr},
                        {"documents", nullptr},
                        {"add_generation_prompt", true}};
      variables.update(golden["chats"][chat]);
      const std::string source = golden["styles"][name];
      if (text.is_null()) {
        expect_error([&] { rendered(source, variables); }, {"chat.jinja: line "});
      } else {
        EXPECT_EQ(rendered(source, variables), text.get<std::string>());
      }
    }
  }
}

// One row a feature; jinja2 in transformers' environment renders the same texts.
TEST(Jinja, HasTheFeaturesOfChatTemplates) {
  const Json variables = Json::parse(
      R"({"l": [3, 1, 2], "d": {"b": 1, "a": [1.5, null]}, "s": " Zo\u00eb ", "rows": [
          {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>a</think>b"}]})");
  const struct {
    const char *feature, *source, *text;
  } rows[] = {
      {"branches", "{% if not l %}a{% elif 'b' in d %}b{% else %}c{% endif %}", "b"},
      {"space control", "a\n  {%- if true -%}\n b\n{%- endif %}\n  c\n", "ab  c"},
      {"a loop with its variables",
       "{% for x in l if x != 1 %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ x }};{% "
       "endfor %}",
       "1False23;2True22;"},
      {"neighbours in a loop",
       "{% for x in l %}{{ loop.previtem }}<{{ loop.nextitem }}{{ loop.cycle(',', ';') }}{% endfor "
       "%}",
       "<1,3<2;1<,"},
      {"loop controls",
       "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "32"},
      {"a recursive loop",
       "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
       "123"},
      {"macros",
       "{% macro m(a, b='-') %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}",
       "1-()12(3,)"},
      {"call blocks",
       "{% macro m() %}<{{ caller('x') }}>{% endmacro %}{% call(y) m() %}{{ y }}!{% endcall %}",
       "<x!>"},
      {"namespace",
       "{% set n = namespace(i=0) %}{% for x in l %}{% set n.i = n.i + x %}{% endfor %}{{ n.i }}",
       "6"},
      {"block assignments", "{% set x | trim | upper %} a {{ l[0] }} {% endset %}[{{ x }}]",
       "[A 3]"},
      {"filter blocks and with",
       "{% filter upper %}a{% with b = 'c' %}{{ b }}{% endwith %}{% endfilter %}", "AC"},
      {"generation", "a{% generation %}b{% endgeneration %}c", "abc"},
      {"raw text and comments", "{% raw %}{{ x }}{% endraw %}{# no #}", "{{ x }}"},
      {"slices", "{{ l[::-1] }}{{ s[1:-1] }}{{ s.strip()[-2:] }}{{ l[:-1] }}",
       "[2, 1, 3]Zo\u00ebo\u00eb[3, 1]"},
      {"methods of strings",
       "{{ rows[1].content.split('</think>')[-1].lstrip('\\n') }}{{ "
       "s.strip().lower().startswith('zo') }}",
       "bTrue"},
      {"methods of dicts and lists", "{{ d.get('z', 9) }}{{ d.items() | list }}{{ l.index(2) }}",
       "9[('b', 1), ('a', [1.5, None])]2"},
      {"filters of sequences",
       "{{ rows | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}"
       "{{ l | sort | first }}{{ l | length }}",
       "Hi13"},
      {"tests",
       "{{ x is defined }}{{ d is mapping }}{{ s is string }}{{ none is none }}{{ 4 is even }}",
       "FalseTrueTrueTrueTrue"},
      {"tojson", "{{ d | tojson }}{{ l | tojson(indent=1) }}{{ s | tojson(ensure_ascii=true) }}",
       "{\"b\": 1, \"a\": [1.5, null]}[\n 3,\n 1,\n 2\n]\" Zo\\u00eb \""},
      {"numbers", "{{ 7 // 2 }}{{ -7 % 3 }}{{ 2 ** 10 }}{{ 7 / 2 }}{{ 1e3 }}", "3210243.51000.0"},
      {"formats", "{{ '%s:%03d' % ('a', 7) }}{{ '{}-{x}'.format(1, x=2) }}{{ 'a' ~ 1 ~ none }}",
       "a:0071-2a1None"},
      {"strftime_now", "{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.feature);
    EXPECT_EQ(rendered(row.source, variables), row.text);
  }
  expect_error([] { rendered("{{ raise_exception('No system message.') }}"); },
               {"the template refuses the messages: No system message."});
}

TEST(Jinja, NamesTheLineOfAnError) {
  expect_error([] { rendered("a\n{% if true %}\n{{ x.y.z }}{% endif %}"); },
               {"chat.jinja: line 3: 'x' is undefined"});
  expect_error([] { rendered("a\n\n{% for x in y %}"); }, {"line 3", "endfor"});
  expect_error([] { rendered("{{ 1 +\n* 2 }}"); }, {"line 2: expected an expression, found '*'"});
  expect_error([] { rendered("{{ raise_exception('Roles must alternate.') }}"); },
               {"line 1: the template refuses the messages: Roles must alternate."});
  expect_error([] { rendered("{{ 2 ** 63 }}"); }, {"exceeds 64 bits"});
}

TEST(Jinja, FollowsPythonInRareCases) {
  EXPECT_EQ(rendered("{{ ' a b '.split(none, 1) }}{{ ' a b '.rsplit(none, 1) }}"),
            "['a', 'b '][' a', 'b']");
  EXPECT_EQ(rendered("{{ -0.5|round(0, 'ceil') }}{% set d = {} %}{{ [d, d]|sort }}"),
            "0.0[{}, {}]");
}

TEST(Jinja, KeepsTheOrderOfKeys) {
  EXPECT_EQ(rendered("{{ x|tojson }}{{ x }}", Json::parse(R"({"x": {"b": 1, "a": [1.0]}})")),
            R"({"b": 1, "a": [1.0]}{'b': 1, 'a': [1.0]})");
}

// Each of these needs much time or memory, or a deep stack, in an interpreter without bounds.
TEST(Jinja, BoundsHostileTemplates) {
  const auto many = [](std::string_view text, int count) {
    std::string result;
    for (int i = 0; i < count; ++i) result += text;
    return result;
  };
  const std::string loop = "{% for a in range(10000) %}{% for b in range(10000) %}";
  const std::string ends = "{% endfor %}{% endfor %}";
  const std::string texts = "{% set s = 'a' * 2000000 %}{% set t = 'a' * 1000000 ~ 'b' %}";
  const std::string again = "{% for i in range(100000) %}{% set x = ";
  const std::string nested = "{% set n = namespace(a=(1,), b=(1,)) %}{% for i in range(90) %}";
  const std::pair<std::string, const char*> rows[] = {
      {loop + ends, "too m"},
      {loop + "xxxxxxxxxx" + ends, "too m"},
      {"{% for a in range(10 ** 6) %}{% endfor %}", "more than 100000 values"},
      {again + "range(100000)|list %}{% endfor %}", "too much memory"},
      {"{{ 'a' * 10 ** 9 }}", "too much memory"},
      {"{{ [[]] * 2 ** 62 }}", "too much memory"},
      {"{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor "
       "%}",
       "too much memory"},
      {"{{ ('a' * 10000)|replace('a', 'b' * 10000) }}", "too much memory"},
      {"{{ ('a' * 10000).replace('', 'b' * 10000) }}", "too much memory"},
      {"{{ (',' * 10 ** 6)|join('b' * 10 ** 6) }}", "too much memory"},
      {"{{ ('\\n' * 2 * 10 ** 7).splitlines() }}", "too much memory"},
      {"{{ (' a' * 10 ** 7).split() }}", "too much memory"},
      {"{{ 'x'|indent(10 ** 9) }}", "the width is too large"},
      {"{{ ('a\\n' * 10000)|indent('x' * 10 ** 6) }}", "too much memory"},
      {"{{ 'x'|center(10 ** 9) }}", "too wide"},
      {"{{ 'x'.rjust(2 ** 62) }}", "too wide"},
      {"{{ '1'.zfill(10 ** 12) }}", "too wide"},
      {"{{ '%100000d' % 1 }}", "too wide"},
      {"{{ '%.1000000000f' % 1 }}", "too wide"},
      {"{{ '{:99999999999999999999}'.format(1) }}", "too wide"},
      {"{{ ('%9999d' * 10000) % ((1,) * 10000) }}", "too much memory"},
      {"{{ 1|round(10 ** 9) }}", "out of range"},
      {"{{ [1]|batch(10 ** 9, 0) }}", "out of range"},
      {"{{ [1]|tojson(indent=10 ** 9) }}", "too large"},
      {"{{ (range(100000)|list)|tojson(indent=1000) }}", "too much memory"},
      {"{{ 9 ** 9 ** 9 }}", "exceeds 64 bits"},
      {"{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}", "nested too deep"},
      {"{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deep"},
      {"{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
       "too many steps"},
      {"{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "nested too deep"},
      {nested + "{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}", "too m"},
      {nested + "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
       "too many steps"},
      {nested + "{% set n.a = (n.a, n.a) %}{% endfor %}{{ {n.a: 1} }}", "too many steps"},
      {"{% set n = namespace(a=[]) %}{% for i in range(200) %}{% set n.a = [n.a] %}{% endfor %}",
       "nested too deep"},
      {"{% set n = namespace() %}{% set n.n = n %}{{ n.n.n }}", "a Namespace has no text"},
      {again + "'a'.strip('b' * 10 ** 6) %}{% endfor %}", "too m"},
      {"{% set s = ' ' * 10 ** 7 %}" + again + "s.strip() %}{% endfor %}", "too many steps"},
      {"{% set s = 'A' * 10 ** 7 %}" + again + "s.isupper() %}{% endfor %}", "too many steps"},
      {"{% set s = '1' * 10 ** 7 %}" + again + "s|float %}{% endfor %}", "too many steps"},
      {texts + again + "s.find(t) %}{% endfor %}", "too m"},
      {texts + again + "t in s %}{% endfor %}", "too m"},
      {"{{ ([{}] * 10000)|map(attribute='" + many("0.", 10000) + "', default=1)|list }}",
       "too many steps"},
      {"{{ " + many("(", 60000), "nested too deep"},
      {"{{ " + many("[", 60000), "nested too deep"},
      {"{{ " + many("not ", 30000) + "1 }}", "nested too deep"},
      {"{{ " + many("-", 100000) + "1 }}", "nested too deep"},
      {"{{ 1" + many(" + 1", 30000) + " }}", "nested too deep"},
      {"{{ a" + many(".a", 60000) + " }}", "nested too deep"},
      {"{{ a" + many("|e", 60000) + " }}", "nested too deep"},
      {"{{ " + many("1 if 1 else ", 10000) + "1 }}", "nested too deep"},
      {many("{% if 1 %}", 6000) + many("{% endif %}", 6000), "nested too deep"},
      {many("{% macro a() %}", 6000), "nested too deep"},
      {"{% for " + many("(", 50000) + "x", "nested too deep"},
  };
  for (const auto& [source, message] : rows) {
    SCOPED_TRACE(source.substr(0, 120));
    expect_error([&, &text = source] { rendered(text); }, {"chat.jinja: line ", message});
  }
  // Searches take linear time.
  for (const char* const search : {"s.find(t)", "s.rfind('b' ~ s[1000000:])", "s.count(t) - 1",
                                   "s.split(t)|length - 2", "s.replace(t, '')|length - 2000001"}) {
    EXPECT_EQ(rendered(texts + "{{ " + search + " }}"), "-1") << search;
  }
  EXPECT_EQ(rendered(texts + "{{ t in s }}{{ s.strip('b' * 1000000 ~ 'a') }}"), "False");
}

TEST(Jinja, FindsLongTexts) {
  const std::string setup = "{% set t = 'ab' * 40 ~ 'c' %}{% set s = 'x' ~ t ~ 'ab' ~ t ~ 'y' %}";
  EXPECT_EQ(
      rendered(setup + "{{ s.find(t) }},{{ s.rfind(t) }},{{ s.find(t, 2) }},{{ s.count(t) }}"),
      "1,84,84,2");
  EXPECT_EQ(rendered(setup + "{{ s.split(t) }}{{ s.rsplit(t, 1)[1] }}{{ s.replace(t, '-') }}"),
            "['x', 'ab', 'y']yx-ab-y");
  EXPECT_EQ(
      rendered(setup + "{{ s.rpartition(t)[2] }}{{ t in s }}{{ t ~ 'c' in s }}{{ t in 'ab' }}"),
      "yTrueFalseFalse");
}

TEST(Jinja, ObjectsMayContainThemselves) {
  EXPECT_EQ(rendered("{% for i in [1] %}{% set n = namespace(l=loop) %}{{ n.l.index }}"
                     "{% macro m() %}{{ m }}{% endmacro %}{% set n.m = m %}{% endfor %}"),
            "1");
}

}  // namespace
