#include "server/tool_rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "files/json_file.hpp"
#include "grammar/json_schema.hpp"
#include "server/request_fields.hpp"
#include "server/tool_bodies.hpp"

namespace kvzap::server {
namespace {

using grammar::any_text;
using grammar::call;
using grammar::choice;
using grammar::Expr;
using grammar::Grammar;
using grammar::literal;
using grammar::optional;
using grammar::repeat;
using grammar::sequence;

/// Writes the calls of one style.
class CallRules {
 public:
  CallRules(const AnswerFormat& format, const MarkWriter& write, Grammar& grammar)
      : m_format(format), m_write(write), m_grammar(grammar) {
    for (const Json& tool : format.tools) m_functions.push_back(&tool.at("function"));
  }

  Expr calls() {
    const CallMarks marks = marks_of(m_format.style);
    switch (m_format.style) {
      case ToolStyle::hermes:
        return several(marked(marks, object("arguments")), blank());
      case ToolStyle::coder:
        return several(marked(marks, for_each([&](const Json& f) { return coder_call(f); })),
                       blank());
      case ToolStyle::glm:
        return several(marked(marks, for_each([&](const Json& f) { return glm_call(f); })),
                       blank());
      case ToolStyle::mistral:
        return choice({sequence({m_write(marks.begin), blank(), list()}),
                       several(sequence({m_write(marks.begin), named_call("[ARGS]")}), blank())});
      case ToolStyle::deepseek:
        return sequence(
            {m_write(marks.begin), several(deepseek_call(), blank()), m_write(marks.end)});
      case ToolStyle::kimi:
        return sequence({m_write(marks.begin), several(kimi_call(), blank()), m_write(marks.end)});
      case ToolStyle::lfm:
        return marked(
            marks,
            sequence({literal("["),
                      several(for_each([&](const Json& f) { return lfm_call(f); }), literal(", ")),
                      literal("]")}));
      case ToolStyle::granite:
        return sequence({m_write(marks.begin), blank(), list()});
      case ToolStyle::json:
        return sequence({optional(m_write(marks.begin)),
                         several(choice({object("parameters"), object("arguments")}),
                                 sequence({literal(";"), blank()}))});
      case ToolStyle::harmony:
        break;
    }
    return grammar::nothing();
  }

  Expr harmony() {
    return for_each([&](const Json& function) {
      const std::string recipient = " to=functions." + name_of(function);
      const Expr channel = m_write("<|channel|>");
      const Expr format = optional(choice(
          {literal(" json"), sequence({literal(" "), m_write("<|constrain|>"), literal("json")}),
           sequence({m_write("<|constrain|>"), literal("json")})}));
      return sequence({choice({sequence({channel, literal("commentary" + recipient)}),
                               sequence({literal(recipient), channel, literal("commentary")})}),
                       format, m_write("<|message|>"), arguments(function)});
    });
  }

 private:
  static const std::string& name_of(const Json& function) {
    return function.at("name").get_ref<const std::string&>();
  }

  template <class F>
  Expr for_each(F f) {
    std::vector<Expr> choices;
    for (const Json* function : m_functions) choices.push_back(f(*function));
    return choice(std::move(choices));
  }

  Expr several(const Expr& one, const Expr& between) {
    if (m_format.calls_once) return one;
    return sequence({one, repeat(sequence({between, one}), 0)});
  }

  Expr marked(const CallMarks& marks, const Expr& body) {
    return sequence({m_write(marks.begin), blank(), body, blank(), m_write(marks.end)});
  }

  /// {"name": NAME, "arguments": {…}}. `key`: of the arguments.
  Expr object(const std::string& key) {
    return for_each([&](const Json& function) {
      return sequence({literal("{"), blank(), literal("\"name\":"), blank(),
                       literal('"' + name_of(function) + '"'), literal(","), blank(),
                       literal('"' + key + "\":"), blank(), arguments(function), blank(),
                       literal("}")});
    });
  }

  Expr list() {
    return sequence({literal("["), blank(),
                     several(object("arguments"), sequence({literal(","), blank()})), blank(),
                     literal("]")});
  }

  Expr named_call(std::string_view separator) {
    return for_each([&](const Json& function) {
      return sequence({literal(name_of(function)), m_write(separator), arguments(function)});
    });
  }

  Expr deepseek_call() {
    const Expr separator = m_write("<｜tool▁sep｜>");
    const Expr block = for_each([&](const Json& function) {  // up to V3 and R1
      return sequence({literal("function"), separator, literal(name_of(function) + "\n```json\n"),
                       arguments(function), literal("\n```")});
    });
    return sequence({m_write("<｜tool▁call▁begin｜>"),
                     choice({block, named_call("<｜tool▁sep｜>")}),
                     m_write("<｜tool▁call▁end｜>")});
  }

  Expr kimi_call() {
    grammar::ByteSet digits;
    for (char c = '0'; c <= '9'; ++c) digits.set(static_cast<unsigned char>(c));
    const Expr call = for_each([&](const Json& function) {
      return sequence({literal("functions." + name_of(function) + ":"),
                       repeat(grammar::one_byte(digits), 1, 3),
                       m_write("<|tool_call_argument_begin|>"), arguments(function)});
    });
    return sequence({m_write("<|tool_call_begin|>"), call, m_write("<|tool_call_end|>")});
  }

  /// f(key, schema, is_required) for each parameter.
  template <class F>
  void visit_parameters(const Json& function, F f) {
    const Json* const parameters = field_of(function, "parameters");
    const Json* const properties = parameters ? field_of(*parameters, "properties") : nullptr;
    if (!properties || !properties->is_object()) return;
    const Json* const required = field_of(*parameters, "required");
    for (const auto& [key, schema] : properties->items()) {
      const bool is_required =
          required && std::find(required->begin(), required->end(), key) != required->end();
      Json own = schema;  // with what its references may name
      for (const char* const name : {"$defs", "definitions"}) {
        const Json* const shared = field_of(*parameters, name);
        if (shared && own.is_object() && !own.contains(name)) own[name] = *shared;
      }
      f(key, own, is_required);
    }
  }

