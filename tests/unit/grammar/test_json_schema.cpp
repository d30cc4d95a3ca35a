#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "files/parsed_json.hpp"
#include "grammar/json_schema.hpp"
#include "unit/grammar/reference_match.hpp"
#include "unit/temporary_folder.hpp"

namespace {

using namespace kvzap::grammar;
using kvzap::test::expect_error;
using kvzap::test::ReferenceMatch;
using Json = nlohmann::ordered_json;

Json parsed(std::string_view text) { return kvzap::files::parse_ordered_json(text, "the schema"); }

constexpr JsonSchemaOptions compact_json = {false, false};

struct SchemaCase {
  const char* schema;
  std::vector<const char*> taken, left;
};

void expect_documents(const std::vector<SchemaCase>& cases,
                      const JsonSchemaOptions& options = compact_json) {
  for (const SchemaCase& each : cases) {
    const Grammar grammar = read_json_schema(parsed(each.schema), options);
    for (const char* text : each.taken) {
      EXPECT_TRUE(ReferenceMatch::matches(grammar, text)) << each.schema << "\n" << text;
    }
    for (const char* text : each.left) {
      EXPECT_FALSE(ReferenceMatch::matches(grammar, text)) << each.schema << "\n" << text;
    }
  }
}

TEST(JsonSchema, TypesAndValues) {
  expect_documents({
      {"{}",
       {"1", "-1.5e3", "\"a\\u0041\"", "null", "true", "[]", "[1,[2]]", "{}", R"({"a":{"b":[1]}})"},
       {"", "a", "[1", "01", "{a:1}", "[1,]", "{\"a\"}"}},
      {"true", {"1", "{}"}, {"x"}},
      {R"({"type":"integer"})", {"0", "-12"}, {"1.0", "1e2", "\"1\""}},
      {R"({"type":"number"})", {"0", "-1.25", "1e2"}, {"\"1\"", "true"}},
      {R"({"type":"boolean"})", {"true", "false"}, {"null", "1"}},
      {R"({"type":["null","string"]})", {"null", "\"x\""}, {"1"}},
      {R"({"type":"string","nullable":true})", {"null", "\"x\""}, {"1"}},
      {R"({"enum":["a\n",1,1.0,null,true,[1,{"b":2,"a":1}]]})",
       {R"("a\n")", "1", "null", "true", R"([1,{"b":2,"a":1}])"},
       {"\"a\"", "false", "[1]", "1.0"}},
      {R"({"enum":[1,"a",null],"type":["string","null"]})", {"\"a\"", "null"}, {"1"}},
      {R"({"const":{"a":[]}})", {R"({"a":[]})"}, {"{}", "[]"}},
      {R"({"enum":["a","b"],"const":"b"})", {"\"b\""}, {"\"a\""}},
      {R"({"enum":["a","bb","c1"],"pattern":"^[a-z]*$","maxLength":1})",
       {"\"a\""},
       {"\"bb\"", "\"c1\""}},
  });
}

TEST(JsonSchema, Strings) {
  expect_documents({
      {R"({"type":"string","minLength":1,"maxLength":2})",
       {"\"a\"", "\"éé\"", "\"\\n\\u0041\"", "\"\U0001F600\""},
       {"\"\"", "\"abc\""}},
      {R"({"type":"string","pattern":"b"})", {"\"b\"", "\"abc\"", "\"\\nb\""}, {"\"a\"", "\"\""}},
      {R"({"type":"string","pattern":"^a+$","minLength":2,"maxLength":3})",
       {"\"aa\"", "\"aaa\""},
       {"\"a\"", "\"aaaa\"", "\"ab\""}},
      {R"({"type":"string","pattern":"^\"\\\\$"})", {R"("\"\\")"}, {R"("\"")"}},
      {R"({"type":"string","format":"date"})", {"\"2024-02-29\""}, {"\"2023-02-29\"", "\"x\""}},
      {R"({"type":"string","format":"whatever"})", {"\"x\""}, {"1"}},
      {R"({"pattern":"^a$"})", {"\"a\"", "1", "null"}, {"\"b\""}},
      {R"({"type":"string","maxLength":2147483647})", {"\"abc\""}, {"1"}},
  });
}

