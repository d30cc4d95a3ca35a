#include "server/answer_grammar.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "files/json_file.hpp"
#include "files/parsed_json.hpp"
#include "grammar/gbnf.hpp"
#include "grammar/json_schema.hpp"
#include "grammar/regular_expression.hpp"
#include "server/tool_bodies.hpp"
#include "server/tool_rules.hpp"

namespace kvzap::server {
namespace {

using grammar::call;
using grammar::choice;
using grammar::Expr;
using grammar::Grammar;
using grammar::literal;
using grammar::optional;
using grammar::repeat;
using grammar::sequence;

// Memory of the grammars that are kept, and of these and those of requests in progress.
constexpr std::size_t most_kept = std::size_t{1} << 30;
constexpr std::size_t most_alive = 3 * most_kept;
constexpr std::size_t most_entries = 256;
// A grammar of a longer text is made at once, so that requests that wait for theirs are small.
constexpr std::size_t most_waiting = std::size_t{64} << 10;

/// A field that says what the text of answers is.
struct Wish {
  enum class Kind { json_object, json_schema, regular_expression, choice, grammar };
  Kind kind;
  std::string field;
  Json value;
  bool is_strict = false;
};

/// A schema may be written as a string.
Json schema_in(const Json& value, const std::string& field) {
  if (!value.is_string()) return value;
  try {
    return files::parse_ordered_json(value.get_ref<const std::string&>(), field);
  } catch (const Error& error) {
    throw BadRequest(field, error.what());
  }
}

std::optional<Wish> response_format_wish(const Json& body) {
  const Json* const format = field_of(body, "response_format");
  if (!format) return {};
  const Json* const type = field_of(*format, "type");
  if (is_text(type, "text")) return {};
  if (is_text(type, "json_object")) {
    const Json* const schema = field_of(*format, "schema");  // llama-server's
    if (!schema) return Wish{Wish::Kind::json_object, "response_format", {}};
    return Wish{Wish::Kind::json_schema, "response_format.schema", *schema};
  }
  if (!is_text(type, "json_schema")) {
    refuse("response_format.type", R"("text", "json_object" or "json_schema")", type);
  }
  const std::string where = "response_format.json_schema";
  const Json* const object = field_of(*format, "json_schema");
  const Json* const schema = object ? field_of(*object, "schema") : nullptr;
  if (!schema) refuse(where, R"({"name": …, "schema": {…}})", object);
  return Wish{Wish::Kind::json_schema, where + ".schema", schema_in(*schema, where + ".schema"),
              bool_of(*object, "strict", false)};
}

/// Members of vLLM's structured_outputs, its older fields, and llama-server's.
constexpr std::pair<const char*, Wish::Kind> kinds_of_fields[] = {
    {"json", Wish::Kind::json_schema},        {"regex", Wish::Kind::regular_expression},
    {"choice", Wish::Kind::choice},           {"json_object", Wish::Kind::json_object},
    {"guided_json", Wish::Kind::json_schema}, {"guided_regex", Wish::Kind::regular_expression},
    {"guided_choice", Wish::Kind::choice},    {"guided_grammar", Wish::Kind::grammar},
    {"json_schema", Wish::Kind::json_schema}, {"grammar", Wish::Kind::grammar}};

std::optional<Wish> wish_of(Wish::Kind kind, const Json& value, const std::string& field) {
  switch (kind) {
    case Wish::Kind::json_object:
      if (!value.is_boolean()) refuse(field, "true or false", value);
      return value.get<bool>() ? std::optional(Wish{kind, field, {}}) : std::nullopt;
    case Wish::Kind::json_schema:
      return Wish{kind, field, schema_in(value, field)};
    case Wish::Kind::choice:
      if (!value.is_array() || value.empty() || value.size() > limits::choices) {
        refuse(field, fmt::format("an array of 1 to {} strings", limits::choices), value);
      }
      for (const Json& one : value) text_of(one, field);
      return Wish{kind, field, value};
    case Wish::Kind::regular_expression:
    case Wish::Kind::grammar:
      break;
  }
  if (text_of(value, field).empty()) return {};
  return Wish{kind, field, value};
}

std::optional<Wish> form_wish(const Json& body) {
  std::vector<Wish> wishes;
  const auto add = [&](std::optional<Wish> wish) {
    if (wish) wishes.push_back(std::move(*wish));
  };
  add(response_format_wish(body));
  constexpr std::size_t members = 4;  // of structured_outputs alone
  for (const auto* at = std::begin(kinds_of_fields) + members; at != std::end(kinds_of_fields);
       ++at) {
    if (const Json* const value = field_of(body, at->first))
      add(wish_of(at->second, *value, at->first));
  }
  if (const Json* const object = field_of(body, "structured_outputs")) {
    if (!object->is_object()) refuse("structured_outputs", "an object", *object);
    for (const auto& [key, value] : object->items()) {
      AskedFields::note(key.c_str());
      const std::string field = "structured_outputs." + key;
      if (value.is_null() || value == false) continue;
      const auto* const known =
          std::find_if(std::begin(kinds_of_fields), std::end(kinds_of_fields),
                       [&key = key](const auto& one) { return key == one.first; });
      const bool is_member = known < std::begin(kinds_of_fields) + members || key == "grammar";
      if (known == std::end(kinds_of_fields) || !is_member) refuse_as_unsupported(field);
      add(wish_of(known->second, value, field));
    }
  }
  if (wishes.size() > 1) {
    throw BadRequest(wishes[1].field,
                     fmt::format("{} and {} exclude each other", wishes[0].field, wishes[1].field));
  }
  return wishes.empty() ? std::nullopt : std::optional(std::move(wishes.front()));
}

/// The text that a request wishes. `grammar` has no rules before.
Expr expression_of(const Wish& wish, Grammar& grammar) {
  grammar::JsonSchemaOptions options;
  options.closed_objects = wish.is_strict;
  switch (wish.kind) {
    case Wish::Kind::json_object:
      return call(grammar::add_any_json_object(grammar, options));
    case Wish::Kind::json_schema:
      return call(grammar::add_json_schema(grammar, wish.value, options));
    case Wish::Kind::regular_expression:
      return grammar::read_regular_expression(wish.value.get_ref<const std::string&>(),
                                              grammar::code_point);
    case Wish::Kind::choice: {
      std::vector<Expr> choices;
      for (const Json& one : wish.value) {
        choices.push_back(literal(one.get_ref<const std::string&>()));
      }
      return choice(std::move(choices));
    }
    case Wish::Kind::grammar:
      grammar = grammar::read_gbnf(wish.value.get_ref<const std::string&>());
      return call(grammar.root);
  }
  return grammar::nothing();
}

/// Whether answers must call tools. `format`: its tools become the one that tool_choice names.
bool requires_calls(const Json& body, AnswerFormat& format) {
  const Json* const wanted = field_of(body, "tool_choice");
  if (!wanted || *wanted == "auto" || *wanted == "none") return false;
  if (*wanted != "required") {
    const Json* const function = field_of(*wanted, "function");
    const Json* const name = function ? field_of(*function, "name") : nullptr;
    if (!name || !name->is_string()) {
      refuse("tool_choice",
             R"("none", "auto", "required" or {"type": "function", "function": {"name": …}})",
             *wanted);
    }
    Json tools = Json::array();
    for (const Json& tool : format.tools) {
      if (tool.at("function").at("name") == *name) tools.push_back(tool);
    }
    if (tools.empty()) refuse("tool_choice.function.name", "the name of one of the tools", *name);
    format.tools = std::move(tools);
    format.calls_once = true;
  }
  if (format.tools.empty()) throw BadRequest("tool_choice", "tool_choice needs tools");
  return true;
}

/// The parts of answers: thoughts, text, and calls.
class AnswerRules {
 public:
  AnswerRules(const AnswerFormat& format, MarkWriter write, Grammar& grammar)
      : m_format(format), m_write(std::move(write)), m_grammar(grammar) {}

