#include "text/pattern.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "text/pattern_translator.hpp"
#include "text/utf8.hpp"

namespace kvzap::text {
namespace {

struct Deleter {
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Deleter>;

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

/// PCRE2's memory for matches. Pre-tokenizers match pieces of a few bytes, so each thread keeps it.
struct MatchMemory {
  Owned<pcre2_match_data> data{pcre2_match_data_create(1, nullptr)};
  Owned<pcre2_match_context> context{pcre2_match_context_create(nullptr)};
  Owned<pcre2_jit_stack> stack;

  void reset(std::size_t text_bytes) {
    // Each alternative may backtrack over a run as long as the text. No default limit may make that
    // fail, but exponential patterns must still end.
    constexpr std::size_t base_limit = 10000000, per_byte = 64, highest = 4000000000u;
    pcre2_set_match_limit(context.get(), static_cast<std::uint32_t>(std::min(
                                             base_limit + per_byte * text_bytes, highest)));
    pcre2_jit_stack_assign(context.get(), nullptr, nullptr);
    stack.reset();
  }

  int match(const pcre2_code& code, std::string_view text, std::size_t position) {
    const auto attempt = [&] {
      return pcre2_match(&code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position,
                         PCRE2_NO_UTF_CHECK, data.get(), context.get());
    };
    int result = attempt();
    if (result == PCRE2_ERROR_JIT_STACKLIMIT && !stack) {
      // Few matches need more than the 32 KB of the thread's own stack. A stack of PCRE2 takes
      // longer to create than most pieces to match.
      stack.reset(pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr));
      pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
      result = attempt();
    }
    return result;
  }
};

MatchMemory& match_memory() {
  static thread_local MatchMemory memory;
  return memory;
}

}  // namespace

Pattern::Pattern(const std::string& text, std::uint32_t options, std::string where)
    : m_where(std::move(where)) {
  if (options == PCRE2_LITERAL && !text.empty()) {
    m_literal = text;
    return;
  }
  Owned<pcre2_compile_context> context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int code = 0;
  PCRE2_SIZE offset = 0;
  m_code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                             options | PCRE2_UTF | PCRE2_NO_UTF_CHECK, &code, &offset,
                             context.get()));
  if (!m_code) {
    files::throw_unexpected(m_where, "a regular expression",
                            fmt::format("\"{}\" at offset {} of {}", pcre2_message(code), offset,
                                        files::abbreviated(text)));
  }
  // Without a just-in-time compiler, PCRE2 interprets the pattern.
  pcre2_jit_compile(m_code.get(), PCRE2_JIT_COMPLETE);
}

void Pattern::find_literal(std::string_view text, std::vector<Match>& pieces) const {
  std::size_t covered = 0;
  for (std::size_t begin; (begin = text.find(m_literal, covered)) != text.npos;) {
    if (covered != begin) pieces.push_back({covered, begin, false});
    covered = begin + m_literal.size();
    pieces.push_back({begin, covered, true});
  }
  if (covered != text.size()) pieces.push_back({covered, text.size(), false});
}

void Pattern::find(std::string_view text, std::vector<Match>& pieces) const {
  pieces.clear();
  if (text.empty()) return;
  if (!m_literal.empty()) return find_literal(text, pieces);
  MatchMemory& memory = match_memory();
  memory.reset(text.size());
  const PCRE2_SIZE* const span = pcre2_get_ovector_pointer(memory.data.get());
  std::size_t covered = 0;
  std::size_t position = 0;
  bool any = false;
  while (position <= text.size()) {
    const int code = memory.match(*m_code, text, position);
    if (code == PCRE2_ERROR_NOMATCH) break;
    if (code < 0) {
      files::throw_unexpected(m_where, fmt::format("to match a text of {} bytes", text.size()),
                              fmt::format("PCRE2's error \"{}\"", pcre2_message(code)));
    }
    const std::size_t begin = span[0], end = span[1];
    if (begin == end && any && end == covered) {
      // An empty match right after the previous one: continue after the next character.
      if (position == text.size()) break;
      position += first_character(text.substr(position)).second;
      continue;
    }
    if (covered != begin) pieces.push_back({covered, begin, false});
    pieces.push_back({begin, end, true});
    covered = position = end;
    any = true;
  }
  if (covered != text.size()) pieces.push_back({covered, text.size(), false});
}

Pattern translated_pattern(const files::JsonField& field) {
  return {translate_pattern(field), PCRE2_UCP | PCRE2_MULTILINE, field.where()};
}

Pattern literal_pattern(const std::string& text, const std::string& where) {
  return {text, PCRE2_LITERAL, where};
}

Pattern regex_or_string(const files::JsonField& field) {
  const files::JsonField regex = field.member("Regex");
  const files::JsonField text = field.member("String");
  if (regex.is_null() == text.is_null()) field.fail("a Regex or a String");
  return regex.is_null() ? literal_pattern(text.string(), text.where()) : translated_pattern(regex);
}

}  // namespace kvzap::text