TEST(JsonSchema, Numbers) {
  expect_documents({
      {R"({"type":"integer","minimum":-5,"maximum":120})",
       {"-5", "0", "120"},
       {"-6", "121", "1.5"}},
      {R"({"type":"number","minimum":-1,"exclusiveMaximum":0})",
       {"-0.5", "-1"},
       {"-0", "-0.00", "0"}},
      {R"({"type":"integer","exclusiveMinimum":0,"exclusiveMaximum":3})", {"1", "2"}, {"0", "3"}},
      {R"({"type":"integer","minimum":0,"exclusiveMinimum":true})", {"1"}, {"0", "-1"}},
      {R"({"type":"number","minimum":0.5,"maximum":1.5})",
       {"0.5", "1", "1.50", "0.75"},
       {"0.49", "1.51", "2", "1e0"}},
      {R"({"type":"number","multipleOf":0.01})", {"1", "1.5", "-0.25"}, {"0.001", "1e2"}},
      {R"({"type":"integer","multipleOf":5,"minimum":1,"maximum":20})",
       {"5", "20"},
       {"0", "7", "25"}},
      {R"({"minimum":3})", {"3", "\"a\"", "[]"}, {"2"}},
      {R"({"type":"integer","not":{"const":3}})", {"2", "4", "30"}, {"3"}},
      {R"({"type":"integer","not":{"enum":[5,-1,3,2,2.5,"a"]}})",
       {"-2", "0", "1", "4", "6", "22"},
       {"-1", "2", "3", "5", "1.5"}},
      {R"({"not":{"enum":[1,1.50,"a",null]}})",
       {"0", "1.25", "1.6", "\"b\"", "[1]", "true"},
       {"1", "1.5", "\"a\"", "null"}},
      {R"({"type":"number","minimum":1,"maximum":3,"not":{"enum":[1,3]}})",
       {"2", "1.1"},
       {"1", "3", "4"}},
  });
}

TEST(JsonSchema, Arrays) {
  expect_documents({
      {R"({"type":"array","items":{"type":"integer"}})",
       {"[]", "[1]", "[1,2]"},
       {"[\"a\"]", "[1,]"}},
      {R"({"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3})",
       {"[1,2]", "[1,2,3]"},
       {"[]", "[1]", "[1,2,3,4]"}},
      {R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
      {R"({"type":"array","prefixItems":[{"const":1},{"const":2}]})",
       {"[]", "[1]", "[1,2]", "[1,2,\"x\"]"},
       {"[2]", "[1,1]"}},
      {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"items":false})",
       {"[]", "[1]", "[1,2]"},
       {"[1,2,3]"}},
      {R"({"type":"array","items":[{"const":1},{"const":2}],"additionalItems":{"const":3},"minItems":1,
           "maxItems":4})",
       {"[1]", "[1,2]", "[1,2,3]", "[1,2,3,3]"},
       {"[]", "[1,2,2]", "[1,2,3,3,3]"}},
      {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"items":{"const":3},"minItems":3})",
       {"[1,2,3]", "[1,2,3,3]"},
       {"[1,2]"}},
      {R"({"type":"array","prefixItems":[{},{},{}],"maxItems":2})", {"[1,2]", "[]"}, {"[1,2,3]"}},
      {R"({"type":"array","prefixItems":[{},false,{}]})", {"[]", "[1]"}, {"[1,2]"}},
      {R"({"type":"array","items":false})", {"[]"}, {"[1]"}},
      {R"({"type":"array","uniqueItems":true,"maxItems":1})", {"[]", "[1]"}, {"[1,1]"}},
      {R"({"type":"array","uniqueItems":false})", {"[1,1]"}, {}},
      {R"({"type":"array","uniqueItems":true,"items":{"enum":["a",1,1.0,null]}})",
       {"[]", "[1]", "[null,1]", "[1,\"a\",null]", "[\"a\",null,1]"},
       {"[1,1]", "[\"a\",1,\"a\"]", "[1,\"a\",null,1]", "[1,]", "[2]"}},
      {R"({"type":"array","uniqueItems":true,"items":{"$ref":"#/$defs/x"},"minItems":2,"maxItems":3,
           "$defs":{"x":{"enum":[1,2,3,4,5,6,7,8]}}})",
       {"[8,1]", "[1,2,3]"},
       {"[]", "[1]", "[1,1]", "[1,2,3,4]", "[1,2,1]"}},
      {R"({"type":"array","uniqueItems":true,"items":{"anyOf":[{"const":1},{"const":2}]},"minItems":2})",
       {"[2,1]", "[1,2]"},
       {"[1]", "[1,1]"}},
      {R"({"enum":[[1,2],[1,1]],"uniqueItems":true})", {"[1,2]"}, {"[1,1]"}},
      {R"({"allOf":[{"prefixItems":[{"type":"integer"}]},{"items":{"minimum":2}}],"type":"array"})",
       {"[2,3]", "[2,\"a\"]"},
       {"[1]", "[2.5]", "[2,1]"}},
  });
}

