// The place of one packed row in a page.
#pragma once

#include <kvzap/core/packed_rows.hpp>

namespace kvzap::cache {

struct PackedPlace {
  std::uint8_t* codes;
  bfloat16* scale;
  /// address: of the page; slot: of the row; values: of the values, not the keys.
  KOKKOS_INLINE_FUNCTION PackedPlace(const PackedPage& page, std::uintptr_t address,
                                     std::int64_t slot, bool values) {
    const PackedRows rows = page.at(address, values);
    codes =
        const_cast<std::uint8_t*>(rows.codes) + slot * PackedRows::code_bytes(rows.type, page.dim);
    scale = const_cast<bfloat16*>(rows.scales) + slot;
  }
};

}  // namespace kvzap::cache
