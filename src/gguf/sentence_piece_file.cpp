#include "gguf/sentence_piece_file.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstring>

#include "files/json_field.hpp"
#include "files/quote.hpp"

namespace kvzap::gguf {
namespace {

constexpr std::size_t most_pieces = 1u << 19;

/// One field of a message in the wire format of protocol buffers.
struct Field {
  std::uint64_t number = 0;
  /// Its value, if it is a number of variable length; else its bytes.
  std::uint64_t value = 0;
  std::string_view bytes;
};

/// Reads the fields of a message one after the other.
class Message {
 public:
  Message(std::string_view bytes, const std::string& where) : m_bytes(bytes), m_where(where) {}

  /// Returns false at the end.
  bool next(Field& field) {
    if (m_bytes.empty()) return false;
    const std::uint64_t key = number();
    field = {key >> 3, 0, {}};
    switch (key & 7) {
      case 0:
        field.value = number();
        return true;
      case 1:
        field.bytes = take(8);
        return true;
      case 2:
        field.bytes = take(number());
        return true;
      case 5:
        field.bytes = take(4);
        return true;
      default:
        fail(fmt::format("a field of the wire type {}", key & 7));
    }
  }

 private:
  [[noreturn]] void fail(const std::string& found) const {
    files::throw_unexpected(m_where, "a model of SentencePiece", found);
  }

  std::uint64_t number() {
    std::uint64_t result = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (m_bytes.empty()) fail("the end of the file within a number");
      const auto byte = static_cast<unsigned char>(m_bytes.front());
      m_bytes.remove_prefix(1);
      result |= static_cast<std::uint64_t>(byte & 0x7Fu) << shift;
      if (byte < 0x80) return result;
    }
    fail("a number of more than 64 bits");
  }

  std::string_view take(std::uint64_t size) {
    if (size > m_bytes.size()) fail("a field beyond the end of the file");
    const std::string_view bytes = m_bytes.substr(0, size);
    m_bytes.remove_prefix(size);
    return bytes;
  }

  std::string_view m_bytes;
  const std::string& m_where;
};

/// Negative numbers have 64 bits, also those of 32 bits.
std::int64_t signed_value(const Field& field) { return static_cast<std::int64_t>(field.value); }

SentencePieceFile::Piece read_piece(std::string_view bytes, const std::string& where,
                                    std::size_t place) {
  SentencePieceFile::Piece piece;
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    if (field.number == 1) piece.text = field.bytes;
    if (field.number == 2 && field.bytes.size() == sizeof(float)) {
      std::uint32_t bits = 0;
      for (std::size_t i = sizeof(bits); i-- > 0;) {
        bits = bits << 8 | static_cast<unsigned char>(field.bytes[i]);
      }
      std::memcpy(&piece.score, &bits, sizeof(bits));
      if (!std::isfinite(piece.score)) {
        files::throw_unexpected(fmt::format("{}: pieces[{}].score", where, place),
                                "a finite number", fmt::format("{}", piece.score));
      }
    }
    if (field.number == 3) piece.type = static_cast<std::int32_t>(field.value);
  }
  if (!files::is_utf8(piece.text)) {
    files::throw_unexpected(fmt::format("{}: pieces[{}]", where, place), "a text in UTF-8",
                            files::in_quotes(piece.text));
  }
  return piece;
}

void read_training(std::string_view bytes, const std::string& where, SentencePieceFile& file) {
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    switch (field.number) {
      case 3:
        file.kind = field.value;
        break;
      case 35:
        file.byte_fallback = field.value != 0;
        break;
      case 40:
        file.unknown_id = signed_value(field);
        break;
      case 41:
        file.bos_id = signed_value(field);
        break;
      case 42:
        file.eos_id = signed_value(field);
        break;
      case 45:
        file.unknown = field.bytes;
        break;
      case 46:
        file.bos = field.bytes;
        break;
      case 47:
        file.eos = field.bytes;
        break;
      default:
        break;
    }
  }
}

void read_normalization(std::string_view bytes, const std::string& where, SentencePieceFile& file) {
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    if (field.number == 2) file.charsmap = field.bytes;
    if (field.number == 3) file.adds_space = field.value != 0;
    if (field.number == 4) file.removes_extra_spaces = field.value != 0;
    if (field.number == 5) file.escapes_spaces = field.value != 0;
  }
}

}  // namespace

SentencePieceFile SentencePieceFile::parse(std::string_view bytes, const std::string& where) {
  SentencePieceFile file;
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    if (field.number == 1) {
      if (file.pieces.size() == most_pieces) {
        files::throw_unexpected(where, fmt::format("at most {} pieces", most_pieces), "more");
      }
      file.pieces.push_back(read_piece(field.bytes, where, file.pieces.size()));
    }
    if (field.number == 2) read_training(field.bytes, where, file);
    if (field.number == 3) read_normalization(field.bytes, where, file);
  }
  if (file.pieces.empty()) files::throw_unexpected(where, "pieces", "none");
  return file;
}

}  // namespace kvzap::gguf
