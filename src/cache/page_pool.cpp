#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <kvzap/core/page_pool.hpp>
#include <limits>
#include <new>

#include "base/huge_pages.hpp"
#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "cache/instance_order.hpp"
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace kvzap {
namespace {
constexpr std::size_t page_alignment = 64;
constexpr std::size_t metadata_alignment = 8;
constexpr std::size_t largest_slab_bytes = std::size_t{4} << 20;
// A new slab adds this fraction of the pool: the largest fraction that is idle while the pool
// grows. Twice as much if that fills huge pages.
constexpr std::size_t slab_fraction = 128;
constexpr std::size_t huge_slab_fraction = 64;
}  // namespace

PagePool::PagePool(std::size_t row_bytes, MemoryMeter* meter, std::size_t limit,
                   std::size_t metadata_bytes)
    : m_row_bytes((row_bytes + page_alignment - 1) / page_alignment * page_alignment),
      m_metadata_bytes((metadata_bytes + metadata_alignment - 1) / metadata_alignment *
                       metadata_alignment),
      m_meter(meter),
      m_limit(limit) {
  if (row_bytes == 0) throw Error("page pool: a page of 0 bytes");
}

PagePool::~PagePool() {
  if (m_meter) m_meter->subtract(allocated_bytes());
}

std::size_t PagePool::room() const {
  if (m_limit == 0) return std::numeric_limits<std::size_t>::max();
  const std::size_t used = allocated_bytes() + m_claimed;
  return used < m_limit ? m_limit - used : 0;
}

std::size_t PagePool::free_bytes() const {
  const std::size_t idle = (m_allocated_pages - m_in_use) * page_bytes();
  return m_limit == 0 ? idle : idle + room() / page_bytes() * page_bytes();
}

void PagePool::claim(std::size_t bytes) {
  if (bytes > room()) {
    throw OutOfMemory(
        fmt::format(
            "out of memory: {} bytes wanted; pages, rings and states hold {} of at most {} bytes",
            bytes, allocated_bytes() + m_claimed, m_limit),
        bytes, room());
  }
  m_claimed += bytes;
}

// Adds a slab and returns its index. wanted_bytes: the bytes that the caller needs, for the
// message.
int PagePool::grow(std::size_t wanted_bytes) {
  const std::size_t most = std::max<std::size_t>(1, largest_slab_bytes / page_bytes());
  const bool fills_huge_pages =
      allocated_bytes() / huge_slab_fraction >= base::huge_page_bytes + page_bytes();
  std::size_t count = std::min(
      std::clamp<std::size_t>(
          m_allocated_pages / (fills_huge_pages ? huge_slab_fraction : slab_fraction), 1, most),
      room() / page_bytes());
  // On a host, large slabs are aligned to huge pages: attention then reads scattered pages up to a
  // third faster. They fill whole huge pages, because the rest of one would be resident.
  const bool huge = base::runs_on_host && count * page_bytes() >= base::huge_page_bytes;
  if (huge) {
    const std::size_t whole = count * page_bytes() / base::huge_page_bytes * base::huge_page_bytes;
    count = std::max<std::size_t>(1, whole / page_bytes());
  }
  if (count == 0) {
    throw OutOfMemory(
        fmt::format("out of memory: the page pool holds {} bytes, beside {} of rings, of at most "
                    "{}; {} more wanted",
                    allocated_bytes(), m_claimed, m_limit, wanted_bytes),
        wanted_bytes, free_bytes());
  }
  if (m_pages.size() + count > static_cast<std::size_t>(std::numeric_limits<PageId>::max())) {
    throw Error(fmt::format("page pool: more than {} pages; use larger pages",
                            std::numeric_limits<PageId>::max()));
  }
  Slab slab;
  const std::size_t bytes = count * page_bytes();
  const std::size_t whole =
      (bytes + base::huge_page_bytes - 1) / base::huge_page_bytes * base::huge_page_bytes;
  try {
    base::before_allocation(bytes);
    if (huge) {
      slab.huge.reset(static_cast<char*>(std::aligned_alloc(base::huge_page_bytes, whole)));
      if (!slab.huge) throw std::bad_alloc();
    } else {
      // The slack allows an aligned first page at any address of the allocator.
      slab.memory = Kokkos::View<char*, MemorySpace>(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::page_pool::slab"),
          bytes + page_alignment);
    }
    // Everything that can fail happens before any change. trim and release need space in these
    // lists.
    slab.pages.reserve(count);
    slab.free.reserve(count);
    base::reserve_more(m_pages, count);
    base::reserve_room(m_spare_ids, m_pages.size() + count);
    base::reserve_more(m_slabs, 1);
    base::reserve_room(m_spare_slabs, m_slabs.size() + 1);
    std::set<int> entry;
    entry.insert(0);
    slab.entry = entry.extract(entry.begin());
  } catch (const std::exception&) {
    throw OutOfMemory(
        fmt::format("out of memory: the page pool holds {} bytes and could not get {} more",
                    allocated_bytes(), bytes),
        wanted_bytes, free_bytes());
  }
  const auto base = reinterpret_cast<std::uintptr_t>(huge ? slab.huge.get() : slab.memory.data());
  const auto first = (base + page_alignment - 1) / page_alignment * page_alignment;
  const auto first_note = first + count * m_row_bytes;
  // A last huge page that is not nearly full stays small pages.
  if (huge) {
    const std::size_t most_slack = bytes / 32;
    const std::size_t small = whole - bytes > most_slack ? base::huge_page_bytes : 0;
    base::advise_fresh_huge_pages(slab.huge.get(), whole - small);
  }

  int index = static_cast<int>(m_slabs.size());
  if (m_spare_slabs.empty()) {
    m_slabs.emplace_back();
  } else {
    index = m_spare_slabs.back();
    m_spare_slabs.pop_back();
  }
  for (std::size_t i = 0; i < count; ++i) {
    PageId id = static_cast<PageId>(m_pages.size());
    if (m_spare_ids.empty()) {
      m_pages.emplace_back();
    } else {
      id = m_spare_ids.back();
      m_spare_ids.pop_back();
    }
    m_pages[id] = {{first + i * m_row_bytes, first_note + i * m_metadata_bytes}, 0, index};
    m_first_stale = std::min<std::size_t>(m_first_stale, id);
    m_last_stale = std::max<std::size_t>(m_last_stale, id);
    slab.pages.push_back(id);
  }
  slab.free.assign(slab.pages.rbegin(), slab.pages.rend());
  slab.entry.value() = index;
  m_slabs_with_free.insert(std::move(slab.entry));
  m_slabs[index] = std::move(slab);
  m_allocated_pages += count;
  if (m_meter) m_meter->add(bytes);
  return index;
}

// Takes a page from the oldest slab with a free one. There must be one.
PageId PagePool::take() {
  const auto oldest = m_slabs_with_free.begin();
  Slab& slab = m_slabs[*oldest];
  const PageId page = slab.free.back();
  slab.free.pop_back();
  if (slab.free.empty()) slab.entry = m_slabs_with_free.extract(oldest);
  m_pages[page].references = 1;
  ++m_in_use;
  return page;
}

PageId PagePool::allocate() {
  if (m_slabs_with_free.empty()) grow(page_bytes());
  return take();
}

void PagePool::allocate(std::size_t count, std::vector<PageId>& pages) {
  if (count == 0) return;
  const std::size_t wanted = count * page_bytes();
  const std::size_t idle = m_allocated_pages - m_in_use;
  if (count > idle && (count - idle) > room() / page_bytes()) {
    throw OutOfMemory(fmt::format("out of memory: {} bytes of pages wanted, {} can be had of at "
                                  "most {} for pages, rings and states",
                                  wanted, free_bytes(), m_limit),
                      wanted, free_bytes());
  }
  try {
    base::reserve_more(pages, count);
  } catch (const std::bad_alloc&) {
    throw OutOfMemory("out of memory: no room for a list of pages", wanted, free_bytes());
  }
  // Free pages of old slabs are taken first, so in the end only the last new slab can have free
  // pages.
  const std::size_t before = pages.size();
  const PageId* const first_new = pages.data() + before;
  try {
    while (pages.size() < before + count) pages.push_back(allocate());
  } catch (...) {
    // Frees the slabs that this call has added. They are full of pages of this call, which identify
    // them.
    const std::size_t taken = pages.size() - before;
    for (std::size_t i = 0; i < taken; ++i) release(first_new[i]);
    for (std::size_t i = idle; i < taken; ++i) {
      const int slab = m_pages[first_new[i]].slab;
      if (slab < 0) continue;  // its slab was freed with an earlier page
      const std::size_t bytes = drop(slab);
      if (m_meter) m_meter->subtract(bytes);
    }
    pages.resize(before);
    throw;
  }
}

void PagePool::retain(PageId page) {
  Page& entry = m_pages[page];
  if (entry.references < 1) throw Error(fmt::format("page pool: page {} retained when free", page));
  ++entry.references;
}

void PagePool::release(PageId page) {
  Page& entry = m_pages[page];
  if (entry.references < 1) throw Error(fmt::format("page pool: page {} released twice", page));
  if (--entry.references > 0) return;
  Slab& slab = m_slabs[entry.slab];
  slab.free.push_back(page);
  if (!slab.entry.empty()) m_slabs_with_free.insert(std::move(slab.entry));
  --m_in_use;
}

// Returns a slab without a page in use to the system. Returns its bytes.
std::size_t PagePool::drop(int index) {
  Slab& slab = m_slabs[index];
  for (PageId page : slab.pages) {
    m_pages[page] = {};
    m_spare_ids.push_back(page);
  }
  const std::size_t bytes = slab.pages.size() * page_bytes();
  m_allocated_pages -= slab.pages.size();
  slab = {};
  m_spare_slabs.push_back(index);
  m_slabs_with_free.erase(index);
  return bytes;
}

std::size_t PagePool::trim() {
  std::size_t bytes = 0;
  for (auto it = m_slabs_with_free.begin(); it != m_slabs_with_free.end();) {
    const int index = *it++;
    if (m_slabs[index].free.size() == m_slabs[index].pages.size()) bytes += drop(index);
  }
  if (bytes > 0) {
    m_returned_bytes += bytes;
    if (m_meter) m_meter->subtract(bytes);
  }
  return bytes;
}

PagePool::AddressView PagePool::addresses() {
  if (m_first_stale > m_last_stale) return m_addresses;
  if (m_addresses.extent(0) < m_pages.size()) {
    try {
      const std::size_t size = std::max<std::size_t>(64, m_pages.size() * 3 / 2);
      ++base::memory_moves;
      base::before_allocation(2 * size * sizeof(std::uintptr_t));
      const AddressView rows(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::page_pool::addresses"), size);
      m_metadata_addresses = AddressView(
          Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::page_pool::metadata_addresses"),
          size);
      m_addresses = rows;
    } catch (const std::exception&) {
      throw OutOfMemory("out of memory: no room for the addresses of pages",
                        m_pages.size() * sizeof(std::uintptr_t), free_bytes());
    }
    m_first_stale = 0;
    m_last_stale = m_pages.size() - 1;
  }
  const auto bring = [&](const AddressView& target, std::uintptr_t PageAddress::*part) {
    const auto stale = Kokkos::subview(target, std::make_pair(m_first_stale, m_last_stale + 1));
    const auto host = Kokkos::create_mirror_view(stale);
    for (std::size_t i = 0; i < host.extent(0); ++i) {
      host(i) = m_pages[m_first_stale + i].address.*part;
    }
    Kokkos::deep_copy(stale, host);
  };
  bring(m_addresses, &PageAddress::rows);
  bring(m_metadata_addresses, &PageAddress::metadata);
  m_first_stale = none_stale;
  m_last_stale = 0;
  return m_addresses;
}

namespace {

/// New addresses, passed as arguments of a kernel.
struct NewAddresses {
  static constexpr int most = 16;
  PageAddress address[most];
  std::int64_t first = 0;
  int count = 0;
};

void write_addresses(const ExecutionSpace& exec, const PagePool::AddressView& rows,
                     const PagePool::AddressView& metadata, const NewAddresses& entries) {
  Kokkos::parallel_for(
      "kvzap::page_pool::addresses", Kokkos::RangePolicy<ExecutionSpace>(exec, 0, entries.count),
      KOKKOS_LAMBDA(int i) {
        rows(entries.first + i) = entries.address[i].rows;
        metadata(entries.first + i) = entries.address[i].metadata;
      });
}

}  // namespace

PagePool::AddressView PagePool::addresses(const ExecutionSpace& exec) {
  if (m_addresses_on && !cache::in_order(*m_addresses_on, exec)) {
    cache::follow(*m_addresses_on, exec, "kvzap::page_pool: addresses were written elsewhere");
    m_addresses_on.reset();
  }
  if (m_first_stale > m_last_stale) return m_addresses;
  if (m_addresses.extent(0) < m_pages.size()) return addresses();
  m_addresses_on = exec;
  NewAddresses entries;
  entries.first = m_first_stale;
  for (std::size_t page = m_first_stale; page <= m_last_stale; ++page) {
    entries.address[entries.count++] = m_pages[page].address;
    if (entries.count < NewAddresses::most && page < m_last_stale) continue;
    write_addresses(exec, m_addresses, m_metadata_addresses, entries);
    entries.first += entries.count;
    entries.count = 0;
  }
  m_first_stale = none_stale;
  m_last_stale = 0;
  return m_addresses;
}

void release_unused_host_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace kvzap