  /// `text`: null for any text; `must_call`: there is no text.
  Expr answer(const Expr& text, bool must_call) {
    if (m_format.style == ToolStyle::harmony) return harmony_answer(text, must_call);
    return sequence({thoughts(), text_and_calls(text, must_call)});
  }

 private:
  Expr thoughts() {
    if (!m_format.has_thoughts) return grammar::empty();
    const Expr rest = up_to("</think>", m_write);
    const Expr blanks = repeat(literal("\n"), 0, 2);
    if (m_format.begins_in_thoughts) return sequence({rest, blanks});
    return optional(sequence({m_write("<think>"), rest, blanks}));
  }

  Expr text_and_calls(const Expr& text, bool must_call) {
    if (m_format.tools.empty()) return text;
    const Expr calls = calls_expression(m_format, m_write, m_grammar);
    if (must_call) return calls;
    if (text) return choice({text, calls});
    if (m_format.style != ToolStyle::json) {
      return sequence({text_without(marks_of(m_format.style).begin, m_write), optional(calls)});
    }
    // A text that begins as a call does is one.
    const Expr any = grammar::any_text();
    const Expr begins = sequence({blank(), literal("{"), blank(), literal("\"name\""), any});
    return choice({grammar::difference(any, begins), calls});
  }

  /// Messages of thoughts, and one of text or a call. The prompt has begun the first.
  Expr harmony_answer(const Expr& text, bool must_call) {
    const Expr channel = m_write("<|channel|>"), message = m_write("<|message|>");
    const Expr next = sequence({m_write("<|start|>"), literal("assistant")});
    const Expr thoughts = sequence({channel, choice({literal("analysis"), literal("commentary")}),
                                    message, up_to("<|end|>", m_write), next});
    std::vector<Expr> ends;
    if (!must_call) {
      ends.push_back(sequence(
          {channel, literal("final"), message, text ? text : text_without("<|end|>", m_write)}));
    }
    if (!m_format.tools.empty()) ends.push_back(harmony_call(m_format, m_write, m_grammar));
    return sequence({repeat(thoughts, 0), choice(std::move(ends))});
  }