TEST(JsonSchema, ObjectsInTheOrderOfProperties) {
  expect_documents({
      {R"({"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"null"}},
           "required":["b"],"additionalProperties":false})",
       {R"({"b":1})", R"({"b":1,"a":null})"},
       {"{}", R"({"a":null})", R"({"a":null,"b":1})", R"({"b":1,"c":1})", R"({"b":1,"b":1})",
        "{\"b\":1,}"}},
      {R"({"type":"object","properties":{"a":{"const":1}}})",
       {"{}", R"({"a":1})", R"({"a":1,"b":2})", R"({"b":2,"c":[]})", R"({"aa":2})", R"({"\n":2})"},
       {R"({"a":2})", R"({"b":1,"a":1})", R"({"b":2,"a":3})", R"({"\u0061":2})"}},
      {R"({"type":"object","additionalProperties":{"type":"integer"}})",
       {"{}", R"({"x":1,"\u0079":2})"},
       {R"({"x":"1"})"}},
      {R"({"type":"object","required":["z","a"],"properties":{"a":{"const":1}}})",
       {R"({"a":1,"z":[]})", R"({"a":1,"z":0,"b":0})"},
       {R"({"a":1})", R"({"z":1,"a":1})"}},
      {R"({"type":"object","patternProperties":{"^x-":{"const":1}},"additionalProperties":false})",
       {"{}", R"({"x-a":1,"x-b":1})"},
       {R"({"x-a":2})", R"({"a":1})"}},
      {R"({"type":"object","properties":{"xa":{"type":"integer"}},
           "patternProperties":{"^x":{"minimum":2},"a$":{"maximum":3}},"additionalProperties":false})",
       {R"({"xa":2})", R"({"xb":"s"})", R"({"ba":1})", R"({"xca":3})", R"({"xa":3,"xb":9})"},
       {R"({"xa":1})", R"({"xa":4})", R"({"xb":1})", R"({"xca":4})", R"({"b":1})"}},
      {R"({"type":"object","propertyNames":{"pattern":"^[a-c]$"},"properties":{"b":{"const":1},"d":{}}})",
       {"{}", R"({"b":1,"a":2})", R"({"c":2})"},
       {R"({"b":2})", R"({"d":1})", R"({"e":1})"}},
      {R"({"type":"object","propertyNames":{"enum":["a","b"]},"additionalProperties":{"const":1}})",
       {R"({"a":1,"b":1})"},
       {R"({"c":1})", R"({"a":2})"}},
      {R"({"properties":{"a":false}})", {"{}", R"({"b":1})", "1"}, {R"({"a":1})"}},
      {R"({"type":"object","unevaluatedProperties":false,"properties":{"a":{}}})",
       {R"({"a":1})"},
       {R"({"b":1})"}},
  });
}

TEST(JsonSchema, CountsOfMembers) {
  expect_documents({
      {R"({"type":"object","minProperties":1})", {R"({"a":1})"}, {"{}"}},
      {R"({"type":"object","maxProperties":1})", {"{}", R"({"a":1})"}, {R"({"a":1,"b":1})"}},
      {R"({"type":"object","minProperties":2,"maxProperties":3,"additionalProperties":false,
           "properties":{"a":{},"b":{},"c":{},"d":{}},"required":["b"]})",
       {R"({"a":1,"b":1})", R"({"b":1,"d":1})", R"({"b":1,"c":1,"d":1})", R"({"a":1,"b":1,"d":1})"},
       {R"({"b":1})", R"({"a":1,"c":1})", R"({"a":1,"b":1,"c":1,"d":1})"}},
      {R"({"type":"object","minProperties":2,"maxProperties":2,"properties":{"a":{}}})",
       {R"({"a":1,"b":1})"},
       {R"({"a":1})", R"({"b":1})", R"({"a":1,"b":1,"c":1})"}},
      {R"({"type":"object","maxProperties":0})", {"{}"}, {R"({"a":1})"}},
      {R"({"type":"object","maxProperties":2,"properties":{"a":{}},"required":["a"]})",
       {R"({"a":1})", R"({"a":1,"b":1})"},
       {"{}", R"({"a":1,"b":1,"c":1})"}},
  });
}

