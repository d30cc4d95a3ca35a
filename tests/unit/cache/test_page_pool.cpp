#include <gtest/gtest.h>

#include <cstdint>
#include <kvzap/core/page_pool.hpp>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "unit/temporary_folder.hpp"

namespace {

using kvzap::MemoryMeter;
using kvzap::MeteredBytes;
using kvzap::PageId;
using kvzap::PagePool;
using kvzap::test::expect_error;

using Bytes = Kokkos::View<char*, kvzap::MemorySpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

Bytes page_of(const PagePool& pool, PageId page) {
  return Bytes(reinterpret_cast<char*>(pool.address(page).rows), pool.row_bytes());
}

bool holds(const PagePool& pool, PageId page, char content) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, page_of(pool, page));
  for (std::size_t i = 0; i < host.extent(0); ++i) {
    if (host(i) != content) return false;
  }
  return true;
}

TEST(PagePool, PagesAreAlignedDisjointAndListed) {
  for (std::size_t bytes : {1u, 64u, 100u, 4160u}) {
    PagePool pool(bytes);
    EXPECT_EQ(pool.page_bytes() % 64, 0u);
    EXPECT_GE(pool.page_bytes(), bytes);
    EXPECT_LT(pool.page_bytes(), bytes + 64);
    std::vector<PageId> pages;
    for (int i = 0; i < 300; ++i) {
      pages.push_back(pool.allocate());
      Kokkos::deep_copy(page_of(pool, pages.back()), static_cast<char>(i));
    }
    EXPECT_EQ(std::set<PageId>(pages.begin(), pages.end()).size(), pages.size());
    const auto addresses =
        Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, pool.addresses());
    for (int i = 0; i < 300; ++i) {
      EXPECT_EQ(pool.address(pages[i]).rows % 64, 0u);
      EXPECT_EQ(addresses(pages[i]), pool.address(pages[i]).rows);
      EXPECT_TRUE(holds(pool, pages[i], static_cast<char>(i)));
    }
  }
}

// Rows one after the other over long runs of pages, and metadata that are nobody else's.
TEST(PagePool, RowsAndNotesLieApart) {
  constexpr std::size_t rows = 1000, metadata = 20;
  PagePool pool(rows, nullptr, 0, metadata);
  EXPECT_EQ(pool.row_bytes(), 1024u);
  EXPECT_EQ(pool.metadata_bytes(), 24u);
  EXPECT_EQ(pool.page_bytes(), 1048u);
  const auto part = [](std::uintptr_t address, std::size_t bytes) {
    return Bytes(reinterpret_cast<char*>(address), bytes);
  };
  constexpr int count = 1000;
  std::vector<PageId> pages;
  int after = 0;
  for (int i = 0; i < count; ++i) {
    pages.push_back(pool.allocate());
    const kvzap::PageAddress at = pool.address(pages.back());
    EXPECT_EQ(at.rows % 64, 0u);
    EXPECT_EQ(at.metadata % 8, 0u);
    if (i > 0 && at.rows == pool.address(pages[i - 1]).rows + pool.row_bytes()) ++after;
    Kokkos::deep_copy(part(at.rows, pool.row_bytes()), static_cast<char>(i));
    Kokkos::deep_copy(part(at.metadata, pool.metadata_bytes()), static_cast<char>(i + 1));
  }
  // All but the first pages of slabs, which grow by a 128th.
  EXPECT_GT(after, count / 2);
  EXPECT_EQ(pool.allocated_bytes() % pool.page_bytes(), 0u);
  const auto addresses = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, pool.addresses());
  const auto metadata_addresses =
      Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, pool.metadata_addresses());
  for (int i = 0; i < count; ++i) {
    const kvzap::PageAddress at = pool.address(pages[i]);
    EXPECT_EQ(addresses(pages[i]), at.rows);
    EXPECT_EQ(metadata_addresses(pages[i]), at.metadata);
    const auto holds_all = [&](const Bytes& bytes, char content) {
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, bytes);
      for (std::size_t b = 0; b < host.extent(0); ++b) {
        if (host(b) != content) return false;
      }
      return true;
    };
    EXPECT_TRUE(holds_all(part(at.rows, pool.row_bytes()), static_cast<char>(i)));
    EXPECT_TRUE(holds_all(part(at.metadata, pool.metadata_bytes()), static_cast<char>(i + 1)));
  }
}

