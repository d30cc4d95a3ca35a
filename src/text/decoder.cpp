#include "text/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "files/byte_alphabet.hpp"
#include "text/json_parts.hpp"
#include "text/pattern.hpp"
#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

using files::JsonField;

// Decoders that can make a text longer may do so by this factor together.
constexpr std::size_t max_growth = 64;

/// A decoder that needs whole tokens.
class WholeTokenStep : public DecodingStep {
 public:
  void append(TokenPart&& part, State& state, std::vector<TokenPart>& result) const final {
    if (part.ends_token && state.token.empty()) return append_token(part.text, state, result);
    state.token += part.text;
    if (!part.ends_token) return;
    const std::string token = std::exchange(state.token, {});
    append_token(token, state, result);
  }

 private:
  virtual void append_token(const std::string& token, State& state,
                            std::vector<TokenPart>& result) const = 0;
};

/// Joins the bytes of all tokens; ill-formed UTF-8 becomes U+FFFD.
class ByteLevelStep : public WholeTokenStep {
 public:
  void finish(State& state, std::vector<TokenPart>& result) const override {
    TokenPart part{{}, true};
    append_lossy(part.text, state.held, true);
    state.held.clear();
    result.push_back(std::move(part));
  }

 private:
  void append_token(const std::string& token, State& state,
                    std::vector<TokenPart>& result) const override {
    files::byte_alphabet().decode(token, state.held);
    result.push_back({{}, false});
    state.held.erase(0, append_lossy(result.back().text, state.held, false));
  }
};

/// The byte of a token such as "<0xE2>"; nothing for another token.
std::optional<char> byte_of_token(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token.back() != '>') {
    return std::nullopt;
  }
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const std::size_t digit = std::string_view("0123456789abcdefABCDEF").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    value = value * 16 + static_cast<int>(digit < 16 ? digit : digit - 6);
  }
  return static_cast<char>(value);
}

/// Turns a run of byte tokens into one token, or into U+FFFD for each if it is no UTF-8.
class ByteFallbackStep : public WholeTokenStep {
 public:
  void finish(State& state, std::vector<TokenPart>& result) const override {
    if (state.held.empty()) return;
    if (is_valid_utf8(state.held)) {
      result.push_back({state.held, true});
    } else {
      result.insert(result.end(), state.held.size(), TokenPart{"\uFFFD", true});
    }
    state.held.clear();
  }

 private:
  void append_token(const std::string& token, State& state,
                    std::vector<TokenPart>& result) const override {
    if (const auto byte = byte_of_token(token)) {
      state.held.push_back(*byte);
      return;
    }
    finish(state, result);
    result.push_back({token, true});
  }
};

/// Joins all tokens.
class FuseStep : public DecodingStep {
 public:
  void append(TokenPart&& part, State& /*state*/, std::vector<TokenPart>& result) const override {
    result.push_back({std::move(part.text), false});
  }
  void finish(State& /*state*/, std::vector<TokenPart>& result) const override {
    result.push_back({{}, true});
  }
};

/// Removes up to a number of equal characters at the beginning and at the end of each token.
class StripStep : public DecodingStep {
 public:
  explicit StripStep(const JsonField& field)
      : m_content(one_character(field.member("content"))),
        m_start(count_of(field.member("start"))),
        m_stop(count_of(field.member("stop"))) {}

  // state.in_token: a character was kept. state.count: characters removed at the beginning.
  // state.held: characters that are removed if the token ends now.
  void append(TokenPart&& part, State& state, std::vector<TokenPart>& result) const override {
    TokenPart kept{{}, part.ends_token};
    const std::string_view text = part.text;
    for (std::size_t position = 0; position < text.size();) {
      const std::size_t length = first_character(text.substr(position)).second;
      const std::string_view c = text.substr(position, length);
      position += length;
      if (c == m_content && !state.in_token && state.count < m_start) {
        ++state.count;
        continue;
      }
      state.in_token = true;
      if (c == m_content && state.held.size() < m_stop * length) {
        state.held += c;
      } else if (c == m_content) {
        kept.text += c;  // one of a run that is longer than m_stop
      } else {
        kept.text += state.held;
        kept.text += c;
        state.held.clear();
      }
    }
    if (part.ends_token) state = {};
    result.push_back(std::move(kept));
  }

 private:
  // More than any text has, but small enough to multiply.
  static std::size_t count_of(const JsonField& field) {
    return static_cast<std::size_t>(field.integer(0, 1 << 30));
  }

