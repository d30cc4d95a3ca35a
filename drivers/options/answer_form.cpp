#include "options/answer_form.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "files/text_file.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

// A schema of this size has hundreds of thousands of values.
constexpr std::size_t most_bytes = std::size_t{8} << 20;

/// llama.cpp's --json-schema and --grammar take the text itself.
bool is_schema(const std::string& given) { return given.front() == '{'; }
bool is_grammar(const std::string& given) { return given.find("::=") != std::string::npos; }

std::string text_of(const std::string& given, bool is_text) {
  return is_text ? given : files::read_text(given, most_bytes);
}

}  // namespace

void declare_answer_form(CLI::App& app, AnswerForm& form, const std::string& group) {
  CLI::Option* const schema =
      app.add_option("--json-schema", form.json_schema,
                     "answer with JSON that is valid under the JSON schema in this file; a value "
                     "that begins with { is the schema itself")
          ->type_name("FILE")
          ->group(group);
  app.add_option("--grammar", form.grammar,
                 "answer with a text of the grammar in this file (llama.cpp's GBNF); a value with "
                 "::= is the grammar itself")
      ->type_name("FILE")
      ->excludes(schema)
      ->group(group);
  app.add_option("--stop", form.stops, "end answers before this text; may be repeated")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->group(group);
}

void check_answer_form(const AnswerForm& form) {
  for (const std::string& stop : form.stops) {
    require(!stop.empty(), "--stop is an empty text; expected at least one character");
  }
}

std::shared_ptr<const TokenGrammar> grammar_of(const AnswerForm& form, const Tokenizer* tokenizer,
                                               std::int64_t vocabulary,
                                               const std::vector<TokenId>& end_ids) {
  if (!form.has_grammar()) return nullptr;
  const bool has_schema = !form.json_schema.empty();
  const std::string& given = has_schema ? form.json_schema : form.grammar;
  const bool is_text = has_schema ? is_schema(given) : is_grammar(given);
  const std::string flag = has_schema ? "--json-schema" : "--grammar";
  if (!tokenizer) throw Error(fmt::format("{} needs a model with a tokenizer, and text", flag));
  const auto named = [&](const auto& make, const std::string& name) {
    try {
      return make();
    } catch (const Error& error) {
      throw Error(fmt::format("{}: {}", name, error.what()));
    }
  };
  const std::string text = named([&] { return text_of(given, is_text); }, flag);
  const auto words = TokenGrammar::vocabulary_of(*tokenizer, vocabulary, end_ids);
  return named(
      [&] {
        return has_schema ? TokenGrammar::from_json_schema(words, text)
                          : TokenGrammar::from_gbnf(words, text);
      },
      is_text ? flag : flag + ": " + given);
}

}  // namespace kvzap::driver
