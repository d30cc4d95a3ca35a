#include "text/text_piece.hpp"

#include <fmt/format.h>

#include "files/json_field.hpp"

namespace kvzap::text {
namespace {

// NFKC turns a character of 3 bytes into at most 33, and Metaspace turns a space into 3 bytes.
constexpr std::size_t growth_per_byte = 32, growth_of_any_text = 64u << 10;

}  // namespace

GrowthLimit::GrowthLimit(const std::string& where, std::size_t text_bytes)
    : m_where(where), m_left(growth_per_byte * text_bytes + growth_of_any_text) {}

void GrowthLimit::require(std::size_t before, std::size_t after) {
  if (after <= before) return;
  if (after - before > m_left) {
    files::throw_unexpected(
        m_where,
        fmt::format("a normalizer and pre-tokenizer that add at most {} bytes for each byte",
                    growth_per_byte),
        "more");
  }
  m_left -= after - before;
}

}  // namespace kvzap::text
