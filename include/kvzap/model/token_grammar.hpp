// Grammars of answers: which tokens may come next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvzap/core/types.hpp"

namespace kvzap {

namespace grammar {
struct Grammar;
}
class Tokenizer;

/// What answers may be, for one vocabulary. Matching works on bytes, so a token may end within a
/// character, a number or a key. It is exact: a token is allowed if, and only if, some text of the
/// grammar continues with its bytes. Objects are immutable; all const members may be called from
/// several threads at once.
class TokenGrammar {
 public:
  /// The tokens of a tokenizer, ordered by their bytes. Make it once for all grammars.
  class Vocabulary;
  /// An answer in progress.
  class State;

  /// Which keys the objects of a schema have.
  enum class ObjectKeys {
    open,   // as JSON Schema defines it: objects may have keys beside their properties
    closed  // objects without `additionalProperties` have none
  };

  /// Special tokens are no text. `size`: the number of the model's logits. `end_ids`: tokens that
  /// end answers, no text either.
  static std::shared_ptr<const Vocabulary> vocabulary_of(const Tokenizer& tokenizer,
                                                         std::int64_t size,
                                                         const std::vector<TokenId>& end_ids);

  // Each of these throws Error that names the part of the text it cannot use, if no text matches,
  // and if a grammar is too large.

  /// Answers are JSON documents that are valid under a JSON schema (draft 2020-12, and the forms of
  /// draft 7). Keys come in the schema's order. Keywords that restrict documents and are not
  /// supported are errors.
  static std::shared_ptr<const TokenGrammar> from_json_schema(
      std::shared_ptr<const Vocabulary> vocabulary, std::string_view schema,
      ObjectKeys keys = ObjectKeys::open);
  /// Answers are JSON objects.
  static std::shared_ptr<const TokenGrammar> any_json_object(
      std::shared_ptr<const Vocabulary> vocabulary);
  /// Answers match a grammar in llama.cpp's GBNF, from its rule `root`.
  static std::shared_ptr<const TokenGrammar> from_gbnf(std::shared_ptr<const Vocabulary> vocabulary,
                                                       std::string_view text);
  /// Answers match a regular expression (ECMA-262) as a whole.
  static std::shared_ptr<const TokenGrammar> from_regular_expression(
      std::shared_ptr<const Vocabulary> vocabulary, std::string_view pattern);
  /// Answers are one of the texts.
  static std::shared_ptr<const TokenGrammar> from_choices(
      std::shared_ptr<const Vocabulary> vocabulary, const std::vector<std::string>& texts);
  static std::shared_ptr<const TokenGrammar> from_rules(
      std::shared_ptr<const Vocabulary> vocabulary, const grammar::Grammar& grammar);

  ~TokenGrammar();

  /// Returns the bytes of memory that it takes now, about.
  std::size_t bytes() const;

 private:
  struct Data;
  explicit TokenGrammar(std::unique_ptr<const Data> data);
  std::unique_ptr<const Data> m_data;
};

/// An answer in progress. A copy continues on its own. Not for several threads at once.
class TokenGrammar::State {
 public:
  explicit State(std::shared_ptr<const TokenGrammar> grammar);
  State(const State& other);
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;
  ~State();

  /// Returns a bit for each token of the vocabulary, bit i % 64 of word i / 64: whether it may come
  /// next. Throws Error if the grammar is so ambiguous that this takes too long.
  const std::vector<std::uint64_t>& allowed() const;
  /// Appends a token. Throws Error and changes nothing if it is not allowed.
  void append(TokenId token);
  /// Whether the answer may end here.
  bool may_end() const;
  /// Whether no token may follow.
  bool must_end() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> m_impl;
};

}  // namespace kvzap
