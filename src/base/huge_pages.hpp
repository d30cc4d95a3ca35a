// Requests huge pages for memory that is read in long runs.
#pragma once

#include <cstddef>

namespace kvzap::base {

/// Size of such a page on systems that have them on request.
inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

/// Lets the system use huge pages for [data, data + bytes) if it has them on request (transparent
/// huge pages in mode madvise). Call it before the memory is first written. Long reads are then up
/// to a third faster, with fewer page faults.
void advise_huge_pages(void* data, std::size_t bytes);

/// The same for memory that the C library may have used before. Its content is lost, because only
/// fresh memory becomes huge pages. `data` and `bytes` are multiples of the system's page size.
void advise_fresh_huge_pages(void* data, std::size_t bytes);

}  // namespace kvzap::base
