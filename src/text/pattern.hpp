// A compiled regular expression.
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/json_field.hpp"
#include "text/matcher.hpp"

namespace kvzap::text {

class Pattern : public Matcher {
 public:
  /// Compiles `text`. `options` are PCRE2's; `where` names the pattern in messages. Throws Error if
  /// PCRE2 refuses it.
  Pattern(const std::string& text, std::uint32_t options, std::string where);

  /// Throws Error if PCRE2's limits are exceeded.
  void find(std::string_view text, std::vector<Match>& pieces) const override;

 private:
  struct Deleter {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };

  void find_literal(std::string_view text, std::vector<Match>& pieces) const;

  std::string m_where;
  std::string m_literal;  // if not empty, the pattern matches exactly this text
  std::unique_ptr<pcre2_code, Deleter> m_code;
};

/// Returns the pattern that a field of tokenizer.json gives in Oniguruma's syntax.
Pattern translated_pattern(const files::JsonField& field);

/// Returns the pattern that matches exactly this text.
Pattern literal_pattern(const std::string& text, const std::string& where);

/// Returns the pattern of a field {"Regex": …} or {"String": …}.
Pattern regex_or_string(const files::JsonField& field);

}  // namespace kvzap::text