TEST(JsonSchema, ClosedObjects) {
  expect_documents(
      {
          {R"({"type":"object","properties":{"a":{"type":"object"}}})",
           {"{}", R"({"a":{"x":1}})"},
           {R"({"b":1})"}},
          {R"({"type":"object","properties":{}})", {"{}"}, {R"({"b":1})"}},
          {R"({"allOf":[{"properties":{"a":{}}},{"properties":{"b":{}}}],"type":"object"})",
           {R"({"a":1,"b":1})"},
           {R"({"c":1})"}},
          {R"({"type":"object","properties":{"a":{}},"additionalProperties":true})",
           {R"({"b":1})"},
           {}},
      },
      {false, true});
}

TEST(JsonSchema, Combinations) {
  expect_documents({
      {R"({"anyOf":[{"type":"integer"},{"type":"string","maxLength":1}]})",
       {"1", "\"a\""},
       {"\"aa\"", "null"}},
      {R"({"type":"string","anyOf":[{"maxLength":1},{"pattern":"^x"}]})",
       {"\"a\"", "\"xyz\""},
       {"\"ab\"", "1"}},
      {R"({"allOf":[{"minimum":2},{"maximum":4},{"type":"integer"}],"maximum":3})",
       {"2", "3"},
       {"1", "4"}},
      {R"({"allOf":[{"type":["integer","string"]},{"type":["number","null"]}]})",
       {"1"},
       {"1.5", "\"a\"", "null"}},
      {R"({"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},
                   {"properties":{"b":{"type":"null"},"a":{"minimum":3}}}],
           "type":"object","additionalProperties":false,"properties":{"a":{},"b":{}}})",
       {R"({"a":3})", R"({"a":4,"b":null})"},
       {"{}", R"({"a":2})", R"({"a":3,"b":1})"}},
      {R"({"allOf":[{"properties":{"a":{}},"additionalProperties":{"type":"integer"}},
                   {"properties":{"b":{"minimum":2}}}],"type":"object"})",
       {R"({"a":"x","b":2})", R"({"c":1})"},
       {R"({"b":"x"})", R"({"b":1})", R"({"c":"x"})"}},
      {R"({"oneOf":[{"type":"integer"},{"type":"null"}]})", {"1", "null"}, {"1.5"}},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", {"1.5"}, {"1", "1.0"}},
      {R"({"type":"object","properties":{"a":{"const":1},"b":{"const":2}},"additionalProperties":false,
           "oneOf":[{"required":["a"]},{"required":["b"]}]})",
       {R"({"a":1})", R"({"b":2})"},
       {"{}", R"({"a":1,"b":2})"}},
      {R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"},"v":{"type":"integer"}},
                     "required":["k","v"],"additionalProperties":false},
                    {"type":"object","properties":{"k":{"enum":["b","c"]},"v":{"type":"null"}},
                     "required":["k"],"additionalProperties":false}]})",
       {R"({"k":"a","v":1})", R"({"k":"b","v":null})", R"({"k":"c"})"},
       {R"({"k":"a","v":null})", R"({"k":"b","v":1})", R"({"k":"a"})"}},
      {R"({"oneOf":[{"type":"string","maxLength":2},{"type":"string","minLength":2}]})",
       {"\"a\"", "\"abc\""},
       {"\"ab\""}},
      {R"({"oneOf":[{"type":"string","format":"ipv4"},{"type":"string","format":"hostname"}]})",
       {"\"a.b\""},
       {"\"1.2.3.4\"", "\"-\""}},
      {R"({"oneOf":[{"minimum":0,"type":"integer"},{"multipleOf":5,"maximum":-1,"type":"integer"}]})",
       {"1", "-5"},
       {"-1"}},
      {R"({"type":"object","dependentRequired":{"a":["b"]},"properties":{"a":{},"b":{}}})",
       {"{}", R"({"b":1})", R"({"a":1,"b":1})"},
       {R"({"a":1})", R"({"a":1,"c":1})"}},
      {R"({"type":"object","dependencies":{"a":{"required":["b"]},"c":["a"]},
           "properties":{"a":{},"b":{},"c":{}}})",
       {"{}", R"({"a":1,"b":1,"c":1})"},
       {R"({"c":1})", R"({"a":1,"c":1})"}},
      {R"({"if":{"properties":{"k":{"const":"x"}},"required":["k"]},
           "then":{"required":["v"]},"else":{"properties":{"v":false}},"type":"object",
           "properties":{"k":{"type":"string"},"v":{}}})",
       {R"({"k":"x","v":1})", R"({"k":"y"})", "{}"},
       {R"({"k":"x"})", R"({"k":"y","v":1})"}},
      {R"({"not":{"type":["object","array","number"]}})", {"\"a\"", "null"}, {"1", "[]"}},
      {R"({"type":"object","not":{"required":["a"]}})", {R"({"b":1})"}, {R"({"a":1})"}},
      {R"({"type":"string","not":{"enum":["a","b"]}})",
       {"\"c\"", "\"aa\""},
       {"\"a\"", "\"b\"", "\"\\u0061\""}},
      {R"({"type":"string","not":{"pattern":"^a"}})", {"\"b\"", "\"\""}, {"\"a\"", "\"ab\""}},
  });
}

