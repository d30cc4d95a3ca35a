#include "text/normalizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "files/byte_alphabet.hpp"
#include "text/json_parts.hpp"
#include "text/pattern.hpp"
#include "text/precompiled_normalizer.hpp"
#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

using files::JsonField;

bool is_character_boundary(std::string_view text, std::size_t position) {
  return position == text.size() || (static_cast<unsigned char>(text[position]) & 0xC0) != 0x80;
}

// A normalizer that treats each character, or few of them, alone.
template <class Rewrite>
class LocalNormalizer : public Normalizer {
 public:
  explicit LocalNormalizer(Rewrite rewrite) : m_rewrite(std::move(rewrite)) {}

  void apply(NormalizedText& text, GrowthLimit& limit) const override {
    std::size_t from_first = 0;
    if (text.from_first > 0) {
      from_first = m_rewrite(std::string_view(text.text).substr(0, text.from_first)).size();
    }
    std::string result = m_rewrite(std::string_view(text.text));
    limit.require(text.text.size(), result.size());
    text.text = std::move(result);
    // The first character may have merged with the next one.
    text.from_first = std::min(from_first, text.text.size());
    while (!is_character_boundary(text.text, text.from_first)) ++text.from_first;
  }

 private:
  Rewrite m_rewrite;
};

template <class Rewrite>
std::unique_ptr<Normalizer> local(Rewrite rewrite) {
  return std::make_unique<LocalNormalizer<Rewrite>>(std::move(rewrite));
}

class Prepend : public Normalizer {
 public:
  explicit Prepend(const JsonField& field) : m_prefix(field.member("prepend").string()) {}

  void apply(NormalizedText& text, GrowthLimit& limit) const override {
    limit.require(0, m_prefix.size());
    text.text.insert(0, m_prefix);
    if (text.from_first > 0) text.from_first += m_prefix.size();
  }

 private:
  std::string m_prefix;
};

class Replace : public Normalizer {
 public:
  explicit Replace(const JsonField& field)
      : m_pattern(regex_or_string(field.member("pattern"))),
        m_content(field.member("content").string()) {}

  void apply(NormalizedText& text, GrowthLimit& limit) const override {
    std::vector<Match> pieces;
    m_pattern.find(text.text, pieces);
    const auto matches = static_cast<std::size_t>(
        std::count_if(pieces.begin(), pieces.end(), [](const Match& m) { return m.is_match; }));
    if (matches == 0) return;
    limit.require(0, matches * m_content.size());
    std::string result;
    std::size_t from_first = 0;
    for (const Match& piece : pieces) {
      if (piece.is_match) {
        result += m_content;
      } else {
        result.append(text.text, piece.begin, piece.end - piece.begin);
      }
      if (piece.end <= text.from_first) {
        from_first = result.size();
      } else if (!piece.is_match && piece.begin < text.from_first) {
        from_first = result.size() - (piece.end - text.from_first);
      }
    }
    text.text = std::move(result);
    text.from_first = from_first;
  }

 private:
  Pattern m_pattern;
  std::string m_content;
};

class Strip : public Normalizer {
 public:
  explicit Strip(const JsonField& field)
      : m_left(field.member("strip_left").boolean()),
        m_right(field.member("strip_right").boolean()) {}

  void apply(NormalizedText& text, GrowthLimit& /*limit*/) const override {
    std::string_view rest = text.text;
    while (m_left && !rest.empty()) {
      const auto [c, length] = first_character(rest);
      if (!is_white_space(c)) break;
      rest.remove_prefix(length);
    }
    text.from_first -= std::min(text.from_first, text.text.size() - rest.size());
    while (m_right && !rest.empty()) {
      const auto [c, length] = last_character(rest);
      if (!is_white_space(c)) break;
      rest.remove_suffix(length);
    }
    text.text = std::string(rest);
  }

 private:
  bool m_left, m_right;
};

/// Rewrites each character: `append(c, bytes, result)` appends what replaces it.
template <class Append>
std::string rewritten(std::string_view text, Append append) {
  std::string result;
  for (std::size_t position = 0; position < text.size();) {
    const auto [c, length] = first_character(text.substr(position));
    append(c, text.substr(position, length), result);
    position += length;
  }
  return result;
}

std::string without_marks(std::string_view text) {
  return rewritten(text, [](utf8proc_int32_t c, std::string_view bytes, std::string& out) {
    if (!is_mark(c)) out += bytes;
  });
}

bool is_chinese(utf8proc_int32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B81F) ||
         (c >= 0x2B920 && c <= 0x2CEAF) || (c >= 0xF900 && c <= 0xFAFF) ||
         (c >= 0x2F800 && c <= 0x2FA1F);
}

