// The decoders of tokenizer.json: they turn tokens into text, token by token.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::text {

/// A token, or the next part of one. Decoders that join tokens pass parts on before they know the
/// whole, so that text appears as early as possible.
struct TokenPart {
  std::string text;
  bool ends_token;
};

/// One decoder. It is shared between threads; a State holds the progress of one decoding.
class DecodingStep {
 public:
  struct State {
    std::string token;      // the parts of a token that waits for its end
    std::string held;       // text or bytes that later tokens decide about
    std::size_t count = 0;  // of tokens, or of characters of one
    bool in_token = false;
  };

  virtual ~DecodingStep() = default;

  /// Appends the parts that this part (valid UTF-8) completes.
  virtual void append(TokenPart&& part, State& state, std::vector<TokenPart>& result) const = 0;

  /// Appends the parts that waited for further tokens.
  virtual void finish(State& /*state*/, std::vector<TokenPart>& /*result*/) const {}
};

/// The decoders of a file, in the order of their application.
class Decoder {
 public:
  /// The progress of one decoding.
  struct States {
    std::vector<DecodingStep::State> steps;
    std::vector<TokenPart> parts, result;  // memory for append
  };

  /// Reads the field decoder. Without a decoder, spaces join the tokens.
  void read(const files::JsonField& field);

  /// Returns whether the text is that of the bytes of all tokens, without further steps.
  bool joins_bytes() const { return m_joins_bytes; }

  /// Returns the states before the first token.
  States start() const { return {std::vector<DecodingStep::State>(m_steps.size()), {}, {}}; }

  /// Appends the text that a token completes.
  void append(std::string_view token, States& states, std::string& text) const;

  /// Appends the rest of the text after the last token.
  void finish(States& states, std::string& text) const;

  /// Returns the bytes that a token adds to a text between other tokens: a byte token's byte, and
  /// spaces that a decoder removes at the ends of a text.
  std::string bytes_between(std::string_view token) const;

 private:
  void read_steps(const files::JsonField& field);
  std::string text_of(std::initializer_list<std::string_view> tokens) const;

  std::vector<std::unique_ptr<const DecodingStep>> m_steps;
  bool m_joins_bytes = false;
  bool m_has_byte_tokens = false;
  std::size_t m_letter = 1, m_letters = 2;  // bytes of "x", and of "x" after "x"
};

}  // namespace kvzap::text