TEST(JsonSchema, References) {
  expect_documents({
      {R"({"$ref":"#/$defs/a%20b~1c","$defs":{"a b/c":{"type":"null"}}})", {"null"}, {"1"}},
      {R"({"$ref":"#/definitions/a","definitions":{"a":{"$ref":"#/definitions/b"},"b":{"type":"null"}}})",
       {"null"},
       {"1"}},
      {R"({"$ref":"#/$defs/a","maximum":3,"$defs":{"a":{"type":"integer","minimum":2}}})",
       {"2", "3"},
       {"1", "4"}},
      {R"({"type":"object","properties":{"v":{"type":"integer"},"next":{"$ref":"#"}},
           "required":["v"],"additionalProperties":false})",
       {R"({"v":1})", R"({"v":1,"next":{"v":2,"next":{"v":3}}})"},
       {R"({"v":1,"next":{}})", R"({"next":{"v":1}})"}},
      {R"({"$defs":{"tree":{"anyOf":[{"type":"integer"},{"type":"array","items":{"$ref":"#/$defs/tree"}}]}},
           "$ref":"#/$defs/tree"})",
       {"1", "[1,[2,[]]]"},
       {"[null]"}},
      {R"({"$defs":{"x":{"$anchor":"here","type":"null"}},"$ref":"#here"})", {"null"}, {"1"}},
      {R"({"$id":"http://a/b/root","$ref":"item","$defs":{"x":{"$id":"item","$ref":"../y/z#deep"},
           "z":{"$id":"/y/./","$defs":{"w":{"$id":"q/../z","$defs":{"v":{"$anchor":"deep","type":"null"}}}}}}})",
       {"null"},
       {"1"}},
      {R"({"$ref":"item.json#/$defs/y","$defs":{"x":{"$id":"item.json","$defs":{"y":{"$ref":"#z"},
           "z":{"$anchor":"z","const":1}}}}})",
       {"1"},
       {"2"}},
      {R"({"$id":"urn:a:b","$ref":"urn:a:c","$defs":{"x":{"$id":"urn:a:c","const":1}}})",
       {"1"},
       {"2"}},
      {R"({"$id":"http://a/b.json","$ref":"http://a/b.json#/$defs/x","$defs":{"x":{"type":"null"}}})",
       {"null"},
       {"1"}},
      {R"({"properties":{"a":{"type":"null"},"b":{"$ref":"#/properties/a"}},"type":"object"})",
       {R"({"a":null,"b":null})"},
       {R"({"b":1})"}},
      {R"({"prefixItems":[{"type":"null"},{"$ref":"#/prefixItems/0"}],"type":"array"})",
       {"[null,null]"},
       {"[null,1]"}},
      {R"({"$defs":{"n":{"oneOf":[{"type":"null"},{"type":"object","required":["n"],
           "properties":{"n":{"$ref":"#/$defs/n"}},"additionalProperties":false}]}},"$ref":"#/$defs/n"})",
       {"null", R"({"n":{"n":null}})"},
       {"{}"}},
      // A member that needs itself is left out.
      {R"({"type":"object","properties":{"a":{"$ref":"#/$defs/x"},"b":{}},"additionalProperties":false,
           "$defs":{"x":{"type":"object","properties":{"x":{"$ref":"#/$defs/x"}},"required":["x"]}}})",
       {"{}", R"({"b":1})"},
       {R"({"a":{}})"}},
  });
}

