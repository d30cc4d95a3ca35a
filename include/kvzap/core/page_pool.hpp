// Fixed-size pages with reference counts: the storage of every head, layer and sequence.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <kvzap/core/types.hpp>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvzap {

/// Counts the bytes that a cache and its prefill hold, and their maximum so far.
class MemoryMeter {
 public:
  void add(std::size_t bytes) {
    m_current += bytes;
    if (m_current > m_peak) m_peak = m_current;
  }
  void subtract(std::size_t bytes) { m_current -= bytes; }
  std::size_t current() const { return m_current; }
  std::size_t peak() const { return m_peak; }

 private:
  std::size_t m_current = 0;
  std::size_t m_peak = 0;
};

/// Adds `bytes` to a meter and subtracts them on destruction.
class MeteredBytes {
 public:
  MeteredBytes() = default;
  MeteredBytes(MemoryMeter* meter, std::size_t bytes) : m_meter(meter), m_bytes(bytes) {
    if (m_meter) m_meter->add(m_bytes);
  }
  MeteredBytes(MeteredBytes&& other) noexcept { swap(other); }
  MeteredBytes& operator=(MeteredBytes&& other) noexcept {
    MeteredBytes(std::move(other)).swap(*this);
    return *this;
  }
  ~MeteredBytes() {
    if (m_meter) m_meter->subtract(m_bytes);
  }
  void swap(MeteredBytes& other) noexcept {
    std::swap(m_meter, other.m_meter);
    std::swap(m_bytes, other.m_bytes);
  }
  std::size_t bytes() const { return m_bytes; }

 private:
  MemoryMeter* m_meter = nullptr;
  std::size_t m_bytes = 0;
};

/// Thrown if memory, or the caller's limit, is exhausted. The call that throws it has changed
/// nothing: the caller can free memory and call again.
class OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& what, std::size_t wanted, std::size_t free)
      : Error(what), bytes_wanted(wanted), bytes_free(free) {}
  /// Bytes that the call asked for.
  std::size_t bytes_wanted;
  /// Bytes of free pages, and of new pages within the limit if there is one.
  std::size_t bytes_free;
};

/// Identifies a page of a pool. The id of a released page is used again.
using PageId = std::int32_t;

/// Addresses of the two parts of a page: its rows (keys and values), and its metadata (positions
/// and scores).
struct PageAddress {
  std::uintptr_t rows = 0;
  std::uintptr_t metadata = 0;
};

/// Pages of one size in two parts: rows, which every decode step reads, and metadata, which is
/// small.
///
/// Memory is allocated in slabs. The rows of a slab's pages lie one after the other, followed by
/// all their metadata, so decode reads pages that were taken in sequence as one stream. Slabs grow
/// with the pool, so that little memory is idle: a slab is a 128th of the pool, or a 64th once that
/// fills huge pages. A page is taken from the oldest slab with a free one, so that young slabs
/// become empty and trim() can return them. allocate, retain and release cost O(log slabs). Only
/// allocate takes memory.
///
/// Not thread-safe: one host thread uses a pool at a time. No function communicates.
class PagePool {
 public:
  using AddressView = Kokkos::View<std::uintptr_t*, MemorySpace>;

  /// Makes a pool without pages. row_bytes, the bytes of a page's rows, is rounded up to a multiple
  /// of 64, which is also their alignment; metadata_bytes to a multiple of 8. If `meter` is given,
  /// it counts every slab and must outlive the pool. `limit`: see set_limit. Throws Error if
  /// row_bytes is 0.
  explicit PagePool(std::size_t row_bytes, MemoryMeter* meter = nullptr, std::size_t limit = 0,
                    std::size_t metadata_bytes = 0);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  /// Takes a page, with reference count 1 and unspecified content. Throws OutOfMemory.
  PageId allocate();
  /// Appends `count` such pages to `pages`, in the order of single calls of allocate. Throws
  /// OutOfMemory with pool and `pages` unchanged.
  void allocate(std::size_t count, std::vector<PageId>& pages);
  /// Adds a reference: one more page list contains this page. Throws Error if the page is free.
  void retain(PageId page);
  /// Removes a reference. A page without references is free and reusable at once. Throws Error if
  /// it is free already.
  void release(PageId page);
  int reference_count(PageId page) const { return m_pages[page].references; }

