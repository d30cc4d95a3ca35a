// Asks the system for huge pages under memory that is read in long runs.
#pragma once

#include <cstddef>

namespace kvzap::detail {

/// What such a page holds on the systems that have them on request.
inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

/// Lets the system put huge pages under [data, data + bytes), where it has them on request
/// (transparent huge pages in mode madvise). To be called before the memory is first written. Long
/// reads are then up to a third faster, and there are fewer page faults.
void advise_huge_pages(void* data, std::size_t bytes);

}  // namespace kvzap::detail
