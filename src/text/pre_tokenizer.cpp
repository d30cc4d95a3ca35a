#include "text/pre_tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "files/byte_alphabet.hpp"
#include "text/added_tokens.hpp"
#include "text/json_parts.hpp"
#include "text/pattern.hpp"
#include "text/splitter.hpp"
#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

using files::JsonField;

void split_all(std::vector<TextPiece>& pieces, const Splitter& splitter) {
  std::vector<TextPiece> parts;
  std::vector<Match> matches;
  parts.reserve(pieces.size());
  for (const TextPiece& piece : pieces) splitter.split(piece, matches, parts);
  pieces.swap(parts);
}

class Split : public PreTokenizer {
 public:
  explicit Split(Splitter splitter) : m_splitter(std::move(splitter)) {}
  void apply(std::vector<TextPiece>& pieces, RewrittenText& /*text*/) const override {
    split_all(pieces, m_splitter);
  }

 private:
  Splitter m_splitter;
};

class ByteLevel : public PreTokenizer {
 public:
  ByteLevel(const JsonField& field, bool keeps_bytes)
      : m_add_prefix_space(field.member("add_prefix_space").boolean()), m_keeps_bytes(keeps_bytes) {
    if (!field.member("use_regex").boolean(true)) return;
    const nlohmann::json pattern =
        R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    m_splitter.emplace(
        std::make_unique<Pattern>(translated_pattern({pattern, field.where(), "use_regex"})),
        SplitBehavior::isolated, false);
  }

  void apply(std::vector<TextPiece>& pieces, RewrittenText& text) const override {
    if (m_add_prefix_space) {
      text.rewrite(pieces, [](const TextPiece& piece, std::string& buffer) {
        const bool prefixed = piece.text.front() != ' ';
        if (prefixed) buffer += ' ';
        buffer += piece.text;
        return piece.from_first + (prefixed && piece.from_first > 0 ? 1 : 0);
      });
    }
    if (m_splitter) split_all(pieces, *m_splitter);
    if (m_keeps_bytes) return;
    text.rewrite(pieces, [](const TextPiece& piece, std::string& buffer) {
      const std::size_t begin = buffer.size();
      std::size_t from_first = 0;
      for (std::size_t i = 0; i < piece.text.size(); ++i) {
        if (i == piece.from_first) from_first = buffer.size() - begin;
        buffer += files::byte_alphabet().of_byte[static_cast<unsigned char>(piece.text[i])];
      }
      return piece.from_first < piece.text.size() ? from_first : buffer.size() - begin;
    });
  }

 private:
  bool m_add_prefix_space;
  bool m_keeps_bytes;
  std::optional<Splitter> m_splitter;
};

class Metaspace : public PreTokenizer {
 public:
  explicit Metaspace(const JsonField& field)
      : m_replacement(one_character(field.member("replacement"))), m_scheme(prepend_scheme(field)) {
    if (field.member("split").boolean(true)) {
      m_splitter.emplace(std::make_unique<Pattern>(literal_pattern(m_replacement, field.where())),
                         SplitBehavior::merged_with_next, false);
    }
  }

  void apply(std::vector<TextPiece>& pieces, RewrittenText& text) const override {
    text.rewrite(pieces, [this](const TextPiece& piece, std::string& buffer) {
      const std::size_t begin = buffer.size();
      const bool starts =
          piece.text.front() == ' ' || piece.text.substr(0, m_replacement.size()) == m_replacement;
      const bool prepend = !starts && (m_scheme == PrependScheme::always ||
                                       (m_scheme == PrependScheme::first && piece.from_first > 0));
      if (prepend) buffer += m_replacement;
      std::size_t from_first = 0;
      for (std::size_t i = 0; i < piece.text.size(); ++i) {
        if (i == piece.from_first && i > 0) from_first = buffer.size() - begin;
        if (piece.text[i] == ' ') {
          buffer += m_replacement;
        } else {
          buffer += piece.text[i];
        }
      }
      return piece.from_first < piece.text.size() ? from_first : buffer.size() - begin;
    });
    if (m_splitter) split_all(pieces, *m_splitter);
  }

 private:
  std::string m_replacement;
  PrependScheme m_scheme;
  std::optional<Splitter> m_splitter;
};

/// Splits after every so many characters.
class FixedLength : public PreTokenizer {
 public:
  explicit FixedLength(std::size_t length) : m_length(length) {}

