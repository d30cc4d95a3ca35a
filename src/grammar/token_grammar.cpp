#include <fmt/format.h>

#include <algorithm>
#include <kvzap/model/token_grammar.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/parsed_json.hpp"
#include "grammar/automaton.hpp"
#include "grammar/expression.hpp"
#include "grammar/gbnf.hpp"
#include "grammar/json_schema.hpp"
#include "grammar/recogniser.hpp"
#include "grammar/regular_expression.hpp"
#include "grammar/token_masks.hpp"
#include "grammar/token_trie.hpp"

namespace kvzap {

class TokenGrammar::Vocabulary {
 public:
  explicit Vocabulary(std::vector<std::string> bytes) : texts(std::move(bytes)), trie(texts) {}

  std::vector<std::string> texts;  // empty for tokens that are no text
  grammar::TokenTrie trie;
};

struct TokenGrammar::Data {
  Data(std::shared_ptr<const Vocabulary> shared, const grammar::Grammar& grammar)
      : vocabulary(std::move(shared)),
        automaton(grammar::compile(grammar)),
        masks(automaton, vocabulary->trie) {
    // What is too ambiguous to begin with is refused here, not where an answer begins.
    [[maybe_unused]] const grammar::Recogniser beginning(automaton);
  }

  std::shared_ptr<const Vocabulary> vocabulary;
  grammar::Automaton automaton;
  grammar::TokenMasks masks;
};

std::shared_ptr<const TokenGrammar::Vocabulary> TokenGrammar::vocabulary_of(
    const Tokenizer& tokenizer, std::int64_t size, const std::vector<TokenId>& end_ids) {
  std::vector<std::string> texts(static_cast<std::size_t>(std::max<std::int64_t>(0, size)));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    if (tokenizer.is_special(id)) continue;
    if (std::find(end_ids.begin(), end_ids.end(), id) != end_ids.end()) continue;
    texts[i] = tokenizer.token_bytes(id);
  }
  return std::make_shared<const Vocabulary>(std::move(texts));
}

TokenGrammar::TokenGrammar(std::unique_ptr<const Data> data) : m_data(std::move(data)) {}
TokenGrammar::~TokenGrammar() = default;

std::size_t TokenGrammar::bytes() const {
  std::size_t bytes = sizeof(Data) + m_data->masks.bytes();
  for (const grammar::Node& node : m_data->automaton.nodes) {
    bytes += sizeof(node) + node.bytes.size() * sizeof(node.bytes[0]) +
             node.calls.size() * sizeof(node.calls[0]);
  }
  return bytes;
}

std::shared_ptr<const TokenGrammar> TokenGrammar::from_rules(
    std::shared_ptr<const Vocabulary> vocabulary, const grammar::Grammar& grammar) {
  return std::shared_ptr<const TokenGrammar>(
      new TokenGrammar(std::make_unique<const Data>(std::move(vocabulary), grammar)));
}

std::shared_ptr<const TokenGrammar> TokenGrammar::from_json_schema(
    std::shared_ptr<const Vocabulary> vocabulary, std::string_view schema, ObjectKeys keys) {
  const files::ParsedJson json(files::parse_ordered_json(schema, "the JSON schema"));
  grammar::JsonSchemaOptions options;
  options.closed_objects = keys == ObjectKeys::closed;
  return from_rules(std::move(vocabulary), grammar::read_json_schema(json.value(), options));
}

std::shared_ptr<const TokenGrammar> TokenGrammar::any_json_object(
    std::shared_ptr<const Vocabulary> vocabulary) {
  grammar::Grammar grammar;
  grammar.root = grammar::add_any_json_object(grammar);
  return from_rules(std::move(vocabulary), grammar);
}

std::shared_ptr<const TokenGrammar> TokenGrammar::from_gbnf(
    std::shared_ptr<const Vocabulary> vocabulary, std::string_view text) {
  return from_rules(std::move(vocabulary), grammar::read_gbnf(text));
}

std::shared_ptr<const TokenGrammar> TokenGrammar::from_regular_expression(
    std::shared_ptr<const Vocabulary> vocabulary, std::string_view pattern) {
  grammar::Grammar grammar;
  grammar.add("root", grammar::read_regular_expression(pattern, grammar::code_point));
  return from_rules(std::move(vocabulary), grammar);
}

std::shared_ptr<const TokenGrammar> TokenGrammar::from_choices(
    std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::string>& texts) {
  std::vector<grammar::Expr> choices;
  choices.reserve(texts.size());
  for (const std::string& text : texts) choices.push_back(grammar::literal(text));
  grammar::Grammar grammar;
  grammar.add("root", grammar::choice(std::move(choices)));
  return from_rules(std::move(vocabulary), grammar);
}

struct TokenGrammar::State::Impl {
  explicit Impl(std::shared_ptr<const TokenGrammar> shared)
      : grammar(std::move(shared)), recogniser(grammar->m_data->automaton) {}

  std::shared_ptr<const TokenGrammar> grammar;
  grammar::Recogniser recogniser;
  std::vector<std::uint64_t> bits;
  bool has_bits = false;  // of the current state
};

TokenGrammar::State::State(std::shared_ptr<const TokenGrammar> grammar)
    : m_impl(std::make_unique<Impl>(std::move(grammar))) {}
TokenGrammar::State::State(const State& other) : m_impl(std::make_unique<Impl>(*other.m_impl)) {}
TokenGrammar::State::State(State&&) noexcept = default;
TokenGrammar::State& TokenGrammar::State::operator=(State&&) noexcept = default;
TokenGrammar::State::~State() = default;

const std::vector<std::uint64_t>& TokenGrammar::State::allowed() const {
  Impl& impl = *m_impl;
  if (impl.has_bits) return impl.bits;
  const Data& data = *impl.grammar->m_data;
  constexpr std::size_t word_bits = 64;
  impl.bits.assign((data.vocabulary->texts.size() + word_bits - 1) / word_bits, 0);
  data.masks.allow(impl.recogniser, impl.bits);
  impl.has_bits = true;
  return impl.bits;
}

void TokenGrammar::State::append(TokenId token) {
  Impl& impl = *m_impl;
  const std::vector<std::string>& texts = impl.grammar->m_data->vocabulary->texts;
  const auto index = static_cast<std::size_t>(token);
  const std::string& text = token >= 0 && index < texts.size() ? texts[index] : std::string();
  std::size_t read = 0;
  bool is_allowed = true;
  if (text.empty()) {
    is_allowed = impl.recogniser.read_token(token);
  } else {
    while (read < text.size() &&
           impl.recogniser.read_byte(static_cast<unsigned char>(text[read]))) {
      ++read;
    }
    is_allowed = read == text.size();
    if (!is_allowed) impl.recogniser.go_back(read);
  }
  if (!is_allowed) {
    throw Error(fmt::format("token {} cannot follow in an answer of this grammar", token));
  }
  impl.has_bits = false;
}

bool TokenGrammar::State::may_end() const { return m_impl->recogniser.is_match(); }

bool TokenGrammar::State::must_end() const {
  if (!may_end()) return false;
  const std::vector<std::uint64_t>& bits = allowed();
  return std::all_of(bits.begin(), bits.end(), [](std::uint64_t word) { return word == 0; });
}

}  // namespace kvzap