  const AnswerFormat& m_format;
  MarkWriter m_write;
  Grammar& m_grammar;
};

std::shared_ptr<const TokenGrammar> compiled(const AnswerFormat& format,
                                             const std::optional<Wish>& wish, bool must_call,
                                             const Tokenizer& tokenizer,
                                             const AnswerGrammars::Vocabulary& vocabulary) {
  Grammar grammar;
  const MarkWriter write = [&](std::string_view mark) {
    const auto id = tokenizer.token_id(mark);
    return id && tokenizer.is_special(*id) ? grammar::special_token(*id) : literal(mark);
  };
  const Expr text = wish ? expression_of(*wish, grammar) : nullptr;
  const Expr answer = AnswerRules(format, write, grammar).answer(text, must_call);
  grammar.root = grammar.add("answer", answer);
  return TokenGrammar::from_rules(vocabulary, grammar);
}

}  // namespace

std::shared_ptr<const TokenGrammar> AnswerGrammars::find(const std::string& key) {
  const std::lock_guard<std::mutex> lock(m_mutex);
  return find_locked(key);
}

std::shared_ptr<const TokenGrammar> AnswerGrammars::find_locked(const std::string& key) {
  const auto found = std::find_if(m_entries.begin(), m_entries.end(),
                                  [&](const Entry& entry) { return entry.key == key; });
  if (found == m_entries.end()) return nullptr;
  m_entries.splice(m_entries.begin(), m_entries, found);
  if (!found->grammar) throw Error(found->failure);
  return found->grammar;
}

/// Keeps what was made last, and as much of the rest as may be.
void AnswerGrammars::keep(Entry entry) {
  m_entries.push_front(std::move(entry));
  std::size_t bytes = 0, count = 0;
  auto kept = m_entries.begin();
  for (; kept != m_entries.end() && count < most_entries; ++kept, ++count) {
    bytes += kept->key.size() + (kept->grammar ? kept->grammar->bytes() : 0);
    if (bytes > most_kept) break;
  }
  m_entries.erase(kept, m_entries.end());
}

std::shared_ptr<const TokenGrammar> AnswerGrammars::get(
    const std::string& key,
    const std::function<std::shared_ptr<const TokenGrammar>(const Vocabulary&)>& make) {
  Vocabulary vocabulary;
  {
    const std::lock_guard<std::mutex> lock(m_mutex);
    if (auto found = find_locked(key)) return found;
    if (!m_vocabulary) m_vocabulary = m_make_vocabulary();
    vocabulary = m_vocabulary;
  }
  std::shared_ptr<const TokenGrammar> made;
  try {
    made = make(vocabulary);
  } catch (const BadRequest&) {
    throw;
  } catch (const Error& error) {
    const std::lock_guard<std::mutex> lock(m_mutex);
    keep({key, nullptr, error.what()});
    throw;
  }
  const std::lock_guard<std::mutex> lock(m_mutex);
  m_alive.erase(std::remove_if(m_alive.begin(), m_alive.end(),
                               [](const auto& grammar) { return grammar.expired(); }),
                m_alive.end());
  m_alive.push_back(made);
  std::size_t bytes = 0;
  for (const auto& one : m_alive) {
    if (const auto alive = one.lock()) bytes += alive->bytes();
  }
  if (bytes > most_alive) {
    throw Error("the grammars of requests in progress take too much memory; try again later");
  }
  keep({key, made, {}});
  return made;
}

AnswerGrammar answer_grammar(const Json& body, const AnswerFormat& format,
                             const ServedModel& model) {
  AnswerFormat held = format;
  const bool must_call = requires_calls(body, held);
  std::optional<Wish> wish = form_wish(body);
  if (!wish && held.tools.empty()) return {};
  if (must_call && wish) {
    throw BadRequest(wish->field, wish->field + " and a required call exclude each other");
  }
  const std::string field = wish ? wish->field : "tools";
  if (!model.grammars || !model.tokenizer) throw BadRequest(field, "the model has no tokenizer");
  Json key = {
      static_cast<int>(held.style), held.tools, must_call, held.calls_once, held.has_thoughts,
      held.begins_in_thoughts};
  if (wish) {
    key.push_back({static_cast<int>(wish->kind), wish->value, wish->is_strict});
  }
  const auto refusing = [field](const auto& get) {
    try {
      return get();
    } catch (const BadRequest&) {
      throw;
    } catch (const Error& error) {
      throw BadRequest(field, fmt::format("{}: {}", field, error.what()));
    }
  };
  std::string name = files::json_text(key);
  if (auto kept = refusing([&] { return model.grammars->find(name); })) return {kept, {}};
  const auto compile = [held = std::move(held), wish = std::move(wish), must_call,
                        &model](const AnswerGrammars::Vocabulary& vocabulary) {
    return compiled(held, wish, must_call, *model.tokenizer, vocabulary);
  };
  const bool may_wait = name.size() <= most_waiting;
  AnswerGrammar answers;
  answers.make = [refusing, compile, name = std::move(name), &grammars = *model.grammars] {
    return refusing([&] { return grammars.get(name, compile); });
  };
  return may_wait ? answers : AnswerGrammar{answers.make(), {}};
}

}  // namespace kvzap::server