  void apply(std::vector<TextPiece>& pieces, RewrittenText& /*text*/) const override {
    std::vector<TextPiece> parts;
    for (const TextPiece& piece : pieces) {
      std::size_t begin = 0, characters = 0;
      for (std::size_t end = 0; end < piece.text.size();) {
        end += first_character(piece.text.substr(end)).second;
        if (++characters % m_length != 0 && end < piece.text.size()) continue;
        parts.push_back(piece.part(begin, end));
        begin = end;
      }
    }
    pieces.swap(parts);
  }

 private:
  std::size_t m_length;
};

/// Matches texts: the leftmost first, and of several at one place the longest.
class TextsMatcher : public Matcher {
 public:
  explicit TextsMatcher(const JsonField& texts) {
    for (std::size_t i = 0; i < texts.array_size(); ++i) {
      const std::string& text = texts.element(i).string();
      if (!text.empty()) m_texts.insert(text, {});
    }
  }

  void find(std::string_view text, std::vector<Match>& pieces) const override {
    pieces.clear();
    std::size_t covered = 0;
    for (std::size_t position = 0; position < text.size();) {
      const std::size_t length = m_texts.longest(text, position).second;
      if (length == 0) {
        ++position;
        continue;
      }
      if (covered < position) pieces.push_back({covered, position, false});
      covered = position + length;
      pieces.push_back({position, covered, true});
      position = covered;
    }
    if (covered < text.size()) pieces.push_back({covered, text.size(), false});
  }

 private:
  AddedTokenMatcher m_texts;
};

std::unique_ptr<Matcher> read_pattern(const JsonField& field) {
  const JsonField texts = field.member("Texts");
  if (!texts.is_null()) return std::make_unique<TextsMatcher>(texts);
  return std::make_unique<Pattern>(regex_or_string(field));
}

std::unique_ptr<PreTokenizer> character_split(CharacterMatcher::Kind kind, SplitBehavior behavior) {
  return std::make_unique<Split>(
      Splitter(std::make_unique<CharacterMatcher>(kind), behavior, false));
}

// The kinds without parameters and Split, which has them all.
std::unique_ptr<PreTokenizer> read_split(const JsonField& field, const std::string& name) {
  if (name == "Split") {
    return std::make_unique<Split>(Splitter(read_pattern(field.member("pattern")),
                                            split_behavior(field.member("behavior")),
                                            field.member("invert").boolean(false)));
  }
  if (name == "Digits") {
    return character_split(is_numeric, field.member("individual_digits").boolean(false)
                                           ? SplitBehavior::isolated
                                           : SplitBehavior::contiguous);
  }
  if (name == "Punctuation") {
    const JsonField behavior = field.member("behavior");
    return character_split(is_punctuation,
                           behavior.is_null() ? SplitBehavior::isolated : split_behavior(behavior));
  }
  if (name == "FixedLength") {
    return std::make_unique<FixedLength>(
        static_cast<std::size_t>(field.member("length").integer(1, 1 << 30)));
  }
  if (name == "WhitespaceSplit") return character_split(is_white_space, SplitBehavior::removed);
  if (name == "Whitespace") {
    return std::make_unique<Split>(
        Splitter(std::make_unique<WordMatcher>(), SplitBehavior::removed, true));
  }
  if (name == "CharDelimiterSplit") {
    const JsonField delimiter = field.member("delimiter");
    return std::make_unique<Split>(Splitter(
        std::make_unique<Pattern>(literal_pattern(one_character(delimiter), delimiter.where())),
        SplitBehavior::removed, false));
  }
  field.member("type").fail(
      "Split, Digits, Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit, FixedLength, "
      "BertPreTokenizer, Metaspace, ByteLevel or a Sequence of these");
}

}  // namespace

void PreTokenizers::read(const JsonField& field, bool bytes_wanted) {
  const std::vector<JsonField> parts = flattened(field, "pretokenizers");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string& name = parts[i].member("type").string();
    if (name == "ByteLevel") {
      m_gives_bytes = bytes_wanted && i + 1 == parts.size();
      m_steps.push_back(std::make_unique<ByteLevel>(parts[i], m_gives_bytes));
    } else if (name == "BertPreTokenizer") {
      m_steps.push_back(character_split(is_white_space, SplitBehavior::removed));
      m_steps.push_back(character_split(is_punctuation, SplitBehavior::isolated));
    } else if (name == "Metaspace") {
      m_steps.push_back(std::make_unique<Metaspace>(parts[i]));
    } else {
      m_steps.push_back(read_split(parts[i], name));
    }
  }
}

}  // namespace kvzap::text
