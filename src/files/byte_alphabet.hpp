// GPT-2's bijection from bytes to printable characters; tokenizer.json writes tokens in it.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace kvzap::files {

/// Printable characters of Latin-1 represent themselves; U+0100 and the following characters
/// represent the other 68 bytes.
struct ByteAlphabet {
  std::array<std::string, 256> of_byte;
  std::array<int, 0x144> byte_of{};  // by character; -1: none

  ByteAlphabet();

  /// Returns bytes in the alphabet.
  std::string encode(std::string_view bytes) const;

  /// Appends the bytes of a token. A token with characters outside the alphabet represents itself.
  void decode(std::string_view token, std::string& bytes) const;
};

const ByteAlphabet& byte_alphabet();

}  // namespace kvzap::files