TEST(JsonSchema, WhiteSpaceIsBounded) {
  const char* schema = R"({"type":"object","properties":{"a":{"type":"array"},"b":{"const":[1]}}})";
  const Grammar grammar = read_json_schema(parsed(schema));
  for (const char* text :
       {R"({"a":[1],"b":[1]})", R"({"a": [1, 2], "b": [1]})",
        "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": [\n    1\n  ]\n}", "{ \"b\": [ 1 ] }"}) {
    EXPECT_TRUE(ReferenceMatch::matches(grammar, text)) << text;
  }
  const std::string far(21, ' ');
  const std::vector<std::string> others = {" {}",
                                           "{} ",
                                           "{  \"b\":[1]}",
                                           "{\"b\" :[1]}",
                                           "{\"b\":  [1]}",
                                           "{\"b\":[1] , \"c\":1}",
                                           "{\n" + far + "\"b\":[1]}",
                                           "{\t}",
                                           "{\n\n}"};
  for (const std::string& text : others) {
    EXPECT_FALSE(ReferenceMatch::matches(grammar, text)) << text;
  }
}

TEST(JsonSchema, AnyJson) {
  Grammar grammar;
  grammar.root = add_any_json_object(grammar);
  EXPECT_TRUE(ReferenceMatch::matches(grammar, R"({"a": [1, {"b": null}]})"));
  EXPECT_FALSE(ReferenceMatch::matches(grammar, "[]"));
  grammar.root = add_any_json(grammar);
  EXPECT_TRUE(ReferenceMatch::matches(grammar, "[{}]"));
}

TEST(JsonSchema, IsAPartOfALargerGrammar) {
  Grammar grammar;
  const RuleId root = grammar.add("root");
  const RuleId a = add_json_schema(grammar, parsed(R"({"const":1})"));
  const RuleId b = add_json_schema(grammar, parsed(R"({"type":"object","maxProperties":0})"));
  grammar.rules[0].body = sequence({literal("<"), call(a), call(b), literal(">")});
  grammar.root = root;
  EXPECT_TRUE(ReferenceMatch::matches(grammar, "<1{}>"));
  EXPECT_FALSE(ReferenceMatch::matches(grammar, "<{}1>"));
}