  std::string m_content;
  std::size_t m_start, m_stop;
};

/// Replaces matches in each token.
class ReplaceStep : public WholeTokenStep {
 public:
  explicit ReplaceStep(const JsonField& field)
      : m_pattern(regex_or_string(field.member("pattern"))),
        m_content(field.member("content").string()) {}

  /// Returns by how much it can make a text longer.
  static std::size_t growth(const JsonField& field) {
    const JsonField text = field.member("pattern").member("String");
    const std::size_t content = field.member("content").string().size();
    if (text.is_null() || text.string().empty()) return 1 + content;  // the match may be empty
    return std::max<std::size_t>(1, (content + text.string().size() - 1) / text.string().size());
  }

 private:
  void append_token(const std::string& token, State& /*state*/,
                    std::vector<TokenPart>& result) const override {
    TokenPart replaced{{}, true};
    std::vector<Match> pieces;
    m_pattern.find(token, pieces);
    for (const Match& piece : pieces) {
      if (piece.is_match) {
        replaced.text += m_content;
      } else {
        replaced.text.append(token, piece.begin, piece.end - piece.begin);
      }
    }
    result.push_back(std::move(replaced));
  }

  Pattern m_pattern;
  std::string m_content;
};

/// Turns each replacement character into a space; those of the first token stand for none.
class MetaspaceStep : public DecodingStep {
 public:
  explicit MetaspaceStep(const JsonField& field)
      : m_replacement(one_character(field.member("replacement"))),
        m_prepends(prepend_scheme(field) != PrependScheme::never) {}

  // state.count: 0 in the first token.
  void append(TokenPart&& part, State& state, std::vector<TokenPart>& result) const override {
    TokenPart replaced{{}, part.ends_token};
    const std::string_view text = part.text;
    std::size_t position = 0;
    for (std::size_t found; (found = text.find(m_replacement, position)) != text.npos;
         position = found + m_replacement.size()) {
      replaced.text.append(text.substr(position, found - position));
      if (state.count > 0 || !m_prepends) replaced.text += ' ';
    }
    replaced.text.append(text.substr(position));
    if (part.ends_token) state.count = 1;
    result.push_back(std::move(replaced));
  }

 private:
  std::string m_replacement;
  bool m_prepends;
};

/// Joins the parts of words of WordPiece, and removes spaces before punctuation.
class WordPieceStep : public WholeTokenStep {
 public:
  explicit WordPieceStep(const JsonField& field)
      : m_prefix(field.member("prefix").string()),
        m_cleans(field.member("cleanup").boolean(true)) {}

 private:
  // state.count: 0 in the first token.
  void append_token(const std::string& token, State& state,
                    std::vector<TokenPart>& result) const override {
    std::string text = token;
    if (state.count > 0 && token.compare(0, m_prefix.size(), m_prefix) == 0) {
      text.erase(0, m_prefix.size());
    } else if (state.count > 0) {
      text.insert(0, " ");
    }
    state.count = 1;
    result.push_back({m_cleans ? cleaned(std::move(text)) : std::move(text), true});
  }

