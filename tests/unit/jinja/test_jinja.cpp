#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <kvzap/core/types.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "jinja/template.hpp"
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
  std::ifstream stream(std::filesystem::path(KVZAP_SOURCE_DIR) /
                       "tests/golden/jinja/templates.json");
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

TEST(Jinja, StopsTemplatesWithoutEnd) {
  const std::string loop = "{% for a in range(10000) %}{% for b in range(10000) %}";
  expect_error([&] { rendered(loop + "{% endfor %}{% endfor %}"); }, {"too m"});
  expect_error([&] { rendered(loop + "xxxxxxxxxx{% endfor %}{% endfor %}"); }, {"too m"});
  expect_error([] { rendered("{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}"); },
               {"nested too deep"});
  expect_error(
      [] {
        rendered(
            "{% set a = [1] %}{% set n = namespace(a=a) %}{% for i in range(90) %}"
            "{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}");
      },
      {"too m"});
  expect_error([] { rendered("{% set n = namespace() %}{% set n.n = n %}{{ n.n.n }}"); },
               {"a Namespace has no text"});
  expect_error([] { rendered("{{ '%100000d' % 1 }}"); }, {"too wide"});
  std::string chain = "{{ 1";
  for (int i = 0; i < 1000; ++i) chain += " + 1";
  expect_error([&] { rendered(chain + " }}"); }, {"nested too deep"});
  EXPECT_EQ(rendered("{% for i in [1] %}{% set n = namespace(l=loop) %}{{ n.l.index }}"
                     "{% macro m() %}{{ m }}{% endmacro %}{% set n.m = m %}{% endfor %}"),
            "1");
}

}  // namespace