TEST(JsonSchema, RefusesByPointerAndKeyword) {
  const struct {
    const char *schema, *place, *message;
  } cases[] = {
      {"1", "#", "an object, true or false"},
      {"false", "#", "no document"},
      {R"({"type":"any"})", "#/type", "expected null, boolean"},
      {R"({"type":"string","enum":[1]})", "#", "no document"},
      {R"({"allOf":[{"type":"string"},{"type":"null"}]})", "#", "no document"},
      {R"({"type":"integer","minimum":3,"maximum":2})", "#", "no document"},
      {R"({"properties":{"a":{"contains":{}}}})", "#/properties/a/contains", "not supported"},
      {R"({"type":"array","uniqueItems":true,"items":{"enum":[1,2]},"minItems":3})", "#",
       "no document"},
      {R"({"uniqueItems":true})", "#/uniqueItems", "maxItems"},
      {R"({"type":"array","uniqueItems":true,"items":{"enum":[1,2,3,4,5,6,7,8,9]}})",
       "#/uniqueItems", "8 values"},
      {R"({"$id":"http://a/b/c","$ref":"../d","$defs":{"x":{"$id":"d"}}})", "#/$ref",
       "within the document"},
      {R"({"$defs":{"x":{"$id":"http://a/","$anchor":"y"}},"$ref":"#y"})", "#/$ref", "no anchor"},
      {R"({"not":{"properties":{"a":{"items":{"type":"null"}}}}})", "#/not", "supported only"},
      {R"({"if":{"items":{"type":"null"}},"then":{"type":"string"}})", "#/if", "supported only"},
      {R"({"$dynamicRef":"#a"})", "#/$dynamicRef", "not supported"},
      {R"({"$recursiveRef":"#"})", "#/$recursiveRef", "not supported"},
      {R"({"unevaluatedProperties":false,"allOf":[{}]})", "#/unevaluatedProperties", "allOf"},
      {R"({"unevaluatedItems":false,"anyOf":[{}]})", "#/unevaluatedItems", "anyOf"},
      {R"({"multipleOf":3})", "#/multipleOf", "found 3"},
      {R"({"multipleOf":0})", "#/multipleOf", "found 0"},
      {R"({"minimum":"1"})", "#/minimum", "a number"},
      {R"({"exclusiveMaximum":"1"})", "#/exclusiveMaximum", "a number"},
      {R"({"minLength":-1})", "#/minLength", "a count"},
      {R"({"minLength":1000000})", "#/minLength", "100000"},
      {R"({"maxItems":1.5})", "#/maxItems", "a count"},
      {R"~({"pattern":"(?=a)"})~", "#/pattern", "lookahead"},
      {R"({"pattern":1})", "#/pattern", "a string"},
      {R"({"patternProperties":{"\\bx":{}}})", "#/patternProperties", "\\b"},
      {R"({"enum":1})", "#/enum", "an array"},
      {R"({"required":true})", "#/required", "names"},
      {R"({"properties":[]})", "#/properties", "an object"},
      {R"({"anyOf":{}})", "#/anyOf", "an array"},
      {R"({"items":1})", "#/items", "an object, true or false"},
      {R"({"$ref":"http://other/x.json"})", "#/$ref", "within the document"},
      {R"({"$ref":"#/$defs/none"})", "#/$ref", "nothing is at"},
      {R"({"$ref":"#none"})", "#/$ref", "no anchor"},
      {R"({"$ref":"#"})", "#", "refers to itself"},
      {R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})", "#", "refers to itself"},
      {R"({"type":"object","minProperties":2})", "#", "minProperties"},
      {R"({"oneOf":[{"type":"array","items":{}},{"type":"array","items":{"type":"null"}}]})",
       "#/oneOf", "may hold together"},
      {R"({"type":"object","properties":{"x":{"$ref":"#"}},"required":["x"]})", "#", "no document"},
      {R"({"patternProperties":{"a":{},"b":{},"c":{},"d":{},"e":{}}})", "#", "patternProperties"},
  };
  for (const auto& each : cases) {
    expect_error([&] { read_json_schema(parsed(each.schema)); },
                 {"JSON schema", each.place, each.message});
  }
}

TEST(JsonSchema, HostileSchemasAreBounded) {
  const auto expect_refused = [](const Json& schema, const char* message) {
    expect_error([&] { read_json_schema(schema); }, {"JSON schema", message});
  };
  Json deep = Json::object();
  for (int i = 0; i < 100; ++i) deep = Json{{"items", deep}};
  expect_refused(deep, "levels");
  for (const int count : {8, 14}) {
    Json dependent = {{"type", "object"}, {"dependentRequired", Json::object()}};
    for (int i = 0; i < count; ++i) {
      dependent["dependentRequired"]["a" + std::to_string(i)] = {"b" + std::to_string(i)};
    }
    if (count == 14) expect_refused(dependent, "dependentRequired");
    if (count == 8) read_json_schema(dependent);
  }
  // 3^20 combinations.
  Json all = Json::array();
  for (int i = 0; i < 20; ++i) {
    Json any = Json::array();
    for (int j = 0; j < 3; ++j) {
      any.push_back({{"required", {std::to_string(i) + "-" + std::to_string(j)}}});
    }
    all.push_back({{"anyOf", any}});
  }
  expect_refused({{"allOf", all}}, "combinations");
  Json chain = {{"$ref", "#/$defs/0"}};
  for (int i = 0; i < 100; ++i) {
    chain["$defs"][std::to_string(i)] = {{"$ref", "#/$defs/" + std::to_string(i + 1)}};
  }
  expect_refused(chain, "references");
  Json wide = {{"type", "object"}, {"maxProperties", 1000}, {"additionalProperties", false}};
  for (int i = 0; i < 2000; ++i) wide["properties"][std::to_string(i)] = {{"type", "null"}};
  expect_refused(wide, "rules");
}

TEST(JsonSchema, LargeSchemasAreRead) {
  Json values = Json::array();
  for (int i = 0; i < 100'000; ++i) values.push_back("value " + std::to_string(i));
  EXPECT_EQ(read_json_schema({{"enum", values}}).rules.size(), 2u);
  Json wide = {{"type", "object"}};
  for (int i = 0; i < 2000; ++i) wide["properties"][std::to_string(i)] = {{"type", "null"}};
  // A chain, although each property may be left out.
  EXPECT_LT(read_json_schema(wide).rules.size(), 8'000u);
}

}  // namespace