  /// A value up to its mark, and the mark: a string as it is, anything else as JSON.
  Expr raw_value(const Json& function, const Json& schema, std::string_view end) {
    if (!is_text(field_of(schema, "type"), "string")) {
      return sequence({rule_of(function, schema), blank(), m_write(end)});
    }
    const Json* const values = field_of(schema, "enum");
    if (!values || !values->is_array()) return up_to(end, m_write);
    std::vector<Expr> choices;
    for (const Json& value : *values) {
      if (value.is_string()) choices.push_back(literal(value.get_ref<const std::string&>()));
    }
    return sequence({choice(std::move(choices)), blank(), m_write(end)});
  }

  Expr coder_call(const Json& function) {
    std::vector<Expr> parts = {literal("<function=" + name_of(function) + ">\n")};
    visit_parameters(function, [&](const std::string& key, const Json& schema, bool is_required) {
      const Expr one = sequence({literal("<parameter=" + key + ">\n"),
                                 raw_value(function, schema, "</parameter>"), literal("\n")});
      parts.push_back(is_required ? one : optional(one));
    });
    parts.push_back(literal("</function>"));
    return sequence(std::move(parts));
  }

  Expr glm_call(const Json& function) {
    std::vector<Expr> parts = {literal(name_of(function)), optional(literal("\n"))};
    visit_parameters(function, [&](const std::string& key, const Json& schema, bool is_required) {
      const Expr one =
          sequence({m_write("<arg_key>"), literal(key), m_write("</arg_key>"),
                    optional(literal("\n")), m_write("<arg_value>"),
                    raw_value(function, schema, "</arg_value>"), optional(literal("\n"))});
      parts.push_back(is_required ? one : optional(one));
    });
    return sequence(std::move(parts));
  }

  /// name(key=value, …)
  Expr lfm_call(const Json& function) {
    struct Parameter {
      Expr expression;
      bool is_required;
    };
    std::vector<Parameter> parameters;
    visit_parameters(function, [&](const std::string& key, const Json& schema, bool is_required) {
      parameters.push_back(
          {sequence({literal(key + "="), rule_of(function, schema)}), is_required});
    });
    // Rules from the last parameter to the first, after others and as the first that is given.
    Expr after = grammar::empty(), first = grammar::empty();
    for (auto at = parameters.rbegin(); at != parameters.rend(); ++at) {
      const Expr as_next = sequence({literal(", "), at->expression, after});
      const Expr as_first = sequence({at->expression, after});
      first =
          call(m_grammar.add("parameters", at->is_required ? as_first : choice({as_first, first})));
      after =
          call(m_grammar.add("parameters", at->is_required ? as_next : choice({as_next, after})));
    }
    return sequence({literal(name_of(function) + "("), first, literal(")")});
  }

  /// The arguments of a call: an object.
  Expr arguments(const Json& function) {
    const auto found = std::find_if(m_arguments.begin(), m_arguments.end(),
                                    [&](const auto& one) { return one.first == &function; });
    if (found != m_arguments.end()) return found->second;
    const Json* const parameters = field_of(function, "parameters");
    Json schema = parameters ? *parameters : Json{{"properties", Json::object()}};
    if (!parameters) schema["additionalProperties"] = false;
    schema["type"] = "object";
    m_arguments.emplace_back(&function, rule_of(function, schema));
    return m_arguments.back().second;
  }

  Expr rule_of(const Json& function, const Json& schema) {
    const Json* const strict = field_of(function, "strict");
    const bool is_strict = strict && *strict == true;
    const bool is_object = is_text(field_of(schema, "type"), "object");
    grammar::JsonSchemaOptions options;
    options.closed_objects = is_strict;
    if (!strict || is_strict) {
      Grammar extended = m_grammar;
      try {
        const grammar::RuleId rule = grammar::add_json_schema(extended, schema, options);
        m_grammar = std::move(extended);
        return call(rule);
      } catch (const Error& error) {
        if (is_strict) {
          throw BadRequest("tools", fmt::format("tool {}: {}", name_of(function), error.what()));
        }
      }
    }
    return call(is_object ? grammar::add_any_json_object(m_grammar, options)
                          : grammar::add_any_json(m_grammar, options));
  }

  const AnswerFormat& m_format;
  const MarkWriter& m_write;
  Grammar& m_grammar;
  std::vector<const Json*> m_functions;
  std::vector<std::pair<const Json*, Expr>> m_arguments;
};

}  // namespace

Expr blank() { return choice({grammar::empty(), literal(" "), literal("\n")}); }

Expr up_to(std::string_view mark, const MarkWriter& write) {
  const Expr written = write(mark);
  return written->kind == grammar::Expression::Kind::token ? sequence({any_text(), written})
                                                           : grammar::until(mark);
}

Expr text_without(std::string_view mark, const MarkWriter& write) {
  if (write(mark)->kind == grammar::Expression::Kind::token) return any_text();
  return grammar::difference(any_text(), sequence({any_text(), literal(mark), any_text()}));
}

Expr calls_expression(const AnswerFormat& format, const MarkWriter& write, Grammar& grammar) {
  return CallRules(format, write, grammar).calls();
}

Expr harmony_call(const AnswerFormat& format, const MarkWriter& write, Grammar& grammar) {
  return CallRules(format, write, grammar).harmony();
}

}  // namespace kvzap::server