  /// Limits slabs and claimed bytes together to `bytes` (0: no limit). Memory above a new limit is
  /// not freed.
  void set_limit(std::size_t bytes) { m_limit = bytes; }
  /// Returns the limit in bytes (0: none).
  std::size_t limit() const { return m_limit; }
  /// Counts memory beside the pool towards its limit. Throws OutOfMemory.
  void claim(std::size_t bytes);
  /// Returns claimed bytes.
  void unclaim(std::size_t bytes) { m_claimed -= bytes; }
  /// Returns the bytes of free pages and, if there is a limit, of new pages within it.
  std::size_t free_bytes() const;

  /// Returns slabs without a page in use to the system. Returns their bytes.
  std::size_t trim();

  /// Bytes of a page and of its parts.
  std::size_t page_bytes() const { return m_row_bytes + m_metadata_bytes; }
  std::size_t row_bytes() const { return m_row_bytes; }
  std::size_t metadata_bytes() const { return m_metadata_bytes; }
  std::size_t pages_in_use() const { return m_in_use; }
  std::size_t allocated_bytes() const { return m_allocated_pages * page_bytes(); }
  /// Bytes that trim() has returned so far.
  std::size_t returned_bytes() const { return m_returned_bytes; }

  /// Returns the addresses of all pages' rows, by page id, for kernels. Valid until the next
  /// allocate or trim. May allocate and wait. Throws OutOfMemory.
  AddressView addresses();
  /// Does the same for later kernels of `exec`. Waits only if another instance has written
  /// addresses since, or if the view must grow.
  AddressView addresses(const ExecutionSpace& exec);
  /// Returns the addresses of the pages' metadata as of the last call of addresses().
  AddressView metadata_addresses() const { return m_metadata_addresses; }
  PageAddress address(PageId page) const { return m_pages[page].address; }

 private:
  struct Page {
    PageAddress address;
    int references = 0;
    int slab = -1;  // -1: an id without memory behind it, free for the next slab
  };
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  struct Slab {
    // One of them, or none once returned. A View could only be aligned with slack, and the C
    // library may hand out slack that is resident.
    Kokkos::View<char*, MemorySpace> memory;
    std::unique_ptr<char, Free> huge;  // on a host, of whole huge pages
    std::vector<PageId> pages;
    std::vector<PageId> free;
    // Stores this slab's entry of m_slabs_with_free while the slab has no free page, so that no
    // release allocates.
    std::set<int>::node_type entry;
  };

  int grow(std::size_t wanted_bytes);
  PageId take();
  std::size_t drop(int index);
  std::size_t room() const;

  std::size_t m_row_bytes, m_metadata_bytes;
  MemoryMeter* m_meter;
  std::size_t m_limit = 0;
  std::size_t m_claimed = 0;
  std::vector<Page> m_pages;
  std::vector<Slab> m_slabs;
  std::vector<PageId> m_spare_ids;
  std::vector<int> m_spare_slabs;
  std::set<int> m_slabs_with_free;
  std::size_t m_in_use = 0;
  std::size_t m_allocated_pages = 0;
  std::size_t m_returned_bytes = 0;
  AddressView m_addresses, m_metadata_addresses;
  // the instance that last wrote them, unless it was waited for
  std::optional<ExecutionSpace> m_addresses_on;
  // The range of pages whose addresses the view lacks.
  static constexpr std::size_t none_stale = ~std::size_t{0};
  std::size_t m_first_stale = none_stale;
  std::size_t m_last_stale = 0;
};

/// Returns unused memory of the host allocator to the system; glibc would keep freed blocks. Does
/// nothing if the C library has no such call.
void release_unused_host_memory();

}  // namespace kvzap
