#include "text/byte_alphabet.hpp"

#include <string_view>

#include "text/utf8.hpp"

namespace kvzap::text {

ByteAlphabet::ByteAlphabet() {
  utf8proc_int32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const utf8proc_int32_t c = printable ? byte : next++;
    append_utf8(of_byte[byte], c);
    byte_of.emplace(c, static_cast<unsigned char>(byte));
  }
}

std::string ByteAlphabet::decode(const std::string& token) const {
  std::string bytes;
  for (std::size_t position = 0; position < token.size();) {
    const auto [codepoint, length] = first_character(std::string_view(token).substr(position));
    const auto found = byte_of.find(codepoint);
    if (found == byte_of.end()) return token;
    bytes.push_back(static_cast<char>(found->second));
    position += length;
  }
  return bytes;
}

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

}  // namespace kvzap::text