/// The normalizer of BERT's vocabularies.
class Bert {
 public:
  explicit Bert(const JsonField& field)
      : m_cleans(field.member("clean_text").boolean(true)),
        m_separates(field.member("handle_chinese_chars").boolean(true)),
        m_lowercases(field.member("lowercase").boolean(true)),
        m_strips(field.member("strip_accents").boolean(m_lowercases)) {}

  std::string operator()(std::string_view text) const {
    std::string result(text);
    if (m_cleans) {
      result = rewritten(result, [](utf8proc_int32_t c, std::string_view bytes, std::string& out) {
        const bool is_blank = c == '\t' || c == '\n' || c == '\r';
        if (c == 0 || c == 0xFFFD || (!is_blank && is_control(c))) return;
        out += is_white_space(c) ? " " : bytes;
      });
    }
    if (m_separates) {
      result = rewritten(result, [](utf8proc_int32_t c, std::string_view bytes, std::string& out) {
        const std::string_view space = is_chinese(c) ? " " : "";
        out.append(space).append(bytes).append(space);
      });
    }
    if (m_strips) {
      result = rewritten(normalize(result, NormalForm::d),
                         [](utf8proc_int32_t c, std::string_view bytes, std::string& out) {
                           if (utf8proc_category(c) != UTF8PROC_CATEGORY_MN) out += bytes;
                         });
    }
    return m_lowercases ? lowercase(result) : result;
  }

 private:
  bool m_cleans, m_separates, m_lowercases, m_strips;
};

std::unique_ptr<Normalizer> read_bert(const JsonField& field) { return local(Bert(field)); }

/// SentencePiece's rule nmt without its normal form.
std::string without_controls(std::string_view text) {
  return rewritten(text, [](utf8proc_int32_t c, std::string_view bytes, std::string& out) {
    if (c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
        (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xFEFF ||
        c == 0xFFFD) {
      out += ' ';
    } else if (!((c >= 0x01 && c <= 0x1F) || c == 0x7F || c == 0x8F || c == 0x9F)) {
      out += bytes;
    }
  });
}

std::string in_byte_alphabet(std::string_view text) { return files::byte_alphabet().encode(text); }

using NormalizerReader = std::unique_ptr<Normalizer> (*)(const JsonField& field);

template <class Kind>
std::unique_ptr<Normalizer> read_normalizer(const JsonField& field) {
  return std::make_unique<Kind>(field);
}

template <NormalForm form>
std::unique_ptr<Normalizer> read_form(const JsonField& /*field*/) {
  return local([](std::string_view text) { return normalize(text, form); });
}

template <std::string (*rewrite)(std::string_view)>
std::unique_ptr<Normalizer> read_rewrite(const JsonField& /*field*/) {
  return local(rewrite);
}

std::unique_ptr<Normalizer> read_precompiled(const JsonField& field) {
  return local(PrecompiledNormalizer(field.member("precompiled_charsmap")));
}

const std::map<std::string, NormalizerReader>& normalizer_readers() {
  static const std::map<std::string, NormalizerReader> by_type = {
      {"NFC", read_form<NormalForm::c>},
      {"NFD", read_form<NormalForm::d>},
      {"NFKC", read_form<NormalForm::kc>},
      {"NFKD", read_form<NormalForm::kd>},
      {"Lowercase", read_rewrite<lowercase>},
      {"StripAccents", read_rewrite<without_marks>},
      {"ByteLevel", read_rewrite<in_byte_alphabet>},
      {"Nmt", read_rewrite<without_controls>},
      {"BertNormalizer", read_bert},
      {"Prepend", read_normalizer<Prepend>},
      {"Replace", read_normalizer<Replace>},
      {"Strip", read_normalizer<Strip>},
      {"Precompiled", read_precompiled}};
  return by_type;
}

}  // namespace

void Normalizers::read(const JsonField& field) {
  for (const JsonField& part : flattened(field, "normalizers")) {
    const JsonField type = part.member("type");
    const auto reader = normalizer_readers().find(type.string());
    if (reader == normalizer_readers().end()) {
      std::string names;
      for (const auto& entry : normalizer_readers()) names += entry.first + ", ";
      type.fail(names + "or a Sequence of these");
    }
    m_steps.push_back(reader->second(part));
  }
}

NormalizedText Normalizers::apply(std::string_view text, bool at_start, GrowthLimit& limit) const {
  NormalizedText result{std::string(text),
                        at_start && !text.empty() ? first_character(text).second : 0};
  for (const auto& step : m_steps) {
    if (!result.text.empty()) step->apply(result, limit);
  }
  return result;
}

std::string Normalizers::apply(const std::string& content, const std::string& where) const {
  GrowthLimit limit(where, content.size());
  return apply(content, true, limit).text;
}

}  // namespace kvzap::text
