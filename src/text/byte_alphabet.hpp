// GPT-2's bijection from bytes to printable characters, in which tokenizer.json writes its tokens.
#pragma once

#include <utf8proc.h>

#include <array>
#include <string>
#include <unordered_map>

namespace kvzap::detail {

/// Latin-1's printable characters stand for themselves, the other 68 bytes for U+0100 and
/// following.
struct ByteAlphabet {
  std::array<std::string, 256> of_byte;
  std::unordered_map<utf8proc_int32_t, unsigned char> byte_of;

  ByteAlphabet();

  /// Bytes of a token; a token with characters outside the alphabet stands for itself.
  std::string decode(const std::string& token) const;
};

const ByteAlphabet& byte_alphabet();

}  // namespace kvzap::detail
