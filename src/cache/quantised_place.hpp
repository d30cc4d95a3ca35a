// The place of one quantised row in a page.
#pragma once

#include <kvzap/core/quantised_rows.hpp>

namespace kvzap::cache {

struct QuantisedPlace {
  std::uint8_t* codes;
  bfloat16* scale;
  /// address: of the page; slot: of the row; values: of the values, not the keys.
  KOKKOS_INLINE_FUNCTION QuantisedPlace(const QuantisedPage& page, std::uintptr_t address,
                                        std::int64_t slot, bool values) {
    const QuantisedRows rows = page.at(address, values);
    codes = const_cast<std::uint8_t*>(rows.codes) +
            slot * QuantisedRows::code_bytes(rows.type, page.dim);
    scale = const_cast<bfloat16*>(rows.scales) + slot;
  }
};

}  // namespace kvzap::cache