  static std::string cleaned(std::string text) {
    static constexpr std::pair<std::string_view, std::string_view> replaced[] = {
        {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
        {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
        {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
    for (const auto& [from, to] : replaced) {
      for (std::size_t found = 0; (found = text.find(from, found)) != text.npos;
           found += to.size()) {
        text.replace(found, from.size(), to);
      }
    }
    return text;
  }

  std::string m_prefix;
  bool m_cleans;
};

/// Turns each mark of a word's end into a space, but not that of the last token.
class WordEndStep : public WholeTokenStep {
 public:
  explicit WordEndStep(const JsonField& field) : m_suffix(field.member("suffix").string()) {
    if (m_suffix.empty()) field.member("suffix").fail("a text that is not empty");
  }

  // state.held: the last token. state.count: 0 before the first.
  void finish(State& state, std::vector<TokenPart>& result) const override {
    if (state.count > 0) result.push_back({replaced(state.held, ""), true});
    state.held.clear();
    state.count = 0;
  }

 private:
  void append_token(const std::string& token, State& state,
                    std::vector<TokenPart>& result) const override {
    if (state.count > 0) result.push_back({replaced(state.held, " "), true});
    state.held = token;
    state.count = 1;
  }

  std::string replaced(const std::string& token, std::string_view content) const {
    std::string text;
    std::size_t begin = 0;
    for (std::size_t found; (found = token.find(m_suffix, begin)) != token.npos;
         begin = found + m_suffix.size()) {
      text.append(token, begin, found - begin).append(content);
    }
    return text.append(token, begin);
  }

  std::string m_suffix;
};

/// Inserts a space between tokens, in files without a decoder.
class SpaceStep : public DecodingStep {
 public:
  void append(TokenPart&& part, State& state, std::vector<TokenPart>& result) const override {
    if (state.count > 0) part.text.insert(0, " ");
    state.count = 1;
    result.push_back(std::move(part));
  }
};

using DecoderReader = std::unique_ptr<DecodingStep> (*)(const JsonField& field);

template <class Step>
std::unique_ptr<DecodingStep> read_step(const JsonField& field) {
  return std::make_unique<Step>(field);
}

template <class Step>
std::unique_ptr<DecodingStep> make_step(const JsonField& /*field*/) {
  return std::make_unique<Step>();
}

const std::map<std::string, DecoderReader>& decoder_readers() {
  static const std::map<std::string, DecoderReader> by_type = {
      {"ByteLevel", make_step<ByteLevelStep>}, {"ByteFallback", make_step<ByteFallbackStep>},
      {"Fuse", make_step<FuseStep>},           {"Strip", read_step<StripStep>},
      {"Replace", read_step<ReplaceStep>},     {"Metaspace", read_step<MetaspaceStep>},
      {"WordPiece", read_step<WordPieceStep>}, {"BPEDecoder", read_step<WordEndStep>}};
  return by_type;
}

}  // namespace

void Decoder::read(const JsonField& field) {
  read_steps(field);
  m_letter = text_of({"x"}).size();
  m_letters = text_of({"x", "x"}).size();
}

void Decoder::read_steps(const JsonField& field) {
  if (field.is_null()) {
    m_steps.push_back(std::make_unique<SpaceStep>());
    return;
  }
  std::size_t growth = 1;
  for (const JsonField& part : flattened(field, "decoders")) {
    const JsonField type = part.member("type");
    const auto reader = decoder_readers().find(type.string());
    if (reader == decoder_readers().end()) {
      std::string names;
      for (const auto& entry : decoder_readers()) names += entry.first + ", ";
      type.fail(names + "or a Sequence of these");
    }
    m_steps.push_back(reader->second(part));
    m_joins_bytes = m_steps.size() == 1 && reader->first == "ByteLevel";
    m_has_byte_tokens = m_has_byte_tokens || reader->first == "ByteFallback";
    if (reader->first != "Replace") continue;
    const std::size_t factor = ReplaceStep::growth(part);
    if (factor > max_growth / growth) {
      part.member("content").fail(
          fmt::format("decoders that make a text at most {} times as long", max_growth));
    }
    growth *= factor;
  }
}

void Decoder::append(std::string_view token, States& states, std::string& text) const {
  states.parts.clear();
  states.parts.push_back({std::string(token), true});
  for (std::size_t i = 0; i < m_steps.size(); ++i) {
    states.result.clear();
    for (TokenPart& part : states.parts) {
      m_steps[i]->append(std::move(part), states.steps[i], states.result);
    }
    states.parts.swap(states.result);
  }
  for (const TokenPart& part : states.parts) text += part.text;
}

void Decoder::finish(States& states, std::string& text) const {
  // Each step ends after the last parts of the steps before it have passed through it.
  std::vector<TokenPart> parts;
  for (std::size_t i = 0; i < m_steps.size(); ++i) {
    std::vector<TokenPart> result;
    for (TokenPart& part : parts) m_steps[i]->append(std::move(part), states.steps[i], result);
    m_steps[i]->finish(states.steps[i], result);
    parts = std::move(result);
  }
  for (const TokenPart& part : parts) text += part.text;
  states = start();
}

std::string Decoder::bytes_between(std::string_view token) const {
  if (m_has_byte_tokens) {
    if (const auto byte = byte_of_token(token)) return std::string(1, *byte);
  }
  // What a letter after another adds does not depend on what is between them.
  const std::string text = text_of({"x", token, "x"});
  if (text.size() < m_letters) return {};
  return text.substr(m_letter, text.size() - m_letters);
}

std::string Decoder::text_of(std::initializer_list<std::string_view> tokens) const {
  States states = start();
  std::string text;
  for (const std::string_view token : tokens) append(token, states, text);
  finish(states, text);
  return text;
}

}  // namespace kvzap::text
