#include "files/byte_alphabet.hpp"

#include <cstddef>

namespace kvzap::files {

ByteAlphabet::ByteAlphabet() {
  byte_of.fill(-1);
  std::size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const std::size_t c = printable ? static_cast<std::size_t>(byte) : next++;
    if (c < 0x80) {
      of_byte[byte] = {static_cast<char>(c)};
    } else {
      of_byte[byte] = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    }
    byte_of[c] = byte;
  }
}

std::string ByteAlphabet::encode(std::string_view bytes) const {
  std::string text;
  for (const char byte : bytes) text += of_byte[static_cast<unsigned char>(byte)];
  return text;
}

void ByteAlphabet::decode(std::string_view token, std::string& bytes) const {
  const std::size_t begin = bytes.size();
  for (std::size_t position = 0; position < token.size(); ++position) {
    const auto lead = static_cast<unsigned char>(token[position]);
    std::size_t c = lead;
    if (lead >= 0xE0) {
      c = byte_of.size();  // all characters of the alphabet have one or two bytes
    } else if (lead >= 0x80) {
      c = (lead & 0x1Fu) << 6 | (static_cast<unsigned char>(token[++position]) & 0x3Fu);
    }
    if (c >= byte_of.size() || byte_of[c] < 0) {
      bytes.resize(begin);
      bytes += token;
      return;
    }
    bytes.push_back(static_cast<char>(byte_of[c]));
  }
}

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

}  // namespace kvzap::files