// The rest of a huge page would be resident, and slack may be.
TEST(PagePool, LargeSlabsOfAHostFillHugePages) {
  if (!Kokkos::SpaceAccessibility<Kokkos::HostSpace, kvzap::MemorySpace>::accessible) {
    GTEST_SKIP() << "slabs of a device";
  }
  constexpr std::size_t huge = std::size_t{2} << 20;
  PagePool pool(65536, nullptr, 0, 512);
  // The first and last words of a page's parts name the page.
  const auto ends = [&](PageId page) {
    auto* const rows = reinterpret_cast<std::int32_t*>(pool.address(page).rows);
    auto* const metadata = reinterpret_cast<std::int32_t*>(pool.address(page).metadata);
    return std::vector<std::int32_t*>{rows, rows + 65536 / 4 - 1, metadata, metadata + 512 / 4 - 1};
  };
  std::vector<PageId> pages;
  std::size_t large = 0;
  while (pool.allocated_bytes() < 300 * (std::size_t{1} << 20)) {
    const std::size_t before = pool.allocated_bytes();
    pages.push_back(pool.allocate());
    for (std::int32_t* end : ends(pages.back())) *end = pages.back();
    const std::size_t slab = pool.allocated_bytes() - before;
    if (slab < huge - pool.page_bytes()) continue;
    ++large;
    EXPECT_EQ(pool.address(pages.back()).rows % huge, 0u);
    EXPECT_GT(slab % huge, huge - pool.page_bytes());
  }
  EXPECT_GT(large, 40u);
  for (const PageId page : pages) {
    for (const std::int32_t* end : ends(page)) ASSERT_EQ(*end, page);
  }
  for (const PageId page : pages) pool.release(page);
  const std::size_t all = pool.allocated_bytes();
  EXPECT_EQ(pool.trim(), all);
  EXPECT_EQ(pool.allocated_bytes(), 0u);
}

TEST(PagePool, ReferencesDecideWhenAPageIsFree) {
  PagePool pool(64);
  const PageId page = pool.allocate();
  EXPECT_EQ(pool.reference_count(page), 1);
  pool.retain(page);
  EXPECT_EQ(pool.reference_count(page), 2);
  pool.release(page);
  EXPECT_EQ(pool.pages_in_use(), 1u);
  EXPECT_EQ(pool.trim(), 0u);
  pool.release(page);
  EXPECT_EQ(pool.pages_in_use(), 0u);
  expect_error([&] { pool.release(page); }, {"page 0", "twice"});
  EXPECT_EQ(pool.pages_in_use(), 0u);
  // Free again, hence reused before any new memory is taken.
  const std::size_t allocated = pool.allocated_bytes();
  EXPECT_EQ(pool.allocate(), page);
  EXPECT_EQ(pool.allocated_bytes(), allocated);
  pool.release(page);
  EXPECT_EQ(pool.trim(), allocated);
  expect_error([&] { pool.release(page); }, {"twice"});
  expect_error([] { PagePool empty(0); }, {"0 bytes"});
}

