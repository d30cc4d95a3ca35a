// Fixed-size, reference-counted pages from which every head, layer and sequence takes its storage.
#pragma once

#include <cstdint>
#include <kvzap/core/types.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvzap {

/// Counts the bytes that a cache and the prefill beside it hold, and the most they ever held.
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

/// Counts `bytes` on a meter for as long as it lives.
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

/// There is no memory, or the limit that the caller has set leaves none: something can be freed,
/// and the call be made again. What threw it has changed nothing.
class OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& what, std::size_t wanted, std::size_t free)
      : Error(what), bytes_wanted(wanted), bytes_free(free) {}
  /// What was asked for.
  std::size_t bytes_wanted;
  /// What pages without an owner and the limit leave; without a limit the pages alone.
  std::size_t bytes_free;
};

/// Names a page of a pool; a released page's id is used again.
using PageId = std::int32_t;

/// Where a page's two parts begin: keys and values, and what is noted of their rows.
struct PageAddress {
  std::uintptr_t rows = 0;
  std::uintptr_t notes = 0;
};

/// Pages of one size, in two parts: the bytes that every decode step reads, its rows, and a few
/// more, its notes. The rows of a slab's pages lie one behind the other, so that pages that were
/// taken one after the other are read as one stream, and all notes behind them. Memory comes in
/// slabs that grow with the pool (a 128th of it, or a 64th once that fills huge pages, so that
/// little is ever idle); a page is taken from the oldest slab that has one free, so that young
/// slabs drain and can be handed back by trim(). allocate, retain and release cost O(log slabs);
/// only allocate takes memory, so that only it can run out of it.
///
/// Not thread-safe: one host thread drives one pool.
class PagePool {
 public:
  using AddressView = Kokkos::View<std::uintptr_t*, MemorySpace>;

  /// row_bytes, of a page's rows, is rounded up to a multiple of 64, so that they are aligned to 64
  /// bytes, and note_bytes to one of 8. `meter`, if given, outlives the pool and is told of every
  /// slab. `limit`: see set_limit.
  explicit PagePool(std::size_t row_bytes, MemoryMeter* meter = nullptr, std::size_t limit = 0,
                    std::size_t note_bytes = 0);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  /// A page with reference count 1 and unspecified content. Throws OutOfMemory.
  PageId allocate();
  /// Adds `count` such pages to the end of `pages`, in the order in which allocate would give them.
  /// Throws OutOfMemory with pool and `pages` as they were.
  void allocate(std::size_t count, std::vector<PageId>& pages);
  /// One more page list holds this page.
  void retain(PageId page);
  /// One page list fewer holds it; with the last one the page is free, reusable at once.
  void release(PageId page);
  int reference_count(PageId page) const { return m_pages[page].references; }

  /// Slabs and what claim has taken never exceed so many bytes; 0: no limit. What is there already
  /// stays.
  void set_limit(std::size_t bytes) { m_limit = bytes; }
  /// What set_limit was last given.
  std::size_t limit() const { return m_limit; }
  /// Counts memory beside the pool towards its limit. Throws OutOfMemory.
  void claim(std::size_t bytes);
  /// Gives back what claim has taken.
  void unclaim(std::size_t bytes) { m_claimed -= bytes; }
  /// What can be had within the limit: bytes of free pages, and of new ones if there is a limit.
  std::size_t free_bytes() const;

  /// Gives slabs without a page in use back to the system. Returns their bytes.
  std::size_t trim();

  /// Bytes of a page, and of its parts.
  std::size_t page_bytes() const { return m_row_bytes + m_note_bytes; }
  std::size_t row_bytes() const { return m_row_bytes; }
  std::size_t note_bytes() const { return m_note_bytes; }
  std::size_t pages_in_use() const { return m_in_use; }
  std::size_t allocated_bytes() const { return m_allocated_pages * page_bytes(); }
  /// Bytes that trim() has given back so far.
  std::size_t returned_bytes() const { return m_returned_bytes; }

  /// Where the rows of every page begin, by page id, for kernels. Valid until the next allocate or
  /// trim.
  AddressView addresses();
  /// The same for kernels that follow on `exec`, which as a rule is not waited for; but for another
  /// instance that has written addresses since.
  AddressView addresses(const ExecutionSpace& exec);
  /// Where their notes begin, as of the last call of addresses().
  AddressView note_addresses() const { return m_note_addresses; }
  PageAddress address(PageId page) const { return m_pages[page].address; }

 private:
  struct Page {
    PageAddress address;
    int references = 0;
    int slab = -1;  // -1: an id without memory behind it, free for the next slab
  };
  struct Slab {
    Kokkos::View<char*, MemorySpace> memory;  // empty once handed back
    std::vector<PageId> pages;
    std::vector<PageId> free;
    // This slab's entry in m_slabs_with_free while it has none, so that no release allocates.
    std::set<int>::node_type entry;
  };

  int grow(std::size_t wanted_bytes);
  PageId take();
  std::size_t drop(int index);
  std::size_t room() const;

  std::size_t m_row_bytes, m_note_bytes;
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
  AddressView m_addresses, m_note_addresses;
  std::optional<ExecutionSpace> m_addresses_on;  // where they were last written, unless waited for
  // Pages whose addresses have yet to be written there.
  static constexpr std::size_t none_stale = ~std::size_t{0};
  std::size_t m_first_stale = none_stale;
  std::size_t m_last_stale = 0;
};

/// Hands memory that the host allocator holds but no longer uses back to the system (glibc keeps
/// freed blocks otherwise). Does nothing where the C library has no such call.
void release_unused_host_memory();

}  // namespace kvzap
