// GPT-2's bijection from bytes to printable characters; tokenizer.json writes tokens in it.
#pragma once

#include <utf8proc.h>

#include <array>
#include <string>
#include <unordered_map>

namespace kvzap::text {

/// Printable characters of Latin-1 represent themselves; U+0100 and the following characters
/// represent the other 68 bytes.
struct ByteAlphabet {
  std::array<std::string, 256> of_byte;
  std::unordered_map<utf8proc_int32_t, unsigned char> byte_of;

  ByteAlphabet();

  /// Returns the bytes of a token. A token with characters outside the alphabet represents itself.
  std::string decode(const std::string& token) const;
};

const ByteAlphabet& byte_alphabet();

}  // namespace kvzap::text