// Without frees a new slab is only taken when the one before is full, so that growth of the pool
// tells which pages share a slab.
TEST(PagePool, TrimReturnsExactlyTheIdleSlabs) {
  MemoryMeter meter;
  {
    PagePool pool(256, &meter);
    std::vector<std::vector<PageId>> slabs;
    std::vector<std::size_t> slab_bytes;
    for (int i = 0; i < 2000; ++i) {
      const std::size_t before = pool.allocated_bytes();
      const PageId page = pool.allocate();
      if (pool.allocated_bytes() > before) {
        slabs.emplace_back();
        slab_bytes.push_back(pool.allocated_bytes() - before);
      }
      slabs.back().push_back(page);
      Kokkos::deep_copy(page_of(pool, page), static_cast<char>(page));
      ASSERT_EQ(meter.current(), pool.allocated_bytes());
    }
    // Little is ever idle: a slab is at most a 64th of the pool.
    EXPECT_LE(pool.allocated_bytes(), 2000u * 256 * 65 / 64 + 256);
    ASSERT_GT(slabs.size(), 64u);
    ASSERT_GT(slab_bytes.back(), 2u * 256);

    std::mt19937 random(3);
    std::size_t expected = 0;
    std::size_t partly_used = 0;
    std::set<PageId> used;
    for (std::size_t s = 0; s < slabs.size(); ++s) {
      const int mode = static_cast<int>(random() % 3);  // drop all, some or none
      bool any_used = false;
      for (PageId page : slabs[s]) {
        if (mode == 0 || (mode == 1 && random() % 2)) {
          pool.release(page);
        } else {
          used.insert(page);
          any_used = true;
        }
      }
      if (!any_used) expected += slab_bytes[s];
      if (any_used && mode == 1 && slabs[s].size() > 1) ++partly_used;
    }
    ASSERT_GT(expected, 0u);
    ASSERT_GT(partly_used, 0u);
    const std::size_t before = pool.allocated_bytes();
    const std::size_t peak = meter.peak();
    EXPECT_EQ(pool.trim(), expected);
    EXPECT_EQ(pool.trim(), 0u);
    EXPECT_EQ(pool.returned_bytes(), expected);
    EXPECT_EQ(pool.allocated_bytes(), before - expected);
    EXPECT_EQ(meter.current(), pool.allocated_bytes());
    EXPECT_EQ(meter.peak(), peak);
    EXPECT_EQ(pool.pages_in_use(), used.size());
    for (PageId page : used) ASSERT_TRUE(holds(pool, page, static_cast<char>(page)));

    // Free pages of slabs that stayed come before new memory; ids of slabs that went are reused.
    const std::size_t free_pages = pool.allocated_bytes() / 256 - used.size();
    const std::size_t kept = pool.allocated_bytes();
    for (std::size_t i = 0; i < free_pages + 10; ++i) {
      EXPECT_EQ(pool.allocated_bytes(), kept);
      if (i == free_pages) break;
      const PageId page = pool.allocate();
      EXPECT_LT(page, 2100);
      EXPECT_TRUE(used.insert(page).second) << "page " << page << " handed out twice";
    }
    const PageId more = pool.allocate();
    EXPECT_GT(pool.allocated_bytes(), kept);
    EXPECT_TRUE(used.insert(more).second);
  }
  EXPECT_EQ(meter.current(), 0u);
}

TEST(PagePool, RandomOperationsAgreeWithACountPerPage) {
  MemoryMeter meter;
  PagePool pool(128, &meter);
  std::mt19937 random(4);
  std::map<PageId, int> references;
  std::vector<PageId> held;  // one entry per reference
  std::size_t returned = 0;
  for (int step = 0; step < 20000; ++step) {
    // Waves of growth and shrinkage, so that slabs empty.
    const bool growing = (step / 2000) % 2 == 0;
    const unsigned choice = random() % 100;
    if (choice < (growing ? 60u : 20u)) {
      const PageId page = pool.allocate();
      ASSERT_EQ(references.count(page), 0u);
      references[page] = 1;
      held.push_back(page);
    } else if (choice < 70 && !held.empty()) {
      const PageId page = held[random() % held.size()];
      pool.retain(page);
      ++references[page];
      held.push_back(page);
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      const PageId page = held.back();
      held.pop_back();
      pool.release(page);
      if (--references[page] == 0) references.erase(page);
    }
    if (step % 97 == 0) returned += pool.trim();
    ASSERT_EQ(pool.pages_in_use(), references.size());
    ASSERT_EQ(pool.returned_bytes(), returned);
    ASSERT_EQ(meter.current(), pool.allocated_bytes());
    ASSERT_GE(pool.allocated_bytes(), references.size() * pool.page_bytes());
  }
  std::set<std::uintptr_t> addresses;
  for (const auto& [page, count] : references) {
    EXPECT_EQ(pool.reference_count(page), count);
    EXPECT_TRUE(addresses.insert(pool.address(page).rows).second);
  }
  EXPECT_GT(returned, 0u);
  for (PageId page : held) pool.release(page);
  pool.trim();
  EXPECT_EQ(pool.allocated_bytes(), 0u);
}

TEST(MeteredBytes, FollowItsOwner) {
  MemoryMeter meter;
  {
    MeteredBytes first(&meter, 100);
    MeteredBytes second(&meter, 10);
    EXPECT_EQ(meter.current(), 110u);
    second = std::move(first);
    EXPECT_EQ(second.bytes(), 100u);
    EXPECT_EQ(meter.current(), 100u);
    const MeteredBytes third(std::move(second));
    EXPECT_EQ(meter.current(), 100u);
    second = MeteredBytes(&meter, 1);
    EXPECT_EQ(meter.current(), 101u);
  }
  EXPECT_EQ(meter.current(), 0u);
  EXPECT_EQ(meter.peak(), 110u);
}

}  // namespace
