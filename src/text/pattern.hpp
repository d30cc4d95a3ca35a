// A compiled regular expression.
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_field.hpp"

namespace kvzap::text {

/// A piece of a text, in bytes: a match, or the text between two matches.
struct Match {
  std::size_t begin, end;
  bool is_match;
};

class Pattern {
 public:
  /// Compiles `text`. `options` are PCRE2's; `where` names the pattern in messages. Throws Error if
  /// PCRE2 refuses it.
  Pattern(const std::string& text, std::uint32_t options, std::string where);

  /// Splits text (valid UTF-8) into the matches and the text between them. Throws Error if PCRE2's
  /// limits are exceeded.
  std::vector<Match> find(std::string_view text) const;

 private:
  struct Deleter {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };

  std::string m_where;
  std::unique_ptr<pcre2_code, Deleter> m_code;
};

/// Returns the pattern that a field of tokenizer.json gives in Oniguruma's syntax.
Pattern translated_pattern(const base::JsonField& field);

}  // namespace kvzap::text
