// What answers may be, and where they end: --json-schema, --grammar and --stop.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/model/token_grammar.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap::driver {

struct AnswerForm {
  std::string json_schema, grammar;  // files, or what they would hold; empty: none
  std::vector<std::string> stops;

  bool has_grammar() const { return !json_schema.empty() || !grammar.empty(); }
};

void declare_answer_form(CLI::App& app, AnswerForm& form, const std::string& group);

/// Throws UsageError for an empty stop text.
void check_answer_form(const AnswerForm& form);

/// Returns the grammar, or null without one. `tokenizer`: null if the model has none;
/// `vocabulary`: the number of the model's logits; `end_ids`: tokens that end answers. Throws Error
/// that names the flag, the file and what is wrong in it.
std::shared_ptr<const TokenGrammar> grammar_of(const AnswerForm& form, const Tokenizer* tokenizer,
                                               std::int64_t vocabulary,
                                               const std::vector<TokenId>& end_ids);

}  // namespace kvzap::driver
