#include <gtest/gtest.h>
#include <utf8proc.h>

#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "text/utf8.hpp"

namespace {

using kvzap::text::append_utf8;
using kvzap::text::NormalForm;
using kvzap::text::normalize;

/// The normal form that utf8proc computes of the whole text.
std::string reference(std::string_view text, NormalForm form) {
  const bool composes = form == NormalForm::c || form == NormalForm::kc;
  const bool compatible = form == NormalForm::kc || form == NormalForm::kd;
  const auto options = static_cast<utf8proc_option_t>(
      UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
      (compatible ? UTF8PROC_COMPAT : 0));
  utf8proc_uint8_t* mapped = nullptr;
  const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &mapped, options);
  if (length < 0) return "utf8proc refuses the text";
  std::string result(reinterpret_cast<const char*>(mapped), static_cast<std::size_t>(length));
  std::free(mapped);
  return result;
}

/// Every character, after each of its kinds of neighbours: one that composes with marks, a mark,
/// Hangul, and the first characters of decompositions, with which the character may compose.
TEST(NormalForms, EveryCharacter) {
  std::vector<bool> second(0x110000);  // whether a character composes with one before it
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
  for (utf8proc_int32_t c = 0; c < 0x110000; ++c) {
    utf8proc_int32_t parts[8] = {};
    int boundary = 0;
    const auto count = utf8proc_decompose_char(c, parts, 8, options, &boundary);
    for (utf8proc_ssize_t i = 1; i < count; ++i) second[static_cast<std::size_t>(parts[i])] = true;
  }
  std::string all;
  for (utf8proc_int32_t c = 1; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    append_utf8(all, c);
    all += "a";
    append_utf8(all, c);
    append_utf8(all, c);
    if (!second[static_cast<std::size_t>(c)]) continue;
    // Behind everything that could compose with it.
    for (const char* const base : {"e", "\u0391", "\u0915", "\u1100", "\uAC00", "\u304B", "\u00E9",
                                   "\u09C7", "\u0BC6", "\u0DD9", "\u1025", "\u1B05", "\u03C9"}) {
      all += base;
      append_utf8(all, c);
    }
  }
  for (const NormalForm form : {NormalForm::c, NormalForm::d, NormalForm::kc, NormalForm::kd}) {
    EXPECT_TRUE(normalize(all, form) == reference(all, form)) << static_cast<int>(form);
  }
}

TEST(NormalForms, RandomTexts) {
  std::mt19937 random(20261125);
  const utf8proc_int32_t some[] = {'a',    'e',    ' ',    0xE9,   0xC5,    0x300,   0x301,  0x323,
                                   0x345,  0x391,  0x3C9,  0x3B1,  0x1F7D,  0x915,   0x93C,  0x9C7,
                                   0x9BE,  0x1100, 0x1161, 0x11A8, 0xAC00,  0xAC01,  0x304B, 0x3099,
                                   0x4E2D, 0x2126, 0xFB01, 0xFF21, 0x1D15E, 0x1F600, 0xFDFA, 0x9D7};
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (std::size_t length = random() % 12; length > 0; --length) {
      append_utf8(text, some[random() % std::size(some)]);
    }
    for (const NormalForm form : {NormalForm::c, NormalForm::d, NormalForm::kc, NormalForm::kd}) {
      ASSERT_EQ(normalize(text, form), reference(text, form));
    }
  }
}

}  // namespace
